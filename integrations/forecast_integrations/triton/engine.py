"""The bridge from one Triton call, whose key is not decided, to `tuning.loop.tune`."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
import warnings
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from forecast_autotune.errors import (
    CaptureError,
    FrozenMissError,
    NoWorkingConfigError,
    SettingsError,
    code_of,
    codes_in_traceback,
    is_of_caller,
    is_told_to_caller,
)
from forecast_autotune.features.candidate_list import CandidateList
from forecast_autotune.features.trace import trace
from forecast_autotune.features.traced_texts import TracedTexts
from forecast_autotune.features.ttir.flows import tensor_flows
from forecast_autotune.features.ttir.parser import FeatureError
from forecast_autotune.policy import Policy
from forecast_autotune.printable import utc_now
from forecast_autotune.ranks.job import Job
from forecast_autotune.ranks.tuning import tune_together
from forecast_autotune.records import (
    Argument,
    Candidate,
    Decision,
    Evidence,
    Kernel,
    Measurement,
    Outcome,
    Problem,
)
from forecast_autotune.settings import Budget, Mode, Settings
from forecast_autotune.store import Store
from forecast_autotune.surrogates.factory import surrogate_for
from forecast_autotune.surrogates.protocol import Surrogate
from forecast_autotune.tuning.loop import STRUCK, TIMING_MODES, GuardedStore, TuningTask, fingerprint
from forecast_autotune.tuning.results import NEGLIGIBLE_GAIN
from forecast_autotune.variants.entry import heuristic_layers
from forecast_integrations.device import has_device
from forecast_integrations.triton.background.arguments import stand_in_call
from forecast_integrations.triton.background.key_decision import KeyDecision
from forecast_integrations.triton.background.tuner import BACKGROUND, PendingKey
from forecast_integrations.triton.device_access import (
    LOCK,
    can_time,
    capturing_graph,
    decision_depth,
    has_own_benchmark,
    inside_decision,
    is_alive,
    is_interpreted,
    note_capture_miss,
    settings_in_capture,
    untimed_settings,
    warn_early,
    why_untimed,
)
from forecast_integrations.triton.problem import describe
from forecast_integrations.triton.problem.call import (
    KernelCall,
    check_conflicts,
    forgiven_errors,
    outcome_of,
)
from forecast_integrations.triton.problem.copied_tensors import UncopyableArgumentsError
from forecast_integrations.triton.problem.describe import (
    L2,
    LazyGrids,
    candidate_grids,
    options_of,
)
from forecast_integrations.triton.problem.key import Bucket, InLine, KeyMaker
from forecast_integrations.triton.problem.source import KernelText
from forecast_integrations.triton.protocols import (
    Arguments,
    KernelFunction,
    Key,
    LaunchConfig,
    NamedArguments,
    Tuner,
)
from forecast_integrations.triton.publication import note_choice, print_timed_candidate, publish_decision
from forecast_integrations.triton.rank_sharing import current_job, share_of_cores
from forecast_integrations.triton.timer.measurer import TritonMeasurer
from forecast_integrations.triton.trace import ChildTracer
from forecast_integrations.triton.upstream import is_of_triton
from forecast_integrations.triton.variants.calls import CallForm
from forecast_integrations.triton.variants.loading import (
    AlternativeKernel,
    VariantConfig,
    add_variants,
    launch_config,
    launch_variant,
)
from forecast_integrations.triton.variants.sources import VariantsArgument, VariantSources


@dataclass
class DecoratorOptions:
    """Values of the decorator's keyword-only arguments; None leaves a value to the environment."""

    tolerance: float | None = None
    risk: float | None = None
    budget: Budget | None = None
    surrogate: Surrogate | None = None
    store: Store | Path | str | bool | None = None
    policy: Policy | None = None
    mode: Mode | str | None = None
    bucket: Bucket | None = None
    variants: VariantsArgument = None
    l2: str | None = None
    prefer: str | None = None

    def __post_init__(self) -> None:
        rules = (
            ("budget", isinstance(self.budget, Budget), "a Budget, as Budget(measurements=20)"),
            ("surrogate", hasattr(self.surrogate, "forecast"), "a Surrogate"),
            ("policy", hasattr(self.policy, "plan"), "a Policy, as policy.WallTime()"),
            ("store", isinstance(self.store, Store | Path | str | bool), "a Store, its directory, or False"),
            ("bucket", isinstance(self.bucket, str) or callable(self.bucket), "exact, pow2, or a function"),
        )
        for name, holds, form in rules:
            if not holds and (value := getattr(self, name)) is not None:
                raise SettingsError(f"{name}= takes {form}, not {value!r:.80}")

    def settings(self) -> Settings:
        """The environment's settings with these on top. Raises `SettingsError` for bad values."""
        settings = Settings.from_environment()
        budget = self.budget or settings.budget
        return settings.with_(
            tolerance=self.tolerance,
            risk=self.risk,
            mode=self.mode,
            bucket=self.bucket if isinstance(self.bucket, str) else None,
            l2=self.l2,
            prefer=self.prefer,
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
class _KeyMiss:
    """A call whose key is not decided."""

    key: Key
    call: KernelCall
    problem: Problem
    digest: str
    """Digest of the candidates."""
    settings: Settings
    store: Store
    guarded_store: GuardedStore
    in_capture: bool
    """Whether it would be timed, were no graph being recorded."""
    begin: float = field(default_factory=time.perf_counter)
    measurer: tuple[TritonMeasurer, str] | None = None
    """The measurer that has timed candidates, with the kind of the call's arguments."""


_UntimedChoice = tuple[LaunchConfig, Candidate, Callable[[KernelCall], Problem]]
"""A config that a key was served without a clock, its candidate, and the problem of a call with that key."""


@dataclass
class TuningEngine:
    """Per-tuner state: the kernel's record, its candidates, its options.

    Raises `SettingsError` for `variants` that it cannot read.
    """

    options: DecoratorOptions
    last: Decision | None = None
    """The latest decision, for `explain` and for users."""
    _kernel: Kernel | None = None
    _text: KernelText | None = None
    _listing: tuple[object, dict[Candidate, LaunchConfig], str] | None = None
    _running: threading.local = field(default_factory=threading.local)
    pending: dict[Key, PendingKey] = field(default_factory=dict)
    """Keys that are decided in the background."""
    _capture_configs: dict[Key, LaunchConfig] = field(default_factory=dict)
    """Configs of keys that were undecided inside a CUDA graph's capture; they serve captures alone."""
    _compilations: dict[str, set[Candidate]] = field(default_factory=dict)
    """Candidates compiled in this process, by the kind of arguments (`describe.call_kind`) and device."""
    _ttir_texts: dict[str, TracedTexts] = field(default_factory=dict)
    """TTIR texts by the kind of arguments, then by assignment."""
    _choices: dict[Key, _UntimedChoice] = field(default_factory=dict)
    """Choices by key that were not timed here: stored ones and forecasts."""
    _dots: dict[Hashable, Collection[str]] = field(default_factory=dict)
    """Names of the tensors that feed a dot, by dtypes and constants of a call."""
    dots: set[str] = field(default_factory=set)
    """Names of the tensors that feed a dot in any call so far, as far as TTIR was read."""
    _launch_failures: dict[str, list[Measurement]] = field(default_factory=dict)
    """Failed launches of untimed choices, by problem."""
    _launch_errors: dict[Key, Exception] = field(default_factory=dict)
    """The last error of each key none of whose configs could be launched; Triton's own benchmark decides it next."""

    def __post_init__(self) -> None:
        settings = self.options.settings()
        self._sources = VariantSources.of(self.options.variants, settings.variants)
        if settings.remote and self.options.store is not False:
            self.options.open_store(settings).layers.connect()
        self.has_variants = self._sources is not None
        """Whether a key may be served by another source than the tuner's own."""

    def __deepcopy__(self, memo: dict[int, object]) -> TuningEngine:
        """Return an engine for a copy of the tuner, with the same options and no decision under way."""
        copy = TuningEngine(self.options)
        copy.last = self.last
        return copy

    def has_own_bucket(self) -> bool:
        """Whether a function of the user's groups key values: its errors are raised."""
        return callable(self.options.bucket)

    def text(self, fn: KernelFunction) -> KernelText:
        """The text of the tuner's kernel."""
        self._text = self._text or KernelText(fn)
        return self._text

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
        if key in self._capture_configs and capturing_graph():
            return self._capture_configs[key]
        with LOCK, inside_decision():
            if key in tuner.cache:  # another thread was faster
                return tuner.cache[key]
            if (pending := self.pending.get(key)) is not None:
                return pending.served_config
            self._running.on = True
            tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
            pruned: list[LaunchConfig] = []
            launch_error = self._launch_errors.pop(key, None)
            try:
                pruned += describe.pruned_configs(tuner, kwargs)  # calls the user's functions, once
                if launch_error is not None:
                    return _triton_config(tuner, key, args, kwargs, launch_error, pruned)
                return self._resolve(tuner, key, args, kwargs, pruned)
            except Exception as error:
                is_decided = key in tuner.cache or key in self.pending or key in self._capture_configs
                if (
                    not pruned or is_told_to_caller(error) or is_decided or launch_error
                ):  # a function of the user's raised
                    raise
                waits = self.options.settings().mode in TIMING_MODES
                may_time = waits and can_time(tuner) and not capturing_graph()
                return _triton_config(tuner, key, args, kwargs, error, pruned if may_time else pruned[:1])
            finally:
                tuner.nargs = None
                self._running.on = False

    def _resolve(
        self, tuner: Tuner, key: Key, args: Arguments, kwargs: dict[str, object], pruned: list[LaunchConfig]
    ) -> LaunchConfig:
        miss = None
        if len(pruned) > 1 or self.has_variants:
            check_conflicts(pruned, kwargs)
            call, own = KernelCall(tuner, tuple(args), kwargs), has_own_benchmark(tuner)
            miss = self._miss(call, key, pruned, own)
        if miss is None or (len(pruned) == 1 and not miss.call.functions):
            # Nothing to decide, as Triton 3.8 and later have it.
            tuner.cache[key] = pruned[0]
            return pruned[0]
        if kwargs.get("warmup"):  # it compiles and launches nothing: there is nothing to time, or to decide
            return _config_to_compile(miss)
        # A user's own benchmark function may need every rank to call it.
        job = None if own or miss.problem.id in self._launch_failures else current_job(miss.settings)
        if job is not None:
            miss.settings = share_of_cores(miss.settings)
        if decision_depth() > 1:
            # Inside another decision of this process: never wait for another process here.
            miss.settings = miss.settings.with_(lock_timeout_s=0.0)
        try:
            decision = self._decide_key(miss, job)
        except FrozenMissError as error:
            if capturing_graph():
                raise CaptureError(
                    f"kernel {miss.problem.kernel.name} met a new key {key} inside a CUDA-graph capture, where "
                    "nothing can be timed. Call it once with these arguments, or give them to prepare(), before "
                    "capturing; or capture inside allow_capture_misses() to take the best forecast"
                ) from error
            raise
        except NoWorkingConfigError as error:
            error.config = _failing_config(miss)
            raise
        except Exception as error:
            if not _is_of_guard(tuner, error):
                raise
            # Somebody forbids timing: what is stored of the call, as Triton would time it, is served none the less.
            own = False
            miss = self._miss(call, key, pruned, own)
            miss.settings = miss.settings.with_(mode=Mode.FROZEN, on_miss="error")
            try:
                decision = self._decide_key(miss, None)
            except FrozenMissError:
                return _config_of_triton(tuner, key, pruned, error)
        config = self._serve(miss, decision)
        self._choices.pop(key, None)
        if decision.evidence is not Evidence.MEASURED:
            self._choices[key] = config, decision.chosen, lambda c: self._problem(c, key, pruned, own)
        return config

    def strikes(
        self,
        tuner: Tuner,
        key: Key | None,
        config: LaunchConfig,
        error: Exception,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> bool:
        """Strike a config that could not be launched, if nothing was timed for its key here; returns whether it did.

        The key is then decided anew, as `triton.autotune` would have passed the config over. Errors of the user's
        functions and of a broken device strike nothing.
        """
        _add_remedy(error)
        entry, outcome = None if key is None else self._choices.get(key), outcome_of(error)
        if entry is None or key is None or outcome is None or outcome is Outcome.INFRASTRUCTURE:
            return False
        entry_config, choice, problem_of = entry
        functions = [kwargs.get("grid"), config.pre_hook]
        functions += [f for layer in heuristic_layers(tuner.fn) for f in layer.values()]
        of_user = is_of_caller(error) or not codes_in_traceback(error).isdisjoint(map(code_of, functions))
        if entry_config is not config or of_user or is_interpreted() or capturing_graph() or not is_alive():
            return False
        with LOCK:
            problem = problem_of(KernelCall(tuner, args, kwargs))
            failures = self._launch_failures.setdefault(problem.id, [])
            if any(m.candidate == choice for m in failures):  # by another thread, or there is nothing else
                pending = self.pending.get(key)
                if (tuner.cache.get(key) if pending is None else pending.served_config) is not config:
                    return True
                if self.options.settings().mode not in (*TIMING_MODES, Mode.BACKGROUND):
                    return False
                self._launch_errors[key] = error
                tuner.cache.pop(key, None)
                self.pending.pop(key, None)
                self._choices.pop(key, None)
                return True
            tuner.cache.pop(key, None)
            self.pending.pop(key, None)
            at, extra = utc_now(), {"message": f"{type(error).__name__}: {error!s:.500}"}
            failures.append(Measurement(problem.id, choice, outcome, protocol="launch", at=at, extra=extra))
            if (settings := self.options.settings()).mode is not Mode.DETERMINISTIC:
                store = GuardedStore(self.options.open_store(settings))
                store.add(problem, failures[-1])
                if (decision := store.decision(problem)) is not None and decision.chosen == choice:
                    why = f"struck: it could not be launched ({error!s:.300}); before: {decision.reason}"
                    store.put_decision(problem, replace(decision, settings=STRUCK, reason=why))
            warnings.warn(
                f"kernel {problem.kernel.name}: {choice}, which was chosen without timing it here, cannot be launched "
                f"({error!s:.200}): it is struck for this problem, which is decided anew",
                stacklevel=3,
            )
        return True

    def _miss(self, call: KernelCall, key: Key, pruned: list[LaunchConfig], own: bool) -> _KeyMiss:
        """The record of a call whose key is not decided, with every candidate and the settings that decide it."""
        settings = self.options.settings()
        store = self.options.open_store(settings)
        problem = self._problem(call, key, pruned, own)
        functions = self._functions(call, problem, None if settings.mode is Mode.DETERMINISTIC else store)
        configs, digest = self._candidates(pruned, functions)
        call = replace(call, configs=configs, functions=functions)
        plain_settings = untimed_settings(settings, call.tuner)
        settings = settings_in_capture(plain_settings)
        in_capture = settings.mode is not plain_settings.mode
        return _KeyMiss(key, call, problem, digest, settings, store, GuardedStore(store), in_capture)

    def _decide_key(self, miss: _KeyMiss, job: Job | None) -> Decision:
        """Decide one key, with the other ranks of a job if there are any."""
        task, kind, grids = self._task(miss.call, miss.problem, miss.digest, miss.settings)
        with contextlib.closing(grids):
            return tune_together(
                task,
                lambda: self._measurer(miss, kind),
                store=miss.store,
                surrogate=self._surrogate(),
                settings=miss.settings,
                policy=self.options.policy,
                job=job,
                patient=decision_depth() <= 1,
            )

    def _measurer(self, miss: _KeyMiss, kind: str) -> TritonMeasurer:
        """Return a measurer of a call's candidates; `kind` is that of its arguments."""
        call, problem, settings = miss.call, miss.problem, miss.settings
        compiles, bench = has_device() and not is_interpreted(), has_own_benchmark(call.tuner)
        measurer = TritonMeasurer(
            call,
            problem.id,
            workers=settings.worker_count(),
            timeout_s=settings.timeout_s,
            guard=lambda c: contextlib.nullcontext() if bench else miss.guarded_store.watch(problem, c),
            # `_bench` prints this line itself.
            say=lambda candidate: None if bench else print_timed_candidate(call, candidate),
            compiler=settings.compiler if compiles else "none",
            compiled=[c for c in self._compilations.get(kind, ()) if c in call.configs],
            bench=bench,
            l2="warm" if L2 in options_of(problem) else "both" if settings.l2 == "both" else "cold",
            edge=0.0 if settings.mode is Mode.EXHAUSTIVE else NEGLIGIBLE_GAIN,
        )
        miss.measurer = measurer, kind
        return measurer

    def _serve(self, miss: _KeyMiss, decision: Decision) -> LaunchConfig:
        """Return the config of a decision, set it for the calls that the decision holds for, and publish it."""
        key, call, problem, guarded_store = miss.key, miss.call, miss.problem, miss.guarded_store
        raw = None
        if miss.measurer is not None:
            measurer, kind = miss.measurer
            self._note_compiled(kind, call, measurer.built)
            raw = measurer.raw
        self.last = decision
        for text in itertools.islice(
            self._ttir_texts.get(describe.call_kind(problem, call.tuner.fn), {}).values(), 1
        ):
            with contextlib.suppress(FeatureError):
                self.dots |= tensor_flows(text, problem.arguments).dots if "tt.dot" in text else set()
        config = launch_config(call, decision.chosen, lambda: guarded_store.measurements(problem))
        pending = miss.settings.mode is Mode.BACKGROUND
        if not (pending or miss.in_capture) or _is_final(decision, guarded_store.decision(problem)):
            call.tuner.cache[key] = config
        elif miss.in_capture:
            self._capture_configs[key] = config  # in graphs alone: outside of a capture the key is tuned
            note_capture_miss(problem, decision)
        else:
            self._decide_later(miss, decision, config)
        seconds = time.perf_counter() - miss.begin
        publish_decision(
            call, key, config, guarded_store, problem, decision, raw, seconds, say=miss.settings.summary
        )
        if raw is not None:
            note_choice(miss.store, call, decision)
        return config

    def _decide_later(self, miss: _KeyMiss, decision: Decision, config: LaunchConfig) -> None:
        """Launch with `config` from now on, and have the key decided beside the program's own work."""
        key, call, problem = miss.key, miss.call, miss.problem
        try:
            stand_in = stand_in_call(call, config)
        except UncopyableArgumentsError as error:
            call.tuner.cache[key] = config
            warnings.warn(
                f"kernel {problem.kernel.name} with key {key} is not timed in the background: {error}. It keeps its "
                "first config; FORECAST_AUTOTUNE_MODE=tune times it",
                stacklevel=2,
            )
            return
        kind = describe.call_kind(problem, call.tuner.fn)
        texts = TracedTexts(problem.arguments)
        texts.merge(self._ttir_texts.get(kind, texts))

        def on_decision(later: Decision, candidates: Collection[Candidate]) -> None:
            self._note_compiled(kind, stand_in, candidates)
            self.last = later

        key_decision = KeyDecision(
            call.tuner,
            key,
            problem,
            stand_in,
            self._task(stand_in, problem, miss.digest, miss.settings, texts)[0],
            decision.chosen,
            miss.store,
            miss.guarded_store,
            miss.settings,
            self._surrogate(),
            self.options.policy,
            tuple(self._compilations.get(kind, ())),
            on_decision,
        )
        self.pending[key] = PendingKey(key_decision, config, self.pending)
        BACKGROUND.add(self.pending[key], call.args, call.kwargs)

    def _note_compiled(self, kind: str, call: KernelCall, candidates: Collection[Candidate]) -> None:
        """Remember the candidates that this process has compiled and that other calls of the kind can use."""
        reusable = {c for c in candidates if not call.depends_on_call(c)}
        self._compilations[kind] = self._compilations.get(kind, set()) | reusable

    def _surrogate(self) -> Surrogate:
        return self.options.surrogate or default_surrogate()

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
        # Configs are mutable: their values are compared, not their identity.
        values = [(c, c.all_kwargs(), c.pre_hook) for c in pruned], list(functions.values())
        if self._listing is None or self._listing[0] != values:
            configs = describe.configs_by_candidate(pruned)
            if functions:
                configs = add_variants(configs, functions)
            self._listing = (values, configs, fingerprint(list(configs)))
        return self._listing[1], self._listing[2]

    def _problem(self, call: KernelCall, key: Key, pruned: Sequence[LaunchConfig], own: bool) -> Problem:
        self._kernel = self._kernel or describe.kernel_record(call.tuner.fn, self.text(call.tuner.fn))
        dot_operands = partial(self._dot_operands, call, pruned[0])
        # Addresses are in the arguments, as far as they count.
        key = tuple(part for part in key if not isinstance(part, InLine))
        return describe.describe(
            call.tuner.fn,
            self._kernel,
            call.arguments(),
            key,
            call.grid,
            own,
            pruned,
            dot_operands,
            self.options.settings().l2 == "warm",
        )

    def _dot_operands(
        self, call: KernelCall, config: LaunchConfig, arguments: Sequence[Argument]
    ) -> Collection[str]:
        """Names of the tensors that feed a dot, by the TTIR of one config; all of them where that cannot be told."""
        kind = tuple((a.name, a.kind, a.dtype, a.value if a.kind == "constexpr" else None) for a in arguments)
        if kind not in self._dots:
            has_dot = self.text(call.tuner.fn).has_dot
            operands: Collection[str] = {a.name for a in arguments} if has_dot else ()
            with contextlib.suppress(FeatureError):
                if operands and not is_interpreted():
                    kwargs = {n: v for n, v in call.kwargs.items() if n not in ("grid", "warmup")}
                    text = trace(call.tuner.fn, call.args, kwargs, config.all_kwargs())
                    operands = tensor_flows(text, arguments).dots
            self._dots[kind] = operands
            self.dots |= set(operands)
        return self._dots[kind]

    def _task(
        self,
        call: KernelCall,
        problem: Problem,
        digest: str,
        settings: Settings,
        texts: TracedTexts | None = None,
    ) -> tuple[TuningTask, str, LazyGrids]:
        """Return the task, the kind of its arguments, and the grids, which keep the call alive until closed."""
        tuner, arguments, grid = call.tuner, call.arguments(), call.grid
        kind = describe.call_kind(problem, tuner.fn)
        if texts is None:
            texts = self._ttir_texts.setdefault(kind, TracedTexts())
        grids = LazyGrids(lambda: candidate_grids(call, grid, arguments))
        workers = 1 if settings.compiler == "threads" else settings.worker_count()  # one means no children
        if not is_interpreted():
            warn_early()
        trace = None if is_interpreted() else ChildTracer(call, texts, workers, problem, grids)
        task = TuningTask(problem, CandidateList(call.configs), grids, trace, digest)
        task.hears_failures = call.hears_failures()
        task.struck = self._launch_failures.get(problem.id, ())
        task.why_untimed = why_untimed(tuner)
        sources = {"base": problem.kernel.source, **{n: f.source for n, f in call.functions.items()}}
        task.sources = {name: source for name, source in sources.items() if source}
        task.normal_form = lambda: self.text(tuner.fn).normal_form_hash
        return task, kind, grids


def _is_final(decision: Decision, stored: Decision | None) -> bool:
    """Whether the stored decision has the same choice, and was made under the same settings."""
    return stored is not None and stored.settings == decision.settings and stored.chosen == decision.chosen


def _failing_config(miss: _KeyMiss) -> LaunchConfig | None:
    """The config whose error Triton raises where all fail: the first that it does not forgive, else the first one.

    None where it may not be launched again: it ended by a signal or a time-out, or for want of memory.
    """
    rows = {m.candidate: m for m in miss.guarded_store.measurements(miss.problem)}
    forgiven = {kind.__name__ for kind in forgiven_errors()}
    own = [c for c in miss.call.configs if c.variant not in miss.call.functions]
    error_types = {c: _error_type(rows[c]) if c in rows else "untried" for c in own}
    candidate = next((c for c in own if error_types[c] not in forgiven), own[0])
    return miss.call.configs[candidate] if error_types[candidate] else None


def _error_type(failure: Measurement) -> str:
    """The type of the exception that a candidate failed with; empty where it ended otherwise, or had no memory."""
    if failure.outcome is Outcome.OUT_OF_RESOURCES:
        return "OutOfResources"
    kind, colon, _ = str(failure.extra.get("message", "")).partition(": ")
    return kind if colon and failure.outcome not in (Outcome.TIMEOUT, Outcome.INFRASTRUCTURE) else ""


def _config_of_triton(tuner: Any, key: Key, pruned: list[LaunchConfig], error: Exception) -> LaunchConfig:
    """The config that Triton has kept for a key, if it keeps any. Raises `error` where it would have to time it."""

    def time_all() -> None:
        raise error

    if not getattr(tuner, "cache_results", False):
        time_all()
    tuner.check_disk_cache(key, pruned, time_all)
    return cast("LaunchConfig", tuner.cache[key])


def _is_of_guard(tuner: Tuner, error: Exception) -> bool:
    """Whether a function that replaced Triton's `_bench` has raised the error."""
    return not is_of_triton(tuner._bench) and code_of(tuner._bench) in codes_in_traceback(error)


def _config_to_compile(miss: _KeyMiss) -> LaunchConfig:
    """Return the config of a call that launches nothing: the stored choice, or the first one."""
    call, guarded_store = miss.call, miss.guarded_store
    stored = guarded_store.decision(miss.problem)
    is_usable = stored is not None and stored.settings != STRUCK and stored.chosen in call.configs
    chosen = stored.chosen if stored is not None and is_usable else next(iter(call.configs))
    return launch_config(call, chosen, lambda: guarded_store.measurements(miss.problem))


# --- a launch ---


def launch(
    tuner: Tuner,
    engine: TuningEngine,
    make_key: KeyMaker,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    key: Key | None = None,
    form: CallForm | None = None,
) -> object:
    """Launch a tuner's kernel with the config of this call's key, deciding it first on a miss.

    `key` and `form` spare their computation. Where every config fails, the launch raises as under Triton.
    """
    configs = tuner.configs
    if len(configs) > 1 or engine.has_variants:
        try:
            key = key or make_key(tuner.keys, args, kwargs)
        except Exception as error:
            if engine.has_own_bucket():
                raise
            key = triton_key(tuner, args, kwargs, error)
        config = tuner.cache.get(key)
        if config is None and make_key.learn_addresses(engine.text, tuner.fn, args, kwargs):
            key = make_key(tuner.keys, args, kwargs)
            config = tuner.cache.get(key)
        if config is None:
            try:
                # Busy: a hook of this very decision launches the kernel again.
                config = configs[0] if engine.is_deciding() else engine.resolve(tuner, key, args, kwargs)
                make_key.narrow(engine.dots)
            except NoWorkingConfigError as error:
                if (config := error.config) is None:
                    raise
                warnings.warn(f"{error}. Launching {config}, as triton.autotune would", stacklevel=3)
                result = _launch(tuner, config, args, kwargs)
                tuner.cache[key] = config
                return result
    else:
        config = configs[0]
    try:
        return _launch(tuner, config, args, kwargs, form)
    except Exception as error:
        if not engine.strikes(tuner, key, config, error, args, kwargs):
            raise
    return launch(tuner, engine, make_key, args, kwargs)


def _launch(
    tuner: Tuner,
    config: LaunchConfig,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    form: CallForm | None = None,
) -> object:
    if config.__class__ is VariantConfig:
        return launch_variant(tuner, config, args, kwargs, form)
    tuner.best_config = config
    if config.pre_hook is not None:
        config.pre_hook({**_arguments(tuner, args, kwargs), **config.all_kwargs()})
    return tuner.fn.run(*args, **kwargs, **config.all_kwargs())


def _add_remedy(error: Exception) -> None:
    """Add a remedy to an error of Triton's that no kernel has caused."""
    if "active drivers" in str(error):
        error.add_note(
            "no GPU is here: set TRITON_INTERPRET=1 before triton is imported, or launch within null_device()"
        )
    if isinstance(error, OSError) and (os.environ.get("TRITON_CACHE_DIR") or ".triton") in str(
        error.filename
    ):
        error.add_note(
            "Triton compiles into TRITON_CACHE_DIR, else ~/.triton: name a writable directory there"
        )


# --- after a failure of ours: the key and the config that Triton would have chosen ---


def triton_key(tuner: Tuner, args: tuple[object, ...], kwargs: NamedArguments, error: Exception) -> Key:
    """The in-memory key of a call, made slowly as `triton.autotune` makes it."""
    _warn("key of a call", error, "using Triton's")
    arguments = {k: v for k, v in _arguments(tuner, args, kwargs).items() if k in tuner.arg_names}
    key = [arguments[name] for name in tuner.keys if name in arguments]
    return (*key, *(str(value.dtype) for value in arguments.values() if hasattr(value, "dtype")))


def _triton_config(
    tuner: Tuner,
    key: Key,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    error: Exception,
    configs: Sequence[LaunchConfig],
) -> LaunchConfig:
    """Time `configs` with Triton's own benchmark and take the fastest; a single config is not timed.

    Also fills the tuner's public attributes. Errors of the user's own hooks and functions are raised.
    """
    best, how = configs[0], "using the first config"
    if len(configs) > 1:
        how = "timing every config as triton.autotune does"
        try:
            timings = {config: tuner._bench(*args, config=config, **kwargs) for config in configs}
        except OSError as failure:
            _add_remedy(failure)
            raise
        best = min(timings, key=timings.__getitem__)
        tuner.pre_hook({**_arguments(tuner, args, kwargs), **best.all_kwargs()}, reset_only=True)
        tuner.configs_timings = timings
    _warn("tuner", error, how)  # not before: a call that is wrong in itself has failed by now
    tuner.cache[key] = best
    return best


def _arguments(tuner: Tuner, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dict[str, object]:
    return {**dict(zip(tuner.arg_names, args, strict=False)), **kwargs}


def _warn(part: str, error: Exception, remedy: str) -> None:
    warnings.warn(f"the {part} failed ({error!r:.300}): {remedy}", stacklevel=3)
