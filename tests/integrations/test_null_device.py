"""The whole live path without a GPU: binder, parallel compiler, hooks, timing protocol, store, launch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton

from forecast_autotune import Space, autotune
from forecast_autotune.errors import FrozenMissError, SettingsError
from forecast_autotune.records import Decision, Evidence
from forecast_autotune.settings import Budget
from forecast_autotune.store import Store
from forecast_autotune.surrogates.protocol import Forecasts, Query
from forecast_autotune.telemetry import spans
from forecast_autotune.tuning.rechecks import Rechecks
from forecast_integrations.triton.problem.describe import to_config
from tests.core.telemetry.recorder import Recorder
from tests.integrations.null import (
    binaries,
    blocks,
    by_launch_options,
    configs,
    double,
    fresh,
    launch,
    tables,
    twice,
)


def tuned(kernel: Any = double, listed: Any = None, **options: Any) -> Any:
    """A tuner that knows nothing yet, over a kernel of which nothing is compiled."""
    listed = configs() if listed is None else listed
    return autotune(configs=listed, key=["n"], **{"store": False, **options})(fresh(kernel))


def time_of(config: Any) -> float:
    """What the null device's clock says of a config."""
    metadata = SimpleNamespace(name="double", num_warps=config.num_warps, num_stages=config.num_stages)
    return by_launch_options(metadata)


@pytest.mark.usefixtures("compiler")
def test_a_part_is_compiled_and_timed_and_the_choice_is_launched(device: Any, tmp_path: Path) -> None:
    tuner = tuned(store=tmp_path / "store")
    kernel = launch(tuner)
    decision = tuner.decision
    assert decision.evidence is Evidence.MEASURED
    assert 2 <= decision.measured < 24
    assert decision.measured <= binaries() <= decision.cost.compiled + 2 < 24
    (table,) = tables(tmp_path / "store")
    first = [m for m in table.measurements if not m.protocol.endswith("-turns")]
    assert {m.protocol for m in first} == {"events-l2read-3"}
    assert len(first) == decision.measured
    for m in first:
        assert m.ms == pytest.approx(time_of(m.candidate.config), rel=1e-6), "times are of the launch alone"
        assert m.repeats >= 3 or m.ms > 2 * decision.median_ms, "only what cannot win is launched less often"
        assert m.compile_s is not None
        assert m.compile_s > 0
        assert m.grid == (32,)
    chosen = tuner.best_config
    assert time_of(chosen) == min(m.ms for m in first) == decision.median_ms
    assert (kernel.metadata.num_warps, kernel.metadata.num_stages) == (chosen.num_warps, chosen.num_stages)
    assert set(tuner.configs_timings) < set(tuner.configs)
    assert tuner.configs_timings[chosen][0] == decision.median_ms
    launches = device.launches
    launch(tuner)
    assert device.launches == launches + 1, "a hit launches and does nothing else"


def test_a_tuner_says_its_latest_decision(device: Any) -> None:
    tuner = tuned()
    assert tuner.decision is None
    launch(tuner)
    first = tuner.decision
    assert isinstance(first, Decision)
    assert first.chosen.config == to_config(tuner.best_config)
    assert (first.candidates, first.known) == (len(tuner.configs), 0)
    launch(tuner)
    assert tuner.decision is first, "a key that is decided asks for no decision"
    launch(tuner, 8192)
    assert tuner.decision is not None
    assert tuner.decision.problem != first.problem
    single = tuned(listed=blocks(128))
    launch(single)
    assert single.best_config is single.configs[0]
    assert single.decision is None, "there was nothing to decide"


@pytest.mark.parametrize(
    "options",
    [{"budget": 3}, {"surrogate": "auto"}, {"policy": 3}, {"store": 3}, {"bucket": 3}, {"space": [3]}],
)
def test_an_option_of_another_type_is_refused_where_it_is_written(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(SettingsError, match=f"{name}= takes .*, not .*"):
        autotune(configs=blocks(32, 128), key=["n"], **options)


@pytest.mark.filterwarnings("error:the tuner failed")
def test_launch_options_that_a_config_leaves_open_are_the_calls(device: Any) -> None:
    tuner = tuned(listed=blocks(32, 128, num_warps=None, num_stages=None), variants="off")
    x = torch.empty(4096)
    kernel = tuner[lambda meta: (triton.cdiv(4096, meta["BLOCK"]),)](x, x, 4096, num_warps=8)
    assert kernel.metadata.num_warps == 8
    assert tuner.decision.measured == 2


def test_a_warm_store_times_nothing_and_compiles_one(
    device: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = tuned(store=tmp_path / "store")
    launch(first)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "another"))
    before = device.launches
    second = tuned(store=Store(tmp_path / "store"))
    launch(second)
    assert second.best_config == first.best_config
    assert second.decision.evidence is Evidence.STORED
    assert second.decision.measured == 0
    assert device.launches == before + 1
    assert binaries() == 1


