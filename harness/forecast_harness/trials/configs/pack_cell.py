"""Runs in a cell: calls a solution on tensors without memory and traces the Triton kernels it would launch.

Nothing is launched and no device is opened: tensors lie on torch's `meta` device, so that the solution's own
torch code costs nothing and the sizes are the real ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from forecast_autotune.features.trace import trace as traced
from forecast_autotune.records import Argument, Config
from forecast_harness.sandbox.cell_process import load
from forecast_harness.sandbox.jobs import CellAnswer, TensorBytes

_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")


def trace(payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes], state: dict[str, Any]) -> CellAnswer:
    """Call `entry` of each of `files` once per set of `calls` (name -> dtype and shape); trace what it launches.

    The value is a list per file, of a list per call, of one object per launch: `kernel`, `ttir`, `grid`, `arguments`
    and `config` as in a measurement table. The list of a file that the tracer fails at is empty.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def record(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        launches.append((self, args, kwargs, grid))

    JITFunction.run = record
    target = GPUTarget("cuda", int(payload["arch"]), 32)

    def trace_file(file: str) -> list[list[dict[str, Any]]]:
        run = getattr(load(file), payload["entry"])
        results = []
        for call in payload["calls"]:
            launches.clear()
            tensors = {
                name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
                for name, (dtype, shape) in call.items()
            }
            run(**tensors)
            results.append([_describe_launch(*launch, target) for launch in launches])
        return results

    answers: list[list[list[dict[str, Any]]]] = []
    for file in payload["files"]:
        try:
            answers.append(trace_file(file))
        except Exception:  # another config of the source may do
            answers.append([])
    return CellAnswer(answers)


def _describe_launch(
    kernel: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], grid: Any, target: Any
) -> dict[str, Any]:
    named = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
    meta = {p.name for p in kernel.params if p.is_constexpr}
    given = {n: v for n, v in named.items() if n in kernel.arg_names}
    extent = grid(named) if callable(grid) else grid
    options = {n: named[n] for n in _OPTIONS if named.get(n) is not None}
    config = Config.of({n: v for n, v in given.items() if n in meta}, **options)
    return {
        "kernel": kernel.__name__,
        "ttir": traced(kernel, (), given, {}, target=target),
        "grid": [int(n) for n in (extent if isinstance(extent, tuple | list) else (extent,))],
        "arguments": [_argument(n, v, n in meta).to_json() for n, v in given.items()],
        "config": config.to_json(),
    }


def _argument(name: str, value: Any, constexpr: bool) -> Argument:
    """As recorded problems have it."""
    if isinstance(value, torch.Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return Argument(name, "tensor", kind, tuple(value.shape), tuple(value.stride()), True)
    if value is None:
        return Argument(name, "none")
    if constexpr:
        plain = value if isinstance(value, bool | int | float | str) else str(value)
        return Argument(name, "constexpr", value=plain)
    kinds = {bool: "i1", float: "fp32"}
    small = isinstance(value, int) and -(2**31) <= value < 2**31
    return Argument(name, "scalar", kinds.get(type(value), "i32" if small else "i64"), value=value)


def main(work: Any) -> CellAnswer:
    """The job: one cell, asked for `trace` of the payload."""
    with work.cell() as cell:
        return CellAnswer(cell.ask(f"{__name__}:trace", work.payload).value)
