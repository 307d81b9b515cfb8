"""A bench finds the faster of several solutions: verified, timed in pairs, confirmed in fresh processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from forecast_autotune.records.codec import Record
from forecast_harness.clocks.devices import device_facts, exclusive
from forecast_harness.clocks.paired_comparison import (
    DEFAULT_RULES,
    ComparisonOutcome,
    StoppingRules,
)
from forecast_harness.clocks.times import TimingSummary, matched_times
from forecast_harness.sandbox.api import JobStatus, ResourceLimits, SandboxJob, SandboxLane
from forecast_harness.targets.packs.schema import Pack, Solution
from forecast_harness.trials.confirmation import CONTESTS
from forecast_harness.verify.plan import VerificationPlan, cell_limits_for
from forecast_harness.verify.run import DEFAULT_PLAN, harness_hash, verify
from forecast_harness.verify.verdict import CheckedLaunches, Reason, ReasonCode, SolutionVerdict

SolutionContest = Callable[[Solution, Solution], Mapping[str, Any]]
"""Times a candidate, the second, beside an incumbent in a fresh process: `duel`, `seconds`, `protocols` and `checked`;
or who was `caught`, and the `reasons`."""


class ContestUnavailable(Exception):
    """A way to the clock that two solutions cannot take, through no fault of theirs; the text says why."""


BENCH_LIMITS = ResourceLimits(wall_s=600.0, trusted_s=600.0, cpu_s=1200.0)


@dataclass(frozen=True)
class BenchResult(Record):
    """One solution's standing."""

    solution: str
    verdict: SolutionVerdict
    outcome: str = ""
    """`incumbent`, `faster`, `slower`, `undecided`, `unconfirmed`, or empty when it was not timed."""
    gain: float | None = None
    """Ratio of the incumbent's time to its own, minus 1; of the confirmation, where there was one."""
    duels: tuple[Mapping[str, Any], ...] = ()
    """The contests in the order they were run; the second is the confirmation."""
    labels: Mapping[str, TimingSummary] = field(default_factory=dict)
    """Times per workload."""
    checked: CheckedLaunches = CheckedLaunches()
    """Launches checked in its verification and its contests together."""


class SolutionBench:
    """Verifies solutions of a pack one after the other, and times those accepted against the first of them.

    A solution is called faster only if two contests, in separate fresh processes with separate seeds, both find it so;
    the gain that is kept is the second one's, which was not selected for being large. Solutions that fail
    verification, or are caught during a contest, have no times. `first_contest` is another way to the clock for the
    first of the two, where no candidate can touch it; where it raises `ContestUnavailable`, and for the second, it is
    the sandbox. `watch` gets the name of each stage.
    """

    def __init__(
        self,
        pack: Pack,
        lane: SandboxLane,
        plan: VerificationPlan = DEFAULT_PLAN,
        rules: StoppingRules = DEFAULT_RULES,
        limits: ResourceLimits = BENCH_LIMITS,
        *,
        first_contest: SolutionContest | None = None,
        watch: Callable[[str], object] = str,
    ) -> None:
        self._pack, self._lane, self._plan, self._first = pack, lane, plan, first_contest
        self._watch = watch
        self._in_sandbox = partial(_run_timing_job, pack, lane, plan, rules, limits)
        self._solution: Solution | None = None
        self.incumbent: BenchResult | None = None
        """The result of the solution that others are timed against."""

    def enter(self, solution: Solution, *, timed: bool = True) -> BenchResult:
        """The solution's standing; not `timed`: its verification alone."""
        self._watch(f"verifying {solution.name}")
        verdict = verify(self._pack, solution, self._lane, plan=self._plan)
        entry = BenchResult(solution.name, verdict, checked=verdict.checked)
        if not (timed and verdict.accepted):
            return entry
        if self.incumbent is None or self._solution is None:
            self._solution, self.incumbent = solution, replace(entry, outcome="incumbent")
            return self.incumbent
        entry, labels = self._compare(self._solution, solution, verdict)
        if labels and not self.incumbent.labels:
            self.incumbent = replace(self.incumbent, labels=labels)
        if entry.gain is not None:  # every contest of the incumbent's takes other times
            beside = {name: t.median_ms for name, t in self.incumbent.labels.items()}
            own = {name: t.median_ms for name, t in entry.labels.items()}
            own_ms = matched_times(own, beside, 1 / (1 + entry.gain))
            labels = {n: t.scaled(own_ms[n] / t.median_ms) for n, t in entry.labels.items()}
            entry = replace(entry, labels=labels)
        return entry

    def seconds_of(self, solution: Solution) -> dict[str, float]:
        """Seconds of a solution that is trusted, by workload, beside the incumbent's; none where it is refused."""
        assert self._solution is not None
        assert self.incumbent is not None
        value = self._in_sandbox(self._solution, solution, None)
        if "caught" in value:
            return {}
        theirs, own = (_timing_summaries(value, which, self._plan) for which in (0, 1))
        beside = self.incumbent.labels or theirs
        return {n: 1e-3 * t.median_ms * beside[n].median_ms / theirs[n].median_ms for n, t in own.items()}

    def _compare(
        self, incumbent: Solution, candidate: Solution, verdict: SolutionVerdict
    ) -> tuple[BenchResult, dict[str, TimingSummary]]:
        """One candidate's contest and, if it wins, its confirmation; its entry and the incumbent's labels."""
        duels: list[Mapping[str, Any]] = []
        checked = verdict.checked
        outcome, gain = "", None
        labels: tuple[dict[str, TimingSummary], dict[str, TimingSummary]] = ({}, {})
        trusted_gain: float | None = None
        for number in range(CONTESTS):
            value: Mapping[str, Any] | None = None
            self._watch(f"{'confirming' if number else 'timing'} {candidate.name} against {incumbent.name}")
            if number == 0 and self._first is not None:
                with contextlib.suppress(ContestUnavailable):
                    value = self._first(incumbent, candidate)
                    trusted_gain = value["duel"]["gain"] if "duel" in value else None
            if value is None:
                value = self._in_sandbox(incumbent, candidate, trusted_gain)
            if "caught" in value:
                reasons = tuple(Reason.from_json(r) for r in value["reasons"])
                if value["caught"] == 0:
                    reasons = (Reason(ReasonCode.HARNESS, f"the incumbent was caught: {reasons[0].detail}"),)
                caught = SolutionVerdict(
                    verdict.pack,
                    verdict.solution,
                    reasons,
                    verdict.hints,
                    verdict.trials,
                    seconds=verdict.seconds,
                )
                return BenchResult(candidate.name, caught, "", None, tuple(duels)), {}
            duels.append(value["duel"])
            checked += CheckedLaunches.from_json(value["checked"])
            labels = (_timing_summaries(value, 0, self._plan), _timing_summaries(value, 1, self._plan))
            before, outcome, gain = outcome, value["duel"]["outcome"], value["duel"]["gain"]
            if outcome != ComparisonOutcome.FASTER:
                outcome = "unconfirmed" if before == ComparisonOutcome.FASTER else outcome
                break
        result = BenchResult(candidate.name, verdict, str(outcome), gain, tuple(duels), labels[1], checked)
        return result, labels[0]


