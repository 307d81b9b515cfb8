"""The process's background tuner: one thread that decides, and launches of the program that lend it their time.

At a launch of a pending key the launching thread runs a slice: it launches the candidates that the deciding thread
asks for on copies of the arguments, and waits for nothing. A key's config changes at its next launch, and only there.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Mapping, MutableMapping
from dataclasses import dataclass, field
from enum import Enum

from forecast_autotune.errors import CaptureError, ForecastAutotuneError
from forecast_integrations.triton.background.arguments import (
    WeakArguments,
    copied_arguments,
)
from forecast_integrations.triton.background.key_decision import (
    KeyDecision,
    LaunchSeries,
    current_device_index,
)
from forecast_integrations.triton.device_access import (
    LOCK,
    capturing_graph,
    decision_depth,
    harmless_to_captures,
)
from forecast_integrations.triton.problem.call import KernelCall
from forecast_integrations.triton.problem.compilations import RECORDER
from forecast_integrations.triton.problem.copied_tensors import UncopyableArgumentsError
from forecast_integrations.triton.problem.describe import call_form
from forecast_integrations.triton.protocols import Key, LaunchConfig
from forecast_integrations.triton.timer.timers import LaunchTimeoutError, is_idle, l2_flush, prompt_turns


class StallBudget:
    """A process's milliseconds for timing. The excess of a launch is paid back before the next one."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock` gives seconds."""
        self.clock = clock
        self._debt_ms = 0.0
        self._at = clock()

    def left_ms(self, ms_per_second: float) -> float:
        """Milliseconds to spend now: at most one second's, below zero after a launch that took too much."""
        now = self.clock()
        self._debt_ms = max(0.0, self._debt_ms - ms_per_second * (now - self._at))
        self._at = now
        return ms_per_second - self._debt_ms

    def charge(self, ms: float) -> None:
        """Note milliseconds as spent, or given back where they are below zero."""
        self._debt_ms = max(0.0, self._debt_ms + ms)


class KeyState(Enum):
    """The state of a key's decision."""

    WAITING = "waiting"
    """The key's next launch queues it."""
    QUEUED = "queued"
    TUNING = "tuning"
    DONE = "done"
    """Its final config is installed at its next launch."""


_CAPTURE_S = 10.0
"""Seconds after which a capture that has launched a key counts as ended, if its thread has launched nothing since."""


@dataclass(frozen=True)
class PendingDecision:
    """A key whose timing has not ended, as `settle` reports it."""

    kernel: str
    key: Key
    reason: str
    """Why its timing has not ended."""


