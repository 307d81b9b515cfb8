"""Coordinate descent over generated kernels: compiled ahead by workers, and begun once per store."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from torch._inductor.runtime import compile_tasks, triton_helpers
from torch._inductor.runtime.coordinate_descent_tuner import CoordescTuner
from torch._inductor.runtime.hints import DeviceProperties, HeuristicType, ReductionHint

from forecast_autotune.settings import Mode
from forecast_autotune.store import Store
from forecast_integrations.inductor.descent import coordinate_descent
from forecast_integrations.inductor.descent.config_worker import (
    OTHER_CONFIGS,
    CompileTask,
    ConfigJob,
    compile_config,
    compile_first_config,
    is_descended,
    keep_first_config,
)
from forecast_integrations.inductor.descent.configs_ahead import ConfigsAhead
from forecast_integrations.inductor.descent.coordinate_descent import first_jobs, job_of
from forecast_integrations.inductor.hooks import descent
from forecast_integrations.inductor.hooks.context import HookContext
from forecast_integrations.inductor.short_calls import FusedKernels
from tests.integrations.inductor.graphs import serving

DEVICE = DeviceProperties(type="cuda", index=0, multi_processor_count=132, cc=90)
SIGNATURE = {"in_ptr0": "*fp32", "out_ptr0": "*fp32", "xnumel": "i32"}
HINTS = {"x": 1 << 20}


def job(block: int, warps: int = 4, path: str = "/x/c1.py") -> ConfigJob:
    return ConfigJob(path, "triton_", (("XBLOCK", block),), warps, 1)


class Workers:
    """Takes jobs; what it has taken ends when it is told to, or at once."""

    def __init__(self, *, at_once: bool = True) -> None:
        self.taken: list[ConfigJob] = []
        self.futures: dict[ConfigJob, Future[float]] = {}
        self._at_once = at_once

    def __call__(self, given: ConfigJob, environment: Mapping[str, str]) -> Future[float]:
        self.taken.append(given)
        future: Future[float] = Future()
        self.futures[given] = future
        if self._at_once:
            future.set_result(1.0)
        return future


# --- the queue ---


def until(condition: Callable[[], object]) -> None:
    """Wait for what another thread does."""
    end = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_no_more_than_the_limit_compile_at_once_and_urgent_ones_do_not_wait() -> None:
    workers = Workers(at_once=False)
    ahead = ConfigsAhead(workers, 2)
    ahead.add([job(1), job(2), job(4), job(8)])
    until(lambda: workers.taken == [job(1), job(2)])
    ahead.add([job(8), job(16), job(1)], urgent=True)
    assert workers.taken[2:] == [job(8), job(16)]
    for block in (2, 1, 8):
        assert job(4) not in workers.taken
        workers.futures[job(block)].set_result(1.0)
    until(lambda: workers.taken[4:] == [job(4)])


def test_an_end_is_waited_for_no_longer_than_wanted() -> None:
    workers = Workers(at_once=False)
    ahead = ConfigsAhead(workers, 2)
    ahead.add([job(1)], urgent=True)
    assert not ahead.has_ended(job(1), time.perf_counter() + 0.01)
    assert not ahead.has_ended(job(2), time.perf_counter() + 60.0)  # nobody is at it
    assert ahead.seconds(job(1)) == 0.0
    threading.Timer(0.05, lambda: workers.futures[job(1)].set_result(7.0)).start()
    assert ahead.has_ended(job(1), time.perf_counter() + 60.0)
    assert ahead.seconds(job(1)) == 7.0


def test_a_worker_that_fails_has_ended() -> None:
    workers = Workers(at_once=False)
    ahead = ConfigsAhead(workers, 1)
    ahead.add([job(1), job(2)])
    until(lambda: workers.taken == [job(1)])
    workers.futures[job(1)].set_exception(RuntimeError("broken"))
    assert ahead.has_ended(job(1), 0.0)
    assert ahead.seconds(job(1)) == 0.0
    until(lambda: workers.taken == [job(1), job(2)])

    def refuses(given: ConfigJob, environment: Mapping[str, str]) -> Future[float]:
        raise RuntimeError("no pool")

    closed = ConfigsAhead(refuses, 1)
    closed.add([job(1), job(2)])
    closed.add([job(4)], urgent=True)
    assert closed.has_ended(job(4), 0.0)


def test_a_decided_kernel_leaves_the_queue() -> None:
    workers = Workers(at_once=False)
    ahead = ConfigsAhead(workers, 1)
    ahead.add([job(1), job(2), job(2, path="/x/other.py")])
    until(lambda: workers.taken == [job(1)])
    ahead.forget("/x/c1.py")
    workers.futures[job(1)].set_result(1.0)
    until(lambda: workers.taken == [job(1), job(2, path="/x/other.py")])


def test_who_hears_of_an_end_begins_nothing() -> None:
    """Inductor's pool tells of an end under the lock that it needs to begin something."""
    lock = threading.Lock()
    workers = Workers(at_once=False)

    def submit(given: ConfigJob, environment: Mapping[str, str]) -> Future[float]:
        with lock:
            return workers(given, environment)

    ahead = ConfigsAhead(submit, 1)
    ahead.add([job(1), job(2)])
    until(lambda: workers.taken == [job(1)])
    with lock:
        workers.futures[job(1)].set_result(1.0)
    until(lambda: workers.taken == [job(1), job(2)])


