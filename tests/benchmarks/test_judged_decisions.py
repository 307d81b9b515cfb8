"""Judgements of sources in replayed decisions: weights are fitted, and who knows the sources needs fewer tries."""

from __future__ import annotations

import gzip
import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.lib import result_files
from benchmarks.lib.search.source_pool import BASE
from benchmarks.lib.variants.judgement_weights import (
    SPREAD_SHARE,
    JudgedDifference,
    fit_weights,
    judged_part,
)
from benchmarks.lib.variants.source_answers import SourceAnswer
from benchmarks.search.judged_decisions import (
    AFTER,
    ARMS,
    JUDGED,
    KNOWN,
    WITHOUT,
    known_judgements,
    replay_all,
)
from forecast_autotune.records.table import write_tables
from forecast_autotune.surrogates.learned import shipped_model
from tests.benchmarks.test_search_sources import CONFIGS, WRONG, made, truth


def test_weights_are_those_that_the_differences_were_made_with() -> None:
    chance = np.random.default_rng(0)
    rows = []
    for _ in range(600):
        learned, judged, sd = chance.normal(0, 0.3), chance.normal(0, 0.3), chance.uniform(0.05, 0.2)
        measured = 0.2 * learned + 0.7 * judged + sd * chance.standard_t(3)
        rows.append(JudgedDifference("f", measured, learned, judged, sd))
    found = fit_weights(rows)
    assert (found.learned, found.judged) == pytest.approx((0.2, 0.7), abs=0.05)
    assert found.stated == pytest.approx(SPREAD_SHARE, rel=0.15)


def answer(ratio: float) -> SourceAnswer:
    return SourceAnswer(ratio, 0.05, 0.1)


def test_only_right_sources_that_were_judged_take_part() -> None:
    table = made()
    answers = {name: answer(0.1) for name in ("rows/1-0", "rows/1-1", WRONG, "other/2")}
    part, told = judged_part(table, answers)
    assert set(told) == {"rows/1-0", "rows/1-1"}
    assert {m.candidate.variant for m in part.measurements} == {BASE, *told}
    known = known_judgements(part, told)
    best = {v: min(truth(v, c) for c in CONFIGS[:-1]) for v in (BASE, *told)}
    assert known["rows/1-0"].log2_ratio == pytest.approx(best["rows/1-0"] - best[BASE])


@pytest.mark.slow
def test_all_arms_are_replayed_with_weights_of_other_families(tmp_path: Path) -> None:
    tables = []
    for family in ("rows", "columns"):
        table = made(f"{family}/1")
        told = {
            k: {**v, "name": k if k in (BASE, WRONG) else k.replace("/1", "")}
            for k, v in table.problem.extra["sources"].items()
        }
        extra = {**table.problem.extra, "family": family, "sources": told}
        tables.append(replace(table, problem=replace(table.problem, extra=extra)))
        model = shipped_model()
        assert model is not None
        replace(model, about={"without": family}).save(tmp_path / f"{family}.npz")
    write_tables(tmp_path / "t.jsonl.gz", tables)
    lines: list[dict[str, Any]] = [{"model": "one that knows"}]
    for table in tables:
        names = {v["name"]: k for k, v in table.problem.extra["sources"].items() if k not in (BASE, WRONG)}
        base = min(truth(BASE, c) for c in CONFIGS[:-1])
        ratios = [min(truth(k, c) for c in CONFIGS[:-1]) - base for k in names.values()]
        figures = {"log2_ratio": ratios, "sd": [0.03] * len(names), "p_wrong": [0.0] * len(names)}
        lines.append({"kernel": "k", "sources": list(names), **figures, "why": [""] * len(names)})
    with gzip.open(tmp_path / "a.jsonl.gz", "wt", encoding="utf-8") as stream:
        stream.write("".join(json.dumps(line) + "\n" for line in lines))
    a = Namespace(
        table=tmp_path / "t.jsonl.gz",
        answers=tmp_path / "a.jsonl.gz",
        models=tmp_path,
        out=tmp_path / "o.json",
        seeds=2,
        every=1,
        null=False,
    )
    report = result_files.ResultFile(a, "judged_decisions")
    found = replay_all(a, report)
    assert found["sources"] == 28
    assert set(found["weights"]) == {"rows", "columns"}
    assert found["all_weights"]["judged"] > 0.7, "it is right of every source"
    for arm in ARMS:
        assert (found[arm]["problems"], found[arm]["kernels"]) == (2, 2)
    assert "differences" not in found[WITHOUT]
    for arm in (JUDGED, KNOWN):
        assert set(found[arm]["differences"]) >= {f"after_{n}" for n in AFTER}
        assert found[arm][f"after_{AFTER[0]}"] < found[WITHOUT][f"after_{AFTER[0]}"]
    assert len(report.data["raw"]["decisions"]) == 2 * 2 * len(ARMS)
