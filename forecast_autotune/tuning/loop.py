"""One decision, whole: store -> forecast -> plan -> measure -> update -> decide.

`tune` decides one problem. The holder of the clock is a `Measurer`: Triton's, a language's, a range's, Helion's.
Inductor has the first round's choices before there is a measurer: its search of an operation is a `Rounds` of its own.
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, is_dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from forecast_autotune.errors import (
    FrozenMissError,
    NoWorkingConfigError,
    RecordError,
    StoreError,
    is_of_caller,
    is_told_to_caller,
)
from forecast_autotune.features.candidate_list import CandidateList
from forecast_autotune.features.compile_seconds import stage_doublings
from forecast_autotune.features.traced_texts import collect_facts, merge_facts
from forecast_autotune.numerics import single_threaded_blas
from forecast_autotune.policy import (
    REFUSED,
    Exhaustive,
    IncludingRefused,
    Policy,
    RiskBounded,
    TuningState,
    WallTime,
    stated_risk,
    time_exhausted,
)
from forecast_autotune.printable import utc_now
from forecast_autotune.records import (
    Candidate,
    Cost,
    Decision,
    Evidence,
    LLMConsultation,
    Measurement,
    MeasuringCost,
    Outcome,
    Plan,
    Problem,
    RiskVerdict,
    digest,
)
from forecast_autotune.records.problem import OPTIONS
from forecast_autotune.records.table import latest_labels
from forecast_autotune.settings import Mode, Settings
from forecast_autotune.shared_setting import rare_collections
from forecast_autotune.store.misses import Miss
from forecast_autotune.surrogates.protocol import (
    Array,
    FileBackedSurrogate,
    Forecasts,
    Query,
    Relative,
    Surrogate,
)
from forecast_autotune.telemetry.spans import span
from forecast_autotune.tuning.compilations import (
    CompileTimes,
    DistinctPrograms,
    FirstCompilations,
    spill_slowdowns,
)
from forecast_autotune.tuning.measurer import Measurer, MeasurerFailedError, measurer_errors
from forecast_autotune.tuning.rechecks import MOST_RIVALS, Rechecks, RiskTracker
from forecast_autotune.tuning.results import TaskResults, TuningStore, tied
from forecast_autotune.tuning.tracing import LaunchFacts, LazyTraces

if TYPE_CHECKING:
    from forecast_autotune.llm.advice.record import Advice

FACT_COLLECTION_S = 0.02
"""Seconds after a decision for reading TTIR that no surrogate has read, so that it can be learnt from."""
_FIRST_TIMINGS, _TIMINGS_PER_PLAN = 2, 4
"""Compiled candidates timed before the plan is made for the second time, and before each later plan: forecast and plan
take as long as timing one does, and the first timings tell most."""
_MAX_SHOWN_MESSAGES = 3
"""Distinct messages, the most frequent first, shown when nothing launches."""
TIMING_MODES = (Mode.TUNE, Mode.EXHAUSTIVE, Mode.LISTEN)
_SOURCE_FAILURES = (Outcome.COMPILE_ERROR, Outcome.RUNTIME_ERROR, Outcome.INCORRECT)
"""Failures that a source's other configs may share. Resources and time depend on the config, and are forecast."""
_PRIOR_FAILURES, _PRIOR_TRIES = 0.2, 0.8
"""Counts of a source before any measurement: failures, and tries. From the sixth failure in a row it is
refused."""

MAX_TIES = 16
"""Configs as fast as the chosen one that a decision names."""
STRUCK = "struck"
"""`Decision.settings` of a decision whose candidate no longer launches: it stays readable, and is never served."""

Answer = TypeVar("Answer")


# --- the task of a decision, and its store ---


class GuardedStore:
    """Another store's answers or, where it raises, those of an empty one, with one warning.

    A measurement that could not be added is remembered here, so that it counts for this decision.
    """

    def __init__(self, store: TuningStore) -> None:
        self._store = store
        self._warned = False
        self._backlog: list[Measurement] = []

    def _ask(self, method: str, otherwise: Callable[[], Answer], *args: Any) -> Answer:
        try:
            call: Callable[..., Answer] | None = getattr(self._store, method, None)
            # Facts and advice are more than a store must have.
            return otherwise() if call is None else call(*args)
        except Exception as error:
            if is_of_caller(error):
                raise
            self._warn(error)
            return otherwise()

    def keeps(self, method: str) -> bool:
        """Whether the guarded store has an optional method: `put_facts`, `advice` or `add_miss`.

        This class has all of them, whichever store it guards.
        """
        passed_on: Callable[[str], bool] | None = getattr(self._store, "keeps", None)
        return hasattr(type(self._store), method) if passed_on is None else passed_on(method)

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"the store failed ({error!r:.300}): going on without it", stacklevel=4)

    def is_doubtful(self, problem: Problem) -> bool:
        """Whether the store failed, or knows that it could not read all that it may hold of a problem."""
        return self._warned or self._ask("is_doubtful", lambda: self._warned, problem)

    def measurements(self, problem: Problem) -> list[Measurement]:
        """As `TuningStore`."""
        backlog = [m for m in self._backlog if m.problem == problem.id]
        return self._ask("measurements", list, problem) + backlog

    def relatives(self, problem: Problem, limit: int = 8) -> list[Relative]:
        """As `TuningStore`."""
        return self._ask("relatives", list, problem, limit)

    def add(self, problem: Problem, measurement: Measurement) -> None:
        """As `TuningStore`."""
        self._ask("add", lambda: self._backlog.append(measurement), problem, measurement)

    def add_all(self, problem: Problem, measurements: Sequence[Measurement]) -> None:
        """As `TuningStore`; one by one where a user's own store has nothing else."""
        if hasattr(self._store, "add_all"):
            self._ask("add_all", lambda: self._backlog.extend(measurements), problem, measurements)
            return
        for measurement in measurements:
            self.add(problem, measurement)

    def decision(self, problem: Problem) -> Decision | None:
        """As `TuningStore`."""
        return self._ask("decision", lambda: None, problem)

    def put_decision(self, problem: Problem, decision: Decision) -> None:
        """As `TuningStore`; nothing for one without settings, which was made while the harness was broken.

        It must not replace, or pass for, a decision.
        """
        if not decision.settings:
            return
        self._ask("put_decision", lambda: None, problem, decision)

    def verdicts(self, problem: Problem) -> list[RiskVerdict]:
        """As `TuningStore`."""
        return self._ask("verdicts", list, problem)

    def tuning_lock(self, problem: Problem, timeout_s: float) -> AbstractContextManager[bool]:
        """As `TuningStore`."""
        return self._enter(self._ask("tuning_lock", contextlib.nullcontext, problem, timeout_s))

    def watch(self, problem: Problem, candidate: Candidate) -> AbstractContextManager[bool]:
        """As `Store.watch`."""
        return self._enter(self._ask("watch", contextlib.nullcontext, problem, candidate))

    @contextlib.contextmanager
    def _enter(self, context: AbstractContextManager[object]) -> Iterator[bool]:
        """Enter a context of the store; where entering or leaving fails, warn and run the block all the same."""
        try:
            is_held = bool(context.__enter__())
        except Exception as error:
            self._warn(error)
            yield False
            return
        try:
            yield is_held
        finally:
            try:
                context.__exit__(None, None, None)
            except Exception as error:
                self._warn(error)

    def recover(self, problem: Problem) -> list[Measurement]:
        """As `TuningStore`."""
        return self._ask("recover", list, problem)

    def sync(self) -> None:
        """As `TuningStore`."""
        self._ask("sync", lambda: None)

    def facts(self, problem: Problem) -> Mapping[str, Any] | None:
        """Return the facts kept beside a problem for refits (`features.traced_texts`), if any."""
        return self._ask("facts", lambda: None, problem)

    def put_facts(self, problem: Problem, facts: Mapping[str, Any]) -> None:
        """Store these facts in place of the earlier ones."""
        self._ask("put_facts", lambda: None, problem, facts)

    def add_miss(self, miss: Miss) -> None:
        """Record a miss that is not recorded yet."""
        self._ask("add_miss", lambda: None, miss)

    def advice(self, source_sha256: str) -> Advice | None:
        """The advice on a kernel source, if there is any."""
        return self._ask("advice", lambda: None, source_sha256)


