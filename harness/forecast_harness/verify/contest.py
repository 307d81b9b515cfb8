"""The timing job: two verified solutions against each other, every launch still under suspicion."""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from forecast_harness.packs.schema import Language, Pack, Workload
from forecast_harness.sandbox.cell import CandidateFault
from forecast_harness.sandbox.jobs import Answer
from forecast_harness.sandbox.worker import Work
from forecast_harness.timing.clock import CANDIDATE, INCUMBENT
from forecast_harness.timing.device import EVENTS
from forecast_harness.timing.duel import Rules, duel
from forecast_harness.timing.plausible import unexplained
from forecast_harness.verify.foreign import problem_of
from forecast_harness.verify.judge import Judge
from forecast_harness.verify.launches import Times
from forecast_harness.verify.plan import Plan
from forecast_harness.verify.problem import Case
from forecast_harness.verify.verdict import Code, Reason
from forecast_harness.verify.worker import faulted

_WARM_UP = 3
_IDLE = 0.4
"""Share of launches before which the cost of asking is measured."""
_DRAWN = 0.2
"""Share of pairs whose arguments are drawn anew, where that is quick."""
_HIDDEN = 0.1
"""By how much the shares of launches that took longer than reported may differ between contestants."""


class Found(Exception):
    """A contestant gave a reason to stop."""

    def __init__(self, which: int, reasons: Sequence[Reason]) -> None:
        super().__init__(f"contestant {which}: {reasons}")
        self.which, self.reasons = which, list(reasons)


class CellClock:
    """Times launches in the contestants' cells; a random share of all outputs is checked."""

    def __init__(
        self, judges: Sequence[Judge], workloads: Sequence[Workload], cases: list[Case] | None = None
    ) -> None:
        """`cases` may be shared by clocks that use one cell in turns: large arguments are then sent once."""
        self._judges, self._workloads = judges, workloads
        self._cases: list[Case] = [] if cases is None else cases
        self._warm = False
        self.protocols: dict[str, str] = {}
        """How each workload is timed, in both cells alike; until it is known, as suits each."""
        self.replies: dict[tuple[int, str], list[Times]] = defaultdict(list)
        self.idle: dict[tuple[int, str], list[float]] = defaultdict(list)
        self.checks = 0

    def sample(self, which: int, fresh: bool) -> float:
        """Geometric mean, over workloads, of the seconds of one launch. Raises `Found`."""
        judge = self._judges[which]
        try:
            if not self._cases:
                self._cases += [judge.timed_case(w) for w in self._workloads]
            elif fresh:
                # Fresh values for every pair, but mostly by changing a few: drawing takes longer than that.
                self._cases[:] = [
                    judge.timed_case(w) if judge.draws(w, _DRAWN) else judge.next_case(c)
                    for w, c in zip(self._workloads, self._cases, strict=True)
                ]
        except CandidateFault as fault:  # it failed to take them
            raise Found(which, [faulted(fault, judge)]) from fault
        logs = 0.0
        for work, case in zip(self._workloads, self._cases, strict=True):
            logs += math.log(self._one(which, judge, work, case))
        return math.exp(logs / len(self._workloads))

    def _one(self, which: int, judge: Judge, work: Workload, case: Case, *, last: bool = False) -> float:
        protocol = self.protocols.get(work.name, "")
        try:
            if judge.rng.random() < _IDLE or not self.idle[which, work.name]:
                self.idle[which, work.name].append(judge.idle(case, protocol))
            reply = judge.timed(case, protocol)
            if last or judge.looks(work):
                self.checks += 1
                reasons = judge.checked(reply, work)
            else:
                reasons = reply.reasons
        except CandidateFault as fault:
            raise Found(which, [faulted(fault, judge)]) from fault
        reasons = reasons or (judge.possible(reply) if self._warm else [])
        if reasons:
            raise Found(which, reasons)
        if not last:
            self.replies[which, work.name].append(reply.times)
        return reply.seconds

    def warm_up(self) -> None:
        """A few launches of each, which do not count."""
        for _ in range(_WARM_UP):
            for which in (INCUMBENT, CANDIDATE):
                self.sample(which, True)
        for work in self._workloads:
            found = {self.replies[which, work.name][-1].protocol for which in (INCUMBENT, CANDIDATE)}
            # A replay leaves the host's part out: both are replayed, or neither.
            self.protocols[work.name] = found.pop() if len(found) == 1 else EVENTS
        self.replies.clear()
        self.idle.clear()
        self._warm = True

    def believe(self) -> None:
        """Check one more launch of each, and hold all times against the judge's own clock. Raises `Found`.

        Of large workloads that check may be the only one. To a solution it is one more launch that is timed.
        """
        for which in (INCUMBENT, CANDIDATE):
            for work, case in zip(self._workloads, self._cases, strict=True):
                self._one(which, self._judges[which], work, case, last=True)
        for (which, name), replies in self.replies.items():
            if reasons := self._judges[which].believable(replies, self.idle[which, name]):
                raise Found(which, reasons)
        for work in self._workloads:
            # Both were timed in turns, so a busy machine explains what both show, and no more.
            shares = [self._unexplained(which, work.name) for which in (INCUMBENT, CANDIDATE)]
            allowed = _HIDDEN + by_chance(shares, len(self.replies[INCUMBENT, work.name]))
            for which in (INCUMBENT, CANDIDATE):
                if shares[which] - shares[1 - which] > allowed:
                    text = f"{shares[which]:.0%} of its launches took clearly longer than was reported"
                    raise Found(which, [Reason(Code.CLOCK, text, work.name)])

    def _unexplained(self, which: int, name: str) -> float:
        replies = self.replies[which, name]
        inside, outside = [r.whole for r in replies], [r.outside for r in replies]
        return unexplained(inside, outside, self.idle[which, name])


