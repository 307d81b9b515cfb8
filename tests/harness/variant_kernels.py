"""Base kernels for the tests of variant verification, as module texts, with their recorded calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from forecast_autotune.records import Argument, Config
from forecast_autotune.variants import Origin, Provenance, Variant
from forecast_harness.records import SearchTarget, TargetKind
from forecast_harness.targets.kernels.base_kernel import BaseKernel
from forecast_harness.targets.kernels.grids import GridSample, sizes_of

HEAD = "import triton\nimport triton.language as tl\n\n\n@triton.jit\n"
DOUBLE = HEAD + (
    "def kernel(x, out, n, BLOCK: tl.constexpr):\n"
    "    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n"
    "    tl.store(out + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)\n"
)
SOFTMAX = HEAD + (
    "def kernel(x, out, stride, n, BLOCK: tl.constexpr):\n"
    "    row = tl.program_id(0)\n"
    "    i = tl.arange(0, 8 * BLOCK)\n"
    "    value = tl.load(x + row * stride + i, mask=i < n, other=float('-inf')).to(tl.float32)\n"
    "    high = tl.max(value, axis=0)\n"
    "    part = tl.exp(value - high)\n"
    "    scale = 1 / tl.sum(part, axis=0)\n"
    "    result = part * scale\n"
    "    tl.store(out + row * n + i, result.to(out.dtype.element_ty), mask=i < n)\n"
)
"""A row at once: rows of any size that is drawn fit, and an interpreter that loops over their blocks takes long."""
NORM = HEAD + (
    "def kernel(x, out, stride, n, BLOCK: tl.constexpr):\n"
    "    row = tl.program_id(0)\n"
    "    i = tl.arange(0, 8 * BLOCK)\n"
    "    value = tl.load(x + row * stride + i, mask=i < n, other=0.0).to(tl.float32)\n"
    "    scale = 1 / tl.sqrt(tl.sum(value * value, axis=0) + 1e-4)\n"
    "    tl.store(out + row * n + i, (value * scale).to(out.dtype.element_ty), mask=i < n)\n"
)
UNMASKED = HEAD + (
    "def kernel(x, out, n, BLOCK: tl.constexpr):\n"
    "    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n"
    "    tl.store(out + i, 2 * tl.load(x + i))\n"
)
SUM_INTO = HEAD + (
    "def kernel(x, acc, n, BLOCK: tl.constexpr):\n"
    "    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n"
    "    tl.atomic_add(acc, tl.sum(tl.load(x + i, mask=i < n, other=0.0), axis=0))\n"
)
GATHER = HEAD + (
    "def kernel(table, index, out, n, BLOCK: tl.constexpr):\n"
    "    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n"
    "    at = tl.load(index + i, mask=i < n, other=0)\n"
    "    tl.store(out + i, tl.load(table + at, mask=i < n), mask=i < n)\n"
)
SCATTER = HEAD + (
    "def kernel(x, slots, out, n, BLOCK: tl.constexpr):\n"
    "    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n"
    "    at = tl.load(slots + i, mask=i < n, other=0)\n"
    "    tl.store(out + at, 2 * tl.load(x + i, mask=i < n), mask=i < n)\n"
)
SEGMENTS = HEAD + (
    "def kernel(x, scale, bounds, out, BLOCK: tl.constexpr):\n"
    "    first, end = tl.load(bounds + tl.program_id(0)), tl.load(bounds + tl.program_id(0) + 1)\n"
    "    for start in range(first, end, BLOCK):\n"
    "        i = start + tl.arange(0, BLOCK)\n"
    "        value = tl.load(x + i, mask=i < end) * tl.load(scale + tl.program_id(0))\n"
    "        tl.store(out + i, value, mask=i < end)\n"
)
SPANS = SEGMENTS.replace("scale, bounds", "scale, starts, counts").replace(
    "first, end = tl.load(bounds + tl.program_id(0)), tl.load(bounds + tl.program_id(0) + 1)",
    "first = tl.load(starts + tl.program_id(0))\n    end = first + tl.load(counts + tl.program_id(0))",
)
CONFIGS = (Config.of({"BLOCK": 64}), Config.of({"BLOCK": 128}))


def tensor(name: str, *shape: int, dtype: str = "float32", aligned: bool = True) -> Argument:
    stride = [1]
    for n in reversed(shape[1:]):
        stride.insert(0, stride[0] * n)
    return Argument(name, "tensor", dtype, shape, tuple(stride), aligned)


def number(name: str, value: int) -> Argument:
    return Argument(name, "scalar", "i32", value=value)


def vector_call(n: int = 4096, *names: str, dtype: str = "float32") -> list[Argument]:
    tensors = [tensor(name, n, dtype=dtype) for name in (names or ("x", "out"))]
    return [*tensors, number("n", n)]


def softmax_call(rows: int = 256, columns: int = 1024, dtype: str = "float16") -> list[Argument]:
    tensors = [tensor(name, rows, columns, dtype=dtype) for name in ("x", "out")]
    return [*tensors, number("stride", columns), number("n", columns)]


def blocks(call: Sequence[Argument], meta: dict[str, Any]) -> tuple[int, ...]:
    return (-(-sizes_of(call)["n"] // meta["BLOCK"]),)


def rows(call: Sequence[Argument], meta: dict[str, Any]) -> tuple[int, ...]:
    return (sizes_of(call)["x.0"],)


def subject(
    source: str,
    *calls: Sequence[Argument],
    grid: Callable[[Sequence[Argument], dict[str, Any]], tuple[int, ...]] = blocks,
    **options: Any,
) -> BaseKernel:
    """A base kernel whose calls were recorded with this grid."""
    launches = [
        GridSample(sizes_of(c), dict(config.kwargs), grid(c, dict(config.kwargs)))
        for c in calls
        for config in CONFIGS
    ]
    return BaseKernel("kernel", source, CONFIGS, tuple(map(tuple, calls)), tuple(launches), **options)


def variant(source: str, **options: Any) -> Variant:
    made = Variant.of("kernel", "5" * 64, source, Provenance(Origin.LLM))
    return Variant(**{**vars(made), **options})


def search_target(*subjects: BaseKernel) -> SearchTarget:
    """A kernel of a user's to be searched on an H200, with a call of each subject."""
    device = {"name": "NVIDIA H200", "backend": "cuda", "arch": "90"}
    payload = {"subjects": [s.to_json() for s in subjects], "source_sha256": "5" * 64, "device": device}
    return SearchTarget(TargetKind.KERNEL, "kernel", "id", "triton", "kernel", "", payload)