@dataclass
class TuningTask:
    """One decision to make, as whoever asks for it describes it.

    Nothing but `TaskForecaster` reads its candidates, grids, IR and sources.
    """

    problem: Problem
    candidates: Sequence[Candidate]
    grids: Mapping[Candidate, tuple[int, ...]] = field(default_factory=dict)
    trace: Callable[[Sequence[Candidate]], Mapping[str, str]] | None = None
    """Returns TTIR by assignment key for its candidates; None when there is no IR."""
    fingerprint: str = ""
    """Digest of the candidates; computed when empty."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Source by variant, where it is known."""
    advice: Advice | None = None
    """A language model's advice on the kernel's source; by default the stored or the installed one."""
    normal_form: Callable[[], str] | None = None
    """Returns the digest of the kernel's normal form, by which installed advice outlives a release of its package."""
    hears_failures: bool = False
    """Whether the user's hooks get the exceptions of failing candidates: then refused candidates are tried, too."""
    struck: Sequence[Measurement] = ()
    """Failed launches of candidates that were chosen untimed in this process."""
    why_untimed: str = ""
    """Why nothing can be timed here, whatever the mode; empty where it can."""

    def known_labels(self, store: TuningStore | None) -> dict[Candidate, Measurement]:
        """The labels of its candidates: of a store's measurements and, later, of launches that failed here."""
        candidates = frozenset(self.candidates)
        rows = store.measurements(self.problem) if store is not None else ()
        return latest_labels(m for m in (*rows, *self.struck) if m.candidate in candidates)

    def settings_digest(self, settings: Settings, policy: Policy) -> str:
        """A digest of everything that a stored decision depends on besides the problem."""
        mark = self.fingerprint or fingerprint(self.candidates)
        # The repr of a dataclass holds all of its limits; another policy has only its name that is stable.
        how = repr(policy) if is_dataclass(policy) else policy.name
        return digest(mark, how, settings.tolerance, settings.risk, repr(settings.budget))


def fingerprint(candidates: Sequence[Candidate]) -> str:
    """One digest for a list of candidates, whatever their order."""
    # No detour over JSON: every first call computes this digest, for large lists as well.
    return digest(*sorted(map(_name, candidates)))


def _name(c: Candidate) -> str:
    k = c.config
    return repr((c.variant, k.kwargs, k.num_warps, k.num_stages, k.num_ctas, k.maxnreg, k.ir_override))


def in_row_order(task: TuningTask) -> TuningTask:
    """The task with its candidates sorted by name: draws, samples, ties and questions depend on their rows."""
    return replace(task, candidates=sorted(task.candidates, key=_name))


