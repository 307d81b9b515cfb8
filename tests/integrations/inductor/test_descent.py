"""Coordinate descent over generated kernels: compiled ahead by workers, and begun once per store."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._inductor.runtime import triton_heuristics

from forecast_autotune.settings import Mode
from forecast_autotune.store import Store
from forecast_integrations.inductor import descent as coordinate_descent
from forecast_integrations.inductor.choice_timing import FusedKernelTiming
from forecast_integrations.inductor.descent import ConfigsAhead, LaunchShare, first_jobs
from forecast_integrations.inductor.hooks import descent
from forecast_integrations.inductor.hooks.context import HookContext
from tests.integrations.inductor.generated_kernels import (
    Kernel,
    Workers,
    generated_kernel,
    job,
)
from tests.integrations.inductor.graphs import serving


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
            future.set_result(None)


def test_later_launches_time_one_wave_each_up_to_the_end() -> None:
    program, kernel = Program(), generated_kernel()
    assert values(program.launch(kernel)) == (1024, 4)
    assert kernel.timed == []
    assert values(program.launch(kernel)) == (512, 4)
    assert set(kernel.timed) == {job(1024), job(2048), job(512), job(1024, 8), job(1024, 2)}
    found = program.launch(kernel, 20)
    assert values(found) == (128, 1)
    assert found.found_by_coordesc  # Inductor does not ask again
    assert program.inductor == 0
    assert set(kernel.timed) - {job(1024)} <= set(program.workers.taken), "all were compiled by a worker"


def test_no_wave_is_waited_for() -> None:
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
    assert values(program.launch(kernel, 2)) == (512, 4)
    kernel.launchers = first  # as a thread does that was asked before the other one had ended
    descent_of = kernel.forecast_descent
    with descent_of.lock:
        assert values(program.launch(kernel)) == (512, 4)
    kernel.launchers = first
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert values(program.launch(kernel, 20)) == (128, 1)
    assert program.inductor == 0


@pytest.mark.parametrize("settings", [{}, {"mode": Mode.DETERMINISTIC}, {"inductor_kernels": "first"}])
def test_a_kernel_ends_at_its_first_launch_where_that_is_wanted_or_launches_are_recorded(
    settings: dict[str, Any],
) -> None:
    program, kernel = Program(**settings), generated_kernel(later_launches=bool(settings))
    found = program.launch(kernel)
    assert found.found_by_coordesc
    assert settings or values(found) == (128, 1)
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
    found = program.launch(kernel, 2)
    assert list(program.context.descending.values()) == [kernel]
    program.context.close()
    assert found.found_by_coordesc
    assert program.launch(kernel, 3) is found
    assert (program.inductor, len(program.context.descending)) == (0, 0)


def test_configs_that_cannot_be_launched_are_passed_over() -> None:
    program, kernel = Program(), generated_kernel(4096)
    assert values(program.launch(kernel, 2)) == (2048, 4)
    assert job(8192) not in kernel.timed


def test_without_workers_inductor_descends_itself() -> None:
    program, kernel = Program(), generated_kernel()
    program.context = HookContext(serving())
    program.context.configs_ahead = lambda make: None  # type: ignore[method-assign, assignment]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program.launch(kernel)
    assert program.inductor == 1


def test_trials_of_fusions_are_not_descended() -> None:
    program, kernel = Program(), generated_kernel()
    session = program.context.session
    assert session is not None
    program.context.thread.call_timing = FusedKernelTiming(session, NoClock())
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


def test_stored_configs_of_a_graph_compile_in_the_workers_before_its_first_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_heuristics, "CachingAutotuner", Kernel)
    ended = values(Program(Store(tmp_path)).launch(generated_kernel(), 20))
    second, kernel = Program(Store(tmp_path)), generated_kernel()
    wait = descent._wait(lambda self, scope: None, second.context)
    wait(None, {"kernel": kernel, "other": 1})
    assert job(*ended) in second.workers.taken
    assert values(second.launch(kernel)) == ended
    assert set(second.workers.taken) == {job(*ended)}, "no descent begins"


def test_where_a_graph_is_compiled_the_first_waves_of_its_kernels_are() -> None:
    assert set(first_jobs(generated_kernel(others=(64,)))) == {
        job(2048),
        job(512),
        job(1024, 8),
        job(1024, 2),
        job(64),
    }


# --- configs compile ahead in workers ---


@pytest.mark.parametrize("each_s", [0.0004, 0.003, 0.02])
def test_of_any_second_of_launches_a_tenth_is_timing_at_most(each_s: float) -> None:
    now = 0.0
    share, spent = LaunchShare(lambda: now), []
    while now < 10.0:
        now += 0.0016  # the program's own step
        if most := share.configs():
            seconds = each_s * (most + 1) if len(spent) % 3 else 0.00005  # or nothing was compiled
            now += seconds
            spent.append((now, seconds))
            share.take(seconds, most + 1 if len(spent) % 3 != 1 else 0)
    for end, _ in spent:
        window = [seconds for at, seconds in spent if end - 1.0 < at <= end]
        assert sum(window) <= 0.1 + max(0.0, 10 * each_s - 0.1), "but for the first guess"
    assert sum(seconds for _, seconds in spent) > 0.4, "and what may be used is used"


def test_launches_without_a_share_left_time_nothing_and_the_summary_tells_of_it() -> None:
    program, kernel = Program(), generated_kernel()
    program.launch(kernel)
    program.context.launch_share.take(0.1, 0)
    assert values(program.launch(kernel, 5)) == (1024, 4)
    assert kernel.timed == []
    session = program.context.session
    assert session is not None
    session.tally.count(later_s=0.3)
    assert "0.3 s of later launches, at most 10 % of any second" in session.tally.line()
