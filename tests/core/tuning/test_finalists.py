"""The fastest, timed again side by side: who they are, when they are compared, and who of them is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from forecast_autotune.policy import Exhaustive
from forecast_autotune.records import Candidate, Measurement, Outcome
from forecast_autotune.records.candidate import IN_TURNS
from forecast_autotune.records.table import Table
from forecast_autotune.store import Store
from forecast_autotune.tuning.results import FINALIST_MARGIN
from tests.core.tuning.loop import TABLE, Bench, decide, timed


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
    assert bench.compared == [[names[4], names[9]]]
    assert decision.chosen == names[9]
    assert decision.median_ms == 1.1
    assert sum(m.protocol == "turns" for m in store.measurements(TABLE.problem)) == 2


class Turns(Bench):
    """In turns, each candidate is a little faster than the one before it."""

    def compare(self, candidates: Sequence[Candidate]) -> list[Measurement]:
        super().compare(candidates)
        times = {c: 1.2 - 0.05 * n for n, c in enumerate(candidates)}
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
    assert first.compared == [[names[4], names[9]]]
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
    assert chosen.compared == [names[:4]]
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
        (1.004, 0.0, 0, 0.02, "base"),
        (1.006, 0.0, 0, 0.02, "other"),
        (1.010, 0.1, 50, 0.02, "base"),
        (1.010, 0.1, 5000, 0.02, "other"),
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
    assert bench.compared == [[names[2], names[3], names[4], names[1]]]


def test_a_clear_winner_is_not_timed_again() -> None:
    bench = Bench(timed({m.candidate: 1.0 + i for i, m in enumerate(TABLE.measurements)}))
    decide(Store(None), bench, policy=Exhaustive())
    assert bench.compared == []
