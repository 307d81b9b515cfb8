"""Launches of programs on placed buffers: checked, or timed. Runs in the runner."""

from __future__ import annotations

import contextlib
import ctypes
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from forecast_autotune.timing import (
    SHORT_LAUNCH_S,
    GraphRecorder,
    RecordedGraph,
    mean_without_strays,
    pause_lengths,
    pause_seconds,
)
from forecast_harness.clocks.runner.contestant import Contestant
from forecast_harness.clocks.runner.driver import CudaDriver, DriverError
from forecast_harness.clocks.runner.kernels import RunnerKernels
from forecast_harness.clocks.runner.memory import (
    CanaryArena,
    InputReserve,
    InputReserves,
    KnownResults,
    WorkInputs,
)
from forecast_harness.clocks.runner.messages import (
    NOBODY,
    PAUSES,
    ElementKind,
    ObservedLaunch,
    ProgramInputs,
    TimingAnswer,
    TimingLimits,
    Violation,
)

_PAUSE_ROUNDS = 8


class RunnerEvent:
    """A mark in the runner's stream."""

    def __init__(self, driver: CudaDriver, handle: ctypes.c_void_p) -> None:
        self._driver, self._handle = driver, handle
        driver.record(handle)

    def elapsed_time(self, end_event: RunnerEvent, /) -> float:
        """Milliseconds to a later event, once both have passed."""
        return self._driver.elapsed_ms(self._handle, end_event._handle)


class DriverEvents:
    """Hands out events; all are taken back together, to be used again. They are freed with the process."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._in_use: list[ctypes.c_void_p] = []
        self._free: list[ctypes.c_void_p] = []

    def mark(self) -> RunnerEvent:
        """An event behind all work queued so far."""
        self._in_use.append(self._free.pop() if self._free else self._driver.event())
        return RunnerEvent(self._driver, self._in_use[-1])

    def take_back(self) -> None:
        """Take back all events that were handed out: nobody reads them any more."""
        self._free += self._in_use
        self._in_use.clear()


class RunnerGraph:
    """A `RecordedGraph` of the core's timing."""

    def __init__(self, driver: CudaDriver) -> None:
        """The graph of all work queued since the driver began to capture."""
        self._driver, self._handle = driver, driver.end_capture()

    def replay(self) -> None:
        """Queue the graph once more."""
        self._driver.launch_graph(self._handle)

    def free(self) -> None:
        """Give the graph back: it is replayed no more."""
        self._driver.destroy_graph(self._handle)


class LaunchRecorder(GraphRecorder):
    """Records launches behind pauses of all lengths, on the runner's one stream; nothing is allocated meanwhile."""

    def __init__(self, driver: CudaDriver, kernels: RunnerKernels) -> None:
        self._driver, self._pause = driver, kernels.pause
        self._graphs: list[RunnerGraph] = []
        self._pause_cost: float | None = None
        self.nothing()  # loaded now: nothing may be loaded while a graph is recorded

    def record(self, call: Callable[[], Any], pause: int = 0, pool: Any = None) -> tuple[RecordedGraph, Any]:
        """See `GraphRecorder`."""
        self._driver.begin_capture()
        try:
            if pause:
                self._pause(pause)
            result = call()
        except BaseException:
            with contextlib.suppress(RuntimeError):
                self._driver.end_capture()
            raise
        self._graphs.append(RunnerGraph(self._driver))
        return self._graphs[-1], result

    def replays(self, launch: Callable[[], None]) -> list[tuple[Callable[[], None], int]]:
        """(function that queues a launch behind a pause, the pause in cycles), for every pause."""
        return [(self.record(launch, pause)[0].replay, pause) for pause in pause_lengths()]

    def forget(self) -> None:
        """Free all recorded graphs."""
        while self._graphs:
            self._graphs.pop().free()

    def cost_of_pauses(self, flush: Callable[[], None]) -> float:
        """Seconds that a pause takes beyond its length, see `pause_cost`; `flush` comes before every replay."""
        if self._pause_cost is None:
            events = DriverEvents(self._driver)

            def replay(graph: RecordedGraph) -> tuple[Any, Any]:
                flush()
                start = events.mark()
                graph.replay()
                return start, events.mark()

            self._pause_cost = self.pause_cost(replay, self._driver.synchronize, _PAUSE_ROUNDS)
        return self._pause_cost


# --- launches of programs ---