# --- the descent ---


def milliseconds(config: Any) -> float:
    """A kernel of which blocks of 128 and one warp are best; blocks of 8192 cannot run."""
    block = config.kwargs["XBLOCK"]
    return 1.0 + abs(block - 128) / 128 + config.num_warps / 8


class Kernel(SimpleNamespace):
    """A generated kernel as `CachingAutotuner` has it, whose launches take as long as `milliseconds` says."""

    def _precompile_config(self, config: Any) -> Any:
        if config.kwargs["XBLOCK"] >= 8192:
            raise RuntimeError("out of resources")
        return SimpleNamespace(make_launcher=lambda: SimpleNamespace(config=config))

    def bench(self, launcher: Any) -> float:
        self.timed.append(job_of(self.coordesc_tuner, self.filename, launcher.config))
        return milliseconds(launcher.config)


def generated_kernel(
    block: int = 1024, *, others: tuple[int, ...] = (), name: str = "c1", later_launches: bool = True
) -> Any:
    meta = {"coordinate_descent_tuning": True, "warp_size": 32, "max_threads_per_block": 1024}

    def config(block: int) -> Any:
        return triton.Config({"XBLOCK": block}, num_warps=4, num_stages=1)

    return Kernel(
        heuristic_type=HeuristicType.POINTWISE,
        inductor_meta=meta,
        device_props=DEVICE,
        triton_meta={"signature": SIGNATURE, "device": 0},
        size_hints=HINTS,
        filename=f"/x/{name}.py",
        coordesc_tuner=CoordescTuner(name="triton_", size_hints=HINTS, inductor_meta=meta),
        launchers=[SimpleNamespace(config=config(block))],
        configs=None,
        fn=SimpleNamespace(fn="there"),
        lock=threading.Lock(),
        save_cache_hook=None,
        timed=[],
        forecast_other_configs=[config(other) for other in others],
        forecast_later_launches=later_launches,
    )


class Program:
    """Launches kernels with our hooks in place; `workers` compile what they take at once, or when told to."""

    def __init__(self, store: Store | None = None, *, at_once: bool = True, **settings: Any) -> None:
        self.workers = Workers(at_once=at_once)
        self.context = HookContext(serving(store=store, **settings))
        self.context.configs_ahead(lambda: ConfigsAhead(self.workers, 14))
        self.inductor = 0
        """Launches for which Inductor's own descent was asked."""

    def launch(self, kernel: Any, times: int = 1) -> Any:
        """What `CachingAutotuner.run` does at each launch; returns the config it launches with."""

        def original(self_: Any, launcher: Any) -> Any:
            self.inductor += 1
            return launcher

        hook = descent._descent(original, self.context)
        for _ in range(times):
            if not getattr(kernel.launchers[0].config, "found_by_coordesc", False):
                kernel.launchers = [hook(kernel, kernel.launchers[0])]
        return kernel.launchers[0].config


def values(config: Any) -> tuple[int, int]:
    return config.kwargs["XBLOCK"], config.num_warps


def end_all(workers: Workers) -> None:
    """Let the workers finish whatever they have taken."""
    for future in workers.futures.values():
        if not future.done():
            future.set_result(1.0)


def test_a_first_launch_times_its_wave_and_later_ones_go_on_to_the_end() -> None:
    program, kernel = Program(), generated_kernel()
    assert values(program.launch(kernel)) == (512, 4)
    assert set(kernel.timed) == {job(1024), job(2048), job(512), job(1024, 8), job(1024, 2)}
    found = program.launch(kernel, 20)
    assert values(found) == (128, 1)
    assert found.found_by_coordesc  # Inductor does not ask again
    assert program.inductor == 0
    session = program.context.session
    assert session is not None
    assert session.tally.saved_s > 1.0


