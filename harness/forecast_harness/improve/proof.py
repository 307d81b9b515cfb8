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
"""Student's, for the mean of so many differences; the last one also for more."""
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
        """The speed-up and its interval, for people."""
        return f"{1 / self.ratio:.2f}x, 95 % interval {1 / self.high:.2f}x to {1 / self.low:.2f}x"


@dataclass(frozen=True)
class ProgramProof(Record, label="proof"):
    """The sources that hold in the program, and their gains."""

    step: Gain | None = None
    """None where nothing was left to be timed."""
    before_s: float = 0.0
    after_s: float = 0.0
    how: str = ""
    """The way in which steps were found, and taken in turns."""
    parts: Mapping[str, Gain] = field(default_factory=dict)
    """Gains in the time of each part's calls, for those that hold."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Why others do not hold."""
    peak_before: int = 0
    peak_after: int = 0


@dataclass(frozen=True)
class ProofRequest:
    """The sources to prove, and the way to run the program for it."""

    program: UserProgram
    plan: RecordingPlan
    """The plan of each run: it watches the functions, and replaces none."""
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
    """Seconds after which a run is ended."""
    ends: float
    """The time, by `time.monotonic`, at which the last turn should have ended."""


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
    pairs = [pair for run in (*turns.runs, *turns.profile) for pair in run]
    median = statistics.median
    step = Gain.of([median(a.seconds / b.seconds for b, a in run) for run in turns.runs])
    before_s, after_s = (median(p[w].seconds for run in turns.runs for p in run) for w in (0, 1))
    peaks = [max(pair[side].peak_bytes for pair in pairs) for side in (0, 1)]
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
"""A block without the sources, and one with them."""


@dataclass(frozen=True)
class _Turns:
    """Blocks without and with the sources that are to be compared, for each process or pair of processes."""

    how: str
    runs: Sequence[Sequence[_Pair]]
    profile: Sequence[Sequence[_Pair]] = ()
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
    profile_count = 1 if request.served else 0
    for turn in _rounds(request, TURNS + profile_count, progress):
        own = replace(plan, profile=turn == 0, served_first=turn % 2 == 0)
        recording = _run(replace(request, plan=own), served=True)
        if kernels := {*recording.unturned} & {*request.served}:
            return f"{min(kernels)} is also launched past its tuner, as by a graph"
        blocks = recording.blocks[2 * round(len(recording.blocks) * _WARM_SHARE / 2) :]
        runs.append(_pairs([replace(b, seconds=b.seconds / count) for b in blocks]))
        if len(runs[-1]) < _LEAST_PAIRS:
            return "too few of its launches pass its tuner, as with a graph, or it ends too early"
    how = f"{len(runs) - profile_count} processes, in turns of {count} steps within each"
    return _Turns(how, runs[profile_count:], runs[:profile_count])


def _turns_between(request: ProofRequest, reason: str, progress: Callable[[str], None]) -> _Turns:
    """Whole processes in turns. Raises `CommandError` where the program fails."""
    runs = []
    for turn in _rounds(request, TURNS, progress):
        blocks = []
        for served in (False, True) if turn % 2 == 0 else (True, False):
            recording = _run(request, served=served)
            steps = steps_of(recording)
            medians = {n: t.median_s for n, t in steps.launches.items()}
            blocks.append(TurnBlock(served, steps.seconds, recording.peak_bytes, medians))
        runs.append(_pairs(blocks))
    return _Turns(f"{steps.how}; {len(runs)} processes each, not in turns within one: {reason}", runs)


def _pairs(blocks: Sequence[TurnBlock]) -> list[_Pair]:
    return [sorted(two, key=lambda b: b.served) for two in zip(blocks[::2], blocks[1::2], strict=False)]


def _serve_only(root: Path, kernels: Sequence[str]) -> None:
    """Remove the variants of all other kernels from the improvement's store, whose runs are served with all it has."""
    store = Store(root)
    variants = [v for v in store.variants() if v.kernel in kernels]
    store.clear_variants()
    for variant in variants:
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
    recording = _run(request, served=True, compare=True)
    problems = {}
    for name in (*request.replaced, *request.served):
        if not recording.replaced_calls.get(name):
            problems[name] = (
                "the program makes no call that it was verified for, or its tuner prefers the original: see "
                f"{request.folder / 'with' / OUTPUT_FILE}"
            )
        elif (difference := recording.differences.get(name, 0.0)) > 1.0:
            problems[name] = f"a live call's result differs by {difference:.3g} times what rounding explains"
    if request.plan.check:
        _run(request, served=False, compare=True)
        if reason := _check_difference(
            request.folder / "with" / CHECK_FILE, request.folder / "without" / CHECK_FILE
        ):
            why = f"{request.plan.check} returns otherwise: {reason}"
            problems = dict.fromkeys([*request.replaced, *request.served], why)
    return problems


def _check_difference(path: Path, own: Path) -> str:
    """The difference of two files of checked results; empty where they agree."""
    import torch

    results = [torch.load(p, weights_only=True) if p.exists() else [] for p in (path, own)]
    return _difference(*results)


def _difference(a: object, b: object) -> str:
    import torch

    if isinstance(a, list) and isinstance(b, list):
        if len(a) != len(b):
            return f"{len(a)} results, not {len(b)}"
        return next((why for x, y in zip(a, b, strict=True) if (why := _difference(x, y))), "")
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return "other keys"
        return next((why for key in a if (why := _difference(a[key], b[key]))), "")
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{a.dtype} {list(a.shape)}, not {b.dtype} {list(b.shape)}"
        narrow = a.is_floating_point() and a.element_size() <= 2
        x, y = a.double(), b.double()
        distance = float((x - y).norm() / y.norm().clamp_min(1e-300))
        limit = _CHECK_TOLERANCE[narrow] if a.is_floating_point() else 0.0
        is_same = torch.equal(x.isfinite(), y.isfinite()) and (distance <= limit or torch.equal(x, y))
        return "" if is_same else f"a relative distance of {distance:.3g}, and {limit:g} is accepted"
    if isinstance(a, float) and isinstance(b, float):
        return "" if math.isclose(a, b, rel_tol=_CHECK_TOLERANCE[False]) else f"{a}, not {b}"
    return "" if a == b else f"{a!r:.40}, not {b!r:.40}"