# --- the decision ---


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
    the next one starts, so an interruption at any point loses nothing. A failure of store, surrogate or policy costs
    a warning, and time: then everything is measured. Errors of the measurer are raised.
    """
    guarded_store = GuardedStore(store)
    try:
        with rare_collections():
            return _tune(task, measurer, guarded_store, surrogate, settings, policy)
    except MeasurerFailedError as failure:
        error_of_measurer = failure.error
    except Exception as error:
        if is_told_to_caller(error):
            raise
        return _decide_plainly(task, measurer, guarded_store, settings, error)
    raise error_of_measurer  # measuring everything would only raise it again


def _tune(
    task: TuningTask,
    measurer: Callable[[], Measurer],
    store: GuardedStore,
    surrogate: Surrogate,
    settings: Settings,
    policy: Policy | None,
) -> Decision:
    mode, policy = settings.mode, policy or WallTime()
    by_risk = mode is Mode.TUNE and isinstance(policy, RiskBounded)
    if mode in (Mode.EXHAUSTIVE, Mode.LISTEN):
        policy = Exhaustive()
    elif task.hears_failures:
        policy = IncludingRefused(policy)
    mark = task.settings_digest(settings, policy)
    if mode is Mode.DETERMINISTIC:
        forecaster, labels = TaskForecaster(task, surrogate), task.known_labels(None)
        return _decide_unmeasured(
            forecaster, labels, [], settings, mark, "deterministic mode: no clock, no store"
        )
    previous = reusable_decision(store.decision(task.problem), task, settings, mark)
    may_recheck = mode is Mode.TUNE and Rechecks.spent_s < settings.recheck_s
    if previous is not None and not (may_recheck and previous.is_untimed):
        return previous
    advisor = None if settings.advice == "off" else store
    if mode in (Mode.SKIP, Mode.FROZEN, Mode.BACKGROUND):
        forecaster = TaskForecaster(task, surrogate, advisor)
        return _decide_from_store(forecaster, store, settings, mark, task)
    with store.tuning_lock(task.problem, settings.lock_timeout_s):
        # Another process may have decided, or measured a part, while we waited.
        previous = reusable_decision(store.decision(task.problem), task, settings, mark)
        if previous is not None and not (may_recheck and previous.is_untimed):
            return previous
        if by_risk:
            task = in_row_order(task)
        store.recover(task.problem)

        def new_run() -> _TuningRun:
            return _TuningRun(
                TaskForecaster(task, surrogate, advisor), store, policy, settings, mark, measurer
            )

        if previous is not None and new_run().confirms():
            return previous
        run = new_run()
        if previous is not None:
            run.reasons.append(f"a re-check has refuted the untimed choice, {previous.chosen}")
        decision = run.decide()
        store.put_decision(task.problem, decision)
        store.sync()
        run.store_facts()
        return decision


def reusable_decision(
    decision: Decision | None, task: TuningTask, settings: Settings, mark: str
) -> Decision | None:
    """The stored decision if it answers this task under these settings, marked as stored."""
    # The file of the decision may have been edited, or damaged.
    if decision is None or decision.settings == STRUCK or decision.chosen not in task.candidates:
        return None
    if decision.settings != mark and settings.mode not in (Mode.SKIP, Mode.FROZEN):
        return None
    known, llm = decision.known + decision.measured, _stored_consultation(settings)
    return replace(decision, evidence=Evidence.STORED, measured=0, known=known, llm=llm)


class Rounds(ABC):
    """The loop itself: plan and measure in turns until the policy is satisfied.

    A subclass makes the next plan and stores the measurements.
    """

    def __init__(self, policy: Policy, settings: Settings) -> None:
        self.policy, self.settings = policy, settings
        self.measurer: Measurer | None = None
        """None until something has to be timed."""
        self.reasons: list[str] = []
        """Reasons of the plans that asked for new candidates, and of the last plan."""
        self.plans = 0
        self.forecast_s = 0.0
        self.llm = LLMEffect()

    def run(self) -> Plan:
        """Plan and measure; returns the plan that asks for nothing more."""
        while (plan := self.next_plan()).measure:
            self.measure(plan)
        return plan

    @abstractmethod
    def next_plan(self) -> Plan:
        """Return the next plan, from all that is known; an empty `measure` ends the loop."""

    @abstractmethod
    def add(self, measurement: Measurement, plan: Plan, count: int) -> bool:
        """Take in the `count`th measurement of a plan; whether to continue with the plan."""

    def measure(self, plan: Plan) -> int:
        """Let the measurer carry out a plan; returns the number of measurements."""
        count = 0
        for count, measurement in enumerate(self.measurements(plan), 1):
            if not self.add(measurement, plan, count):
                break
        return count

    def measurements(self, plan: Plan) -> Iterator[Measurement]:
        """Yield the measurer's answers to a plan, each as soon as it exists."""
        assert self.measurer is not None
        return self.measurer.measure(plan.measure, prefetch=plan.prefetch, within_s=plan.within_s)

    def correct(self, forecasts: Forecasts) -> Forecasts:
        """The forecasts as the policy is to see them."""
        return forecasts

    def plan(self, state: TuningState) -> Plan:
        """The policy's plan for a state."""
        begin = time.perf_counter()
        with single_threaded_blas():
            plan = self.policy.plan(state)
            self.plans += 1
            self.llm.note(state, plan, self.policy, self.correct)
        self.forecast_s += time.perf_counter() - begin
        return plan


