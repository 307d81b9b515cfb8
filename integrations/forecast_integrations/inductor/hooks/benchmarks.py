"""Inductor's benchmarks of an operation's choices in this process, with a clock of the device in their place."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from forecast_integrations.inductor import choice_timing, pruning
from forecast_integrations.inductor.choice_timing import (
    CallClock,
    ChoiceTiming,
    ChoiceTimings,
    ChoiceTurns,
    FusedKernelTiming,
    HostClock,
)
from forecast_integrations.inductor.hooks.context import AnyFunction, HookContext, PatchSet
from forecast_integrations.inductor.operation_search import OperationSearch
from forecast_integrations.inductor.session import TuningSession

if TYPE_CHECKING:
    import torch
    from torch._inductor.codegen.triton import TritonScheduling
    from torch._inductor.ir import ChoiceCaller
    from torch._inductor.select_algorithm import AlgorithmSelectorCache


def install(context: HookContext) -> PatchSet:
    """Hook the list of choices, each of them, fused kernels, and the benchmarker that times calls."""
    from torch._inductor.codegen.triton import TritonScheduling
    from torch._inductor.runtime import benchmarking
    from torch._inductor.select_algorithm import AlgorithmSelectorCache

    patches = PatchSet()
    patches.replace(AlgorithmSelectorCache, "benchmark_choices", lambda f: _benchmark_choices(f, context))
    patches.replace(AlgorithmSelectorCache, "benchmark_choice", lambda f: _benchmark_choice(f, context))
    patches.replace(TritonScheduling, "benchmark_codegened_module", lambda f: _benchmark_module(f, context))
    kind = type(benchmarking.benchmarker)
    for name in ("benchmark_gpu", "benchmark_cpu"):
        owner = next((c for c in kind.__mro__ if name in vars(c)), kind)
        patches.replace(owner, name, lambda f: _benchmark_calls(f, context, benchmarking))
    return patches


def _benchmark_choices(original: AnyFunction, context: HookContext) -> AnyFunction:
    """`benchmark_choices`: all that this process times of one operation in one go."""

    def benchmark_choices(
        cls: type[AlgorithmSelectorCache], choices: list[ChoiceCaller], *args: object, **kwargs: object
    ) -> ChoiceTimings:
        session, thread = context.session, context.thread
        search = pruning.search_of(choices) or next(reversed(thread.under_way), None)
        outer = thread.call_timing
        thread.call_timing = None  # an operation inside of a choice has its own
        try:
            calls: ChoiceTiming | None = None
            if session is not None and search is not None and not kwargs.get("is_collective"):
                calls = thread.call_timing = _open(session, search, choices)
            timings: ChoiceTimings = original(cls, choices, *args, **kwargs)
            if calls is not None and calls.failed:  # two clocks would decide
                thread.call_timing = None
                timings = original(cls, choices, *args, **kwargs)
            if isinstance(calls, ChoiceTurns) and not calls.failed:
                timings = calls.in_turns(timings, lambda some: original(cls, some, *args, **kwargs))
                if search is not None and calls.disturbed:
                    search.disturbed = True
            if search is not None and calls is not None:
                search.add_note(calls.note_clocks(timings))
            return timings
        finally:
            thread.call_timing = outer

    return benchmark_choices


def _open(
    session: TuningSession, search: OperationSearch, choices: list[ChoiceCaller]
) -> ChoiceTiming | None:
    if not search.times_calls and choice_timing.times_on_host(session, choices):
        return ChoiceTurns(session, search.problem.kernel.name, HostClock())
    if not choices or not search.times_calls or choice_timing.has_own_graphs(choices):
        return None
    clock = _open_clock(session, choices[0].layout.device)
    return None if clock is None else ChoiceTiming(session, search.problem.kernel.name, clock)


def _open_clock(session: TuningSession, device: torch.device) -> CallClock | None:
    try:
        return choice_timing.open_clock(device)
    except Exception as error:
        session.warn_once("open a clock of the device", error)
        return None


def _benchmark_choice(original: AnyFunction, context: HookContext) -> AnyFunction:
    """`benchmark_choice`: one choice; everything that is launched for it goes to the stream it is recorded on."""

    def benchmark_choice(
        cls: type[AlgorithmSelectorCache], choice: ChoiceCaller, *args: object, **kwargs: object
    ) -> float:
        benchmark = partial(original, cls, choice, *args, **kwargs)
        calls = context.thread.call_timing
        return calls.benchmark_choice(choice, benchmark) if isinstance(calls, ChoiceTiming) else benchmark()

    return benchmark_choice


def _benchmark_module(original: AnyFunction, context: HookContext) -> AnyFunction:
    """`benchmark_codegened_module`: a kernel that was fused, or is to be, beside the times of choices."""

    def benchmark_codegened_module(self: TritonScheduling, *args: object, **kwargs: object) -> object:
        session, thread = context.session, context.thread
        clock = None
        if session is not None and choice_timing.replaces_times(session):
            from torch._inductor.virtualized import V

            clock = _open_clock(session, V.graph.get_current_device_or_throw())
        if session is None or clock is None:
            return original(self, *args, **kwargs)
        outer, thread.call_timing = thread.call_timing, FusedKernelTiming(session, clock)
        try:
            with clock.on_stream():
                return original(self, *args, **kwargs)
        finally:
            thread.call_timing = outer

    return benchmark_codegened_module


def _benchmark_calls(original: AnyFunction, context: HookContext, module: ModuleType) -> AnyFunction:
    """`benchmark_gpu`: the benchmarker that has the call in its hands.

    Where somebody has put another one in its place, its times are the ones that are wanted.
    """
    from torch._inductor import config

    code = getattr(original, "__code__", None)
    is_torchs = code is not None and code.co_filename == module.__file__
    lock: Callable[[], AbstractContextManager[object]]
    lock = getattr(module, "maybe_gpu_benchmark_lock", nullcontext)  # torch 2.11 has none

    def benchmark_calls(self: object, _callable: AnyFunction, *args: object, **kwargs: object) -> Any:
        benchmark = partial(original, self, _callable, *args, **kwargs)
        calls = context.thread.call_timing
        distortion = getattr(config.test_configs, "distort_benchmarking_result", "")
        if calls is None or not is_torchs or distortion or kwargs.get("return_mode", "min") == "all":
            return benchmark()
        with lock():
            return calls.benchmark_call(_callable, benchmark)

    return benchmark_calls
