"""Whatever fails of ours, store, surrogate, policy or features, a decision is made, with one warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from forecast_autotune.errors import NoWorkingConfigError, RecordError, SettingsError
from forecast_autotune.features.stored_facts import collect_facts
from forecast_autotune.policy import TuningState
from forecast_autotune.records import Candidate, Decision, Evidence, Measurement, Outcome, Plan
from forecast_autotune.settings import Settings
from forecast_autotune.store import Store
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.tuning import loop
from forecast_autotune.tuning.loop import GuardedStore, TuningTask, tune
from forecast_autotune.tuning.results import TuningStore
from tests.core.tuning.loop import TABLE, Bench, constant, decide, outcomes

FASTEST = min(m.ms for m in TABLE.measurements if m.ok)
METHODS = [
    *("measurements", "relatives", "add", "decision", "put_decision", "verdicts", "tuning_lock", "recover"),
    *("sync", "facts", "put_facts", "advice"),
]


class FaultyStore(Store):
    """A store of which one method fails."""

    def __init__(self, method: str, error: Exception) -> None:
        super().__init__(None)

        def fail(*_: Any, **__: Any) -> Any:
            raise error

        setattr(self, method, fail)


def once(act: Callable[[], Decision], match: str) -> Decision:
    """What `act` decides, giving one warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        decision = act()
    (said,) = {str(w.message) for w in caught}
    assert match in said
    return decision


@pytest.mark.parametrize("error", [TypeError("a bug"), RecordError("a bug"), OverflowError("a bug")])
@pytest.mark.parametrize("method", METHODS)
def test_a_store_that_fails_costs_a_warning(method: str, error: Exception) -> None:
    bench = Bench(TABLE)
    if method in ("facts", "put_facts"):  # there are none to keep of a table
        decision = decide(FaultyStore(method, error), bench)
    else:
        decision = once(lambda: decide(FaultyStore(method, error), bench), "the store failed")
    assert decision.evidence is Evidence.MEASURED
    assert len(bench.asked) == len(set(bench.asked)), "what could not be kept is still known"


@pytest.mark.parametrize("mode", ["skip", "frozen", "tune"])
def test_a_store_that_fails_altogether_is_done_without(mode: str) -> None:
    class Broken(Store):
        def __getattribute__(self, name: str) -> Any:
            if name in METHODS:
                raise RuntimeError("a bug")
            return super().__getattribute__(name)

    settings = {"on_miss": "forecast"} if mode == "frozen" else {}
    decision = once(lambda: decide(Broken(None), Bench(TABLE), mode=mode, **settings), "the store failed")
    assert decision.chosen in TABLE.by_candidate()


class FaultyPolicy:
    name = "faulty"

    def plan(self, state: TuningState) -> Plan:
        raise ZeroDivisionError("a bug")


def test_a_policy_that_fails_means_measuring_everything() -> None:
    store, bench = Store(None), Bench(TABLE)
    decision = once(lambda: decide(store, bench, policy=FaultyPolicy()), "the tuner failed")
    assert decision.median_ms == FASTEST
    assert decision.stated_risk == 0.0
    assert "a bug" in decision.reason
    assert store.decision(TABLE.problem) is None, "the next process tries again"
    assert bench.closed == bench.made
    again = Bench(TABLE)
    once(lambda: decide(store, again, policy=FaultyPolicy()), "the tuner failed")
    assert again.asked == [], "nothing is measured twice"


@pytest.mark.parametrize("part", ["name", "version"])
def test_a_surrogate_that_has_no_name_is_done_without(part: str) -> None:
    class Nameless:
        name, version = "nameless", "1"
        forecast = staticmethod(constant())

        def __getattribute__(self, called: str) -> Any:
            if called == part:
                raise LookupError("a bug")
            return super().__getattribute__(called)

    decision = once(lambda: decide(Store(None), Bench(TABLE), surrogate=Nameless()), "failed")
    assert decision.median_ms == FASTEST