class _TuningRun(Rounds):
    """One decision of `tune` in the making."""

    def __init__(
        self,
        forecaster: TaskForecaster,
        store: GuardedStore,
        policy: Policy,
        settings: Settings,
        mark: str,
        make_measurer: Callable[[], Measurer],
    ) -> None:
        super().__init__(policy, settings)
        self._start = time.perf_counter()
        self._forecaster, self._store, self._mark = forecaster, store, mark
        self._problem, self._candidates = forecaster.problem, forecaster.candidates
        self._make_measurer = make_measurer
        self._forecasts: Forecasts | None = None
        self._forecast_from = 0
        """Number of measurements that `_forecasts` rest on."""
        self._results = TaskResults(store, self._problem, self._candidates)
        self._relatives = store.relatives(self._problem)
        self._risks = RiskTracker(
            forecaster.label, store.verdicts(self._problem), store.decision(self._problem)
        )
        self._risks.claim_previous(self._candidates, self._results.labels)
        self._requests: set[Candidate] = set()
        """Candidates of all plans so far."""
        release = dict(self._problem.toolchain).get("triton", "")
        doublings = stage_doublings(self._problem.device.backend, release)
        self._compile_times = CompileTimes(self._candidates, forecaster.traces, None, doublings)
        self._programs = DistinctPrograms(self._problem, self._candidates, forecaster.traces)
        self._first_compilations = FirstCompilations(forecaster.traces, self._guess, policy, settings)
        self._previous = self._find_previous() if settings.prefer == "bits" else None
        self._bits_choice: Measurement | None = None
        """The choice under `prefer="bits"`: its outputs have the bits of the previous choice's."""
        self._audited = False

    def decide(self) -> Decision:
        """Raises `NoWorkingConfigError` when every candidate fails."""
        try:
            if not self._results.labels:  # something has to be timed, whatever the forecasts say
                with measurer_errors():
                    self.measurer = self._make_measurer()
                    self._first_compilations.begin(self.measurer)
            if not self._first_compilations.are_all_measured:
                self._forecaster.prepare()
            if self._previous is not None and self._previous not in self._results.labels:
                self._measure_previous(self._previous)
            if self.measurer is not None:
                with measurer_errors():
                    self._first_compilations.begin_guessed(self.measurer)
                    self._measure_early(self.measurer)
            plan = self.run()
            self.reasons.append(plan.reason)
            if self.measurer is not None:
                self._retime_finalists(self.measurer)
            return self._conclude(plan, self._keep_bits() if self.settings.prefer == "bits" else "")
        finally:
            self._forecaster.traces.close()
            if self.measurer is not None:
                self.measurer.close()

    def confirms(self) -> bool:
        """Whether the stored, untimed decision survives a re-check, if one is drawn; the result is stored with it."""
        decision = self._store.decision(self._problem)
        if decision is None or not Rechecks.draw(decision):
            return decision is not None
        order = self._forecast().order().tolist()
        rivals = [c for row in order if (c := self._candidates[row]) != decision.chosen][:MOST_RIVALS]
        with measurer_errors():
            measurer = self._make_measurer()
            try:
                add, remaining_s = self._results.add, self.settings.recheck_s - Rechecks.spent_s
                result, refuted = Rechecks.judge(
                    decision, rivals, measurer, lambda m: add(self._with_grid(m)), remaining_s
                )
            finally:
                self._forecaster.traces.close()
                measurer.close()
        self._store.put_decision(self._problem, result)
        return not refuted

    def next_plan(self) -> Plan:
        """The policy's plan. The first one with candidates opens the measurer, and is made again if binaries exist."""
        self._state = self._state_of(self._forecast())
        plan = self.plan(self._state)
        if plan.measure and self.measurer is None:
            with measurer_errors():
                self.measurer = self._make_measurer()
            if self.measurer.ready():
                # Binaries from an earlier decision: plan again, knowing that they cost nothing.
                self._state = self._state_of(self._state.forecasts)
                plan = self.plan(self._state)
        if not self._requests.issuperset(plan.measure):
            self.reasons.append(plan.reason)
            self._requests.update(plan.measure)
        return plan

    def correct(self, forecasts: Forecasts) -> Forecasts:
        """The forecasts with the correction of risks that earlier verdicts have earned."""
        return self._risks.correct(forecasts)

    def plan(self, state: TuningState) -> Plan:
        """As the base's; its audits and its stated risk are remembered."""
        plan = super().plan(state)
        self._audited = self._audited or bool(plan.audit)
        self._risks.claim_audited(plan, state)
        return plan

    def measure(self, plan: Plan) -> int:
        """Time what is compiled of a plan; while all of it still compiles, prepare for another shape."""
        self._pending = set(plan.measure)
        self._timing_limit = _TIMINGS_PER_PLAN if self._results.tried else _FIRST_TIMINGS
        count = super().measure(plan)
        if not count and self.measurer is not None and self.measurer.workers > 1:
            self._forecaster.traces.parse_ahead()
        return count

    def measurements(self, plan: Plan) -> Iterator[Measurement]:
        """As the base's; errors here are the measurer's."""
        with measurer_errors():
            yield from super().measurements(plan)

    def add(self, measurement: Measurement, plan: Plan, count: int) -> bool:
        """Commit a measurement; whether to continue with the plan, rather than make a better one."""
        assert self.measurer is not None
        candidate = measurement.candidate
        extra: dict[str, object] = {"forecast": self._forecast_record(self._state.forecasts, candidate)}
        if candidate in plan.audit:
            extra["audit_probability"] = plan.audit_probability
        self._results.add(self._with_grid(replace(measurement, extra={**measurement.extra, **extra})))
        self._pending.discard(candidate)
        if measurement.outcome is Outcome.INCORRECT or getattr(self.measurer, "is_undecided", False):
            return True  # next comes the candidate beside it, or the one that tells which of two is right
        if time_exhausted(self.settings.budget, self.measurer.spent()):
            return False  # the next call of the policy ends the decision
        # While compilations go on, a new plan costs nothing.
        enough = count >= self._timing_limit or self._pending.isdisjoint(self.measurer.ready())
        return plan.within_s is None or not enough

    def store_facts(self) -> None:
        """Store the facts of the measured candidates for a later refit. Never raises.

        A harvest has its IR in the problem's record already.
        """
        problem, labels = self._results.problem, self._results.labels
        if problem.ttir or not self._results.tried or not self._store.keeps("put_facts"):
            return
        # The decision stands: nothing that fails here may take it back.
        with contextlib.suppress(Exception):
            grids = {c: m.grid for c, m in labels.items() if m.grid is not None}
            texts = self._forecaster.traces.texts
            facts = collect_facts(problem, list(labels), grids, texts, within_s=FACT_COLLECTION_S)
            if facts["units"]:
                self._store.put_facts(problem, merge_facts(self._store.facts(problem), facts))

    def _state_of(self, forecasts: Forecasts) -> TuningState:
        measurer, cost = self.measurer, MeasuringCost()
        ready: Collection[Candidate] = ()
        compiling: Mapping[Candidate, float] = {}
        compile_s: Array | None = None
        slowdown: Array | None = None
        if measurer is not None:
            # One reading of each: a compilation may end between two.
            cost, ready, compiling = measurer.spent(), measurer.ready(), measurer.compiling()
            if measurer.quiet:  # else a plan could make no use of it
                seconds = {
                    m.candidate: m.compile_s for m in self._results.tried.values() if m.compile_s is not None
                }
                programs = self._programs.count()
                compile_s, late = self._compile_times.expected(seconds, compiling, ready, programs)
                labels, ages = self._results.labels.values(), self._compile_times.longest
                slowdown = np.maximum(late, spill_slowdowns(self._candidates, labels, ages))
        return TuningState(
            forecasts,
            self._results.outcomes(),
            new=len(self._results.tried),
            round=self.plans,
            workers=measurer.workers if measurer is not None else self.settings.worker_count(),
            tolerance=self.settings.tolerance,
            risk=self.settings.risk,
            budget=self.settings.budget,
            spent=cost,
            audit=self.settings.audit,
            audited=self._audited,
            seed=self.settings.seed,
            ready=ready,
            compiling=compiling,
            compile_s=compile_s,
            slowdown=slowdown,
            programs=None if isinstance(self.policy, Exhaustive) else self._programs.numbers(),
            problem=self._problem.id,
        )

    def _forecast(self) -> Forecasts:
        """Forecasts from all measurements; the last plan's while there is no new one."""
        count = len(self._results.rows)
        if self._forecasts is None or count != self._forecast_from:
            self._forecasts, self._forecast_from = self._forecast_anew(), count
        return self._forecasts

    def _forecast_anew(self) -> Forecasts:
        begin = time.perf_counter()
        try:
            if not self.plans:
                self._trace_first()
            forecasts = self._forecast_all()
            if self._forecaster.traces.trace_best(forecasts.order()):
                forecasts = self._forecast_all()
            return forecasts
        except Exception as error:
            if is_of_caller(error):
                raise
            # Correct first: without forecasts we measure as triton.autotune would, and say so.
            warnings.warn(
                f"surrogate {self._forecaster.name} failed ({error!r}): measuring everything", stacklevel=2
            )
            self.policy = Exhaustive()
            return uninformative_forecasts(self._candidates, f"no forecast: {error}")
        finally:
            self.forecast_s += time.perf_counter() - begin

    def _trace_first(self) -> None:
        traces = self._forecaster.traces
        if self.settings.mode is not Mode.EXHAUSTIVE:
            traces.trace_initial()
            return
        # A harvest is replayed and refitted later, without the kernel: it takes its IR along.
        traces.trace_initial(everything=True)
        self._results.problem = replace(self._problem, ttir=traces.texts)

    def _forecast_all(self) -> Forecasts:
        with single_threaded_blas():
            return self.correct(self._forecaster.forecast(self._results.rows, self._relatives))

    def _guess(self) -> Forecasts:
        """Forecasts without IR and measurements."""
        return self._forecaster.forecast((), self._relatives, provisional=True)

    def _measure_early(self, measurer: Measurer) -> None:
        """Time the candidates that compile before the first plan. Such measurements carry no forecast."""
        for candidate in self._first_compilations.compiled_early(measurer):
            for m in measurer.measure([candidate], prefetch=self._first_compilations.begun):
                self._results.add(self._with_grid(m))
            if time_exhausted(self.settings.budget, measurer.spent()):
                break
        if len(self._results.labels) == len(self._candidates):
            # Nothing is left to forecast: nobody waits for the remaining traces.
            self._forecasts = uninformative_forecasts(self._candidates, "everything is measured")
            self._forecast_from = len(self._results.rows)

    def _forecast_record(self, forecasts: Forecasts, candidate: Candidate) -> dict[str, object]:
        """Return the forecast of a candidate as its measurement keeps it."""
        row = self._candidates.row_of[candidate]
        forecast = forecasts[row]
        return {
            "surrogate": self._forecaster.label,
            "log2_ms": round(forecast.point, 4),
            "sd": round(forecast.spread, 4),
            "p_fail": round(forecast.p_fail, 4),
            **forecasts.note(row),
        }

    def _with_grid(self, m: Measurement) -> Measurement:
        return replace(m, grid=m.grid or self._forecaster.grids.get(m.candidate))

    def _retime_finalists(self, measurer: Measurer) -> None:
        """Time the fastest again side by side: single timings crown the luckiest, not the best."""
        finalists = self._results.close_to_best(self._tie_key, oracle=self.settings.mode is Mode.EXHAUSTIVE)
        previous = self._results.labels.get(self._previous) if self._previous is not None else None
        if previous is not None and previous.ok:  # it is kept wherever it ties
            finalists = [previous.candidate, *(c for c in finalists if c != previous.candidate)]
        if len(finalists) > 1 and not self._results.resume_comparison(finalists):
            with measurer_errors():
                measurements = measurer.compare(finalists)
            self._results.add_comparison([self._with_grid(m) for m in measurements])

    def _find_previous(self) -> Candidate | None:
        """The last choice for this problem or, without one, for the same sizes on another device or toolchain."""
        from forecast_autotune.surrogates.default import same_sizes

        alike = [r.problem for r in self._relatives if same_sizes(self._problem, r.problem)]
        decisions = filter(None, map(self._store.decision, (self._problem, *alike)))
        usable = (d.chosen for d in decisions if d.settings != STRUCK and d.chosen in self._candidates.row_of)
        return next(usable, None)

    def _measure_previous(self, previous: Candidate) -> None:
        """Time the choice before: whatever is faster is compared with it."""
        with measurer_errors():
            self.measurer = self.measurer or self._make_measurer()
            for m in self.measurer.measure([previous]):
                self._results.add(self._with_grid(m))

    def _keep_bits(self) -> str:
        """Choose the previous choice, or a config with its bits that is faster by more than noise; returns a remark."""
        if (previous := self._previous) is None:
            return "no choice before whose bits could be kept"
        label, fast = self._results.labels.get(previous), self._results.fastest()
        if label is None or not label.ok:
            return f"{previous}, the choice before, does not run"
        faster = [] if label in tied(fast, self.settings.tolerance) else [m for m in fast if m.ms < label.ms]
        same, why = previous, ""
        if faster:
            with measurer_errors():
                self.measurer = self.measurer or self._make_measurer()
                ask = getattr(
                    self.measurer, "with_bits_of", lambda *_: (previous, "outputs cannot be compared")
                )
                same, why = ask(previous, [m.candidate for m in faster])
        if same is None:
            return f"no bits are kept: {why}"
        self._bits_choice = next((m for m in faster if m.candidate == same), label)
        cost = f", {self._bits_choice.ms / fast[0].ms - 1:.2%} behind {fast[0].candidate}" if faster else ""
        return f"bits of the choice before, {previous}, are kept{cost}{why and f' ({why})'}"

    def _tie_key(self, candidate: Candidate) -> tuple[object, ...]:
        """Sort key of candidates that tie. No measured time and no row is in it, so that all processes sort alike.

        The kernel's own source comes first, then quicker compilations, fewer warps, less shared memory.
        """
        row = self._candidates.row_of[candidate]
        label = self._results.tried.get(candidate) or self._results.labels.get(candidate)
        shared_bytes = label.extra.get("shared") if label is not None else None
        return (
            not candidate.is_base_variant,
            self._compile_times.forecast(row),
            candidate.config.num_warps,
            shared_bytes if isinstance(shared_bytes, int) else 0,
            _name(candidate),
        )

    def _choice(self, fast: Sequence[Measurement]) -> tuple[Measurement, list[Measurement]]:
        """The choice among those that tie with the fastest, and all of these.

        In exhaustive mode the choice is the fastest, and the first of equals, as in Triton.
        """
        if self._bits_choice is not None:
            return self._bits_choice, [self._bits_choice]
        is_exhaustive = self.settings.mode is Mode.EXHAUSTIVE
        alike = list(fast[:1]) if is_exhaustive else tied(fast, self.settings.tolerance)
        return min(alike, key=lambda m: self._tie_key(m.candidate)), alike

    def _conclude(self, plan: Plan, bits: str) -> Decision:
        measurer, results, forecasts = self.measurer, self._results, self._state.forecasts
        fast = results.fastest()
        remark = ""
        if fast and (ask := getattr(measurer, "remark", None)) is not None:
            with measurer_errors():
                remark = ask(self._choice(fast)[0].candidate, self.settings.tolerance)
        usage = measurer.spent() if measurer is not None else MeasuringCost()
        wall = time.perf_counter() - self._start
        cost = Cost(max(wall, usage.wall_s), self.forecast_s, usage.compile_s, usage.timing_s, usage.compiled)
        consultation = self.llm.record(forecasts.consultation)
        cost = cost.with_llm(consultation)
        if not results.outcomes():
            reason = f"measured none of {len(self._candidates)}; {plan.reason}"
            decision = _decide_from_forecasts(
                self._problem, forecasts, self.settings, self._mark, reason, cost, {}
            )
            shipped_risk = self._risks.shipped(decision.stated_risk, untimed=True)
            return replace(decision, surrogate=self._risks.untimed, shipped_risk=shipped_risk)
        if not fast:
            return _decide_without_times(results, forecasts, self.settings, cost)
        best, alike = self._choice(fast)
        faults = results.faults()
        new, total = len(results.tried) - len(faults), len(self._candidates)
        share = f"measured {new} of {total}"
        if results.known:
            share += f", {results.known} known before"
        if equal := self._programs.count_equal(results.labels):
            share += f"; {equal} others compile to the same programs"
        if len(alike) > 1:
            share += f"; {len(alike) - 1} more as fast within noise"
        if best is not fast[0] and best.candidate.is_base_variant > fast[0].candidate.is_base_variant:
            share += f"; {fast[0].candidate.variant} is not faster than the base by more than noise"
        evidence = Evidence.MEASURED if best.candidate in results.tried else Evidence.STORED
        refused = int(((forecasts.p_fail >= REFUSED) & ~self._candidates.mask_of(results.labels)).sum())
        untimed = total - len(results.labels) - len(faults) - refused
        lags = best.ms > fast[0].ms * (1.0 + self.settings.tolerance)
        risk = 1.0 if lags else self._final_risk(plan, bool(faults))
        mark = self._mark
        if faults:
            why = str(faults[0].extra.get("message", "no message"))
            share += f"; {len(faults)} could not be tried ({why:.100})"
            if self.settings.mode is not Mode.TUNE or risk > self.settings.risk:
                mark = ""  # the next process tries those that are missing
                warnings.warn(
                    f"kernel {self._problem.kernel.name}: {len(faults)} of {total} candidates could not be tried "
                    f"({why:.300}): the choice among the others is not stored. If memory ran out, set "
                    "FORECAST_AUTOTUNE_WORKERS to fewer compilations at a time",
                    stacklevel=2,
                )
        return Decision(
            problem=self._problem.id,
            chosen=best.candidate,
            evidence=evidence,
            reason="; ".join(map(str, filter(None, (share, plan.reason, bits, remark, consultation)))),
            stated_risk=risk,
            tolerance=self.settings.tolerance,
            candidates=total,
            measured=new,
            known=results.known,
            trusted=untimed,
            refused=refused,
            median_ms=best.ms,
            saved_s=untimed * cost.compile_s / cost.compiled if cost.compiled else 0.0,
            cost=cost,
            settings=mark,
            at=utc_now(),
            rounds=tuple(self.reasons),
            surrogate=self._risks.surrogate,
            shipped_risk=self._risks.shipped(risk),
            verdicts=self._risks.verdicts(results.labels, results.tried, fast[0]),
            llm=consultation,
            advice=forecasts.advice,
            ties=tuple(m.candidate for m in alike if m is not best)[:MAX_TIES],
        )

    def _final_risk(self, plan: Plan, has_faults: bool) -> float:
        """The risk as the last forecasts have it, also for policies that do not look at it.

        What a broken harness kept from being tried may be the best: a plan, which does not ask for it again, forgets
        it.
        """
        if isinstance(self.policy, RiskBounded) and not has_faults:
            return plan.risk
        state = replace(self._state, measured=self._results.labels)
        rows = state.pending()
        with single_threaded_blas():
            return stated_risk(state, rows, state.forecasts.samples(rows, 512, state.seed))


