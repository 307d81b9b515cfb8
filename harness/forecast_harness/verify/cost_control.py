"""Work that takes seconds at large sizes: how often to do it, at random moments; and timers of such work."""

from __future__ import annotations

import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TypeVar

import torch

from forecast_autotune.processors import usable_processors
from forecast_harness.clocks.devices import device_count
from forecast_harness.sandbox.containment.confine import GPUS

_TYPICAL_LAUNCHES = 200
"""Launches of one workload in a duel that takes its time."""
_REMEMBERED_COSTS, _FEWEST_COSTS = 9, 3
_FEWEST_THREADS, _MOST_THREADS = 4, 8


class SamplingBudget:
    """A budget for one kind of work, whose cost is measured each time."""

    def __init__(
        self, seconds: float, clock: Callable[[], float] = time.perf_counter, *, long_s: float = 1.0
    ) -> None:
        """`seconds`, by `clock`: the budget, on average, for 200 launches of a workload.

        `long_s`: a first time of so many seconds counts at once; shorter work is done a few times before.
        """
        self._seconds, self._clock, self._long_s = seconds, clock, long_s
        self._costs: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_REMEMBERED_COSTS))

    def launch_share(self, name: str, usual: float) -> float:
        """The share of launches to do it at: `usual`, or less where it takes long.

        An independent coin per launch: a budget that could run out would tell when no launch is checked any
        more.
        """
        cost = statistics.median(self._costs[name]) if self._costs[name] else 0.0
        if len(self._costs[name]) < _FEWEST_COSTS and cost < self._long_s:
            return usual  # the first time may have to learn what later ones know
        return min(usual, self._seconds / (_TYPICAL_LAUNCHES * cost)) if cost else usual

    def note(self, name: str, seconds: float) -> None:
        """Note a cost; the median of the latest counts, as a few times take much longer."""
        self._costs[name].append(seconds)

    @contextmanager
    def measure_cost(self, name: str) -> Iterator[None]:
        """Note the seconds of the body."""
        begin = self._clock()
        yield
        self.note(name, self._clock() - begin)


class PhaseTimer:
    """Seconds by kind of work."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def add(self, kind: str, seconds: float) -> None:
        """Add seconds of a kind of work."""
        self._seconds[kind] = self._seconds.get(kind, 0.0) + seconds

    @contextmanager
    def phase(self, kind: str) -> Iterator[None]:
        """Add the seconds of the body, however it ends."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(kind, time.perf_counter() - begin)

    def to_json(self) -> dict[str, float]:
        """The seconds of all kinds, rounded to milliseconds."""
        return {kind: round(seconds, 3) for kind, seconds in sorted(self._seconds.items())}


@contextmanager
def use_more_cores() -> Iterator[None]:
    """Let torch use half of this device's share of the cores (at most 8) while no candidate is timed on them.

    Every other device of the machine may have a lane that does the same, or is timing. On few cores threads
    that wait for each other at every operation lose more than they gain.
    """
    before = torch.get_num_threads()
    cores = usable_processors() // (2 * max(1, device_count(), len(list(GPUS.glob("*")))))
    if cores >= _FEWEST_THREADS:
        torch.set_num_threads(min(_MOST_THREADS, cores))
    try:
        yield
    finally:
        torch.set_num_threads(before)


_T = TypeVar("_T")
_DEVICE_ERRORS = (RuntimeError, AssertionError)
"""Errors that torch raises for want of memory, of an operation, of a device, or of all CUDA code."""


class ComputeDevice:
    """The device of one judge, named as in torch."""

    def __init__(self, device: str, *, alone: bool = True) -> None:
        """`alone`: no other judge is at work for this device, and the host's cores are this one's as well.

        Threads of several judges wait for each other on busy cores: a comparison of 0.2 s then takes 80 s (eight
        judges on 16 cores).
        """
        self._device, self._alone = device, alone
        self._opening: threading.Thread | None = None
        self.failure = ""
        """Why the device is not used any more; empty while it is used."""

    @property
    def device(self) -> str:
        """The device that does the next work."""
        return "cpu" if self.failure else self._device

    def open_in_background(self) -> None:
        """Open the device in the background: a context takes up to seconds."""
        if self._device != "cpu" and self._opening is None:
            self._opening = threading.Thread(target=self._open, daemon=True)
            self._opening.start()

    def wait_until_open(self) -> None:
        """Wait until the device is open: a candidate is going to be timed."""
        if self._opening is not None:
            self._opening.join()

    def run(self, work: Callable[[str], _T], *, portable: bool = True) -> _T:
        """`work(device)`, on the host if the device fails at it or the work is not `portable`.

        Tensors that `work` makes without saying where are made there. Nothing may be left on the device in
        its result: afterwards all work there is done, and all memory given back.
        """
        self.wait_until_open()
        if portable and self.device != "cpu":
            try:
                with torch.device(self._device):
                    return work(self._device)
            except _DEVICE_ERRORS as error:
                self._refuse(error)
            finally:
                self._leave()
        # A host's cores must be free for the next timing on them.
        with use_more_cores() if self._alone and self._device != "cpu" else nullcontext():
            return work("cpu")

    def _open(self) -> None:
        try:
            ones = torch.ones(64, 64, dtype=torch.float64, device=self._device)
            float((ones @ ones).sum())
        except _DEVICE_ERRORS as error:
            self._refuse(error)

    def _leave(self) -> None:
        if torch.device(self._device).type == "cuda":
            try:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            except _DEVICE_ERRORS as error:
                self._refuse(error)

    def _refuse(self, error: BaseException) -> None:
        self.failure = f"{type(error).__name__}: {error}"[:200]


HOST_DEVICE = ComputeDevice("cpu")
