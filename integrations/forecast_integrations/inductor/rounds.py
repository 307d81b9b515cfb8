"""Measure -> update -> extend, around Inductor's one round of benchmarks; known times are not taken again."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from forecast_autotune.records import Candidate, Measurement, MeasuringCost
from forecast_autotune.settings import Mode
from forecast_autotune.telemetry.spans import span
from forecast_autotune.tuning.measurer import Measurer
from forecast_integrations.inductor.choice_timing import CUDAGRAPH_OPTION, ChoiceTimings, has_own_graphs
from forecast_integrations.inductor.choices.records import candidate_of, unwrap_choice
from forecast_integrations.inductor.operation_search import OperationSearch
from forecast_integrations.inductor.policy import batch_size
from forecast_integrations.inductor.pruning import (
    SEARCH_ATTRIBUTE,
    has_multiple_size_hints,
    ranks_tune_together,
    record_decision,
    search_of,
)
from forecast_integrations.inductor.session import TuningSession

if TYPE_CHECKING:
    from torch._inductor.ir import ChoiceCaller, MultiTemplateBuffer

WaitForCompilation: TypeAlias = Callable[[], object]
"""Returns when all choices of a round are compiled."""
Measure: TypeAlias = "Callable[[list[ChoiceCaller], WaitForCompilation], ChoiceTimings]"
Prepare: TypeAlias = "Callable[[list[ChoiceCaller]], WaitForCompilation]"


def tune_in_rounds(
    session: TuningSession,
    measure: Measure,
    prepare: Prepare,
    choices: list[ChoiceCaller],
    prepared: WaitForCompilation,
    meanwhile: Callable[[], None] = lambda: None,
) -> ChoiceTimings:
    """Times of these choices in milliseconds, and of those that further rounds add; failures are inf.

    `measure(choices, prepared)` is Inductor's own round and `prepare(choices)` starts their compilation,
    as it has been started for `choices`; `meanwhile` is called while those of a further round compile.
    Raises what Inductor raises when nothing at all runs.
    """
    search = search_of(choices)
    if search is None:
        return measure(choices, prepared)
    start = time.perf_counter()
    try:
        search.refresh()
        if (final := _decided_timings(search, choices)) is not None:
            record_decision(session, search)
            return final
        if search.put_off:  # its like was not measured
            choices = [*choices, *_choices_beside(search, choices, search.put_off)]
            prepared = prepare(choices)
        known_timings = _known_timings(search, choices)
    except Exception as error:
        session.warn_once("look up what is known of an operation", error)
        return measure(choices, prepared)
    timings = _first_round(search, measure, prepare, choices, prepared, known_timings)
    if not timings:
        return timings
    measurer = search.measurer = RoundMeasurer(search, measure, prepare, meanwhile, timings)
    search.expect(map(candidate_of, timings))
    try:
        search.run()
    except Exception as error:
        session.warn_once("measure another round", error)
    search.measure_s += time.perf_counter() - start - measurer.meanwhile_s
    record_decision(session, search)
    return timings


class RoundMeasurer(Measurer):
    """Inductor's own benchmarks as the loop's measurer: it compiles what it is given, and times it in one go."""

    def __init__(
        self,
        search: OperationSearch,
        measure: Measure,
        prepare: Prepare,
        meanwhile: Callable[[], None],
        timings: ChoiceTimings,
    ) -> None:
        """`timings` is what the first round gave; further rounds add to it."""
        self._search, self._measure, self._prepare, self._meanwhile = search, measure, prepare, meanwhile
        self._timings = timings
        self.meanwhile_s = 0.0
        """Seconds that other operations took while choices compiled."""

    @property
    def workers(self) -> int:
        """Choices that Inductor compiles side by side."""
        return batch_size(len(self._search.candidates))

    def measure(
        self,
        candidates: Sequence[Candidate],
        *,
        prefetch: Sequence[Candidate] = (),
        within_s: float | None = None,
    ) -> Iterator[Measurement]:
        """One round; nothing comes of candidates that Inductor has no code for: it is planned without them."""
        from torch._inductor.select_algorithm import NoValidChoicesError

        search, choices = self._search, _choices(self._search, candidates)
        if not choices:
            return
        order = dict.fromkeys(map(candidate_of, choices))
        search.expect(order)
        wait = self._prepare(choices)
        begin = time.perf_counter()
        self._meanwhile()
        self.meanwhile_s += time.perf_counter() - begin
        try:
            with span("measure", candidates=len(choices)):
                self._timings.update(self._measure(choices, wait))
        except NoValidChoicesError:  # an answer, not an error
            self._timings.update(dict.fromkeys(choices, math.inf))
        yield from [m for c in order if (m := search.tried.get(c)) is not None]

    def spent(self) -> MeasuringCost:
        """The search's own counts."""
        return MeasuringCost(self._search.compile_s, self._search.measure_s)


