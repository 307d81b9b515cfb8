"""Estimated shared memory, and the facts it is estimated from; benchmarks/test_compile_facts compares allocations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from forecast_autotune.features.cost import FactColumns, costs, shared_bytes
from forecast_autotune.features.devices import datasheet_device, device_spec
from forecast_autotune.features.ttir.extraction import TtirFacts, extract_facts
from forecast_autotune.records import Config, Device

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

import triton.language as tl
from triton.backends.compiler import GPUTarget

from forecast_autotune.features.trace import trace

HOPPER = GPUTarget("cuda", 90, 32)


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")


def estimate(read: TtirFacts, warps: int, stages: int, *, model: str = "h200") -> float:
    """Bytes for one config."""
    given = np.array([float(warps)]), np.array([float(stages)])
    return float(shared_bytes(FactColumns.of([read]), *given, device_spec(datasheet_device(model)))[0])


def read(fn: Any, pointers: dict[str, Any], meta: dict[str, int]) -> TtirFacts:
    """Facts of a kernel whose other arguments are all 4096."""
    args = [
        torch.empty((4096, 4096), dtype=pointers[p], device="meta") if p in pointers else 4096
        for p in fn.arg_names[: len(fn.arg_names) - len(meta)]
    ]
    return extract_facts(trace(fn, args, {}, meta, target=HOPPER), [], (64,))


@triton.jit
def product(a, b, c, K, sa, sb, sc, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m, n, k = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        left = tl.load(a + m[:, None] * sa + (start + k)[None, :])
        right = tl.load(b + (start + k)[:, None] * sb + n[None, :])
        acc = tl.dot(left, right.to(left.dtype), acc)
    tl.store(c + m[:, None] * sc + n[None, :], acc.to(tl.float16))


@triton.jit
def paged(a, table, b, c, K, sa, sb, sc, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m, n, k = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        left = tl.load(a + m[:, None] * sa + (start + k)[None, :])
        row = tl.load(table + start + k)
        acc = tl.dot(left, tl.load(b + row[:, None] * sb + n[None, :]), acc)
    tl.store(c + m[:, None] * sc + n[None, :], acc.to(tl.float16))


@triton.jit
def streamed(x, y, N, s, ROWS: tl.constexpr, B: tl.constexpr, DEEP: tl.constexpr):
    r, o = tl.arange(0, ROWS), tl.arange(0, B)
    total = tl.zeros((ROWS, B), tl.float32)
    for start in tl.range(0, N, B, num_stages=DEEP):
        total += tl.load(x + r[:, None] * s + (start + o)[None, :]).to(tl.float32)
    tl.store(y + r[:, None] * s + o[None, :], total.to(tl.float16))


F16 = torch.float16
PRODUCT = dict.fromkeys("abc", F16)


def test_loads_that_wait_for_loads_share_the_stages() -> None:
    pointers = {**PRODUCT, "table": torch.int32}
    got = read(paged, pointers, {"BM": 16, "BN": 64, "BK": 64})
    assert got.load_levels == 2
    tiles = 2 * 64 * (16 + 64)
    assert got.direct_bytes == tiles
    assert got.indirect_bytes == 4 * 64
    # Three stages for two loads in a row: each is one iteration ahead.
    assert estimate(got, 4, 4) == tiles + 4 * 64
    assert estimate(got, 4, 5) == 2 * (tiles + 4 * 64)


def test_other_cards_have_no_warp_groups() -> None:
    got = read(product, PRODUCT, {"BM": 64, "BN": 64, "BK": 32})
    tiles = 2 * 32 * (64 + 64)
    assert (estimate(got, 4, 3), estimate(got, 4, 3, model="a100")) == (3 * tiles, 2 * tiles)
    hopper = device_spec(Device("NVIDIA H100 80GB HBM3", "cuda", "90"))
    ada = device_spec(Device("NVIDIA GeForce RTX 4090", "cuda", "89"))
    assert (hopper.warp_groups, ada.warp_groups) == (True, False)


def test_a_loop_keeps_the_stages_its_source_asks_for() -> None:
    deep = read(streamed, dict.fromkeys("xy", F16), {"ROWS": 8, "B": 256, "DEEP": 4})
    assert deep.loop_stages == 4
    assert estimate(deep, 4, 1) == estimate(deep, 4, 7) == 3 * 2 * 8 * 256
    # A thread would copy less than 4 bytes.
    assert estimate(read(streamed, dict.fromkeys("xy", F16), {"ROWS": 1, "B": 64, "DEEP": 4}), 4, 1) == 0


@triton.jit
def rows_by_rows(a, b, c, K, sa, sb, sc, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m, n, k = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        left = tl.load(a + m[:, None] * sa + (start + k)[None, :])
        right = tl.load(b + n[:, None] * sb + (start + k)[None, :])
        acc = tl.dot(left, tl.trans(right), acc)
    tl.store(c + m[:, None] * sc + n[None, :], acc)


TILE = {"BM": 128, "BN": 64, "BK": 32}


def crosswise(fn: Any, dtype: Any) -> float:
    return read(fn, {"a": dtype, "b": dtype, "c": torch.float32}, TILE).crosswise_bytes


def test_wide_operands_that_lie_across_the_summed_dimension_are_seen() -> None:
    assert crosswise(product, torch.float32) == 32 * 64 * 4  # b is [K, N], N next to each other
    assert crosswise(rows_by_rows, torch.float32) == 0.0  # b is [N, K], read in turned
    assert crosswise(product, torch.float16) == 0.0  # the hardware turns 16 bits by itself


H200 = device_spec(Device("NVIDIA H200", arch="90"))


def test_a_lookup_does_not_read_its_whole_table() -> None:
    result = replace(read(product, dict.fromkeys("abc", torch.float16), TILE), unknown_trips=0)
    table, grids, configs = FactColumns.of([result]), [(4,)], [Config(num_warps=4)]
    touched = 4 * (result.load_bytes + result.store_bytes)

    def floor(unique: float) -> float:
        return float(costs(table, grids, configs, H200, unique).dram_ms[0])

    assert floor(1e12) == pytest.approx(floor(touched))
    assert floor(touched / 2) == pytest.approx(floor(touched) / 2)
    endless = FactColumns.of([replace(result, unknown_trips=1)])
    assert costs(endless, grids, configs, H200, 1e12).dram_ms[0] > 10 * floor(1e12)
