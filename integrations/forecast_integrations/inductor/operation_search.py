"""One operation's decision in the making: which choices Inductor gets to see, round by round."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from forecast_autotune.features.candidate_list import CandidateList
from forecast_autotune.policy import REFUSED, TuningState
from forecast_autotune.printable import utc_now
from forecast_autotune.records import Candidate, Cost, Decision, Evidence, Measurement, Plan, Problem
from forecast_autotune.records.table import latest_labels
from forecast_autotune.settings import Mode
from forecast_autotune.surrogates.protocol import Forecasts, Query, Relative
from forecast_autotune.tuning.loop import Rounds, TuningTask
from forecast_integrations.inductor.choice_timing import is_of_clock, times_calls
from forecast_integrations.inductor.choices.pool import ChoicePool
from forecast_integrations.inductor.choices.surrogate import template_advice
from forecast_integrations.inductor.choices.templates import compile_seconds
from forecast_integrations.inductor.policy import NOT_WORTH_WAITING, LibraryBaseline, batch_size
from forecast_integrations.inductor.session import UNTIMED, TuningSession

MIN_CHOICES = 2
"""Candidates that Inductor gets at least where something is to be measured: a single one is not timed."""


class OperationSearch(Rounds):
    """The knowledge of one operation's candidates, and the next ones to measure.

    Inductor compiles what it is given and times it in one go: `first` says what that is. Afterwards
    `run` extends it, until the policy accepts the risk. `externs` are the vendor library's kernels,
    which cost no compilation, are the baseline of every op and Inductor's way out: they always stay.
    """

    def __init__(
        self,
        problem: Problem,
        candidates: Sequence[Candidate],
        externs: Collection[Candidate],
        session: TuningSession,
    ) -> None:
        super().__init__(session.policy, session.settings)
        self.problem, self.session = problem, session
        self.times_calls = times_calls(session, problem)
        """Whether short choices are timed without the host's part; other times of theirs do not count then."""
        self.of_other_clock: set[Candidate] = set()
        """Candidates whose stored times were taken otherwise, and do not count."""
        self.note = ""
        """Notes for the user on the decision, besides the reason; may be empty."""
        self.candidates = CandidateList.of(list(candidates))
        library = [c for c in self.candidates if c in set(externs)]
        self.library = LibraryBaseline(library, problem.device, session.policy, session.settings)
        self.tried: dict[Candidate, Measurement] = {}
        self.replayed: set[Candidate] = set()
        """Candidates whose time is not kept: Inductor had it in its own cache, or other work disturbed its clock."""
        self._expected: set[Candidate] = set()
        """Candidates that Inductor was given to time; where it tells nothing of that, no round would teach anything."""
        self._aside: set[Candidate] = set()
        """Candidates that took too long to compile."""
        self.predecided: Candidate | None = None
        """Decided before anything was measured: nothing is left for the clock."""
        self.decided_before = False
        """The store has the decision."""
        self.failed = False
        """There are no forecasts: Inductor goes on by itself."""
        self.altered = False
        """Somebody altered times on their way from the clock: a decision by them is not measured."""
        self.others_decide = False
        """A rule beside the clock takes one of the timed choices: no list is cut to one, and times are told as they
        are."""
        self.awaits_choice = self.is_due = False
        """Whether Inductor is about to take a choice, and whether the decision is recorded as soon as it has."""
        self.taken: Candidate | None = None
        """The choice that Inductor took, where it says so."""
        self.disturbed = False
        """Other work disturbed the clock: what it said decides now, and is not kept."""
        self.tuned_ahead = False
        """It had a turn before Inductor asked for its times; where that failed, there is no second one."""
        self.put_off: list[Candidate] = []
        """The plan, where an equal operation of the graph is to be measured before: most of it has no code yet."""
        self.pool: ChoicePool | None = None
        """Where the choices of further candidates come from; set before compilation."""
        self.begin = time.perf_counter()
        self.measure_s = self.compile_s = 0.0
        self.compiled: set[Candidate] = set()
        self._plan = Plan((), "", 1.0)
        self._forecasts: Forecasts | None = None
        self._own: list[Measurement] = []
        self.refresh()

    def add_note(self, text: str) -> None:
        """Add to what a user should know, once."""
        if text and text not in self.note:
            self.note = "; ".join(filter(None, (self.note, text)))

    def refresh(self) -> None:
        """Read again what this process has measured of the same problem elsewhere in the graph."""
        deterministic = self.settings.mode is Mode.DETERMINISTIC
        listed = [] if deterministic else self.session.snapshot.rows(self.problem)
        listed = [m for m in listed if m.candidate in self.candidates.row_of]
        stored = self._of_clock(listed)
        self.of_other_clock = {m.candidate for m in listed} - {m.candidate for m in stored}
        self.rows = [*stored, *(m for m in self._own if m not in stored)]
        self.measured = latest_labels(self.rows)

    def _of_clock(self, rows: Iterable[Measurement]) -> list[Measurement]:
        if self.problem.kernel.language != "inductor":  # the user's own kernels are timed elsewhere, too
            return list(rows)
        return [m for m in rows if is_of_clock(m, device_clock=self.times_calls)]

    # --- before anything is measured ---

    def first(self, *, draft: bool = False, shares: bool = True) -> list[Candidate]:
        """The candidates that Inductor should go on with, in the order given.

        `draft`: these are not all candidates of the operation yet, so nothing is settled. `shares`: what an equal
        operation of the graph is about to measure is left to it.
        """
        mode = self.settings.mode
        everything = list(self.candidates)
        if mode in (Mode.LISTEN, Mode.EXHAUSTIVE):
            return everything
        if (stored := self._stored(draft)) is not None:
            self.decided_before = True
            return self._predecide(stored, "decided before", draft)
        if mode is Mode.TUNE and len(everything) - len(self.library.candidates) == 1:
            return everything  # a choice that is listed alone is one that somebody wants timed
        if mode is Mode.TUNE and not self.measured:
            self.library.time_ahead()
        forecasts = self._ask(draft=draft)
        if mode in UNTIMED:
            return self._predecide(self._best_guess(forecasts), f"{mode} mode: not timed", draft)
        if forecasts is None:
            self.failed = True
            return everything
        plan = self._first_plan(forecasts)
        incumbent = self._incumbent()
        if not plan.measure and incumbent is not None:
            return self._predecide(incumbent, plan.reason, draft)
        if (sufficient := self.library.sufficient(plan, self.measured)) is not None:
            library, self._plan = sufficient
            if not draft:  # nothing will be timed beside them
                self.library.taken = True
                rows = [m for m in self.library.ahead.values() if m.candidate not in self.measured]
                self.add_measurements(rows)
                self.session.add_rows(self.problem, rows)
            return self._predecide(library, self._plan.reason, draft)
        wanted = self.with_baselines([*plan.measure, *([incumbent] if incumbent else [])], forecasts)
        shares = shares and self.times_calls and not self.others_decide
        return self._put_off(wanted, draft) if shares else wanted

    def _put_off(self, wanted: list[Candidate], draft: bool) -> list[Candidate]:
        """One template and the library's kernels where an equal operation of the graph decides: code takes 3 to 10 ms
        a choice."""
        under_way = self.library.position.products.under_way
        before: OperationSearch | None = under_way.get(self.problem.id)
        if before is None or before.tried:
            if not draft:
                under_way[self.problem.id] = self
            return wanted
        best = next((c for c in self.ranked() if c in wanted and c not in self.library.candidates), None)
        self.put_off = wanted
        return [c for c in wanted if c == best or c in self.library.candidates]

    def _stored(self, draft: bool) -> Candidate | None:
        session = self.session
        if self.settings.mode is Mode.DETERMINISTIC:
            return None
        decision = session.snapshot.decision(self.problem)
        if decision is None or decision.chosen not in self.candidates.row_of:
            return None
        if self.settings.mode is Mode.TUNE and self.library.overrules(decision):
            return None
        lenient = self.settings.mode in (Mode.SKIP, Mode.FROZEN)
        if decision.chosen in self.of_other_clock and not lenient:
            return None  # it was taken by its time
        lenient = lenient or draft
        return decision.chosen if lenient or decision.settings == self.decision_key() else None

    def decision_key(self) -> str:
        """Names what a decision depends on besides the problem."""
        return TuningTask(self.problem, self.candidates).settings_digest(self.settings, self.policy)

    def _predecide(self, chosen: Candidate, reason: str, draft: bool) -> list[Candidate]:
        self.reasons.append(reason)
        if self.others_decide:
            return self.with_baselines([chosen, *self.measured], self._forecasts)
        if not draft:
            self.predecided = chosen
        obeyed = self.times_calls and self.settings.mode is Mode.TUNE  # without a clock, see `rounds`
        kept = self.library.kept_for_fusion(chosen, self.measured) if obeyed else []
        return self.with_baselines([chosen, *kept], self._forecasts) if draft or kept else [chosen]

    def _best_guess(self, forecasts: Forecasts | None) -> Candidate:
        """The best measured, else the best forecast, else the library's kernel."""
        if (incumbent := self._incumbent()) is not None:
            return incumbent
        if forecasts is None:
            return (self.library.candidates or list(self.candidates))[0]
        best: Candidate = self.candidates[int(forecasts.order()[0])]
        return best

    def _incumbent(self) -> Candidate | None:
        ran = [m for m in self.measured.values() if m.ok]
        return min(ran, key=lambda m: (m.ms, self.candidates.row_of[m.candidate])).candidate if ran else None

    def with_baselines(self, wanted: Iterable[Candidate], forecasts: Forecasts | None) -> list[Candidate]:
        """The wanted ones and the externs, filled up to the least number with the best of the rest."""
        kept = {*wanted, *self.library.candidates}
        for candidate in self.ranked(forecasts):
            if len(kept) >= MIN_CHOICES:
                break
            kept.add(candidate)
        return [c for c in self.candidates if c in kept]

    def ranked(self, forecasts: Forecasts | None = None) -> list[Candidate]:
        """All candidates, best forecast first; as Inductor lists them where there is no forecast."""
        known = forecasts or self._forecasts
        return list(self.candidates) if known is None else [self.candidates[int(i)] for i in known.order()]

    def decided(self) -> Candidate | None:
        """The decision by now, if there is one: the same problem may have had its turn in the meantime."""
        tunes = self.settings.mode is Mode.TUNE and not self.others_decide
        if self.predecided is None and tunes and not self.tried:
            self.predecided = self._stored(draft=False)
            self.decided_before = self.predecided is not None
        return self.predecided

    # --- after a round ---

    def add_measurements(self, measurements: Sequence[Measurement], *, replayed: bool = False) -> None:
        """Take in what Inductor has timed; `replayed`: long ago, and read from its own cache."""
        for m in measurements:
            self.tried[m.candidate] = m
            if replayed:
                self.replayed.add(m.candidate)
        self._own.extend(measurements)
        self.refresh()

    @property
    def resolved(self) -> set[Candidate]:
        """Candidates of which it is known by now what became of them."""
        return {*self.measured, *self.tried}

    def next_plan(self) -> Plan:
        """Candidates of another round; nothing when the risk is accepted or nothing is left."""
        enough = replace(self._plan, measure=(), prefetch=())
        stop = self.failed or self.predecided is not None or self.settings.mode is not Mode.TUNE
        if stop or len(self.reasons) >= self.session.rounds or not self.resolved.issuperset(self._expected):
            return enough
        if (forecasts := self._ask()) is None:
            return enough
        plan = self._next(forecasts, batch_size(len(self.candidates)))
        if plan.measure and not self.library.is_worth_waiting(plan, self.measured):
            self.reasons.append(NOT_WORTH_WAITING)
            return enough
        limit = self.settings.max_measurements
        room = len(self.candidates) if limit is None else max(0, limit - len(self.tried))
        wanted = [*plan.measure, *plan.prefetch] if plan.measure else []
        return replace(
            plan, measure=tuple(c for c in wanted if c not in self._aside)[:room], prefetch=(), within_s=None
        )

    def add(self, measurement: Measurement, plan: Plan, count: int) -> bool:
        """Nothing: Inductor's own hook has handed it to `add_measurements`."""
        return True

    def expect(self, candidates: Iterable[Candidate]) -> None:
        """Note that Inductor times these."""
        self._expected.update(candidates)

    def set_aside(self, candidate: Candidate) -> None:
        """Not waited for, as it compiles far longer than others: it has no time, and is not asked for again."""
        self._aside.add(candidate)
        self.add_note("what compiled 3 times as long as others was not waited for")

    def drop(self, candidate: Candidate) -> None:
        """Inductor cannot make code for this one: plan on without it."""
        self.candidates = CandidateList.of([c for c in self.candidates if c != candidate])
        self.refresh()

    def _ask(self, *, draft: bool = False) -> Forecasts | None:
        start = time.perf_counter()
        mode = self.settings.mode
        relatives = [] if mode is Mode.DETERMINISTIC else self._relatives()
        query = Query(
            self.problem,
            self.candidates,
            measured=(*self.rows, *(m for c, m in self.library.ahead.items() if c not in self.measured)),
            relatives=relatives,
            advice=None
            if self.settings.advice == "off" or mode is Mode.DETERMINISTIC
            else template_advice(self.problem),
            provisional=draft,
            once=mode in UNTIMED,
        )
        self._forecasts = self.session.ask(query)
        self.forecast_s += time.perf_counter() - start
        return self._forecasts

    def _relatives(self) -> list[Relative]:
        """Related problems, as far as they were timed by the clock that is in force."""
        relatives = self.session.snapshot.relatives(self.problem)
        kept = [replace(r, measurements=tuple(self._of_clock(r.measurements))) for r in relatives]
        return [r for r in kept if any(m.ok for m in r.measurements)]

    def _first_plan(self, forecasts: Forecasts) -> Plan:
        """The same for every operation of this key, and for its draft: the forecasts rest on all that it knows."""
        known = self.session.first_plan(forecasts)
        if known is not None:
            self._plan = known
            self.reasons.append(known.reason)
            return known
        plan = self._next(forecasts)
        if forecasts.consultation is None:  # else each tells what it was worth
            self.session.keep_first_plan(forecasts, plan)
        return plan

    def _next(self, forecasts: Forecasts, workers: int = 1) -> Plan:
        known = {**self.library.ahead, **self.tried, **self.measured}
        self._plan = self.plan(self._state(forecasts, known, workers))
        self.reasons.append(self._plan.reason)
        return self._plan

    def _state(
        self, forecasts: Forecasts, known: Mapping[Candidate, Measurement], workers: int = 1
    ) -> TuningState:
        settings = self.settings
        return TuningState(
            forecasts,
            known,
            new=len(self.tried),
            round=len(self.reasons),
            workers=workers,
            tolerance=settings.tolerance,
            risk=settings.risk,
            budget=settings.budget,
            seed=settings.seed,
            compile_s=compile_seconds(self.problem, self.candidates),
            problem=self.problem.id,
        )

    # --- the end ---

    def decide(self) -> Decision | None:
        """The result; None when nothing ran. Committed where it rests on measurements."""
        settings = self.settings
        if self.predecided is not None:
            chosen = self.predecided
        elif (incumbent := self._incumbent()) is not None:
            chosen = incumbent
        else:
            return None
        if (overruled := self.taken is not None and self.taken != chosen) and self.taken is not None:
            chosen = self.taken
            self.add_note("Inductor took it by a rule of its own")
        timed = self.measured.get(chosen)
        fresh = [c for c in self.tried if self.disturbed or c not in self.replayed]
        refused = 0
        if self._forecasts is not None and len(self._forecasts) == len(self.candidates):
            refused = int(
                ((self._forecasts.p_fail >= REFUSED) & ~self.candidates.mask_of(self.measured)).sum()
            )
        untimed = len(self.candidates) - len(self.measured) - refused
        stored = timed is not None or self.decided_before
        now = timed is not None and chosen in fresh
        evidence = Evidence.MEASURED if now else Evidence.STORED if stored else Evidence.FORECAST
        consultation = self.llm.record(None if self._forecasts is None else self._forecasts.consultation)
        reason = self.reasons[-1] if self.reasons else "everything is measured"
        why = "; ".join(filter(None, (reason, self.note)))
        decision = Decision(
            problem=self.problem.id,
            chosen=chosen,
            evidence=evidence,
            reason=why if consultation is None else f"{why}; {consultation}",
            stated_risk=self._risk(untimed),
            tolerance=settings.tolerance,
            candidates=len(self.candidates),
            measured=len(fresh),
            known=len(self.measured.keys() - fresh),
            trusted=max(0, untimed),
            refused=refused,
            median_ms=timed.ms if timed is not None and timed.ok else None,
            cost=Cost(
                time.perf_counter() - self.begin,
                self.forecast_s,
                self.compile_s,
                self.measure_s,
                len(self.compiled),
            ).with_llm(consultation),
            settings=self.decision_key(),
            at=utc_now(),
            rounds=tuple(self.reasons),
            llm=consultation,
            advice="" if self._forecasts is None else self._forecasts.advice,
        )
        if (
            settings.mode in (Mode.TUNE, Mode.EXHAUSTIVE)
            and (self.tried or self.library.taken)
            and not (self.altered or overruled or self.replayed or self._lost() - self._aside)
        ):
            self.session.snapshot.decide(self.problem, decision)
        return decision

    def _lost(self) -> set[Candidate]:
        """Candidates that were tried, and of which nothing can be relied upon: no label came of it, or no own time."""
        unlabelled = (c for c, m in self.tried.items() if not m.outcome.is_label and c not in self.measured)
        return {*unlabelled, *self.replayed}

    def _risk(self, untimed: int) -> float:
        if (lost := self._lost()) and self.predecided is None and self._forecasts is not None:
            known = {c: m for c, m in self.measured.items() if c not in lost}
            return self.policy.plan(self._state(self._forecasts, known)).risk
        stored = self.session.snapshot.decision(self.problem) if self.decided_before else None
        if stored is not None and stored.chosen == self.predecided:
            return stored.stated_risk
        return self._plan.risk if untimed > 0 else 0.0

    def label(self) -> str:
        """The operation as a log line shows it."""
        shapes = ["x".join(map(str, a.shape)) for a in self.problem.arguments if a.name != "out"]
        return f"{self.problem.kernel.name}({', '.join(shapes)})"
