"""What loads and stores ask of the first-level cache, counted by hand; and the work between offsets."""

from __future__ import annotations

import re

import pytest

from forecast_autotune.features.cost import CostBreakdown, FactColumns, costs
from forecast_autotune.features.devices import device_spec
from forecast_autotune.features.trace import trace
from forecast_autotune.features.ttir.coalescing import COUNTED_WARPS
from forecast_autotune.features.ttir.extraction import TtirFacts, extract_facts
from forecast_autotune.records import Argument, Config, Device

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

import triton.language as tl

from tests.core.features.traced import gathered, read

F16, F32, I32 = torch.float16, torch.float32, torch.int32


def asked(got: TtirFacts, warps: int) -> tuple[float, float]:
    """(instructions, lines) with so many warps."""
    return getattr(got, f"accesses_{warps}"), getattr(got, f"lines_{warps}")


@triton.jit
def copy(x, y, N, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + i, tl.load(x + i, mask=i < N), mask=i < N)


@triton.jit(do_not_specialize=["N"])
def copy_of_any_length(x, y, N, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + i, tl.load(x + i, mask=i < N), mask=i < N)


@triton.jit
def apart(x, y, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + i, tl.load(x + 2 * i))


def test_the_formula_charges_for_lines_and_for_instructions() -> None:
    aligned = read(copy, ((F16, 1 << 24), (F16, 1 << 24), 1 << 24), {"B": 1024}, (1 << 14,))
    parted = read(copy, ((F16, 1 << 24), (F16, 1 << 24), (1 << 24) - 5), {"B": 1024}, (1 << 14,))
    configs = [Config((), warps, 1) for warps in (1, 32, 24)]
    h200 = device_spec(Device("NVIDIA H200", "cuda", "90"))

    def near(got: TtirFacts) -> CostBreakdown:
        return costs(FactColumns.of([got] * 3), [(1 << 14,)] * 3, configs, h200)

    good, bad = near(aligned), near(parted)
    assert bad.memory_ms[0] > 1.5 * good.memory_ms[0]
    # One warp, 8 elements a thread: 8 times the instructions over the same lines. With 32 warps, one each.
    assert (bad.requests_ms / good.requests_ms)[0] == pytest.approx(8)
    assert (bad.lines_ms / good.lines_ms)[:2] == pytest.approx([8, 1])
    # Between two numbers of warps that were counted, the nearer one's.
    assert bad.lines_ms[2] == bad.lines_ms[1]


@triton.jit
def in_steps(x, y, N, B: tl.constexpr):
    o = tl.arange(0, B)
    at, total = x + tl.program_id(0) * N, tl.zeros((B,), tl.float32)
    for start in range(0, N, B):
        total += tl.load(at + start + o)
    tl.store(y + tl.program_id(0) * B + o, total)


def test_aligned_runs_move_16_bytes_per_thread_and_every_line_once() -> None:
    got = read(copy, ((F16, 65536), (F16, 65536), 65536), {"B": 1024})
    # 2048 bytes each way: 4 instructions of 512 bytes, 4 lines each.
    assert asked(got, 1) == asked(got, 4) == (8, 32)
    # Fewer elements per thread: more instructions for the same lines ...
    assert asked(got, 8) == (16, 32)
    # ... until threads repeat what others load, which they do not when they store.
    few = read(copy, ((F16, 65536), (F16, 65536), 65536), {"B": 64})
    assert asked(few, 8) == (8 + 2, 8 + 2)


def test_a_mask_that_ends_anywhere_parts_neighbours_but_not_their_layout() -> None:
    got = read(copy, ((F16, 65536), (F16, 65536), 65531), {"B": 1024})
    # One warp holds 8 neighbours per thread and moves them one by one, each instruction over all 4 lines.
    assert asked(got, 1) == (64, 64 * 4)
    assert asked(got, 32) == (64, 64)


