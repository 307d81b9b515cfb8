"""Facts of real kernels, traced on the CPU, against numbers worked out by hand."""

from __future__ import annotations

import re
from typing import Any

import pytest

from forecast_autotune.features.cost import CostBreakdown, FactColumns, costs
from forecast_autotune.features.devices import device_spec
from forecast_autotune.features.trace import trace
from forecast_autotune.features.ttir.extraction import TtirFacts, extract_facts
from forecast_autotune.records import Argument, Config, Device

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

import triton.language as tl

from tests.core.features.traced import call_of, read

F16, F32 = torch.float16, torch.float32
H200 = device_spec(Device("NVIDIA H200", "cuda", "90"))


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")


def half(*shape: int) -> Any:
    return torch.empty(shape, dtype=torch.float16, device="meta")


def single(*shape: int) -> Any:
    return torch.empty(shape, dtype=torch.float32, device="meta")


@triton.jit
def matmul(a, b, c, M, N, K, sa, sb, sc, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    pa = a + m[:, None] * sa + k[None, :]
    pb = b + k[:, None] * sb + n[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(0, tl.cdiv(K, BK)):
        left = tl.load(pa, mask=k[None, :] < K - step * BK, other=0.0)
        right = tl.load(pb, mask=k[:, None] < K - step * BK, other=0.0)
        acc = tl.dot(left, right, acc)
        pa += BK
        pb += BK * sb
    mask = (m[:, None] < M) & (n[None, :] < N)
    tl.store(c + m[:, None] * sc + n[None, :], acc.to(tl.float16), mask=mask)


@pytest.mark.parametrize(("bm", "bn", "bk", "k"), [(64, 32, 32, 512), (128, 64, 64, 500), (16, 128, 128, 96)])
def test_matmul(bm: int, bn: int, bk: int, k: int) -> None:
    args = (half(256, k), half(k, 384), half(256, 384), 256, 384, k, k, 384, 384)
    got = read(matmul, args, {"BM": bm, "BN": bn, "BK": bk}, (256 // bm, 384 // bn))
    steps = -(-k // bk)
    assert got.loop_trips == steps
    assert got.dot_flops == 2 * bm * bn * bk * steps
    assert got.dot_shapes == ((bm, bn, bk, 1.0),)
    assert got.dot_input_bits == 16
    assert got.load_bytes == 2 * (bm * bk + bk * bn) * steps
    assert got.store_bytes == 2 * bm * bn
    assert (got.load_ops, got.store_ops, got.dot_ops) == (2 * steps, 1, steps)
    assert got.pipelined_dot_bytes == got.pipelined_bytes == 2 * (bm * bk + bk * bn)
    assert got.accumulator_bytes == 4 * bm * bn
    assert got.elementwise == bm * bn  # the cast of the result
    assert got.masked_share == 1
    assert got.serial_chain == 2  # load, dot
    runs = (bm * bk * bk + bk * bn * bn) * 2 * steps + bm * bn * 2 * bn
    assert got.mean_contiguous == pytest.approx(runs / (got.load_bytes + got.store_bytes))
    assert got.unknown_trips == 0
    # Accumulator, the two tiles, and the two carried pointer tensors at 4 bytes an element.
    assert got.live_bytes == 4 * bm * bn + (2 + 4) * (bm * bk + bk * bn)


@triton.jit
def attention(q, k, v, o, n, scale, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr):
    start = tl.program_id(0)
    base = tl.program_id(1) * n * D
    m = start * BM + tl.arange(0, BM)
    d = tl.arange(0, D)
    cols = tl.arange(0, BN)
    query = tl.load(q + base + m[:, None] * D + d[None, :])
    best = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    for low in range(0, (start + 1) * BM, BN):
        at = base + (low + cols)[:, None] * D + d[None, :]
        score = tl.dot(query, tl.trans(tl.load(k + at))) * scale
        score = tl.where(m[:, None] >= (low + cols)[None, :], score, -float("inf"))
        new = tl.maximum(best, tl.max(score, 1))
        p = tl.exp2(score - new[:, None])
        shrink = tl.exp2(best - new)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(tl.float16), tl.load(v + at), acc * shrink[:, None])
        best = new
    tl.store(o + base + m[:, None] * D + d[None, :], (acc / total[:, None]).to(tl.float16))


@pytest.mark.parametrize(("bm", "bn", "n"), [(64, 32, 512), (32, 64, 512), (128, 64, 4096), (64, 128, 2048)])
def test_causal_attention_counts_the_mean_program(bm: int, bn: int, n: int) -> None:
    d, heads = 64, 3
    tensors = [half(heads, n, d) for _ in range(4)]
    args = (*tensors, n, 0.125)
    blocks = n // bm
    got = read(attention, args, {"BM": bm, "BN": bn, "D": d}, (blocks, heads))
    steps = sum(-(-(i + 1) * bm // bn) for i in range(blocks)) / blocks
    assert got.loop_trips == pytest.approx(steps, rel=0.01)
    assert got.dot_flops == pytest.approx(2 * 2 * bm * bn * d * steps, rel=0.01)
    assert got.load_bytes == pytest.approx(2 * (bm * d + 2 * bn * d * steps), rel=0.01)
    assert got.reduce_elements == pytest.approx(2 * bm * bn * steps, rel=0.01)
    assert got.special == pytest.approx((bm * bn + bm) * steps + bm * d, rel=0.01)
    assert got.conversions == pytest.approx(bn * d * steps, rel=0.01)
    assert {shape[:3] for shape in got.dot_shapes} == {(bm, bn, d), (bm, d, bn)}
    assert sum(share for *_, share in got.dot_shapes) == pytest.approx(1)
    assert got.pipelined_dot_bytes == 2 * 2 * bn * d
    assert got.accumulator_bytes == 4 * (bm * d + 2 * bm)
    assert got.serial_chain == 4  # load k, dot, max, then the second dot (or the sum, beside it)
    assert got.unknown_trips == 0


@triton.jit
def layer_norm(x, y, w, b, n, eps, B: tl.constexpr):
    x += tl.program_id(0) * n
    y += tl.program_id(0) * n
    total = tl.zeros((B,), tl.float32)
    for start in range(0, n, B):
        o = start + tl.arange(0, B)
        total += tl.load(x + o, mask=o < n, other=0.0).to(tl.float32)
    mean = tl.sum(total, 0) / n
    square = tl.zeros((B,), tl.float32)
    for start in range(0, n, B):
        o = start + tl.arange(0, B)
        v = tl.load(x + o, mask=o < n, other=0.0).to(tl.float32)
        v = tl.where(o < n, v - mean, 0.0)
        square += v * v
    scale = 1 / tl.sqrt(tl.sum(square, 0) / n + eps)
    for start in range(0, n, B):
        o = start + tl.arange(0, B)
        v = tl.load(x + o, mask=o < n, other=0.0).to(tl.float32)
        v = (v - mean) * scale * tl.load(w + o, mask=o < n) + tl.load(b + o, mask=o < n)
        tl.store(y + o, v, mask=o < n)


def test_layer_norm_in_three_loops() -> None:
    args = (half(32, 3000), half(32, 3000), half(3000), half(3000), 3000, 1e-5)
    got = read(layer_norm, args, {"B": 512}, (32,))
    steps = 6
    assert got.load_bytes == 2 * 512 * steps * 5
    assert got.store_bytes == 2 * 512 * steps
    # cast, add | cast, subtract, select, multiply, add | cast, w cast, b cast, -, *, *, +, out cast
    assert got.elementwise == 512 * steps * (2 + 5 + 8)
    assert got.special == 0  # the division and the root are of scalars
    assert got.reduce_elements == 2 * 512
    assert (got.loop_trips, got.iterations, got.loop_depth) == (steps, 3 * steps, 1)
    assert got.pipelined_bytes == 3 * 1024
    assert got.pipelined_dot_bytes == 0
    assert got.accumulator_bytes == 4 * 512


@triton.jit
def dequant(a, b, s, c, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m, n, k = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        left = tl.load(a + m[:, None] * K + start + k[None, :])
        right = tl.load(b + (start + k)[:, None] * BN + n[None, :]).to(tl.float16)
        scale = tl.load(s + start // BK * BN + n)
        acc += tl.dot(left, right) * scale[None, :]
    tl.store(c + m[:, None] * BN + n[None, :], acc)


def test_weight_only_matmul_counts_bytes_at_their_width() -> None:
    weights = torch.empty((512, 64), dtype=torch.int8, device="meta")
    args = (half(32, 512), weights, single(8, 64), single(32, 64), 512)
    got = read(dequant, args, {"BM": 32, "BN": 64, "BK": 64}, (1,))
    assert got.dot_flops == 2 * 32 * 64 * 512
    assert got.load_bytes == 8 * (2 * 32 * 64 + 64 * 64 + 4 * 64)
    assert got.store_bytes == 4 * 32 * 64
    assert got.pipelined_dot_bytes == 2 * 32 * 64 + 64 * 64  # the weights through their cast, no scales
    assert got.pipelined_bytes == got.pipelined_dot_bytes + 4 * 64
    assert got.dot_input_bits == 16
    assert got.elementwise == 8 * (64 * 64 + 2 * 32 * 64)


@triton.jit
def bincount(x, h, n, B: tl.constexpr):
    for start in range(tl.program_id(0) * B, n, tl.num_programs(0) * B):
        o = start + tl.arange(0, B)
        tl.atomic_add(h + tl.load(x + o, mask=o < n, other=0), 1, mask=o < n)


@pytest.mark.parametrize(("n", "programs"), [(64 * 256, 16), (64 * 256, 24), (10_000, 4)])
def test_atomic_histogram_in_a_grid_stride_loop(n: int, programs: int) -> None:
    args = (torch.empty(n, dtype=torch.int32, device="meta"), torch.empty(99, dtype=torch.int32), n)
    got = read(bincount, args, {"B": 256}, (programs,))
    steps = -(-n // 256) / programs
    assert got.loop_trips == pytest.approx(steps, rel=0.05 if steps % 1 else 1e-9)
    assert got.atomic_elements == got.loop_trips * 256
    assert got.load_bytes == got.loop_trips * 256 * 4
    assert got.store_bytes == 0


@triton.jit
def transpose(x, y, M, N, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    j = tl.program_id(1) * B + tl.arange(0, B)
    v = tl.load(x + i[:, None] * N + j[None, :])
    tl.store(y + j[:, None] * M + i[None, :], tl.trans(v))


@triton.jit
def transpose_strided(x, y, M, N, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    j = tl.program_id(1) * B + tl.arange(0, B)
    tl.store(y + j[None, :] * M + i[:, None] * M * N, tl.load(x + i[:, None] * N + j[None, :]))


def test_transpose() -> None:
    args = (single(512, 256), single(256, 512), 512, 256)
    got = read(transpose, args, {"B": 64}, (8, 4))
    assert got.conversions == 64 * 64
    assert (got.load_bytes, got.store_bytes) == (4 * 64 * 64, 4 * 64 * 64)
    assert got.mean_contiguous == 64
    scattered = read(transpose_strided, args, {"B": 64}, (8, 4))
    assert scattered.mean_contiguous == pytest.approx((64 + 1) / 2)


@triton.jit
def integer_matmul(a, b, c, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m, n, k = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.int32)
    seen = tl.zeros((BK,), tl.int32)
    for start in range(0, K, BK):
        left = tl.load(a + m[:, None] * K + (start + k)[None, :])
        right = tl.load(b + (start + k)[:, None] * BN + n[None, :])
        acc = tl.dot(left, right, acc)
        seen += k
    tl.store(c + m[:, None] * BN + n[None, :], acc + tl.sum(seen))


def test_sums_of_integer_dots_are_accumulators_and_indices_are_not() -> None:
    a, b, c = (torch.empty(s, dtype=torch.int8, device="meta") for s in ((64, 256), (256, 32), (64, 32)))
    got = read(integer_matmul, (a, b, c, 256), {"BM": 64, "BN": 32, "BK": 64}, (1,))
    assert got.accumulator_bytes == 4 * 64 * 32
    assert got.dot_input_bits == 8


def test_a_text_that_was_read_at_another_shape_is_read_afresh() -> None:
    def asked(k: int) -> list[Argument]:
        args = (half(256, k), half(k, 384), half(256, 384), 256, 384, k, k, 384, 384)
        return call_of(matmul, args)[1]

    config = {"BM": 64, "BN": 32, "BK": 32}
    args = (half(256, 512), half(512, 384), half(256, 384), 256, 384, 512, 512, 384, 384)
    text = trace(matmul, args, {}, config)
    short, long = extract_facts(text, asked(512), (4, 12)), extract_facts(text, asked(2048), (4, 12))
    assert (short.loop_trips, long.loop_trips) == (16, 64)
    assert extract_facts(text, asked(512), (4, 12)) == short
    # The same as of a text that nobody has read: a comment at its end makes it another.
    assert extract_facts(text + "\n// again", asked(2048), (4, 12)) == long


# --- what loads and stores ask of the first-level cache ---


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


def test_the_formula_charges_for_lines_and_for_instructions() -> None:
    aligned = read(copy, ((F16, 1 << 24), (F16, 1 << 24), 1 << 24), {"B": 1024}, (1 << 14,))
    parted = read(copy, ((F16, 1 << 24), (F16, 1 << 24), (1 << 24) - 5), {"B": 1024}, (1 << 14,))
    configs = [Config((), warps, 1) for warps in (1, 32, 24)]

    def near(got: TtirFacts) -> CostBreakdown:
        return costs(FactColumns.of([got] * 3), [(1 << 14,)] * 3, configs, H200)

    good, bad = near(aligned), near(parted)
    assert bad.memory_ms[0] > 1.5 * good.memory_ms[0]
    # One warp, 8 elements a thread: 8 times the instructions over the same lines. With 32 warps, one each.
    assert (bad.requests_ms / good.requests_ms)[0] == pytest.approx(8)
    assert (bad.lines_ms / good.lines_ms)[:2] == pytest.approx([8, 1])
    # Between two numbers of warps that were counted, the nearer one's.
    assert bad.lines_ms[2] == bad.lines_ms[1]


def test_aligned_runs_move_16_bytes_per_thread_and_every_line_once() -> None:
    got = read(copy, ((F16, 65536), (F16, 65536), 65536), {"B": 1024})
    # 2048 bytes each way: 4 instructions of 512 bytes, 4 lines each.
    assert asked(got, 1) == asked(got, 4) == (8, 32)
    # Fewer elements per thread: more instructions for the same lines ...
    assert asked(got, 8) == (16, 32)
    # ... until threads repeat what others load, which they do not when they store.
    few = read(copy, ((F16, 65536), (F16, 65536), 65536), {"B": 64})
    assert asked(few, 8) == (8 + 2, 8 + 2)


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


@triton.jit
def chained_attention(q, k, v, y, N, M: tl.constexpr, B: tl.constexpr, D: tl.constexpr):
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
    return read(chained_attention, (*tensors, 4096), {"M": m, "B": b, "D": 64}, (64,))


def test_a_product_that_feeds_another_is_chained_and_the_last_one_is_not() -> None:
    got = _attention(64, 32)
    assert (got.chained_rows, got.chained_columns) == (64, 32)
    assert got.chained_flops == got.dot_flops / 2 == 2 * 64 * 32 * 64 * (4096 // 32)
    # Sums of one product each, in loops beside each other whose names repeat in the text, feed none.
    sums = read(twice, ((F16, (64, 64)), (F32, (64, 64)), 8), {"M": 64, "D": 64})
    assert sums.dot_flops > 0
    assert sums.chained_flops == sums.chained_rows == 0


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
    warps = [Config((), n, 1) for n in (1, 4)]
    one, four = costs(FactColumns.of([down] * 2), [(132,)] * 2, warps, H200).exchange_ms
    assert one == 0 < four


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