_MOST_MOVED_BYTES = 16 << 20
"""Inputs of more bytes are compared on the device, after a launch that is checked."""
INPUT_CHANGED = "input changed"
"""The rule against writing into an input that a call does not update."""
_LEAST_S = 1e-7
"""Seconds of a launch behind a pause: the cost of pauses is known to within some 0.1 us."""
_FAR_BEYOND, _FIRST_S = 5.0, 2e-3
"""A program whose first launch, which loads code, takes so many times the bound, and so much longer, is given up."""


class LaunchSession:
    """A device, with the runner's own kernels. `mark` is called with the contestant about to be launched."""

    def __init__(self, driver: CudaDriver, flush_bytes: int, mark: Callable[[int], None]) -> None:
        self.driver, self.kernels = driver, RunnerKernels(driver)
        self._arena, self._mark = CanaryArena(driver, self.kernels), mark
        self._flush_bytes, self._flush = flush_bytes, driver.allocate(flush_bytes)
        driver.set_no_l2_aside()  # once: no code of a candidate's runs on the host
        self._recorder = LaunchRecorder(driver, self.kernels)
        self._events = DriverEvents(driver)
        self._chance = random.SystemRandom()
        self._buffers_to_wipe: list[str] = []
        self._wipe_value = 0
        self._call = ProgramInputs("", {})
        self._reserves = InputReserves(driver, self.kernels)
        self._reserve = InputReserve(0, 0, {}, {})
        self._results = KnownResults(driver, self.kernels)
        self._inputs = WorkInputs(driver, self.kernels)
        self._last_number = 0

    # --- placing ---

    def _place(self, inputs: ProgramInputs, contestants: Sequence[Contestant]) -> None:
        sizes = {name: contents.size for name, contents in inputs.inputs.items()}
        self._buffers_to_wipe = list(inputs.outputs)
        sizes |= inputs.outputs
        for contestant in contestants:
            sizes |= contestant.scratch
            self._buffers_to_wipe += list(contestant.scratch)
        try:
            places = self._arena.place(sizes)
        except DriverError:
            if not self._reserves.forget_all():
                raise
            places = self._arena.place(sizes)
        self._reserve = self._reserves.get(inputs.key, inputs.inputs)
        work = {name: places[name] for name in inputs.inputs}
        self._inputs.place(work, self._reserve.places, inputs.rotate, inputs.updates)
        for contestant in contestants:
            contestant.bind(places)
        self._call = inputs

    def knows_results(self, key: str) -> bool:
        """Whether results at a call can be compared with a right program's."""
        return key in self._results

    def forget(self, key: str) -> None:
        """Free a call's inputs and results on the device."""
        self._reserves.forget(key)
        self._results.forget(key)

    def _launch(self, number: int, contestant: Contestant, rotation: Mapping[str, int]) -> None:
        """Launch a contestant once, on inputs with this rotation, and wait for it."""
        self._inputs.copy(rotation)
        self._wipe()
        self.driver.synchronize()
        self._mark(number)
        contestant.launch()
        self.driver.synchronize()
        self._mark(NOBODY)

    def _wipe(self) -> None:
        """Queue wiping outputs, scratch, shared memory and caches of data of earlier launches.

        Never with the same value twice in a row, so that elements which are not written differ between launches.
        """
        values = (0xFF, 0x7F, self._chance.randrange(256))
        self._wipe_value = self._chance.choice([v for v in values if v != self._wipe_value])
        self._arena.wipe(self._buffers_to_wipe, self._wipe_value)
        self.kernels.overwrite(self._chance.randrange(1 << 32))

    def _outputs(self, contestant: Contestant) -> tuple[bytes, ...]:
        result = []
        for tensor in contestant.plan.returned:
            place = self._arena.places[contestant.buffer(tensor.buffer)]
            result.append(bytes(self.driver.download(place.address + tensor.offset, tensor.size)))
        if not contestant.plan.returned:
            places = (self._arena.places[name] for name in self._call.outputs)
            result = [bytes(self.driver.download(p.address, p.size)) for p in places]
        return tuple(result)

    def _observed_launch(self, contestant: Contestant, rotation: Mapping[str, int]) -> ObservedLaunch:
        """The outputs of the launch that has just ended, in its buffers."""
        if self._call.key not in self._results:
            return ObservedLaunch(rotation, self._outputs(contestant))
        # The right outputs on other inputs are not known.
        is_rotated = any(rotation.values())
        errors = {} if is_rotated else self._results.errors(self._call.key, self._arena.places)
        return ObservedLaunch(rotation, errors=errors)

    def _changed_on_device(self, rotation: Mapping[str, int]) -> list[str]:
        """The result of `_changed_inputs`, without moving bytes: for many bytes at a thousandth of the cost."""
        names = []
        stale = self._reserves.changed(self._reserve, self._call.inputs)
        for name in self._call.inputs:
            place, reserve = self._arena.places[name], self._reserve.places[name]
            where = place.address, reserve, place.size, rotation.get(name, 0)
            if name not in self._call.updates and self.kernels.differ(*where):
                names.append(name)
            elif name in stale:
                names.append(f"the copy of {name}")
        if self._results.changed(self._call.key):
            names.append("what its results are compared with")
        return names

    def _changed_inputs(self, rotation: Mapping[str, int]) -> list[str]:
        """Inputs, or the copies that they come from, that differ from those that the host has sent."""
        size = sum(contents.size for contents in self._call.inputs.values())
        if size > _MOST_MOVED_BYTES or self._call.key in self._results:
            return self._changed_on_device(rotation)
        names = []
        for name, contents in self._call.inputs.items():
            data, turn = contents.whole(), rotation.get(name, 0)
            place, reserve = self._arena.places[name], self._reserve.places[name]
            expected = data[turn:] + data[:turn]
            if name not in self._call.updates and self.driver.download(place.address, place.size) != expected:
                names.append(name)
            elif self.driver.download(reserve, len(data)) != data:
                names.append(f"the copy of {name}")
        return names

    def _violations(
        self, number: int, rotation: Mapping[str, int], changes: Callable[[Mapping[str, int]], list[str]]
    ) -> list[Violation]:
        if violations := self._out_of_bounds(number):
            return violations
        if names := changes(rotation):
            return [Violation(number, INPUT_CHANGED, f"it wrote into {', '.join(names)}")]
        return []

    def _out_of_bounds(self, number: int) -> list[Violation]:
        count = self._arena.broken_canaries()
        message = f"{count} bytes beside its buffers were changed"
        return [Violation(number, "out of bounds", message)] if count else []

    # --- requests ---

    def timed_pauses(self, cycles: Sequence[int]) -> list[tuple[float, float]]:
        """Seconds of pauses of so many clock cycles: by the device's events, and by the host's clock around them."""
        result = []
        for count in cycles:
            self.driver.synchronize()
            began = time.perf_counter()
            start = self._events.mark()
            self.kernels.pause(count)
            end = self._events.mark()
            self.driver.synchronize()
            result.append((start.elapsed_time(end) * 1e-3, time.perf_counter() - began))
            self._events.take_back()
        return result

    def check(
        self, contestant: Contestant, inputs: ProgramInputs, launches: int
    ) -> tuple[list[ObservedLaunch], list[Violation]]:
        """Launch several times, each in another placement; the first two on the same inputs.

        Ends with the first violation.
        """
        observations: list[ObservedLaunch] = []
        for number in range(launches):
            self._place(inputs, [contestant])
            rotation = self._inputs.random_rotation() if number > 1 else {}
            self._launch(0, contestant, rotation)
            if violations := self._violations(0, rotation, self._changed_inputs):
                return observations, violations
            observations.append(self._observed_launch(contestant, rotation))
        return observations, []

    def learn(
        self, contestant: Contestant, inputs: ProgramInputs, kinds: Mapping[str, ElementKind], owner: int
    ) -> tuple[list[str], list[Violation]]:
        """Launch a right program once; its results in the inputs that it changes are those that others must have.

        The changed inputs, in order; those of `inputs.updates` are taken as they are, where there are any. `owner`: the
        number under which the launch is marked.
        """
        self._results.forget(inputs.key)
        updatable = replace(inputs, updates=inputs.updates or tuple(inputs.inputs))
        self._place(updatable, [contestant])
        self._launch(owner, contestant, {})
        if violations := self._violations(0, {}, self._changed_on_device):
            return [], violations
        places, copies = self._arena.places, self._reserve.places
        names = list(inputs.updates) or [
            n for n in inputs.inputs if self.kernels.differ(places[n].address, copies[n], places[n].size, 0)
        ]
        self._results.keep(inputs.key, {n: places[n] for n in names}, kinds)
        return names, []

    def time(
        self, contestants: Sequence[Contestant], inputs: ProgramInputs, limits: TimingLimits
    ) -> TimingAnswer:
        """Time launches of all contestants in turn, in a new order each round, until the last cannot win."""
        self._place(inputs, contestants)
        result = TimingAnswer([[] for _ in contestants])
        last = len(contestants) - 1
        first: list[float] = []
        for n, contestant in enumerate(contestants):  # loads, warms up
            first.append(self._time_launch(n, contestant.launch, watch=last > 0))
            if last and self._arena.are_broken():
                result.violations = self._out_of_bounds(n)
                return result
        if last and (violations := self._timed_violations(contestants)):
            result.violations = violations
            return result
        if limits.bound_s and last == 0 and first[0] > _FAR_BEYOND * limits.bound_s + _FIRST_S:
            result.seconds = [first]
            result.stopped = f"its first launch took {first[0]:.3g} s, the bound is {limits.bound_s:.3g} s"
            result.violations = self._timed_violations(contestants)
            return result
        result.recorded = min(first) < SHORT_LAUNCH_S or any(len(c.plan.steps) > 1 for c in contestants)
        replays = [
            self._recorder.replays(c.launch) if result.recorded else [(c.launch, 0)] for c in contestants
        ]
        pausing = self._recorder.cost_of_pauses(self._flush_caches) if result.recorded else 0.0
        rounds = -(-limits.most // PAUSES) * PAUSES if result.recorded else limits.most
        checked_rounds = set(self._chance.sample(range(rounds), min(limits.checks, rounds)))
        # With two, a launch has to be attributed; with one, all are its own, and canaries stay broken.
        watched_rounds = (
            range(rounds) if len(contestants) > 1 else self._chance.sample(range(rounds), min(2, rounds))
        )
        try:
            for number in range(rounds):
                for n in self._chance.sample(range(len(contestants)), len(contestants)):
                    launch, pause = replays[n][number % len(replays[n])]
                    is_checked, watch = n == last and number in checked_rounds, number in watched_rounds
                    seconds = self._time_launch(n, launch, is_checked=is_checked, watch=watch)
                    if result.recorded:
                        seconds = max(seconds - pause_seconds(pause) - pausing, _LEAST_S)
                    result.seconds[n].append(seconds)
                    if watch and self._arena.are_broken():
                        result.violations = self._out_of_bounds(n)
                        return result
                    if is_checked:
                        rotation = dict(self._inputs.rotation)
                        result.launches.append(self._observed_launch(contestants[n], rotation))
                result.stopped = cannot_win(result.seconds, limits, result.recorded)
                if result.stopped:
                    break
            result.violations = self._timed_violations(contestants)
        finally:
            self._recorder.forget()
        return result

    def _time_launch(
        self, number: int, launch: Callable[[], None], *, is_checked: bool = False, watch: bool = False
    ) -> float:
        """Seconds of one launch with cold caches, by the device's events.

        `is_checked`: its results will be compared; `watch`: canaries are digested behind it.
        """
        self._last_number = number
        if self._call.key in self._results:  # results are known for inputs without rotation alone
            self._inputs.renew(clean=is_checked)
        else:
            self._inputs.copy(self._inputs.random_rotation())
        self._wipe()
        self._flush_caches()
        self._mark(number)
        start = self._events.mark()
        launch()
        end = self._events.mark()
        if watch:
            self._arena.queue_watch()
        self.driver.synchronize()
        self._mark(NOBODY)
        seconds = start.elapsed_time(end) * 1e-3
        self._events.take_back()
        return seconds

    def _timed_violations(self, contestants: Sequence[Contestant]) -> list[Violation]:
        """The rules that timed launches broke: the last one, unless one of several spoilt inputs before."""
        self._inputs.restore()
        result = self._violations(self._last_number, self._inputs.rotation, self._changed_on_device)
        if result and result[0].rule == INPUT_CHANGED and self._call.key in self._results:
            # Such inputs last for many launches: whose doing it is shows when each is launched alone.
            for number in reversed(range(len(contestants))):
                self._launch(number, contestants[number], {})
                if self._changed_on_device({}):
                    return [replace(result[0], contestant=number)]
            return [replace(result[0], contestant=len(contestants) - 1)]
        return result

    def _flush_caches(self) -> None:
        self.driver.release_persisting_l2()
        self.kernels.read(self._flush, self._flush_bytes)


def cannot_win(seconds: Sequence[Sequence[float]], limits: TimingLimits, recorded: bool) -> str:
    """Why the last contestant cannot beat the bound or the first one any more; '' while it can.

    Behind pauses the mean of a whole round counts as one time; else the fastest of all launches counts.
    """
    own = seconds[-1]
    if recorded:
        rounds = len(own) // PAUSES
        own = [mean_without_strays(own[n * PAUSES : (n + 1) * PAUSES]) for n in range(rounds)]
    least = max(1, limits.least // PAUSES) if recorded else limits.least
    if len(own) < least or (len(seconds) < 2 and not limits.bound_s):
        return ""
    bound = limits.bound_s
    if len(seconds) > 1 and not bound:
        bound = mean_without_strays(seconds[0])
    return f"its fastest launch took {min(own):.3g} s, the bound is {bound:.3g} s" if min(own) > bound else ""