def test_a_length_that_the_compiler_is_not_told_parts_neighbours_however_even_it_is() -> None:
    data, untold = (
        read(fn, ((F16, 65536), (F16, 65536), 65536), {"B": 1024}) for fn in (copy, copy_of_any_length)
    )
    assert asked(data, 1) == (8, 32)
    assert asked(untold, 1) == (64, 64 * 4)


def test_a_text_that_tells_of_no_parameter_is_read_by_the_values() -> None:
    arguments = [Argument("x", "tensor", "float16", (65536,)), Argument("y", "tensor", "float16", (65536,))]
    live = [torch.empty(65536, dtype=F16, device="meta")] * 2
    text = re.sub(r" \{tt\.divisibility = 16 : i32\}", "", trace(copy, [*live, 65536], {}, {"B": 1024}))
    even, odd = (
        extract_facts(text, [*arguments, Argument("N", "scalar", value=n)], (64,)) for n in (65536, 65531)
    )
    assert (asked(even, 1), asked(odd, 1)) == ((8, 32), (64, 64 * 4))


def test_strided_loads_touch_more_lines_the_more_a_thread_holds() -> None:
    got = read(apart, ((F32, 65536), (F32, 65536)), {"B": 1024})
    store = {warps: (8.0 if warps <= 8 else 16.0 if warps == 16 else 32.0) for warps in COUNTED_WARPS}
    assert [asked(got, warps)[0] - store[warps] for warps in COUNTED_WARPS] == [32] * 6
    # 32 lanes, 8 bytes apart for each element that a thread holds: 2 lines with one, 8 with four.
    assert [asked(got, warps)[1] - 32 for warps in COUNTED_WARPS] == [32 * 8] * 4 + [32 * 4, 32 * 2]


@pytest.mark.parametrize(("length", "vector"), [(4096, 4), (4100, 1)])
def test_steps_of_a_loop_keep_what_they_are_multiples_of(length: int, vector: int) -> None:
    got = read(in_steps, ((F32, 1 << 20), (F32, 65536), length), {"B": 256})
    trips = -(-length // 256)
    assert asked(got, 1)[0] == pytest.approx(trips * 8 / vector + 2)


def test_gathered_elements_have_a_line_each() -> None:
    got = read(gathered, ((F32, 65536), (I32, 65536), (F32, 65536)), {"B": 128})
    assert asked(got, 4) == (4 + 4 + 4, 128 + 4 + 4)


@triton.jit
def between(x, offsets, y, B: tl.constexpr):
    o = tl.arange(0, B)
    total = tl.zeros((B,), tl.float32)
    at = offsets + tl.program_id(0)
    start = tl.load(at)
    length = tl.load(at + 1) - start
    for step in range(0, length, B):
        total += tl.load(x + start + step + o, mask=step + o < length)
    tl.store(y + tl.program_id(0) * B + o, total)


@triton.jit
def longest_of(x, offsets, y, R: tl.constexpr, B: tl.constexpr):
    row = tl.program_id(0) * R + tl.arange(0, R)
    o = tl.arange(0, B)
    start = tl.load(offsets + row)
    end = tl.load(offsets + row + 1)
    total = tl.zeros((R, B), tl.float32)
    for step in range(0, tl.max(end - start, axis=0), B):
        i = start[:, None] + step + o[None, :]
        total += tl.load(x + i, mask=i < end[:, None])
    tl.store(y + row, tl.sum(total, axis=1))


def test_offsets_share_the_rows_of_the_longest_tensor_evenly() -> None:
    parts = read(between, ((F32, 32768), (I32, 65), (F32, 64 * 128)), {"B": 128})
    assert (parts.loop_trips, parts.unknown_trips) == (512 / 128, 1)
    rows = read(longest_of, ((F32, 32768), (I32, 1025), (F32, 1024)), {"R": 16, "B": 8})
    assert rows.loop_trips == 32 / 8
