"""What becomes of stated risks: verdicts, the correction they earn, and the table that shows both."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forecast_autotune.commands import main
from forecast_autotune.commands.calibration import coverage
from forecast_autotune.errors import RecordError
from forecast_autotune.records import Decision, Problem, RiskVerdict
from forecast_autotune.records.table import Table
from forecast_autotune.store import Store
from forecast_autotune.surrogates.calibration import fit_correction
from forecast_autotune.surrogates.protocol import Forecasts, Query
from tests.core.captured_output import Capture
from tests.core.store.stored import A100, H200, decided, problem
from tests.core.tuning.loop import TABLE, Bench, Told, decide

NAMES = list(TABLE.by_candidate())
BEST = min((m for m in TABLE.measurements if m.ok), key=lambda m: m.ms).candidate


def verdict(shipped: float, beaten: bool, share: float = 1.0) -> RiskVerdict:
    return RiskVerdict("told/1", shipped, shipped, beaten, share)


def cocksure(best_is_near: bool) -> Told:
    """Sure that three candidates are the fastest by far, rightly or not; states next to no risk."""

    def say(query: Query) -> Forecasts:
        n = len(query.candidates)
        mean = np.zeros(n)
        sure = [BEST, *NAMES[:2]] if best_is_near else NAMES[:3]
        mean[[query.candidates.index(candidate) for candidate in sure]] = -9.0
        # Anything not told about is far slower than whatever was measured.
        return Forecasts(query.candidates, mean + 9.0, np.full(n, 0.01), np.full(n, 0.0))

    return Told(say)


def other_table() -> Table:
    """The same times for another problem of the same device."""
    p = replace(TABLE.problem, id="another")
    return Table(p, [replace(m, problem="another") for m in TABLE.measurements])


# --- the correction ---


def test_it_moves_towards_what_was_seen_and_sooner_up_than_down() -> None:
    wrong, right = fit_correction([verdict(0.05, True)] * 10), fit_correction([verdict(0.4, False)] * 10)
    assert wrong is not None
    assert right is not None
    assert wrong(0.05) > 0.3
    assert 0.2 < right(0.4) < 0.36
    assert wrong(0.05) - 0.05 > 3 * (0.4 - right(0.4))
    more = fit_correction([verdict(0.4, False)] * 400)
    assert more is not None
    assert more(0.4) < right(0.4)
    assert wrong(0.2) >= wrong(0.05), "what was riskier by the shipped curve is no safer now"


def test_an_honest_surrogate_is_left_alone() -> None:
    generator = np.random.default_rng(0)
    risks = generator.random(4000)
    curve = fit_correction([verdict(float(p), bool(generator.random() < p)) for p in risks])
    assert curve is not None
    for p in (0.05, 0.2, 0.5, 0.9):
        assert curve(p) == pytest.approx(p, abs=0.05)


def test_audits_of_a_share_find_the_true_rate() -> None:
    """A winner among the trusted is in an audit of 30 % with that probability."""
    generator = np.random.default_rng(1)
    happened, audited = generator.random(6000) < 0.3, generator.random(6000) < 0.3
    results = [verdict(0.1, bool(a and b), 0.3) for a, b in zip(happened, audited, strict=True)]
    curve = fit_correction(results)
    assert curve is not None
    assert curve(0.1) == pytest.approx(0.3, abs=0.04)


# --- verdicts, as tuning finds them ---


def test_a_second_exhaustive_tuning_refutes_a_wrong_decision() -> None:
    store = Store(None)
    first = decide(store, Bench(TABLE), surrogate=cocksure(False))
    assert first.measured == 3
    assert first.verdicts == ()
    assert first.surrogate == "told/1"
    assert first.shipped_risk == first.stated_risk < 0.05
    second = decide(store, Bench(TABLE), surrogate=cocksure(False), mode="exhaustive")
    (result,) = second.verdicts
    assert second.chosen == BEST
    assert result == RiskVerdict("told/1", first.stated_risk, first.stated_risk, True, 1.0)
    assert store.verdicts(TABLE.problem) == [result]


def test_an_audit_is_a_verdict_on_the_plan_that_accepted() -> None:
    store = Store(None)
    decision = decide(store, Bench(TABLE), surrogate=cocksure(True), audit=0.5)
    (result,) = decision.verdicts
    assert not result.beaten
    assert result.share == pytest.approx((decision.measured - 3) / 12)
    assert 0.0 < result.share < 1.0


def test_another_list_of_candidates_gives_no_verdict() -> None:
    store = Store(None)
    decide(store, Bench(TABLE), surrogate=cocksure(False), candidates=NAMES[:8])
    second = decide(store, Bench(TABLE), surrogate=cocksure(False), mode="exhaustive")
    assert second.verdicts == ()


def test_experience_raises_the_next_stated_risk_on_this_device_only() -> None:
    def risk(store: Store, surrogate: Told) -> Decision:
        table = other_table()
        return decide(store, Bench(table), surrogate=surrogate, table=table, max_measurements=3)

    before = risk(Store(None), cocksure(False))
    bad = (verdict(before.stated_risk, True),) * 16

    def burnt(p: Problem) -> Store:
        store = Store(None)
        store.put_decision(p, replace(decided(p), verdicts=bad))
        return store

    after = risk(burnt(TABLE.problem), cocksure(False))
    assert after.stated_risk > 0.4 > before.stated_risk
    assert after.shipped_risk == pytest.approx(before.stated_risk, abs=1e-6)

    stranger = cocksure(False)
    stranger.name = "other"
    assert risk(burnt(TABLE.problem), stranger).stated_risk == before.stated_risk, (
        "its faults are not another's"
    )

    assert risk(burnt(problem(device=A100)), cocksure(False)).stated_risk == before.stated_risk


def test_a_stored_decision_asks_for_no_experience() -> None:
    store = Store(None)
    decide(store, Bench(TABLE), surrogate=cocksure(True))

    class Counting(Store):
        asked = 0

        def verdicts(self, problem: Any) -> list[RiskVerdict]:
            self.asked += 1
            return super().verdicts(problem)

    counting = Counting(None)
    counting._directories = store._directories
    again = decide(counting, Bench(TABLE), surrogate=cocksure(True))
    assert again.measured == 0
    assert counting.asked == 0


# --- records and the store ---


def test_verdicts_survive_json_and_old_decisions_have_none() -> None:
    result = replace(
        decided(problem()), surrogate="a/1", shipped_risk=0.04, verdicts=(verdict(0.3, True, 0.5),)
    )
    data = json.loads(json.dumps(result.to_json()))
    assert Decision.from_json(data) == result
    for name in ("verdicts", "shipped_risk", "surrogate"):
        del data[name]
    old = Decision.from_json(data)
    assert (old.verdicts, old.shipped_risk, old.surrogate) == ((), None, "")


@pytest.mark.parametrize("change", [{"share": 0.0}, {"share": 1.5}, {"shipped": -0.1}, {"stated": "often"}])
def test_a_damaged_verdict_is_refused(change: dict[str, Any]) -> None:
    data = replace(decided(problem()), verdicts=(verdict(0.3, True),)).to_json()
    data["verdicts"][0] |= change
    with pytest.raises(RecordError):
        Decision.from_json(data)


def test_the_store_finds_verdicts_of_all_kernels_of_a_device(tmp_path: Path) -> None:
    one, two, away = problem(), problem(kernel="softmax"), problem(device=A100)
    writer = Store(tmp_path)
    for p, risk in ((one, 0.1), (two, 0.2), (away, 0.3)):
        writer.put_decision(p, replace(decided(p), verdicts=(verdict(risk, False),)))
    writer.put_decision(problem(64), decided(problem(64)))
    reader = Store(tmp_path)
    assert sorted(v.shipped for v in reader.verdicts(one)) == [0.1, 0.2]
    assert [v.shipped for v in reader.verdicts(away)] == [0.3]
    reader.put_decision(problem(64), replace(decided(problem(64)), verdicts=(verdict(0.4, True),)))
    assert sorted(v.shipped for v in reader.verdicts(two)) == [0.1, 0.2, 0.4]
    reader.clear()
    assert reader.verdicts(one) == []
    assert problem().device == H200


def test_a_damaged_decision_costs_its_verdicts_only(tmp_path: Path) -> None:
    for p in (problem(), problem(64)):
        Store(tmp_path).put_decision(p, replace(decided(p), verdicts=(verdict(0.1, False),)))
    next(tmp_path.glob("v1/*/*/decisions/*.json")).write_text('{"share": "x')
    store = Store(tmp_path)
    with pytest.warns(UserWarning, match="not a decision"):
        assert len(store.verdicts(problem())) == 1


# --- the table that anyone can regenerate ---


def test_coverage_counts_first_measurements_with_a_forecast() -> None:
    def noted(log2_ms: float) -> dict[str, Any]:
        return {"forecast": {"log2_ms": log2_ms, "sd": 0.1, "p_fail": 0.0}}

    a, b, c = TABLE.measurements[:3]
    rows = [
        replace(a, extra=noted(float(np.log2(a.ms)))),
        replace(b, extra=noted(float(np.log2(b.ms)) + 1.0)),
        c,
        replace(a, median_ms=50 * a.ms, p20_ms=None, p80_ms=None),
    ]
    assert coverage([Table(TABLE.problem, rows)]) == {"nominal": 0.9, "n": 2, "covered": 0.5}
    assert coverage([])["covered"] is None


def test_show_calibration(root: Path, capsys: Capture) -> None:
    store = Store(root)
    decide(store, Bench(TABLE), surrogate=cocksure(False))
    assert main(["show", "--calibration"]) == 0
    assert "no stated risk was checked yet" in capsys.readouterr().out
    decide(Store(root), Bench(TABLE), surrogate=cocksure(False), mode="exhaustive")
    assert main(["show", "--calibration", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    (row,) = data["risk"]
    assert (data["verdicts"], row["n"], row["refuted"], row["observed"]) == (1, 1, 1, 1.0)
    assert data["intervals"]["n"] > 0
    assert main(["show", "--calibration"]) == 0
    shown = capsys.readouterr().out
    assert "stated risk" in shown
    assert "90 % interval" in shown
    assert main(["show", "--calibration", "--kernel", "no such", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdicts"] == 0
