"""The loop: what is measured, kept, reused and decided."""

from __future__ import annotations

import math
import random
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forecast_autotune.errors import FrozenMissError
from forecast_autotune.features.candidate_list import CandidateList
from forecast_autotune.policy import Exhaustive, Fixed, Policy, RiskBounded, WallTime
from forecast_autotune.records import Candidate, Decision, Evidence, Measurement, Outcome
from forecast_autotune.records.candidate import IN_TURNS
from forecast_autotune.records.table import Table, latest_labels
from forecast_autotune.settings import Mode
from forecast_autotune.store import Store
from forecast_autotune.surrogates.protocol import Forecasts, Query
from forecast_autotune.tuning.loop import fingerprint
from forecast_autotune.tuning.rechecks import ROUNDS, Rechecks, bet, is_refuted
from forecast_autotune.tuning.results import FINALIST_MARGIN, NEGLIGIBLE_GAIN, TaskResults
from tests.core.tuning.loop import TABLE, Bench, Told, constant, decide, outcomes, timed

# --- the store ---


def test_a_decision_is_near_the_best_and_measures_a_part() -> None:
    bench = Bench(TABLE)
    decision = decide(Store(None), bench)
    best = min(m.ms for m in TABLE.measurements if m.ok)
    assert decision.median_ms is not None
    assert decision.median_ms <= best * 1.1
    assert decision.evidence is Evidence.MEASURED
    assert decision.measured == len(bench.asked) < decision.candidates == 15
    assert decision.trusted + decision.refused + decision.measured == 15
    assert len(set(bench.asked)) == len(bench.asked)
    assert (bench.made, bench.closed) == (1, 1)


def test_a_stored_decision_needs_neither_clock_nor_model() -> None:
    store, table = Store(None), TABLE
    first = decide(store, Bench(table))
    bench, surrogate = Bench(table), Told(constant())
    again = decide(store, bench, surrogate=surrogate)
    assert (bench.made, surrogate.queries) == (0, [])
    assert again == replace(first, evidence=Evidence.STORED, measured=0, known=first.measured)


@pytest.mark.parametrize(
    "change", [{"tolerance": 0.5}, {"risk": 0.9}, {"max_measurements": 9}, {"policy": Fixed(3)}]
)
def test_other_settings_decide_anew_from_what_is_stored(change: dict[str, Any]) -> None:
    store, first = Store(None), Bench(TABLE)
    decide(store, first)
    second = Bench(TABLE)
    decision = decide(store, second, **change)
    assert not set(second.asked) & set(first.asked), "measured what was known"
    assert decision.known == len(first.asked)
    assert decision.measured == len(second.asked)
    best = min(m.ms for m in store.measurements(TABLE.problem) if m.ok)
    assert best <= (decision.median_ms or 0.0) <= best * (1 + NEGLIGIBLE_GAIN)


def test_other_candidates_decide_anew_from_what_is_stored() -> None:
    store, first = Store(None), Bench(TABLE)
    decide(store, first, policy=Exhaustive())
    fewer = [m.candidate for m in TABLE.measurements if m.ok][:5]
    bench = Bench(TABLE)
    decision = decide(store, bench, candidates=fewer, policy=Exhaustive())
    assert bench.made == 0
    assert decision.evidence is Evidence.STORED
    assert decision.chosen == min(TABLE.measurements[:5], key=lambda m: m.ms).candidate
    assert (decision.candidates, decision.known) == (5, 5)


def test_the_order_of_the_candidates_is_no_reason_to_decide_anew() -> None:
    store = Store(None)
    decide(store, Bench(TABLE))
    bench = Bench(TABLE)
    decide(store, bench, candidates=list(reversed(list(TABLE.by_candidate()))))
    assert bench.made == 0
    names = list(TABLE.by_candidate())
    assert fingerprint(names) == fingerprint(names[::-1]) != fingerprint(names[1:])


