"""Functions that frameworks put in place of members of `Autotuner`: all are called through, in either order.

Each is a reconstruction, no longer than it must be, of a pattern in the table of docs/tutorials/use_under_a_library.md.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from forecast_autotune import Store, autotune, patch_triton, unpatch_triton
from forecast_integrations.triton.upstream import triton_run
from tests.integrations.null import blocks, configs, double, fresh, launch, tables

pytestmark = pytest.mark.usefixtures("shared_cache")

Patch = Callable[[str, Any], None]


@pytest.fixture(autouse=True)
def unpatched() -> Iterator[None]:
    unpatch_triton()
    yield
    unpatch_triton()


def pins(replace: Patch, seen: list[Any]) -> None:
    """Deterministic modes: one config around the original call."""
    original = Autotuner.run

    @functools.wraps(original)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        listed, self.configs = self.configs, self.configs[-1:]
        try:
            return original(self, *args, **kwargs)
        finally:
            seen.append(self.best_config.num_warps)
            self.configs = listed

    replace("run", run)


def locks(replace: Patch, seen: list[Any]) -> None:
    """One launch of a process at a time."""
    original, lock = Autotuner.run, threading.RLock()

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with lock:
            seen.append("locked")
            return original(self, *args, **kwargs)

    replace("run", run)


def records(replace: Patch, seen: list[Any]) -> None:
    """Recorders of choices and of compiled kernels."""
    original = Autotuner.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        compiled = original(self, *args, **kwargs)
        seen.append(
            (self.base_fn.__name__, self.best_config in self.configs_timings, compiled.metadata.num_warps)
        )
        return compiled

    replace("run", run)


def first_that_works(replace: Patch, seen: list[Any]) -> None:
    """Config after config, by the original, until one can be launched."""
    original = Autotuner.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        listed = self.configs
        try:
            for config in listed:
                self.configs = [config]
                try:
                    return original(self, *args, **kwargs)
                except OutOfResources:
                    continue
        finally:
            seen.append(self.configs[0].num_warps)
            self.configs = listed

    replace("run", run)


def forces_first(replace: Patch, seen: list[Any]) -> None:
    """A `run` of its own, which never comes to the original."""

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.best_config = self.configs[0]
        seen.append(self.best_config.num_warps)
        return self.fn.run(*args, **kwargs, **self.best_config.all_kwargs())

    replace("run", run)


def unwraps(replace: Patch, seen: list[Any]) -> None:
    """Tools that take the innermost function, whatever is around it, and wrap that."""
    pins(replace, [])
    original = inspect.unwrap(Autotuner.run)
    replace(
        "run", lambda self, *args, **kwargs: (seen.append("unwrapped"), original(self, *args, **kwargs))[1]
    )


def prunes(replace: Patch, seen: list[Any]) -> None:
    """Tests without tuning: the pruning of every tuner leaves its first config."""
    replace("prune_configs", lambda self, kwargs: self.configs[:1])


def benches(replace: Patch, seen: list[Any]) -> None:
    """What Triton does not forgive counts as infinitely slow."""
    original = Autotuner._bench

    def bench(self: Any, *args: Any, config: Any, **meta: Any) -> Any:
        seen.append(config.num_warps)
        try:
            return original(self, *args, config=config, **meta)
        except RuntimeError:
            return float("inf")

    replace("_bench", bench)


CALLED = {
    pins: [8, 8],
    locks: ["locked"] * 2,
    records: [("double", True, 4)] * 2,
    first_that_works: [2, 2],
    forces_first: [2, 2],
    unwraps: ["unwrapped"] * 2,
    prunes: [],
    benches: [2, 4, 8],
}
"""What each has seen of two launches of one key. Ours decides for 4 warps where it decides."""
WARPS = {pins: 8, first_that_works: 2, forces_first: 2, prunes: 2}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("install", CALLED)
@pytest.mark.parametrize("order", ["before us", "after us"])
@pytest.mark.parametrize("ours", ["patched", "decorated"])
def test_whoever_came_first_is_called_through(
    device: Any, monkeypatch: pytest.MonkeyPatch, install: Any, order: str, ours: str
) -> None:
    seen: list[Any] = []

    def replace(name: str, function: Any) -> None:
        monkeypatch.setattr(Autotuner, name, function)

    if order == "before us":
        install(replace, seen)
    if ours == "patched":
        patch_triton()
    if order == "after us":
        install(replace, seen)
    decorate = (
        triton.autotune if ours == "patched" else functools.partial(autotune, store=False, mode="exhaustive")
    )
    monkeypatch.setenv("FORECAST_AUTOTUNE_MODE", "exhaustive")
    tuner = decorate(configs=configs((2, 4, 8), (3,)), key=["n"])(fresh(double))
    for _ in range(2):
        assert launch(tuner).metadata.num_warps == WARPS.get(install, 4)
    assert (sorted(seen) if install is benches else seen) == CALLED[install]
    assert len(tuner.configs) == 3
    assert triton_run() is not None


def test_a_wrapper_that_was_there_before_the_import_is_seen_through() -> None:
    """`functools.wraps` gives it the module and the name of Triton's own."""
    run = triton_run()
    wrapper = functools.wraps(run)(lambda *args, **kwargs: run(*args, **kwargs))
    assert wrapper.__module__ == run.__module__
    try:
        Autotuner.run = wrapper
        triton_run.cache_clear()
        assert triton_run() is run
    finally:
        Autotuner.run = run


