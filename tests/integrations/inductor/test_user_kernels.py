"""Kernels decorated with ours inside torch.compile: which configs Inductor gets, and where its times go.

The device is the null device. Inductor's code for it needs a compiler that is not here, so graphs end where that code
would be written.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_mutation
from torch._inductor import config
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.runtime.triton_heuristics import config_to_dict

from forecast_autotune import Space, autotune, enable_torch_compile
from forecast_autotune.printable import utc_now
from forecast_autotune.records import Outcome
from forecast_autotune.settings import Settings
from forecast_autotune.store import Store
from forecast_autotune.surrogates.protocol import Forecasts, Query
from forecast_integrations.inductor.choices.surrogate import default
from forecast_integrations.inductor.hooks import user_kernels
from forecast_integrations.inductor.hooks.context import HookContext
from forecast_integrations.inductor.session import TuningSession
from forecast_integrations.triton.null_device import null_device
from tests.integrations.null import blocks, by_launch_options, double, fresh
from tests.integrations.test_torch_compile import launch

BLOCKS = (32, 128, 256, 512, 1024)
SPACE = Space({"BLOCK": BLOCKS}, num_warps=[1, 2, 4, 8])
EVERYTHING = [(block, warps) for block in BLOCKS for warps in (1, 2, 4, 8)]
NOTHING = Store(None)

Lowering = tuple[list[tuple[int, int]], list[int]]


class Broken:
    """A surrogate that fails."""

    name, version = "broken", "1"

    def forecast(self, query: Query) -> Forecasts:
        raise RuntimeError("no forecast today")


def tuned(store: Store | None = None, **options: Any) -> Any:
    return autotune(configs=SPACE, key=["n"], store=store or Store(None), **options)(fresh(double))


def plain() -> Any:
    """A tuner of somebody else's."""
    return triton.autotune(blocks(*BLOCKS[:3]), key=["n"])(fresh(double))


class ReachedError(Exception):
    """The graph has been lowered, and the kernel's code is about to be written."""


@pytest.fixture
def inductor(torch_has_triton: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Lowering]]:
    """The configs for which Inductor was going to write code, and their grids, of each kernel."""
    seen: list[Lowering] = []

    def stop(self: Any, kernel: Any, configs: Any, kwargs: Any, *rest: Any) -> Any:
        grids = next(part for part in rest if part and isinstance(part[0], list | tuple))
        seen.append(([(c.kwargs["BLOCK"], c.num_warps) for c in configs], [int(grid[0]) for grid in grids]))
        raise ReachedError

    monkeypatch.setattr(PythonWrapperCodegen, "define_user_defined_triton_kernel", stop)
    with config.patch(compile_threads=1):
        yield seen


def lowering(kernel: Any, n: int, inductor: list[Lowering]) -> Lowering:
    """Inductor's result of a kernel that is launched for so many elements."""
    torch._dynamo.reset()
    with pytest.raises(Exception, match="ReachedError"):
        torch.compile(lambda x: launch(kernel, x), fullgraph=True)(torch.zeros(n))
    return inductor.pop()


def for_elements(configs: list[tuple[int, int]], n: int) -> Lowering:
    return configs, [-(-n // block) for block, _ in configs]


def test_a_plan_is_applied_to_configs_and_grids_while_we_are_in_force(inductor: list[Lowering]) -> None:
    kernel = tuned()
    assert lowering(kernel, 4096, inductor) == for_elements(EVERYTHING, 4096)
    with enable_torch_compile(store=NOTHING):
        plan = lowering(kernel, 4096, inductor)
        assert plan == for_elements([c for c in EVERYTHING if c in plan[0]], 4096)
        assert 2 <= len(plan[0]) < 8
        assert len(kernel.configs) == len(EVERYTHING), "kept by the user"
        kernels = len(kernel_side_table.id_to_kernel)
        assert lowering(kernel, 4096, inductor) == plan
        assert len(kernel_side_table.id_to_kernel) == kernels, "the same plan adds no kernel to torch's table"
        others = [(block, 4) for block in BLOCKS[:3]]
        assert lowering(plain(), 4096, inductor) == for_elements(others, 4096), (
            "tuners of others are left alone"
        )
    assert lowering(tuned(), 4096, inductor) == for_elements(EVERYTHING, 4096)


def test_what_the_users_own_pruning_leaves_is_planned(inductor: list[Lowering]) -> None:
    """Dynamo prunes by itself and makes a plain tuner of the rest."""
    prune = {"early_config_prune": lambda configs, named, **rest: [c for c in configs if c.num_warps > 1]}
    with enable_torch_compile(store=NOTHING):
        left = lowering(tuned(prune_configs_by=prune), 4096, inductor)
    assert 2 <= len(left[0]) < 8
    assert all(warps > 1 for _, warps in left[0])
    assert left == for_elements(left[0], 4096)


def test_what_was_decided_in_eager_mode_is_not_tuned_again(inductor: list[Lowering], tmp_path: Path) -> None:
    known = Store(tmp_path)
    eager = tuned(known)
    launch(eager, torch.zeros(8192))
    best = eager.best_config.kwargs["BLOCK"], eager.best_config.num_warps
    with enable_torch_compile(store=known):
        assert lowering(tuned(known), 8192, inductor) == for_elements([best], 8192)
        assert len(lowering(tuned(known), 1 << 20, inductor)[0]) > 1, "another size"


def test_nothing_is_changed_without_a_plan(inductor: list[Lowering], monkeypatch: pytest.MonkeyPatch) -> None:
    with enable_torch_compile(store=NOTHING, mode="listen"):
        assert lowering(tuned(), 4096, inductor) == for_elements(EVERYTHING, 4096)
    with enable_torch_compile(store=NOTHING) as service:
        with pytest.warns(RuntimeWarning, match="no forecast today"):
            assert lowering(tuned(surrogate=Broken()), 4096, inductor) == for_elements(EVERYTHING, 4096)
        assert "no forecast today" in service.session.warn_once.messages[0]
        monkeypatch.setattr(user_kernels, "OperationSearch", None)  # so that the hook itself fails
        for mode in ("skip", "frozen", "deterministic", "tune"):
            left = EVERYTHING if mode == "tune" else EVERYTHING[:1]  # of a mode without a clock
            assert lowering(tuned(mode=mode), 4096, inductor) == for_elements(left, 4096)


def test_a_cached_graph_is_named_by_the_rules_of_its_kernels(device: Any) -> None:
    def rules(kernel: Any) -> Any:
        """The digests of a graph of this kernel, which are part of its key in the cache."""
        graph = torch.fx.Graph()
        number = kernel_side_table.add_kernel(kernel)
        graph.call_function(triton_kernel_wrapper_mutation, kwargs={"kernel_idx": number})
        return user_kernels.rule_digests(torch.fx.GraphModule(torch.nn.Module(), graph))

    names = [rules(tuned(**options)) for options in ({}, {}, {"surrogate": Broken()}, {"tolerance": 0.5})]
    assert names[0] == names[1]
    assert [len(n) for n in names] == [1] * 4
    assert len({str(n) for n in names}) == 3
    assert rules(plain()) == []


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