def by_chance(shares: Sequence[float], launches: int) -> float:
    """By how much two shares of so many launches each differ through chance: three standard errors.

    Four shares are compared in a contest, on machines where launches are late in bursts. The three launches
    of a hopeless candidate's contest prove nothing.
    """
    both = sum(shares) / 2
    return 3 * math.sqrt(2 * both * (1 - both) / launches)


def main(work: Work) -> Answer:
    """Run one duel. The payload has `pack`, `contestants` (incumbent, candidate), `plan` and `rules`.

    The value has `duel`, `seconds` (per contestant and workload, all samples), `protocols` (per workload),
    `checks` and, when somebody was caught, `caught` (0 or 1) and `reasons` instead.
    """
    asked = work.payload
    pack, plan = Pack.from_json(asked["pack"]), Plan.from_json(asked["plan"])
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, work.cell() as first, work.cell() as second:
        seed = os.urandom(16).hex()
        problem = problem_of(pack, Path(folder))
        judges = [
            Judge(
                pack,
                problem,
                cell,
                plan,
                hashlib.sha256(f"{seed}{n}".encode()).digest(),
            )
            for n, cell in enumerate((first, second))
        ]
        try:
            for n, (judge, one) in enumerate(zip(judges, asked["contestants"], strict=True)):
                try:
                    reasons = judge.prepare(one["file"], one["entry"], Language(one["language"]))
                except CandidateFault as fault:
                    reasons = [faulted(fault, judge)]
                if reasons:
                    raise Found(n, reasons)
            languages = (Language(one["language"]) for one in asked["contestants"])
            clock = CellClock(judges, pack.timed_workloads(plan.device, *languages))
            clock.warm_up()
            ended = duel(clock, Rules(**asked["rules"]), judges[0].rng.getrandbits(32))
            clock.believe()
        except Found as found:
            return Answer({"caught": found.which, "reasons": [r.to_json() for r in found.reasons]})
    seconds: dict[str, Any] = {
        f"{which}:{name}": [r.seconds for r in replies] for (which, name), replies in clock.replies.items()
    }
    said = {"duel": ended.to_json(), "seconds": seconds, "protocols": clock.protocols}
    return Answer({**said, "checks": clock.checks, "seed": seed})
