"""Whether faster sources hold in the program: their results, its steps with and without them in turns, its memory.

Turns are blocks of steps within one process where that can be: from process to process, a busy host makes all steps of
some of them longer than the sources make them shorter. A process counts once, as its blocks share whatever it has.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from forecast_autotune.commands.output import CommandError
from forecast_autotune.records.codec import Record
from forecast_autotune.records.program import (
    CHECK_FILE,
    ProgramRecording,
    RecordingPlan,
    TurnBlock,
)
from forecast_autotune.store import Store
from forecast_harness.improve.child import OUTPUT_FILE, UserProgram, record
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
_STEP_SLACK = 1.02
"""Whole runs on a busy host may show a step so much longer that it says nothing: then nothing is proved."""
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
    replaced: Mapping[str, str]
    """Modules that stand in for functions, as the plan has them."""
    served: Sequence[str]
    """Triton kernels whose variants are in the store."""
    folder: Path
    store: Path
    step_s: float
    steps: int
    """Steps of one run."""
    calls: Mapping[str, float]
    """Calls of each source in a step."""
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
        problems = _compare(request)
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
    request = replace(request, replaced=replaced, served=served)
    try:
        turns = _turns_within(request, progress)
        turns = _turns_between(request, turns, progress) if isinstance(turns, str) else turns
    except CommandError as error:
        why = f"the program fails while it is timed: {error}"
        return ProgramProof(refused={**refused, **dict.fromkeys(names, why)})
    pairs = [pair for run in (*turns.runs, *turns.profiled) for pair in run]
    median = statistics.median
    step = Gain.of([median(a.seconds / b.seconds for b, a in run) for run in turns.runs])
    before_s, after_s = (median(p[w].seconds for run in turns.runs for p in run) for w in (0, 1))
    peaks = [max(pair[which].peak_bytes for pair in pairs) for which in (0, 1)]
    parts = {}
    for name in names:
        ratios = [
            a.median_s[name] / own for b, a in pairs if (own := b.median_s.get(name)) and name in a.median_s
        ]
        if len(ratios) < 2:
            refused[name] = "the program does not call it as often as it takes to time it"
        elif not (gain := Gain.of(ratios)).is_faster:
            refused[name] = f"it is not shown to be faster in the program: {gain.text}"
        elif step.ratio > _STEP_SLACK or step.low > 1.0:
            refused[name] = f"the program's step was no faster with it: {step.text}"
        elif peaks[1] > max(peaks[0] * _MEMORY_SHARE, peaks[0] + _MEMORY_BYTES):
            refused[name] = (
                f"the program takes {peaks[1] / 2**20:.0f} MiB with it, {peaks[0] / 2**20:.0f} without"
            )
        else:
            parts[name] = gain
    return ProgramProof(step, before_s, after_s, turns.how, parts, refused, *peaks)


_Pair = Sequence[TurnBlock]
"""Without the sources, and with them."""


@dataclass(frozen=True)
class _Turns:
    """Blocks without and with the sources that are to be compared, for each process or pair of processes."""

    how: str
    runs: Sequence[Sequence[_Pair]]
    profiled: Sequence[Sequence[_Pair]] = ()
    """Turns of a process whose launches were timed, which makes its steps longer."""


def _rounds(request: ProofRequest, least: int, progress: Callable[[str], None]) -> Iterator[int]:
    began = time.monotonic()
    for turn in range(least + _MOST_TURNS - TURNS):
        if turn >= least and time.monotonic() + (time.monotonic() - began) / turn > request.ends:
            return
        progress(f"timing the program, turn {turn + 1} of {least} or more")
        yield turn


def _turns_within(request: ProofRequest, progress: Callable[[str], None]) -> _Turns | str:
    """Blocks of steps in turns within each of a few processes; the reason where that cannot be."""
    names = (*request.replaced, *request.served)
    calls = {n: round(c) for n in names if (c := request.calls[n]) >= 1 and c == round(c)}
    if request.plan.step:
        calls = {request.plan.step: 1}
    if not calls or request.steps < 4 * _LEAST_PAIRS:
        return "no step repeats as often as it takes"
    marker = min(calls, key=calls.__getitem__)
    count = max(1, min(math.ceil(_BLOCK_S / request.step_s), request.steps // _WANTED_BLOCKS - 1))
    each = calls[marker]
    plan = replace(request.plan, marker=marker, settling=each, block=each * (count + 1))
    runs: list[list[_Pair]] = []
    profiled = 1 if request.served else 0
    for turn in _rounds(request, TURNS + profiled, progress):
        own = replace(plan, profile=turn == 0, served_first=turn % 2 == 0)
        ran = _run(replace(request, plan=own), served=True)
        if past := {*ran.unturned} & {*request.served}:
            return f"{min(past)} is also launched past its tuner, as by a graph"
        blocks = ran.blocks[2 * round(len(ran.blocks) * _WARM_SHARE / 2) :]
        runs.append(_paired([replace(b, seconds=b.seconds / count) for b in blocks]))
        if len(runs[-1]) < _LEAST_PAIRS:
            return "too few of its launches pass its tuner, as with a graph, or it ends too early"
    how = f"{len(runs) - profiled} processes, in turns of {count} steps within each"
    return _Turns(how, runs[profiled:], runs[:profiled])


def _turns_between(request: ProofRequest, reason: str, progress: Callable[[str], None]) -> _Turns:
    """Whole processes in turns. Raises `CommandError` where the program fails."""
    runs = []
    for turn in _rounds(request, TURNS, progress):
        blocks = []
        for served in (False, True) if turn % 2 == 0 else (True, False):
            ran = _run(request, served=served)
            steps = steps_of(ran)
            medians = {n: t.median_s for n, t in steps.launches.items()}
            blocks.append(TurnBlock(served, steps.seconds, ran.peak_bytes, medians))
        runs.append(_paired(blocks))
    return _Turns(f"{steps.how}; {len(runs)} processes each, not in turns within one: {reason}", runs)


def _paired(blocks: Sequence[TurnBlock]) -> list[_Pair]:
    return [sorted(two, key=lambda b: b.served) for two in zip(blocks[::2], blocks[1::2], strict=False)]


def _serve_only(root: Path, kernels: Sequence[str]) -> None:
    """Remove the variants of all other kernels from the improvement's store, whose runs are served with all it has."""
    store = Store(root)
    kept = [v for v in store.variants() if v.kernel in kernels]
    store.clear_variants()
    for variant in kept:
        store.put_variant(variant)