def compare_solutions(
    pack: Pack,
    solutions: Sequence[Solution],
    lane: SandboxLane,
    *,
    against: Solution | None = None,
    plan: VerificationPlan = DEFAULT_PLAN,
    rules: StoppingRules = DEFAULT_RULES,
    limits: ResourceLimits = BENCH_LIMITS,
    first_contest: SolutionContest | None = None,
    watch: Callable[[str], object] = str,
) -> list[BenchResult]:
    """The standing of each in a `SolutionBench`, of `against` (default: the first accepted one) first."""
    bench = SolutionBench(pack, lane, plan, rules, limits, first_contest=first_contest, watch=watch)
    contestants = [*([against] if against is not None else []), *solutions]
    results: list[BenchResult] = []
    first: int | None = None
    for number, solution in enumerate(contestants):
        is_timed = against is None or not number or bench.incumbent is not None
        results.append(bench.enter(solution, timed=is_timed))
        first = number if first is None and bench.incumbent is not None else first
    if first is not None and bench.incumbent is not None:
        results[first] = bench.incumbent
    return results


def _run_timing_job(
    pack: Pack,
    lane: SandboxLane,
    plan: VerificationPlan,
    rules: StoppingRules,
    limits: ResourceLimits,
    incumbent: Solution,
    candidate: Solution,
    trusted_gain: float | None,
) -> Mapping[str, Any]:
    files: dict[str, str] = {}
    contestants = []
    for folder, solution in (("incumbent", incumbent), ("candidate", candidate)):
        sources = {**solution.files, "solution.py": solution.source}
        files |= {f"{folder}/{name}": text for name, text in sources.items()}
        file = f"{folder}/solution.py"
        contestants.append({"file": file, "entry": solution.entry, "language": str(solution.language)})
    payload: dict[str, Any] = {"pack": pack.to_json(), "contestants": contestants}
    payload |= {"plan": plan.to_json(), "rules": rules.to_json()}
    payload |= {} if trusted_gain is None else {"trusted_gain": trusted_gain}
    job = SandboxJob("forecast_harness.verify.timing_job:main", payload, files)
    with exclusive(plan.device_lock):
        result = lane.run(job, cell_limits_for(pack, limits, plan.device))
    if result.status is JobStatus.OK:
        value: Mapping[str, Any] = result.value
        return value
    code = ReasonCode.ESCAPE if result.status is JobStatus.SUSPICIOUS else ReasonCode.HARNESS
    return {"caught": 1, "reasons": [Reason(code, f"{result.fault}: {result.detail}"[:2000]).to_json()]}


def _timing_summaries(
    value: Mapping[str, Any], which: int, plan: VerificationPlan
) -> dict[str, TimingSummary]:
    facts = device_facts(None if plan.device == "cpu" else plan.index)
    results = {}
    for key, seconds in value["seconds"].items():
        contestant, _, name = key.partition(":")
        if contestant == str(which):
            kind = value["protocols"][name]
            protocol = "host-pairs-1" if plan.device == "cpu" else f"{kind}-cold-pairs-1"
            results[name] = TimingSummary.of(seconds, protocol=protocol, harness=harness_hash(), **facts)
    return results
