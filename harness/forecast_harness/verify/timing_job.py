"""The timing job: two verified solutions against each other, every launch still under suspicion."""

from __future__ import annotations

import hashlib
import math
import os
import random
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from forecast_harness.clocks.devices import EVENTS_PROTOCOL, reserve_processors
from forecast_harness.clocks.paired_comparison import (
    CANDIDATE,
    INCUMBENT,
    ComparisonOutcome,
    ComparisonResult,
    StoppingRules,
    run_comparison,
)
from forecast_harness.clocks.times import underreported_share
from forecast_harness.sandbox.cell import CandidateFault
from forecast_harness.sandbox.jobs import CellAnswer
from forecast_harness.sandbox.judge_process import JobContext
from forecast_harness.targets.packs.schema import Language, Pack, Workload
from forecast_harness.verify.examiner import SolutionExaminer, check_timed_longer
from forecast_harness.verify.exported_memory import ExportError
from forecast_harness.verify.launch_windows import (
    AuditedCells,
    AuditUnavailable,
    AuditVerdict,
    WindowAudit,
)
from forecast_harness.verify.launcher import LaunchTimes, NullCell
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.problem import LaunchCase, problem_of
from forecast_harness.verify.verdict import ContestantRejected, Reason, ReasonCode
from forecast_harness.verify.verification_job import reason_of_fault

_WARM_UP_LAUNCHES = 3
_WARM_UP_WINDOWS = 11
"""Windows of the trusted cell before the first block."""
_MOST_SERVING_GAIN = 10.0
"""A logarithm above any real gain."""
_LEAST_SECONDS, _LEAST_SHARE = 1e-6, 0.05
"""Least seconds of a launch, and its least share of a window, for windows shorter than their usual cost."""
_IDLE_PROBE_SHARE = 0.4
"""Share of launches before which the cost of asking is measured."""
_REDRAW_SHARE = 0.2
"""Share of pairs whose arguments are drawn anew, where that is quick."""
_MOST_HIDDEN_TIME = 0.1
"""The most by which contestants may differ in their shares of launches that took longer than reported."""
_MOST_AUDIT_ROUNDS, _MOST_AUDIT_S = 400, 4.0
"""The most rounds and seconds of windows in an audit by the judge's own clock."""
_MOST_HONEST_CLAIM = math.log(1.1)
"""The largest gain by clocks in the cells that chance, or a difference of methods, may hide from the judge's own clock:
up to it the contest is undecided, and nobody is accused."""
_CLOCK_DIFFERENCE = 0.02
"""The most by which log seconds of two ways to time honest launches differ."""