class LLMEffect:
    """The effect of a language model on one decision: its first plan compared with the plan without the model."""

    def __init__(self) -> None:
        self._part: LLMConsultation | None = None
        self._round: int | None = None
        self._moves = (0, 0)

    def note(
        self, state: TuningState, plan: Plan, policy: Policy, correct: Callable[[Forecasts], Forecasts]
    ) -> None:
        """Take in a plan; `correct` is the correction that its forecasts had."""
        self._part = state.forecasts.consultation or self._part
        alone = state.forecasts.without_llm
        if alone is None or len(alone) != len(state.forecasts) or self._round not in (None, state.round):
            return
        self._round = state.round
        try:
            plan_alone = policy.plan(replace(state, forecasts=correct(alone)))
        except Exception:
            return  # the plan of the decision exists; a failure of the comparison must not cost it
        ours, theirs = _deferred(plan), _deferred(plan_alone)
        self._moves = (len(ours - theirs), len(theirs - ours))

    def record(self, last: LLMConsultation | None) -> LLMConsultation | None:
        """The model's part, with the numbers of candidates it moved; `last` is the last forecasts' consultation."""
        part = last or self._part
        return part and replace(part, moved_in=self._moves[0], moved_out=self._moves[1])


def _deferred(plan: Plan) -> set[Candidate]:
    """Return the candidates that a plan measures on their merits."""
    return set(plan.measure) - set(plan.audit)


