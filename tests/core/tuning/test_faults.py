"""The loop when a part of it fails: candidates, harness, store, surrogate, policy or features. A call gets a config."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from forecast_autotune.errors import NoWorkingConfigError, RecordError, SettingsError
from forecast_autotune.features.traced_texts import collect_facts
from forecast_autotune.policy import Exhaustive, TuningState, WallTime
from forecast_autotune.records import Candidate, Decision, Evidence, Measurement, Outcome, Plan
from forecast_autotune.records.table import Table
from forecast_autotune.store import Store
from forecast_autotune.surrogates.protocol import Forecasts, Query
from forecast_autotune.tuning import loop
from forecast_autotune.tuning.loop import GuardedStore
from forecast_autotune.tuning.results import NEGLIGIBLE_GAIN, TuningStore
from tests.core.tuning.loop import TABLE, Bench, Told, constant, decide, outcomes, timed

FASTEST = min(m.ms for m in TABLE.measurements if m.ok)

# --- failures ---


def test_nothing_launches_lists_what_happened() -> None:
    table = outcomes(Outcome.COMPILE_ERROR, message="no such intrinsic")
    table.measurements[0] = Measurement(table.problem.id, TABLE.measurements[0].candidate, Outcome.TIMEOUT)
    store, bench = Store(None), Bench(table)
    expected = r"none of 15 candidates ran \(14 compile_error, 1 timeout\).*no such intrinsic"
    with pytest.raises(NoWorkingConfigError, match=expected):
        decide(store, bench)
    assert len(bench.asked) == 15
    assert bench.closed == 1
    assert store.decision(TABLE.problem) is None
    again = Bench(table)
    with pytest.raises(NoWorkingConfigError):
        decide(store, again)
    assert len(again.asked) == 14, "a compiler may have been mended; what hung the device is not tried again"
    assert TABLE.measurements[0].candidate not in again.asked


@pytest.mark.parametrize("settings", [{}, {"max_measurements": 2}, {"max_seconds": 0.001}])
def test_the_one_candidate_that_runs_is_found(settings: dict[str, Any]) -> None:
    """A budget must not leave the caller without a config: Triton would have found one."""
    table = outcomes(Outcome.OUT_OF_RESOURCES, but=11)
    decision = decide(Store(None), Bench(table), table=table, **settings)
    assert decision.chosen == TABLE.measurements[11].candidate


def test_out_of_resources_spares_the_larger_ones() -> None:
    """After one failure for want of shared memory, whoever needs more is not compiled any more."""

    def size(candidate: Candidate) -> int:
        return int(dict(candidate.config.kwargs)["BLOCK"] or 0)

    def by_size(query: Query) -> Forecasts:
        made = constant(sd=0.5)(query)
        made.mean[:] = [-float(size(c)) for c in query.candidates]
        failed = [size(m.candidate) for m in query.measured if m.outcome is Outcome.OUT_OF_RESOURCES]
        made.p_fail[:] = [0.95 * (size(c) >= min(failed, default=10**9)) for c in query.candidates]
        return made

    rows = [
        Measurement(m.problem, m.candidate, Outcome.OK, 1.0)
        if size(m.candidate) <= 32
        else Measurement(m.problem, m.candidate, Outcome.OUT_OF_RESOURCES)
        for m in TABLE.measurements
    ]
    bench = Bench(Table(TABLE.problem, rows))
    decision = decide(Store(None), bench, surrogate=Told(by_size))
    assert size(decision.chosen) <= 32
    tried = [c for c in bench.asked if size(c) > 32]
    assert tried, "the forecasts liked the large ones best"
    assert decision.refused == sum(not m.ok for m in rows) - len(tried) > 0


def test_a_broken_harness_gives_the_best_forecast_and_is_tried_again_later() -> None:
    store = Store(None)
    broken = Bench(outcomes(Outcome.INFRASTRUCTURE, message="CUDA out of memory"))
    with pytest.warns(UserWarning, match="CUDA out of memory"):
        decision = decide(store, broken)
    assert decision.evidence is Evidence.FORECAST
    assert 0 < len(broken.asked) < 15, "more of the same would follow"
    assert len(set(broken.asked)) == len(broken.asked)
    assert store.decision(TABLE.problem) is None, "a guess must not pass for a decision in frozen mode"
    healthy = Bench(TABLE)
    decision = decide(store, healthy)
    assert decision.evidence is Evidence.MEASURED
    assert decision.known == 0
    assert healthy.asked


def test_a_fault_beside_failures_never_gives_a_failed_candidate() -> None:
    table = outcomes(Outcome.COMPILE_ERROR)
    last = TABLE.measurements[14].candidate
    table.measurements[14] = Measurement(TABLE.problem.id, last, Outcome.INFRASTRUCTURE)
    with pytest.warns(UserWarning, match="nothing could be timed"):
        decision = decide(Store(None), Bench(table), policy=Exhaustive(), surrogate=Told(constant()))
    assert decision.chosen == last


def with_faults(table: Table, rows: Sequence[int]) -> Bench:
    """A bench whose children die for want of memory in these rows of a table."""
    faults = outcomes(Outcome.INFRASTRUCTURE, message="the compiler died (signal 9)").measurements
    return Bench(
        Table(TABLE.problem, [faults[i] if i in rows else m for i, m in enumerate(table.measurements)])
    )


@pytest.mark.parametrize("rows", [[0], list(range(1, 14))])
def test_faults_are_no_labels_and_what_they_kept_from_being_tried_is_tried_later(rows: list[int]) -> None:
    store, bench = Store(None), with_faults(TABLE, rows)
    with pytest.warns(
        UserWarning, match=rf"{len(rows)} of 15 candidates could not be tried.*signal 9.*WORKERS"
    ):
        decision = decide(store, bench, mode="exhaustive")
    assert len(bench.asked) == 15
    assert decision.measured == 15 - len(rows)
    assert decision.trusted == 0
    assert f"{len(rows)} could not be tried (the compiler died" in decision.reason
    assert store.decision(TABLE.problem) is None, "the best may be among them"
    GuardedStore(store).put_decision(TABLE.problem, decision)
    assert store.decision(TABLE.problem) is None, "nor does another rank store it that adopts it"
    healthy = Bench(TABLE)
    later = decide(store, healthy, mode="exhaustive")
    assert set(healthy.asked) == {TABLE.measurements[i].candidate for i in rows}
    assert later.stated_risk == 0.0
    assert store.decision(TABLE.problem) == later


@pytest.mark.parametrize(("lost", "is_stored"), [(0, False), (2, True)])
def test_the_risk_of_a_decision_counts_what_could_not_be_tried(lost: int, is_stored: bool) -> None:
    """The first is forecast to take half of the second's time, all others four times as long."""
    names = [m.candidate for m in TABLE.measurements]

    def forecast(query: Query) -> Forecasts:
        log2_ms = {names[0]: 0.0, names[1]: 1.0}
        mean = np.array([log2_ms.get(c, 2.0) for c in query.candidates])
        return replace(constant(sd=0.01)(query), mean=mean)

    store, bench = Store(None), with_faults(timed({names[0]: 1.0, names[1]: 2.0}, 4.0), [lost])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        decision = decide(store, bench, surrogate=Told(forecast), policy=WallTime(fewest=15))
    assert names[lost] in bench.asked
    assert (store.decision(TABLE.problem) is not None) == is_stored
    assert (decision.stated_risk < 0.1) == is_stored
    assert len(said) == (not is_stored)


