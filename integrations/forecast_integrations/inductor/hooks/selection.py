"""Hooks of Inductor's selection. Each is thin, obeys the current session, and never breaks a compilation."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forecast_autotune.records import Measurement, digest
from forecast_autotune.settings import Mode
from forecast_integrations.inductor import choice_timing, harvest, pruning, rounds
from forecast_integrations.inductor.choice_timing import ChoiceTimings
from forecast_integrations.inductor.choices.pool import late_choice, with_code
from forecast_integrations.inductor.harvest import make_measurement
from forecast_integrations.inductor.hooks.context import AnyFunction, HookContext, PatchSet
from forecast_integrations.inductor.operation_search import OperationSearch
from forecast_integrations.inductor.pruning import SelectionCall, TimeExterns, UnplannedSpaceError
from forecast_integrations.inductor.session import TuningSession

if TYPE_CHECKING:
    from torch._inductor.choices import InductorChoices
    from torch._inductor.codecache import FxGraphHashDetails
    from torch._inductor.ir import ChoiceCaller, IRNode, Layout
    from torch._inductor.kernel_template_choice import KernelTemplateChoice
    from torch._inductor.select_algorithm import AlgorithmSelectorCache, TritonTemplate


def install(context: HookContext) -> PatchSet:
    """Hook everything that this release of torch has; `restore` of the result takes all of it back."""
    from torch._dynamo import package
    from torch._inductor import autotune_process, codecache, select_algorithm
    from torch._inductor.choices import InductorChoices

    cache = select_algorithm.get_algorithm_selector_cache()
    before = cache.preprocessing_fns
    # From here on nothing raises: what is half done could not be taken back.
    patches = PatchSet()
    selector = select_algorithm.AlgorithmSelectorCache
    patches.replace(selector, "__call__", lambda f: _selection(f, context))
    patches.replace(selector, "do_autotuning", lambda f: _autotuning(f, context))
    patches.replace(selector, "benchmark", lambda f: _benchmark(f, context))
    patches.replace(selector, "benchmark_choice", lambda f: _benchmark_choice(f, context))
    patches.replace(select_algorithm, "_log_autotune_exceptions", lambda f: _exceptions(f, context))
    patches.replace(select_algorithm.TritonTemplate, "maybe_append_choice", lambda f: _append(f, context))
    patches.replace(InductorChoices, "get_template_configs", lambda f: _template_configs(f, context))
    patches.replace(InductorChoices, "_finalize_template_configs", lambda f: _finalize(f, context))
    patches.replace(codecache.FxGraphHashDetails, "__init__", lambda f: _hash_details(f, context))
    patches.replace(package.CompilePackage, "source_id_from_fn", lambda f: _source_id(f, context))
    if (tuner := getattr(autotune_process, "AsyncAutotuner", None)) is not None:
        patches.replace(tuner, "get_results", lambda f: _results(f, context))
    context.preprocessing = _preprocessing(context)
    patches.append(before, context.preprocessing)
    context.feedback = _saver(context)
    return patches


def _selection(original: AnyFunction, context: HookContext) -> AnyFunction:
    """`AlgorithmSelectorCache.__call__`: preprocessing functions are not told which operation it is."""
    from torch._inductor import config

    def call(
        self: AlgorithmSelectorCache,
        name: str,
        choices: list[ChoiceCaller],
        input_nodes: Sequence[IRNode],
        layout: Layout,
        *args: object,
        **kwargs: object,
    ) -> object:
        if (session := context.session) is None:
            return original(self, name, with_code(choices), input_nodes, layout, *args, **kwargs)
        context.choose_last(self.preprocessing_fns)
        alone = bool(kwargs.get("is_collective"))
        selections = context.thread.selections
        # Positional in some releases: what makes inputs for benchmarks is a dictionary by number.
        input_gen_fns: Any = kwargs.get("input_gen_fns", args[0] if args else None)
        input_makers = input_gen_fns if isinstance(input_gen_fns, Mapping) else None
        operation = SelectionCall(name, input_nodes, layout, input_makers, alone, returns=True)
        if session.settings.mode is Mode.TUNE:
            operation.hooked = pruning.is_hooked()
            threshold: Any = kwargs.get("min_speedup_threshold", 1.0)
            is_forced = getattr(config.test_configs, "force_custom_op_decomposition", None) is not None
            operation.others_decide = operation.hooked or threshold > 1.0 or is_forced
        selections.append(operation)
        choice = None
        try:
            answer = original(self, name, choices, input_nodes, layout, *args, **kwargs)
            choice = answer[1] if isinstance(answer, tuple) else None  # torch 2.11 says nothing of it
            return answer
        finally:
            selections.pop()
            if operation.search is not None:
                pruning.record_choice(session, operation.search, choice)

    return call


def _preprocessing(context: HookContext) -> AnyFunction:
    time_externs = extern_timer(context)

    def forecast_autotune_preprocessing(choices: list[ChoiceCaller]) -> list[ChoiceCaller]:
        session, selections = context.session, context.thread.selections
        if session is not None and selections:
            try:
                choices = pruning.prune_before_compilation(session, selections[-1], choices, time_externs)
            except Exception as error:
                choices = session.after_failure("choose among the choices of an operation", error, choices)
        return with_code(choices)

    return forecast_autotune_preprocessing


def _finalize(original: AnyFunction, context: HookContext) -> AnyFunction:
    """`_finalize_template_configs`: the GEMM family, before code is generated (KernelTemplateChoice)."""
    time_externs = extern_timer(context)

    def finalize(self: InductorChoices, *args: object, **kwargs: object) -> list[KernelTemplateChoice]:
        choices: list[KernelTemplateChoice] = original(self, *args, **kwargs)
        session, is_wider = context.session, context.thread.widened
        if session is None or context.others_choose():
            return choices
        try:
            # By kind: releases differ in what stands between the inputs and the operation's name.
            values = [*args, *kwargs.values()]
            kernel_inputs = next(a for a in values if hasattr(a, "nodes"))
            op_name = next(a for a in values if isinstance(a, str))
            return pruning.prune_before_codegen(
                session,
                op_name,
                kernel_inputs,
                choices,
                widened=is_wider,
                time_externs=time_externs,
            )
        except UnplannedSpaceError:
            raise
        except Exception as error:
            session.warn_once("choose among the templates of an operation", error)
            if is_wider:
                raise UnplannedSpaceError from error
            return choices

    return finalize


def _append(original: AnyFunction, context: HookContext) -> AnyFunction:
    """`maybe_append_choice`: a convolution's code is made of those choices that are planned, as a product's is.

    Code takes 3 to 6 ms a choice, half of the lowering of a ResNet. The first of a list is made at once: `.choice` of
    the others comes here with an empty one.
    """
    from torch._inductor.ir import FlexibleLayout

    def append(self: TritonTemplate, choices: list[Any], **kwargs: Any) -> Any:
        session = context.session
        if session is not None and choices and self.name.startswith("convolution"):
            try:
                # A template settles the strides of its operands.
                is_fixed = not any(isinstance(x.get_layout(), FlexibleLayout) for x in kwargs["input_nodes"])
                if is_fixed and not context.others_choose():
                    choices.append(late_choice(self, kwargs))
                    return None
            except Exception as error:
                session.warn_once("put off the code of a choice", error)
        return original(self, choices, **kwargs)

    return append


def _template_configs(original: AnyFunction, context: HookContext) -> AnyFunction:
    """`get_template_configs`: the configs are enumerated in here, so the space is set in here only."""

    def get(self: InductorChoices, *args: object, **kwargs: object) -> object:
        session, thread = context.session, context.thread
        if session is None or not session.exhaustive_space:
            return original(self, *args, **kwargs)
        if pruning.has_multiple_size_hints() or context.others_choose():
            return original(self, *args, **kwargs)
        from torch._inductor import config

        if not (config.max_autotune or config.max_autotune_gemm):
            return original(self, *args, **kwargs)
        thread.widened = True
        try:
            with config.patch(max_autotune_gemm_search_space="EXHAUSTIVE"):
                return original(self, *args, **kwargs)
        except UnplannedSpaceError:
            # All of these, some 1,900, would be compiled: back to the space that the user has asked for.
            thread.widened = False
            return original(self, *args, **kwargs)
        finally:
            thread.widened = False

    return get


def _autotuning(original: AnyFunction, context: HookContext) -> AnyFunction:
    """`do_autotuning`: one round of Inductor's; with `hint_override` it times other sizes."""

    def autotune(
        self: AlgorithmSelectorCache,
        name: str,
        input_nodes: Sequence[IRNode],
        layout: Layout,
        input_gen_fns: Mapping[int, Callable[..., object]] | None,
        inputs_key: str,
        choices: list[ChoiceCaller],
        precompile_fn: Callable[[], object],
        *args: object,
        **kwargs: object,
    ) -> ChoiceTimings:
        before = (name, input_nodes, layout, input_gen_fns, inputs_key)
        session, thread = context.session, context.thread
        if session is None or _is_pipelined():
            return original(self, *before, choices, precompile_fn, *args, **kwargs)
        if args or kwargs.get("hint_override") is not None or kwargs.get("is_collective"):
            with _pause_timings(context):
                return original(self, *before, choices, precompile_fn, *args, **kwargs)
        # A choice may be a graph, whose operations are tuned in the middle of the outer one's round.
        outer, pending = thread.pending, dict[Any, float]()
        thread.pending = pending

        def measure(subset: list[ChoiceCaller], wait: Callable[[], object]) -> ChoiceTimings:
            try:
                with context.feedback_entry(self):
                    timings: ChoiceTimings = original(self, *before, subset, wait, **kwargs)
                return timings
            finally:
                with _warn_of_failures(session, "keep the failures of a round"):
                    harvest.save_failures(session, pending, subset)

        def prepare(subset: list[ChoiceCaller]) -> Callable[[], object]:
            from torch._inductor import config

            limit = getattr(config, "precompilation_timeout_seconds", 3600)
            return self.make_precompile_fn(subset, name, inputs_key, precompilation_timeout_seconds=limit)

        search = pruning.search_of(choices)
        depth = len(thread.under_way)
        if search is not None:
            thread.under_way.append(search)

        def meanwhile() -> None:
            rounds.tune_others(session, thread.under_way)

        try:
            return rounds.tune_in_rounds(session, measure, prepare, choices, precompile_fn, meanwhile)
        finally:
            del thread.under_way[depth:]
            thread.pending = outer

    return autotune