class CellClock:
    """Times launches in the contestants' cells, and checks a random share of all outputs.

    On a host the time of a launch is its window's by the judge's clock, less what windows of a trusted cell
    cost. The times that the contestants' own cells report are kept, and can only speak against a gain.
    """

    def __init__(
        self,
        judges: Sequence[SolutionExaminer],
        workloads: Sequence[Workload],
        cases: list[LaunchCase] | None = None,
        null: NullCell | None = None,
    ) -> None:
        """`cases` may be shared by clocks that use one cell in turns: large arguments are then sent once.

        `null` is given where launches have windows, on a host.
        """
        self._judges, self._workloads, self._null = judges, workloads, null
        self._incumbent_seconds: dict[str, float] = {}
        self._overheads: dict[str, float] = {}
        """The cost of windows, by workload; the same for both launches of a pair."""
        self._cases: list[LaunchCase] = [] if cases is None else cases
        self._warm = False
        self._output_forms: dict[str, Any] = {}
        """Forms of the incumbent's last outputs, by workload."""
        self.protocols: dict[str, str] = {}
        """The way of timing each workload, in both cells alike; empty until it is known, when each cell chooses."""
        self.replies: dict[tuple[int, str], list[LaunchTimes]] = defaultdict(list)
        self.seconds: dict[tuple[int, str], list[float]] = defaultdict(list)
        """The times that count, by contestant and workload."""
        self.idle: dict[tuple[int, str], list[float]] = defaultdict(list)
        self.checks = 0

    def sample(self, which: int, fresh: bool) -> float:
        """Geometric mean, over workloads, of the seconds of one launch. Raises `ContestantRejected`."""
        judge = self._judges[which]
        try:
            if not self._cases:
                self._cases += [judge.timed_case(w) for w in self._workloads]
            elif fresh:
                # Fresh values for every pair: on a host all of them, so that a solution gains nothing by keeping
                # its last arguments and results; elsewhere mostly a few, since drawing takes longer than that.
                anew = self._null is not None
                self._cases[:] = [
                    judge.timed_case(w)
                    if anew or judge.should_redraw(w, _REDRAW_SHARE)
                    else judge.next_case(c)
                    for w, c in zip(self._workloads, self._cases, strict=True)
                ]
        except CandidateFault as fault:  # the cell failed to take the arguments
            raise ContestantRejected(which, [reason_of_fault(fault, judge)]) from fault
        if fresh and self._null is not None:
            self._overheads = {w.name: self._null.typical_seconds(w.name) for w in self._workloads}
        logs = 0.0
        for workload, case in zip(self._workloads, self._cases, strict=True):
            logs += math.log(self._timed_launch(which, judge, workload, case))
        return math.exp(logs / len(self._workloads))

    def _timed_launch(
        self, which: int, judge: SolutionExaminer, workload: Workload, case: LaunchCase, *, last: bool = False
    ) -> float:
        protocol = self.protocols.get(workload.name, "")
        try:
            if judge.rng.random() < _IDLE_PROBE_SHARE or not self.idle[which, workload.name]:
                self.idle[which, workload.name].append(self._idle_seconds(judge, workload, case, protocol))
            reply = judge.timed(case, protocol)
            if which == INCUMBENT:
                self._output_forms[workload.name] = reply.described or []
            if last or judge.should_check(workload):
                self.checks += 1
                reasons = judge.checked(reply, workload)
            else:
                reasons = reply.reasons
        except CandidateFault as fault:
            raise ContestantRejected(which, [reason_of_fault(fault, judge)]) from fault
        reasons = reasons or (judge.plausibility_reasons(reply) if self._warm else [])
        if reasons:
            raise ContestantRejected(which, reasons)
        seconds = reply.seconds
        if self._null is not None:
            window_s = reply.wall_seconds
            seconds = max(window_s - self._overheads.get(workload.name, 0.0), _LEAST_SHARE * window_s)
        if not last:
            self.replies[which, workload.name].append(reply.times)
            self.seconds[which, workload.name].append(seconds)
        return seconds

    def _idle_seconds(
        self, judge: SolutionExaminer, workload: Workload, case: LaunchCase, protocol: str
    ) -> float:
        """Seconds of a question without a launch."""
        if self._null is None:
            return judge.idle(case, protocol)
        return self._null.measure(workload.name, case, self._output_forms.get(workload.name, []))

    def place(self) -> None:
        """Launch each side a few times; none of it counts."""
        for _ in range(_WARM_UP_LAUNCHES):
            for which in (INCUMBENT, CANDIDATE):
                self.sample(which, True)
        for workload in self._workloads:
            results = {self.replies[which, workload.name][-1].protocol for which in (INCUMBENT, CANDIDATE)}
            # A replay leaves the host's part out: both are replayed, or neither.
            self.protocols[workload.name] = results.pop() if len(results) == 1 else EVENTS_PROTOCOL
        if self._null is not None:
            self._null.forget()
            for workload, case in zip(self._workloads, self._cases, strict=True):
                for _ in range(_WARM_UP_WINDOWS):
                    self._null.measure(workload.name, case, self._output_forms[workload.name])
                usual = self._null.undisturbed_seconds(workload.name)
                shortest = min(r.wall_seconds for r in self.replies[INCUMBENT, workload.name])
                self._incumbent_seconds[workload.name] = max(shortest - usual, _LEAST_SECONDS)
        for records in (self.replies, self.seconds, self.idle):
            records.clear()
        self._warm = True

    @property
    def workloads(self) -> Sequence[Workload]:
        """The workloads that are timed."""
        return self._workloads

    def typical_seconds(self, name: str) -> float:
        """The incumbent's median at a workload."""
        return statistics.median(self.seconds[INCUMBENT, name])

    def serving_gain(self, margin: float) -> float:
        """The gain that a candidate could fake by replacing the code that serves its launches with lighter code.

        As a natural logarithm of the ratio of times, on top of a true one of `margin`; 0 where no window is
        timed, infinite where launches take no longer than that code.
        """
        if self._null is None:
            return 0.0
        logs = []
        for workload in self._workloads:
            saving = self._null.serving_seconds(workload.name) * math.exp(margin)
            rest = 1 - saving / self._incumbent_seconds[workload.name]
            logs.append(-math.log(rest) if rest > 0 else math.inf)
        return math.fsum(logs) / len(logs)

    def own_gain(self) -> float | None:
        """The candidate's gain by the cells' own clocks; None where these count anyway."""
        if self._null is None:
            return None
        logs = 0.0
        for workload in self._workloads:
            theirs, own = (
                statistics.median(r.seconds for r in self.replies[which, workload.name])
                for which in (INCUMBENT, CANDIDATE)
            )
            logs += math.log(theirs / own)
        return math.expm1(logs / len(self._workloads))

    def check(self) -> None:
        """Check one more launch of each, and all times against the judge's own clock. Raises `ContestantRejected`.

        That check may be the only one of large workloads. To a solution it is one more launch that is timed.
        """
        for which in (INCUMBENT, CANDIDATE):
            for workload, case in zip(self._workloads, self._cases, strict=True):
                self._timed_launch(which, self._judges[which], workload, case, last=True)
        if self._null is not None:
            return  # the judge's own clock counts already, and the cells' own times can gain nothing
        for (which, name), replies in self.replies.items():
            if reasons := self._judges[which].clock_reasons(replies, self.idle[which, name]):
                raise ContestantRejected(which, reasons)
        for name in (w.name for w in self._workloads):
            # Both were timed in turns, so a busy machine explains their common share, and no more.
            shares = [self._underreported_share(which, name) for which in (INCUMBENT, CANDIDATE)]
            tolerance = _MOST_HIDDEN_TIME + chance_difference(shares, len(self.replies[INCUMBENT, name]))
            for which in (INCUMBENT, CANDIDATE):
                if shares[which] - shares[1 - which] > tolerance:
                    text = f"{shares[which]:.0%} of its launches took clearly longer than was reported"
                    raise ContestantRejected(which, [Reason(ReasonCode.CLOCK, text, name)])

    def check_longer(self) -> None:
        """Check more launches of a candidate that is faster. Raises `ContestantRejected`."""
        judge = self._judges[CANDIDATE]
        try:
            reasons = check_timed_longer(judge, self._workloads)
        except CandidateFault as fault:
            reasons = [reason_of_fault(fault, judge)]
        if reasons:
            raise ContestantRejected(CANDIDATE, reasons)

    def _underreported_share(self, which: int, name: str) -> float:
        replies = self.replies[which, name]
        inside, outside = [r.total_seconds for r in replies], [r.wall_seconds for r in replies]
        return underreported_share(inside, outside, self.idle[which, name])