# --- surrogates that fail ---


def raising(query: Query) -> Forecasts:
    raise OSError("no weights")


def nan_mean(query: Query) -> Forecasts:
    made = constant()(query)
    made.mean[2] = math.nan
    return made


BAD: list[Callable[[Query], Forecasts]] = [
    raising,
    nan_mean,
    lambda q: constant()(replace(q, candidates=q.candidates[:-1])),
    lambda q: replace(constant()(q), sd=np.ones((len(q.candidates), 1))),
    lambda q: constant()(replace(q, candidates=list(reversed(q.candidates)))),
    constant(p_fail=1.5),
]


@pytest.mark.parametrize(
    "say", BAD, ids=["raising", "nan_mean", "short", "wrong_shape", "other_order", "no_probability"]
)
def test_a_bad_surrogate_means_measuring_everything_or_the_first_config(
    say: Callable[[Query], Forecasts],
) -> None:
    bench = Bench(TABLE)
    with pytest.warns(UserWarning, match="surrogate told failed .*measuring everything"):
        decision = decide(Store(None), bench, surrogate=Told(say))
    assert set(bench.asked) == set(TABLE.by_candidate())
    assert FASTEST <= (decision.median_ms or 0.0) <= FASTEST * (1 + NEGLIGIBLE_GAIN)
    assert math.isfinite(decision.stated_risk)
    with pytest.warns(UserWarning, match="surrogate told failed .*using the first config"):
        decision = decide(Store(None), Bench(TABLE), surrogate=Told(say), mode="skip")
    assert decision.chosen == TABLE.measurements[0].candidate, "without a clock"