def test_every_measurement_notes_what_was_forecast() -> None:
    store, bench = Store(None), Bench(TABLE)
    decide(store, bench)
    for m in store.measurements(TABLE.problem):
        noted = m.extra["forecast"]
        assert noted["surrogate"].startswith("analytic/")
        assert math.isfinite(noted["log2_ms"])
        assert noted["sd"] > 0
        assert 0 <= noted["p_fail"] <= 1
        assert "audit_probability" not in m.extra


@pytest.mark.parametrize("after", [0, 1, 4])
def test_an_interrupted_decision_loses_nothing(tmp_path: Path, after: int) -> None:
    bench = Bench(TABLE, stop_after=after)
    with pytest.raises(KeyboardInterrupt):
        decide(Store(tmp_path), bench, policy=Exhaustive())
    assert bench.closed == 1
    store = Store(tmp_path)  # as another process would
    assert [m.candidate for m in store.measurements(TABLE.problem)] == bench.asked
    assert store.decision(TABLE.problem) is None
    with store.tuning_lock(TABLE.problem, 0.0) as held:
        assert held
    rest = Bench(TABLE)
    decision = decide(store, rest, policy=Exhaustive())
    assert Counter([*bench.asked, *rest.asked]) == Counter(list(TABLE.by_candidate()))
    assert (decision.known, decision.measured) == (after, 15 - after)


# --- modes ---


def test_skip_never_measures_and_takes_the_best_forecast() -> None:
    def second_is_best(query: Query) -> Forecasts:
        made = constant()(query)
        made.mean[1] = -2.0
        return made

    store, bench = Store(None), Bench(TABLE)
    decision = decide(store, bench, surrogate=Told(second_is_best), mode="skip")
    assert bench.made == 0
    assert decision.chosen == TABLE.measurements[1].candidate
    assert decision.evidence is Evidence.FORECAST
    assert decision.median_ms is None
    assert store.decision(TABLE.problem) is None, "a forecast must not pass for a decision later"


def test_skip_prefers_what_was_measured_and_avoids_what_failed() -> None:
    store = Store(None)
    surrogate = Told(constant())
    store.add(TABLE.problem, outcomes(Outcome.COMPILE_ERROR).measurements[0])
    decision = decide(store, Bench(TABLE), surrogate=surrogate, mode="skip")
    assert decision.chosen == TABLE.measurements[1].candidate, "the first is known to fail"
    store.add(TABLE.problem, TABLE.measurements[7])
    decision = decide(store, Bench(TABLE), surrogate=surrogate, mode="skip")
    assert decision.chosen == TABLE.measurements[7].candidate
    assert decision.evidence is Evidence.STORED
    assert decision.median_ms == TABLE.measurements[7].ms


@pytest.mark.parametrize("mode", ["skip", "frozen"])
def test_skip_and_frozen_accept_a_decision_made_under_other_settings(mode: str) -> None:
    store = Store(None)
    first = decide(store, Bench(TABLE), tolerance=0.5)
    bench = Bench(TABLE)
    assert decide(store, bench, mode=mode).chosen == first.chosen
    assert bench.made == 0


def test_frozen_raises_on_a_miss_and_names_the_remedy() -> None:
    store, bench = Store(None), Bench(TABLE)
    with pytest.raises(
        FrozenMissError, match=r"kernel example with key \('4096',\).*FORECAST_AUTOTUNE_MODE=tune"
    ):
        decide(store, bench, mode="frozen")
    assert bench.made == 0
    decision = decide(store, bench, mode="frozen", on_miss="forecast")
    assert decision.evidence is Evidence.FORECAST
    near, worst = (
        replace(TABLE.problem, id="0" * 24),
        max((m for m in TABLE.measurements if m.ok), key=lambda m: m.ms),
    )
    store.add(near, replace(worst, problem=near.id))
    store.put_decision(near, replace(decision, problem=near.id, chosen=worst.candidate))
    served = decide(store, bench, mode="frozen", on_miss="forecast")
    assert (served.chosen, served.evidence, served.stated_risk) == (worst.candidate, Evidence.STORED, 1.0)
    elsewhere = replace(TABLE.problem, key=("other",), id="1" * 24)
    table, listed = Table(elsewhere, ()), list(TABLE.by_candidate())
    decision = decide(store, bench, table=table, candidates=listed, mode="frozen", on_miss="forecast")
    assert decision.evidence is Evidence.FORECAST, "another key"
    store.add(TABLE.problem, TABLE.measurements[2])
    assert decide(store, bench, mode="frozen").chosen == TABLE.measurements[2].candidate
    assert bench.made == 0


