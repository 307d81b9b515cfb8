"""Compiles graphs with our tuners in them up to Triton's compiler; see test_user_kernels.py.

A process of its own: torch asks once, on import, whether there is a device that Triton can use, and has
to be told yes. The device is the null device; Inductor's code for it needs a compiler that is not here, so
the graph ends where that code would be written.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.utils._triton
import triton

torch.utils._triton.has_triton = lambda: True

import torch._dynamo
from torch._higher_order_ops.triton_kernel_wrap import (
    kernel_side_table,
    triton_kernel_wrapper_mutation,
)
from torch._inductor.codegen.wrapper import PythonWrapperCodegen

import forecast_autotune
from forecast_autotune import Space, autotune
from forecast_autotune.store import Store
from forecast_autotune.surrogates.protocol import Forecasts, Query
from forecast_integrations.inductor.hooks import user_kernels
from forecast_integrations.triton.null_device import null_device
from tests.integrations.null import by_launch_options, double, fresh

SPACE = Space({"BLOCK": [32, 128, 256, 512, 1024]}, num_warps=[1, 2, 4, 8])


class Reached(Exception):
    """The graph has been lowered, and the kernel's code is about to be written."""


class Broken:
    """A surrogate that fails."""

    name, version = "broken", "1"

    def forecast(self, query: Query) -> Forecasts:
        raise RuntimeError("no forecast today")


def tuner(store: Store, **options: Any) -> Any:
    return autotune(configs=SPACE, key=["n"], store=store, **options)(fresh(double))


def run(kernel: Any, x: torch.Tensor) -> torch.Tensor:
    out, n = torch.empty_like(x), x.numel()
    kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, out, n)
    return out


def lowered(kernel: Any, n: int) -> dict[str, Any]:
    """What Inductor was going to write code for: configs and their grids."""
    torch._dynamo.reset()
    seen: dict[str, Any] = {}

    def stop(self: Any, kernel: Any, configs: Any, kwargs: Any, *rest: Any) -> Any:
        grids = next(part for part in rest if part and isinstance(part[0], list | tuple))
        seen["configs"] = [[c.kwargs["BLOCK"], c.num_warps] for c in configs]
        seen["grids"] = [int(grid[0]) for grid in grids]
        raise Reached

    original = PythonWrapperCodegen.define_user_defined_triton_kernel
    PythonWrapperCodegen.define_user_defined_triton_kernel = stop
    try:
        torch.compile(lambda x: run(kernel, x), fullgraph=True)(torch.zeros(n))
    except Exception as error:
        if "Reached" not in repr(error):
            raise
    finally:
        PythonWrapperCodegen.define_user_defined_triton_kernel = original
    return seen


class Details:
    """As much of a graph as its key in the cache is made of."""

    def __init__(self, kernel: Any) -> None:
        graph = torch.fx.Graph()
        number = kernel_side_table.add_kernel(kernel)
        graph.call_function(triton_kernel_wrapper_mutation, kwargs={"kernel_idx": number})
        self.rules = user_kernels.rule_digests(torch.fx.GraphModule(torch.nn.Module(), graph))


def main(folder: Path) -> None:
    found: dict[str, Any] = {}
    enable, nothing = forecast_autotune.enable_torch_compile, Store(None)
    with null_device(by_launch_options):
        found["off"] = lowered(tuner(Store(None)), 4096)
        enable(store=nothing)
        planned = tuner(Store(None))
        found["planned"] = lowered(planned, 4096)
        found["kept by the user"] = len(planned.configs)
        kernels = len(kernel_side_table.id_to_kernel)
        found["again"] = lowered(planned, 4096)
        found["kernels added"] = len(kernel_side_table.id_to_kernel) - kernels

        prune = {"early_config_prune": lambda configs, named, **rest: [c for c in configs if c.num_warps > 1]}
        found["pruned"] = lowered(tuner(Store(None), prune_configs_by=prune), 4096)

        known = Store(folder)
        eager = tuner(known)
        run(eager, torch.zeros(8192))
        found["eager"] = [eager.best_config.kwargs["BLOCK"], eager.best_config.num_warps]
        enable(store=known)
        found["stored"] = lowered(tuner(known), 8192)
        found["other size"] = lowered(tuner(known), 1 << 20)

        enable(store=nothing, mode="listen")
        found["listening"] = lowered(tuner(Store(None)), 4096)

        broken = enable(store=nothing)
        found["broken"] = lowered(tuner(Store(None), surrogate=Broken()), 4096)
        found["said"] = broken.session.warn_once.messages
        selection = user_kernels.OperationSearch
        user_kernels.OperationSearch = None  # type: ignore[misc,assignment] # so that the hook itself fails
        for mode in ("skip", "frozen", "deterministic", "tune"):
            found[f"{mode} after a failure"] = lowered(tuner(Store(None), mode=mode), 4096)
        user_kernels.OperationSearch = selection
        plain = triton.autotune([triton.Config({"BLOCK": b}) for b in (32, 128, 256)], key=["n"])
        found["plain"] = lowered(plain(fresh(double)), 4096)
        makers = [{}, {}, {"surrogate": Broken()}, {"tolerance": 0.5}]
        found["rules"] = [Details(tuner(Store(None), **options)).rules for options in makers]
        found["rules of others"] = Details(plain(fresh(double))).rules
        forecast_autotune.disable_torch_compile()
        found["off again"] = lowered(tuner(Store(None)), 4096)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