def _benchmark(original: AnyFunction, context: HookContext) -> AnyFunction:
    """`benchmark`: called only for times that are really taken, not for those in Inductor's cache."""

    def benchmark(
        self: AlgorithmSelectorCache, choices: list[ChoiceCaller], *args: object, **kwargs: object
    ) -> ChoiceTimings:
        session = context.session
        if session is not None and session.settings.mode is not Mode.LISTEN:
            with _warn_of_failures(session, "wake the device"):
                context.wake_device()
        timings: ChoiceTimings = original(self, choices, *args, **kwargs)
        context.note_busy()
        if context.session is not None and not context.thread.paused:
            context.thread.pending.update(timings)
        return timings

    return benchmark


def _benchmark_choice(original: AnyFunction, context: HookContext) -> AnyFunction:
    """`benchmark_choice`: why a choice has no time; Inductor makes an infinite time of it and forgets."""

    def benchmark_choice(
        cls: type[AlgorithmSelectorCache], choice: ChoiceCaller, *args: object, **kwargs: object
    ) -> object:
        try:
            return original(cls, choice, *args, **kwargs)
        except Exception as error:
            if context.session is not None:
                harvest.note_error(choice, error)
            raise

    return benchmark_choice


def _exceptions(original: AnyFunction, context: HookContext) -> AnyFunction:
    """`_log_autotune_exceptions`: which choices did not compile, and why."""

    def log(exceptions: list[tuple[ChoiceCaller, BaseException]]) -> object:
        if context.session is not None:
            for choice, error in exceptions:
                harvest.note_error(choice, error)
        return original(exceptions)

    return log