def _known_timings(search: OperationSearch, choices: list[ChoiceCaller]) -> ChoiceTimings:
    """Times that need not be taken again, failures included."""
    if search.session.settings.mode is not Mode.TUNE or search.failed or _compares_results():
        return {}
    # What was timed with nothing beside it is timed again.
    apart = search.library.candidates if search.library.overruled else ()
    rows = search.measured.keys() - apart
    timings = {c: _time(search, c) for c in choices if candidate_of(c) in rows}
    # When all of them failed elsewhere, Inductor must hear so from its own clock.
    return {} if len(timings) == len(choices) and all(map(math.isinf, timings.values())) else timings


def _compares_results() -> bool:
    """Whether Inductor compares the result of each choice with that of the first choice it times.

    The reference must then be the choice that Inductor lists first: a library's kernel that writes into one of
    its inputs gives another result when it is run again, and would not equal itself.
    """
    from torch._inductor import select_algorithm

    return bool(getattr(select_algorithm, "VERIFY", None))


def _first_round(
    search: OperationSearch,
    measure: Measure,
    prepare: Prepare,
    choices: list[ChoiceCaller],
    wait: WaitForCompilation,
    timings: ChoiceTimings,
) -> ChoiceTimings:
    from torch._inductor.select_algorithm import NoValidChoicesError

    unknown = [c for c in choices if c not in timings]
    try:
        with span("measure", kernel=search.label(), candidates=len(unknown)):
            return {**timings, **(measure(unknown, wait) if unknown else {})}
    except NoValidChoicesError as error:
        if any(map(math.isfinite, timings.values())):
            return {**timings, **dict.fromkeys(unknown, math.inf)}
        rest = _choices_beside(search, choices, search.ranked())
        if not rest:
            raise
        search.reasons.append(f"nothing of the first round runs ({error}): everything else")
        return {**dict.fromkeys(choices, math.inf), **measure(rest, prepare(rest))}


def _time(search: OperationSearch, choice: ChoiceCaller) -> float:
    m = search.measured.get(candidate_of(choice))
    return m.ms if m is not None and m.ok else math.inf


def _decided_timings(search: OperationSearch, choices: Sequence[ChoiceCaller]) -> ChoiceTimings | None:
    """Times that make Inductor take what is decided, without a clock; None while nothing is decided.

    Between the listing of this operation and now, its like may have been measured elsewhere in the graph.
    """
    chosen = search.decided()
    if chosen is None:
        return None
    timings = {c: _time(search, c) for c in choices}
    # Where an equal operation was measured, what Inductor is to fuse beside the library's kernel has no code yet.
    fusible = search.library.kept_for_fusion(chosen, search.measured) if search.put_off else ()
    more = _choices_beside(search, choices, [chosen, *fusible])
    timings |= {c: _time(search, c) for c in more}
    winners = [c for c in timings if candidate_of(c) == chosen]
    if not winners:
        return None
    times = [*timings.values(), _time(search, winners[0])]
    # Where nothing was ever timed, any time that is not infinite makes it win.
    best = min((t for t in times if math.isfinite(t)), default=1.0)
    if any(ms == best and c not in winners for c, ms in timings.items()):
        best = math.nextafter(best, 0.0)  # else the order of the list would choose
    return {**timings, **dict.fromkeys(winners, best)}


def _choices_beside(
    search: OperationSearch, choices: Sequence[ChoiceCaller], candidates: Sequence[Candidate]
) -> list[ChoiceCaller]:
    """Those of the wanted choices that are not among `choices`."""
    present = set(map(candidate_of, choices))
    return _choices(search, [c for c in candidates if c not in present])


def _choices(search: OperationSearch, candidates: Sequence[Candidate]) -> list[ChoiceCaller]:
    """Choices of a kind that Inductor has seen of this operation: it has decided by their kinds how to go
    on."""
    pool = search.pool
    if pool is None or not candidates:
        return []
    with outside_the_scheduler():
        choices = [c for c in pool.choices(candidates, search.drop) if type(unwrap_choice(c)) in pool.kinds]
    # What is compared has to be timed alike; Inductor has told only the choices of its first round.
    graphs = has_own_graphs(choice for members in pool.values() for choice in members)
    for choice in choices:
        setattr(choice, SEARCH_ATTRIBUTE, search)
        if graphs:
            setattr(choice, CUDAGRAPH_OPTION, True)
    return choices


@contextlib.contextmanager
def outside_the_scheduler() -> Iterator[None]:
    """Code of templates is generated at lowering time, when the graph has no scheduler yet."""
    from torch._inductor.virtualized import V

    before = getattr(V.graph, "scheduler", None)
    if before is None:
        yield
        return
    V.graph.scheduler = None
    try:
        yield
    finally:
        V.graph.scheduler = before


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
        is_alike = any(search.problem.id == s.problem.id for s in under_way)
        if is_alike or search.failed or search.tuned_ahead or None in buffer._choice_timings:
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
    for group in getattr(scheduler, "nodes", ()):
        for node in group.get_nodes():
            buffer = node.node
            if not isinstance(buffer, MultiTemplateBuffer):
                continue
            timings = getattr(
                buffer, "_choice_timings", None
            )  # a dictionary by size hint, where there are hints
            search = search_of(getattr(buffer, "_choices", ()))
            if isinstance(timings, dict) and None not in timings and search is not None:
                yield buffer, search
