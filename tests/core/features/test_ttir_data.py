"""Loops whose length data decide, and accesses whose place they decide: what is assumed, what known."""

from __future__ import annotations

from typing import Any

import pytest

from forecast_autotune.features.ttir.extraction import ASSUMED_EXTENT, TtirFacts, extract_facts
from forecast_autotune.records import Argument

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

import triton.language as tl

from forecast_autotune.features.trace import trace


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")


def measure(fn: Any, args: tuple[Any, ...], meta: dict[str, int], grid: tuple[int, ...]) -> TtirFacts:
    """Facts of a kernel called with pointers (given as their dtype) and integers."""
    live = [a if isinstance(a, int) else torch.empty(4096, dtype=a, device="meta") for a in args]
    described = [
        Argument(name, "scalar", value=a) if isinstance(a, int) else Argument(name, "tensor", str(a.dtype))
        for name, a in zip(fn.arg_names, live, strict=False)
    ]
    return extract_facts(trace(fn, live, {}, meta), described, grid)


F32, I32 = torch.float32, torch.int32


@triton.jit
def to_a_length(x, lengths, y, B: tl.constexpr):
    o = tl.arange(0, B)
    total = tl.zeros((B,), tl.float32)
    for start in range(0, tl.load(lengths + tl.program_id(0)), B):
        total += tl.load(x + start + o)
    tl.store(y + o, total)


@triton.jit
def between_places(x, places, y, B: tl.constexpr):
    o = tl.arange(0, B)
    total = tl.zeros((B,), tl.float32)
    at = places + tl.program_id(0)
    for start in range(tl.load(at), tl.load(at + 1), B):
        total += tl.load(x + start + o)
    tl.store(y + o, total)


@triton.jit
def split_evenly(x, lengths, y, B: tl.constexpr):
    o = tl.arange(0, B)
    total = tl.zeros((B,), tl.float32)
    length = tl.load(lengths + tl.program_id(0))
    share = tl.cdiv(length, tl.num_programs(1))
    first = share * tl.program_id(1)
    for start in range(first, tl.minimum(first + share, length), B):
        total += tl.load(x + start + o)
    tl.store(y + o, total)


@pytest.mark.parametrize("block", [16, 64, 256])
def test_a_loaded_length_is_the_same_for_every_tile(block: int) -> None:
    for fn, parts in ((to_a_length, 1), (between_places, 1), (split_evenly, 4)):
        got = measure(fn, (F32, I32, F32), {"B": block}, (8, parts))
        assert got.loop_trips == ASSUMED_EXTENT / parts / block
        assert got.unknown_trips == 1


@triton.jit
def whole_tiles_then_the_rest(x, lengths, y, B: tl.constexpr):
    o = tl.arange(0, B)
    total = tl.zeros((B,), tl.float32)
    length = tl.load(lengths)
    whole = length // B * B
    for start in range(0, whole, B):
        total += tl.load(x + start + o)
    for start in range(whole, length, B):
        total += tl.load(x + start + o, mask=start + o < length)
    tl.store(y + o, total)


def test_the_rest_of_a_loaded_length_is_one_tile() -> None:
    got = measure(whole_tiles_then_the_rest, (F32, I32, F32), {"B": 64}, (8,))
    assert got.iterations == ASSUMED_EXTENT / 64 + 1
    assert got.unknown_trips == 2


@triton.jit
def in_rounds(x, sizes, y, groups, B: tl.constexpr, PROGRAMS: tl.constexpr):
    o = tl.arange(0, B)
    tile = tl.program_id(0)
    before = 0
    for group in range(0, groups):
        until = before + tl.cdiv(tl.load(sizes + group), B)
        while tile < until:
            tl.store(y + tile * B + o, tl.load(x + tile * B + o))
            tile += PROGRAMS
        before = until


@pytest.mark.parametrize(("block", "programs"), [(4, 32), (16, 32), (4, 8)])
def test_programs_that_go_on_where_a_round_ended_share_the_work(block: int, programs: int) -> None:
    got = measure(in_rounds, (F32, I32, F32, 6), {"B": block, "PROGRAMS": programs}, (programs,))
    assert got.store_ops == pytest.approx(6 * ASSUMED_EXTENT / block / programs, rel=0.1)


@triton.jit
def by_pixel(x, y, width, pitch, total, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + i, tl.load(x + i // width * pitch + i % width, mask=i < total))


@pytest.mark.parametrize(("width", "run"), [(48, 48), (4096, 256), (1000, 256)])
def test_runs_end_where_a_wrapped_index_wraps(width: int, run: int) -> None:
    got = measure(by_pixel, (F32, F32, width, 8192, 65536), {"B": 256}, (256,))
    assert got.mean_contiguous == (run + 256) / 2


@triton.jit
def rows_of(x, index, y, N, B: tl.constexpr, ROWS: tl.constexpr):
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o = tl.arange(0, B)
    row = tl.load(index + r)
    tl.store(y + r[:, None] * N + o[None, :], tl.load(x + row[:, None] * N + o[None, :]))


def test_gathered_rows_are_contiguous_within_themselves() -> None:
    got = measure(rows_of, (F32, I32, F32, 4096), {"B": 128, "ROWS": 8}, (16,))
    tile, indices = 4 * 8 * 128, 4 * 8
    assert got.mean_contiguous == pytest.approx((2 * tile * 128 + indices * 8) / (2 * tile + indices))
    # The addresses of a tile are made anew from the numbers of its rows, which the tile replaces.
    assert got.live_bytes == tile


@triton.jit
def safely(x, y, N, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + i, tl.load(x + tl.where(i < N, i, 0)), mask=i < N)


def test_a_safe_index_for_the_lanes_beyond_the_end_leaves_runs_whole() -> None:
    assert measure(safely, (F32, F32, 1000), {"B": 128}, (8,)).mean_contiguous == 128
