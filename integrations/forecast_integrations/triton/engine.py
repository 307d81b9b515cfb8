"""What happens on a key miss: the bridge from one Triton call to `tuning.loop.tune`."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from forecast_autotune.errors import CaptureError, FrozenMissError, is_told_to_caller
from forecast_autotune.features.traced_texts import TracedTexts
from forecast_autotune.policy import Policy
from forecast_autotune.ranks.tuning import tune_together
from forecast_autotune.records import Candidate, Decision, Kernel, Problem
from forecast_autotune.settings import Budget, Mode, Settings
from forecast_autotune.store import Store
from forecast_autotune.surrogates.factory import surrogate_for
from forecast_autotune.surrogates.protocol import Surrogate
from forecast_autotune.tuning.loop import GuardedStore, TuningTask, fingerprint
from forecast_integrations.device import has_device
from forecast_integrations.triton.background.arguments import UncopyableArgumentsError, stand_in_call
from forecast_integrations.triton.background.key_decision import KeyDecision, MadeDecision
from forecast_integrations.triton.background.tuner import BACKGROUND, PendingKey
from forecast_integrations.triton.device_access import (
    LOCK,
    can_time,
    capturing_graph,
    decision_depth,
    enter_decision,
    has_own_benchmark,
    is_interpreted,
    leave_decision,
    note_capture_miss,
    settings_in_capture,
    untimed_settings,
)
from forecast_integrations.triton.fallback import triton_config
from forecast_integrations.triton.problem import describe
from forecast_integrations.triton.problem.call import KernelCall, check_conflicts
from forecast_integrations.triton.problem.describe import (
    LazyCandidates,
    LazyGrids,
    LazySources,
    candidate_grids,
)
from forecast_integrations.triton.problem.key import Bucket
from forecast_integrations.triton.protocols import Arguments, Key, LaunchConfig, Tuner
from forecast_integrations.triton.publication import offer_advice, print_timed_candidate, publish_decision
from forecast_integrations.triton.range_tuning import range_of
from forecast_integrations.triton.rank_sharing import current_job, share_of_cores
from forecast_integrations.triton.timer.measurer import TritonMeasurer
from forecast_integrations.triton.trace import make_tracer
from forecast_integrations.triton.variants.loading import AlternativeKernel, add_variants, launch_config
from forecast_integrations.triton.variants.sources import VariantsArgument, VariantSources


@dataclass
class DecoratorOptions:
    """What the keyword-only arguments of the decorator set; None leaves it to the environment."""

    tolerance: float | None = None
    risk: float | None = None
    budget: Budget | None = None
    surrogate: Surrogate | None = None
    store: Store | Path | str | bool | None = None
    policy: Policy | None = None
    mode: Mode | str | None = None
    bucket: Bucket | None = None
    variants: VariantsArgument = None

    def settings(self) -> Settings:
        """The environment's settings with these on top. Raises `SettingsError` for bad values."""
        settings = Settings.from_environment()
        budget = self.budget or settings.budget
        return settings.with_(
            tolerance=self.tolerance,
            risk=self.risk,
            mode=self.mode,
            bucket=self.bucket if isinstance(self.bucket, str) else None,
            max_measurements=budget.measurements,
            max_seconds=budget.seconds,
            max_gpu_seconds=budget.gpu_seconds,
        )

    def open_store(self, settings: Settings) -> Store:
        """The store to use: given, at a path, in memory (False), or the user's own."""
        if isinstance(self.store, Store):
            return self.store
        if self.store is False:
            self.store = Store(None)
            return self.store
        if isinstance(self.store, str | Path):
            return Store.default(Path(self.store).expanduser())
        return Store.default(settings.cache_dir)


def default_surrogate() -> Surrogate:
    """The surrogate that ships with this release, or what the environment asks for in its place."""
    return surrogate_for(Settings.from_environment())


