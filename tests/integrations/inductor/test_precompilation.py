"""Choices that compile far longer than the others of their list are left out of it, and nobody waits for them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._inductor import select_algorithm
from torch._inductor.async_compile import AsyncCompile

from forecast_autotune.settings import Mode
from forecast_integrations.inductor.choices.records import candidate_of
from forecast_integrations.inductor.hooks import precompilation
from forecast_integrations.inductor.hooks.context import HookContext
from forecast_integrations.inductor.pruning import SEARCH_ATTRIBUTE
from tests.integrations.inductor.graphs import serving
from tests.integrations.inductor.test_choice_timing import choice


class Clock:
    """Time passes when it is looked at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(precompilation, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(precompilation, "wait", self.wait)

    def wait(self, futures: set[Future[Any]], seconds: float, when: str) -> tuple[set[Future[Any]], Any]:
        done = {f for f in futures if f.done()}
        if not done:
            self.now += seconds
            for future in futures:
                if getattr(future, "ends", 1e9) <= self.now:
                    future.set_result(None)
        return done, futures - done


class Search:
    """As much of a search as knows the best forecast, and what is set aside."""

    def __init__(self) -> None:
        self.aside: list[Any] = []
        self.best: list[Any] = []

    def ranked(self) -> list[Any]:
        return self.best

    def set_aside(self, candidate: Any) -> None:
        self.aside.append(candidate)


class Graph:
    """Choices that workers compile in so many seconds each, with the hooks in place."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.clock, self.search = Clock(monkeypatch), Search()
        self.context = HookContext(serving(**settings))
        self.begun: list[Future[Any]] = []
        monkeypatch.setattr(AsyncCompile, "triton", lambda _, ends: SimpleNamespace(future=self._begin(ends)))
        self.patches = precompilation.install(self.context)
        assert self.patches.missing == []

    def _begin(self, ends: float) -> Future[Any]:
        future: Any = Future()
        future.ends = ends
        self.begun.append(future)
        return future  # type: ignore[no-any-return]

    def compiling(self, *seconds: float) -> dict[Future[Any], Any]:
        found = {}
        for number, ends in enumerate(seconds):
            one = choice(f"c{number}")
            one.failed = False
            one.mark_failed = lambda one=one: setattr(one, "failed", True)
            setattr(one, SEARCH_ATTRIBUTE, self.search)
            begin: Any = AsyncCompile.triton
            found[begin(None, self.clock.now + ends).future] = one
        return found


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> Iterator[Graph]:
    made = Graph(monkeypatch)
    yield made
    made.patches.restore()


def waited_for(futures: dict[Future[Any], Any], **options: Any) -> list[bool]:
    """Which of them are done when nobody waits any more."""
    list(select_algorithm.as_completed(futures, **options))
    return [f.done() for f in futures]


def test_what_takes_three_times_as_long_as_half_of_them_is_left_out(graph: Graph) -> None:
    futures = graph.compiling(0.5, 0.4, 9.0, 1.4, 0.3)
    assert waited_for(futures) == [True, True, False, True, True]
    assert [c.failed for c in futures.values()] == [False, False, True, False, False]
    assert graph.search.aside == [candidate_of(list(futures.values())[2])]
    assert graph.clock.now == pytest.approx(1.5, abs=0.1)


def test_inductors_own_limit_stays(graph: Graph) -> None:
    with pytest.raises(TimeoutError, match="2 of 2 choices"):
        waited_for(graph.compiling(8.0, 9.0), timeout=1)


INDUCTORS = ["what Inductor waits for"]


@pytest.fixture
def inductors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's own way of waiting, which here waits for nothing."""
    monkeypatch.setattr(select_algorithm, "as_completed", lambda futures, timeout=None: INDUCTORS)


@pytest.mark.usefixtures("inductors")
def test_what_no_worker_compiles_is_waited_for_as_by_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its threads are joined in any case."""
    graph = Graph(monkeypatch)
    try:
        futures = graph.compiling(0.5, 0.4)
        assert list(select_algorithm.as_completed(futures)) != INDUCTORS
        futures[Future()] = choice("thread")
        assert list(select_algorithm.as_completed(futures)) == INDUCTORS
    finally:
        graph.patches.restore()


@pytest.mark.usefixtures("inductors")
@pytest.mark.parametrize("mode", [Mode.EXHAUSTIVE, Mode.LISTEN])
def test_where_everything_is_to_be_timed_inductor_waits(monkeypatch: pytest.MonkeyPatch, mode: Mode) -> None:
    graph = Graph(monkeypatch, mode=mode)
    try:
        assert list(select_algorithm.as_completed(graph.compiling(0.5, 9.0))) == INDUCTORS
    finally:
        graph.patches.restore()
