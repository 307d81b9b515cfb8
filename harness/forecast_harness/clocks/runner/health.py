"""A runner that has proved its health: its own kernel computes what it should, and its clock tells the time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from forecast_harness.clocks import devices
from forecast_harness.clocks.runner.client import RunnerClient, RunnerLost
from forecast_harness.clocks.runner.driver import LIBRARY

_SHORT_CYCLES, _LONG_CYCLES = 2_000_000, 16_000_000
"""Cycles of two pauses: some 1 and 8 ms."""
_RATIO_ERROR = 0.25
"""Most relative error of the ratio of two pauses: clocks change their pace meanwhile."""
_SLOWEST_HZ, _FASTEST_HZ = 2e8, 5e9
"""Rates of a device's clock."""
_HOST_SLACK = 1.05
"""Times the host's seconds around a pause that the device may say it took."""


def runner_problem(runner: RunnerClient) -> str:
    """Why this runner is not to be trusted with labels; '' if it is."""
    if message := runner.check_health():
        return f"the runner's own kernel: {message}"
    try:
        return clock_problem(runner.timed_pauses((_SHORT_CYCLES, _SHORT_CYCLES, _LONG_CYCLES))[1:])
    except RunnerLost as lost:
        return str(lost)


def clock_problem(pauses: list[tuple[float, float]]) -> str:
    """The problem of the device's seconds of a short and a long pause, given the host's; '' for none."""
    (short, _), (long, host) = pauses
    wanted = _LONG_CYCLES / _SHORT_CYCLES
    if short <= 0 or abs(long / short - wanted) > _RATIO_ERROR * wanted:
        return (
            f"the device's clock: pauses of {_SHORT_CYCLES:,} and {_LONG_CYCLES:,} cycles took {short:.3g} s and "
            f"{long:.3g} s; the second should take {wanted:g} times the first"
        )
    if not _SLOWEST_HZ <= _LONG_CYCLES / long <= _FASTEST_HZ:
        return f"the device's clock: {_LONG_CYCLES:,} cycles took {long:.3g} s, which no device's clock does"
    if long > _HOST_SLACK * host:
        return f"the device's clock: a pause took {long:.3g} s of the {host:.3g} s that passed around it"
    return ""


FLUSH_BYTES = 0
"""Bytes that a runner writes to empty its device's caches; 0: as many as suit the device."""
_HEALTH_TRIES, _HEALTH_PAUSE_S = 10, 1.0
"""Others may use the device at the moment, and a clock that waits for them tells no time."""


class NoMachineCodePath(Exception):
    """A target that is not judged through machine code here; the text says why."""


def facts_for_workers(runner: RunnerClient) -> Mapping[str, Any]:
    """The facts that compile workers need of a runner's device."""
    blocks = int(runner.facts["multiprocessors"])
    return {
        "arch": int(runner.facts["arch"]),
        "name": runner.facts["name"],
        "properties": {"multiprocessor_count": blocks},
    }


@contextmanager
def open_healthy_runner(index: int, uuid: str = "") -> Iterator[RunnerClient]:
    """A runner of the device with this number and UUID of the driver's, once it has proved its health.

    Raises `NoMachineCodePath` for one that has not, and `RunnerLost` where it does not start.
    """
    # By its UUID: the driver's own number may be another card's, by CUDA_VISIBLE_DEVICES or CUDA_DEVICE_ORDER.
    number = 0 if uuid else index
    with RunnerClient(LIBRARY, number, visible=uuid, flush_bytes=FLUSH_BYTES) as runner:
        for _ in range(_HEALTH_TRIES):
            if not (message := runner_problem(runner)):
                break
            time.sleep(_HEALTH_PAUSE_S)
        else:
            raise NoMachineCodePath(message)
        if uuid and runner.facts["name"] != (named := devices.identity(index)[0]):
            raise NoMachineCodePath(
                f"the runner has {runner.facts['name']!r} for device {index}, the driver's tools have {named!r}: "
                "set CUDA_DEVICE_ORDER=PCI_BUS_ID and leave CUDA_VISIBLE_DEVICES unset"
            )
        yield runner