def _run(request: ProofRequest, *, served: bool, compare: bool = False) -> ProgramRecording:
    """One run. Where Triton's kernels are served, they are without variants, too: configs are the same in both."""
    plan = replace(
        request.plan,
        serve=bool(request.served),
        replaced=request.replaced if served else {},
        compare=compare,
        profile=request.plan.profile and not compare,
    )
    folder = request.folder / ("with" if served else "without")
    variants = served and bool(request.served)
    return record(request.program, plan, folder, request.store, seconds=request.run_s, variants=variants)


def _compare(request: ProofRequest) -> dict[str, str]:
    """Why sources do not give the program's results, by name."""
    ran = _run(request, served=True, compare=True)
    problems = {}
    for name in (*request.replaced, *request.served):
        if not ran.replaced_calls.get(name):
            problems[name] = (
                "the program makes no call that it was verified for, or its tuner prefers the original: see "
                f"{request.folder / 'with' / OUTPUT_FILE}"
            )
        elif (difference := ran.differences.get(name, 0.0)) > 1.0:
            problems[name] = f"a live call's result differs by {difference:.3g} times what rounding explains"
    if request.plan.check:
        _run(request, served=False, compare=True)
        if reason := _checks_differ(
            request.folder / "with" / CHECK_FILE, request.folder / "without" / CHECK_FILE
        ):
            why = f"{request.plan.check} returns otherwise: {reason}"
            problems = dict.fromkeys([*request.replaced, *request.served], why)
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