def test_every_config_that_is_timed_was_compiled_by_a_worker() -> None:
    program, kernel = Program(), generated_kernel()
    program.launch(kernel, 20)
    assert set(kernel.timed) - {job(1024)} <= set(program.workers.taken)


def test_configs_of_the_kernels_own_list_are_in_the_first_wave() -> None:
    program, kernel = Program(), generated_kernel(others=(128, 64))
    assert values(program.launch(kernel)) == (128, 4)


def test_later_waves_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinate_descent, "FIRST_WAIT_S", 0.01)
    program, kernel = Program(at_once=False), generated_kernel()
    assert values(program.launch(kernel, 3)) == (1024, 4)  # the workers hang
    assert kernel.timed == []
    end_all(program.workers)
    assert values(program.launch(kernel)) == (512, 4)
    timed = len(kernel.timed)
    assert values(program.launch(kernel, 3)) == (512, 4)
    assert len(kernel.timed) == timed
    end_all(program.workers)
    assert values(program.launch(kernel)) == (256, 4)


def test_the_first_launch_waits_for_its_wave() -> None:
    program, kernel = Program(at_once=False), generated_kernel()
    threading.Timer(0.1, end_all, [program.workers]).start()
    assert values(program.launch(kernel)) == (512, 4)


def test_all_first_launches_together_wait_no_longer_than_one_may() -> None:
    program = Program(at_once=False)
    ahead = program.context.configs_ahead(lambda: None)
    assert ahead is not None
    ahead.may_wait_s = 0.05
    waited_until: list[float] = []
    has_ended = ahead.has_ended

    def noted(job: ConfigJob, until: float) -> bool:
        waited_until.append(until - time.perf_counter())
        return has_ended(job, until)

    ahead.has_ended = noted  # type: ignore[method-assign]
    program.launch(generated_kernel(name="c1"))
    assert 0.0 < waited_until[0] <= 0.05
    assert ahead.may_wait_s == 0.0
    waited_until.clear()
    program.launch(generated_kernel(name="c2"))
    assert max(waited_until) <= 0.0


def test_where_workers_hang_what_must_not_wait_compiles_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinate_descent, "PATIENCE_S", 0.05)
    program = Program(at_once=False)
    kernels = [generated_kernel(name=name, later_launches=False) for name in ("c1", "c2")]
    assert {values(program.launch(kernel)) for kernel in kernels} == {(128, 1)}
    ahead = program.context.configs_ahead(lambda: None)
    assert ahead is not None
    assert ahead.hangs


def test_threads_that_launch_one_kernel_find_the_best_so_far() -> None:
    program, kernel = Program(), generated_kernel()
    first = kernel.launchers
    assert values(program.launch(kernel)) == (512, 4)
    kernel.launchers = first  # as a thread does that was asked before the other one had ended
    descent_of = kernel.forecast_descent
    with descent_of.lock:
        assert values(program.launch(kernel)) == (512, 4)
    kernel.launchers = first
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert values(program.launch(kernel, 20)) == (128, 1)
    assert program.inductor == 0


def test_a_kernel_whose_launches_are_recorded_ends_at_its_first_one() -> None:
    program, kernel = Program(), generated_kernel(later_launches=False)
    found = program.launch(kernel)
    assert values(found) == (128, 1)
    assert found.found_by_coordesc


@pytest.mark.parametrize("settings", [{"mode": Mode.DETERMINISTIC}, {"inductor_kernels": "first"}])
def test_a_kernel_ends_at_its_first_launch_where_that_is_wanted(settings: dict[str, Any]) -> None:
    program, kernel = Program(**settings), generated_kernel()
    found = program.launch(kernel)
    assert found.found_by_coordesc
    assert program.launch(kernel, 3) is found


def test_a_launch_that_is_recorded_times_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    program, kernel = Program(), generated_kernel()
    with monkeypatch.context() as patched:
        patched.setattr(descent, "capturing_graph", lambda: True)
        assert values(program.launch(kernel, 3)) == (1024, 4)
        assert kernel.timed == []
    assert values(program.launch(kernel)) == (512, 4)


def test_with_the_service_descents_end_where_they_are() -> None:
    program, kernel = Program(), generated_kernel()
    found = program.launch(kernel)
    assert list(program.context.descending.values()) == [kernel]
    program.context.close()
    assert found.found_by_coordesc
    assert program.launch(kernel, 3) is found
    assert (program.inductor, len(program.context.descending)) == (0, 0)


