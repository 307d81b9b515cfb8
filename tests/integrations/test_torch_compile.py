"""What torch.compile makes of our tuners. Inductor needs a GPU; graphs are captured and run without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import triton
from triton.runtime.autotuner import Autotuner

from forecast_autotune import Space, autotune
from tests.integrations.null import blocks, double, fresh, worker_result

ROOT = Path(__file__).parents[2]
READ = """configs fn arg_names base_fn keys cache restore_value reset_to_zero perf_model early_config_prune
configs_top_k pre_hook post_hook user_defined_pre_hook user_defined_post_hook num_warmups num_reps
use_cuda_graph nargs"""
"""Attributes that torch 2.13 (Dynamo, Inductor, serialisation) and libraries read from a tuner."""


def ours(configs: Any, **options: Any) -> Any:
    return autotune(configs=configs, key=["n"], store=False, **options)(fresh(double))


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the worker saw."""
    folder = tmp_path_factory.mktemp("torch_compile")
    return worker_result(ROOT / "tests" / "integrations" / "torch_compile_worker.py", folder)


@pytest.mark.parametrize("name", ["list", "space"])
def test_dynamo_captures_our_tuner_as_it_captures_tritons(captured: dict[str, Any], name: str) -> None:
    """One kernel node, the grid evaluated for every config, and the tuner itself kept for the launch."""
    graph, tritons = captured["graphs"][name], captured["graphs"]["triton"]
    assert graph == {**tritons, "kernel": "ForecastAutotuner"}
    assert graph["same_object"]
    assert [g[0] for g in graph["grid"]] == [128, 128, 32, 32]


def test_torch_does_with_our_tuner_what_it_does_with_tritons(captured: dict[str, Any]) -> None:
    """Without Inductor a graph decides as in eager mode; its writes are found; `wrap_triton` traces every config."""
    assert captured["keys"]["list"] == captured["keys"]["triton"] == [4096, 8192]
    assert captured["launches"] > 0
    assert captured["functional"]["list"] == captured["functional"]["triton"]
    assert captured["wrapped"] == {"list": [8, 8, 2, 2], "space": [8, 8, 2, 2]}
    assert captured["patched"] == [16384], "a patched tuner is captured, too"


def test_heuristics_below_make_torch_wrap_anew(captured: dict[str, Any]) -> None:
    """Torch then builds a plain `Autotuner` from ours: it works, as a plain one (or a patched one)."""
    graph = captured["graphs"]["heuristics"]
    assert (graph["kernel"], graph["same_object"]) == ("Autotuner", False)
    assert len(graph["grid"]) == 2
    assert captured["keys"]["heuristics"] == []


def test_a_space_is_a_list_of_configs_to_others(captured: dict[str, Any]) -> None:
    assert captured["expanded"] == ["Config"] * 4
    tuner = ours(Space({"BLOCK": [32, 128]}, num_warps=[2, 4], num_stages=[2]))
    assert isinstance(tuner.configs, list)
    assert all(isinstance(config, triton.Config) for config in tuner.configs)
    assert [c.all_kwargs() for c in tuner.configs] == [
        {"BLOCK": b, "num_warps": w, "num_ctas": 1, "num_stages": 2} for b in (32, 128) for w in (2, 4)
    ]
    assert tuner.configs is tuner.configs
    tuner.configs = tuner.configs[:1]
    assert len(tuner.configs) == 1


@pytest.mark.parametrize("hooks", [{}, {"restore_value": ["out"]}, {"reset_to_zero": ["out"]}])
@pytest.mark.parametrize("prune", [None, {"early_config_prune": lambda c, n, **k: c}, {"top_k": 0.5}])
def test_attributes_that_torch_reads_are_tritons(hooks: dict[str, Any], prune: Any) -> None:
    listed = blocks(32, 128)
    theirs = triton.autotune(configs=listed, key=["n"], prune_configs_by=prune, **hooks)(fresh(double))
    tuner = ours(listed, prune_configs_by=prune, **hooks)
    assert isinstance(tuner, Autotuner)
    for name in READ.split():
        if not hasattr(theirs, name) and name == "nargs":
            continue  # Triton sets it on the first call
        mine, other = getattr(tuner, name), getattr(theirs, name)
        if callable(other):
            assert callable(mine), name
        elif name != "fn":
            assert mine == other, name
    assert tuner.base_fn is double.fn
