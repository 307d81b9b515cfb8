"""Choices that compile far longer than the others of their list are not waited for.

Inductor times nothing of an operation before all of its choices are compiled. A tile that spills keeps an assembler
busy for 2 to 8 s where the others of its list take 0.5 s, and is the fastest hardly ever. A late choice is left out
of the list, goes on compiling in its worker, and is not requested again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from forecast_autotune.settings import Mode
from forecast_integrations.inductor import pruning
from forecast_integrations.inductor.choices.records import candidate_of
from forecast_integrations.inductor.hooks.context import AnyFunction, HookContext, PatchSet

if TYPE_CHECKING:
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.ir import ChoiceCaller

    from forecast_integrations.inductor.operation_search import OperationSearch

_LEAST_WAIT_S = 1.0
"""Seconds after the start of its compilation before which no choice is late."""
_TIMES_THE_USUAL = 3.0
"""Times as long as half of its list took: then a choice is late. A longer compilation speaks against a candidate in
lists of public libraries, too."""
_BEST_TIMES_THE_USUAL = 9.0
"""The same for the one of the best forecast."""
_LOOK_S = 0.02
"""Seconds between two looks at what is late."""


class WorkerCompilations:
    """When the compilations of Inductor's workers began and ended, by `time.perf_counter`."""

    def __init__(self) -> None:
        self._began: WeakKeyDictionary[Future[Any], float] = WeakKeyDictionary()
        self._ended: WeakKeyDictionary[Future[Any], float] = WeakKeyDictionary()

    def note(self, future: Future[Any]) -> None:
        """It was begun just now, unless it is known."""
        if future not in self._began:
            self._began[future] = time.perf_counter()
            future.add_done_callback(lambda f: self._ended.__setitem__(f, time.perf_counter()))

    def knows(self, futures: Iterable[Future[Any]]) -> bool:
        """Whether all of them were begun in workers."""
        return all(future in self._began for future in futures)

    def usual_s(self, futures: Mapping[Future[Any], object]) -> float:
        """Seconds within which half of them were done, waits for a worker included; inf while they are not."""
        took = sorted(self._ended[f] - self._began[f] for f in futures if f in self._ended)
        middle = math.ceil(len(futures) / 2)
        return took[middle - 1] if len(took) >= middle else math.inf

    def age_s(self, future: Future[Any]) -> float:
        """Seconds since it was begun."""
        return time.perf_counter() - self._began[future]


def install(context: HookContext) -> PatchSet:
    """Hook what begins to compile choices, and what waits for them."""
    from torch._inductor import select_algorithm
    from torch._inductor.async_compile import AsyncCompile

    patches, times = PatchSet(), WorkerCompilations()
    patches.replace(AsyncCompile, "triton", lambda f: _begun(f, times))
    patches.replace(select_algorithm, "as_completed", lambda f: _as_completed(f, context, times))
    return patches


def _begun(original: AnyFunction, times: WorkerCompilations) -> AnyFunction:
    """`AsyncCompile.triton`: begins to compile a kernel in a worker."""

    def triton(self: AsyncCompile, *args: object, **kwargs: object) -> Any:
        kernel = original(self, *args, **kwargs)
        if isinstance(future := getattr(kernel, "future", None), Future):
            times.note(future)
        return kernel

    return triton


def _as_completed(original: AnyFunction, context: HookContext, times: WorkerCompilations) -> AnyFunction:
    """`as_completed` of the module that waits for an operation's choices; they are the values of a mapping."""

    def as_completed(futures: Any, timeout: float | None = None) -> Iterator[Future[Any]]:
        session = context.session
        tunes = session is not None and session.prunes and session.settings.mode is Mode.TUNE
        if not tunes or not isinstance(futures, Mapping) or not times.knows(futures):
            return iter(original(futures, timeout=timeout))
        return _in_time(futures, times, math.inf if timeout is None else timeout)

    return as_completed


def _in_time(
    futures: Mapping[Future[Any], ChoiceCaller], times: WorkerCompilations, timeout: float
) -> Iterator[Future[Any]]:
    """Futures as they are done, without those that are late, which are left out of their lists.

    Raises TimeoutError after so many seconds.
    """
    ends, pending = time.perf_counter() + timeout, set(futures)
    while pending:
        ended, pending = wait(pending, _LOOK_S, FIRST_COMPLETED)
        yield from ended
        if pending and time.perf_counter() > ends:
            raise TimeoutError(f"{len(pending)} of {len(futures)} choices did not compile in {timeout:g} s")
        usual_s = times.usual_s(futures)
        for future in tuple(pending):
            choice = futures[future]
            if (search := _search_of_late(choice, times.age_s(future), usual_s)) is not None:
                pending.remove(future)
                choice.mark_failed()  # Inductor goes on with those that are not
                search.set_aside(candidate_of(choice))


def _search_of_late(choice: ChoiceCaller, age_s: float, usual_s: float) -> OperationSearch | None:
    """The search that a choice is to be left out of; None while it is waited for."""
    if age_s <= max(_LEAST_WAIT_S, _TIMES_THE_USUAL * usual_s):
        return None
    search = pruning.search_of([choice])
    if search is None or not hasattr(choice, "mark_failed"):
        return None
    is_best = next(iter(search.ranked()), None) == candidate_of(choice)
    return None if is_best and age_s <= _BEST_TIMES_THE_USUAL * usual_s else search