def test_store_false_touches_no_disk(device: Any, tmp_path: Path) -> None:
    tuner = tuned()
    launch(tuner)
    assert tuner.decision.measured > 0
    assert not (tmp_path / "measurements").exists()
    again = device.launches
    tuner.cache.clear()
    launch(tuner)
    assert tuner.decision.evidence is Evidence.STORED
    assert device.launches == again + 1, "memory only, but memory all the same"


def test_a_large_space_is_expanded_late_and_compiled_in_a_small_part(device: Any) -> None:
    asked: list[int] = []

    def rule(p: dict[str, Any]) -> bool:
        asked.append(p["BLOCK"])
        return bool(p["BLOCK"] >= 32 * p["num_warps"])

    space = Space(
        {"BLOCK": [128, 256, 512, 1024, 2048]},
        num_warps=[1, 2, 4, 8],
        num_stages=range(1, 9),
        maxnreg=[None, 32, 40, 48, 64, 80, 96, 128, 160],
        where=[rule],
    )
    tuner = tuned(listed=space, budget=Budget(measurements=5))
    assert asked == []
    launch(tuner)
    assert tuner.decision.candidates == len(tuner.configs) == 1368
    assert tuner.decision.measured == 5
    assert binaries() <= 5 + 4
    assert all(isinstance(config, triton.Config) for config in tuner.configs)


def test_listed_configs_and_a_space_together(device: Any) -> None:
    tuner = tuned(listed=blocks(32), space=Space({"BLOCK": [128, 256]}), mode="exhaustive")
    launch(tuner)
    assert [c.kwargs["BLOCK"] for c in tuner.configs] == [32, 128, 256]
    assert len(tuner.configs_timings) == 3


def test_buckets_share_decisions(device: Any, tmp_path: Path) -> None:
    tuner = tuned(listed=configs((2, 4), (3,)), bucket="pow2", store=tmp_path / "store")
    for n in (1040, 2000, 2048):
        launch(tuner, n)
    assert [key[0] for key in tuner.cache] == [2048]
    launch(tuner, 2064)
    assert [key[0] for key in tuner.cache] == [2048, 4096]
    exact = tuned(listed=configs((2, 4), (3,)))
    for n in (1040, 2048):
        launch(exact, n)
    assert [key[0] for key in exact.cache] == [1040, 2048]


# --- modes by variable ---


