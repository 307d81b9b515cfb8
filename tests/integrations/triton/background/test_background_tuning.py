"""Background mode on a device that is not there: what is launched, what is timed, and what a program's tensors hold."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.driver import driver

from forecast_autotune import CaptureError, autotune, settle
from forecast_autotune.policy import Exhaustive
from forecast_autotune.records import Evidence
from forecast_autotune.store import Store
from forecast_integrations.triton.background import tuner as background_tuner
from forecast_integrations.triton.background.tuner import BACKGROUND, StallBudget
from forecast_integrations.triton.null_device import NullDevice, null_device
from forecast_integrations.triton.publication import LISTENERS
from tests.integrations.null import binaries, by_launch_options, child, configs, fresh, tables
from tests.waiting import under_way


@triton.jit
def increment(x, n, BLOCK: tl.constexpr):
    """x += 1, in place: every launch more or less shows."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)


class IncrementingDevice(NullDevice):
    """Adds one to the tensors of every launch, as `increment` does."""

    def _launcher(self, src: object, metadata: Any) -> Callable[..., None]:
        counted = super()._launcher(src, metadata)

        def launch(*args: object) -> None:
            counted()
            for value in args:
                if isinstance(value, torch.Tensor):
                    value.add_(1)

        return launch


def tuned(**options: Any) -> Any:
    """A tuner over `increment` that knows nothing yet, and times all configs: 4 warps and 3 stages are fastest.

    What is not timed, for want of time, depends on how busy the machine is.
    """
    listed = options.pop("listed", None) or configs((2, 4, 8), (2, 3))
    given = {"store": False, "policy": Exhaustive(), **options}
    return autotune(configs=listed, key=["n"], **given)(fresh(increment))


def launch(tuner: Any, x: torch.Tensor) -> None:
    """Add one to a tensor."""
    n = x.numel()
    tuner[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, n)


def launch_until(done: Callable[[], object], tuner: Any, x: torch.Tensor) -> int:
    """Launch until something holds, looked at after each launch; returns how many launches that took."""
    until = time.monotonic() + 120
    for count in itertools.count(1):
        launch(tuner, x)
        if done():
            return count
        assert time.monotonic() < until, under_way()
        time.sleep(0.001)
    raise AssertionError


def launch_until_settled(tuner: Any, x: torch.Tensor) -> int:
    """Launch until a choice is final; returns how many launches that took."""
    return launch_until(lambda: tuner.cache, tuner, x)


@pytest.fixture
def background(shared_cache: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[IncrementingDevice]:
    """The active device, in background mode; timing takes at most 500 of a second's 1000 milliseconds."""
    monkeypatch.setenv("FORECAST_AUTOTUNE_MODE", "background")
    monkeypatch.setenv("FORECAST_AUTOTUNE_STALL_MS", "500")
    with null_device():
        made = IncrementingDevice(by_launch_options)
        driver.set_active(made)  # type: ignore[arg-type]
        yield made
        BACKGROUND.stop(60.0)
    BACKGROUND.budget = StallBudget()
    BACKGROUND._keys.clear()  # a pending key of a tuner that something keeps alive is no affair of the next test
    BACKGROUND.reset()


def best(config: Any) -> bool:
    """Whether the device is fastest with it."""
    return bool((config.num_warps, config.num_stages) == (4, 3))


def test_a_program_sees_its_own_launches_alone_and_one_switch(
    background: IncrementingDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "binaries"))
    tuner = tuned(store=tmp_path / "store")
    x = torch.zeros(4096)
    launch(tuner, x)
    first = tuner.best_config
    assert background.launches == 1, "a miss launches, and times nothing"
    assert binaries() == 1, "nothing is compiled but what is launched"
    assert tuner.decision.evidence is Evidence.FORECAST
    assert not best(first), "else this test shows no switch"
    served = [first]
    launch_until(lambda: served.append(tuner.best_config) or tuner.cache, tuner, x)
    for _ in range(3):
        launch(tuner, x)
        served.append(tuner.best_config)
    assert (x == len(served)).all(), "candidates were timed on copies"
    switches = [i for i in range(1, len(served)) if served[i] != served[i - 1]]
    assert len(switches) == 1
    assert best(served[-1])
    assert background.launches > len(served) + 20
    decision = tuner.decision
    assert decision.evidence is Evidence.MEASURED
    (table,) = tables(tmp_path / "store")
    assert decision.measured == len({m.candidate for m in table.measurements}) >= 2
    assert {m.protocol for m in table.measurements} <= {"events-l2read-3", "events-l2read-3-turns"}
    launches = background.launches
    again = tuned(store=Store(tmp_path / "store"), mode="frozen")
    launch(again, x)
    assert best(again.best_config)
    assert again.decision.evidence is Evidence.STORED
    resumed = tuned(store=Store(tmp_path / "store"))
    launch(resumed, x)
    assert resumed.cache, "what is decided already is final at once"
    assert background.launches == launches + 2