def test_a_surrogate_that_fails_half_way_keeps_what_was_measured() -> None:
    def tired(query: Query) -> Forecasts:
        return raising(query) if query.measured else constant()(query)

    bench = Bench(TABLE)
    with pytest.warns(UserWarning, match="no weights"):
        decide(Store(None), bench, surrogate=Told(tired))
    assert Counter(bench.asked) == Counter(list(TABLE.by_candidate()))


@pytest.mark.parametrize("fault", ["raises", "nan", "shape"])
def test_bad_joint_samples_are_replaced_by_independent_ones(fault: str) -> None:
    def sampler(rows: Any, count: int, generator: Any) -> Any:
        if fault == "raises":
            raise np.linalg.LinAlgError("Eigenvalues did not converge")
        return np.full((count, len(rows) + (fault == "shape")), math.nan if fault == "nan" else 0.0)

    bench = Bench(TABLE)
    with pytest.warns(UserWarning, match="joint samples failed"):
        decision = decide(
            Store(None), bench, surrogate=Told(lambda q: replace(constant()(q), sampler=sampler))
        )
    assert decision.evidence is Evidence.MEASURED


def test_a_trace_that_fails_is_survived() -> None:
    def trace(wanted: Sequence[Candidate]) -> dict[str, str]:
        raise RuntimeError("no front end")

    with pytest.warns(UserWarning, match="no front end"):
        decision = decide(Store(None), Bench(TABLE), given={"trace": trace})
    assert decision.evidence is Evidence.MEASURED


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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["tune", "skip", "exhaustive", "deterministic"])
def test_features_that_fail_are_done_without(mode: str) -> None:
    decision = decide(Store(None), Bench(TABLE), mode=mode, given={"grids": FaultyGrids()})
    assert decision.chosen in TABLE.by_candidate()


def test_a_decision_on_a_candidate_that_nobody_offers_is_made_anew() -> None:
    store = Store(None)
    first = decide(store, Bench(TABLE))
    rest = [c for c in TABLE.by_candidate() if c != first.chosen]
    strange = Candidate(replace(first.chosen.config, num_warps=first.chosen.config.num_warps + 1))
    store.put_decision(TABLE.problem, replace(first, chosen=strange))
    for mode in ("tune", "skip", "frozen"):
        assert decide(store, Bench(TABLE), mode=mode).chosen in {first.chosen, *rest}


def test_where_nothing_runs_the_error_says_what_the_compiler_said_to_its_end() -> None:
    """The reason stands behind an excerpt of the source, often farther than a line or two."""
    said = "CompilationError: at 3:20:\n" + "    tl.store(...)\n" * 40 + "NameError('scale is not defined')"
    table = outcomes(Outcome.COMPILE_ERROR, message=said)
    with pytest.raises(NoWorkingConfigError, match=r"Mend what the compiler says") as raised:
        decide(Store(None), Bench(table))
    assert str(raised.value).endswith("NameError('scale is not defined')")
    with (
        pytest.warns(UserWarning, match="the tuner failed"),
        pytest.raises(NoWorkingConfigError, match=r"none of 15 candidates ran .*CompilationError"),
    ):
        decide(Store(None), Bench(table), policy=FaultyPolicy())


@pytest.mark.parametrize(
    ("outcome", "remedy"),
    [(Outcome.OUT_OF_RESOURCES, "config that fits"), (Outcome.RUNTIME_ERROR, "what the launch says")],
)
def test_where_nothing_runs_the_remedy_is_the_outcomes(outcome: Outcome, remedy: str) -> None:
    with pytest.raises(NoWorkingConfigError, match=remedy):
        decide(Store(None), Bench(outcomes(outcome, message="it failed")))


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