def test_skip_launches_the_best_forecast_untimed(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORECAST_AUTOTUNE_MODE", "skip")
    tuner = tuned()
    launch(tuner)
    assert (device.launches, binaries()) == (1, 1)
    assert tuner.decision.evidence is Evidence.FORECAST


class SureOfFour:
    """Forecasts four warps far ahead."""

    name, version = "sure", "1"

    def forecast(self, query: Query) -> Forecasts:
        mean = np.array([-2.0 * (c.config.num_warps == 4) for c in query.candidates])
        return Forecasts(query.candidates, mean, np.full(len(mean), 0.01), 0.0 * mean, group="informed")


def test_a_choice_that_nobody_timed_is_replaced_where_it_is_beyond_its_tolerance(
    device: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Rechecks, "spent_s", 0.0)

    def decided(recheck_s: str) -> Decision:
        monkeypatch.setenv("FORECAST_AUTOTUNE_RECHECK", recheck_s)
        tuner = tuned(listed=configs((2, 4), (3,)), store=tmp_path, surrogate=SureOfFour())
        launch(tuner)
        assert isinstance(tuner.decision, Decision)
        return tuner.decision

    assert decided("0").is_untimed
    assert device.launches == 1
    usual = device.clock
    device.clock = lambda metadata: usual(metadata) * (1.8 if metadata.num_warps == 4 else 1.0)  # 20 % behind
    replaced = decided("100")
    assert (replaced.chosen.config.num_warps, replaced.median_ms) == (2, 1.5)


def test_frozen_raises_on_a_miss_and_serves_what_is_stored(
    device: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launch(tuned(store=tmp_path / "store"), 4096)
    monkeypatch.setenv("FORECAST_AUTOTUNE_MODE", "frozen")
    before = device.launches
    tuner = tuned(store=tmp_path / "store")
    launch(tuner, 4096)
    assert device.launches == before + 1
    with pytest.raises(FrozenMissError, match="kernel double"):
        launch(tuner, 8192)
    assert tuner.nargs is None
    monkeypatch.setenv("FORECAST_AUTOTUNE_ON_MISS", "forecast")
    launch(tuner, 8192)
    assert device.launches == before + 2


def test_a_bad_variable_fails_where_the_kernel_is_decorated(
    device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORECAST_AUTOTUNE_MODE", "fast")
    with pytest.raises(SettingsError, match="FORECAST_AUTOTUNE_MODE='fast'"):
        tuned()


def test_an_argument_beats_the_variable(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORECAST_AUTOTUNE_MODE", "frozen")
    monkeypatch.setenv("FORECAST_AUTOTUNE_MAX_MEASUREMENTS", "20")
    tuner = tuned(mode="tune", budget=Budget(measurements=3))
    launch(tuner)
    assert tuner.decision.measured == 3


def test_what_another_benchmark_has_said_decides_nothing(device: Any, tmp_path: Path) -> None:
    """A benchmark that answers at once is how people skip tuning; later processes are not served its choice."""
    timed: list[float] = []

    def skip(kernel_call: Any, quantiles: Any) -> list[float]:
        timed.append(1.0)
        return [1.0] * 3

    listed = configs((8, 4), (3,))
    for options, warps, calls in (({"do_bench": skip}, 8, 2), ({}, 4, 2), ({"do_bench": skip}, 8, 2)):
        tuner = tuned(listed=listed, store=tmp_path / "store", **options)
        launch(tuner)
        assert (tuner.best_config.num_warps, len(timed)) == (warps, calls)


def test_the_seconds_of_a_stored_decision_can_be_read_too(device: Any, tmp_path: Path) -> None:
    for evidence in (Evidence.MEASURED, Evidence.STORED):
        tuner = tuned(listed=configs((1, 8), (3,)), store=tmp_path / "store")
        launch(tuner)
        assert tuner.decision.evidence is evidence
        assert tuner.bench_time > 0


def test_a_kernel_under_heuristics_is_compiled_in_children(device: Any) -> None:
    """Triton's heuristics cannot compile without a launch before 3.6; tuning launches what it has compiled."""
    kernel = triton.heuristics({"BLOCK": lambda given: 64 * given["num_warps"]})(fresh(twice))
    listed = [triton.Config({}, num_warps=warps) for warps in (2, 4, 8)]
    tuner = autotune(configs=listed, key=["n"], store=False, mode="exhaustive")(kernel)
    x = torch.empty(4096)
    tuner[(1,)](x, x, 4096)
    assert tuner.decision.measured == tuner.decision.cost.compiled == binaries() == 3


@pytest.mark.usefixtures("compiler")
def test_each_compilation_and_measurement_is_shown_and_no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setattr(spans._state, "exporter", recorder)
    tuner = tuned(listed=configs(stages=(2, 3)))
    launch(tuner)
    shown, counted = len(recorder.spans), dict(recorder.counted)
    for _ in range(50):
        launch(tuner)
    assert (len(recorder.spans), recorder.counted) == (shown, counted), "a key that is decided says nothing"
    decision = tuner.decision
    assert decision is not None
    timed = [attributes for attributes in recorder.named("measure") if "candidate" in attributes]
    assert len(timed) == decision.measured > 0
    assert {name for name, _, _ in recorder.spans} >= {"decide", "forecast", "trace", "measure"}
    compiled = recorder.named("compile")
    assert {attributes["outcome"] for attributes in compiled} <= {"ok", "given up"}
    assert {a["candidate"] for a in timed} <= {a["candidate"] for a in compiled if a["outcome"] == "ok"}
    (decide,) = recorder.named("decide")
    assert decide["kernel"] == "double"
    assert counted["measured"] == decision.measured
    assert counted["seconds_saved"] == decision.saved_s