def test_exhaustive_measures_everything_whatever_the_policy_and_takes_the_kernels_ir_along() -> None:
    store, bench = Store(None), Bench(TABLE)
    given = {"trace": lambda wanted: {f"N={len(wanted)}": "module {}"}}
    decision = decide(store, bench, mode="exhaustive", policy=Fixed(1), given=given)
    assert set(bench.asked) == set(TABLE.by_candidate())
    assert decision.stated_risk == 0.0
    assert decision.median_ms == min(m.ms for m in TABLE.measurements if m.ok)
    (table,) = store.tables()
    assert table.problem.ttir == {"N=5": "module {}"}, "five blocks; warps do not change the IR"


def test_listening_measures_all_that_the_host_would() -> None:
    bench = Bench(TABLE)
    decision = decide(Store(None), bench, surrogate=Told(constant(sd=0.0)), mode=Mode.LISTEN)
    assert set(bench.asked) == set(TABLE.by_candidate())
    assert decision.median_ms <= (1.0 + NEGLIGIBLE_GAIN) * min(m.ms for m in TABLE.measurements if m.ok)


def test_deterministic_uses_neither_clock_nor_store() -> None:
    fresh = decide(Store(None), Bench(TABLE), mode="deterministic")
    store, bench = Store(None), Bench(TABLE)
    for m in TABLE.measurements:
        store.add(TABLE.problem, m)
    decide(store, Bench(TABLE))
    decision = decide(store, bench, mode="deterministic")
    assert bench.made == 0
    assert (decision.chosen, decision.stated_risk) == (fresh.chosen, fresh.stated_risk)
    assert decision.evidence is Evidence.FORECAST


# --- budgets ---


@pytest.mark.parametrize(("budget", "most"), [({"max_gpu_seconds": 0.06}, 5), ({"max_seconds": 1.2}, 14)])
def test_a_budget_of_seconds_ends_a_round_between_candidates(budget: dict[str, float], most: int) -> None:
    """A timing takes 0.012 simulated seconds; the exhaustive plan is one round of 15."""
    bench = Bench(TABLE)
    decision = decide(Store(None), bench, policy=Exhaustive(), **budget)
    assert 0 < len(bench.asked) <= most
    assert decision.evidence is Evidence.MEASURED
    assert "budget" in decision.reason


# --- audits, ties, finalists, relatives ---


def test_audits_are_logged_with_their_probability_and_there_is_none_by_default() -> None:
    store, bench = Store(None), Bench(TABLE)
    decision = decide(store, bench, audit=1.0, surrogate=Told(constant(5.0, sd=0.1)), policy=RiskBounded())
    noted = {m.candidate: m.extra.get("audit_probability") for m in store.measurements(TABLE.problem)}
    assert len(noted) == 15
    assert Counter(noted.values()) == {None: 3, 1.0: 12}
    assert any("audit" in reason for reason in decision.rounds)
    store = Store(None)
    decide(store, Bench(TABLE), surrogate=Told(constant(5.0, sd=0.1)))
    assert len(store.measurements(TABLE.problem)) == WallTime().fewest


def sure_of_the_second(query: Query, group: str = "informed") -> Forecasts:
    made = constant(0.0, sd=0.01)(query)
    made.mean[list(query.candidates).index(TABLE.measurements[1].candidate)] = -5.0
    return replace(made, group=group)


