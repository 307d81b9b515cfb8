"""`open_judge`: what verifies, tunes and times the nodes of a target on one device."""

from __future__ import annotations

from pathlib import Path

from forecast_autotune.errors import SettingsError
from forecast_harness.records import SearchTarget, TargetKind
from forecast_harness.targets.search_target import NO_KERNELS_ON_CPU, is_cuda_kernel
from forecast_harness.trials.devices import verification_plan
from forecast_harness.trials.judge import SandboxJudge


def open_judge(target: SearchTarget, *, device: str, index: int = 0, folder: Path) -> SandboxJudge:
    """A judge for one device. Opens no device in this process: workers of the sandbox do.

    `device`: `cpu` or `cuda`; `index`: the driver's number of the device; `folder`: for scratch files.
    A judge that opens is healthy: a small computation with a known answer ran in its sandbox. Raises
    `LaneFailure` where it is not, `SettingsError` for a device that is not there, or on which the target's
    kind cannot be judged, and `SandboxError` where no sandbox works.
    """
    plan = verification_plan(device, index)
    if target.kind is TargetKind.KERNEL:
        if device == "cpu":
            raise SettingsError(f"{target.name}: {NO_KERNELS_ON_CPU}")
        from forecast_harness.trials.kernels import KernelJudge

        return KernelJudge(target, plan, folder, number=index)
    if is_cuda_kernel(target):
        from forecast_harness.trials.cuda import CudaJudge

        return CudaJudge(target, plan, folder, number=index)
    from forecast_harness.trials.packs import PackJudge

    return PackJudge(target, plan, folder, number=index)
