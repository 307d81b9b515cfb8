"""Where Inductor is hooked. Each hook is thin, obeys what is in force, and never breaks a compilation."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

from forecast_autotune.settings import Mode
from forecast_integrations.inductor import harvest, pruning, rounds
from forecast_integrations.inductor.hooks.patches import PatchSet
from forecast_integrations.inductor.pruning import SELECTION_STATE, SelectionCall, UnplannedSpaceError
from forecast_integrations.inductor.session import TuningSession
from forecast_integrations.triton.timer.warmup import warm_up_cuda

AnyFunction = Callable[..., Any]
CurrentSession = Callable[[], TuningSession | None]
"""What is in force; None once we are disabled, should somebody have wrapped a hook of ours."""


def install(current: CurrentSession) -> PatchSet:
    """Hook everything that this release of torch has; `restore` of the result takes all of it back."""
    from torch._inductor import autotune_process, codecache, select_algorithm
    from torch._inductor.choices import InductorChoices

    cache = select_algorithm.get_algorithm_selector_cache()
    before, after = cache.preprocessing_fns, cache.feedback_saver_fns
    # From here on nothing raises: what is half done could not be taken back.
    patches = PatchSet()
    selector = select_algorithm.AlgorithmSelectorCache
    patches.replace(selector, "__call__", lambda f: _selection(f, current))
    patches.replace(selector, "do_autotuning", lambda f: _autotuning(f, current))
    patches.replace(selector, "benchmark", lambda f: _benchmark(f, current))
    patches.replace(selector, "benchmark_choice", lambda f: _benchmark_choice(f, current))
    patches.replace(select_algorithm, "_log_autotune_exceptions", lambda f: _exceptions(f, current))
    patches.replace(InductorChoices, "get_template_configs", lambda f: _template_configs(f, current))
    patches.replace(InductorChoices, "_finalize_template_configs", lambda f: _finalize(f, current))
    patches.replace(codecache.FxGraphHashDetails, "__init__", lambda f: _hash_details(f, current))
    if (pipelined := getattr(autotune_process, "AsyncAutotuner", None)) is not None:
        patches.replace(pipelined, "get_results", lambda f: _results(f, current))
    patches.append(before, _preprocessing(current))
    patches.append(after, _saver(current))
    return patches


def _selection(original: AnyFunction, current: CurrentSession) -> AnyFunction:
    """`AlgorithmSelectorCache.__call__`: preprocessing functions are not told which operation it is."""

    def call(
        self: Any, name: str, choices: Any, input_nodes: Any, layout: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if current() is None:
            return original(self, name, choices, input_nodes, layout, *args, **kwargs)
        alone = bool(kwargs.get("is_collective"))
        SELECTION_STATE.operations.append(SelectionCall(name, input_nodes, layout, alone))
        try:
            return original(self, name, choices, input_nodes, layout, *args, **kwargs)
        finally:
            SELECTION_STATE.operations.pop()

    return call


def _preprocessing(current: CurrentSession) -> AnyFunction:
    def forecast_autotune_preprocessing(choices: list[Any]) -> list[Any]:
        serving = current()
        if serving is None or not SELECTION_STATE.operations:
            return choices
        try:
            return pruning.prune_before_compilation(serving, SELECTION_STATE.operations[-1], choices)
        except Exception as error:
            serving.warn_once("choose among the choices of an operation", error)
            return choices

    return forecast_autotune_preprocessing


def _finalize(original: AnyFunction, current: CurrentSession) -> AnyFunction:
    """`_finalize_template_configs`: the GEMM family, before code is generated (KernelTemplateChoice)."""

    def finalize(self: Any, *args: Any, **kwargs: Any) -> Any:
        choices = original(self, *args, **kwargs)
        serving = current()
        if serving is None:
            return choices
        try:
            # By kind: releases differ in what stands between the inputs and the operation's name.
            given = [*args, *kwargs.values()]
            kernel_inputs = next(a for a in given if hasattr(a, "nodes"))
            op_name = next(a for a in given if isinstance(a, str))
            return pruning.prune_before_codegen(serving, op_name, kernel_inputs, choices)
        except UnplannedSpaceError:
            raise
        except Exception as error:
            serving.warn_once("choose among the templates of an operation", error)
            if SELECTION_STATE.widened:
                raise UnplannedSpaceError from error
            return choices

    return finalize


def _template_configs(original: AnyFunction, current: CurrentSession) -> AnyFunction:
    """`get_template_configs`: the configs are enumerated in here, so the space is set in here only."""

    def get(self: Any, *args: Any, **kwargs: Any) -> Any:
        serving = current()
        if serving is None or not serving.exhaustive_space or pruning.has_multiple_size_hints():
            return original(self, *args, **kwargs)
        from torch._inductor import config

        if not (config.max_autotune or config.max_autotune_gemm):
            return original(self, *args, **kwargs)
        SELECTION_STATE.widened = True
        try:
            with config.patch(max_autotune_gemm_search_space="EXHAUSTIVE"):
                return original(self, *args, **kwargs)
        except UnplannedSpaceError:
            # All of these, some 1,900, would be compiled: back to the space that the user has asked for.
            SELECTION_STATE.widened = False
            return original(self, *args, **kwargs)
        finally:
            SELECTION_STATE.widened = False

    return get


def _autotuning(original: AnyFunction, current: CurrentSession) -> AnyFunction:
    """`do_autotuning`: one round of Inductor's; with `hint_override` it times other sizes."""

    def autotune(
        self: Any,
        name: str,
        input_nodes: Any,
        layout: Any,
        input_gen_fns: Any,
        inputs_key: str,
        choices: list[Any],
        precompile_fn: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        before = (name, input_nodes, layout, input_gen_fns, inputs_key)
        serving = current()
        if serving is None or _pipelined():
            return original(self, *before, choices, precompile_fn, *args, **kwargs)
        if args or kwargs.get("hint_override") is not None or kwargs.get("is_collective"):
            with _timings_paused():
                return original(self, *before, choices, precompile_fn, *args, **kwargs)
        clock = harvest.PENDING
        # A choice may be a graph, whose operations are tuned in the middle of the outer one's round.
        outer = clock.times, clock.errors
        clock.times, clock.errors = {}, {}

        def measure(some: list[Any], prepared: Any) -> dict[Any, float]:
            try:
                found: dict[Any, float] = original(self, *before, some, prepared, **kwargs)
                return found
            finally:
                with _failures_reported(serving, "keep the failures of a round"):
                    harvest.save_failures(serving, some)

        def prepare(some: list[Any]) -> Any:
            from torch._inductor import config

            limit = getattr(config, "precompilation_timeout_seconds", 3600)
            return self.make_precompile_fn(some, name, inputs_key, precompilation_timeout_seconds=limit)

        try:
            return rounds.tune_in_rounds(serving, measure, prepare, choices, precompile_fn)
        finally:
            clock.times, clock.errors = outer

    return autotune


def _benchmark(original: AnyFunction, current: CurrentSession) -> AnyFunction:
    """`benchmark`: called only for times that are really taken, not for those in Inductor's cache."""

    def benchmark(self: Any, choices: Any, *args: Any, **kwargs: Any) -> Any:
        serving = current()
        if serving is not None and serving.settings.mode is not Mode.LISTEN:
            with _failures_reported(serving, "wake the device"):
                warm_up_cuda()
        timings = original(self, choices, *args, **kwargs)
        if current() is not None and not harvest.PENDING.paused:
            harvest.PENDING.times.update(timings)
        return timings

    return benchmark


def _benchmark_choice(original: AnyFunction, current: CurrentSession) -> AnyFunction:
    """`benchmark_choice`: why a choice has no time; Inductor makes an infinite time of it and forgets."""

    def benchmark_choice(cls: Any, choice: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(cls, choice, *args, **kwargs)
        except Exception as error:
            if current() is not None:
                harvest.PENDING.errors[choice] = f"{type(error).__name__}: {error}"
            raise

    return benchmark_choice


def _exceptions(original: AnyFunction, current: CurrentSession) -> AnyFunction:
    """`_log_autotune_exceptions`: which choices did not compile, and why."""

    def log(exceptions: Any) -> Any:
        if current() is not None:
            for choice, error in exceptions:
                harvest.PENDING.errors[choice] = f"{type(error).__name__}: {error}"
        return original(exceptions)

    return log


def _saver(current: CurrentSession) -> AnyFunction:
    def forecast_autotune_feedback(
        timings: Any,
        name: str,
        input_nodes: Any,
        choices: Any,
        profiled: Any = None,
        compiled: Any = None,
        *_: Any,
    ) -> None:
        serving = current()
        if serving is None or harvest.PENDING.paused or not timings:
            return
        with _failures_reported(serving, "keep the timings of an operation"):
            operation = SelectionCall(name, input_nodes, next(iter(timings)).layout)
            harvest.save_timings(serving, timings, operation, compiled or {})

    return forecast_autotune_feedback


def _results(original: AnyFunction, current: CurrentSession) -> AnyFunction:
    """`AsyncAutotuner.get_results`: with pipelined tuning no feedback saver is called."""

    def get_results(cls: Any, choices: Any, *args: Any, **kwargs: Any) -> Any:
        timings = original(cls, choices, *args, **kwargs)
        serving, search = current(), pruning.search_of(choices)
        if serving is not None and search is not None:
            with _failures_reported(serving, "keep the timings of an operation"):
                operation = SelectionCall(search.problem.kernel.name, (), None)
                harvest.save_timings(serving, timings, operation, {}, all_measured=True)
                pruning.record_decision(serving, search)
        return timings

    return get_results


def _hash_details(original: AnyFunction, current: CurrentSession) -> AnyFunction:
    """`FxGraphHashDetails`: all of its attributes make the key of a compiled graph (AOTAutograd's, too)."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        serving = current()
        if serving is None:
            return
        try:
            identity = serving.identity()
        except Exception as error:
            serving.warn_once("name the rules in a cache key", error)
            # Under no name, what is compiled now would be taken for what Inductor compiles without us.
            identity = f"forecast_autotune:unnamed:{os.urandom(16).hex()}"
        if identity:
            self.forecast_autotune = identity

    return init


def _pipelined() -> bool:
    from torch._inductor import config

    return bool(getattr(config, "pipeline_max_autotune_gemm", False))


@contextlib.contextmanager
def _timings_paused() -> Any:
    harvest.PENDING.paused += 1
    try:
        yield
    finally:
        harvest.PENDING.paused -= 1


@contextlib.contextmanager
def _failures_reported(serving: TuningSession, what: str) -> Any:
    try:
        yield
    except Exception as error:
        serving.warn_once(what, error)
