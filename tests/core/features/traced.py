"""Facts of kernels that tests define, traced as a call would be and without a device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from forecast_autotune.features.trace import trace, trace_many
from forecast_autotune.features.ttir.extraction import TtirFacts, extract_facts
from forecast_autotune.records import Argument, Device, Kernel, Problem


def call_of(fn: Any, args: tuple[Any, ...]) -> tuple[list[Any], list[Argument]]:
    """What a call is traced with, and its record.

    A tensor is there, or given by its dtype and shape, or by a dtype alone where nobody is to know its size.
    """
    live, records = [], []
    for name, given in zip(fn.arg_names, args, strict=False):
        if isinstance(given, torch.Tensor):
            records.append(
                Argument(name, "tensor", str(given.dtype), tuple(given.shape), tuple(given.stride()), True)
            )
        elif isinstance(given, int | float):
            records.append(Argument(name, "scalar", value=given))
        else:
            dtype, *shape = given if isinstance(given, tuple) else (given,)
            given = torch.empty(shape[0] if shape else 4096, dtype=dtype, device="meta")
            records.append(Argument(name, "tensor", str(dtype), *([tuple(given.shape)] if shape else [])))
        live.append(given)
    return live, records


def read(fn: Any, args: tuple[Any, ...], meta: dict[str, int], grid: tuple[int, ...] = (64,)) -> TtirFacts:
    """Facts of a kernel that is called in this way."""
    live, records = call_of(fn, args)
    return extract_facts(trace(fn, live, {}, meta), records, grid)


def traced_products(
    shapes: Iterable[tuple[int, int, int]],
) -> tuple[Problem, list[dict[str, Any]], dict[str, str]]:
    """A matrix product on a device we know, its assignments for blocks (m, n, k), and the IR of each."""
    from tests.integrations.gpu.kernels import matmul

    given = [{"BM": m, "BN": n, "BK": k, "EVEN_K": True} for m, n, k in shapes]
    x = torch.empty(64, dtype=torch.float16)
    traces = trace_many(matmul, (x, x, x, 4096, 4096, 4096), {}, given)
    texts = {key: text for key, text in traces if isinstance(text, str)}
    assert len(texts) == len(given)
    device = Device("NVIDIA H200", "cuda", "90", 132, 232448, 65536, 2048)
    sizes = [Argument(name, "scalar", "i32", value=4096) for name in "MNK"]
    tensors = [Argument(name, "tensor", "float16", (4096, 4096), (4096, 1), True) for name in "abc"]
    return Problem.of(Kernel("matmul"), [*tensors, *sizes], device), given, texts
