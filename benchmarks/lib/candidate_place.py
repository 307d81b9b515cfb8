"""Places where candidates of the verification's benchmarks run: on this host's CPU, or on a device."""

from __future__ import annotations

from dataclasses import dataclass

from forecast_harness.clocks import devices as device
from forecast_harness.clocks.times import HOST_PEAKS, DevicePeaks
from forecast_harness.sandbox.api import SandboxLane
from forecast_harness.targets.packs import Language, Pack
from forecast_harness.verify.plan import VerificationPlan
from tests.harness.small import checked_only


@dataclass(frozen=True)
class CandidatePlace:
    """A place where candidates run."""

    device: str
    """`cpu` or `cuda`."""
    name: str = "cpu"
    peaks: DevicePeaks = HOST_PEAKS
    uuid: str = ""
    index: int = 0
    """The driver's number of the device."""

    @classmethod
    def of(cls, device_name: str) -> CandidatePlace:
        """The host, or the first device that this process may use. Raises `LookupError` where there is none."""
        if device_name == "cpu":
            return cls(device_name)
        index, *_ = [*device.visible_devices(), 0]
        name, uuid = device.identity(index)
        if not uuid:
            raise LookupError(f"the driver knows no device {index}")
        return cls(device_name, name, device.device_peaks(name), uuid, index)

    def lane(self) -> SandboxLane:
        """A lane, not yet open; without a device Triton kernels can only be interpreted there."""
        if self.device == "cpu":
            return SandboxLane(environment={"TRITON_INTERPRET": "1"})
        return SandboxLane(device=str(self.index))

    def plan(self, language: Language) -> VerificationPlan:
        """The shipped plan; on a CPU that of the tests, as interpreted launches take so much longer."""
        if self.device == "cuda":
            return VerificationPlan(device="cuda", peaks=self.peaks, index=self.index, uuid=self.uuid)
        return (
            VerificationPlan(cases=6, timed=4)
            if language is Language.TRITON
            else VerificationPlan(cases=12, timed=30)
        )

    def sized(self, pack: Pack) -> Pack:
        """At all of its sizes on a device, at the small ones on a CPU."""
        return checked_only(pack) if self.device == "cpu" else pack
