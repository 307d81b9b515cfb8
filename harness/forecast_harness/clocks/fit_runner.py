"""A runner that has proved its health, or why there is none."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from forecast_harness.clocks.comparison import device as devices
from forecast_harness.clocks.runner.client import RunnerClient
from forecast_harness.clocks.runner.gpu.driver import LIBRARY
from forecast_harness.clocks.runner_health import runner_problem
from forecast_harness.verify.plan import VerificationPlan

FLUSH_BYTES = 0
"""What a runner writes to empty its device's caches; 0: what suits the device."""
_HEALTH_TRIES, _HEALTH_PAUSE_S = 10, 1.0
"""Others may use the device at the moment, and a clock that waits for them tells no time."""


class NoMachineCodePath(Exception):
    """A target that is not judged through machine code here; the text says why."""


def facts_for_workers(runner: RunnerClient) -> Mapping[str, Any]:
    """What compile workers are told of a runner's device."""
    blocks = int(runner.facts["multiprocessors"])
    return {
        "arch": int(runner.facts["arch"]),
        "name": runner.facts["name"],
        "properties": {"multiprocessor_count": blocks},
    }


@contextmanager
def open_fit_runner(plan: VerificationPlan, *, spare: bool = False) -> Iterator[RunnerClient]:
    """A runner of a device that has proved its health; `spare` as for `RunnerClient`.

    Raises `NoMachineCodePath` for one that has not, and `RunnerLost` where it does not start.
    """
    # By its UUID: the driver's own number may be another card's, by CUDA_VISIBLE_DEVICES or CUDA_DEVICE_ORDER.
    index = 0 if plan.uuid else plan.index
    with RunnerClient(LIBRARY, index, visible=plan.uuid, spare=spare, flush_bytes=FLUSH_BYTES) as runner:
        for _ in range(_HEALTH_TRIES):
            if not (said := runner_problem(runner)):
                break
            time.sleep(_HEALTH_PAUSE_S)
        else:
            raise NoMachineCodePath(said)
        if plan.uuid and runner.facts["name"] != (named := devices.identity(plan.index)[0]):
            raise NoMachineCodePath(
                f"the runner has {runner.facts['name']!r} for device {plan.index}, the driver's tools have {named!r}: "
                "set CUDA_DEVICE_ORDER=PCI_BUS_ID and leave CUDA_VISIBLE_DEVICES unset"
            )
        yield runner
