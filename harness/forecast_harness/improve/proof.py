"""Whether faster sources hold in the program: their results, its steps with and without them in turns, its memory."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from forecast_autotune.commands.output import CommandError
from forecast_autotune.records.codec import Record
from forecast_autotune.records.program import CHECK_FILE, FunctionReplacement, ProgramRecording, RecordingPlan
from forecast_autotune.store import Store
from forecast_harness.improve.child import UserProgram, record
from forecast_harness.improve.steps import steps_of

TURNS, _MOST_TURNS = 3, 6
"""Runs with, and runs without: at least, and where the time allows, which nothing that they show decides."""
_QUANTILE_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57}
"""Student's, for the mean of so many differences."""
_CHECK_TOLERANCE = {True: 2e-2, False: 1e-3}
"""Accepted relative distance of checked results, for dtypes of 16 bits and less, and for others."""
_MEMORY_SHARE = 1.10
_MEMORY_BYTES = 64 << 20
"""More memory than this share of what it took, and than these bytes, is no improvement."""


@dataclass(frozen=True)
class Gain(Record, label="gain"):
    """A ratio of times, with over without, and its 95 % interval."""

    ratio: float
    low: float
    high: float

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Gain:
        """The geometric mean of the ratios of several turns."""
        logs = [math.log(r) for r in ratios]
        mean = statistics.mean(logs)
        half = _QUANTILE_95[len(logs)] * statistics.stdev(logs) / math.sqrt(len(logs))
        return cls(math.exp(mean), math.exp(mean - half), math.exp(mean + half))

    @property
    def is_faster(self) -> bool:
        """Whether the interval is clear of 1."""
        return self.high < 1.0

    @property
    def text(self) -> str:
        """For people."""
        return f"{1 / self.ratio:.2f}x, 95 % interval {1 / self.high:.2f}x to {1 / self.low:.2f}x"


@dataclass(frozen=True)
class ProgramProof(Record, label="proof"):
    """What holds in the program."""

    step: Gain | None = None
    """None where nothing was left to be timed."""
    before_s: float = 0.0
    after_s: float = 0.0
    how: str = ""
    """How steps were found."""
    parts: Mapping[str, Gain] = field(default_factory=dict)
    """Of the time of each part's calls, for those that hold."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Why others do not hold."""
    peak_before: int = 0
    peak_after: int = 0


@dataclass(frozen=True)
class ProofRequest:
    """What is to be proved, and how the program is run for it."""

    program: UserProgram
    plan: RecordingPlan
    """With the functions to watch; nothing replaced."""
    replaced: Mapping[str, FunctionReplacement]
    served: Sequence[str]
    """Triton kernels whose variants are in the store."""
    folder: Path
    store: Path
    run_s: float
    """After which a run is ended."""
    ends: float
    """When the last turn should have ended, by `time.monotonic`."""


def prove(request: ProofRequest, progress: Callable[[str], None]) -> ProgramProof:
    """Run the program with and without. Raises `CommandError` where it fails without."""
    replaced, served, refused = dict(request.replaced), list(request.served), {}
    _serve_only(request.store, served)
    progress("comparing results in the program")
    try:
        problems = _compare(request, replaced)
    except CommandError as error:
        problems = dict.fromkeys([*replaced, *served], f"the program does not take it: {error}")
    for name, reason in problems.items():
        replaced.pop(name, None)
        served = [n for n in served if n != name]
        refused[name] = reason
    _serve_only(request.store, served)
    if not replaced and not served:
        return ProgramProof(refused=refused)
    names = [*replaced, *served]
    without: list[ProgramRecording] = []
    with_: list[ProgramRecording] = []
    began = time.monotonic()
    for turn in range(_MOST_TURNS):
        if turn >= TURNS and time.monotonic() + (time.monotonic() - began) / turn > request.ends:
            break
        for which in (False, True) if turn % 2 == 0 else (True, False):
            progress(f"timing the program, run {len(without) + len(with_) + 1} of {2 * TURNS} or more")
            try:
                ran = _run(request, replaced if which else {}, variants=which and bool(served))
            except CommandError as error:
                if not which:
                    raise
                why = f"the program does not take it: {error}"
                return ProgramProof(refused={**refused, **dict.fromkeys(names, why)})
            (with_ if which else without).append(ran)
    before, after = [steps_of(r) for r in without], [steps_of(r) for r in with_]
    step = Gain.of([b.seconds / a.seconds for a, b in zip(before, after, strict=True)])
    peaks = max(r.peak_bytes for r in without), max(r.peak_bytes for r in with_)
    parts = {}
    for name in names:
        pairs = [(a.launches.get(name), b.launches.get(name)) for a, b in zip(before, after, strict=True)]
        ratios = [b.median_s / a.median_s for a, b in pairs if a is not None and b is not None and a.median_s]
        if len(ratios) < 2:
            refused[name] = "the program does not call it as often as it takes to time it"
        elif not (gain := Gain.of(ratios)).is_faster:
            refused[name] = f"it is not shown to be faster in the program: {gain.text}"
        elif step.low > 1.0:
            refused[name] = f"the program's step is slower with it: {step.text}"
        elif peaks[1] > peaks[0] * _MEMORY_SHARE and peaks[1] > peaks[0] + _MEMORY_BYTES:
            refused[name] = (
                f"the program takes {peaks[1] / 2**20:.0f} MiB with it, {peaks[0] / 2**20:.0f} without"
            )
        else:
            parts[name] = gain
    mean = statistics.mean
    return ProgramProof(
        step,
        mean(s.seconds for s in before),
        mean(s.seconds for s in after),
        before[0].how,
        parts,
        refused,
        *peaks,
    )