@dataclass(eq=False)
class PendingKey:
    """One key's state, shared by the thread that decides it and the threads that launch it."""

    decision: KeyDecision
    served_config: LaunchConfig
    siblings: MutableMapping[Key, PendingKey]
    """The pending keys of the key's tuner, with the key until its final config is installed."""
    state: KeyState = KeyState.WAITING
    series: LaunchSeries | None = None
    """Launches that the deciding thread waits for."""
    final_config: LaunchConfig | None = None
    arguments: WeakArguments | None = None
    """The arguments of its latest launch."""
    launched_at: float = field(default_factory=time.monotonic)
    """Its latest launch, by `time.monotonic`."""
    not_before: float = 0.0
    """When a launch may queue it again, by the same clock."""
    form: Hashable = ()
    """The form of the call that it was met with (`call_form`): candidates are timed at calls of the same form."""
    attempts: int = 0
    captured_at: dict[int, float] = field(default_factory=dict)
    """Time of the latest launch inside a capture that may not have ended, by the thread's number."""
    is_unfit: bool = False
    """Whether candidates could not be timed at the key's latest launch, which then does not count as one."""
    is_unwanted: bool = False
    """Whether the deciding thread has to put the key off."""

    @property
    def is_pending(self) -> bool:
        """Whether the key's final config is not installed yet."""
        return self.siblings.get(self.decision.key) is self

    def current_config(self) -> LaunchConfig:
        """Return the config of launches now: another thread may have installed the final one."""
        decision = self.decision
        return (
            self.served_config
            if self.is_pending
            else decision.tuner.cache.get(decision.key, self.served_config)
        )

    def is_captured(self) -> bool:
        """Whether some thread may be capturing launches of this key."""
        since = time.monotonic() - _CAPTURE_S
        return any(at > since for at in list(self.captured_at.values()))

    def why_untimed(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> str | None:
        """Why candidates cannot be timed at a launch with these arguments; None where they can."""
        decision = self.decision
        if current_device_index() != decision.device:
            return "it was launched on another device than the one that it is decided for"
        if call_form(decision.tuner.fn, args, kwargs) != self.form:
            return (
                "its latest arguments compile to other code than its first, or take another time: other sizes, dtypes, "
                "alignments, divisors or constants"
            )
        functions = decision.call.functions.values()
        if not all(getattr(one, "covers", lambda *_: True)(args, kwargs) for one in functions):
            return "its latest arguments are none that all of its variants were verified for"
        return None

    def install(self) -> LaunchConfig:
        """Launch with the final config from now on; to be called between launches."""
        assert self.final_config is not None
        decision = self.decision
        decision.tuner.cache[decision.key] = self.final_config
        self.siblings.pop(decision.key, None)
        return self.final_config

    def report(self, reason: str) -> PendingDecision:
        """Return the report of a pending key for its user."""
        return PendingDecision(self.decision.problem.kernel.name, self.decision.key, reason)


IDLE_S = 10.0
"""Seconds without a launch of a key after which its decision is put off; one, where others wait."""
_POLL_S = 0.0005
_EXIT_S = 1.0
"""Seconds that the end of a process waits for the thread at most: it ends its children."""
_LONGEST_PAUSE_S = 600.0


class DecisionPutOffError(ForecastAutotuneError):
    """A key is not launched at present, so that its candidates cannot be timed; measurements are kept."""


class BackgroundStoppedError(ForecastAutotuneError):
    """The process ends, and so does its background tuner."""


class BackgroundTuner:
    """Decides pending keys one after another on a daemon thread, which begins at the first one's second launch."""

    def __init__(self, budget: StallBudget | None = None) -> None:
        self._keys: weakref.WeakSet[PendingKey] = weakref.WeakSet()
        self.budget = budget or StallBudget()
        self.reset()

    def reset(self) -> None:
        """Forget decisions under way: after a fork they are another process's."""
        self._condition = threading.Condition()
        self._slicing = threading.Lock()
        self._queue: deque[PendingKey] = deque()
        self._thread: threading.Thread | None = None
        self._is_stopped = False
        self._is_settling = False
        for key in list(self._keys):
            key.series, key.is_unwanted = None, False
            if key.state is not KeyState.DONE:
                key.state = KeyState.WAITING

    def add(self, key: PendingKey, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Take on a key that is about to be launched with these arguments; it is queued by its next launch."""
        key.arguments = WeakArguments.of(args, kwargs)
        key.form = call_form(key.decision.tuner.fn, args, kwargs)
        with self._condition:
            self._keys.add(key)

    def config_for(
        self, key: PendingKey, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> LaunchConfig:
        """Return the config of the next launch, before which launches of a candidate may be timed."""
        if capturing_graph():
            with self._condition:
                key.captured_at[threading.get_ident()] = time.monotonic()
                return key.current_config()
        key.captured_at.pop(threading.get_ident(), None)
        if key.state is KeyState.DONE:
            return self._install(key)
        now = time.monotonic()
        if not key.is_unfit:
            key.launched_at = now
        key.arguments = WeakArguments.of(args, kwargs)
        stall_ms = key.decision.settings.stall_ms
        if stall_ms <= 0 or decision_depth():
            return key.served_config
        if key.state is KeyState.WAITING and now >= key.not_before:
            self._enqueue(key)
        series = key.series
        if series is not None and not series.is_launched:
            budget_ms = self.budget.left_ms(stall_ms)
            cost = series.next_cost_ms() or 0.0
            if budget_ms >= min(max(0.5 * stall_ms, cost), 0.99 * stall_ms):
                self._lend_launch(key, series, args, kwargs, budget_ms)
        return key.served_config

    def settle(self, timeout: float | None) -> list[PendingDecision]:
        """Decide what is pending as far as its arguments exist; see `settle` of this package."""
        if capturing_graph():
            raise CaptureError("settle() was called inside a CUDA-graph capture, where nothing can be timed")
        until = None if timeout is None else time.monotonic() + timeout
        reasons: dict[PendingKey, str] = {}
        self._is_settling = True
        try:
            while True:
                with self._condition:
                    pending = [key for key in self._keys if key.is_pending]
                for key in pending:
                    if key.state is KeyState.DONE:
                        self._install(key)
                open_keys = [key for key in pending if key.state is not KeyState.DONE and key not in reasons]
                if not open_keys:
                    break
                if self._is_stopped:
                    reasons |= dict.fromkeys(open_keys, "the process ends")
                    break
                if until is not None and time.monotonic() >= until:
                    reasons |= dict.fromkeys(open_keys, f"settle() had no more than {timeout:g} s")
                    break
                for key in open_keys:
                    if (reason := self._advance(key)) is not None:
                        reasons[key] = reason
                with self._condition:
                    self._condition.wait(_POLL_S)
        finally:
            self._is_settling = False
        return [key.report(reason) for key, reason in reasons.items() if key.is_pending]

    def _advance(self, key: PendingKey) -> str | None:
        """Make the launches that the deciding thread waits for; returns the reason where that is impossible."""
        arguments = None if key.arguments is None else key.arguments.alive()
        if arguments is None:
            key.is_unwanted = key.state is not KeyState.WAITING
            return (
                "it cannot be timed without arguments: those of its latest launch are gone; launch it again"
            )
        if (why := key.why_untimed(*arguments)) is not None:
            key.is_unwanted = key.state is not KeyState.WAITING
            return why
        key.launched_at = time.monotonic()
        if key.state is KeyState.WAITING:
            self._enqueue(key)
        series = key.series
        if series is not None and not series.is_launched:
            grid = {"grid": key.decision.call.kwargs["grid"]} if "grid" in key.decision.call.kwargs else {}
            self._lend_launch(key, series, arguments[0], {**arguments[1], **grid}, math.inf)
        return None

    def stop(self, wait_s: float = _EXIT_S) -> None:
        """End the thread and the children that compile for it, and wait for so many seconds at most."""
        with self._condition:
            self._is_stopped = True
            self._condition.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(wait_s)

    def _install(self, key: PendingKey) -> LaunchConfig:
        """Launch a key with its final config from now on, unless some thread is capturing launches of it."""
        with self._condition:
            if key.is_pending and not key.is_captured():
                return key.install()
            return key.current_config()

    def _enqueue(self, key: PendingKey) -> None:
        with self._condition:
            if key.state is not KeyState.WAITING or self._is_stopped:
                return
            key.state, key.is_unwanted, key.is_unfit = KeyState.QUEUED, False, False
            key.launched_at = time.monotonic()
            self._queue.append(key)
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="forecast-background", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the interpreter ends, or there is no room for another thread
                    key.state = KeyState.WAITING
                    self._queue.clear()
                    return
                self._thread = thread
            self._condition.notify_all()

    # The launching thread's part.

    def _lend_launch(
        self,
        key: PendingKey,
        series: LaunchSeries,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        most_ms: float,
    ) -> None:
        """Launch some of a series on copies of these arguments, unless somebody else is timing."""
        if not self._slicing.acquire(blocking=False):
            return
        try:
            if LOCK.acquire(blocking=False):
                try:
                    self._launch_slice(key, series, args, kwargs, most_ms)
                finally:
                    LOCK.release()
        finally:
            self._slicing.release()
            with self._condition:
                self._condition.notify_all()

    def _launch_slice(
        self,
        key: PendingKey,
        series: LaunchSeries,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        most_ms: float,
    ) -> None:
        import torch
        from triton.runtime.driver import driver

        decision = key.decision
        tuner, functions = decision.tuner, decision.call.functions
        key.is_unfit = key.why_untimed(args, kwargs) is not None
        if key.is_unfit:
            return
        key.launched_at = time.monotonic()
        clock = self.budget.clock
        begin, planned_ms = clock(), 0.0
        active = driver.active
        interface = active.get_device_interface()
        if series.load is not None:
            # A driver loads code when the device is idle, and until then no thread of the process can launch.
            if most_ms < math.inf and not is_idle(interface):
                return
            with contextlib.suppress(Exception):  # it fails again at the launch
                series.load()
            series.load = None
        start, end = (interface.Event(enable_timing=True) for _ in range(2))
        with harmless_to_captures(), torch.no_grad():
            start.record()
            try:
                copy_args, copy_kwargs = copied_arguments(args, kwargs)
                call = KernelCall(tuner, copy_args, copy_kwargs, decision.call.configs, functions)
                flush = _flush(active)
                tuner.nargs = dict(zip(tuner.arg_names, copy_args, strict=False))
                copy_ms = 1e3 * (clock() - begin)
                planned_ms = series.advance(call, flush, interface, most_ms - copy_ms)
            except Exception as error:
                series.error = series.error or error
            finally:  # a Ctrl-C leaves launches behind as well
                tuner.nargs = None
                end.record()
                cost_ms = max(planned_ms, 1e3 * (clock() - begin))
                series.spans.append(((start, end), cost_ms))
                self.budget.charge(cost_ms)

    # The deciding thread's part.

    def _work(self) -> None:
        while True:
            with self._condition:
                while not self._queue and not self._is_stopped:
                    self._condition.wait()
                if self._is_stopped:
                    return
                key = self._queue.popleft()
                key.state = KeyState.TUNING
            try:
                self._decide(key)
            except BackgroundStoppedError:
                return

    def _decide(self, key: PendingKey) -> None:
        final: LaunchConfig | None = key.served_config
        try:
            self._check(key)
            # The program's threads are not to wait for this one's turn at the interpreter.
            with harmless_to_captures(), prompt_turns():
                self._select_device(key.decision.device)
                final = key.decision.make(
                    lambda series, timeout_s: self._run_series(key, series, timeout_s),
                    lambda: self._check(key),
                )
        except BackgroundStoppedError:
            raise
        except DecisionPutOffError:
            final = None
        except Exception as error:
            name = key.decision.problem.kernel.name
            reason = str(error) if isinstance(error, ForecastAutotuneError) else repr(error)
            with contextlib.suppress(Warning):  # nobody could catch it here
                warnings.warn(
                    f"kernel {name} with key {key.decision.key} keeps the config that it was first launched with: "
                    f"{reason:.300}",
                    stacklevel=2,
                )
        with self._condition:
            key.series = None
            if final is None:
                key.attempts += 1
                pause = min(_LONGEST_PAUSE_S, float(2**key.attempts))
                key.not_before, key.state = time.monotonic() + pause, KeyState.WAITING
            else:
                key.final_config, key.state = final, KeyState.DONE
            self._condition.notify_all()

    def _check(self, key: PendingKey) -> None:
        """Raise where the deciding thread has to leave a key."""
        if self._is_stopped:
            raise BackgroundStoppedError("the process ends")
        idle_s = time.monotonic() - key.launched_at
        others_wait = bool(self._queue) and not self._is_settling
        if key.is_unwanted or idle_s > (1.0 if others_wait else IDLE_S):
            raise DecisionPutOffError("it is not launched at present")

    def _run_series(self, key: PendingKey, series: LaunchSeries, timeout_s: float) -> None:
        try:
            with self._condition:
                key.series = series
                self._condition.notify_all()
                until = time.monotonic() + IDLE_S
                while not series.is_launched:
                    self._check(key)
                    if series.load is not None and time.monotonic() > until and not self._is_settling:
                        raise DecisionPutOffError("the device was never idle, to load a candidate")
                    self._condition.wait(0.25)
            with self._slicing:  # the slice that ended it has noted when it ends
                pass
            if series.error is not None:
                if self._is_stopped:  # it says nothing of the candidate: the driver may be gone already
                    raise BackgroundStoppedError("the process ends") from series.error
                raise series.error
            until = math.inf
            while not series.is_over():
                if self._is_stopped:
                    raise BackgroundStoppedError("the process ends")
                if until == math.inf and series.has_begun():
                    until = (
                        time.monotonic() + timeout_s
                    )  # before it begins, the program's own work takes the time
                if time.monotonic() > until:
                    raise LaunchTimeoutError(f"no answer from the device after {timeout_s:g} s")
                time.sleep(_POLL_S)
            for (start, end), cost_ms in series.spans:
                # The device's time on the launching stream counts, not the host's time to queue it.
                self.budget.charge(max(0.0, start.elapsed_time(end) - cost_ms))
        finally:
            key.series = None
            series.close()

    @staticmethod
    def _select_device(index: int) -> None:
        from triton.runtime.driver import driver

        # A new thread starts on device 0, whatever the program uses.
        select: Callable[[int], object] | None = getattr(
            driver.active.get_device_interface(), "set_device", None
        )
        if select is not None:
            select(index)


def _flush(active: object) -> Callable[[], object]:
    import torch

    try:
        return l2_flush(active)
    except torch.cuda.OutOfMemoryError as error:
        raise UncopyableArgumentsError(f"no memory to flush the cache with ({error})"[:200]) from None


BACKGROUND = BackgroundTuner()
"""The background tuner of this process."""

atexit.register(lambda: BACKGROUND.stop())
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: BACKGROUND.reset())


def settle(timeout: float | None = None) -> tuple[PendingDecision, ...]:
    """Time, whole and on this thread, what `background` mode has not timed yet, and let the choices be served.

    Candidates are timed on copies of the arguments of each key's latest launch, as long as those exist: this
    library keeps no tensor alive. Waits for compilations, for `timeout` seconds at most (None: as long as it takes).

    Returns the keys that are still pending, each with the reason; a warning names them, too. None where all are
    settled, and where nothing runs in `background` mode. Where compilations are recorded, the program is `ready`
    from here on. Raises `CaptureError` inside a CUDA-graph capture.
    """
    pending = tuple(BACKGROUND.settle(timeout))
    RECORDER.mark_ready(only_if_recording=True)
    if pending:
        names = "; ".join(f"{p.kernel} with key {p.key}: {p.reason}" for p in pending[:4])
        more = f"; and {len(pending) - 4} more" if len(pending) > 4 else ""
        warnings.warn(f"{len(pending)} keys are still pending: {names}{more}", stacklevel=2)
    return pending