def _saver(context: HookContext) -> AnyFunction:
    def forecast_autotune_feedback(
        timings: ChoiceTimings,
        name: str,
        input_nodes: Sequence[IRNode],
        choices: list[ChoiceCaller],
        profiled: object = None,
        compiled: ChoiceTimings | None = None,
        *_: object,
    ) -> None:
        session, thread = context.session, context.thread
        if session is None or thread.paused or not timings:
            return
        with _warn_of_failures(session, "keep the timings of an operation"):
            operation = SelectionCall(name, input_nodes, next(iter(timings)).layout)
            harvest.save_timings(session, thread.pending, timings, operation, compiled or {})

    return forecast_autotune_feedback


def _results(original: AnyFunction, context: HookContext) -> AnyFunction:
    """`AsyncAutotuner.get_results`: with pipelined tuning no feedback saver is called."""

    def get_results(cls: type, choices: list[ChoiceCaller], *args: object, **kwargs: object) -> ChoiceTimings:
        timings: ChoiceTimings = original(cls, choices, *args, **kwargs)
        session, search = context.session, pruning.search_of(choices)
        if session is not None and search is not None:
            with _warn_of_failures(session, "keep the timings of an operation"):
                operation = SelectionCall(search.problem.kernel.name, (), None)
                pending = context.thread.pending
                harvest.save_timings(session, pending, timings, operation, {}, all_measured=True)
                pruning.record_decision(session, search)
        return timings

    return get_results