def test_launches_are_held_up_no_more_than_the_budget_says(
    background: IncrementingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seconds are the device's own: they pass by launches, and by the work of the program between them."""
    monkeypatch.setenv("FORECAST_AUTOTUNE_STALL_MS", "20")
    BACKGROUND.budget = StallBudget(lambda: background.now_ms / 1e3)
    tuner = tuned()
    x = torch.zeros(4096)
    held_up: list[tuple[float, float]] = []
    until = time.monotonic() + 120
    begin = background.now_ms
    while not tuner.cache:
        before, launches = background.now_ms, background.launches
        launch(tuner, x)
        own_ms = 2.0  # no config takes longer
        if background.launches > launches + 1:
            held_up.append((before, background.now_ms - before - own_ms))
        background.now_ms += 10.0
        time.sleep(0.0005)
        assert time.monotonic() < until, under_way()
    slowest_ms = 2.0 + 0.05 * 10
    assert max(ms for _, ms in held_up) <= 20 + slowest_ms
    total = sum(ms for _, ms in held_up)
    assert total <= 20 * (1 + (background.now_ms - begin) / 1e3) + slowest_ms
    assert len(held_up) > 3, "it took several slices"


class BusyStream:
    """The current stream, busy until it is let go."""

    cuda_stream = 0

    def __init__(self) -> None:
        self.is_idle, self.asked = False, 0

    def query(self) -> bool:
        self.asked += 1
        return self.is_idle


def test_candidates_are_loaded_while_the_device_is_idle_and_at_the_budgets_cost(
    background: IncrementingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that loads waits for the device, and every launch of the process with it."""
    stream = BusyStream()
    served: set[bytes] = set()
    loaded: list[bytes] = []
    load = background.utils.load_binary

    def loading(name: str, binary: bytes, *given: Any) -> Any:
        if not served:
            served.add(binary)
        elif binary not in served:
            loaded.append(binary)
            background.now_ms += 700.0
        return load(name, binary, *given)

    flushed: list[bool] = []
    monkeypatch.setattr(background.utils, "load_binary", loading)
    monkeypatch.setattr(background, "clear_cache", lambda _: flushed.append(stream.is_idle))
    tuner, x = tuned(), torch.zeros(4096)
    launch(tuner, x)
    BACKGROUND.budget = StallBudget(lambda: background.now_ms / 1e3)
    monkeypatch.setattr(background, "current_stream", lambda: stream, raising=False)
    launches = background.launches
    made = launch_until(lambda: stream.asked > 3, tuner, x)
    assert loaded == []
    assert background.launches == launches + made, "nothing is timed before it is loaded"
    stream.is_idle = True
    launch_until(lambda: loaded, tuner, x)
    assert len(set(loaded)) == 1
    assert flushed[0], "its code is loaded at the first one"
    assert BACKGROUND.budget.left_ms(500.0) < 0, "loading is paid for"


def test_a_device_that_is_never_idle_puts_the_decision_off(
    background: IncrementingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = BusyStream()
    monkeypatch.setattr(background_tuner, "IDLE_S", 0.5)
    tuner, x = tuned(), torch.zeros(4096)
    launch(tuner, x)
    monkeypatch.setattr(background, "current_stream", lambda: stream, raising=False)
    (pending,) = tuner.parts()[0].pending.values()
    launch_until(lambda: pending.attempts, tuner, x)
    assert not tuner.cache
    settle()
    launch(tuner, x)
    assert tuner.cache, "settle() waits for the device"


def test_inside_a_capture_nothing_is_timed_and_nothing_switches(
    background: IncrementingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuner = tuned()
    x = torch.zeros(4096)
    launch(tuner, x)
    first = tuner.best_config
    monkeypatch.setattr(background_tuner, "capturing_graph", lambda: True)
    for _ in range(50):
        launch(tuner, x)
    assert background.launches == 51
    assert tuner.best_config is first
    with pytest.raises(CaptureError, match=r"settle\(\)"):
        settle()
    monkeypatch.setattr(background_tuner, "capturing_graph", lambda: False)
    (key,) = tuner._engine.pending.values()
    while key.state.value != "done":
        launch(tuner, x)
        time.sleep(0.001)
    monkeypatch.setattr(background_tuner, "capturing_graph", lambda: True)
    launch(tuner, x)
    assert tuner.best_config is first, "the choice is made, but a capture sees none of it"
    monkeypatch.setattr(
        background_tuner, "capturing_graph", lambda: threading.current_thread() is threading.main_thread()
    )
    other = threading.Thread(target=launch, args=(tuner, torch.zeros(4096)))
    other.start()
    other.join()
    launch(tuner, x)
    assert tuner.best_config is first, "nor of what other threads launch meanwhile"
    monkeypatch.setattr(background_tuner, "capturing_graph", lambda: False)
    launch(tuner, x)
    assert best(tuner.best_config)
    assert (x == x[0]).all()


def test_threads_that_launch_one_key_each_see_their_own_launches(background: IncrementingDevice) -> None:
    tuner = tuned()
    launch(tuner, torch.zeros(4096))
    tensors = [torch.zeros(4096) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        counts = list(pool.map(lambda x: launch_until_settled(tuner, x), tensors, timeout=120))
    assert [int(x[0]) for x in tensors] == counts
    (final,) = tuner.cache.values()
    launch(tuner, tensors[0])
    assert (
        tuner.best_config is final
    )  # which one: the device's only clock goes on with every thread's launches


def test_settle_times_whole_what_has_arguments(
    background: IncrementingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORECAST_AUTOTUNE_STALL_MS", "0")
    tuner = tuned()
    x, y = torch.zeros(4096), torch.zeros(8192)
    for _ in range(20):
        launch(tuner, x)
    launch(tuner, y)
    assert background.launches == 21, "no launch is held up"
    del y
    gc.collect()
    with pytest.warns(UserWarning, match="1 keys are still pending: increment with key .*8192"):
        (left,) = settle()
    assert left.kernel == "increment"
    assert "without arguments" in left.reason
    assert (x == 20).all()
    launch(tuner, x)
    assert best(tuner.best_config)
    z = torch.zeros(8192)
    launch(tuner, z)
    with pytest.warns(UserWarning, match="no more than 0 s"):
        assert len(settle(timeout=0)) == 1
    assert settle() == ()
    launch(tuner, z)
    assert best(tuner.best_config)
    assert (z == 2).all()


def test_no_tensor_is_kept_alive(background: IncrementingDevice) -> None:
    tuner = tuned()
    x = torch.zeros(4096)
    own = 0
    while background.launches == own:  # until candidates were timed on copies of it
        launch(tuner, x)
        own += 1
        time.sleep(0.001)
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None
    launch_until_settled(tuner, torch.zeros(4096))


def test_hooks_surround_timed_launches_and_see_copies(background: IncrementingDevice) -> None:
    x = torch.zeros(4096)
    seen: list[int] = []

    def before(named: dict[str, Any], reset_only: bool = False) -> None:
        seen.append(named["x"].data_ptr())
        named["x"].zero_()

    tuner = tuned(pre_hook=before)
    assert launch_until_settled(tuner, x) == int(x[0])
    assert len(seen) > 20
    assert x.data_ptr() not in seen


@pytest.mark.parametrize("option", ["reset_to_zero", "restore_value"])
def test_cleared_and_restored_arguments_are_copies(background: IncrementingDevice, option: str) -> None:
    x = torch.zeros(4096)
    assert launch_until_settled(tuned(**{option: ["x"]}), x) == int(x[0])


def test_an_interruption_is_raised_and_loses_nothing(background: IncrementingDevice) -> None:
    interruptions = [KeyboardInterrupt]

    def before(named: dict[str, Any], reset_only: bool = False) -> None:
        if interruptions and named["n"] == 4096 and background.launches > 4:
            raise interruptions.pop()

    tuner = tuned(pre_hook=before)
    x = torch.zeros(4096)
    with pytest.raises(KeyboardInterrupt):
        launch_until_settled(tuner, x)
    launch_until_settled(tuner, x)
    launch(tuner, x)
    assert best(tuner.best_config)


def test_a_hook_that_fails_ends_the_timing_and_not_the_program(
    background: IncrementingDevice, recwarn: pytest.WarningsRecorder
) -> None:
    def before(named: dict[str, Any], reset_only: bool = False) -> None:
        raise LookupError("a hook of the user's")

    tuner = tuned(pre_hook=before)
    x = torch.zeros(4096)
    launch(tuner, x)
    first = tuner.best_config
    count = launch_until_settled(tuner, x)
    assert tuner.best_config is first
    assert int(x[0]) == count + 1
    said = [str(w.message) for w in recwarn if "keeps the config" in str(w.message)]
    assert len(said) == 1
    assert "a hook of the user's" in said[0]


def test_a_candidate_that_fails_is_recorded_and_passed_over(
    background: IncrementingDevice, tmp_path: Path
) -> None:
    tuner = tuned(listed=configs((2, 4), (3,)), store=tmp_path / "store", mode="background")
    x = torch.zeros(4096)
    launch(tuner, x)
    served, clock = tuner.best_config.num_warps, background.clock

    def others_fail(metadata: Any) -> float:
        if metadata.num_warps != served:
            raise RuntimeError("an illegal instruction")
        return clock(metadata)

    background.clock = others_fail
    launch_until_settled(tuner, x)
    assert tuner.best_config.num_warps == served
    (table,) = tables(tmp_path / "store")
    found = {m.candidate.config.num_warps: str(m.outcome) for m in table.by_candidate().values()}
    assert found == {served: "ok", 6 - served: "runtime_error"}


def test_arguments_that_cannot_be_copied_keep_their_config(background: IncrementingDevice) -> None:
    class Wrapped(torch.Tensor):
        """Nobody knows what it holds."""

    tuner = tuned()
    x = torch.zeros(4096).as_subclass(Wrapped)
    with pytest.warns(UserWarning, match="not timed in the background: .*Wrapped.*MODE=tune"):
        launch(tuner, x)
    assert tuner.cache
    assert settle() == ()


def test_a_benchmark_function_of_ones_own_holds_no_launch_up(background: IncrementingDevice) -> None:
    called: list[object] = []

    def bench(kernel_call: Any, quantiles: Any) -> list[float]:
        called.append(kernel_call)
        return [1.0, 1.0, 1.0]

    tuner = tuned(do_bench=bench)
    x = torch.zeros(4096)
    for _ in range(3):
        launch(tuner, x)
    assert (called, background.launches) == ([], 3)
    assert tuner.decision.evidence is Evidence.FORECAST


def test_a_forked_child_decides_for_itself(background: IncrementingDevice) -> None:
    tuner = tuned()
    x = torch.zeros(4096)
    for _ in range(5):
        launch(tuner, x)

    def work() -> None:
        assert settle(120) == ()
        launch(tuner, x)
        assert best(tuner.best_config)

    assert os.waitpid(child(work), 0)[1] == 0
    launch_until_settled(tuner, x)


@pytest.mark.slow
def test_a_process_that_ends_meanwhile_ends_quietly(background: IncrementingDevice, tmp_path: Path) -> None:
    text = f"""
        import torch, triton
        from forecast_autotune import autotune
        from forecast_integrations.triton.null_device import null_device
        from tests.integrations.null import by_launch_options, configs, double, launch

        device = null_device(by_launch_options)
        device.__enter__()  # and never left: a device outlives the program
        tuner = autotune(configs=configs(), key=["n"], store={str(tmp_path / "store")!r})(double)
        launch(tuner)
        while not list(tuner._engine.options.open_store(tuner._engine.options.settings()).tables()):
            launch(tuner)
        assert not tuner.cache
        raise SystemExit(7)
    """
    root = Path(__file__).parents[4]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)], cwd=root, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (7, "")
    (table,) = tables(tmp_path / "store")
    assert all(m.ok for m in table.measurements), "no launch counts as one that took the process down"


def test_a_launch_that_fails_as_the_process_ends_says_nothing_of_its_candidate(
    background: IncrementingDevice, tmp_path: Path
) -> None:
    x = torch.zeros(4096)
    ended = []

    def before(nargs: dict[str, Any], reset_only: bool = False) -> None:
        if nargs["x"] is not x:
            BACKGROUND.stop(0.0)
            ended.append(True)
            raise RuntimeError("no driver is left")

    tuner = tuned(store=tmp_path / "store", pre_hook=before)
    launch_until(lambda: ended, tuner, x)
    BACKGROUND.stop(60.0)
    assert not [m for table in tables(tmp_path / "store") for m in table.measurements if not m.ok]
    assert not list((tmp_path / "store").rglob("running-*"))


def test_nothing_is_timed_with_arguments_that_compile_to_other_code(background: IncrementingDevice) -> None:
    tuner = tuned()
    first = torch.zeros(4096)
    launch(tuner, first)
    unaligned = torch.zeros(4097)[1:]
    for _ in range(20):
        launch(tuner, unaligned)
        time.sleep(0.001)
    assert background.launches == 21
    with pytest.warns(UserWarning, match="compile to other code"):
        (left,) = settle()
    assert left.key[0] == 4096
    launch(tuner, first)
    assert settle() == ()
    launch(tuner, unaligned)
    assert best(tuner.best_config)
    assert (unaligned == 21).all()


def test_a_key_that_is_launched_at_other_sizes_alone_holds_up_no_other(
    background: IncrementingDevice,
) -> None:
    warmed_up, other = tuned(), tuned()
    warmed_up.keys = []  # all sizes are one key, which was met at a size that never comes back
    launch(warmed_up, torch.zeros(4096))
    launch(warmed_up, torch.zeros(8192))
    launch_until(lambda: launch(warmed_up, torch.zeros(8192)) or other.cache, other, torch.zeros(4096))
    assert not warmed_up.cache


def test_settle_leaves_queued_keys_whose_arguments_are_gone_and_decides_the_others(
    background: IncrementingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORECAST_AUTOTUNE_STALL_MS", "0.001")  # launches are queued, and lend no time
    tuner = tuned()
    for size in range(1024, 1024 + 6 * 16, 16):
        for _ in range(2):
            launch(tuner, torch.zeros(size))
    held = torch.zeros(4096)
    for _ in range(2):
        launch(tuner, held)
    with pytest.warns(UserWarning, match="keys are still pending"):
        left = settle()
    gone = {one.key[0] for one in left if "are gone" in one.reason}
    assert gone >= set(range(1024, 1120, 16))
    assert [key[0] for key in tuner.cache] == [4096]


def test_a_listener_that_raises_loses_no_choice(
    background: IncrementingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*told: object) -> None:
        raise ValueError("listener")

    monkeypatch.setattr("forecast_integrations.triton.publication.LISTENERS", [*LISTENERS, fail])
    tuner, x = tuned(), torch.zeros(4096)
    with pytest.raises(ValueError, match="listener"):
        launch(tuner, x)
    assert not tuner.cache, "the key is pending, whatever its listener says"
    with pytest.warns(UserWarning, match="a listener failed"):
        launch_until_settled(tuner, x)
    assert [*map(best, tuner.cache.values())] == [True]


def test_a_budget_of_launch_time_is_saved_up_for_a_second_and_paid_back_at_its_rate() -> None:
    now = 100.0
    budget = StallBudget(lambda: now)
    assert budget.left_ms(0.0) == 0.0, "no rate leaves nothing"
    assert budget.left_ms(20.0) == 20.0
    now += 1000.0
    assert budget.left_ms(20.0) == 20.0, "at most a second is saved up"
    budget.charge(15.0)
    assert budget.left_ms(20.0) == 5.0
    now += 0.5
    assert budget.left_ms(20.0) == 15.0
    budget.charge(95.0)
    assert budget.left_ms(20.0) == -80.0, "a launch that took too much is paid back first"
    now += 4.0
    assert budget.left_ms(20.0) == 0.0
    now += 1.0
    assert budget.left_ms(20.0) == 20.0
