"""The plan of a solution's examination, and the limits of its cells; loads no torch, so that callers need not."""

from __future__ import annotations

from dataclasses import dataclass, replace

from forecast_autotune.errors import RecordError
from forecast_autotune.records.codec import Record
from forecast_harness.clocks.times import HOST_PEAKS, DevicePeaks
from forecast_harness.sandbox.jobs import ResourceLimits, byte_size
from forecast_harness.targets.packs.schema import Pack, PackFormat, Workload


@dataclass(frozen=True)
class VerificationPlan(Record, label="plan"):
    """The extent of an examination. More trials find rarer faults; the candidate learns nothing of this."""

    cases: int = 18
    """Launches with other shapes, values and layouts."""
    timed: int = 30
    """Launches of one workload in a row; a random share of them is checked."""
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
    """torch's name of the device of candidates: `cpu` or `cuda`."""
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


MAX_LAUNCH_BYTES = 2 << 30
"""The most bytes of the arguments and outputs of one launch."""
_OUTPUT_SPAN_FACTOR = 4
"""An output may span so many times its own size, as a view of something larger does."""
_BLOCK_COPIES = 6
"""Copies of a large block in a cell on a host: as received, pristine, in use, as outputs, as answer."""
_CANARY_BYTES = 1 << 20
"""Bytes for canaries."""


def cell_limits_for(pack: Pack, limits: ResourceLimits, device: str) -> ResourceLimits:
    """Limits under which every workload of the pack can be placed and read on a device (torch's name).

    Raises `RecordError` for a workload of more than 2 GiB of arguments and outputs. Arguments of foreign
    formats are known only when drawn; the judge refuses more then.
    """
    if pack.definition.format is not PackFormat.OWN:
        return limits if device == "cpu" else _raise_limits(limits, MAX_LAUNCH_BYTES, MAX_LAUNCH_BYTES)
    most_inputs = most_outputs = 0
    for workload in {w.name: w for w in (*pack.checked_workloads, *pack.timed_workloads(device))}.values():
        sizes = workload_bytes(pack, workload)
        if sum(sizes) > MAX_LAUNCH_BYTES:
            raise RecordError(
                oversize_message(f"pack {pack.definition.name}, workload {workload.name}", sum(sizes))
            )
        most_inputs, most_outputs = max(most_inputs, sizes[0]), max(most_outputs, sizes[1])
    return _raise_limits(limits, most_inputs + most_outputs, most_inputs + _OUTPUT_SPAN_FACTOR * most_outputs)


def workload_bytes(pack: Pack, workload: Workload) -> tuple[int, int]:
    """Bytes of a workload's inputs, and of its outputs."""
    definition = pack.definition
    axes = {n: a.value if a.value is not None else workload.axes[n] for n, a in definition.axes.items()}
    inputs, outputs = (
        sum(byte_size(t.dtype, t.sizes(axes)) for t in specs.values())
        for specs in (definition.inputs, definition.outputs)
    )
    return inputs, outputs


def oversize_message(what: str, size: int) -> str:
    """The sentence that refuses a launch of so many bytes."""
    return f"{what}: arguments and outputs take {size} bytes; at most {MAX_LAUNCH_BYTES} can be judged"


def _raise_limits(limits: ResourceLimits, block_bytes: int, output_bytes: int) -> ResourceLimits:
    return replace(
        limits,
        answer_bytes=max(limits.answer_bytes, output_bytes + _CANARY_BYTES),
        memory_bytes=limits.memory_bytes + _BLOCK_COPIES * block_bytes,
    )
