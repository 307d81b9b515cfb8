"""Addresses within a line: they count for what feeds a dot, in records and in memory, and for nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from forecast_autotune import autotune
from forecast_autotune.features.trace import trace
from forecast_autotune.features.ttir.flows import TensorFlows, tensor_flows
from forecast_autotune.features.ttir.parser import FeatureError
from forecast_autotune.records import Argument, Evidence
from forecast_autotune.store.relatives import nearness_key
from forecast_autotune.surrogates.relatives import KIN_DISTANCE, problem_distance
from forecast_integrations.triton.null_device import null_device
from forecast_integrations.triton.problem.describe import call_arguments
from forecast_integrations.triton.problem.rebuilt_call import fill_integers, rebuilt_value
from tests.integrations.null import double, fresh, tables


@triton.jit
def scaled_product(a, b, scale, rows, c, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """c[rows] = a[rows] @ (b * scale), with quantised b."""
    m, n, k = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    row = tl.load(rows + m)
    total = tl.zeros((BM, BN), tl.float32)
    left, right = a + row[:, None] * K + k[None, :], b + k[:, None] * BN + n[None, :]
    for _ in range(0, K, BK):
        total = tl.dot(tl.load(left), tl.load(right).to(tl.float16) * tl.load(scale + n)[None, :], total)
        left += BK
        right += BK * BN
    tl.store(c + row[:, None] * BN + n[None, :], total)


@triton.jit
def paged(x, pages, lengths, bias, flags, out, BLOCK: tl.constexpr):
    """A sum over pages; how many there are, and whether there is a bias, stands in memory."""
    i = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    end, at = tl.load(lengths), 0
    while at < end:
        page = tl.load(pages + at)
        total += tl.load(x + page * BLOCK + i)
        at += 1
    if tl.load(flags) > 0:
        total += tl.load(bias + i).to(tl.float32)
    tl.store(out + i, total)


def arguments(at: dict[str, int] | None = None) -> dict[str, Any]:
    """Those of a product of 64 x 64 matrices; `at` has bytes into a line by name."""

    def tensor(name: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        flat = torch.zeros(8192, dtype=dtype)
        assert flat.data_ptr() % 64 == 0
        start, count = (at or {}).get(name, 0) // flat.element_size(), torch.Size(shape).numel()
        return flat[start : start + count].view(shape)

    return {
        "a": tensor("a", torch.float16, 64, 64),
        "b": tensor("b", torch.int8, 64, 64),
        "scale": tensor("scale", torch.float16, 64),
        "rows": tensor("rows", torch.int32, 64),
        "c": tensor("c", torch.float32, 64, 64),
        "K": 64,
    }


def flows(kernel: Any, named: dict[str, Any], **constants: int) -> TensorFlows:
    return tensor_flows(trace(kernel, (), named, constants), call_arguments(kernel, named))


@pytest.fixture
def device(clean_environment: None) -> Iterator[Any]:
    with null_device() as made:
        yield made


def test_what_feeds_a_dot_is_told_from_what_steers_the_program(device: Any) -> None:
    product = flows(scaled_product, arguments(), BM=64, BN=64, BK=32)
    assert product.dots == {"a", "b", "scale"}
    assert product.steering == {"rows"}
    numbers, values = torch.zeros(64, dtype=torch.int32), torch.zeros(64)
    named = {
        "x": values,
        "pages": numbers,
        "lengths": numbers,
        "bias": numbers,
        "flags": numbers,
        "out": values,
    }
    found = flows(paged, named, BLOCK=64)
    assert (found.dots, found.written) == (set(), {"out"})
    assert found.steering == {"pages", "lengths", "flags"}
    assert found.read == named.keys() - {"out"}


def test_flows_through_descriptors_scales_branches_and_atomics() -> None:
    """In the printer's words of several releases."""
    tile, fp8 = "tensor<64x64xf8E4M3FN>", "!tt.ptr<f8E4M3FN>"
    out, descriptor = "tensor<64x64xf32>", f"!tt.tensordesc<{tile}>"
    kinds = [fp8, "!tt.ptr<i8>", descriptor, "!tt.ptr<i32>", "!tt.ptr<i32>", "!tt.ptr<f32>"]
    parameters = ", ".join(f"%arg{n}: {kind}" for n, kind in enumerate(kinds))
    text = f"""module {{
  tt.func public @k({parameters}) attributes {{noinline = false}} {{
    %0 = tt.load %arg3 : !tt.ptr<i32>
    %1 = tt.descriptor_load %arg2[%0, %0] : {descriptor} -> {tile}
    %2 = tt.splat %arg0 : {fp8} -> tensor<64x64x{fp8}>
    %3 = tt.load %2 : tensor<64x64x{fp8}>
    %4 = tt.splat %arg1 : !tt.ptr<i8> -> tensor<64x2x!tt.ptr<i8>>
    %5 = tt.load %4 : tensor<64x2x!tt.ptr<i8>>
    %cst = arith.constant dense<0.000000e+00> : tensor<64x64xf32>
    %6 = tt.dot_scaled %3 scale %5, %1, %cst lhs = e4m3 rhs = e4m3 : {tile}, tensor<64x2xi8> * {tile} -> {out}
    %true = arith.constant true
    %7 = tt.atomic_rmw add, acq_rel, gpu, %arg4, %0, %true : (!tt.ptr<i32>, i32, i1) -> i32
    %c0 = arith.constant 0 : i32
    %8 = arith.cmpi eq, %7, %c0 : i32
    scf.if %8 {{
      %9 = tt.splat %arg5 : !tt.ptr<f32> -> tensor<64x64x!tt.ptr<f32>>
      tt.store %9, %6 : tensor<64x64x!tt.ptr<f32>>
    }}
    tt.return
  }}
}}
"""
    found = tensor_flows(
        text, [Argument(name, "tensor") for name in ("a", "scale", "b", "rows", "count", "out")]
    )
    assert found.dots == {"a", "scale", "b"}
    assert found.steering == {"rows", "count"}
    assert found.written == {"count", "out"}
    assert found.read == {"a", "scale", "b", "rows", "count"}


