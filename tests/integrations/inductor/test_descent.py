"""Coordinate descent over generated kernels: compiled ahead by workers, and begun once per store."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.coordinate_descent_tuner import CoordescTuner
from torch._inductor.runtime.hints import DeviceProperties, HeuristicType

from forecast_autotune.settings import Mode
from forecast_autotune.store import Store
from forecast_integrations.inductor.descent.config_worker import ConfigJob, compile_config
from forecast_integrations.inductor.descent.configs_ahead import ConfigsAhead
from forecast_integrations.inductor.descent.coordinate_descent import first_jobs, job_of
from forecast_integrations.inductor.hooks import descent
from forecast_integrations.inductor.hooks.context import HookContext
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


def test_who_waits_gets_what_a_worker_has_compiled() -> None:
    workers = Workers(at_once=False)
    ahead = ConfigsAhead(workers, 2)
    ahead.add([job(1)], urgent=True)
    threading.Timer(0.05, lambda: workers.futures[job(1)].set_result(7.0)).start()
    took, waited = ahead.wait(job(1))
    assert took == 7.0
    assert waited > 0.0


def test_what_has_not_begun_is_left_to_who_waits_for_it() -> None:
    workers = Workers(at_once=False)
    ahead = ConfigsAhead(workers, 1)
    ahead.add([job(1), job(2), job(4)])
    until(lambda: workers.taken == [job(1)])
    assert ahead.wait(job(2)) == (0.0, 0.0)
    assert ahead.wait(job(2))[0] == 0.0
    workers.futures[job(1)].set_result(1.0)
    until(lambda: workers.taken == [job(1), job(4)])


def test_a_worker_that_fails_is_no_failure_of_who_waits() -> None:
    workers = Workers(at_once=False)
    ahead = ConfigsAhead(workers, 1)
    ahead.add([job(1), job(2)])
    until(lambda: workers.taken == [job(1)])
    workers.futures[job(1)].set_exception(RuntimeError("broken"))
    assert ahead.wait(job(1))[0] == 0.0
    until(lambda: workers.taken == [job(1), job(2)])

    def refuses(given: ConfigJob, environment: Mapping[str, str]) -> Future[float]:
        raise RuntimeError("no pool")

    closed = ConfigsAhead(refuses, 1)
    closed.add([job(1), job(2)])
    closed.add([job(4)], urgent=True)
    assert closed.wait(job(4))[0] == 0.0


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


def generated_kernel(*blocks: int, name: str = "c1", kind: HeuristicType = HeuristicType.POINTWISE) -> Any:
    meta = {"coordinate_descent_tuning": True, "warp_size": 32, "max_threads_per_block": 1024}
    configs = [triton.Config({"XBLOCK": block}, num_warps=4, num_stages=1) for block in blocks or (1024,)]
    return SimpleNamespace(
        heuristic_type=kind,
        inductor_meta=meta,
        device_props=DEVICE,
        triton_meta={"signature": SIGNATURE, "device": 0},
        size_hints=HINTS,
        filename=f"/x/{name}.py",
        coordesc_tuner=CoordescTuner(name="triton_", size_hints=HINTS, inductor_meta=meta),
        launchers=[SimpleNamespace(config=config) for config in configs],
        fn=SimpleNamespace(fn="there"),
        lock=threading.Lock(),
        _precompile_config=lambda c: SimpleNamespace(make_launcher=lambda: SimpleNamespace(config=c)),
    )


class Descended:
    """Inductor's descent of a kernel of which blocks of 128 and one warp are best, with our hooks around it."""

    def __init__(self, store: Store | None = None, **settings: Any) -> None:
        self.workers = Workers()
        self.timed: list[ConfigJob] = []
        self.unprepared: list[ConfigJob] = []
        """Timed before a worker had it."""
        self.context = HookContext(serving(store=store, **settings))
        self.context.configs_ahead(lambda: ConfigsAhead(self.workers, 14))

    def __call__(self, kernel: Any) -> Any:
        def milliseconds(config: Any) -> float:
            asked = job_of(kernel.coordesc_tuner, kernel.filename, config)
            self.timed.append(asked)
            if asked not in self.workers.taken:
                self.unprepared.append(asked)
            block = config.kwargs["XBLOCK"]
            return 1.0 + abs(block - 128) / 128 + config.num_warps / 8

        def original(self: Any, launcher: Any) -> Any:
            found = self.coordesc_tuner.autotune(milliseconds, launcher.config, None)
            return SimpleNamespace(config=found)

        patches = descent.install(self.context)
        try:
            return descent._descent(original, self.context)(kernel, kernel.launchers[0])
        finally:
            patches.restore()


