"""Figures of the advice benchmark, and advice that is spoilt on purpose."""

from __future__ import annotations

import ast
import random
from typing import Any

import numpy as np
import pytest

from benchmarks.forecasting.advice import choose_problems, direct_answers, kernel_label
from benchmarks.forecasting.hostile_advice import spoil
from benchmarks.lib.advice.figures import equal_risk, interval, paired_figures
from benchmarks.lib.advice.surrogates import FamilyModels, advice_by_source
from forecast_autotune.errors import RecordError
from forecast_autotune.llm.advice.language import parse_cost_function
from forecast_autotune.llm.advice.subject import AdviceSubject
from forecast_autotune.tuning.replays.replay import load, shipped_tables

_TEXT = """
def cost(config, args, device, launch):
    each = constant(2.0, label="each")
    return each * launch.programs + config.num_warps
"""


def _row(kernel: str, arm: str, regret: float, measured: float) -> dict[str, Any]:
    return {"kernel": kernel, "problem": kernel, "arm": arm, "regret": regret, "measured": measured}


def test_differences_are_taken_on_the_same_problems() -> None:
    rows = [_row(k, "learned", 0.02, 8) for k in "abc"]
    rows += [_row("a", "advice", 0.0, 6), _row("b", "advice", 0.0, 6)]
    found = paired_figures(rows)["advice"]
    assert found["kernels"] == 2
    assert found["measured_difference"] == {"value": -2.0, "low": -2.0, "high": -2.0}
    assert found["regret_learned"] == pytest.approx(0.02)
    assert found["regret"] == 0.0


def test_an_interval_holds_its_mean_and_widens_with_spread() -> None:
    values = np.random.default_rng(0).normal(1.0, 0.5, 60)
    narrow, wide = interval(values), interval(1.0 + 4 * (values - 1.0))
    assert narrow["low"] < narrow["value"] < narrow["high"]
    assert wide["high"] - wide["low"] > 3 * (narrow["high"] - narrow["low"])


def _replay(arm: str, kernel: int, ends: int) -> dict[str, Any]:
    """Risk falls as measurements come in; whoever stops before `ends` misses the best."""
    steps = [[n, n, 1.0 / (1.0 + np.exp(n - ends)), n < ends] for n in range(3, 15)]
    return {
        "kernel": f"k{kernel}",
        "family": f"f{kernel % 4}",
        "problem": f"p{kernel}",
        "arm": arm,
        "candidates": 60,
        "steps": steps,
    }


def test_the_arm_whose_risk_falls_earlier_measures_less_at_equal_risk() -> None:
    generator = random.Random(0)
    replays = []
    for kernel in range(24):
        ends = generator.randint(6, 12)
        replays += [_replay("learned", kernel, ends), _replay("advice", kernel, max(4, ends - 3))]
    found = equal_risk(replays)
    assert found["measured_advice"] < found["measured_learned"]
    assert found["saving"]["low"] > 0.05


def test_recorded_answers_are_cost_functions_of_every_kernel_of_the_corpus() -> None:
    every = advice_by_source()
    assert len(every) == 131
    for advice in every.values():
        assert len(advice.functions) == 2
    alone = advice_by_source(versions=["advice-2"])
    assert {len(a.functions) for a in alone.values()} == {1}
    assert all(len(values) > 5 for values in direct_answers().values())


def test_recorded_advice_can_be_evaluated_on_the_shipped_tables() -> None:
    every, told = advice_by_source(), 0
    for table in load(shipped_tables()):
        advice = every.get(table.problem.kernel.source_sha256)
        if advice is None:
            continue
        rows = list(table.by_candidate())
        grids = {m.candidate: m.grid for m in table.measurements if m.grid is not None}
        subject = AdviceSubject.of(table.problem, rows, grids)
        for function in advice.functions:
            assert np.isfinite(function.evaluate(subject).log2).all()
            told += 1
    assert told > 20


def test_wanted_problems_come_first_and_the_draw_repeats() -> None:
    tables = load(shipped_tables())
    wanted = {tables[3].problem.id: {}}
    chosen = choose_problems(tables, 1, wanted, 0)
    assert tables[3].problem.id in {t.problem.id for t in chosen}
    assert [t.problem.id for t in chosen] == [t.problem.id for t in choose_problems(tables, 1, wanted, 0)]
    assert len({kernel_label(t) for t in chosen}) == len(chosen)


@pytest.mark.parametrize("kind", ["inverted", "noise", "mutated"])
def test_spoilt_advice_differs_and_is_python(kind: str) -> None:
    changed = 0
    for seed in range(12):
        text = spoil(_TEXT, kind, random.Random(seed))
        ast.parse(text)
        changed += text != ast.unparse(ast.parse(_TEXT))
        try:
            parse_cost_function(text)
        except RecordError:
            assert kind == "mutated"
    assert changed > 3


def test_a_fold_that_leaves_out_two_families_has_no_model(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="one family"):
        FamilyModels(tmp_path, ["a", "b"])([])
