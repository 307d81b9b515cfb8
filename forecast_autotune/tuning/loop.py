"""The whole loop on one page: store -> forecast -> plan -> measure -> update -> decide."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from forecast_autotune.errors import NoWorkingConfigError
from forecast_autotune.features import stored_facts
from forecast_autotune.features.candidate_list import CandidateList
from forecast_autotune.numerics import single_threaded_blas
from forecast_autotune.policy import (
    REFUSED,
    Exhaustive,
    Policy,
    RiskBounded,
    TuningState,
    stated_risk,
    time_exhausted,
)
from forecast_autotune.records import (
    Candidate,
    Cost,
    Decision,
    Evidence,
    Measurement,
    MeasuringCost,
    Outcome,
    Plan,
)
from forecast_autotune.records.table import latest_labels
from forecast_autotune.settings import Mode, Settings
from forecast_autotune.surrogates.protocol import Forecasts, Query, Surrogate
from forecast_autotune.tuning.measurer import Measurer
from forecast_autotune.tuning.risk_tracking import RiskTracker
from forecast_autotune.tuning.task import (
    FactStore,
    TuningStore,
    TuningTask,
    fingerprint,
    uninformative_forecasts,
    utc_now,
    validate_forecasts,
)
from forecast_autotune.tuning.tracing import LazyTraces
from forecast_autotune.tuning.unmeasured import decide_from_forecasts, decide_from_store, decide_unmeasured

__all__ = ["TuningStore", "TuningTask", "fingerprint", "reusable_decision", "tune", "utc_now"]

MAX_FINALISTS = 4
"""How many of the fastest are timed again side by side."""
FINALIST_MARGIN = 0.06
"""Finalists lie within this share of the fastest: farther ones cannot be a matter of noise."""
ORACLE_FINALIST_MARGIN = 0.12
"""Where everything is measured, all within this share are finalists: an oracle must not be a matter of luck."""
NEGLIGIBLE_GAIN = 0.005
"""A variant takes the base's place if it is faster by more than this share, and by more than noise."""
FACT_COLLECTION_S = 0.02
"""Seconds after a decision for reading TTIR that no surrogate has read, so that it can be learnt from."""
_MAX_SHOWN_MESSAGES = 3
"""Distinct messages, the most frequent first, shown when nothing launches."""


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
    the next one starts, so an interruption at any point loses nothing.
    """
    chosen = policy or RiskBounded()
    if settings.mode in (Mode.EXHAUSTIVE, Mode.LISTEN):
        chosen = Exhaustive()
    mark = task.settings_digest(settings, chosen)
    if settings.mode is Mode.DETERMINISTIC:
        return decide_unmeasured(
            task, [], [], surrogate, settings, mark, "deterministic mode: no clock, no store"
        )
    if (stored := reusable_decision(store.decision(task.problem), task, settings, mark)) is not None:
        return stored
    if settings.mode in (Mode.SKIP, Mode.FROZEN):
        return decide_from_store(task, store, surrogate, settings, mark)
    with store.tuning_lock(task.problem, settings.lock_timeout_s):
        # Another process may have decided, or measured a part, while we waited.
        if (stored := reusable_decision(store.decision(task.problem), task, settings, mark)) is not None:
            return stored
        store.recover(task.problem)
        search = _DecisionRun(task, store, surrogate, chosen, settings, mark)
        decision = search.run(measurer)
        if decision.evidence is not Evidence.FORECAST:
            # A guess made while the harness was broken must not replace, or pass for, a decision.
            store.put_decision(task.problem, decision)
        store.sync()
        search.keep_facts()
        return decision


def reusable_decision(
    decision: Decision | None, task: TuningTask, settings: Settings, mark: str
) -> Decision | None:
    """The stored decision if it answers this task under these settings, marked as stored."""
    if decision is None:
        return None
    lenient = settings.mode in (Mode.SKIP, Mode.FROZEN) and decision.chosen in set(task.candidates)
    if decision.settings != mark and not lenient:
        return None
    return replace(decision, evidence=Evidence.STORED, measured=0, known=decision.known + decision.measured)


class _DecisionRun:
    """State of one decision in the making."""

    def __init__(
        self,
        task: TuningTask,
        store: TuningStore,
        surrogate: Surrogate,
        policy: Policy,
        settings: Settings,
        mark: str,
    ) -> None:
        self.task, self.store, self.surrogate, self.policy = task, store, surrogate, policy
        self.settings, self.settings_mark = settings, mark
        self.problem = task.problem
        self.start = time.perf_counter()
        self.forecast_s = 0.0
        self.candidates = CandidateList.of(task.candidates)
        self.rows = [m for m in store.measurements(task.problem) if m.candidate in self.candidates.row_of]
        self.measured = latest_labels(self.rows)
        self.known = len(self.measured)
        self.tried: dict[Candidate, Measurement] = {}
        """What happened in this decision, infrastructure faults included."""
        self.traces = LazyTraces(self.candidates, task.trace, task.read_facts)
        self.relatives = store.relatives(task.problem)
        name, earlier = f"{surrogate.name}/{surrogate.version}", store.decision(task.problem)
        self.ledger = RiskTracker(name, store.verdicts(task.problem), earlier)
        self.ledger.claim_previous(self.candidates, self.measured)
        self.reasons: list[str] = []
        self.audited = False
        self.finalists: set[Candidate] = set()

    def run(self, make: Callable[[], Measurer]) -> Decision:
        measurer: Measurer | None = None
        try:
            if not self.measured:  # then something has to be timed, whatever the forecasts say
                measurer = make()
                if not measurer.ready():  # then its IR was traced, too, and a guess would gain no time
                    measurer.prefetch(self._first_guess(measurer))
            while True:
                state = self._state(measurer, self._forecast())
                plan = self._plan(state)
                self.reasons.append(plan.reason)
                if not plan.measure:
                    break
                if measurer is None:
                    measurer = make()
                    if measurer.ready():
                        # Binaries from an earlier decision: plan again, knowing that they cost nothing.
                        state = replace(state, ready=measurer.ready(), workers=measurer.workers)
                        plan = self._plan(state)
                        self.reasons[-1] = plan.reason
                self._measure(measurer, plan, state)
            self._retime_finalists(measurer)
            return self._decide(state, plan, measurer)
        finally:
            if measurer is not None:
                measurer.close()

    def keep_facts(self) -> None:
        """File what a later refit reads of the candidates that were measured here.

        A harvest has its IR in the problem's record already.
        """
        if self.problem.ttir or not self.tried or not isinstance(self.store, FactStore):
            return
        # The decision stands: nothing that fails here may take it back.
        with contextlib.suppress(Exception):
            grids = {c: m.grid for c, m in self.measured.items() if m.grid is not None}
            found = stored_facts.collect_facts(
                self.task.problem, list(self.measured), grids, self.traces.texts, within_s=FACT_COLLECTION_S
            )
            if found["units"]:
                self.store.put_facts(
                    self.problem, stored_facts.merge_facts(self.store.facts(self.problem), found)
                )

    def _first_guess(self, measurer: Measurer) -> tuple[Candidate, ...]:
        """What to compile while most of the IR is still to be traced: the plan among the traced handful.

        It changes no later plan, and takes half of the workers at most: a wrong guess wastes only
        workers that would have been idle.
        """
        begin = time.perf_counter()
        try:
            if self.settings.mode is Mode.EXHAUSTIVE or not (traced := self.traces.trace_first_guess()):
                return ()
            with single_threaded_blas():
                # One worker: what a plan would compile ahead, for rounds to come, is not needed.
                guess = self._query_surrogate(traced, provisional=True)
                found = self.policy.plan(replace(self._state(measurer, guess), workers=1)).measure
        except Exception:
            return ()  # it will fail again where the first plan is made, and be dealt with there
        finally:
            self.forecast_s += time.perf_counter() - begin
        return found[: max(1, measurer.workers // 2)]

    def _state(self, measurer: Measurer | None, forecasts: Forecasts) -> TuningState:
        spent = measurer.spent() if measurer is not None else MeasuringCost()
        return TuningState(
            forecasts,
            # A candidate that met a broken harness is not a label, but must not be tried again now.
            {**self.tried, **self.measured},
            new=len(self.tried),
            round=len(self.reasons),
            workers=measurer.workers if measurer is not None else self.settings.worker_count(),
            tolerance=self.settings.tolerance,
            risk=self.settings.risk,
            budget=self.settings.budget,
            spent=spent,
            audit=self.settings.audit,
            audited=self.audited,
            seed=self.settings.seed,
            ready=measurer.ready() if measurer is not None else (),
            problem=self.problem.id,
        )

    def _forecast(self) -> Forecasts:
        begin = time.perf_counter()
        try:
            if not self.reasons:
                self._trace_first()
            forecasts = self._query_surrogate(self.candidates)
            if self.traces.trace_best(forecasts.order()):
                forecasts = self._query_surrogate(self.candidates)
            return forecasts
        except Exception as error:
            # Correct first: without forecasts we measure as triton.autotune would, and say so.
            warnings.warn(
                f"surrogate {self.surrogate.name} failed ({error!r}): measuring everything", stacklevel=2
            )
            self.policy = Exhaustive()
            return uninformative_forecasts(self.candidates, f"no forecast: {error}")
        finally:
            self.forecast_s += time.perf_counter() - begin

    def _trace_first(self) -> None:
        if self.settings.mode is not Mode.EXHAUSTIVE:
            self.traces.trace_initial()
            return
        # A harvest is replayed and refitted later, without the kernel: it takes its IR along.
        self.traces.trace_initial(everything=True)
        self.problem = replace(self.problem, ttir=self.traces.texts)

    def _query_surrogate(self, candidates: CandidateList, *, provisional: bool = False) -> Forecasts:
        task, texts = self.task, self.traces.texts
        query = Query(
            task.problem, candidates, task.grids, self.rows, self.relatives, texts, task.sources, provisional
        )
        with single_threaded_blas():
            return self.ledger.correct(validate_forecasts(self.surrogate.forecast(query), candidates))

    def _plan(self, state: TuningState) -> Plan:
        begin = time.perf_counter()
        with single_threaded_blas():
            plan = self.policy.plan(state)
        self.audited = self.audited or bool(plan.audit)
        self.ledger.claim_audited(plan, state)
        self.forecast_s += time.perf_counter() - begin
        return plan

    def _measure(self, measurer: Measurer, plan: Plan, state: TuningState) -> None:
        row = self.candidates.row_of
        audits = set(plan.audit)
        for m in measurer.measure(plan.measure, prefetch=plan.prefetch):
            place = row[m.candidate]
            forecast = state.forecasts[place]
            noted: dict[str, object] = {
                "forecast": {
                    "surrogate": f"{self.surrogate.name}/{self.surrogate.version}",
                    "log2_ms": round(forecast.point, 4),
                    "sd": round(forecast.spread, 4),
                    "p_fail": round(forecast.p_fail, 4),
                    **state.forecasts.note(place),
                }
            }
            if m.candidate in audits:
                noted["audit_probability"] = plan.audit_probability
            grid = m.grid or self.task.grids.get(m.candidate)
            self._record(replace(m, grid=grid, extra={**m.extra, **noted}))
            if time_exhausted(self.settings.budget, measurer.spent()):
                break  # the policy hears of it next, and ends the decision

    def _record(self, m: Measurement) -> None:
        self.store.add(self.problem, m)
        self.rows.append(m)
        self.tried[m.candidate] = m
        if m.outcome.is_label:
            self.measured[m.candidate] = m

    def _retime_finalists(self, measurer: Measurer | None) -> None:
        """Time the fastest again side by side: single timings crown the luckiest, not the best."""
        fast = self._fastest()
        oracle = self.settings.mode is Mode.EXHAUSTIVE
        within = [
            m
            for m in fast
            if m.ms <= fast[0].ms * (1 + (ORACLE_FINALIST_MARGIN if oracle else FINALIST_MARGIN))
        ]
        close = within if oracle else within[:MAX_FINALISTS]
        if (base := _fastest_of_base(within)) is not None and base not in close:
            close[-1] = base  # what variants have to beat
        if measurer is None or len(close) < 2:
            return
        for m in measurer.compare([m.candidate for m in close]):
            m = replace(m, grid=m.grid or self.task.grids.get(m.candidate))
            self.store.add(self.problem, m)
            self.rows.append(m)
            # Only these were timed alike: the winner is one of them.
            self.finalists.add(m.candidate)
        self.measured = latest_labels(self.rows)

    def _fastest(self) -> list[Measurement]:
        """Those that ran, fastest first; ties go to the earlier candidate, as in Triton."""
        final = self.finalists
        ran = [m for m in self.measured.values() if m.ok and (not final or m.candidate in final)]
        return sorted(
            ran, key=lambda m: (m.ms, m.p20_ms or m.ms, m.p80_ms or m.ms, self.candidates.row_of[m.candidate])
        )

    def _decide(self, state: TuningState, plan: Plan, measurer: Measurer | None) -> Decision:
        fast = self._fastest()
        spent = measurer.spent() if measurer is not None else MeasuringCost()
        wall = time.perf_counter() - self.start
        cost = Cost(max(wall, spent.wall_s), self.forecast_s, spent.compile_s, spent.timing_s, spent.compiled)
        cost = cost.with_llm(state.forecasts.consultation)
        refused = int(((state.forecasts.p_fail >= REFUSED) & ~self.candidates.mask_of(self.measured)).sum())
        new = len(self.tried)
        if not fast:
            return self._nothing_ran(state, cost)
        best = _prefer_base(fast, self.settings.tolerance)
        share = f"measured {new} of {len(self.task.candidates)}"
        if self.known:
            share += f", {self.known} known before"
        if best is not fast[0]:
            share += f"; {fast[0].candidate.variant} is not faster than the base by more than noise"
        evidence = Evidence.MEASURED if best.candidate in self.tried else Evidence.STORED
        untimed = len(self.task.candidates) - len(self.measured) - refused
        each = (spent.compile_s + spent.timing_s) / new if new else 0.0
        risk = self._final_risk(state, plan)
        return Decision(
            problem=self.task.problem.id,
            chosen=best.candidate,
            evidence=evidence,
            reason="; ".join(map(str, filter(None, (share, plan.reason, state.forecasts.consultation)))),
            stated_risk=risk,
            tolerance=self.settings.tolerance,
            candidates=len(self.task.candidates),
            measured=new,
            known=self.known,
            trusted=untimed,
            refused=refused,
            median_ms=best.ms,
            saved_s=max(0.0, (untimed + refused) * each + spent.compile_s + spent.timing_s - cost.wall_s),
            cost=cost,
            settings=self.settings_mark,
            at=utc_now(),
            rounds=tuple(self.reasons),
            surrogate=self.ledger.surrogate,
            shipped_risk=self.ledger.shipped(risk),
            verdicts=self.ledger.verdicts(self.measured, self.tried, fast[0]),
        )

    def _final_risk(self, state: TuningState, plan: Plan) -> float:
        """The risk as the last forecasts have it, also for policies that do not look at it."""
        if isinstance(self.policy, RiskBounded):
            return plan.risk
        rows = state.pending()
        with single_threaded_blas():
            return stated_risk(state, rows, state.forecasts.samples(rows, 512, state.seed))

    def _nothing_ran(self, state: TuningState, cost: Cost) -> Decision:
        faults = [m for m in self.tried.values() if m.outcome is Outcome.INFRASTRUCTURE]
        if faults:
            # The harness is broken, not the candidates: launch the best forecast, as skip mode would.
            why = f"not timed: {faults[0].extra.get('message', 'no message')}"
            warnings.warn(f"nothing could be timed ({why}): using the best forecast", stacklevel=2)
            return decide_from_forecasts(
                self.task, state.forecasts, self.settings, "", why, cost, self.measured
            )
        counted: dict[str, int] = {}
        for m in self.measured.values():
            counted[str(m.outcome)] = counted.get(str(m.outcome), 0) + 1
        shown = ", ".join(f"{n} {name}" for name, n in sorted(counted.items()))
        messages = Counter(str(m.extra.get("message", "")) for m in self.measured.values())
        del messages[""]
        # Whole, as the reason often stands at the end of what a compiler says.
        seen = "\n".join(text for text, _ in messages.most_common(_MAX_SHOWN_MESSAGES))
        if set(counted) == {str(Outcome.COMPILE_ERROR)}:
            remedy = "Mend what the compiler says"
        else:
            remedy = f"Give at least one config that fits {self.task.problem.device.name}"
        raise NoWorkingConfigError(
            f"kernel {self.task.problem.kernel.name}: none of {len(self.task.candidates)} candidates ran "
            f"({shown}). {remedy}; `forecast-autotune clear` forgets these outcomes. "
            f"Seen: {seen or 'no message'}"
        )


def _fastest_of_base(fast: Sequence[Measurement]) -> Measurement | None:
    return next((m for m in fast if m.candidate.is_base_variant), None)


def _prefer_base(fast: Sequence[Measurement], tolerance: float) -> Measurement:
    """The fastest; the base's fastest where another source is ahead of it by a trifle.

    Another source costs the user checks, a launch of its own and a reason to trust it. What it gains must be
    more than the noise of both medians, though never is more than the tolerance given up for the base.
    """
    best, base = fast[0], _fastest_of_base(fast)
    if base is None or best.candidate.is_base_variant:
        return best
    noise = 2.0 * math.hypot(best.error_ms, base.error_ms)
    least = min(max(NEGLIGIBLE_GAIN * best.ms, noise), tolerance * best.ms)
    return base if base.ms - best.ms <= least else best
