"""While an operation's next choices compile, the other operations of its graph are tuned.

Inductor's scheduler asks for the times of one operation after the other, and a further round of one waits until
the round's choices are compiled, while the device idles. The others' first choices have been compiled by then:
they are timed in that time, their own further rounds begin to compile, and what the scheduler asks for later is
there. Nothing is measured that would not be measured anyway.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from forecast_autotune.settings import Mode
from forecast_integrations.inductor.operation_search import OperationSearch
from forecast_integrations.inductor.pruning import has_multiple_size_hints, ranks_tune_together, search_of
from forecast_integrations.inductor.session import TuningSession

if TYPE_CHECKING:
    from torch._inductor.ir import MultiTemplateBuffer

MAX_DEPTH = 16
"""Operations that wait for their choices at once, at most, since each takes some frames of the stack; with 0,
they are tuned one after the other."""


def tune_others(session: TuningSession, under_way: Sequence[OperationSearch]) -> None:
    """Tune the operations of this graph whose times are still to be asked for; `under_way` are this thread's.

    Never raises: an operation that fails here is asked for again by Inductor, and fails there.
    """
    if session.settings.mode is not Mode.TUNE or len(under_way) >= MAX_DEPTH:
        return
    if ranks_tune_together() or has_multiple_size_hints():  # all ranks time operations in one order
        return
    try:
        buffers = list(_untimed_buffers())
    except Exception as error:
        session.warn_once("look for other operations of a graph", error)
        return
    for buffer, search in buffers:
        # Of two alike the second one is decided by what the first one finds.
        alike = any(search.problem.id == other.problem.id for other in under_way)
        if alike or search.failed or search.tuned_ahead or None in buffer._choice_timings:
            continue
        search.tuned_ahead = True
        try:
            buffer.choice_timings()
        except Exception as error:
            session.warn_once("tune an operation ahead of its turn", error)


def _untimed_buffers() -> Iterator[tuple[MultiTemplateBuffer, OperationSearch]]:
    from torch._inductor.ir import MultiTemplateBuffer
    from torch._inductor.virtualized import V

    scheduler = getattr(V.graph, "scheduler", None)
    for fused in getattr(scheduler, "nodes", ()):
        for node in fused.get_nodes():
            buffer = node.node
            if not isinstance(buffer, MultiTemplateBuffer):
                continue
            timed = getattr(
                buffer, "_choice_timings", None
            )  # a dictionary by size hint, where there are hints
            search = search_of(getattr(buffer, "_choices", ()))
            if isinstance(timed, dict) and None not in timed and search is not None:
                yield buffer, search
