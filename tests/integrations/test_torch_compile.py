"""What torch.compile makes of our tuners. Inductor needs a GPU; graphs are captured and run without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo
import triton
from torch._higher_order_ops import triton_kernel_wrap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import wrap_triton
from triton.runtime.autotuner import Autotuner

from forecast_autotune import Space, autotune
from tests.integrations.null import blocks, double, fresh

READ = """configs fn arg_names base_fn keys cache restore_value reset_to_zero perf_model early_config_prune
configs_top_k pre_hook post_hook user_defined_pre_hook user_defined_post_hook num_warmups num_reps
use_cuda_graph nargs"""
"""Attributes that torch 2.13 (Dynamo, Inductor, serialisation) and libraries read from a tuner."""
LISTED = [triton.Config({"BLOCK": b}, num_warps=w) for b in (32, 128) for w in (2, 4)]


def ours(configs: Any, kernel: Any = None, **options: Any) -> Any:
    return autotune(configs=configs, key=["n"], store=False, **options)(kernel or fresh(double))


def theirs() -> Any:
    return triton.autotune(configs=LISTED, key=["n"])(fresh(double))


def launch(kernel: Any, x: torch.Tensor) -> torch.Tensor:
    out, n = torch.empty_like(x), x.numel()
    kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, out, n)
    return out


def node_of(graph: torch.fx.GraphModule) -> torch.fx.Node:
    (node,) = [node for node in graph.graph.nodes if "triton_kernel" in str(node.target)]
    return node


def node_parts(tuner: Any, n: int, backend: str = "eager") -> dict[str, Any]:
    """The kernel's node in the graph of a compiled call, which has run."""
    torch._dynamo.reset()
    graphs: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    torch.compile(lambda x: launch(tuner, x), backend=keep, fullgraph=True)(torch.zeros(n))
    node = node_of(graphs[0])
    kernel = triton_kernel_wrap.kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
    return {
        "operator": str(node.target),
        "grid": [g[0] for g in node.kwargs["grid"]],
        "kernel": type(kernel).__name__,
        "same_object": kernel is tuner,
        "arguments": sorted(node.kwargs["kwargs"]),
    }


def keys_of(tuner: Any) -> list[int]:
    return [key[0] for key in tuner.cache]


@pytest.mark.parametrize(
    "listed", [LISTED, Space({"BLOCK": [32, 128]}, num_warps=[2, 4])], ids=["list", "space"]
)
def test_torch_does_with_our_tuner_what_it_does_with_tritons(torch_has_triton: Any, listed: Any) -> None:
    """One kernel node, the grid evaluated for every config, and the tuner itself kept for the launch.

    Without Inductor a graph decides as in eager mode; its writes are found; `wrap_triton` traces every config.
    """
    mine, other = ours(listed), theirs()
    graph = node_parts(mine, 4096)
    assert graph == {**node_parts(other, 4096), "kernel": "ForecastAutotuner"}
    assert (graph["same_object"], graph["grid"]) == (True, [128, 128, 32, 32])
    assert node_parts(mine, 8192, "aot_eager")["operator"] == node_parts(other, 8192, "aot_eager")["operator"]
    assert keys_of(mine) == keys_of(other) == [4096, 8192]
    assert torch_has_triton.launches > 0
    wrapped = node_of(make_fx(lambda x: launch(wrap_triton(mine), x))(torch.zeros(256)))
    assert [g[0] for g in wrapped.kwargs["grid"]] == [8, 8, 2, 2]  # type: ignore[union-attr,index]


@pytest.mark.usefixtures("torch_has_triton", "triton_patch")
def test_a_patched_tuner_is_captured_too() -> None:
    tuner = theirs()
    node_parts(tuner, 16384)
    assert keys_of(tuner) == [16384]


def test_heuristics_below_make_torch_wrap_anew(torch_has_triton: Any) -> None:
    """Torch then builds a plain `Autotuner` from ours: it works, as a plain one (or a patched one)."""
    below = triton.heuristics({"BLOCK": lambda args: 128})(fresh(double))
    tuner = ours([triton.Config({}, num_warps=w) for w in (2, 4)], below)
    graph = node_parts(tuner, 4096)
    assert (graph["kernel"], graph["same_object"], len(graph["grid"])) == ("Autotuner", False, 2)
    assert keys_of(tuner) == []


def test_a_space_is_a_list_of_configs_to_others() -> None:
    tuner = ours(Space({"BLOCK": [32, 128]}, num_warps=[2, 4], num_stages=[2]))
    assert isinstance(tuner.configs, list)
    assert all(isinstance(config, triton.Config) for config in tuner.configs)
    assert [c.all_kwargs() for c in tuner.configs] == [
        {"BLOCK": b, "num_warps": w, "num_ctas": 1, "num_stages": 2} for b in (32, 128) for w in (2, 4)
    ]
    assert tuner.configs is tuner.configs
    tuner.configs = tuner.configs[:1]
    assert len(tuner.configs) == 1


def hook(named: Any, reset_only: bool = False, exception: Any = None) -> None: ...


def estimate(**named: Any) -> float:
    return 1.0


@pytest.mark.filterwarnings("ignore:warmup, rep, and use_cuda_graph:DeprecationWarning")
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"restore_value": ("out",), "warmup": 5},
        {"reset_to_zero": ("out",), "rep": 7, "use_cuda_graph": True},
        {"pre_hook": hook, "post_hook": hook},
    ],
)
@pytest.mark.parametrize(
    "prune", [None, {"early_config_prune": lambda c, n, **k: c}, {"perf_model": estimate, "top_k": 0.5}]
)
def test_attributes_that_torch_reads_are_tritons(given: dict[str, Any], prune: Any) -> None:
    listed = blocks(32, 128)
    theirs = triton.autotune(configs=listed, key=["n"], prune_configs_by=prune, **given)(fresh(double))
    tuner = ours(listed, prune_configs_by=prune, **given)
    assert isinstance(tuner, Autotuner)
    for name in READ.split():
        if not hasattr(theirs, name) and name == "nargs":
            continue  # Triton sets it on the first call
        mine, other = getattr(tuner, name), getattr(theirs, name)
        if name != "fn":
            assert mine == other or mine.__qualname__ == other.__qualname__, name
    assert tuner.base_fn is double.fn
