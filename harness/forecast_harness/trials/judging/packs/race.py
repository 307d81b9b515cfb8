"""The timing job of a search: a source's configs race each other, the winner is timed against the incumbent.

Runs in a sandbox judge, as `verify` does, whose clock and suspicion it uses. Every config has a cell
of its own: one that crashes takes no other along. All are timed in pairs with the incumbent, so that drift
and co-tenants meet both sides of every comparison.
"""

from __future__ import annotations

import hashlib
import os
import random
import statistics
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from forecast_harness.clocks.devices import reserve_processors
from forecast_harness.clocks.paired_comparison import CANDIDATE, INCUMBENT
from forecast_harness.sandbox.api import CandidateFault, Cell, CellAnswer, JobContext
from forecast_harness.targets.packs.schema import Language, Pack
from forecast_harness.trials.judging.races.halving import HalvingRace
from forecast_harness.trials.judging.races.rules import RaceRules, drift_corrected_seconds
from forecast_harness.verify.judge import SolutionJudge
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.problems.external_tasks import problem_of
from forecast_harness.verify.problems.problem import LaunchCase, VerificationProblem
from forecast_harness.verify.timing_job import CellClock, ContestantRejected, open_null_cell
from forecast_harness.verify.verdict import Judgement, Reason
from forecast_harness.verify.verification_job import reason_of_fault


def main(work: JobContext) -> CellAnswer:
    """Race and time. The payload has `pack`, `plan`, `rules`, and of each contestant `file`, `entry` and
    `language`: `against` is the incumbent, `configs` are the candidate's.

    The value has `spent` (seconds of launches) and `caught` (reasons by config number), and either
    `incumbent` (reasons why it could not be timed), or nothing more where no config is left, or `winner` (a
    config's number), `differences` (natural log of incumbent's over candidate's time, one per block),
    `ended` (why no more blocks), `ranking` (config number -> median difference when it was last timed),
    `seconds` (median per contestant, 0 or 1, and workload), `timed` (seconds by workload of every config that
    was raced, in order of the workloads, see `racing.level`) and `checks`.
    """
    asked = work.payload
    pack, plan = Pack.from_json(asked["pack"]), VerificationPlan.from_json(asked["plan"])
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as cells:
        race = _PackRace(
            work, pack, plan, RaceRules.from_json(asked["rules"]), problem_of(pack, Path(folder)), cells
        )
        try:
            value = race.run(asked["against"], asked["configs"])
        except ContestantRejected as found:  # the incumbent: a candidate's are caught where they happen
            value = {"incumbent": [r.to_json() for r in found.reasons]}
    caught = {str(n): [r.to_json() for r in reasons] for n, reasons in race.caught.items()}
    return CellAnswer({**value, "caught": caught, "spent": race.heat.spent})


class _PackRace:
    def __init__(
        self,
        work: JobContext,
        pack: Pack,
        plan: VerificationPlan,
        rules: RaceRules,
        problem: VerificationProblem,
        cells: ExitStack,
    ) -> None:
        self._work, self._pack, self._plan = work, pack, plan
        self._problem, self._cells = problem, cells
        self._seed = os.urandom(16)
        self._processors = reserve_processors() if plan.device == "cpu" else ()
        self.heat = HalvingRace(rules, random.Random(self._seed))
        self._open_cells: dict[int, Cell] = {}
        self.caught: dict[int, list[Reason]] = {}

    def run(self, against: Mapping[str, Any], configs: list[Mapping[str, Any]]) -> dict[str, Any]:
        """All of it. Raises `ContestantRejected` for the incumbent's faults."""
        base = self._prepare_judge(-1, against)
        languages = (Language(one["language"]) for one in (against, *configs))
        workloads = self._pack.timed_workloads(self._plan.device, *languages)
        host = self._plan.device == "cpu"
        null = open_null_cell(self._work, self._cells, self._processors) if host else None
        clocks: dict[int, CellClock] = {}
        cases: list[LaunchCase] = []  # shared, so that the incumbent's cell need not be sent each clock's own
        for n, config in enumerate(configs):
            try:
                clocks[n] = CellClock((base, self._prepare_judge(n, config)), workloads, cases, null)
                clocks[n].warm_up()
            except ContestantRejected as found:
                clocks.pop(n, None)
                self._reject(n, found)
        raced = dict(clocks)
        ranking = self.heat.run_rungs(clocks, self._reject, self._close_cell)
        if not clocks or self._suspicious():
            return {}
        (best,) = clocks
        try:
            differences, ended = self.heat.time_winner(clocks[best])
            clocks[best].check_times()
        except ContestantRejected as found:
            self._reject(best, found)
            return {}
        samples = {n: dict(clock.seconds) for n, clock in raced.items() if n not in self.caught}
        seconds = {key: statistics.median(times) for key, times in samples[best].items()}
        theirs = {name: s for (which, name), s in seconds.items() if which == INCUMBENT}
        return {
            "winner": best,
            "differences": differences,
            "ended": ended,
            "ranking": {str(n): d for n, d in ranking.items()},
            "seconds": {f"{which}:{name}": s for (which, name), s in seconds.items()},
            "timed": {str(n): list(drift_corrected_seconds(s, theirs).values()) for n, s in samples.items()},
            "checks": clocks[best].checks,
        }

    def _prepare_judge(self, n: int, one: Mapping[str, Any]) -> SolutionJudge:
        """A judge over a fresh cell that has imported the contestant. Raises `ContestantRejected`."""
        cell = self._open_cells[n] = self._cells.enter_context(self._work.cell(processors=self._processors))
        seed = hashlib.sha256(self._seed + str(n).encode()).digest()
        judge = SolutionJudge(self._pack, self._problem, cell, self._plan, seed)
        try:
            reasons = judge.prepare(one["file"], one["entry"], Language(one["language"]))
        except CandidateFault as fault:
            reasons = [reason_of_fault(fault, judge)]
        if reasons:
            raise ContestantRejected(INCUMBENT if n < 0 else CANDIDATE, reasons)
        return judge

    def _reject(self, n: int, found: ContestantRejected) -> None:
        if found.which == INCUMBENT:
            raise found
        self.caught[n] = found.reasons
        self._open_cells[n].close()

    def _suspicious(self) -> bool:
        """Whether any config did what honest code does not do: all of them have one author."""
        return any(r.judgement is Judgement.SUSPICIOUS for reasons in self.caught.values() for r in reasons)

    def _close_cell(self, n: int) -> None:
        self._open_cells[n].close()