@pytest.mark.parametrize("ours", ["patched", "decorated"])
def test_a_guard_on_bench_is_heard_as_frozen(
    device: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ours: str
) -> None:
    """Known keys and stored ones are served, others raise what they raise under Triton."""

    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("tuning is forbidden by now")

    def tuner() -> Any:
        decorate = (
            triton.autotune if ours == "patched" else functools.partial(autotune, store=Store(tmp_path))
        )
        return decorate(configs=configs((2, 4, 8), (3,)), key=["n"])(fresh(double))

    monkeypatch.setenv("FORECAST_AUTOTUNE_CACHE_DIR", str(tmp_path))
    if ours == "patched":
        patch_triton()
    early = tuner()
    launch(early)
    (before,) = tables(tmp_path)
    monkeypatch.setattr(Autotuner, "_bench", refuse)
    late = tuner()
    for one in (early, late):
        launch(one)
        assert one.best_config.num_warps == 4
        with pytest.raises(ValueError, match="forbidden by now"):
            launch(one, 8192)
    assert len(tables(tmp_path)[0].measurements) == len(before.measurements)


def test_under_a_guard_what_triton_has_kept_is_served(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sealed deployments keep Triton's own files of choices, and forbid timing."""
    plain = triton.autotune(configs=blocks(32, 128), key=["n"], cache_results=True)(fresh(double))
    launch(plain)
    monkeypatch.setattr(Autotuner, "_bench", lambda *args, **kwargs: 1 / 0)
    patch_triton()
    tuner = triton.autotune(configs=blocks(32, 128), key=["n"], cache_results=True)(fresh(double))
    launch(tuner)
    assert tuner.best_config == plain.best_config
    with pytest.raises(ZeroDivisionError):
        launch(tuner, 8192)


def test_triton_s_own_timing_of_a_tuner_makes_its_clock_nobody_else_s(device: Any) -> None:
    """Triton puts its benchmark function into the tuner once it was asked for."""
    tuner = triton.autotune(configs=blocks(32, 128), key=["n"])(fresh(double))
    launch(tuner)
    patch_triton()
    launch(tuner, 8192)
    assert tuner.__dict__["_forecast"][0].last.evidence == "measured"
    assert "do_bench" not in {m.protocol for t in Store.default().tables() for m in t.measurements}


def test_threads_do_not_wait_for_a_lock_that_the_launch_holds(
    device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One lock around `Autotuner.run` and `JITFunction.run`, as servers of several threads have it."""
    lock, run = threading.RLock(), JITFunction.run

    def locked(self: Any, *args: Any, **kwargs: Any) -> Any:
        with lock:
            return run(self, *args, **kwargs)

    monkeypatch.setattr(JITFunction, "run", locked)
    monkeypatch.setenv("FORECAST_AUTOTUNE_COMPILER", "threads")
    tuner = autotune(configs=configs((2, 4, 8), (3,)), key=["n"], store=False, mode="exhaustive")(
        fresh(double)
    )
    with lock:
        launch(tuner)
    assert tuner.best_config.num_warps == 4
