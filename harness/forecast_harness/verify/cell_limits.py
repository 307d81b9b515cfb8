"""What a cell must be allowed, so that a pack's largest workload fits; loads no torch.

An honest solution must not be refused for the size of the question it was asked.
"""

from __future__ import annotations

from dataclasses import replace

from forecast_autotune.errors import RecordError
from forecast_harness.sandbox.jobs import ResourceLimits, byte_size
from forecast_harness.targets.packs.schema import Pack, PackFormat, Workload

MAX_LAUNCH_BYTES = 2 << 30
"""Of the arguments and outputs of one launch."""
_OUTPUT_SPAN_FACTOR = 4
"""How many times its own size an output may span: a view of something larger, say."""
_BLOCK_COPIES = 6
"""How often a cell on a host holds a large block: as it came, pristine, in use, as outputs, as answer."""
_CANARY_BYTES = 1 << 20
"""For canaries."""


def cell_limits_for(pack: Pack, limits: ResourceLimits, device: str) -> ResourceLimits:
    """Limits under which every workload of the pack can be placed and read on a device (torch's name).

    Raises `RecordError` for a workload of more than 2 GiB of arguments and outputs. What foreign formats
    hand over is known only when it is drawn; the judge refuses more then.
    """
    if pack.definition.format is not PackFormat.OWN:
        return limits if device == "cpu" else _raise_limits(limits, MAX_LAUNCH_BYTES, MAX_LAUNCH_BYTES)
    given = written = 0
    for work in {w.name: w for w in (*pack.checked_workloads, *pack.timed_workloads(device))}.values():
        one = workload_bytes(pack, work)
        if sum(one) > MAX_LAUNCH_BYTES:
            raise RecordError(
                oversize_message(f"pack {pack.definition.name}, workload {work.name}", sum(one))
            )
        given, written = max(given, one[0]), max(written, one[1])
    return _raise_limits(limits, given + written, given + _OUTPUT_SPAN_FACTOR * written)


def workload_bytes(pack: Pack, work: Workload) -> tuple[int, int]:
    """Bytes of a workload's inputs, and of its outputs."""
    definition = pack.definition
    axes = {n: a.value if a.value is not None else work.axes[n] for n, a in definition.axes.items()}
    inputs, outputs = (
        sum(byte_size(t.dtype, t.sizes(axes)) for t in listed.values())
        for listed in (definition.inputs, definition.outputs)
    )
    return inputs, outputs


def oversize_message(what: str, size: int) -> str:
    """The sentence that refuses a launch of so many bytes."""
    return f"{what}: arguments and outputs take {size} bytes; at most {MAX_LAUNCH_BYTES} can be judged"


def _raise_limits(limits: ResourceLimits, held: int, answered: int) -> ResourceLimits:
    return replace(
        limits,
        answer_bytes=max(limits.answer_bytes, answered + _CANARY_BYTES),
        memory_bytes=limits.memory_bytes + _BLOCK_COPIES * held,
    )
