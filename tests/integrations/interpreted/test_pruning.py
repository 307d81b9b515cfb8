"""`prune_configs_by`: what the user's functions are given, and what survives them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from triton.runtime import errors

from tests.integrations.interpreted.support import (
    VERSION,
    Decorator,
    block_of,
    blocks,
    grid,
    launched,
    tuned,
)


def first_two(configs: Any, nargs: Any, **kwargs: Any) -> Any:
    """An `early_config_prune` that keeps the first two configs."""
    return configs[:2]


def prefer_large(**kwargs: Any) -> float:
    """A `perf_model` that forecasts 1000 / BLOCK."""
    return 1000.0 / float(kwargs["BLOCK"])


@dataclass
class KeepAll:
    """An `early_config_prune` that keeps every config and remembers what it was given."""

    calls: list[tuple[list[Any], dict[str, Any], dict[str, Any]]] = field(default_factory=list)

    def __call__(self, configs: Any, nargs: Any, **kwargs: Any) -> Any:
        self.calls.append((list(configs), dict(nargs), kwargs))
        return configs


def early(prune: Any) -> dict[str, Any]:
    """`prune_configs_by` with one function."""
    return {"early_config_prune": prune}


def test_early_config_prune_arguments(autotune: Decorator) -> None:
    """It gets the configs, the positional arguments by name, and the call's keywords with grid and warmup."""
    keep = KeepAll()
    run = tuned(autotune, blocks(16, 32), prune_configs_by=early(keep))
    run.tuner[grid](run.vector.x, run.vector.out, tag=run.vector.tag, n=40)
    ((configs, nargs, kwargs),) = keep.calls
    assert configs == blocks(16, 32)
    assert list(nargs) == ["x", "out"]
    assert nargs["x"] is run.vector.x
    assert set(kwargs) == {"grid", "warmup", "tag", "n"}
    assert kwargs["grid"] is grid
    assert (kwargs["warmup"], kwargs["n"]) == (False, 40)


@pytest.mark.parametrize(
    ("times", "rules", "timed", "winner"),
    [
        pytest.param({16: 2.0, 32: 1.0}, early(first_two), [16, 32], 32, id="all survivors"),
        pytest.param(
            {16: 0.1, 64: 2.0, 128: 3.0}, {"perf_model": prefer_large, "top_k": 2}, [64, 128], 64, id="top_k"
        ),
        pytest.param({}, {"top_k": 1}, [16, 32, 64, 128], 16, id="top_k without a model"),
    ],
)
def test_survivors_all_compete(
    exhaustive: Decorator, times: dict[int, float], rules: dict[str, Any], timed: list[int], winner: int
) -> None:
    """Each survivor is timed and has its entry in `configs_timings`; an integer top_k keeps that many forecasts."""
    run = launched(exhaustive, blocks(16, 32, 64, 128), times, prune_configs_by=rules)
    assert sorted(run.clock.timed) == sorted(run.timings) == timed
    assert run.vector.block == winner


@pytest.mark.skipif(VERSION < (3, 6), reason="Triton raises AutotunerError from 3.6 on")
def test_pruning_everything_is_an_error(autotune: Decorator) -> None:
    """An `early_config_prune` that returns nothing raises AutotunerError."""
    with pytest.raises(errors.AutotunerError, match="should return at least one config"):
        launched(autotune, blocks(16, 32), prune_configs_by=early(lambda configs, nargs, **kwargs: []))


@pytest.mark.skipif(VERSION < (3, 8), reason="Triton timed single survivors before 3.8")
def test_single_survivor_is_not_timed(autotune: Decorator) -> None:
    """Pruned to one config, that config is cached and launched without a clock."""
    rules = early(lambda configs, nargs, **kwargs: configs[1:])
    run = launched(autotune, blocks(16, 32), prune_configs_by=rules)
    assert (run.vector.block, run.clock.timed) == (32, [])
    assert [block_of(c) for c in run.tuner.cache.values()] == [32]
    assert block_of(run.tuner.best_config) == 32


@dataclass
class PlainKernel:
    """Neither Triton's nor ours: all that a tuner can do with it is to launch it."""

    blocks: list[int] = field(default_factory=list)
    fn: Any = staticmethod(lambda: None)

    arg_names = ("n",)

    def run(self, **kwargs: Any) -> None:
        self.blocks.append(kwargs["BLOCK"])


@pytest.mark.filterwarnings("ignore:the tuner failed")
def test_the_users_pruning_is_called_once_whatever_is_tuned(exhaustive: Decorator) -> None:
    """As often as by Triton, also for a kernel that nothing can be forecast of: all survivors are timed."""
    kernel, estimated = PlainKernel(), []

    def model(**kwargs: Any) -> int:
        estimated.append(kwargs["BLOCK"])
        return int(kwargs["BLOCK"])

    def bench(launch: Any, quantiles: Any) -> list[float]:
        launch()
        return [1.0 / kernel.blocks[-1]] * 3

    keep = KeepAll()
    rules = {**early(keep), "perf_model": model, "top_k": 2}
    run = tuned(exhaustive, blocks(16, 32, 64), kernel=kernel, do_bench=bench, prune_configs_by=rules)
    run.tuner.run(n=40)
    assert len(keep.calls) == 1
    assert estimated == [16, 32, 64]
    assert sorted(kernel.blocks) == [16, 32, 32]


def test_perf_model_arguments(autotune: Decorator) -> None:
    """It gets every argument by name, grid and warmup, the config's values and its launch options."""
    calls: list[dict[str, Any]] = []

    def model(**kwargs: Any) -> float:
        calls.append(kwargs)
        return prefer_large(**kwargs)

    rules = {"perf_model": model, "top_k": 2}
    run = tuned(autotune, blocks(16, 32, 64, num_warps=8), prune_configs_by=rules)
    run.tuner[grid](run.vector.x, run.vector.out, tag=run.vector.tag, n=40)
    assert sorted(call["BLOCK"] for call in calls) == [16, 32, 64]
    for call in calls:
        names = {"x", "out", "tag", "n", "grid", "warmup", "BLOCK", "num_warps", "num_ctas", "num_stages"}
        assert set(call) == names
        assert isinstance(call["x"], torch.Tensor)
        assert (call["num_warps"], call["num_ctas"], call["num_stages"]) == (8, 1, 3)


@pytest.mark.parametrize("top_k", ["2", 1.5, None])
def test_top_k_of_another_type_is_refused(autotune: Decorator, top_k: object) -> None:
    """Anything but a fraction or an integer is a TypeError at the first call."""
    with pytest.raises(TypeError, match="top_k must be either"):
        launched(autotune, blocks(16, 32), prune_configs_by={"perf_model": prefer_large, "top_k": top_k})


def test_a_top_k_that_keeps_none_is_refused(forecast: Decorator) -> None:
    """Triton says that `min() arg is an empty sequence`; ours names what left no config."""
    run = tuned(forecast, blocks(16, 32), prune_configs_by={"perf_model": prefer_large, "top_k": 0})
    with pytest.raises(ValueError, match="left none of 2 with top_k=0: let top_k be 1 at least"):
        run.launch()
    assert run.tuner.cache == {}
