"""What decides times beyond bytes and FLOPs, counted by hand, and what the formula makes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forecast_autotune.features.cost import CostBreakdown, CostConstants, FactColumns, costs
from forecast_autotune.features.devices import device_spec
from forecast_autotune.features.ttir.extraction import TtirFacts
from forecast_autotune.records import Config, Device

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

import triton.language as tl

from tests.core.features.traced import gathered, read

F16, F32, I32 = torch.float16, torch.float32, torch.int32
H200 = device_spec(Device("NVIDIA H200", "cuda", "90"))


def costed(
    got: TtirFacts, grid: tuple[int, ...], *warps: int, constants: CostConstants | None = None
) -> CostBreakdown:
    """The formula for one program in several numbers of warps."""
    n = len(warps)
    return costs(
        FactColumns.of([got] * n), [grid] * n, [Config((), w, 1) for w in warps], H200, 0.0, constants
    )


# --- products that follow each other ---


@triton.jit
def attention(q, k, v, y, N, M: tl.constexpr, B: tl.constexpr, D: tl.constexpr):
    rows, cols, deep = tl.arange(0, M), tl.arange(0, B), tl.arange(0, D)
    left = tl.load(q + rows[:, None] * D + deep[None, :])
    total = tl.zeros((M, D), tl.float32)
    for start in range(0, N, B):
        keys = tl.load(k + (start + cols)[None, :] * D + deep[:, None])
        scores = tl.exp(tl.dot(left, keys))
        total += tl.dot(scores.to(tl.float16), tl.load(v + (start + cols)[:, None] * D + deep[None, :]))
    tl.store(y + rows[:, None] * D + deep[None, :], total)


@triton.jit
def twice(x, y, N, M: tl.constexpr, D: tl.constexpr):
    rows, deep = tl.arange(0, M), tl.arange(0, D)
    at = rows[:, None] * D + deep[None, :]
    first = tl.zeros((M, D), tl.float32)
    for i in range(0, N):
        tile = tl.load(x + i * M * D + at)
        first += tl.dot(tile, tl.trans(tile))
    second = tl.zeros((M, D), tl.float32)
    for i in range(0, N):
        tile = tl.load(x + i * M * D + at)
        second += tl.dot(tile, tl.trans(tile))
    tl.store(y + at, first + second)


def _attention(m: int, b: int = 64) -> TtirFacts:
    tensors = ((F16, (m, 64)), (F16, (4096, 64)), (F16, (4096, 64)), (F32, (m, 64)))
    return read(attention, (*tensors, 4096), {"M": m, "B": b, "D": 64}, (64,))


def test_a_product_that_feeds_another_is_chained_and_the_last_one_is_not() -> None:
    got = _attention(64, 32)
    assert (got.chained_rows, got.chained_columns) == (64, 32)
    assert got.chained_flops == got.dot_flops / 2 == 2 * 64 * 32 * 64 * (4096 // 32)
    # Sums of one product each, in loops beside each other whose names repeat in the text, feed none.
    sums = read(twice, ((F16, (64, 64)), (F32, (64, 64)), 8), {"M": 64, "D": 64})
    assert sums.dot_flops > 0
    assert sums.chained_flops == sums.chained_rows == 0


def test_warps_without_rows_of_their_own_repeat_a_chained_product() -> None:
    few = costed(_attention(64), (64,), 4, 8, 16)
    assert few.repeated.tolist() == [1, 2, 4]
    assert few.alu_ms[2] == pytest.approx(4 * few.alu_ms[0], rel=0.01)
    enough = costed(_attention(256), (64,), 4, 8, 16)
    assert enough.repeated.tolist() == [1, 1, 1]
    # 16 rows and 64 columns are no warp-group product: all warps to the columns, 8 for each.
    assert costed(_attention(16), (64,), 4, 8, 16).repeated.tolist() == [1, 1, 2]
    plain = read(_copy, ((F16, 4096), (F16, 4096)), {"B": 64})
    assert costed(plain, (64,), 1, 32).repeated.tolist() == [1, 1]


# --- stores that leave gaps ---


@triton.jit
def _copy(x, y, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + i, tl.load(x + i))


@triton.jit
def interleaved(x, y, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + i)
    tl.store(y + 2 * i, v)
    tl.store(y + 2 * i + 1, v)


@triton.jit
def paged(x, slots, y, T: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr):
    token, deep = tl.program_id(0) * T + tl.arange(0, T), tl.arange(0, D)
    slot = tl.load(slots + token)
    v = tl.load(x + token[:, None] * D + deep[None, :])
    tl.store(y + (slot // PAGE * PAGE * D + slot % PAGE)[:, None] + deep[None, :] * PAGE, v)


@triton.jit
def one_number(x, y, B: tl.constexpr):
    tl.store(y + tl.program_id(0), tl.sum(tl.load(x + tl.arange(0, B)), 0))


def test_sectors_written_in_parts_are_counted_until_something_completes_them() -> None:
    assert read(_copy, ((F16, 4096), (F16, 4096)), {"B": 256}).partial_bytes == 0
    # The halves of 256 elements are stored within 512 bytes of each other ...
    near = read(interleaved, ((F16, 4096), (F16, 8192)), {"B": 256})
    assert near.partial_bytes == 0
    # ... those of 4096 are not: each store writes every second element of 32 bytes at a time, 8 of 16.
    far = read(interleaved, ((F16, 8192), (F16, 16384)), {"B": 4096})
    assert far.partial_bytes == 2 * 4096 / 8 * 32
    # Neighbouring programs store the other single numbers.
    assert read(one_number, ((F32, 128), (F32, 64)), {"B": 128}).partial_bytes == 0


def test_tokens_of_a_page_complete_what_one_of_them_leaves() -> None:
    def got(tokens: int, deep: int) -> float:
        tensors = ((F16, (4096, deep)), (I32, 4096), (F16, (256, deep, 16)))
        return read(paged, tensors, {"T": tokens, "D": deep, "PAGE": 16}).partial_bytes

    assert got(1, 128) == 128 * 32  # an element per sector
    assert got(4, 128) == 4 * 128 * 32 / 4  # four tokens share it
    assert got(16, 128) == 0
    assert got(16, 2048) == 16 * 2048 * 32  # but not when a row of 4 KiB comes between


# --- atomic operations ---


@triton.jit
def counted(x, y, N, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.atomic_add(y + i, tl.load(x + tl.program_id(0) * B + i), mask=i < N)


def test_atomic_operations_on_few_addresses_wait_for_each_other() -> None:
    few = read(counted, ((F32, 1 << 20), (F32, 64), 64), {"B": 64})
    many = read(counted, ((F32, 1 << 20), (F32, 1 << 16), 1 << 16), {"B": 64})
    assert few.atomic_elements == many.atomic_elements == 64
    assert (few.atomic_repeats, many.atomic_repeats) == (1, 64 / (1 << 16))
    wide = read(counted, ((F32, 1 << 20), (F32, 64), 64), {"B": 256})
    assert wide.atomic_repeats == 1  # lanes past the end add nothing
    again = CostConstants().again_ms
    assert costed(few, (1 << 15,), 4).again_ms[0] == pytest.approx(again * (1 << 15))
    assert costed(few, (1 << 15,), 4).total_ms[0] > 2 * costed(many, (1 << 15,), 4).total_ms[0]


# --- reductions across warps ---


@triton.jit
def columns(x, y, R: tl.constexpr, C: tl.constexpr, AXIS: tl.constexpr):
    tile = tl.load(x + tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :])
    tl.store(y + tl.arange(0, C if AXIS == 0 else R), tl.sum(tile, AXIS))


def test_warps_that_share_columns_exchange_them() -> None:
    down = read(columns, ((F16, (16, 256)), (F16, 256)), {"R": 16, "C": 256, "AXIS": 0})
    # 32 lanes of 8 neighbours span the 256 columns: every further warp has other rows of the same ones.
    assert (down.exchanged_1, down.exchanged_4) == (0, 4 * 256)
    # Two of them meet in a bank half as often.
    assert down.exchanged_2 == 2 * 256 / 2
    along = read(columns, ((F16, (16, 256)), (F16, 16)), {"R": 16, "C": 256, "AXIS": 1})
    assert along.exchanged_4 == along.exchanged_32 == 0
    one, four = costed(down, (132,), 1, 4).exchange_ms
    assert one == 0 < four


# --- loops, loads that wait for loads, masks, programs ---


@triton.jit
def rows_of_tiles(x, y, N, M, B: tl.constexpr, S: tl.constexpr):
    o = tl.arange(0, B)
    for row in range(0, M):
        total = tl.zeros((B,), tl.float32)
        for start in tl.range(0, N, B, num_stages=S):
            total += tl.load(x + row * N + start + o)
        tl.store(y + row * B + o, total)


def test_a_loop_exposes_its_first_load_each_time_it_is_entered() -> None:
    def got(n: int, stages: int) -> TtirFacts:
        tensors = ((F32, (16, n)), (F32, (16, 256)))
        return read(rows_of_tiles, (*tensors, n, 16), {"B": 256, "S": stages})

    assert (got(4096, 3).loop_entries, got(4096, 3).iterations) == (16, 256)

    def gain(n: int) -> float:
        return float(costed(got(n, 1), (64,), 4).latency_ms[0] / costed(got(n, 3), (64,), 4).latency_ms[0])

    assert gain(256) == 1  # one iteration: nothing to load ahead of
    assert 1.5 < gain(4096) < gain(65536) < 2  # two ahead at best


def test_a_load_whose_address_was_loaded_waits_twice() -> None:
    got = read(gathered, ((F32, 4096), (I32, 4096), (F32, 4096)), {"B": 256})
    assert (got.load_chain, got.serial_chain) == (2, 2)
    once = replace(got, load_chain=1.0)
    assert costed(got, (64,), 4).latency_ms[0] > 1.5 * costed(once, (64,), 4).latency_ms[0]


@triton.jit
def masked(x, y, N, M, R: tl.constexpr, C: tl.constexpr):
    rows = tl.program_id(0) * R + tl.arange(0, R)
    cols = tl.arange(0, C)
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    at = rows[:, None] * N + cols[None, :]
    tl.store(y + at, tl.load(x + at, mask=inside, other=0.0), mask=inside)


def test_lanes_that_a_mask_switches_off_for_certain_are_told() -> None:
    def share(n: int, m: int, grid: int) -> float:
        got = read(masked, ((F32, (m, n)), (F32, (m, n)), n, m), {"R": 16, "C": 256}, (grid,))
        return got.inactive_bytes / (got.load_bytes + got.store_bytes)

    assert share(256, 1024, 64) == 0
    assert share(64, 1024, 64) == 0.75
    assert share(64, 8, 1) == 1 - 0.25 * 0.5
    got = read(_copy, ((F32, 4096), (F32, 4096)), {"B": 64})
    assert got.inactive_bytes == 0