def _hash_details(original: AnyFunction, context: HookContext) -> AnyFunction:
    """`FxGraphHashDetails`: all of its attributes make the key of a compiled graph (AOTAutograd's, too)."""

    def init(self: FxGraphHashDetails, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)
        session = context.session
        if session is None:
            return
        session.tally.count(graphs=1)
        try:
            identity = context.key_parts()[1]
        except Exception as error:
            session.warn_once("name the rules in a cache key", error)
            # Under no name, what is compiled now would be taken for what Inductor compiles without us.
            identity = f"forecast_autotune:unnamed:{os.urandom(16).hex()}"
        if identity:
            self.forecast_autotune = identity

    return init


def _source_id(original: AnyFunction, context: HookContext) -> AnyFunction:
    """`CompilePackage.source_id_from_fn`: the key of a precompiled function, which names neither mode nor backend."""

    def source_id_from_fn(fn: object) -> str:
        identity = "" if context.session is None else context.session.identity()
        return original(fn) + (f"-{digest(identity)}" if identity else "")

    return source_id_from_fn


def _is_pipelined() -> bool:
    from torch._inductor import config

    return bool(getattr(config, "pipeline_max_autotune_gemm", False))


@contextlib.contextmanager
def _pause_timings(context: HookContext) -> Iterator[None]:
    thread = context.thread
    thread.paused += 1
    try:
        yield
    finally:
        thread.paused -= 1


@contextlib.contextmanager
def _warn_of_failures(session: TuningSession, task: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        session.warn_once(task, error)


def extern_timer(context: HookContext) -> TimeExterns:
    """A function that times them; operations of equal key are timed once in a session."""

    def time_externs(
        search: OperationSearch, externs: Sequence[ChoiceCaller], operation: SelectionCall
    ) -> Sequence[Measurement]:
        session = context.session
        if session is None:
            return ()
        rows_by_problem, name = session.externs_ahead, search.problem.id
        if name not in rows_by_problem:
            rows_by_problem[name] = ()
            try:
                rows_by_problem[name] = _measurements_of(context, search, externs, operation)
            except Exception as error:
                session.warn_once("time the library's kernels ahead", error)
        return rows_by_problem[name]

    return time_externs


def _measurements_of(
    context: HookContext, search: OperationSearch, externs: Sequence[ChoiceCaller], operation: SelectionCall
) -> tuple[Measurement, ...]:
    from torch._inductor import select_algorithm

    if not externs or operation.layout is None or not choice_timing.can_time(operation.layout.device):
        return ()
    cache, choices = select_algorithm.get_algorithm_selector_cache(), list(externs)
    benchmark = cache.make_benchmark_fn(
        choices, list(operation.input_nodes), operation.layout, operation.generated_inputs
    )
    context.wake_device()
    thread = context.thread
    outer, thread.pending = thread.pending, {}
    thread.under_way.append(search)  # whose clock it is
    try:
        timings = benchmark(choices)
    finally:
        thread.under_way.pop()
        thread.pending = outer
        context.note_busy()
    return tuple(make_measurement(search.problem, choice, ms) for choice, ms in timings.items())
