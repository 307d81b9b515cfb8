"""`open_judge`: what verifies, tunes and times the nodes of a target on one device."""

from __future__ import annotations

from pathlib import Path

from forecast_autotune.errors import SettingsError
from forecast_autotune.records import Device
from forecast_harness.search.interfaces import NodeJudge
from forecast_harness.search.records import SearchTarget, TargetKind
from forecast_harness.search.targets import NO_KERNELS_ON_CPU
from forecast_harness.timing import device as devices
from forecast_harness.verify.plan import VerificationPlan


def open_judge(target: SearchTarget, *, device: str, index: int = 0, folder: Path) -> NodeJudge:
    """A judge for one device. Opens no device in this process: workers of the sandbox do.

    `device`: `cpu` or `cuda`; `index`: the driver's number of the device; `folder`: for scratch files.
    A judge that opens is healthy: a small computation with a known answer ran in its sandbox. Raises
    `LaneLost` where it is not, `SettingsError` for a device that is not there, or on which the target's
    kind cannot be judged, and `SandboxError` where no sandbox works.
    """
    plan = verification_plan(device, index)
    if target.kind is TargetKind.KERNEL:
        if device == "cpu":
            raise SettingsError(f"{target.name}: {NO_KERNELS_ON_CPU}")
        from forecast_harness.search.judging.kernel_judge import KernelJudge

        return KernelJudge(target, plan, folder, number=index)
    from forecast_harness.search.judging.pack_judge import PackJudge

    return PackJudge(target, plan, folder, number=index)


def verification_plan(device: str, index: int = 0) -> VerificationPlan:
    """Where candidates run. Raises `SettingsError` for a device that is not there."""
    if device == "cpu":
        return VerificationPlan()
    if device != "cuda" or not 0 <= index < devices.device_count():
        raise SettingsError(
            f"device {device} {index}: the driver knows {devices.device_count()} CUDA devices; or say cpu"
        )
    name, uuid = devices.identity(index)
    return VerificationPlan(device="cuda", peaks=devices.device_peaks(name), index=index, uuid=uuid)


def device_slug(device: str, index: int = 0) -> str:
    """The device class that a search's context names: the same for all cards of one model.

    Raises `SettingsError` for a device that is not there.
    """
    verification_plan(device, index)
    if device == "cpu":
        return Device(_cpu_model(), "cpu").slug
    return Device(devices.identity(index)[0], "cuda").slug


def _cpu_model() -> str:
    """The processor's model as the system tells it, or its architecture."""
    import platform

    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine() or "host"