def test_nothing_is_timed_where_the_calibrated_risk_of_that_is_accepted() -> None:
    store, bench, told = Store(None), Bench(TABLE), Told(sure_of_the_second)
    decision = decide(store, bench, surrogate=told)
    assert (bench.asked, decision.measured, decision.evidence) == ([], 0, Evidence.FORECAST)
    assert decision.chosen == TABLE.measurements[1].candidate
    assert decision.is_untimed
    assert 0.0 < decision.stated_risk <= 0.1
    assert decide(Store(None), bench, surrogate=told, mode="skip").stated_risk == decision.stated_risk
    assert decide(store, bench, surrogate=told).evidence is Evidence.STORED
    assert bench.asked == []
    bench = Bench(TABLE)
    assert not decide(store, bench, surrogate=told, risk=0.05).is_untimed, "a smaller risk needs the clock"
    assert len(bench.asked) > 1
    assert decide(Store(None), Bench(TABLE), surrogate=told, policy=RiskBounded()).measured, (
        "another tool's rounds"
    )
    two = [*TABLE.by_candidate(), replace(TABLE.measurements[0].candidate, variant="other")]
    assert decide(Store(None), Bench(TABLE), surrogate=told, candidates=two, max_measurements=2).measured == 2
    other = replace(TABLE.problem, id="other", key=("other",))
    near = Store(None)
    near.add_all(
        other,
        [replace(m, problem="other", median_ms=1.0 + (i != 1)) for i, m in enumerate(TABLE.measurements[:2])],
    )
    proven = decide(near, bench, surrogate=told, mode="skip")
    assert proven.stated_risk < decision.stated_risk, "it was the fastest of another shape, too"
    bare = Told(lambda query: sure_of_the_second(query, ""))
    assert not decide(Store(None), Bench(TABLE), surrogate=bare).is_untimed, "nobody has calibrated it"


class Drifting(Bench):
    """Compares in turns, with noise; the second config of the table is slower by a share."""

    def __init__(self, seed: int, drift: float) -> None:
        super().__init__(TABLE)
        self._noise, self._drift, self._victim = random.Random(seed), drift, TABLE.measurements[1].candidate
        good = TABLE.measurements[1].ms
        self._rows |= {
            c: replace(m, median_ms=good, p20_ms=None, p80_ms=None) for c, m in self._rows.items() if m.ok
        }

    def compare(self, candidates: Sequence[Candidate]) -> list[Measurement]:
        super().compare(candidates)
        rows = [replace(self._rows[c], protocol=IN_TURNS) for c in candidates]
        slower = [1.0 + self._drift * (c == self._victim) for c in candidates]
        return [
            replace(m, median_ms=m.ms * x * self._noise.gauss(1, 0.01))
            for m, x in zip(rows, slower, strict=True)
        ]


@pytest.mark.parametrize("drift", [0.0, 0.2])
def test_a_decision_that_was_never_timed_is_replaced_where_the_clock_refutes_it(
    drift: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rechecks, "spent_s", 0.0)
    store, told = Store(None), Told(sure_of_the_second)
    first = decide(store, Bench(TABLE), surrogate=told)
    assert first.is_untimed
    assert decide(store, Drifting(0, drift), surrogate=told).evidence is Evidence.STORED, "off by default"
    bench = Drifting(1, drift)
    decision = decide(store, bench, surrogate=told, recheck_s=1e6)
    kept = store.decision(TABLE.problem)
    assert kept is not None
    assert bench.asked[:4][0] == first.chosen
    assert [v.beaten for v in kept.verdicts] == [drift > 0], "the calibration learns"
    assert kept.verdicts[0].surrogate == first.surrogate
    assert decision.is_untimed == (drift == 0)
    assert (kept.chosen == first.chosen) == (drift == 0)
    assert kept.rechecks == (0 if drift else ROUNDS)
    assert Decision.from_json(kept.to_json()) == kept
    again = Bench(TABLE)
    decide(store, again, surrogate=told)
    assert not again.asked, "only within the budget"