def chance_difference(shares: Sequence[float], launches: int) -> float:
    """The difference of two shares, of so many launches each, that chance explains: three standard errors.

    Four shares are compared in a contest, on machines where launches are late in bursts. The three launches
    of a hopeless candidate's contest prove nothing.
    """
    both = sum(shares) / 2
    return 3 * math.sqrt(2 * both * (1 - both) / launches)


def open_null_cell(work: JobContext, cells: ExitStack, processors: Sequence[int]) -> NullCell:
    """Cells without a candidate, on the contestants' processors; they are closed with `cells`."""
    null, bare = (cells.enter_context(work.cell(processors=processors)) for _ in range(2))
    return NullCell(null, bare, random.Random(os.urandom(16)))


def main(work: JobContext) -> CellAnswer:
    """Run one duel. The payload has `pack`, `contestants` (incumbent, candidate), `plan` and `rules`, and may have a
    `trusted_gain`, by a clock that neither can touch.

    The value has `duel`, `seconds` (per contestant and workload, all samples), `protocols` (per workload), `checks`,
    `checked` (of the candidate), `audit` (the result of the judge's own clock, if it was asked) and, when somebody was
    caught, `caught` (0 or 1) and `reasons` instead.
    """
    request = work.payload
    pack, plan = Pack.from_json(request["pack"]), VerificationPlan.from_json(request["plan"])
    torch.set_num_threads(1)
    seed = os.urandom(16).hex()
    processors = reserve_processors() if plan.device == "cpu" else ()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as cells:
        first, second = (cells.enter_context(work.cell(processors=processors)) for _ in range(2))
        problem = problem_of(pack, Path(folder))
        try:
            judges: list[SolutionExaminer] = []
            for n, (cell, contestant) in enumerate(zip((first, second), request["contestants"], strict=True)):
                own_seed = hashlib.sha256(f"{seed}{n}".encode()).digest()
                judges.append(
                    prepared_examiner(n, contestant, SolutionExaminer(pack, problem, cell, plan, own_seed))
                )
            languages = (Language(contestant["language"]) for contestant in request["contestants"])
            null = open_null_cell(work, cells, processors) if plan.device == "cpu" else None
            clock = CellClock(judges, pack.timed_workloads(plan.device, *languages), null=null)
            clock.place()
            rules = StoppingRules.from_json(request["rules"])
            serving = min(clock.serving_gain(rules.margin), _MOST_SERVING_GAIN)
            wider = replace(rules, margin=rules.margin + serving)
            duel = run_comparison(clock, wider, judges[0].rng.getrandbits(32))
            clock.check()
            audit: Mapping[str, Any] = {}
            if duel.outcome is ComparisonOutcome.FASTER:
                clock.check_longer()
                if plan.device != "cpu" and not is_plausible(duel, request.get("trusted_gain")):
                    typical = {w.name: clock.typical_seconds(w.name) for w in clock.workloads}
                    as_launched = [n for n, p in clock.protocols.items() if p == EVENTS_PROTOCOL]
                    arguments = (typical, clock.workloads, plan.device, as_launched)
                    open_cells = partial(AuditedCells, work, cells, pack, judges, (first, second), *arguments)
                    duel, audit = audit_duel(duel, open_cells, rules, judges[CANDIDATE].rng)
            duel = duel.with_own_gain(clock.own_gain(), rules.margin)
        except ContestantRejected as rejection:
            return CellAnswer(
                {"caught": rejection.which, "reasons": [r.to_json() for r in rejection.reasons]}
            )
    seconds: dict[str, Any] = {f"{which}:{name}": times for (which, name), times in clock.seconds.items()}
    value = {"duel": duel.to_json(), "seconds": seconds, "protocols": clock.protocols}
    launches = judges[CANDIDATE].checked_launches.to_json()
    return CellAnswer({**value, "checks": clock.checks, "checked": launches, "seed": seed, "audit": audit})


