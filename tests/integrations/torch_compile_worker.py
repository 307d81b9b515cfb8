"""Captures tuned kernels with torch.compile and prints what torch made of them; see test_torch_compile.py.

A process of its own: torch asks once, on import, whether there is a device that Triton can use, and has
to be told yes. The device is the null device, so captured graphs even run.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.utils._triton
import triton

torch.utils._triton.has_triton = lambda: True

import torch._dynamo
from torch._higher_order_ops import triton_kernel_wrap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import wrap_triton

from forecast_autotune import Space, autotune, patch_triton
from forecast_integrations.triton.null_device import null_device
from tests.integrations.null import by_launch_options, double, fresh


def tuners() -> dict[str, Any]:
    """The same kernel tuned by Triton and by us, in the ways users write it."""
    space = Space({"BLOCK": [32, 128]}, num_warps=[2, 4])
    listed = [triton.Config({"BLOCK": b}, num_warps=w) for b in (32, 128) for w in (2, 4)]
    even = triton.heuristics({"BLOCK": lambda args: 128})
    ours: dict[str, Any] = {"key": ["n"], "store": False}
    return {
        "triton": triton.autotune(configs=listed, key=["n"])(fresh(double)),
        "list": autotune(configs=listed, **ours)(fresh(double)),
        "space": autotune(configs=space, **ours)(fresh(double)),
        "heuristics": autotune(configs=[triton.Config({}, num_warps=w) for w in (2, 4)], **ours)(
            even(fresh(double))
        ),
    }


def capture(tuner: Any, n: int, backend: str = "eager") -> dict[str, Any]:
    """One compiled call: the kernel node of the graph, and what happened when the graph ran."""
    torch._dynamo.reset()
    graphs: list[Any] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        tuner[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, out, n)
        return out

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    torch.compile(function, backend=keep, fullgraph=True)(torch.zeros(n))
    (node,) = [n for n in graphs[0].graph.nodes if "triton_kernel" in str(n.target)]
    kernel = triton_kernel_wrap.kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
    return {
        "operator": str(node.target),
        "grid": [list(g) for g in node.kwargs["grid"]],
        "kernel": type(kernel).__name__,
        "same_object": kernel is tuner,
        "arguments": sorted(node.kwargs["kwargs"]),
    }


def wrapped(tuner: Any, n: int) -> list[int]:
    """The tuner under `wrap_triton`, as inside a custom operator; returns the traced grid sizes."""

    def operator(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        wrap_triton(tuner)[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, out, n)
        return out

    graph = make_fx(operator)(torch.zeros(n))
    (node,) = [node for node in graph.graph.nodes if "triton_kernel" in str(node.target)]
    return [int(g[0]) for g in node.kwargs["grid"]]


def main() -> None:
    found: dict[str, Any] = {}
    with null_device(by_launch_options) as device:
        made = tuners()
        found["expanded"] = [type(c).__name__ for c in made["space"].configs]
        found["graphs"] = {name: capture(tuner, 4096) for name, tuner in made.items()}
        found["functional"] = {
            name: capture(made[name], 8192, "aot_eager")["operator"] for name in ("triton", "list")
        }
        found["keys"] = {name: [key[0] for key in tuner.cache] for name, tuner in made.items()}
        found["wrapped"] = {name: wrapped(made[name], 256) for name in ("list", "space")}
        patch_triton()
        plain = tuners()["triton"]
        capture(plain, 16384)
        found["patched"] = [key[0] for key in plain.cache]
        found["launches"] = device.launches
    print(json.dumps(found))


if __name__ == "__main__":
    main()