@pytest.mark.parametrize(("chance", "least", "most"), [(0.5, 0, 50), (0.02, 0, 50), (0.98, 950, 1000)])
def test_a_drift_is_seen_and_none_is_invented_however_often_one_looks(
    chance: float, least: int, most: int
) -> None:
    """Chances that a choice seems too slow in one comparison: at its tolerance, without drift, after one of 20 %."""
    drawn, ended = random.Random(0), 0
    for _ in range(1000):
        count, doubt, refuted = 0, 0.0, False
        for now in [0.02] * 30 * (chance > 0.5) + [chance] * 100:
            count, doubt = bet(count, doubt, drawn.random() < now)
            refuted = refuted or is_refuted(count, doubt)
        ended += refuted
    assert least <= ended <= most


@pytest.mark.parametrize("policy", [None, Exhaustive()])
def test_noise_and_the_order_of_a_list_choose_nothing_among_ties(policy: Policy | None) -> None:
    """Twenty processes, each with its own order of the list, and its own noise on every time."""
    drawn = random.Random(0)
    names = list(TABLE.by_candidate())
    decisions = []
    for _ in range(20):
        rows = {c: 1.0 + 0.3 * (n > 4) + drawn.uniform(0, 0.002) for n, c in enumerate(names)}
        listed = drawn.sample(names, len(names))
        bench, told = Bench(timed(rows)), Told(constant(0.0, sd=0.001) if policy is None else constant())
        decisions.append(decide(Store(None), bench, candidates=listed, policy=policy, surrogate=told))
    assert len({d.chosen for d in decisions}) == 1
    if policy is not None:
        assert decisions[0].chosen in names[:5]
        assert all({d.chosen, *d.ties} == set(names[:5]) for d in decisions)
        assert Decision.from_json(decisions[0].to_json()) == decisions[0]


class LiveComparison(Bench):
    """A bench that says no more of finalists than their times, as a device does."""

    def compare(self, candidates: Sequence[Candidate]) -> list[Measurement]:
        super().compare(candidates)
        return [replace(self._rows[c], extra={}, protocol=IN_TURNS) for c in candidates]


def test_of_configs_that_tie_the_one_with_less_shared_memory_is_chosen() -> None:
    warps = TABLE.measurements[0].candidate.config.num_warps
    alike = sorted((c for c in TABLE.by_candidate() if c.config.num_warps == warps), key=str)[:3]
    for least in alike:
        rows = timed(dict.fromkeys(TABLE.by_candidate(), 2.0) | dict.fromkeys(alike, 1.0))
        sized = [
            replace(m, extra={**m.extra, "shared": 1024 if m.candidate == least else 2048})
            for m in rows.measurements
        ]
        bench = LiveComparison(replace(rows, measurements=sized))
        assert decide(Store(None), bench, policy=Exhaustive()).chosen == least


def test_relatives_and_measurements_reach_the_surrogate() -> None:
    store = Store(None)
    other = replace(TABLE.problem, id="other", key=("1",))
    store.add(other, replace(TABLE.measurements[0], problem="other"))
    store.add(TABLE.problem, TABLE.measurements[1])
    surrogate = Told(constant())
    decide(store, Bench(TABLE), surrogate=surrogate)
    first, last = surrogate.queries[0], surrogate.queries[-1]
    assert [r.problem.id for r in first.relatives] == ["other"]
    assert [m.candidate for m in first.measured] == [TABLE.measurements[1].candidate]
    assert len(last.measured) == len(store.measurements(TABLE.problem))
    assert not first.problem.ttir


def test_a_decision_is_a_pure_function_of_what_goes_in() -> None:
    def one() -> Decision:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            decision = decide(Store(None), Bench(TABLE), audit=0.2)
        return replace(decision, cost=replace(decision.cost, wall_s=0.0, forecast_s=0.0), at="", saved_s=0.0)

    assert one() == one()


# --- the fastest, timed again side by side ---


