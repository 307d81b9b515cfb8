"""Whole evaluations: rows, resuming, processes, the report and the command."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from forecast_autotune.commands import main
from forecast_autotune.records import Kernel, Problem
from forecast_autotune.records.table import Table
from forecast_autotune.surrogates.protocol import Forecasts, Query, Surrogate
from forecast_autotune.testing import SurrogateContract, example_table, query_of
from forecast_autotune.tuning.replays.replay import load, shipped_tables
from forecast_autotune.tuning.results import NEGLIGIBLE_GAIN
from forecast_train.evaluation import evaluate, summarize
from forecast_train.evaluation.methods import (
    NearestProblemBaseline,
    methods,
)
from forecast_train.evaluation.summary import HEADLINE_FIGURES, shown

FEW = ("random", "first", "formula", "analytic")


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FORECAST_AUTOTUNE_CACHE_DIR", str(tmp_path / "store"))
    monkeypatch.setenv("COLUMNS", "140")


def named(name: str, seed: int) -> Table:
    table = example_table(sizes=(16, 32, 64, 128), warps=(2, 4, 8), seed=seed)
    p = table.problem
    result = Problem.of(
        Kernel(name, source=f"def {name}(): return {seed}"), p.arguments, p.device, key=(name,)
    )
    result = replace(result, extra={"label": f"{name}/{seed}"})
    return Table(result, [replace(m, problem=result.id) for m in table.measurements])


@pytest.fixture(scope="module")
def tables() -> list[Table]:
    return [named("alpha", 0), named("beta", 1)]


class Oracle:
    """Knows every time, and says so."""

    name = "oracle"
    version = "1"

    def __init__(self, tables: Sequence[Table]) -> None:
        self._times = {(m.problem, m.candidate): m for t in tables for m in t.measurements}

    def forecast(self, query: Query) -> Forecasts:
        rows = [self._times[query.problem.id, c] for c in query.candidates]
        mean = np.array([math.log2(m.ms) if m.ok else 0.0 for m in rows])
        fails = np.array([float(not m.ok) for m in rows])
        return Forecasts(list(query.candidates), mean, np.full(len(rows), 1e-4), fails)


def test_an_oracle_gets_the_best_of_every_score(tables: list[Table]) -> None:
    result = evaluate(tables, methods={"oracle": lambda train: Oracle(tables)}, seeds=1)
    assert len(result.rows) == 2
    for row in result.rows:
        assert set(row.static.values()) == set(row.adaptive.values()) == {0.0}
        assert row.default_regret <= NEGLIGIBLE_GAIN, "what ties is as good"
        assert row.spearman == pytest.approx(1.0)
    figures = summarize(result).figures["oracle"]
    assert figures["default.beyond_tolerance"].value == figures["static.top1"].value == 0.0


class Off(Oracle):
    """Wrong by one standard deviation everywhere, with intervals of these factors."""

    def forecast(self, query: Query) -> Forecasts:
        exact = super().forecast(query)
        return replace(
            exact, mean=exact.mean + 1.0, sd=np.ones(len(exact)), interval_factors=(0.1, 0.5, 1.0, 2.0)
        )


def test_stated_intervals_are_the_calibrated_ones(tables: list[Table]) -> None:
    for row in evaluate(tables, methods={"off": lambda train: Off(tables)}, seeds=1).rows:
        # Half-widths 0.07, 0.64, 1.64 and 3.9.
        assert row.coverage == [0.0, 0.0, 1.0, 1.0]


def test_nothing_of_the_test_side_reaches_a_fit(tables: list[Table]) -> None:
    seen: list[set[str]] = []

    def spy(train: Sequence[Table]) -> Surrogate:
        seen.append({t.problem.kernel.name for t in train})
        return methods["analytic"](train)

    evaluate(tables, methods={"spy": spy}, seeds=1)
    assert seen == [{"beta"}, {"alpha"}]


def test_a_surrogate_that_raises_is_not_scored_as_exhaustive_search(tables: list[Table]) -> None:
    class Broken(Oracle):
        def forecast(self, query: Query) -> Forecasts:
            if query.measured:
                raise KeyError("lost")
            return super().forecast(query)

    with pytest.raises(UserWarning, match="lost"):
        evaluate(tables, methods={"broken": lambda train: Broken(tables)}, seeds=1)


def test_a_second_run_takes_up_the_rows_of_the_first(tables: list[Table], tmp_path: Path) -> None:
    one = evaluate(tables, methods=FEW[:2], seeds=1, out=tmp_path)
    assert one.reused == 0
    calls: list[int] = []
    two = evaluate(
        tables, methods=FEW[:3], seeds=2, out=tmp_path, progress=lambda done, total, what: calls.append(total)
    )
    assert two.reused == len(one.rows) == 4
    assert calls == [6] * 6  # every method lacks a seed in each of two folds
    fresh = evaluate(tables, methods=FEW[:3], seeds=2)
    assert [r.to_json() for r in two.rows] == [r.to_json() for r in fresh.rows]
    other = evaluate([named("alpha", 0), named("beta", 2)], methods=FEW[:2], seeds=1, out=tmp_path)
    assert other.reused == 0, "rows of other tables were taken up"
    said = [
        {"llm": partial(lambda train, answers: methods["first"](train), answers=[t.problem])} for t in tables
    ]
    for methods_of, reused in ((said[0], 0), (said[1], 0), (said[0], 2)):
        again = evaluate(tables, methods=methods_of, seeds=1, out=tmp_path)
        assert again.reused == reused, "rows of a model's other answers"


@pytest.mark.slow
def test_shapes_are_forecast_from_other_shapes() -> None:
    tables = [t for t in load(shipped_tables()) if t.problem.kernel.name == "row_cumsum"]
    result = evaluate(tables, leave_out="shape", methods=["nearest", "median_config", "first"], seeds=1)
    ranks = {m: [r.spearman for r in result.rows if r.method == m] for m in result.methods}
    assert min(ranks["nearest"]) > max(ranks["first"])
    assert np.mean(ranks["median_config"]) > 0.3


def test_a_summary_says_what_is_not_beaten(tables: list[Table]) -> None:
    fits: dict[str, Any] = {
        "oracle": lambda train: Oracle(tables),
        "copy": lambda train: Oracle(tables),
        "first": methods["first"],
    }
    summary = summarize(evaluate(tables, methods=fits, seeds=1), subject="oracle", draws=50)
    copies = {u.figure for u in summary.unbeaten if u.method == "copy"}
    assert copies == set(HEADLINE_FIGURES)
    page = io.StringIO()
    Console(file=page, width=132).print(shown(summary))
    assert "best of 3 or 10%, measured" in page.getvalue()
    assert not re.search(r"(?:static|adaptive|default)\.", page.getvalue()), "names of the code"
    assert "static.top1" not in {u.figure for u in summary.unbeaten if u.method == "first"}
    data = summary.to_json()
    figure = data["methods"]["first"]["figures"]["static.top1"]
    assert figure["low"] <= figure["value"] <= figure["high"]
    assert (figure["n"], figure["kernels"]) == (2, 2)
    with pytest.raises(ValueError, match="nobody"):
        summarize(evaluate(tables, methods=["first"], seeds=1), subject="nobody")


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    words = ["eval", "--limit", "2", "--methods", "random,analytic", "--seeds", "2", "--out", str(out)]
    assert main([*words, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["problems"] == data["kernels"] == 2
    assert data["subject"] == "analytic"
    assert set(data["methods"]) == {"random", "analytic"}
    assert json.loads((out / "summary.json").read_text()) == data
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "8 of 8 rows" in text
    assert "before any measurement" in text
    assert "not beaten" in text


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["--methods", "magic"], "unknown method magic"),
        (["--limit", "1"], "--leave-out kernel: .* needs two or more"),
        (["--leave-out", "device"], "--leave-out device: .* needs two or more"),
        (["--methods", "random", "--subject", "analytic"], "--subject analytic: it must be one of"),
    ],
)
def test_wrong_usage(words: list[str], rule: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", *words]) == 2
    import re

    assert re.search(rule, capsys.readouterr().err)


# --- baselines ---


def other_shape(seed: int = 1, size: int = 8192) -> Table:
    """The example kernel at another shape: another id, the same function."""
    table = example_table(seed=seed)
    p = table.problem
    arguments = (replace(p.arguments[0], shape=(size, size)), replace(p.arguments[1], value=size))
    result = Problem.of(p.kernel, arguments, p.device, key=(str(size),))
    return Table(result, [replace(m, problem=result.id) for m in table.measurements])


class TestRandom(SurrogateContract):
    def make(self) -> Surrogate:
        return methods["random"]([])


class TestFormula(SurrogateContract):
    def make(self) -> Surrogate:
        return methods["formula"]([])


class TestMedianConfig(SurrogateContract):
    def make(self) -> Surrogate:
        return methods["median_config"]([other_shape()])


class TestNearest(SurrogateContract):
    def make(self) -> Surrogate:
        return methods["nearest"]([other_shape()])


def test_nearest_copies_the_nearest_shape_and_never_the_problem_itself() -> None:
    table, near, far = example_table(seed=0), other_shape(1, 8192), other_shape(2, 65536)
    reversed_times = [
        replace(m, median_ms=1.0 / m.ms, p20_ms=None, p80_ms=None) for m in far.measurements if m.ok
    ]
    forecasts = NearestProblemBaseline([table, Table(far.problem, reversed_times), near]).forecast(
        query_of(table)
    )
    copied = [math.log2(m.ms) for m in near.measurements if m.ok]
    np.testing.assert_allclose(forecasts.mean[: len(copied)], copied)
    failed = [i for i, m in enumerate(near.measurements) if not m.ok]
    assert (forecasts.p_fail[failed] > 0.5).all()
    alone = NearestProblemBaseline([table]).forecast(query_of(table))
    assert (alone.mean == alone.mean[0]).all()
