"""The search behind one operation's decision: it plans the choices that Inductor gets, round by round."""

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
    """One operation's candidates and measurements, and the plan of the next ones.

    Inductor compiles a list of choices and times it in one go: `first` returns that list. Afterwards `run` adds
    rounds, until the policy accepts the risk. `externs` are the vendor library's kernels, which cost no compilation
    and are the baseline of every op: they always stay, so that Inductor has a choice in any case.
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
        """Whether short choices are timed without the host's part; stored times with it do not count then."""
        self.of_other_clock: set[Candidate] = set()
        """Candidates whose stored times are of another clock, and do not count."""
        self.note = ""
        """Notes for the user on the decision, besides the reason; may be empty."""
        self.candidates = CandidateList.of(list(candidates))
        library = [c for c in self.candidates if c in set(externs)]
        self.library = LibraryBaseline(library, problem.device, session.policy, session.settings)
        self.tried: dict[Candidate, Measurement] = {}
        self.replayed: set[Candidate] = set()
        """Candidates whose time is not stored: it is from Inductor's own cache, or other work disturbed the clock."""
        self._round_candidates: set[Candidate] = set()
        """Candidates that Inductor was given to time; without results for all of them there is no further round."""
        self._stragglers: set[Candidate] = set()
        """Candidates that took too long to compile."""
        self.predecided: Candidate | None = None
        """The choice of a decision without measurements here."""
        self.decided_before = False
        """Whether the store has the decision."""
        self.failed = False
        """Whether there are no forecasts, so that Inductor goes on by itself."""
        self.altered = False
        """Whether a hook altered times on their way from the clock: a decision by them is not measured."""
        self.others_decide = False
        """Whether a rule beside the clock takes one of the timed choices: then no list is cut to one, and Inductor
        gets the true times."""
        self.awaits_choice = self.is_due = False
        """Whether Inductor is about to take a choice, and whether the decision is recorded as soon as it has."""
        self.taken: Candidate | None = None
        """The choice that Inductor took, where it reports one."""
        self.disturbed = False
        """Whether other work disturbed the clock: its times decide now, and are not stored."""
        self.tuned_ahead = False
        """Whether it was tuned before Inductor asked for its times, successfully or not; that is tried once."""
        self.put_off: list[Candidate] = []
        """The planned candidates, where an equal operation of the graph is measured first: most have no code yet."""
        self.pool: ChoicePool | None = None
        """The choices of further candidates; set before compilation."""
        self.begin = time.perf_counter()
        self.measure_s = self.compile_s = 0.0
        self.compiled: set[Candidate] = set()
        self._plan = Plan((), "", 1.0)
        self._forecasts: Forecasts | None = None
        self._own_rows: list[Measurement] = []
        self.refresh()

    def add_note(self, text: str) -> None:
        """Add a note for the user, once."""
        if text and text not in self.note:
            self.note = "; ".join(filter(None, (self.note, text)))

    def refresh(self) -> None:
        """Read again the measurements of the same problem elsewhere in the graph."""
        deterministic = self.settings.mode is Mode.DETERMINISTIC
        rows = [] if deterministic else self.session.snapshot.rows(self.problem)
        rows = [m for m in rows if m.candidate in self.candidates.row_of]
        clock_rows = self._of_clock(rows)
        self.of_other_clock = {m.candidate for m in rows} - {m.candidate for m in clock_rows}
        self.rows = [*clock_rows, *(m for m in self._own_rows if m not in clock_rows)]
        self.measured = latest_labels(self.rows)

    def _of_clock(self, rows: Iterable[Measurement]) -> list[Measurement]:
        if self.problem.kernel.language != "inductor":  # the user's own kernels are timed elsewhere, too
            return list(rows)
        return [m for m in rows if is_of_clock(m, device_clock=self.times_calls)]

    # --- before anything is measured ---

    def first(self, *, draft: bool = False, shares: bool = True) -> list[Candidate]:
        """Return the candidates that Inductor should go on with, in the given order.

        `draft`: the operation will have further candidates, so nothing is decided. `shares`: an equal operation of
        the graph that is measured first measures for this one, too.
        """
        mode = self.settings.mode
        everything = list(self.candidates)
        if mode in (Mode.LISTEN, Mode.EXHAUSTIVE):
            return everything
        if (choice := self._stored_choice(draft)) is not None:
            self.decided_before = True
            return self._predecide(choice, "decided before", draft)
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
        candidates = self.with_baselines([*plan.measure, *([incumbent] if incumbent else [])], forecasts)
        shares = shares and self.times_calls and not self.others_decide
        return self._put_off(candidates, draft) if shares else candidates

    def _put_off(self, candidates: list[Candidate], draft: bool) -> list[Candidate]:
        """Return one template and the library's kernels where an equal operation of the graph is measured first: code
        takes 3 to 10 ms a choice."""
        under_way = self.library.position.products.under_way
        earlier: OperationSearch | None = under_way.get(self.problem.id)
        if earlier is None or earlier.tried:
            if not draft:
                under_way[self.problem.id] = self
            return candidates
        best = next((c for c in self.ranked() if c in candidates and c not in self.library.candidates), None)
        self.put_off = candidates
        return [c for c in candidates if c == best or c in self.library.candidates]

    def _stored_choice(self, draft: bool) -> Candidate | None:
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
        """Return a digest of all that a decision depends on besides the problem."""
        return TuningTask(self.problem, self.candidates).settings_digest(self.settings, self.policy)

    def _predecide(self, chosen: Candidate, reason: str, draft: bool) -> list[Candidate]:
        self.reasons.append(reason)
        if self.others_decide:
            return self.with_baselines([chosen, *self.measured], self._forecasts)
        if not draft:
            self.predecided = chosen
        is_timed = self.times_calls and self.settings.mode is Mode.TUNE  # without a clock, see `rounds`
        fusible = self.library.kept_for_fusion(chosen, self.measured) if is_timed else []
        return self.with_baselines([chosen, *fusible], self._forecasts) if draft or fusible else [chosen]

    def _best_guess(self, forecasts: Forecasts | None) -> Candidate:
        """The best measured, else the best forecast, else the library's kernel."""
        if (incumbent := self._incumbent()) is not None:
            return incumbent
        if forecasts is None:
            return (self.library.candidates or list(self.candidates))[0]
        best: Candidate = self.candidates[int(forecasts.order()[0])]
        return best

    def _incumbent(self) -> Candidate | None:
        rows = [m for m in self.measured.values() if m.ok]
        row_of = self.candidates.row_of
        return min(rows, key=lambda m: (m.ms, row_of[m.candidate])).candidate if rows else None

    def with_baselines(self, candidates: Iterable[Candidate], forecasts: Forecasts | None) -> list[Candidate]:
        """Return the candidates and the externs, filled up to the least number with the best of the others."""
        selection = {*candidates, *self.library.candidates}
        for candidate in self.ranked(forecasts):
            if len(selection) >= MIN_CHOICES:
                break
            selection.add(candidate)
        return [c for c in self.candidates if c in selection]

    def ranked(self, forecasts: Forecasts | None = None) -> list[Candidate]:
        """Return all candidates, best forecast first; in Inductor's order where there is no forecast."""
        latest = forecasts or self._forecasts
        return list(self.candidates) if latest is None else [self.candidates[int(i)] for i in latest.order()]

    def decided(self) -> Candidate | None:
        """Return the decided candidate, if any: the same problem may have been decided meanwhile."""
        tunes = self.settings.mode is Mode.TUNE and not self.others_decide
        if self.predecided is None and tunes and not self.tried:
            self.predecided = self._stored_choice(draft=False)
            self.decided_before = self.predecided is not None
        return self.predecided

    # --- after a round ---

    def add_measurements(self, measurements: Sequence[Measurement], *, replayed: bool = False) -> None:
        """Add Inductor's times; `replayed`: those that it has read from its own cache."""
        for m in measurements:
            self.tried[m.candidate] = m
            if replayed:
                self.replayed.add(m.candidate)
        self._own_rows.extend(measurements)
        self.refresh()

    @property
    def resolved(self) -> set[Candidate]:
        """Candidates that have a result."""
        return {*self.measured, *self.tried}

    def next_plan(self) -> Plan:
        """Candidates of another round; nothing when the risk is accepted or nothing is left."""
        enough = replace(self._plan, measure=(), prefetch=())
        stop = self.failed or self.predecided is not None or self.settings.mode is not Mode.TUNE
        stop = stop or len(self.reasons) >= self.session.rounds
        if stop or not self.resolved.issuperset(self._round_candidates):
            return enough
        if (forecasts := self._ask()) is None:
            return enough
        plan = self._next(forecasts, batch_size(len(self.candidates)))
        if plan.measure and not self.library.is_worth_waiting(plan, self.measured):
            self.reasons.append(NOT_WORTH_WAITING)
            return enough
        limit = self.settings.max_measurements
        room = len(self.candidates) if limit is None else max(0, limit - len(self.tried))
        candidates = [*plan.measure, *plan.prefetch] if plan.measure else []
        measure = tuple(c for c in candidates if c not in self._stragglers)[:room]
        return replace(plan, measure=measure, prefetch=(), within_s=None)

    def add(self, measurement: Measurement, plan: Plan, count: int) -> bool:
        """Return True: Inductor's own hook has passed the measurement to `add_measurements`."""
        return True

    def expect(self, candidates: Iterable[Candidate]) -> None:
        """Note the candidates that Inductor times."""
        self._round_candidates.update(candidates)

    def set_aside(self, candidate: Candidate) -> None:
        """Leave out a candidate that compiles far longer than others: it has no time, and is not planned again."""
        self._stragglers.add(candidate)
        self.add_note("what compiled 3 times as long as others was not waited for")

    def drop(self, candidate: Candidate) -> None:
        """Remove a candidate that Inductor cannot make code for."""
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
        """Return related problems with the measurements of the clock in use."""
        relatives = self.session.snapshot.relatives(self.problem)
        comparable = [replace(r, measurements=tuple(self._of_clock(r.measurements))) for r in relatives]
        return [r for r in comparable if any(m.ok for m in r.measurements)]

    def _first_plan(self, forecasts: Forecasts) -> Plan:
        """Return one plan for all operations with equal forecasts, the draft included."""
        plan = self.session.first_plan(forecasts)
        if plan is not None:
            self._plan = plan
            self.reasons.append(plan.reason)
            return plan
        new_plan = self._next(forecasts)
        if forecasts.consultation is None:  # else each records its own consultation
            self.session.keep_first_plan(forecasts, new_plan)
        return new_plan

    def _next(self, forecasts: Forecasts, workers: int = 1) -> Plan:
        measurements = {**self.library.ahead, **self.tried, **self.measured}
        self._plan = self.plan(self._state(forecasts, measurements, workers))
        self.reasons.append(self._plan.reason)
        return self._plan

    def _state(
        self, forecasts: Forecasts, measurements: Mapping[Candidate, Measurement], workers: int = 1
    ) -> TuningState:
        settings = self.settings
        return TuningState(
            forecasts,
            measurements,
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
        """Return the decision; None when nothing ran. It is stored where it rests on measurements."""
        settings = self.settings
        if self.predecided is not None:
            chosen = self.predecided
        elif (incumbent := self._incumbent()) is not None:
            chosen = incumbent
        else:
            return None
        if (is_overruled := self.taken is not None and self.taken != chosen) and self.taken is not None:
            chosen = self.taken
            self.add_note("Inductor took it by a rule of its own")
        measurement = self.measured.get(chosen)
        fresh = [c for c in self.tried if self.disturbed or c not in self.replayed]
        refused = 0
        if self._forecasts is not None and len(self._forecasts) == len(self.candidates):
            refused = int(
                ((self._forecasts.p_fail >= REFUSED) & ~self.candidates.mask_of(self.measured)).sum()
            )
        untimed = len(self.candidates) - len(self.measured) - refused
        is_known = measurement is not None or self.decided_before
        is_fresh = measurement is not None and chosen in fresh
        evidence = Evidence.MEASURED if is_fresh else Evidence.STORED if is_known else Evidence.FORECAST
        consultation = self.llm.record(None if self._forecasts is None else self._forecasts.consultation)
        reason = self.reasons[-1] if self.reasons else "everything is measured"
        text = "; ".join(filter(None, (reason, self.note)))
        decision = Decision(
            problem=self.problem.id,
            chosen=chosen,
            evidence=evidence,
            reason=text if consultation is None else f"{text}; {consultation}",
            stated_risk=self._risk(untimed),
            tolerance=settings.tolerance,
            candidates=len(self.candidates),
            measured=len(fresh),
            known=len(self.measured.keys() - fresh),
            trusted=max(0, untimed),
            refused=refused,
            median_ms=measurement.ms if measurement is not None and measurement.ok else None,
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
            and not (self.altered or is_overruled or self.replayed or self._unreliable() - self._stragglers)
        ):
            self.session.snapshot.decide(self.problem, decision)
        return decision

    def _unreliable(self) -> set[Candidate]:
        """Return the tried candidates without a reliable result: no label, or no time of their own."""
        failures = (c for c, m in self.tried.items() if not m.outcome.is_label and c not in self.measured)
        return {*failures, *self.replayed}

    def _risk(self, untimed: int) -> float:
        if (unreliable := self._unreliable()) and self.predecided is None and self._forecasts is not None:
            rest = {c: m for c, m in self.measured.items() if c not in unreliable}
            return self.policy.plan(self._state(self._forecasts, rest)).risk
        decision = self.session.snapshot.decision(self.problem) if self.decided_before else None
        if decision is not None and decision.chosen == self.predecided:
            return decision.stated_risk
        return self._plan.risk if untimed > 0 else 0.0

    def label(self) -> str:
        """The operation as a log line shows it."""
        shapes = ["x".join(map(str, a.shape)) for a in self.problem.arguments if a.name != "out"]
        return f"{self.problem.kernel.name}({', '.join(shapes)})"