def _stored_consultation(settings: Settings) -> LLMConsultation | None:
    """The model's part in a stored decision; None where the settings name no model."""
    if not settings.llm:
        return None
    from forecast_autotune.llm.spec import (
        shown_model,  # a known problem's first call loads nothing else of it
    )

    return LLMConsultation(shown_model(settings.llm), asked=False, why="it was decided before")


# --- forecasts of a task ---


class TaskForecaster:
    """Forecasts the candidates of one task; alone reads its grids, IR, sources and advice."""

    def __init__(self, task: TuningTask, surrogate: Surrogate, advisor: GuardedStore | None = None) -> None:
        """`advisor`: a store whose advice on the kernel, else what is installed, is followed if the task has none."""
        self.problem = task.problem
        self.candidates = CandidateList.of(task.candidates)
        self.grids = task.grids
        """Launch grids that depend on the candidate."""
        self.traces = LazyTraces(self.candidates, task.trace, LaunchFacts(task.problem, task.grids))
        """The IR that queries hold; the caller of `forecast` decides how much is traced before."""
        self._surrogate, self._sources, self._advice = surrogate, task.sources, task.advice
        if advisor is not None and self._advice is None and len(self.candidates) > 1:
            from forecast_autotune.store.installed_advice import advice_for

            parameters = {name for name, _ in self.candidates[0].config.kwargs}
            self._advice = advice_for(advisor, self.problem.kernel, parameters, task.normal_form)

    def prepare(self) -> None:
        """Start tracing in the background, and load the surrogate's files."""
        # A failure here repeats in the first forecast, which handles it.
        with contextlib.suppress(Exception):
            self.traces.start_initial()
            if isinstance(self._surrogate, FileBackedSurrogate):
                self._surrogate.load()

    @property
    def name(self) -> str:
        """The surrogate's name."""
        return self._surrogate.name

    @property
    def label(self) -> str:
        """The surrogate's `name/version`."""
        return f"{self._surrogate.name}/{self._surrogate.version}"

    def forecast(
        self,
        measured: Sequence[Measurement],
        relatives: Sequence[Relative],
        *,
        provisional: bool = False,
        once: bool = False,
    ) -> Forecasts:
        """Forecasts of all candidates; `provisional` and `once` as in `Query`.

        Raises whatever the surrogate raises, and `RecordError` for an answer that no decision can be built on.
        """
        candidates = self.candidates
        query = Query(
            self.problem,
            candidates,
            self.grids,
            measured,
            relatives,
            self.traces.texts,
            self._sources,
            self._advice,
            provisional,
            once,
        )
        with span("forecast", surrogate=self.label, candidates=len(candidates), measured=len(measured)):
            forecasts = validate_forecasts(self._surrogate.forecast(query), candidates)
            forecasts = replace(forecasts, proven=None if measured else self._proven(relatives))
            return expect_failing_sources(forecasts, measured)

    def _proven(self, relatives: Sequence[Relative]) -> int | None:
        """Row of the fastest at the nearest relative of this device, toolchain and launch options where two ran."""
        for relative in relatives:
            fast = [m for m in relative.labels.values() if m.ok]
            if len(fast) > 1 and _circumstances(relative.problem) == _circumstances(self.problem):
                return self.candidates.row_of.get(min(fast, key=lambda m: m.ms).candidate)
        return None