@dataclass
class TuningEngine:
    """Per-tuner state: the kernel's record, its candidates, its options.

    Raises `SettingsError` for `variants` that it cannot read.
    """

    options: DecoratorOptions
    last: Decision | None = None
    """The latest decision, for `explain` and for users."""
    _kernel: Kernel | None = None
    _listed: tuple[object, dict[Candidate, LaunchConfig], str] | None = None
    _running: threading.local = field(default_factory=threading.local)
    pending: dict[Key, PendingKey] = field(default_factory=dict)
    """Keys that are decided in the background."""
    _captured: dict[Key, LaunchConfig] = field(default_factory=dict)
    """Keys that were met undecided inside a capture, and what they are launched with there."""
    _compiled: dict[str, set[Candidate]] = field(default_factory=dict)
    """Candidates compiled in this process, by the kind of arguments (`describe.call_kind`) and device."""
    _traced: dict[str, TracedTexts] = field(default_factory=dict)
    """TTIR texts by the kind of arguments, then by assignment."""

    def __post_init__(self) -> None:
        settings = self.options.settings()
        self._sources = VariantSources.of(self.options.variants, settings.variants)
        if settings.remote and self.options.store is not False:
            self.options.open_store(settings).layers.connect()
        self.has_variants = self._sources is not None
        """Whether a key may be served by another source than the tuner's own."""

    def __deepcopy__(self, memo: dict[int, object]) -> TuningEngine:
        """One for a copy of the tuner, with the same options: nothing is under way there."""
        made = TuningEngine(self.options)
        made.last = self.last
        return made

    def has_own_bucket(self) -> bool:
        """Whether a function of the user's has a part in keys, whose errors are the user's to see."""
        return callable(self.options.bucket)

    def is_deciding(self) -> bool:
        """Whether this thread is inside a decision of this very tuner (a hook called it again)."""
        return bool(getattr(self._running, "on", False))

    def resolve(
        self, tuner: Tuner, key: Key, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> LaunchConfig:
        """The config for this key; also fills the tuner's public attributes."""
        if (pending := self.pending.get(key)) is not None:
            is_launched = not kwargs.get("warmup")
            return BACKGROUND.config_for(pending, args, kwargs) if is_launched else pending.served_config
        if key in self._captured and capturing_graph():
            return self._captured[key]
        with LOCK:
            if key in tuner.cache:  # another thread was faster
                return tuner.cache[key]
            if (pending := self.pending.get(key)) is not None:
                return pending.served_config
            self._running.on = True
            enter_decision()
            tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
            pruned: list[LaunchConfig] = []
            try:
                pruned += describe.pruned_configs(tuner, kwargs)  # calls the user's functions, once
                return self._resolve(tuner, key, args, kwargs, pruned)
            except Exception as error:
                decided = key in tuner.cache or key in self.pending or key in self._captured
                if not pruned or is_told_to_caller(error) or decided:  # a function of the user's raised
                    raise
                waits = self.options.settings().mode is not Mode.BACKGROUND
                timed = waits and can_time(tuner) and not capturing_graph()
                return triton_config(tuner, key, args, kwargs, error, pruned if timed else pruned[:1])
            finally:
                tuner.nargs = None
                self._running.on = False
                leave_decision()

    def _resolve(
        self, tuner: Tuner, key: Key, args: Arguments, kwargs: dict[str, object], pruned: list[LaunchConfig]
    ) -> LaunchConfig:
        if len(pruned) == 1 and not self.has_variants:
            # Nothing to decide, as Triton 3.8 and later have it.
            tuner.cache[key] = pruned[0]
            return pruned[0]
        check_conflicts(pruned, kwargs)
        settings = self.options.settings()
        store = self.options.open_store(settings)
        guarded = GuardedStore(store)
        call = KernelCall(tuner, tuple(args), kwargs)
        problem = self._problem(call, key)
        functions = self._functions(call, problem, None if settings.mode is Mode.DETERMINISTIC else store)
        if len(pruned) == 1 and not functions:
            tuner.cache[key] = pruned[0]
            return pruned[0]
        configs, mark = self._candidates(pruned, functions)
        call = replace(call, configs=configs, functions=functions)
        if kwargs.get("warmup"):  # it compiles and launches nothing: there is nothing to time, or to decide
            stored = guarded.decision(problem)
            known = stored is not None and stored.chosen in configs
            chosen = stored.chosen if stored is not None and known else next(iter(configs))
            return launch_config(call, chosen, lambda: guarded.measurements(problem))
        settings = untimed_settings(settings, tuner)
        mode, settings = settings.mode, settings_in_capture(settings)
        # A user's own benchmark function may need every rank to call it.
        job = None if has_own_benchmark(tuner) else current_job(settings)
        if job is not None:
            settings = share_of_cores(settings)
        ranged = range_of(self.options.bucket, call, problem.kernel, key, has_own_benchmark(tuner))
        traced = (call, problem) if ranged is None else (ranged.traced.call, ranged.traced.problem)
        task, kind, grids = self._task(*traced, mark, settings)
        nested = decision_depth() > 1
        if nested:
            # Inside another decision of this process: never wait for another process here.
            settings = settings.with_(lock_timeout_s=0.0)
        begin = time.perf_counter()
        measurers: list[TritonMeasurer] = []
        kinds: list[str] = []

        def measurer(
            at: KernelCall = call, of: Problem = problem, kind: str = kind, compiles: bool = True
        ) -> TritonMeasurer:
            kinds.append(kind)
            measurers.append(_measurer(at, of, settings, guarded, self._compiled.get(kind, ()), compiles))
            return measurers[-1]

        surrogate = self.options.surrogate or default_surrogate()
        policy = self.options.policy
        try:
            if ranged is not None:
                decision = ranged.tune(
                    task, measurer, store=guarded, surrogate=surrogate, settings=settings, policy=policy
                )
            else:
                decision = tune_together(
                    task,
                    measurer,
                    store=store,
                    surrogate=surrogate,
                    settings=settings,
                    policy=policy,
                    job=job,
                    patient=not nested,
                )
        except FrozenMissError as miss:
            if capturing_graph():
                raise CaptureError(
                    f"kernel {problem.kernel.name} met a new key {key} inside a CUDA-graph capture, where "
                    "nothing can be timed. Call it once with these arguments, or give them to prepare(), before "
                    "capturing; or capture inside allow_capture_misses() to take the best forecast"
                ) from miss
            raise
        finally:
            grids.close()
        for made, kind in zip(measurers, kinds, strict=True):
            again = {c for c in made.built if not call.depends_on_call(c)}
            self._compiled.setdefault(kind, set()).update(again)
        self.last = decision
        config = launch_config(call, decision.chosen, lambda: guarded.measurements(problem))
        pending = settings.mode is Mode.BACKGROUND and ranged is None
        filed = problem if ranged is None else ranged.problem
        if settings.mode is not mode and not _is_final(decision, guarded.decision(filed)):
            self._captured[key] = config  # in graphs alone: outside of a capture the key is tuned
            note_capture_miss(problem, decision)
        elif not pending or _is_final(decision, guarded.decision(problem)):
            tuner.cache[key] = config
        else:
            self._decide_later(key, call, problem, mark, kind, settings, (store, guarded), decision, config)
        seconds = time.perf_counter() - begin
        raw = measurers[0].raw if measurers else None
        if ranged is not None:
            problem, guarded = ranged.problem, GuardedStore(ranged.view(guarded))
        publish_decision(call, key, config, guarded, problem, decision, raw, seconds, say=settings.summary)
        if raw is not None:
            offer_advice(settings, store, problem.kernel, tuner.fn)
        return config

    def _decide_later(
        self,
        key: Key,
        call: KernelCall,
        problem: Problem,
        mark: str,
        kind: str,
        settings: Settings,
        stores: tuple[Store, GuardedStore],
        served: Decision,
        config: LaunchConfig,
    ) -> None:
        """Launch with `config` from now on, and have the key decided beside the program's own work."""
        tuner, (store, guarded) = call.tuner, stores
        try:
            bare = stand_in_call(call, config)
        except UncopyableArgumentsError as error:
            tuner.cache[key] = config
            warnings.warn(
                f"kernel {problem.kernel.name} with key {key} is not timed in the background: {error}. It keeps its "
                "first config; FORECAST_AUTOTUNE_MODE=tune times it",
                stacklevel=2,
            )
            return
        known = TracedTexts(problem.arguments)
        known.merge(self._traced.get(kind, known))

        def hear(made: MadeDecision) -> None:
            again = {c for c in made.built if not bare.depends_on_call(c)}
            self._compiled[kind] = self._compiled.get(kind, set()) | again
            self.last = made.decision

        decision = KeyDecision(
            tuner,
            key,
            problem,
            bare,
            self._task(bare, problem, mark, settings, known)[0],
            served.chosen,
            store,
            guarded,
            settings,
            self.options.surrogate or default_surrogate(),
            self.options.policy,
            tuple(self._compiled.get(kind, ())),
            hear,
        )
        self.pending[key] = PendingKey(decision, config, self.pending)
        BACKGROUND.add(self.pending[key], call.args, call.kwargs)

    def _functions(
        self, call: KernelCall, problem: Problem, store: Store | None
    ) -> Mapping[str, AlternativeKernel]:
        """The other sources that may serve this call, by name; those in a `store` only where one may decide."""
        if self._sources is None:
            return {}
        return self._sources.functions(problem, call.tuner, call.arguments(), store)

    def _candidates(
        self, pruned: list[LaunchConfig], functions: Mapping[str, AlternativeKernel]
    ) -> tuple[dict[Candidate, LaunchConfig], str]:
        # Configs are mutable: what they said when they were listed is compared, not their identity.
        said = [(c, c.all_kwargs(), c.pre_hook) for c in pruned], list(functions.values())
        if self._listed is None or self._listed[0] != said:
            found = describe.configs_by_candidate(pruned)
            if functions:
                found = add_variants(found, functions)
            self._listed = (said, found, fingerprint(list(found)))
        return self._listed[1], self._listed[2]

    def _problem(self, call: KernelCall, key: Key) -> Problem:
        self._kernel = self._kernel or describe.kernel_record(call.tuner.fn)
        own = has_own_benchmark(call.tuner)
        return describe.describe(call.tuner.fn, self._kernel, call.arguments(), key, call.grid, own)

    def _task(
        self,
        call: KernelCall,
        problem: Problem,
        mark: str,
        settings: Settings,
        known: TracedTexts | None = None,
    ) -> tuple[TuningTask, str, LazyGrids]:
        """The task, the kind of its arguments, and the grids, which hold on to the call until they are closed."""
        tuner, named, grid = call.tuner, call.arguments(), call.grid
        kind = describe.call_kind(problem, tuner.fn)
        if known is None:
            known = self._traced.setdefault(kind, TracedTexts())
        grids = LazyGrids(lambda: candidate_grids(call, grid, named))
        workers = 1 if settings.compiler == "threads" else settings.worker_count()  # one means no children
        trace = None if is_interpreted() else make_tracer(call, known, workers, problem, grids)
        task = TuningTask(problem, LazyCandidates(call.configs), grids, trace, mark)
        task.hears_failures = call.hears_failures()
        task.sources = LazySources(problem.kernel.source, call.functions)
        if settings.advice != "off":
            told = {name: kernel.judgement for name, kernel in call.functions.items()}
            task.judgements = {name: judged for name, judged in told.items() if judged is not None}
        return task, kind, grids


def _is_final(served: Decision, kept: Decision | None) -> bool:
    """Whether what is served was decided before, for the same candidates under the same settings."""
    return kept is not None and kept.settings == served.settings and kept.chosen == served.chosen


def _measurer(
    call: KernelCall,
    problem: Problem,
    settings: Settings,
    guarded: GuardedStore,
    compiled: Collection[Candidate],
    compiles: bool,
) -> TritonMeasurer:
    compiles = compiles and has_device() and not is_interpreted()
    bench = has_own_benchmark(call.tuner)

    def say(candidate: Candidate) -> None:
        if not bench:  # `_bench` prints this line itself
            print_timed_candidate(call, candidate)

    def guard(candidate: Candidate) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if bench else guarded.watch(problem, candidate)

    return TritonMeasurer(
        call,
        problem.id,
        workers=settings.worker_count(),
        timeout_s=settings.timeout_s,
        guard=guard,
        say=say,
        compiler=settings.compiler if compiles else "none",
        compiled=[c for c in compiled if c in call.configs],
        patient=settings.mode is Mode.EXHAUSTIVE,
        bench=bench,
    )