def test_what_cannot_be_followed_is_refused(device: Any) -> None:
    text = trace(scaled_product, (), arguments(), {"BM": 64, "BN": 64, "BK": 32})
    with pytest.raises(FeatureError, match="5 pointers, the call 1"):
        tensor_flows(text, [Argument("a", "tensor", "float16")])


def test_an_address_counts_for_the_operands_of_a_dot_alone(device: Any, tmp_path: Path) -> None:
    options = [triton.Config({"BM": 64, "BN": 64, "BK": k}, num_warps=4) for k in (16, 32)]
    given: dict[str, Any] = {"key": ["K"], "store": tmp_path, "risk": 0.01}  # so that each is timed
    tuner = autotune(options, **given)(fresh(scaled_product))

    def evidence(**at: int) -> Evidence:
        tuner[(1,)](**arguments(at))
        assert tuner.decision is not None
        return tuner.decision.evidence

    assert evidence() is Evidence.MEASURED
    (aligned,) = tables(tmp_path)
    assert all("address" not in a.extra for a in aligned.problem.arguments)
    launches = device.launches
    tuner[(1,)](**arguments({"c": 16, "rows": 32}))
    assert device.launches == launches + 1, "it is the same key, as TTIR was read"
    other_process = autotune(options, **given)(fresh(scaled_product))
    other_process[(1,)](**arguments({"c": 16}))
    assert other_process.decision.evidence is Evidence.STORED, "it is the same problem"
    assert len(tables(tmp_path)) == 1
    assert evidence(b=16, c=16) is Evidence.MEASURED
    assert evidence(b=32) is Evidence.MEASURED
    assert evidence(a=16) is Evidence.MEASURED
    by_address = {
        tuple((a.name, a.extra["address"]) for a in t.problem.arguments if "address" in a.extra): t
        for t in tables(tmp_path)
    }
    assert set(by_address) == {(), (("b", 16),), (("b", 32),), (("a", 16),)}
    # Its own rows are nearer than those of another address.
    other = by_address[(("b", 16),)].problem
    assert problem_distance(aligned.problem, other) > KIN_DISTANCE, "its choice says little of this one"
    assert nearness_key(aligned.problem, other)[1] > 0
    # What is rebuilt begins where the call's tensor began.
    rebuilt = {a.name: rebuilt_value(a) for a in other.arguments}
    assert rebuilt["b"].data_ptr() % 64 == 16  # type: ignore[attr-defined]
    assert rebuilt["a"].data_ptr() % 64 == 0  # type: ignore[attr-defined]
    launches = device.launches
    evidence(b=16)
    assert device.launches == launches + 1, "it is known in memory, too"


def test_a_kernel_without_a_dot_has_the_key_that_triton_has(device: Any, tmp_path: Path) -> None:
    options = [triton.Config({"BLOCK": 128}, num_warps=w) for w in (1, 2)]
    tuner = autotune(options, key=["n"], store=tmp_path)(fresh(double))
    for start in (0, 4, 8):
        x = torch.zeros(4096 + 8)[start : start + 4096]
        tuner[(32,)](x, x, 4096)
    assert list(tuner.cache) == [(4096, "torch.float32", "torch.float32")]


def test_rebuilt_integers_are_random_unless_they_steer_the_kernel(device: Any) -> None:
    options = [triton.Config({"BM": 64, "BN": 64, "BK": k}) for k in (16, 32)]
    tuner, named = autotune(options, key=["K"], store=False)(fresh(scaled_product)), arguments()
    kinds = {"b": torch.int8, "rows": torch.int32}
    fill_integers(tuner, (), named, call_arguments(tuner.fn, named), list(named))
    assert named["b"].dtype is kinds["b"]
    assert named["b"].unique().numel() > 200
    assert not named["rows"].any(), "a row beyond the end would be written to"
    assert not named["a"].any()
    kept = arguments()
    fill_integers(tuner, (), kept, call_arguments(tuner.fn, kept), ["a", "rows"])
    assert not kept["b"].any(), "it was not made here"


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float16"])
def test_rebuilt_small_floats_are_random(dtype: str) -> None:
    made: Any = rebuilt_value(Argument("a", "tensor", dtype, (64, 64), (64, 1), aligned=True))
    assert made.float().isfinite().all()
    assert made.float().unique().numel() > 4