def _circumstances(problem: Problem) -> tuple[object, ...]:
    return problem.device.slug, problem.toolchain, problem.extra.get(OPTIONS)


def expect_failing_sources(forecasts: Forecasts, measured: Sequence[Measurement]) -> Forecasts:
    """The forecasts, with P(failure) of a variant's untried configs no lower than its share of failures so far.

    The kernel's own configs stay as they are: where all of them fail, there is nothing else to try.
    """
    labels = [m for m in measured if not m.candidate.is_base_variant and m.outcome.is_label]
    failures = Counter(m.candidate.variant for m in labels if m.outcome in _SOURCE_FAILURES)
    if not failures:
        return forecasts
    passes = Counter(m.candidate.variant for m in labels if m.ok)
    odds = {name: (n + _PRIOR_FAILURES) / (n + passes[name] + _PRIOR_TRIES) for name, n in failures.items()}
    tried = {m.candidate for m in labels}
    least = [0.0 if c in tried else odds.get(c.variant, 0.0) for c in forecasts.candidates]
    return replace(forecasts, p_fail=np.maximum(forecasts.p_fail, least))


def uninformative_forecasts(candidates: Sequence[Candidate], reason: str) -> Forecasts:
    """Forecasts that say nothing: every candidate alike, eightfold either way."""
    n = len(candidates)
    return Forecasts(candidates, np.zeros(n), np.full(n, 3.0), np.full(n, 0.05), None, reason)


def validate_forecasts(forecasts: Forecasts, candidates: Sequence[Candidate]) -> Forecasts:
    """The forecasts, if a decision can be built on them. Raises `RecordError` naming what is wrong.

    A plug-in that answers NaN, for other candidates or in other shapes must be found out here: every
    comparison further on would go wrong in silence. Joint samples that fail later, or are not finite,
    are replaced by independent ones, with a warning.
    """
    n = len(candidates)
    if list(forecasts.candidates) != list(candidates):
        raise RecordError(f"it must answer the {n} candidates of the query, in their order")
    mean, sd, p_fail = (np.asarray(a, float) for a in (forecasts.mean, forecasts.sd, forecasts.p_fail))
    for name, values in (("mean", mean), ("sd", sd), ("p_fail", p_fail)):
        if values.shape != (n,):
            raise RecordError(f"{name} must have shape ({n},), not {values.shape}")
        if not np.isfinite(values).all():
            raise RecordError(
                f"{name} must be finite, but {int((~np.isfinite(values)).sum())} values are not"
            )
    if (sd < 0).any() or (p_fail < 0).any() or (p_fail > 1).any():
        raise RecordError("sd must be at least 0 and p_fail a probability")
    return replace(
        forecasts, mean=mean, sd=sd, p_fail=p_fail, sampler=_guarded_sampler(forecasts.sampler, mean, sd)
    )


_Sampler = Callable[[npt.NDArray[np.intp], int, np.random.Generator], Array]


def _guarded_sampler(sampler: _Sampler | None, mean: Array, sd: Array) -> _Sampler | None:
    if sampler is None:
        return None

    def draw(rows: npt.NDArray[np.intp], count: int, generator: np.random.Generator) -> Array:
        try:
            samples = np.asarray(sampler(rows, count, generator), float)
            if samples.shape == (count, len(rows)) and np.isfinite(samples).all():
                return samples
            fault = f"shape {samples.shape}, {int((~np.isfinite(samples)).sum())} values not finite"
        except Exception as error:
            fault = repr(error)
        warnings.warn(f"joint samples failed ({fault}): drawing independently", stacklevel=2)
        return np.asarray(mean[rows] + sd[rows] * generator.standard_normal((count, len(rows))))

    return draw


# --- decisions without a clock, and without us ---


def _decide_from_store(
    forecaster: TaskForecaster,
    store: GuardedStore,
    settings: Settings,
    mark: str,
    task: TuningTask,
) -> Decision:
    """Skip and frozen mode: the best stored time, else the best forecast.

    Frozen mode forecasts nothing where a decision of the same tuner's key at other sizes is stored: a tuner launches
    one config at all sizes of its key, and compiles no other.

    Raises `FrozenMissError` in frozen mode with `on_miss="error"` when the store holds no time.
    """
    problem, labels = forecaster.problem, task.known_labels(store)
    has_time = any(m.ok for m in labels.values())
    if not has_time and store.keeps("add_miss"):
        count, grids = len(forecaster.candidates), forecaster.grids
        store.add_miss(Miss.of(problem, settings.mode, count, grids, utc_now()))
    if settings.mode is Mode.FROZEN and not has_time and settings.on_miss == "error":
        if store.is_doubtful(problem):
            raise StoreError("frozen mode: it cannot be told whether the store holds this problem")
        raise FrozenMissError(
            f"frozen mode: the store holds nothing for kernel {problem.kernel.name} with key "
            f"{problem.key} on {problem.device.name}. Tune once with "
            "FORECAST_AUTOTUNE_MODE=tune, or set FORECAST_AUTOTUNE_ON_MISS=forecast"
        )
    relatives = store.relatives(problem)
    reason = task.why_untimed or f"{settings.mode} mode: not timed"
    for kin in (r.problem for r in relatives) if settings.mode is Mode.FROZEN and not has_time else ():
        same = kin.key == problem.key and kin.kernel.source_sha256 == problem.kernel.source_sha256
        if same and kin.device.slug == problem.device.slug:
            answer = reusable_decision(store.decision(kin), task, settings, mark)
            if answer is not None:
                reason = f"{reason}; decided for its key at other sizes, where the risk was {answer.stated_risk:.2g}"
                answer = replace(answer, problem=problem.id, reason=reason, stated_risk=1.0, median_ms=None)
                return replace(answer, saved_s=0.0, cost=Cost(), verdicts=())
    return _decide_unmeasured(forecaster, labels, relatives, settings, mark, reason)