def test_finalists_are_timed_side_by_side_and_that_time_counts() -> None:
    names = list(TABLE.by_candidate())
    times = {names[4]: 1.0, names[9]: 1.0 + FINALIST_MARGIN / 2, names[2]: 1.0 + 2 * FINALIST_MARGIN}

    class Lucky(Bench):
        def compare(self, candidates: Sequence[Candidate]) -> list[Measurement]:
            super().compare(candidates)
            again = {names[4]: 1.2, names[9]: 1.1}
            rows = timed(again).by_candidate()
            return [replace(rows[c], protocol="turns") for c in candidates]

    store, bench = Store(None), Lucky(timed(times))
    decision = decide(store, bench, policy=Exhaustive())
    assert [set(one) for one in bench.compared] == [{names[4], names[9]}]
    assert decision.chosen == names[9]
    assert decision.median_ms == 1.1
    assert sum(m.protocol == "turns" for m in store.measurements(TABLE.problem)) == 2


@pytest.mark.parametrize(
    ("times", "compared"),
    [
        ([1.0, *[1.01] * 13], 12),
        ([1.0, 1.01, 1.01, *[1.03] * 7], 4),
        ([6e-3, 6e-3, *[6.5e-3] * 3, *[7e-3] * 5], 4),
    ],
    ids=["all that may tie", "the fastest", "by the clock's error"],
)
def test_more_are_timed_side_by_side_where_they_may_tie(times: list[float], compared: int) -> None:
    bench = Bench(timed(dict(zip(TABLE.by_candidate(), times, strict=False))))
    decide(Store(None), bench, candidates=list(TABLE.by_candidate())[: len(times)], policy=Exhaustive())
    assert [len(one) for one in bench.compared] == [compared]


def test_times_behind_another_flush_are_taken_again_and_not_compared() -> None:
    """Behind the old flush the best seems the slowest: only what is timed as it is now counts."""
    names = list(TABLE.by_candidate())
    times = {c: 1.0 + 0.1 * n for n, c in enumerate(names)}
    store = Store(None)
    for m in timed(times).measurements:
        ms = 9.0 if m.candidate == names[0] else m.ms
        store.add(TABLE.problem, replace(m, median_ms=ms, protocol="events-l2flush-2", at="1970-01-01"))
    old = list(latest_labels(store.measurements(TABLE.problem)))
    new = Table(TABLE.problem, [replace(m, protocol="events-l2read-3") for m in timed(times).measurements])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decide(store, Bench(new), mode=Mode.SKIP).chosen == names[1]
    results = TaskResults(store, TABLE.problem, CandidateList.of(names))
    assert list(results.labels) == old
    results.add(new.measurements[5])
    assert list(results.labels) == [new.measurements[5].candidate]
    results.add(new.measurements[0])
    assert results.fastest()[0].candidate == names[0]
    assert len(results.rows) == 2


@pytest.mark.parametrize("step", [1, -1])
def test_a_refusal_of_the_same_second_counts_however_rows_are_sorted(step: int) -> None:
    ran = TABLE.measurements[0]
    wrong = Measurement(ran.problem, ran.candidate, Outcome.INCORRECT, at="1970-01-01T00:00:01")
    rows = [replace(ran, at=wrong.at), wrong][::step]
    assert latest_labels(rows)[ran.candidate] is wrong
    again = replace(ran, at="1970-01-01T00:00:02")
    assert latest_labels([*rows, again])[ran.candidate] is again


class Turns(Bench):
    """In turns, each candidate is a little faster than the one before it."""

    def compare(self, candidates: Sequence[Candidate]) -> list[Measurement]:
        super().compare(candidates)
        times = {c: 1.2 - 0.05 * n for n, c in enumerate(sorted(candidates, key=list(self._rows).index))}
        return [
            Measurement(TABLE.problem.id, c, Outcome.OK, t, protocol=f"events{IN_TURNS}", at="1970-01-02")
            for c, t in times.items()
        ]


