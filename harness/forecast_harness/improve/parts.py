"""The parts of a program's time: which kernel takes which share, its headroom, and the parts that can be improved."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from forecast_autotune.errors import RecordError
from forecast_autotune.features.devices import device_spec
from forecast_autotune.records.captured_call import CapturedCall
from forecast_autotune.records.codec import Record, json_option
from forecast_autotune.records.program import ProgramRecording, TorchFunction
from forecast_autotune.store.files import write_atomically
from forecast_harness.improve.child import UserProgram
from forecast_harness.improve.steps import Steps
from forecast_harness.targets.program_functions import function_pack, write_pack
from forecast_harness.targets.statement import tensor_bytes

LEAST_SHARE = 0.01
"""Share of a step below which a part is named and left."""
IMPROVED_SHARE = 0.8
"""Share of the improvable time after which no more parts are taken."""
_USUAL_GAIN = 0.5
"""Share of what lies above the roofline that a search is expected to win, before anything is known."""
_UNKNOWN_HEADROOM = 0.5
_NO_GPU = "it is not timed: there is no GPU, where it would run"
_ELSEWHERE = "it ran before the steps, or in a process that the program starts: improve what that one runs"


@dataclass(frozen=True)
class Part(Record, label="part"):
    """One kernel, or one function of torch code, of a program."""

    name: str
    kind: str
    """`function`, `triton`, `torch.compile` or `library`."""
    share: float
    """Share of the time of a step."""
    calls: float
    """Calls per step."""
    median_s: float
    roofline_s: float = 0.0
    """Time to move its arguments once; 0 where the device's bandwidth is not known."""
    target: str = ""
    """The target for `search`; empty for a part that is left."""
    reason: str = ""
    """Why it is left."""
    file: str = ""
    """The file of the program's own that has the kernel; empty for a library's."""
    function: TorchFunction | None = field(default=None, metadata=json_option(omit_null=True))

    @property
    def can_be_searched(self) -> bool:
        """Whether another source of it can be had."""
        return bool(self.target)

    @property
    def stem(self) -> str:
        """A name for its files, with a function's module, as another module may have a function of that name."""
        return self.name.removeprefix("__main__:").replace(":", ".")

    @property
    def headroom(self) -> float:
        """The share of its time that lies above the roofline."""
        if not self.roofline_s or not self.median_s:
            return _UNKNOWN_HEADROOM
        return max(0.0, 1.0 - self.roofline_s / self.median_s)

    @property
    def expected(self) -> float:
        """The share of a step's time that a search is expected to save."""
        return self.share * self.headroom * _USUAL_GAIN


def parts_of(
    recording: ProgramRecording,
    steps: Steps,
    captures: Iterable[CapturedCall],
    folder: Path,
    program: UserProgram,
) -> list[Part]:
    """The parts of a recorded program, the largest first; packs of its functions are written below `folder`."""
    functions = {f.name: f for f in recording.functions}
    calls: dict[str, CapturedCall] = {}
    for capture in captures:
        calls.setdefault(capture.kernel.name, capture)
    on_device = any(name not in functions for name in steps.launches)
    total = sum(t.seconds for n, t in steps.launches.items() if (n in functions) is not on_device) or 1.0
    if not on_device:
        total = max(total, steps.seconds)
    parts = []
    for name, times in steps.launches.items():
        part = Part(name, "library", times.seconds / total, times.calls, times.median_s)
        if (function := functions.get(name)) is not None:
            part = _function_part(replace(part, kind="function", function=function), function, folder)
        elif (call := calls.get(name)) is not None:
            part = _kernel_part(part, call, folder, program)
        elif name.startswith("triton_"):
            reason = "torch.compile makes it anew: `run` tunes its configs, and serves no other source"
            part = replace(part, kind="torch.compile", reason=reason)
        else:
            part = replace(part, reason="no source can be had for it: it is no Triton kernel")
        parts.append(part)
    has_gpu = recording.device is not None and recording.device.backend not in ("", "cpu")
    for name in calls.keys() - steps.launches.keys():
        parts.append(Part(name, "triton", 0.0, 0.0, 0.0, reason=_ELSEWHERE if has_gpu else _NO_GPU))
    return sorted(parts, key=lambda p: -p.share)


def chosen_parts(parts: Iterable[Part], most: int | None) -> list[Part]:
    """The parts to improve, in the order in which they are asked about; at most so many, if a number is given."""
    candidates = sorted((p for p in parts if p.can_be_searched), key=lambda p: -p.expected)
    if most is not None:
        return candidates[:most]
    total, sum_so_far, chosen = sum(p.expected for p in candidates), 0.0, []
    for part in candidates:
        if part.share < LEAST_SHARE or sum_so_far > IMPROVED_SHARE * total:
            break
        sum_so_far += part.expected
        chosen.append(part)
    return chosen


def _function_part(part: Part, function: TorchFunction, folder: Path) -> Part:
    place = folder / f"pack-{part.stem}"
    try:
        write_pack(function_pack(function), place)
    except RecordError as error:
        return replace(part, reason=str(error))
    return replace(part, target=str(place))


def _kernel_part(part: Part, call: CapturedCall, folder: Path, program: UserProgram) -> Part:
    part = replace(part, kind="triton")
    module = call.kernel.extra.get("module")
    if not call.source:
        return replace(
            part, reason="no module of its own can be made of it: it needs more than Triton and constants"
        )
    own = program.script if module == "__main__" else program.root / f"{str(module).replace('.', '/')}.py"
    part = replace(part, file=str(own.absolute()) if own is not None and own.is_file() else "")
    # Importing a script would run the program, and a library takes seconds.
    place = folder / f"kernel-{call.kernel.name}.py"
    write_atomically(place, call.source.encode())
    spec = device_spec(call.device)
    size = tensor_bytes(call.arguments)
    roofline = size / (spec.memory_gb_s * 1e9) if spec.memory_gb_s else 0.0
    target = f"{place}:{call.kernel.name}@{call.kernel.source_sha256[:12]}"
    return replace(part, target=target, roofline_s=roofline)
