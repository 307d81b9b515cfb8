"""Which candidates compile to the same program: what is said from IR beside what Triton compiles."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from forecast_autotune.features.candidate_list import CandidateList
from forecast_autotune.features.inert_parameters import program_numbers
from forecast_autotune.features.ttir.facts import TtirFacts
from forecast_autotune.records import Candidate, Config

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.core.features.traced import read

F16, F32 = torch.float16, torch.float32
STAGES = (1, 2, 3, 4)


@triton.jit
def straight(x, y, N, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + i, tl.exp(tl.load(x + i, mask=i < N).to(tl.float32)), mask=i < N)


@triton.jit
def row_sum(x, y, N, B: tl.constexpr):
    total = tl.zeros((B,), tl.float32)
    for start in range(0, N, B):
        total += tl.load(x + tl.program_id(0) * N + start + tl.arange(0, B)).to(tl.float32)
    tl.store(y + tl.program_id(0), tl.sum(total))


@triton.jit
def straight_dot(x, y, N, B: tl.constexpr):
    at = tl.arange(0, B)[:, None] * N + tl.arange(0, B)[None, :]
    tile = tl.load(x + at)
    tl.store(y + at, tl.dot(tile, tile))


@triton.jit
def dot_beside_a_loop(x, y, N, B: tl.constexpr):
    at = tl.arange(0, B)[:, None] * N + tl.arange(0, B)[None, :]
    total = tl.zeros((B, B), tl.float32)
    for start in range(0, N, B):
        total += tl.load(x + at + start).to(tl.float32)
    tile = total.to(tl.float16)
    tl.store(y + at, tl.dot(tile, tile))


@triton.jit
def looped_dot(x, y, N, B: tl.constexpr):
    at = tl.arange(0, B)[:, None] * N + tl.arange(0, B)[None, :]
    total = tl.zeros((B, B), tl.float32)
    for start in range(0, N, B):
        tile = tl.load(x + at + start)
        total = tl.dot(tile, tile, total)
    tl.store(y + at, total)


KERNELS = (straight, row_sum, straight_dot, dot_beside_a_loop, looped_dot)


def facts(kernel: Any) -> TtirFacts:
    return read(kernel, ((F16, 1 << 20), (F32, 1 << 20), 1024), {"B": 64})


def ptx(kernel: Any, stages: int) -> str:
    """What one config compiles to, without where its lines come from."""
    signature = {"x": "*fp16", "y": "*fp32", "N": "i32", "B": "constexpr"}
    even = {(place,): [["tt.divisibility", 16]] for place in range(3)}
    source = ASTSource(kernel, signature, {"B": 64}, even)
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_stages": stages})
    return re.sub(r"//.*|\\.loc.*|\\.file.*", "", str(result.asm["ptx"]).split(".section")[0])


def numbers(value: Callable[[int], TtirFacts | None], stages: Sequence[int] = STAGES) -> list[int]:
    listed = CandidateList.of([Candidate(Config.of({"B": 64}, num_warps=4, num_stages=s)) for s in stages])
    result: list[int] = program_numbers(listed, value).tolist()
    return result


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_what_shares_a_number_compiles_to_the_same(kernel: Any) -> None:
    known = facts(kernel)
    answer = numbers(lambda row: known)
    texts: dict[int, set[str]] = {}
    for number, stages in zip(answer, STAGES, strict=True):
        texts.setdefault(number, set()).add(ptx(kernel, stages))
    assert [len(same) for same in texts.values()] == [1] * len(texts)


def test_stages_count_where_a_loop_holds_a_dot() -> None:
    known = {kernel: facts(kernel) for kernel in KERNELS}
    assert [len(set(numbers(lambda row, k=kernel: known[k]))) for kernel in KERNELS] == [1, 1, 1, 1, 4]


def test_whatever_else_differs_makes_another_program() -> None:
    known = facts(straight)
    listed = CandidateList.of(
        [
            Candidate(Config.of({"B": 64}, num_warps=4, num_stages=2)),
            Candidate(Config.of({"B": 64}, num_warps=8, num_stages=2)),
            Candidate(Config.of({"B": 32}, num_warps=4, num_stages=2)),
            Candidate(Config.of({"B": 64}, num_warps=4, num_stages=3)),
            Candidate(Config.of({"B": 64}, num_warps=4, num_stages=3), "other"),
        ]
    )
    assert program_numbers(listed, lambda row: known).tolist() == [0, 1, 2, 0, 3]
