"""The device that a judge works on: its plan of verification, the name of its class, its first processes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from forecast_autotune.errors import ForecastAutotuneError, SettingsError
from forecast_autotune.records import Device
from forecast_harness.clocks import devices
from forecast_harness.clocks.compilation.workers import CompileWorkers
from forecast_harness.clocks.runner.client import RunnerClient, open_healthy_runner
from forecast_harness.targets.search_target import cuda_device
from forecast_harness.trials.confirmation import EarlyOpener
from forecast_harness.verify.plan import VerificationPlan

LANE_MODULES = (
    "torch",
    "triton",
    "forecast_harness.trials.variants.jobs",
    "forecast_harness.trials.kernel_cell",
    "forecast_harness.trials.race_job",
    "forecast_harness.verify.timing_job",
)
"""Modules that lanes import once where verification and timing are what they do: judges and cells are forks of them."""


def verification_plan(device: str, index: int | None = None) -> VerificationPlan:
    """The plan for candidates on the device of this number of the driver's, or on the first that this process may use.

    Raises `SettingsError` for a device that is not there.
    """
    if device == "cpu":
        return VerificationPlan()
    if index is None:
        index = next(iter(devices.visible_devices()), 0)
    if device != "cuda" or not 0 <= index < devices.device_count():
        raise SettingsError(
            f"device {device} {index}: the driver knows {devices.device_count()} CUDA devices; or say cpu"
        )
    name, uuid = devices.identity(index)
    return VerificationPlan(device="cuda", peaks=devices.device_peaks(name), index=index, uuid=uuid)


def device_slug(device: str, index: int | None = None) -> str:
    """The device class that a search's context names: the same for all cards of one model.

    Raises `SettingsError` for a device that is not there.
    """
    plan = verification_plan(device, index)
    if device == "cpu":
        return Device(_cpu_model(), "cpu").slug
    return Device(devices.identity(plan.index)[0], "cuda").slug


def _cpu_model() -> str:
    """The processor's model as the system tells it, or its architecture."""
    import platform

    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine() or "host"


class EarlyProcesses:
    """Compile workers of all devices together, and a runner for each. `close` ends them all."""

    def __init__(self, plans: Sequence[VerificationPlan], workers: int = 0) -> None:
        """`workers`: 0 for all processors."""
        self.plans = tuple(plans)
        self._resources = ExitStack()
        self.workers = CompileWorkers(count=workers).start()
        self._resources.callback(self.workers.close)
        self._runners = [
            EarlyOpener(partial(open_healthy_runner, plan.index, plan.uuid)) for plan in self.plans
        ]
        for opener in self._runners:
            self._resources.callback(opener.close)
        threading.Thread(target=_ask_for_device, daemon=True).start()

    def runner(self, number: int) -> RunnerClient:
        """The runner of a plan, once it is healthy. Raises `NoMachineCodePath`, `RunnerLost`."""
        runner = self._runners[number]()
        self._resources.callback(runner.close)
        return runner

    def close(self) -> None:
        """End all processes."""
        self._resources.close()


def _ask_for_device() -> None:
    """A target names its device, which a child process tells within half a second."""
    with suppress(ForecastAutotuneError, OSError):
        cuda_device()