def _decide_unmeasured(
    forecaster: TaskForecaster,
    labels: Mapping[Candidate, Measurement],
    relatives: Sequence[Relative],
    settings: Settings,
    mark: str,
    reason: str,
) -> Decision:
    """The best of `labels` or, without any that ran, the best forecast. Never raises for a bad surrogate."""
    begin = time.perf_counter()
    try:
        forecaster.traces.trace_initial()
        forecasts = forecaster.forecast(list(labels.values()), relatives, once=True)
    except Exception as error:
        if is_of_caller(error):
            raise
        warnings.warn(f"surrogate {forecaster.name} failed ({error!r}): using the first config", stacklevel=2)
        forecasts = uninformative_forecasts(forecaster.candidates, f"no forecast: {error}")
    wall_s = time.perf_counter() - begin
    cost = Cost(wall_s=wall_s, forecast_s=wall_s).with_llm(forecasts.consultation)
    reason = "; ".join(map(str, filter(None, (reason, forecasts.consultation))))
    return _decide_from_forecasts(forecaster.problem, forecasts, settings, mark, reason, cost, labels)


def _decide_without_times(
    results: TaskResults, forecasts: Forecasts, settings: Settings, cost: Cost
) -> Decision:
    """Launch the best forecast after a decision in which nothing ran because the harness is broken.

    Raises `NoWorkingConfigError` where it was the candidates that failed.
    """
    if not (faults := results.faults()):
        raise _no_working_config(results.problem, results.labels, len(forecasts))
    why = f"not timed: {faults[0].extra.get('message', 'no message')}"
    warnings.warn(f"nothing could be timed ({why}): using the best forecast", stacklevel=2)
    return _decide_from_forecasts(results.problem, forecasts, settings, "", why, cost, results.labels)


def _decide_from_forecasts(
    problem: Problem,
    forecasts: Forecasts,
    settings: Settings,
    mark: str,
    reason: str,
    cost: Cost,
    labels: Mapping[Candidate, Measurement],
) -> Decision:
    """A decision on what is measured already, else on the forecasts; `mark` is its settings digest."""
    candidates = forecasts.candidates
    state = TuningState(forecasts, labels, tolerance=settings.tolerance, seed=settings.seed)
    fast = sorted((m for m in labels.values() if m.ok), key=lambda m: m.ms)
    ranking = [candidates[int(i)] for i in forecasts.order()]
    # A measured candidate outside `fast` has failed: it is launched only if there is nothing else to launch.
    chosen = fast[0].candidate if fast else next((c for c in ranking if c not in labels), ranking[0])
    if fast:
        rows = state.pending()
        risk = stated_risk(state, rows, forecasts.samples(rows, 512, settings.seed))
    else:
        row = list(candidates).index(chosen)
        risk = forecasts.untimed_risk(row, settings.tolerance, settings.seed)
    return Decision(
        problem=problem.id,
        chosen=chosen,
        evidence=Evidence.STORED if fast else Evidence.FORECAST,
        reason=reason,
        stated_risk=risk if math.isfinite(risk) else 1.0,
        tolerance=settings.tolerance,
        candidates=len(candidates),
        measured=0,
        known=len(labels),
        trusted=len(candidates) - len(labels),
        median_ms=fast[0].ms if fast else None,
        cost=cost,
        settings=mark,
        at=utc_now(),
        llm=forecasts.consultation,
        advice=forecasts.advice,
    )


def _decide_plainly(
    task: TuningTask, make: Callable[[], Measurer], store: TuningStore, settings: Settings, error: Exception
) -> Decision:
    """Measure every candidate without a label, and choose the fastest; without a clock, the first. Warns.

    No forecast and no policy has a part in this decision, and it is not stored: the next process tries again.
    Raises `NoWorkingConfigError` where all candidates fail, and the measurer's errors.
    """
    may_time = settings.mode in TIMING_MODES
    how = "measuring everything" if may_time else "using the first config"
    warnings.warn(f"the tuner failed ({error!r:.300}): {how}", stacklevel=3)
    candidates, labels = list(task.candidates), task.known_labels(store)
    new: dict[Candidate, Measurement] = {}
    usage = MeasuringCost()
    if may_time and (missing := [c for c in candidates if c not in labels]):
        measurer = make()
        try:
            for m in measurer.measure(missing):
                store.add(task.problem, m)
                new[m.candidate] = m
                if m.ok and time_exhausted(settings.budget, measurer.spent()):
                    break
            usage = measurer.spent()
        finally:
            measurer.close()
    successes = [m for m in (labels | new).values() if m.ok]
    if may_time and not successes and all(m.outcome is not Outcome.INFRASTRUCTURE for m in new.values()):
        raise _no_working_config(task.problem, labels | new, len(candidates))
    failed = {c for c, m in labels.items() if not m.ok}
    chosen, evidence = next((c for c in candidates if c not in failed), candidates[0]), Evidence.FORECAST
    best = min(successes, key=lambda m: m.ms, default=None)
    if best is not None:
        chosen, evidence = best.candidate, Evidence.MEASURED if best.candidate in new else Evidence.STORED
    return Decision(
        problem=task.problem.id,
        chosen=chosen,
        evidence=evidence,
        reason=f"{how}: the tuner failed ({error!r:.300})",
        stated_risk=0.0 if len(labels | new) == len(candidates) and successes else 1.0,
        tolerance=settings.tolerance,
        candidates=len(candidates),
        measured=len(new),
        known=len(labels),
        trusted=len(candidates) - len(labels | new),
        median_ms=None if best is None else best.ms,
        cost=Cost(usage.wall_s, 0.0, usage.compile_s, usage.timing_s, usage.compiled),
        at=utc_now(),
    )


def _no_working_config(
    problem: Problem, labels: Mapping[Candidate, Measurement], candidates: int
) -> NoWorkingConfigError:
    """Return the error that names every outcome, with the compilers' and launchers' own words."""
    counts = Counter(str(m.outcome) for m in labels.values())
    summary = ", ".join(f"{n} {name}" for name, n in sorted(counts.items()))
    messages = Counter(str(m.extra.get("message", "")) for m in labels.values())
    del messages[""]
    # Whole messages: the reason is often at the end of a compiler's output.
    excerpts = "\n".join(text for text, _ in messages.most_common(_MAX_SHOWN_MESSAGES))
    if str(Outcome.OUT_OF_RESOURCES) in counts:
        remedy = f"Give at least one config that fits {problem.device.name}"
    else:
        remedy = f"Mend what the {'compiler' if str(Outcome.COMPILE_ERROR) in counts else 'launch'} says"
    return NoWorkingConfigError(
        f"kernel {problem.kernel.name}: none of {candidates} candidates ran "
        f"({summary}). {remedy}; `forecast-autotune clear` forgets these outcomes. "
        f"Seen: {excerpts or 'no message'}"
    )