def test_a_kernel_that_is_gone_is_not_kept() -> None:
    program, kernel = Program(), generated_kernel()
    program.launch(kernel)
    del kernel
    gc.collect()
    assert not program.context.descending


def test_configs_that_cannot_be_launched_are_passed_over() -> None:
    program, kernel = Program(), generated_kernel(4096)
    assert values(program.launch(kernel)) == (2048, 4)
    assert job(8192) not in kernel.timed


def test_without_workers_inductor_descends_itself() -> None:
    program, kernel = Program(), generated_kernel()
    program.context = HookContext(serving())
    program.context.configs_ahead = lambda make: None  # type: ignore[method-assign, assignment]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program.launch(kernel)
    assert program.inductor == 1


def test_while_we_only_listen_inductor_descends_itself() -> None:
    program, kernel = Program(mode=Mode.LISTEN), generated_kernel()
    program.launch(kernel)
    assert (program.inductor, program.workers.taken) == (1, [])


def test_a_template_is_asked_for_once() -> None:
    program, kernel = Program(), generated_kernel()
    kernel.heuristic_type = HeuristicType.TEMPLATE
    program.launch(kernel, 3)
    assert program.inductor == 1


def test_trials_of_fusions_are_not_descended() -> None:
    program, kernel = Program(), generated_kernel()
    session = program.context.session
    assert session is not None
    program.context.thread.short_calls = FusedKernels(session, NoClock())
    assert values(program.launch(kernel, 3)) == (1024, 4)
    assert (program.inductor, program.workers.taken) == (0, [])


class NoClock:
    """Nothing is timed with it."""

    def on_stream(self) -> Any:
        raise AssertionError

    def time(self, call: object, best_ms: float, *, may_record: bool = True) -> Any:
        raise AssertionError


def test_a_second_process_begins_no_descent(tmp_path: Path) -> None:
    first, second = Program(Store(tmp_path)), Program(Store(tmp_path))
    ended = values(first.launch(generated_kernel(), 20))
    kernel = generated_kernel()
    found = second.launch(kernel)
    assert values(found) == ended
    assert found.found_by_coordesc  # or Inductor would ask again
    assert (kernel.timed, second.workers.taken) == ([], [])
    assert values(second.launch(generated_kernel(name="c2"), 20)) == ended
    assert second.workers.taken


def test_a_kernel_that_begins_where_a_descent_ended_is_not_compiled_again() -> None:
    store = Store(None)
    block, warps = values(Program(store).launch(generated_kernel(), 20))
    kernel = generated_kernel(block)
    (launcher,) = kernel.launchers
    launcher.config.num_warps = warps
    found = Program(store).launch(kernel)
    assert kernel.launchers == [launcher]
    assert found.found_by_coordesc


def test_a_stored_config_of_other_parameters_is_not_taken() -> None:
    store = Store(None)
    Program(store).launch(generated_kernel(), 20)
    other = generated_kernel()
    other.launchers[0].config.kwargs = {"XBLOCK": 1024, "YBLOCK": 1}
    assert Program(store).launch(other).kwargs["YBLOCK"] >= 1
    assert other.timed


def test_where_a_graph_is_compiled_the_first_waves_of_its_kernels_are() -> None:
    assert set(first_jobs(generated_kernel(others=(64,)))) == {
        job(2048),
        job(512),
        job(1024, 8),
        job(1024, 2),
        job(64),
    }


@pytest.mark.parametrize(
    "change",
    [
        {"heuristic_type": HeuristicType.TEMPLATE},
        {"inductor_meta": {}},
        {"inductor_meta": {"coordinate_descent_tuning": True, "combo_grid_meta": {"num_kernels": 2}}},
        {"filename": None},
        {"deterministic_mode": True},
        {"device_props": DeviceProperties(type="cpu", index=0, multi_processor_count=8, cc=0)},
    ],
)
def test_kernels_that_are_not_descended_are_left_alone(change: dict[str, Any]) -> None:
    kernel = generated_kernel()
    assert is_descended(kernel)
    vars(kernel).update(change)
    assert not is_descended(kernel)


# --- the worker ---

