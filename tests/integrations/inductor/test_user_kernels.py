"""Kernels decorated with ours inside torch.compile: which configs Inductor gets, and where its times go."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch._inductor.runtime.triton_heuristics import config_to_dict

from forecast_autotune import autotune
from forecast_autotune.printable import utc_now
from forecast_autotune.records import Outcome
from forecast_autotune.settings import Settings
from forecast_autotune.store import Store
from forecast_integrations.inductor.choices.surrogate import default
from forecast_integrations.inductor.hooks import user_kernels
from forecast_integrations.inductor.hooks.context import HookContext
from forecast_integrations.inductor.session import TuningSession
from forecast_integrations.triton.null_device import null_device
from tests.integrations.null import by_launch_options, double, fresh, worker_result

BLOCKS = (32, 128, 256, 512, 1024)
EVERYTHING = [[block, warps] for block in BLOCKS for warps in (1, 2, 4, 8)]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the worker saw."""
    folder = tmp_path_factory.mktemp("user_kernels")
    return worker_result(Path(__file__).with_name("user_kernels_worker.py"), folder, folder / "store")


def grids(configs: list[list[int]], n: int) -> list[int]:
    return [-(-n // block) for block, _ in configs]


def test_inductor_gets_every_config_while_we_are_off(compiled: dict[str, Any]) -> None:
    assert compiled["off"] == {"configs": EVERYTHING, "grids": grids(EVERYTHING, 4096)}


def test_the_plan_is_applied_to_configs_and_to_their_grids(compiled: dict[str, Any]) -> None:
    planned = compiled["planned"]
    assert 2 <= len(planned["configs"]) < 8
    assert planned["grids"] == grids(planned["configs"], 4096)
    assert [c for c in EVERYTHING if c in planned["configs"]] == planned["configs"]
    assert compiled["kept by the user"] == len(EVERYTHING)


def test_the_same_plan_adds_no_kernel_to_torchs_table(compiled: dict[str, Any]) -> None:
    assert compiled["again"] == compiled["planned"]
    assert compiled["kernels added"] == 0


def test_what_the_users_own_pruning_leaves_is_planned(compiled: dict[str, Any]) -> None:
    """Dynamo prunes by itself and makes a plain tuner of the rest."""
    pruned = compiled["pruned"]
    assert 2 <= len(pruned["configs"]) < 8
    assert all(warps > 1 for _, warps in pruned["configs"])
    assert pruned["grids"] == grids(pruned["configs"], 4096)


def test_what_was_decided_in_eager_mode_is_not_tuned_again(compiled: dict[str, Any]) -> None:
    assert compiled["stored"] == {"configs": [compiled["eager"]], "grids": grids([compiled["eager"]], 8192)}
    assert len(compiled["other size"]["configs"]) > 1


@pytest.mark.parametrize("when", ["listening", "broken", "off again"])
def test_nothing_is_changed_without_a_plan(compiled: dict[str, Any], when: str) -> None:
    assert compiled[when] == compiled["off"]


@pytest.mark.parametrize("mode", ["skip", "frozen", "deterministic", "tune"])
def test_a_hook_that_fails_leaves_one_config_to_a_mode_without_a_clock(
    compiled: dict[str, Any], mode: str
) -> None:
    left = EVERYTHING if mode == "tune" else EVERYTHING[:1]
    assert compiled[f"{mode} after a failure"] == {"configs": left, "grids": grids(left, 4096)}


def test_a_broken_surrogate_is_told_of(compiled: dict[str, Any]) -> None:
    assert "no forecast today" in compiled["said"][0]


def test_tuners_of_others_are_left_alone(compiled: dict[str, Any]) -> None:
    assert compiled["plain"]["configs"] == [[32, 4], [128, 4], [256, 4]]


def test_a_cached_graph_is_named_by_the_rules_of_its_kernels(compiled: dict[str, Any]) -> None:
    names = compiled["rules"]
    assert names[0] == names[1]
    assert [len(n) for n in names] == [1] * 4
    assert len({str(n) for n in names}) == 3
    assert compiled["rules of others"] == []


class Launcher:
    """As much of Inductor's launcher as says what was timed."""

    def __init__(self, config: Any) -> None:
        self.config = config


def timed(tmp_path: Path, times: dict[int, float], size: int = 4096, mode: str = "tune") -> list[Any]:
    """What the store holds after Inductor has timed a kernel that was planned for 4096 elements."""
    store = Store(tmp_path)
    configs = [triton.Config({"BLOCK": block}, num_warps=4) for block in BLOCKS]
    with null_device(by_launch_options):
        tuner = autotune(configs=configs, key=["n"], store=store)(fresh(double))
        serving = TuningSession.of(Settings().with_(mode=mode), default(), store, utc_now())
        memory = user_kernels.ExpectedProblems()
        x = torch.zeros(4096)
        kept = user_kernels.plan(
            serving,
            tuner,
            configs,
            {"x": x, "out": x, "n": 4096},
            [(4096 // block,) for block in BLOCKS],
            memory,
        )
        assert kept == sorted(set(kept))
        assert (len(kept) == len(BLOCKS)) == (mode == "listen")
        y = torch.zeros(size)
        times_by_launcher = {
            Launcher(triton.Config({"BLOCK": block}, num_warps=4)): ms for block, ms in times.items()
        }
        user_kernels.save_user_timings(serving, memory, "double", (y, y, size), times_by_launcher)
    return [m for table in store.tables("double") for m in table.measurements]


@pytest.mark.parametrize("mode", ["tune", "listen"])
def test_inductors_times_are_filed_under_the_eager_problem(tmp_path: Path, mode: str) -> None:
    rows = timed(tmp_path, {32: 0.5, 128: 0.25, 1024: float("inf")}, mode=mode)
    assert {(dict(m.candidate.config.kwargs)["BLOCK"], m.median_ms, m.outcome) for m in rows} == {
        (32, 0.5, Outcome.OK),
        (128, 0.25, Outcome.OK),
        (1024, None, Outcome.OUT_OF_RESOURCES),
    }
    assert {m.protocol for m in rows} == {"inductor"}


def test_times_of_other_sizes_and_unknown_configs_are_not_filed(tmp_path: Path) -> None:
    assert timed(tmp_path / "size", {32: 0.5}, size=8192) == []
    assert timed(tmp_path / "config", {64: 0.5}) == []


class Kernel:
    """As much of Inductor's kernel as a launch of it takes."""

    heuristic_type = "USER_AUTOTUNE"

    def __init__(self, tuner: Any, configs: list[Any], *, in_worker: bool) -> None:
        self.fn = copy.copy(tuner.fn)
        self._reload_kernel = lambda: tuner
        if in_worker:  # a worker's kernel comes without its function
            self.fn.fn = None
        self.launchers, self.lock = [Launcher(configs[0])], threading.Lock()
        self.triton_meta = {"signature": {"x": "*fp32", "out": "*fp32", "n": "i32"}, "constants": {}}
        grids = [
            {"config": config_to_dict(c), "python": [f"-(-n0 // {c.kwargs['BLOCK']})", "1", "1"]}
            for c in configs
        ]
        kind = {"grid_type": "PrecomputedGrid", "precomputed_grids": grids, "extra_launcher_args": ["n0"]}
        self.inductor_meta: dict[str, Any] = kind
        self.launched: list[int] = []
        self._cached_launcher = None

    def run(self, *args: Any, stream: int) -> None:
        self.launched.append(self.launchers[0].config.kwargs["BLOCK"])

    def _precompile_config(self, config: Any) -> Any:
        return SimpleNamespace(make_launcher=lambda: Launcher(config))


@pytest.mark.parametrize("in_worker", [False, True])
def test_each_value_of_a_dynamic_key_has_the_config_of_an_eager_call(in_worker: bool) -> None:
    """Three sizes in one compiled graph; the grid of each candidate is that of its own size."""
    configs = [triton.Config({"BLOCK": block}, num_warps=warps) for block in BLOCKS for warps in (1, 4)]
    sizes = (512, 4096, 1 << 16)
    with null_device(by_launch_options):
        tuner = autotune(configs=configs, key=["n"], store=Store(None))(fresh(double))
        kernel_side_table.add_kernel(tuner)
        kernel = Kernel(tuner, configs, in_worker=in_worker)
        assert user_kernels.tuner_by_key(kernel) is tuner
        kernel_side_table.add_kernel(autotune(configs=configs[1:], key=["n"], store=Store(None))(tuner.fn))
        assert user_kernels.tuner_by_key(kernel) is tuner
        serving = TuningSession.of(Settings(), default(), Store(None), utc_now())
        launches = user_kernels.LaunchesByKey(HookContext(serving), kernel, tuner)
        for n in (*sizes, *sizes):
            x = torch.zeros(n)
            launches(x, x.clone(), n, n, stream=0)
        assert serving.warn_once.messages == []
        outside = [tuner.cache[key].kwargs["BLOCK"] for key in tuner.cache]
        assert len(outside) == 3
        assert kernel.launched == [*outside, *outside]
