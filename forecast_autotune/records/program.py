"""One run of a program for `improve`: the plan of the run, and its recording.

The harness writes a `RecordingPlan` and reads a `ProgramRecording`; `run --recording` does the opposite. Both lie in
one folder, under the two names below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from forecast_autotune.records.codec import Record
from forecast_autotune.records.json_fields import SCHEMA
from forecast_autotune.records.problem import Argument, Device

PLAN_FILE = "plan.json"
RECORDING_FILE = "recording.json"
CHECK_FILE = "check.pt"
"""Results of the function named by `RecordingPlan.check`, as torch saves them."""
RANK_FOLDER = "_FORECAST_RECORDING"
"""The variable that names the folder to ranks which a recorded launcher starts; the first one records itself."""


@dataclass(frozen=True)
class RecordingPlan(Record, schema=SCHEMA, label="recording plan"):
    """How `run --recording` runs a program. Functions are named as `module:function`, the script as `__main__`."""

    serve: bool = True
    """Whether tuners are served; without it, the program runs as under `python`."""
    discover: bool = False
    """Whether functions of torch code below `root` are looked for, which slows the program down."""
    root: str = ""
    functions: tuple[str, ...] = ()
    """Functions whose calls are timed."""
    replaced: Mapping[str, str] = field(default_factory=dict)
    """Modules of verified sources: `run` takes a function's tensors where `covers` accepts its arguments."""
    compare: bool = False
    """Whether results of replaced functions are compared with the original's, which slows the program down."""
    step: str = ""
    """The function that is one step."""
    check: str = ""
    """The function whose results are kept."""
    profile: bool = True
    """Whether launches of the device are timed, which slows its host down, and memory is measured by block."""
    marker: str = ""
    """The kernel or function whose calls divide the run into blocks with the sources and without them, in turns."""
    block: int = 0
    """Number of the marker's calls per block; 0: the sources are served throughout."""
    settling: int = 0
    """Number of its calls at the start of a block that do not count: caches are still those of the block before."""
    served_first: bool = False


@dataclass(frozen=True)
class TurnBlock(Record, label="block"):
    """Steps that follow each other, all of them with the sources or all without."""

    served: bool
    seconds: float
    peak_bytes: int = 0
    """The most memory in it; 0 where it was not measured."""
    median_s: Mapping[str, float] = field(default_factory=dict)
    """The median of a launch, by name, where launches were timed."""


@dataclass(frozen=True)
class FunctionCall(Record, label="function call"):
    """A call of a function of torch code; tensors have `least` and `most` of their values in `extra`."""

    arguments: tuple[Argument, ...]
    results: tuple[Argument, ...]


@dataclass(frozen=True)
class TorchFunction(Record, label="function"):
    """A function of the program's own that takes and returns tensors."""

    name: str
    """`module:function`."""
    file: str
    calls: int = 0
    seconds: float = 0.0
    """Seconds of all calls, without those of other listed functions inside."""
    forms: tuple[FunctionCall, ...] = ()
    """One call of each set of shapes and dtypes, up to a few."""
    problem: str = ""
    """The reason why it cannot be taken out of the program."""


@dataclass(frozen=True)
class ProgramRecording(Record, schema=SCHEMA, label="recording"):
    """A run: the launches in order, the functions, and the end."""

    device: Device | None = None
    seconds: float = 0.0
    """Seconds of the program, without the start of the interpreter."""
    names: tuple[str, ...] = ()
    """Names of the launches: kernels of the device, or functions."""
    launches: tuple[tuple[int, float, float], ...] = ()
    """Number of the name, start and duration in seconds, of the last launches."""
    steps: tuple[tuple[float, float], ...] = ()
    """Start and duration in seconds of the calls of the step's function."""
    functions: tuple[TorchFunction, ...] = ()
    differences: Mapping[str, float] = field(default_factory=dict)
    """The largest difference of a replaced function's results, as a multiple of the accepted one."""
    replaced_calls: Mapping[str, int] = field(default_factory=dict)
    interrupted: bool = False
    """Whether the program was ended from outside: the recording counts up to its end."""
    peak_bytes: int = 0
    """The most memory: the device's, as torch allocated it, or the process's."""
    blocks: tuple[TurnBlock, ...] = ()
    """Whole blocks in order, where the plan divides the run."""
    unturned: tuple[str, ...] = ()
    """Kernels with launches that pass no tuner, as a graph's and a library's, and so take no turns."""
