"""Whether faster sources hold in the program: their results, its steps with and without them in turns, its memory.

Turns are blocks of steps within one process where that can be: from process to process, a busy host makes all steps of
some of them longer than the sources make them shorter. A process counts once, as its blocks share whatever it has.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from forecast_autotune.commands.output import CommandError
from forecast_autotune.records.codec import Record
from forecast_autotune.records.program import (
    CHECK_FILE,
    FunctionReplacement,
    ProgramRecording,
    RecordingPlan,
    TurnBlock,
)
from forecast_autotune.store import Store
from forecast_harness.improve.child import UserProgram, record
from forecast_harness.improve.steps import steps_of

TURNS, _MOST_TURNS = 3, 6
"""Runs in turns, or pairs of runs: at least, and where the time allows, which nothing that they show decides."""
_QUANTILE_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57}
"""Student's, for the mean of so many differences; of more, at most the last one."""
_BLOCK_S, _WANTED_BLOCKS = 0.02, 16
"""A block takes so long at least, but for a program of fewer steps than fill so many blocks."""
_LEAST_PAIRS = 3
_WARM_SHARE = 1 / 4
"""Share of the blocks that are left out at the beginning."""
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
        half = _QUANTILE_95[min(len(logs), 6)] * statistics.stdev(logs) / math.sqrt(len(logs))
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
    """How steps were found, and taken in turns."""
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
    step_s: float
    steps: int
    """Of a run."""
    calls: Mapping[str, float]
    """Of each source a step."""
    run_s: float
    """After which a run is ended."""
    ends: float
    """When the last turn should have ended, by `time.monotonic`."""


def prove(request: ProofRequest, progress: Callable[[str], None]) -> ProgramProof:
    """Run the program with and without."""
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
    try:
        turns = _turns_within(request, replaced, served, progress)
    except CommandError as error:
        why = f"the program fails while it is timed: {error}"
        return ProgramProof(refused={**refused, **dict.fromkeys(names, why)})
    if isinstance(turns, str):
        turns = _turns_between(request, replaced, served, turns, progress)
    parts = {}
    for name in names:
        ratios = turns.parts.get(name, ())
        if len(ratios) < 2:
            refused[name] = "the program does not call it as often as it takes to time it"
        elif not (gain := Gain.of(ratios)).is_faster:
            refused[name] = f"it is not shown to be faster in the program: {gain.text}"
        elif turns.step.low > 1.0:
            refused[name] = f"the program's step is slower with it: {turns.step.text}"
        elif turns.peaks[1] > max(turns.peaks[0] * _MEMORY_SHARE, turns.peaks[0] + _MEMORY_BYTES):
            before, after = (f"{p / 2**20:.0f}" for p in turns.peaks)
            refused[name] = f"the program takes {after} MiB with it, {before} without"
        else:
            parts[name] = gain
    return ProgramProof(turns.step, turns.before_s, turns.after_s, turns.how, parts, refused, *turns.peaks)


@dataclass(frozen=True)
class _TurnTimes:
    """Times without and with the sources, in turns."""

    ratios: Sequence[float]
    """With over without, of a step: one for each process, or for each pair of processes."""
    before_s: float
    after_s: float
    how: str
    parts: Mapping[str, Sequence[float]]
    peaks: tuple[int, int]

    @property
    def step(self) -> Gain:
        return Gain.of(self.ratios)