@pytest.mark.parametrize("later_ms", [3.0, 1.16])
def test_what_an_interrupted_decision_has_compared_is_compared_again_only_with_others(
    later_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = list(TABLE.by_candidate())
    table = timed({names[4]: 1.0, names[9]: 1.0 + FINALIST_MARGIN / 2, names[0]: later_ms})

    def killed(*args: Any) -> None:
        raise KeyboardInterrupt

    store, first, second = Store(None), Turns(table), Turns(table)
    with monkeypatch.context() as patch:
        patch.setattr(store, "put_decision", killed)
        with pytest.raises(KeyboardInterrupt):
            decide(store, first, candidates=names[1:], policy=Exhaustive())
    assert [set(one) for one in first.compared] == [{names[4], names[9]}]
    decision = decide(store, second, candidates=names, policy=Exhaustive())
    assert second.asked == [names[0]]
    close = {names[4], names[9], names[0]}
    assert [set(one) for one in second.compared] == ([] if later_ms > 2.0 else [close])
    if later_ms > 2.0:
        assert (decision.chosen, decision.median_ms) == (names[9], 1.15)


def test_an_oracle_times_all_close_ones_side_by_side() -> None:
    table = of_sources([1.0, 1.01, 1.02, 1.03, 1.04, 1.05, 2.0], bases=7)
    names = list(table.by_candidate())
    chosen, every = Bench(table), Bench(table)
    decide(Store(None), chosen, candidates=names, policy=Exhaustive())
    decide(Store(None), every, candidates=names, mode="exhaustive")
    assert [set(one) for one in chosen.compared] == [set(names[:4])]
    assert every.compared == [names[:6]]


def of_sources(times: Sequence[float], *, spread: float = 0.0, repeats: int = 0, bases: int = 1) -> Table:
    """A table of these times, in order; all but the first `bases` candidates are of another source."""
    configs = [m.candidate.config for m in TABLE.measurements]
    rows = [
        Measurement(
            TABLE.problem.id,
            Candidate(config, "base" if i < bases else "other"),
            Outcome.OK,
            ms,
            ms * (1 - spread / 2),
            ms * (1 + spread / 2),
            repeats,
        )
        for i, (ms, config) in enumerate(zip(times, configs, strict=False))
    ]
    return Table(TABLE.problem, rows)


@pytest.mark.parametrize(
    ("base", "spread", "repeats", "tolerance", "chosen"),
    [
        (1.008, 0.0, 0, 0.02, "base"),
        (1.012, 0.0, 0, 0.02, "other"),
        (1.015, 0.1, 50, 0.02, "base"),
        (1.015, 0.1, 5000, 0.02, "other"),
        (1.004, 0.1, 50, 0.002, "other"),
        (0.990, 0.1, 50, 0.02, "base"),
    ],
    ids=["a trifle", "faster", "noise", "measured well", "strict", "slower"],
)
def test_another_source_has_to_be_faster_by_more_than_noise(
    base: float, spread: float, repeats: int, tolerance: float, chosen: str
) -> None:
    table = of_sources([base, 1.0], spread=spread, repeats=repeats)
    decision = decide(
        Store(None),
        Bench(table),
        candidates=list(table.by_candidate()),
        policy=Exhaustive(),
        tolerance=tolerance,
    )
    assert decision.chosen.variant == chosen
    assert decision.median_ms == (base if chosen == "base" else 1.0)
    assert ("not faster than the base" in decision.reason) == (chosen == "base" and base > 1.0)


def test_the_base_is_among_the_finalists() -> None:
    table = of_sources([1.05, 1.04, 1.0, 1.01, 1.02, 1.03], bases=2)
    names = list(table.by_candidate())
    bench = Bench(table)
    decide(Store(None), bench, candidates=names, policy=Exhaustive())
    (compared,) = bench.compared
    assert compared[0] == names[1], "preferred"
    assert set(compared) == {names[1], names[2], names[3], names[4]}


def test_a_clear_winner_is_not_timed_again() -> None:
    bench = Bench(timed({m.candidate: 1.0 + i for i, m in enumerate(TABLE.measurements)}))
    decide(Store(None), bench, policy=Exhaustive())
    assert bench.compared == []
