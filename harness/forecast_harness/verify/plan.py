"""How thoroughly a solution is examined; loads no torch, so that whoever asks need not."""

from __future__ import annotations

from dataclasses import dataclass

from forecast_autotune.records.codec import Record
from forecast_harness.clocks.times import HOST_PEAKS, DevicePeaks


@dataclass(frozen=True)
class VerificationPlan(Record, label="plan"):
    """How much to try. More trials find rarer faults; nothing here is told to the candidate."""

    cases: int = 18
    """Launches with other shapes, values and layouts."""
    timed: int = 30
    """Launches of one workload in a row, of which a random share is checked."""
    checked: float = 1.0
    """The share of timed launches that are checked, where that is quick; the same for each."""
    launches: int = 230
    """Launches to check before a solution is accepted: as many as find a fault in 2 % of launches with 99 %. Fewer,
    where they take longer than the seconds below."""
    contest_launches: int = 459
    """Timed launches to check before a solution is called faster, in all of its contests: as many as find a fault in
    1 % of launches with 99 %. Fewer in the same way."""
    longer_s: float = 0.7
    """Most seconds that a verification takes for more launches than its trials have. On a host it may take half of
    theirs, on a device less where the trials took long."""
    longer_timed_s: float = 3.0
    """Most seconds that a contest takes for more launches than it has timed, of a candidate that is faster."""
    device: str = "cpu"
    """torch's name of where candidates run: `cpu` or `cuda`."""
    peaks: DevicePeaks = HOST_PEAKS
    index: int = 0
    """The driver's number of the device."""
    uuid: str = ""

    @property
    def device_lock(self) -> str:
        """A name that no other device of this machine has, for its timing lock; empty for the host.

        Devices whose UUID the driver does not tell have their numbers: one lock for all would have their
        lanes wait for each other.
        """
        return self.uuid or ("" if self.device == "cpu" else f"{self.device}-{self.index}")
