"""The library's kernels, timed while an operation is lowered: they need no compilation, and say what is to be beaten.

What is chosen for the first round knows their times, and is less where hardly anything can be faster. Beside the
round's choices they are timed again, so that nothing is decided by times that were taken apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from forecast_autotune.records import Measurement
from forecast_integrations.inductor import choice_timing
from forecast_integrations.inductor.harvest import PendingTimings, make_measurement
from forecast_integrations.inductor.hooks.context import HookContext
from forecast_integrations.inductor.operation_search import OperationSearch
from forecast_integrations.inductor.pruning import SelectionCall, TimeExterns

if TYPE_CHECKING:
    from torch._inductor.ir import ChoiceCaller


def extern_timer(context: HookContext) -> TimeExterns:
    """What times them; operations of equal key are timed once in a session."""

    def time_externs(
        search: OperationSearch, externs: Sequence[ChoiceCaller], operation: SelectionCall
    ) -> Sequence[Measurement]:
        session = context.session
        if session is None:
            return ()
        known, name = session.externs_ahead, search.problem.id
        if name not in known:
            known[name] = ()
            try:
                known[name] = _timed(context, search, externs, operation)
            except Exception as error:
                session.warn_once("time the library's kernels ahead", error)
        return known[name]

    return time_externs


def _timed(
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
    outer, thread.pending = thread.pending, PendingTimings()
    thread.under_way.append(search)  # whose clock it is
    try:
        timings = benchmark(choices)
    finally:
        thread.under_way.pop()
        thread.pending = outer
        context.note_busy()
    return tuple(make_measurement(search.problem, choice, ms) for choice, ms in timings.items())