def _serve_only(root: Path, kernels: Sequence[str]) -> None:
    """Remove the variants of all other kernels from the improvement's store, whose runs are served with all it has."""
    store = Store(root)
    kept = [v for v in store.variants() if v.kernel in kernels]
    store.clear_variants()
    for variant in kept:
        store.put_variant(variant)


def _run(
    request: ProofRequest,
    replaced: Mapping[str, FunctionReplacement],
    *,
    variants: bool,
    compare: bool = False,
) -> ProgramRecording:
    """One run. Where Triton's kernels are served, they are without variants, too: configs are the same in both."""
    plan = replace(request.plan, serve=bool(request.served), replaced=replaced, compare=compare)
    folder = request.folder / ("with" if replaced or variants else "without")
    return record(request.program, plan, folder, request.store, seconds=request.run_s, variants=variants)


def _compare(request: ProofRequest, replaced: Mapping[str, FunctionReplacement]) -> dict[str, str]:
    """Why sources do not give the program's results, by name."""
    ran = _run(request, replaced, variants=bool(request.served), compare=True)
    problems = {}
    for name in (*replaced, *request.served):
        if not ran.replaced_calls.get(name):
            problems[name] = (
                "the program makes no call that it was verified for, or its tuner prefers the original"
            )
        elif (difference := ran.differences.get(name, 0.0)) > 1.0:
            problems[name] = f"a live call's result differs by {difference:.3g} times what rounding explains"
    if request.plan.check:
        _run(request, {}, variants=False, compare=True)
        if reason := _checks_differ(
            request.folder / "with" / CHECK_FILE, request.folder / "without" / CHECK_FILE
        ):
            problems = dict.fromkeys(
                [*replaced, *request.served], f"{request.plan.check} returns otherwise: {reason}"
            )
    return problems


def _checks_differ(theirs: Path, own: Path) -> str:
    """How two files of checked results differ; empty where they agree."""
    import torch

    listed = [torch.load(p, weights_only=True) if p.exists() else [] for p in (theirs, own)]
    return _difference(*listed)


def _difference(one: object, other: object) -> str:
    import torch

    if isinstance(one, list) and isinstance(other, list):
        if len(one) != len(other):
            return f"{len(one)} results, not {len(other)}"
        return next((why for a, b in zip(one, other, strict=True) if (why := _difference(a, b))), "")
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return "other keys"
        return next((why for key in one if (why := _difference(one[key], other[key]))), "")
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"{one.dtype} {list(one.shape)}, not {other.dtype} {list(other.shape)}"
        narrow = one.is_floating_point() and one.element_size() <= 2
        a, b = one.double(), other.double()
        distance = float((a - b).norm() / b.norm().clamp_min(1e-300))
        limit = _CHECK_TOLERANCE[narrow] if one.is_floating_point() else 0.0
        same = torch.equal(a.isfinite(), b.isfinite()) and (distance <= limit or torch.equal(a, b))
        return "" if same else f"a relative distance of {distance:.3g}, and {limit:g} is accepted"
    if isinstance(one, float) and isinstance(other, float):
        return "" if math.isclose(one, other, rel_tol=_CHECK_TOLERANCE[False]) else f"{one}, not {other}"
    return "" if one == other else f"{one!r:.40}, not {other!r:.40}"