SOURCE = """
import triton
import triton.language as tl
from torch._inductor.runtime import triton_heuristics
from torch._inductor.runtime.hints import DeviceProperties

@triton_heuristics.pointwise(
    size_hints={"x": 1024},
    filename=__file__,
    triton_meta={
        "signature": {"out_ptr0": "*fp32", "xnumel": "i32", "XBLOCK": "constexpr"},
        "device": DeviceProperties(
            type="cuda", index=0, multi_processor_count=132, cc=90, major=9, warp_size=32,
            regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048,
        ),
        "constants": {},
        "configs": [{}],
    },
    inductor_meta={"grid_type": "Grid1D", "kernel_name": "triton_poi_one", "mutated_arg_names": []},
    min_elem_per_thread=0,
)
@triton.jit
def triton_(out_ptr0, xnumel, XBLOCK: tl.constexpr):
    x = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    tl.store(out_ptr0 + x, x * 2.0, x < xnumel)
"""


def test_a_worker_fills_tritons_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No device is needed to compile for one, but Inductor asks for its driver."""
    monkeypatch.setattr(triton_helpers, "set_driver_to_gpu", lambda: None)
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    path, cache = tmp_path / "c1.py", tmp_path / "cache"
    path.write_text(SOURCE, encoding="utf-8")
    environment = {"TRITON_CACHE_DIR": str(cache)}
    assert compile_config(job(256, 2, str(path)), environment) > 0.0
    assert len(list(cache.rglob("*.cubin"))) == 1
    assert compile_config(job(256, 2, str(path)), environment) > 0.0
    assert len(list(cache.rglob("*.cubin"))) == 1
    assert compile_config(job(100, 2, str(path)), environment) == 0.0  # no power of two


@pytest.mark.parametrize(
    ("kind", "hint", "first"),
    [
        ("POINTWISE", None, 0),
        ("REDUCTION", "INNER", 0),
        ("REDUCTION", "OUTER", 1),
        ("REDUCTION", "OUTER_TINY", 2),
        ("PERSISTENT_REDUCTION", "OUTER", 3),
    ],
)
def test_a_worker_compiles_the_config_that_inductor_would_take_alone(
    kind: str, hint: str | None, first: int
) -> None:
    kernel = generated_kernel()
    kernel.heuristic_type = HeuristicType[kind]
    kernel.inductor_meta["reduction_hint"] = None if hint is None else ReductionHint[hint]
    kernel.configs = [triton.Config({"XBLOCK": 1 << place}) for place in range(4)]
    keep_first_config(kernel)
    assert [c.kwargs["XBLOCK"] for c in kernel.configs] == [1 << first]
    assert len(getattr(kernel, OTHER_CONFIGS)) == 3


def test_the_lists_of_other_kernels_compile_whole() -> None:
    kernel = generated_kernel()
    kernel.heuristic_type = HeuristicType.TEMPLATE
    kernel.configs = [triton.Config({"XBLOCK": block}) for block in (1, 2)]
    keep_first_config(kernel)
    assert len(kernel.configs) == 2


def test_a_task_is_pickled_as_what_it_stands_for_then() -> None:
    wanted = [True]
    task = CompileTask(lambda: wanted[0])
    assert pickle.loads(pickle.dumps(task)) is compile_first_config
    wanted[0] = False
    assert pickle.loads(pickle.dumps(task)) is compile_tasks._worker_compile_triton


POOL = """
import sys, time
from torch._inductor.async_compile import AsyncCompile
from forecast_integrations.inductor.descent.config_worker import ConfigJob
from forecast_integrations.inductor.descent.configs_ahead import inductor_workers

AsyncCompile.warm_pool()
end = time.perf_counter() + 120.0
while (ahead := inductor_workers()) is None and time.perf_counter() < end:
    time.sleep(0.05)
jobs = [ConfigJob(sys.argv[1], "triton_", (("XBLOCK", 64 << i),), 4, 1) for i in range(4)]
ahead.add(jobs)
while any(job not in ahead._begun for job in jobs) and time.perf_counter() < end:
    time.sleep(0.01)
print([ahead.has_ended(job, end) and ahead.seconds(job) > 0.0 for job in jobs])
"""
"""All jobs through Inductor's own pool of workers, one after the other."""


def test_inductors_own_workers_compile_ahead(tmp_path: Path) -> None:
    path, cache = tmp_path / "c1.py", tmp_path / "cache"
    stub = "from torch._inductor.runtime import triton_helpers\ntriton_helpers.set_driver_to_gpu = lambda: None\n"
    path.write_text(stub + SOURCE, encoding="utf-8")
    env = {k: v for k, v in os.environ.items() if not k.startswith("TORCH")}
    env |= {"TORCHINDUCTOR_COMPILE_THREADS": "2", "TRITON_CACHE_DIR": str(cache)}
    env |= {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", POOL, str(path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip() == "[True, True, True, True]", done.stderr
    assert len(list(cache.rglob("*.cubin"))) == 4