class FaultyGrids(Mapping[Candidate, tuple[int, ...]]):
    def __getitem__(self, candidate: Candidate) -> tuple[int, ...]:
        raise ArithmeticError("a bug")

    def __iter__(self) -> Iterator[Candidate]:
        raise ArithmeticError("a bug")

    def __len__(self) -> int:
        raise ArithmeticError("a bug")

    get = __getitem__  # type: ignore[assignment]


@pytest.mark.parametrize("mode", ["tune", "skip", "exhaustive", "deterministic"])
def test_features_that_fail_are_done_without(mode: str) -> None:
    task = TuningTask(TABLE.problem, list(TABLE.by_candidate()), grids=FaultyGrids())

    def act() -> Decision:
        settings = Settings().with_(mode=mode)
        return tune(task, Bench(TABLE), store=Store(None), surrogate=AnalyticSurrogate(), settings=settings)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert act().chosen in TABLE.by_candidate()


def test_a_decision_on_a_candidate_that_nobody_offers_is_made_anew() -> None:
    store = Store(None)
    first = decide(store, Bench(TABLE))
    rest = [c for c in TABLE.by_candidate() if c != first.chosen]
    strange = Candidate(replace(first.chosen.config, num_warps=first.chosen.config.num_warps + 1))
    store.put_decision(TABLE.problem, replace(first, chosen=strange))
    for mode in ("tune", "skip", "frozen"):
        assert decide(store, Bench(TABLE), mode=mode).chosen in {first.chosen, *rest}


def test_where_nothing_runs_the_error_says_so() -> None:
    bench = Bench(outcomes(Outcome.COMPILE_ERROR, message="no such intrinsic"))
    with (
        pytest.warns(UserWarning, match="the tuner failed"),
        pytest.raises(NoWorkingConfigError, match=r"none of 15 candidates ran .*no such intrinsic"),
    ):
        decide(Store(None), bench, policy=FaultyPolicy())


def test_what_the_caller_got_wrong_is_the_callers_to_see() -> None:
    class Wrong(FaultyPolicy):
        def plan(self, state: TuningState) -> Plan:
            raise SettingsError("a limit below 0")

    with pytest.raises(SettingsError):
        decide(Store(None), Bench(TABLE), policy=Wrong())


class NoHarness(Bench):
    """Where a call is made of what the caller gave, that raises what it got wrong."""

    def __init__(self, part: str) -> None:
        super().__init__(TABLE)
        self.part, self.raised = part, 0

    def _fail(self, part: str) -> None:
        if part == self.part:
            self.raised += 1
            raise KeyError("BLOK")

    def __call__(self) -> Bench:
        self._fail("make")
        return super().__call__()

    def measure(self, *args: Any, **options: Any) -> Iterator[Measurement]:
        self._fail("measure")
        return super().measure(*args, **options)

    def compare(self, *args: Any) -> list[Measurement]:
        self._fail("compare")
        return super().compare(*args)


@pytest.mark.parametrize("part", ["make", "measure", "compare"])
def test_what_a_measurer_raises_is_raised_at_once(part: str) -> None:
    bench = NoHarness(part)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(KeyError, match="BLOK"):
            decide(Store(None), bench, mode="exhaustive")
    assert bench.raised == 1


class BareStore:
    """No more than a store must have."""

    def __init__(self) -> None:
        self._kept = Store(None)

    def __getattr__(self, method: str) -> Any:
        if method not in vars(TuningStore):
            raise AttributeError(method)
        return getattr(self._kept, method)


def test_no_facts_are_collected_for_a_store_that_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    collected: list[Any] = []

    def collect(*args: Any, **options: Any) -> Mapping[str, Any]:
        collected.append(args)
        return collect_facts(*args, **options)

    monkeypatch.setattr(loop, "collect_facts", collect)
    bare: Any = BareStore()
    for store, count in ((bare, 0), (Store(None), 1)):
        for kept_by in (GuardedStore(store), GuardedStore(GuardedStore(store))):
            assert kept_by.keeps("put_facts") == bool(count)
        decide(store, Bench(TABLE))
        assert len(collected) == count
