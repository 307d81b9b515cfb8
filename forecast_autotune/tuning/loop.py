"""The whole loop on one page: store -> forecast -> plan -> measure -> update -> decide."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace

import numpy as np

from forecast_autotune.errors import is_of_caller, is_told_to_caller
from forecast_autotune.garbage_collection import rare_collections
from forecast_autotune.numerics import single_threaded_blas
from forecast_autotune.policy import (
    REFUSED,
    Exhaustive,
    Policy,
    RiskBounded,
    TuningState,
    WallTime,
    stated_risk,
    time_exhausted,
)
from forecast_autotune.policy.including_refused import IncludingRefused
from forecast_autotune.records import Candidate, Cost, Decision, Evidence, Measurement, MeasuringCost, Plan
from forecast_autotune.settings import Mode, Settings
from forecast_autotune.surrogates.protocol import Array, Forecasts, Surrogate
from forecast_autotune.tuning.fact_collection import store_facts
from forecast_autotune.tuning.first_compilations import FirstCompilations
from forecast_autotune.tuning.forecaster import TaskForecaster
from forecast_autotune.tuning.guarded_store import GuardedStore
from forecast_autotune.tuning.host_seconds import seconds_saved
from forecast_autotune.tuning.llm_effect import LLMEffect, stored_consultation
from forecast_autotune.tuning.measurer import Measurer, MeasurerFailedError, measurer_errors
from forecast_autotune.tuning.plain_decision import decide_plainly
from forecast_autotune.tuning.preparation.compile_times import CompileTimes
from forecast_autotune.tuning.preparation.distinct_programs import DistinctPrograms
from forecast_autotune.tuning.preparation.register_spills import spill_slowdowns
from forecast_autotune.tuning.results import TaskResults, prefer_base
from forecast_autotune.tuning.risk_tracking import RiskTracker
from forecast_autotune.tuning.task import (
    TuningStore,
    TuningTask,
    fingerprint,
    uninformative_forecasts,
    utc_now,
    with_stored_advice,
)
from forecast_autotune.tuning.unmeasured import decide_from_store, decide_unmeasured, decide_without_times

_FIRST_TIMED, _TIMED_PER_PLAN = 2, 4
"""Compiled candidates timed before the plan is made for the second time, and before each later plan: forecast and plan
take as long as timing one does, and the first timings tell most."""

__all__ = [
    "TuningStore",
    "TuningTask",
    "fingerprint",
    "reusable_decision",
    "tune",
    "utc_now",
]


def tune(
    task: TuningTask,
    measurer: Callable[[], Measurer],
    *,
    store: TuningStore,
    surrogate: Surrogate,
    settings: Settings,
    policy: Policy | None = None,
) -> Decision:
    """Decide one problem. Raises `FrozenMissError` in frozen mode and `NoWorkingConfigError` if all fail.

    `measurer` is called only if something has to be timed. Every measurement is in the store before
    the next one starts, so an interruption at any point loses nothing. Whatever fails of store, surrogate and
    policy costs a warning, and time: then everything is measured. What the measurer raises is raised.
    """
    guarded = GuardedStore(store)
    try:
        with rare_collections():
            return _tune(task, measurer, guarded, surrogate, settings, policy)
    except MeasurerFailedError as failed:
        raised = failed.error
    except Exception as error:
        if is_told_to_caller(error):
            raise
        return decide_plainly(task, measurer, guarded, settings, error)
    raise raised  # measuring everything would only raise it again


def _tune(
    task: TuningTask,
    measurer: Callable[[], Measurer],
    store: GuardedStore,
    surrogate: Surrogate,
    settings: Settings,
    policy: Policy | None,
) -> Decision:
    chosen = policy or WallTime()
    if settings.mode in (Mode.EXHAUSTIVE, Mode.LISTEN):
        chosen = Exhaustive()
    elif task.hears_failures:
        chosen = IncludingRefused(chosen)
    mark = task.settings_digest(settings, chosen)
    if settings.mode is Mode.DETERMINISTIC:
        reason = "deterministic mode: no clock, no store"
        return decide_unmeasured(TaskForecaster(task, surrogate), [], [], settings, mark, reason)
    if (stored := reusable_decision(store.decision(task.problem), task, settings, mark)) is not None:
        return stored
    if settings.advice != "off":
        task = with_stored_advice(task, store)
    if settings.mode in (Mode.SKIP, Mode.FROZEN, Mode.BACKGROUND):
        return decide_from_store(TaskForecaster(task, surrogate), store, settings, mark)
    with store.tuning_lock(task.problem, settings.lock_timeout_s):
        # Another process may have decided, or measured a part, while we waited.
        if (stored := reusable_decision(store.decision(task.problem), task, settings, mark)) is not None:
            return stored
        store.recover(task.problem)
        forecaster = TaskForecaster(task, surrogate)
        run = _TuningRun(forecaster, store, chosen, settings, mark)
        decision = run.decide(measurer)
        if decision.evidence is not Evidence.FORECAST:
            # A guess made while the harness was broken must not replace, or pass for, a decision.
            store.put_decision(task.problem, decision)
        store.sync()
        store_facts(store, run.results, forecaster.traces.texts)
        return decision


def reusable_decision(
    decision: Decision | None, task: TuningTask, settings: Settings, mark: str
) -> Decision | None:
    """The stored decision if it answers this task under these settings, marked as stored."""
    if decision is None or decision.chosen not in task.candidates:  # a file may have been edited, or damaged
        return None
    if decision.settings != mark and settings.mode not in (Mode.SKIP, Mode.FROZEN):
        return None
    known, llm = decision.known + decision.measured, stored_consultation(settings)
    return replace(decision, evidence=Evidence.STORED, measured=0, known=known, llm=llm)


class _TuningRun:
    """One decision in the making: forecast, plan and measurements in turns until the policy is satisfied."""

    def __init__(
        self, forecaster: TaskForecaster, store: TuningStore, policy: Policy, settings: Settings, mark: str
    ) -> None:
        self.forecaster, self.policy = forecaster, policy
        self.settings, self.settings_mark = settings, mark
        self.problem, self.candidates = forecaster.problem, forecaster.candidates
        self.start = time.perf_counter()
        self.forecast_s = 0.0
        self.forecasts: Forecasts | None = None
        self.forecast_from = 0
        """How many measurements they were made from."""
        self.results = TaskResults(store, self.problem, self.candidates)
        self.relatives = store.relatives(self.problem)
        earlier = store.decision(self.problem)
        self.risks = RiskTracker(forecaster.label, store.verdicts(self.problem), earlier)
        self.risks.claim_previous(self.candidates, self.results.labels)
        self.reasons: list[str] = []
        """Why each plan is as it is that asks for something new, and the last."""
        self.plans = 0
        self.asked: set[Candidate] = set()
        self.compile_times = CompileTimes(self.candidates, forecaster.traces)
        self.programs = DistinctPrograms(self.problem, self.candidates, forecaster.traces)
        self.audited = False
        self.llm = LLMEffect()
        self._ahead = FirstCompilations(forecaster, policy, settings)

    def decide(self, make: Callable[[], Measurer]) -> Decision:
        """Raises `NoWorkingConfigError` when every candidate fails."""
        measurer: Measurer | None = None
        try:
            if not self.results.labels:  # then something has to be timed, whatever the forecasts say
                with measurer_errors():
                    measurer = make()
                    self._ahead.begin(measurer)
            if not self._ahead.are_all_measured:
                self.forecaster.prepare()
            if measurer is not None:
                with measurer_errors():
                    self._ahead.begin_guessed(measurer, self.relatives)
                    self._measure_early(measurer)
            while True:
                state = self._state(measurer, self._forecast())
                plan = self._plan(state)
                if not plan.measure:
                    self.reasons.append(plan.reason)
                    break
                if measurer is None:
                    with measurer_errors():
                        measurer = make()
                    if measurer.ready():
                        # Binaries from an earlier decision: plan again, knowing that they cost nothing.
                        state = self._state(measurer, state.forecasts)
                        plan = self._plan(state)
                if not self.asked.issuperset(plan.measure):
                    self.reasons.append(plan.reason)
                    self.asked.update(plan.measure)
                self._measure(measurer, plan, state)
            if measurer is not None:
                self._retime_finalists(measurer)
            return self._conclude(state, plan, measurer)
        finally:
            self.forecaster.traces.close()
            if measurer is not None:
                measurer.close()

    def _state(self, measurer: Measurer | None, forecasts: Forecasts) -> TuningState:
        spent = MeasuringCost()
        ready: Collection[Candidate] = ()
        compiling: Mapping[Candidate, float] = {}
        compile_s: Array | None = None
        slowdown: Array | None = None
        if measurer is not None:
            # Asked once: between two answers something may have compiled.
            spent, ready, compiling = measurer.spent(), measurer.ready(), measurer.compiling()
            if measurer.quiet:  # else a plan could make no use of it
                took = {
                    m.candidate: m.compile_s for m in self.results.tried.values() if m.compile_s is not None
                }
                programs = self.programs.count()
                compile_s, late = self.compile_times.expected(took, compiling, ready, programs)
                slowdown = np.maximum(late, spill_slowdowns(self.candidates, self.results.labels.values()))
        return TuningState(
            forecasts,
            self.results.outcomes(),
            new=len(self.results.tried),
            round=self.plans,
            workers=measurer.workers if measurer is not None else self.settings.worker_count(),
            tolerance=self.settings.tolerance,
            risk=self.settings.risk,
            budget=self.settings.budget,
            spent=spent,
            audit=self.settings.audit,
            audited=self.audited,
            seed=self.settings.seed,
            ready=ready,
            compiling=compiling,
            compile_s=compile_s,
            slowdown=slowdown,
            programs=None if isinstance(self.policy, Exhaustive) else self.programs.numbers(),
            problem=self.problem.id,
        )

    def _forecast(self) -> Forecasts:
        """Forecasts from all that is measured; those of the last plan where nothing has come since."""
        count = len(self.results.rows)
        if self.forecasts is None or count > self.forecast_from:
            self.forecasts, self.forecast_from = self._forecast_anew(), count
        return self.forecasts

    def _forecast_anew(self) -> Forecasts:
        begin = time.perf_counter()
        try:
            if not self.plans:
                self._trace_first()
            forecasts = self._forecast_all()
            if self.forecaster.traces.trace_best(forecasts.order()):
                forecasts = self._forecast_all()
            return forecasts
        except Exception as error:
            if is_of_caller(error):
                raise
            # Correct first: without forecasts we measure as triton.autotune would, and say so.
            warnings.warn(
                f"surrogate {self.forecaster.name} failed ({error!r}): measuring everything", stacklevel=2
            )
            self.policy = Exhaustive()
            return uninformative_forecasts(self.candidates, f"no forecast: {error}")
        finally:
            self.forecast_s += time.perf_counter() - begin

    def _trace_first(self) -> None:
        traces = self.forecaster.traces
        if self.settings.mode is not Mode.EXHAUSTIVE:
            traces.trace_initial()
            return
        # A harvest is replayed and refitted later, without the kernel: it takes its IR along.
        traces.trace_initial(everything=True)
        self.results.problem = replace(self.problem, ttir=traces.texts)

    def _forecast_all(self) -> Forecasts:
        with single_threaded_blas():
            return self.risks.correct(self.forecaster.forecast(self.results.rows, self.relatives))

    def _plan(self, state: TuningState) -> Plan:
        begin = time.perf_counter()
        with single_threaded_blas():
            plan = self.policy.plan(state)
            self.plans += 1
            self.llm.note(state, plan, self.policy, self.risks.correct)
        self.audited = self.audited or bool(plan.audit)
        self.risks.claim_audited(plan, state)
        self.forecast_s += time.perf_counter() - begin
        return plan

    def _measure(self, measurer: Measurer, plan: Plan, state: TuningState) -> None:
        audits, wanted = set(plan.audit), set(plan.measure)
        most = _TIMED_PER_PLAN if self.results.tried else _FIRST_TIMED
        count = 0
        for count, m in enumerate(self._measurements(measurer, plan), 1):
            extra: dict[str, object] = {"forecast": self._forecast_record(state.forecasts, m.candidate)}
            if m.candidate in audits:
                extra["audit_probability"] = plan.audit_probability
            self.results.add(self._with_grid(replace(m, extra={**m.extra, **extra})))
            if time_exhausted(self.settings.budget, measurer.spent()):
                break  # the policy hears of it next, and ends the decision
            wanted.discard(m.candidate)
            if plan.within_s is not None and (count >= most or wanted.isdisjoint(measurer.ready())):
                break  # while compilations go on, a new plan costs nothing
        if not count and measurer.workers > 1:  # all that is wanted still compiles
            self.forecaster.traces.parse_ahead()

    def _measure_early(self, measurer: Measurer) -> None:
        """Time what compiles before there is anything to plan by. Such measurements carry no forecast."""
        for candidate in self._ahead.compiled_early(measurer):
            for m in measurer.measure([candidate], prefetch=self._ahead.begun):
                self.results.add(self._with_grid(m))
            if time_exhausted(self.settings.budget, measurer.spent()):
                break
        if len(self.results.labels) == len(self.candidates):
            # Nothing is left to forecast: the traces that are still to come are not waited for.
            self.forecasts = uninformative_forecasts(self.candidates, "everything is measured")
            self.forecast_from = len(self.results.rows)

    def _measurements(self, measurer: Measurer, plan: Plan) -> Iterator[Measurement]:
        with measurer_errors():
            yield from measurer.measure(plan.measure, prefetch=plan.prefetch, within_s=plan.within_s)

    def _forecast_record(self, forecasts: Forecasts, candidate: Candidate) -> dict[str, object]:
        """What had been forecast of a candidate, as its measurement keeps it."""
        row = self.candidates.row_of[candidate]
        forecast = forecasts[row]
        return {
            "surrogate": self.forecaster.label,
            "log2_ms": round(forecast.point, 4),
            "sd": round(forecast.spread, 4),
            "p_fail": round(forecast.p_fail, 4),
            **forecasts.note(row),
        }

    def _with_grid(self, m: Measurement) -> Measurement:
        return replace(m, grid=m.grid or self.forecaster.grids.get(m.candidate))

    def _retime_finalists(self, measurer: Measurer) -> None:
        """Time the fastest again side by side: single timings crown the luckiest, not the best."""
        close = self.results.close_to_best(oracle=self.settings.mode is Mode.EXHAUSTIVE)
        if len(close) > 1 and not self.results.resume_comparison(close):
            with measurer_errors():
                compared = measurer.compare(close)
            self.results.add_comparison([self._with_grid(m) for m in compared])

    def _conclude(self, state: TuningState, plan: Plan, measurer: Measurer | None) -> Decision:
        results, forecasts = self.results, state.forecasts
        fast = results.fastest()
        spent = measurer.spent() if measurer is not None else MeasuringCost()
        wall = time.perf_counter() - self.start
        cost = Cost(max(wall, spent.wall_s), self.forecast_s, spent.compile_s, spent.timing_s, spent.compiled)
        asked = self.llm.record(forecasts.consultation)
        cost = cost.with_llm(asked)
        if not fast:
            return decide_without_times(results, forecasts, self.settings, cost)
        best = prefer_base(fast, self.settings.tolerance)
        new, total = len(results.tried), len(self.candidates)
        share = f"measured {new} of {total}"
        if results.known:
            share += f", {results.known} known before"
        if equal := self.programs.count_equal(results.labels):
            share += f"; {equal} others compile to the same programs"
        if best is not fast[0]:
            share += f"; {fast[0].candidate.variant} is not faster than the base by more than noise"
        evidence = Evidence.MEASURED if best.candidate in results.tried else Evidence.STORED
        refused = int(((forecasts.p_fail >= REFUSED) & ~self.candidates.mask_of(results.labels)).sum())
        untimed = total - len(results.labels) - refused
        risk = self._final_risk(state, plan)
        return Decision(
            problem=self.problem.id,
            chosen=best.candidate,
            evidence=evidence,
            reason="; ".join(map(str, filter(None, (share, plan.reason, asked)))),
            stated_risk=risk,
            tolerance=self.settings.tolerance,
            candidates=total,
            measured=new,
            known=results.known,
            trusted=untimed,
            refused=refused,
            median_ms=best.ms,
            saved_s=seconds_saved(
                self.problem,
                self.candidates,
                results.tried,
                known=results.labels,
                refused=refused,
                wall_s=cost.wall_s,
            ),
            cost=cost,
            settings=self.settings_mark,
            at=utc_now(),
            rounds=tuple(self.reasons),
            surrogate=self.risks.surrogate,
            shipped_risk=self.risks.shipped(risk),
            verdicts=self.risks.verdicts(results.labels, results.tried, fast[0]),
            llm=asked,
            advice=forecasts.advice,
        )

    def _final_risk(self, state: TuningState, plan: Plan) -> float:
        """The risk as the last forecasts have it, also for policies that do not look at it."""
        if isinstance(self.policy, RiskBounded):
            return plan.risk
        rows = state.pending()
        with single_threaded_blas():
            return stated_risk(state, rows, state.forecasts.samples(rows, 512, state.seed))