def _turns_within(
    request: ProofRequest,
    replaced: Mapping[str, FunctionReplacement],
    served: Sequence[str],
    progress: Callable[[str], None],
) -> _TurnTimes | str:
    """Blocks of steps in turns within each of a few processes; the reason where that cannot be."""
    calls = {n: round(c) for n in (*replaced, *served) if (c := request.calls[n]) >= 1 and c == round(c)}
    if request.plan.step:
        calls = {request.plan.step: 1}
    if not calls or request.steps < 4 * _LEAST_PAIRS:
        return "no step repeats as often as it takes"
    marker = min(calls, key=calls.__getitem__)
    count = max(1, min(math.ceil(_BLOCK_S / request.step_s), request.steps // _WANTED_BLOCKS - 1))
    each = calls[marker]
    plan = replace(request.plan, marker=marker, settling=each, block=each * (count + 1))
    runs: list[ProgramRecording] = []
    began = time.monotonic()
    # With a GPU, launches are timed and memory is looked at in the first run alone, as that makes its steps longer.
    extra = 1 if served else 0
    for turn in range(_MOST_TURNS + extra):
        if turn >= TURNS + extra and time.monotonic() + (time.monotonic() - began) / turn > request.ends:
            break
        progress(f"timing the program, run {turn + 1} of {TURNS + extra} or more")
        own = replace(plan, profile=turn == 0, served_first=turn % 2 == 0)
        ran = _run(replace(request, plan=own), replaced, variants=bool(served))
        if len(_pairs(ran)) < _LEAST_PAIRS:
            return "too few of its launches pass its tuner, as with a graph, or it ends too early"
        if past := {*ran.unturned} & {*served}:
            return f"{min(past)} is also launched past its tuner, as by a graph"
        runs.append(ran)
    timed = [_pairs(r) for r in runs[extra:]]
    parts: dict[str, list[float]] = {}
    for before, after in (p for r in runs for p in _pairs(r)):
        for name in before.median_s.keys() & after.median_s.keys():
            parts.setdefault(name, []).append(after.median_s[name] / before.median_s[name])
    median, peak = statistics.median, runs[0].peak_bytes
    return _TurnTimes(
        [median(a.seconds / b.seconds for b, a in pairs) for pairs in timed],
        median(b.seconds for pairs in timed for b, _ in pairs) / count,
        median(a.seconds for pairs in timed for _, a in pairs) / count,
        f"{len(timed)} processes, in turns of {count} steps within each",
        parts,
        (
            max(b.peak_bytes for b, _ in _pairs(runs[0])) or peak,
            max(a.peak_bytes for _, a in _pairs(runs[0])) or peak,
        ),
    )


def _pairs(recording: ProgramRecording) -> list[tuple[TurnBlock, TurnBlock]]:
    """Neighbours after warm-up, without and with the sources."""
    blocks = recording.blocks
    kept = blocks[2 * round(len(blocks) * _WARM_SHARE / 2) :]
    return [(b, a) if a.served else (a, b) for a, b in zip(kept[::2], kept[1::2], strict=False)]


def _turns_between(
    request: ProofRequest,
    replaced: Mapping[str, FunctionReplacement],
    served: Sequence[str],
    reason: str,
    progress: Callable[[str], None],
) -> _TurnTimes:
    """Whole processes in turns. Raises `CommandError` where the program fails."""
    without: list[ProgramRecording] = []
    with_: list[ProgramRecording] = []
    began = time.monotonic()
    for turn in range(_MOST_TURNS):
        if turn >= TURNS and time.monotonic() + (time.monotonic() - began) / turn > request.ends:
            break
        for which in (False, True) if turn % 2 == 0 else (True, False):
            progress(f"timing the program, run {len(without) + len(with_) + 1} of {2 * TURNS} or more")
            ran = _run(request, replaced if which else {}, variants=which and bool(served))
            (with_ if which else without).append(ran)
    before, after = [steps_of(r) for r in without], [steps_of(r) for r in with_]
    both = list(zip(before, after, strict=True))
    parts = {}
    for name in (*replaced, *served):
        pairs = [(b.launches.get(name), a.launches.get(name)) for b, a in both]
        parts[name] = [
            a.median_s / b.median_s for b, a in pairs if a is not None and b is not None and b.median_s
        ]
    return _TurnTimes(
        [a.seconds / b.seconds for b, a in both],
        statistics.mean(s.seconds for s in before),
        statistics.mean(s.seconds for s in after),
        f"{before[0].how}; {len(both)} processes each, not in turns within one: {reason}",
        parts,
        (max(r.peak_bytes for r in without), max(r.peak_bytes for r in with_)),
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
    plan = replace(plan, profile=plan.profile and not compare)
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