def prepared_examiner(which: int, contestant: Mapping[str, Any], judge: SolutionExaminer) -> SolutionExaminer:
    """The examiner, once its cell has imported a contestant (`file`, `entry`, `language`).

    Raises `ContestantRejected` of `which`.
    """
    try:
        reasons = judge.prepare(contestant["file"], contestant["entry"], Language(contestant["language"]))
    except CandidateFault as fault:
        reasons = [reason_of_fault(fault, judge)]
    if reasons:
        raise ContestantRejected(which, reasons)
    return judge


def is_plausible(duel: ComparisonResult, trusted_gain: float | None) -> bool:
    """Whether the gain by clocks in the cells is no larger than the one by a clock that nobody could touch."""
    if trusted_gain is None:
        return False
    return statistics.median(duel.differences) <= math.log1p(trusted_gain) + _CLOCK_DIFFERENCE


def audit_duel(
    duel: ComparisonResult, open_cells: Callable[[], AuditedCells], rules: StoppingRules, rng: random.Random
) -> tuple[ComparisonResult, Mapping[str, Any]]:
    """Check the win of a candidate by clocks in the cells with the judge's own clock; the result, and the audit's.

    Raises `ContestantRejected` where that clock shows no gain.
    """
    audit = WindowAudit(statistics.median(duel.differences), rules.margin)
    try:
        verdict = audit.run(open_cells(), rng, _MOST_AUDIT_ROUNDS, _MOST_AUDIT_S)
    except (ExportError, AuditUnavailable) as error:
        reason = f"the judge's own clock could not be asked: {error}"
        return replace(duel, outcome=ComparisonOutcome.UNDECIDED, reason=reason), {}
    gains = (
        f"{math.expm1(audit.gain):.1%} by the judge's own clock, {math.expm1(audit.claimed):.1%} by its own"
    )
    if verdict is AuditVerdict.CONTRADICTS and audit.claimed > _MOST_HONEST_CLAIM:
        raise ContestantRejected(CANDIDATE, [Reason(ReasonCode.CLOCK, f"its gain is {gains}", "windows")])
    if verdict is not AuditVerdict.AGREES:
        reason = f"its gain is {gains} ({len(audit.differences())} windows)"
        duel = replace(duel, outcome=ComparisonOutcome.UNDECIDED, reason=reason)
    return duel, audit.to_json()