def test_every_config_that_a_descent_times_was_compiled_ahead() -> None:
    descended = Descended()
    found = descended(generated_kernel()).config
    assert (found.kwargs, found.num_warps) == ({"XBLOCK": 128}, 1)
    assert descended.unprepared == [job(1024)]  # where it begins, which is compiled
    assert len(descended.timed) > 6
    session = descended.context.session
    assert session is not None
    assert session.tally.saved_s > 1.0


def test_a_descent_ends_as_without_us() -> None:
    descended, alone = Descended(), Descended(mode=Mode.LISTEN)
    assert descended(generated_kernel()).config == alone(generated_kernel()).config
    assert descended.timed == alone.timed
    assert alone.workers.taken == []


def test_a_second_process_begins_no_descent(tmp_path: Path) -> None:
    first, second = Descended(Store(tmp_path)), Descended(Store(tmp_path))
    ended = first(generated_kernel()).config
    found = second(generated_kernel()).config
    assert (found.kwargs, found.num_warps) == (ended.kwargs, ended.num_warps)
    assert found.found_by_coordesc  # or Inductor would ask again
    assert (second.timed, second.workers.taken) == ([], [])
    assert second(generated_kernel(name="c2")).config == ended
    assert second.timed


def test_a_stored_config_of_other_parameters_is_not_taken() -> None:
    store = Store(None)
    Descended(store)(generated_kernel())
    other = generated_kernel()
    other.launchers[0].config.kwargs = {"XBLOCK": 1024, "YBLOCK": 1}
    descended = Descended(store)
    assert descended(other).config.kwargs["YBLOCK"] >= 1
    assert descended.timed


def test_where_a_graph_is_compiled_the_first_steps_of_its_kernels_are_compiled() -> None:
    found = first_jobs(generated_kernel(1024, 512))
    assert set(found) == {job(2048), job(256), job(512, 8), job(512, 2), job(1024, 8), job(1024, 2)}


@pytest.mark.parametrize(
    "change",
    [
        {"heuristic_type": HeuristicType.TEMPLATE},
        {"inductor_meta": {}},
        {"filename": None},
        {"deterministic_mode": True},
        {"device_props": DeviceProperties(type="cpu", index=0, multi_processor_count=8, cc=0)},
    ],
)
def test_kernels_that_are_not_descended_are_left_alone(change: dict[str, Any]) -> None:
    kernel = generated_kernel()
    assert descent.is_descended(kernel)
    vars(kernel).update(change)
    assert not descent.is_descended(kernel)


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


POOL = """
import sys, time
from torch._inductor.async_compile import AsyncCompile
from forecast_integrations.inductor.descent.config_worker import ConfigJob
from forecast_integrations.inductor.descent.configs_ahead import inductor_workers

AsyncCompile.warm_pool()
end = time.monotonic() + 120.0
while (ahead := inductor_workers()) is None and time.monotonic() < end:
    time.sleep(0.05)
jobs = [ConfigJob(sys.argv[1], "triton_", (("XBLOCK", 64 << i),), 4, 1) for i in range(4)]
ahead.add(jobs)
while any(job not in ahead._begun for job in jobs) and time.monotonic() < end:
    time.sleep(0.01)
print([ahead.wait(job)[0] > 0.0 for job in jobs])
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
