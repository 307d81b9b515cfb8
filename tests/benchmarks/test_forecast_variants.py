"""Forecasts of recorded variants: what is asked and kept, how they are measured, what the report says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.forecasting.variant_ranking import RECORDED_FORECASTS
from benchmarks.lib.processes.kernel_processes import read_lines, run_in_children
from benchmarks.lib.variants import variant_corpus
from benchmarks.lib.variants.variant_forecasts import (
    CONFIGS_SHOWN,
    VariantQuestion,
    base_measurements,
    file_digest,
    first_cases_of,
    forecast_all,
    query_one_by_one,
    source_mark,
    speedup_forecast,
    variant_question,
)
from benchmarks.lib.variants.variant_report import VariantPair, join_forecasts, report
from forecast_autotune.records import Candidate, Config, Measurement, Outcome
from forecast_autotune.records.table import Table
from forecast_autotune.surrogates.default import default_surrogate
from forecast_autotune.surrogates.language_model.surrogate import LLMSurrogate
from forecast_autotune.surrogates.learned import LearnedSurrogate
from forecast_autotune.surrogates.protocol import Forecasts
from forecast_integrations.triton.null_device import null_device
from tests.core.llm.words import Said, calibrated, favours

ROOT = Path(__file__).parents[2]
FOUND = variant_corpus.variant_sources(["softmax"])


@pytest.fixture(scope="module")
def asked() -> VariantQuestion:
    """Four variants of a kernel at a real shape, compiled for a GPU that is not there."""
    with null_device():
        return variant_question(first_cases_of("softmax", 1)[0], FOUND[:4], {}, workers=1)


def learned() -> LearnedSurrogate:
    single = default_surrogate().single
    assert isinstance(single, LearnedSurrogate)
    return single


# --- forecasts ---


@pytest.mark.slow
def test_variants_are_asked_about_as_a_live_call_would(asked: VariantQuestion) -> None:
    query = asked.query
    assert len(asked.base) == 80
    assert all(len(asked.rows(one.name)) for one in FOUND[:4])
    assert len(query.candidates) == len(asked.base) + sum(len(asked.rows(n)) for n in asked.records)
    assert asked.untraced() == []
    for name, record in asked.records.items():
        first = query.candidates[int(asked.rows(name)[0])]
        assert query.sources[first.variant] == record.source
        assert query.grids[first] == query.grids.get(query.candidates[0], query.grids[first])


def test_any_surrogate_forecasts_them_without_a_gpu(asked: VariantQuestion) -> None:
    for surrogate in (default_surrogate(), learned()):
        found = forecast_all(asked, surrogate)
        assert list(found) == [one.name for one in FOUND[:4]]
        assert all(0.0 <= row["p_faster"] <= 1.0 and row["sd"] > 0 for row in found.values())
        assert len({row["log2_ratio"] for row in found.values()}) == 4, "they are told apart"
        places = [int(i) for i in found[FOUND[0].name]["order"].split()]
        assert len(set(places)) == len(places)
        assert max(places) < len(asked.rows(FOUND[0].name))


def test_what_is_known_of_the_base_at_this_shape_is_taken_from_tables(asked: VariantQuestion) -> None:
    problem, names = asked.query.problem, asked.query.candidates
    rows = [
        Measurement(problem.id, names[int(i)], Outcome.OK, 1.0 + 0.01 * n)
        for n, i in enumerate([*asked.base[:5], asked.rows(FOUND[0].name)[0]])
    ]

    there = Table(replace(problem, extra={"label": asked.case.name}), rows)
    elsewhere = Table(replace(problem, extra={"label": "softmax/1x1"}), rows)
    assert base_measurements(asked, [there]) == rows[:5], "a variant's own time is no part of what is known"
    assert base_measurements(asked, [elsewhere]) == []


def made(mean: list[float], sd: float = 0.01, p_fail: float = 0.0) -> Forecasts:
    names = [Candidate(Config.of({"A": i})) for i in range(len(mean))]
    return Forecasts(names, np.array(mean), np.full(len(mean), sd), np.full(len(mean), p_fail))


def test_figures_compare_the_best_of_both() -> None:
    base, own = np.arange(3), np.arange(3, 6)
    sure = speedup_forecast(made([0.0, 1.0, 2.0, 5.0, -1.0, 4.0]), base, own)
    assert sure["p_faster"] == 1.0
    assert sure["log2_ratio"] == pytest.approx(-1.0, abs=0.01)
    assert sure["order"] == "1 2 0"
    assert speedup_forecast(made([0.0, 1.0, 2.0, 1.0, 3.0, 4.0]), base, own)["p_faster"] == 0.0
    assert speedup_forecast(made([0.0] * 6, sd=0.3), base, own)["p_faster"] == pytest.approx(0.5, abs=0.05)
    dead = speedup_forecast(made([0.0] * 6, p_fail=1.0), base, own)
    assert (dead["p_fail"], dead["p_faster"], dead["log2_ratio"]) == (1.0, 0.0, None)
    half = speedup_forecast(made([0.0] * 6, p_fail=0.5), base, own)
    assert half["p_fail"] == pytest.approx(0.125, abs=0.02)


def test_a_language_model_is_shown_each_variants_changes(asked: VariantQuestion) -> None:
    said = Said(favours(64))
    found = query_one_by_one(asked, LLMSurrogate(said, calibrated()), learned())
    assert len(said.questions) == len(asked.records)
    for prefix, suffixes in said.questions:
        assert len(suffixes) == 2 * CONFIGS_SHOWN
        assert asked.query.problem.kernel.source[:30] in prefix
        shown = [s for s in suffixes if "Changed kernel:" in s or "Other kernel:" in s]
        assert len(shown) == CONFIGS_SHOWN
    assert [row["said"] for row in found.values()] == [False] * len(found), "calibrated on another language"
    trusting = LLMSurrogate(said, calibrated(table=Table(asked.query.problem, [])))
    assert any(row["said"] for row in query_one_by_one(asked, trusting, learned()).values())


# --- the recorded file ---


def test_every_variant_was_forecast_as_it_is_now() -> None:
    recorded = json.loads(RECORDED_FORECASTS.read_text(encoding="utf-8"))
    rows, every = recorded["raw"]["cases"], variant_corpus.variant_sources()
    assert recorded["raw"]["provenance"]["variants"] == file_digest(variant_corpus.TABLE)
    assert recorded["raw"]["provenance"]["measured_before"] == 0
    marks = {name: mark for row in rows for name, mark in row["sha256"].items()}
    assert marks == {one.name: source_mark(one) for one in every}
    for row in rows:
        assert row["untraced"] == []
        assert row["fit"]["without"] == row["family"]
        for said in row["forecasts"].values():
            assert set(said) == set(row["sha256"])


# --- measuring ---

CHILD = """
import json, sys, time
given = json.loads(sys.argv[sys.argv.index("--given") + 1])
say = lambda **line: print(json.dumps({"case": given["case"], **line}), flush=True)
say(base={})
for name in given["variants"]:
    say(begin=name)
    if "hangs" in name:
        time.sleep(60)
    if "dies" in name:
        sys.exit(7)
    print('{"no": case', flush=True)
    outcome = "runtime_error" if "breaks" in name else "ok"
    say(variant=name, outcome=outcome)
    if outcome != "ok":
        break
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., tuple[int, list[dict[str, Any]]]]:
    """Measure with a child that does as the variants' names say."""

    def kernel(*names: str, child: str = CHILD) -> tuple[int, list[dict[str, Any]]]:
        script, out = tmp_path / "child.py", tmp_path / "lines.jsonl"
        script.write_text(child, encoding="utf-8")
        given = {"case": "softmax/x", "limit": 1.0}
        with out.open("a", encoding="utf-8") as stream:
            count = run_in_children(str(script), Namespace(null=True), stream, "measure", names, given)
        return count, [line for line in read_lines(out) if "outcome" in line]

    return kernel


def test_a_variant_that_hangs_dies_or_breaks_the_device_costs_itself_alone(run: Any) -> None:
    count, lines = run("k/a", "k/hangs", "k/b", "k/dies", "k/breaks", "k/c")
    outcomes = [(line["variant"], line["outcome"]) for line in lines]
    assert outcomes == [
        ("k/a", "ok"),
        ("k/hangs", "crash"),
        ("k/b", "ok"),
        ("k/dies", "crash"),
        ("k/breaks", "runtime_error"),
        ("k/c", "ok"),
    ]
    assert count == 6


def test_a_kernel_that_never_begins_is_given_up_at_once(run: Any) -> None:
    assert run("k/a", "k/b", child="import sys; sys.exit(3)") == (0, [])


def test_so_many_processes_and_no_more(run: Any) -> None:
    names = [f"k/dies{i}" for i in range(9)]
    count, lines = run(*names)
    assert count == len(lines) == 5


def script(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.forecasting.variant_ranking", *words]
    environment = os.environ | {"FORECAST_AUTOTUNE_WORKERS": "1"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.mark.slow
def test_the_whole_of_it_on_a_device_that_is_not_there(tmp_path: Path) -> None:
    """Two variants; a run that was cut short is taken up; the report joins what there is."""
    lines, names = (
        tmp_path / "measured.jsonl",
        [one.name for one in variant_corpus.variant_sources(["vis_max_pool"])[:2]],
    )
    words = ("--measure", "--null", "--only", ",".join(names), "--configs", "2", "--out", str(lines))
    first = script(*words)
    assert first.returncode == 0, first.stdout + first.stderr
    found = {line["variant"]: line for line in read_lines(lines) if "outcome" in line}
    assert sorted(found) == sorted(names)
    assert all(line["outcome"] == "ok" and line["timed"] <= 2 for line in found.values())
    origin = read_lines(lines)[0]
    assert (origin["forecasts"], origin["null"]) == (
        {RECORDED_FORECASTS.name: file_digest(RECORDED_FORECASTS)},
        True,
    )
    text = lines.read_text(encoding="utf-8").splitlines()
    lines.write_text("\n".join([*text[:-1], text[-1][:40]]) + "\n", encoding="utf-8")
    again = script(*words)
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"{names[0]}: " not in again.stdout
    assert f"{names[1]}: ok" in again.stdout
    out = tmp_path / "report.json"
    done = script("--report", "--measured", str(lines), "--out", str(out))
    assert done.returncode == 0, done.stderr
    summary = json.loads(out.read_text(encoding="utf-8"))["summary"]
    assert (summary["variants"], summary["outcomes"]) == (2, {"ok": 2})


# --- the report ---


def pairs(truth: list[float], said: list[float], chance: list[float], kernel: str = "k") -> list[VariantPair]:
    return [
        VariantPair(
            kernel,
            f"{kernel}/{i:02d}",
            "similar",
            "ok" if np.isfinite(t) else "incorrect",
            t,
            {"it": {"p_faster": p, "log2_ratio": r, "sd": 0.1, "p_fail": 0.0}},
        )
        for i, (t, r, p) in enumerate(zip(truth, said, chance, strict=True))
    ]


def test_a_perfect_forecast_has_perfect_figures() -> None:
    truth = [-0.5, -0.2, 0.1, 0.4, 0.9]
    found = report(pairs(truth, truth, [1.0, 1.0, 0.0, 0.0, 0.0]))
    it = found["it"]
    assert (it["spearman"], it["spearman_within_kernel"]) == (1.0, 1.0)
    assert (it["top_10_percent_recovers"], it["top_10_percent_share"]) == (1.0, 1.0)
    assert (it["faster"]["ece"], it["faster"]["brier"], it["faster"]["auroc"]) == (0.0, 0.0, 1.0)
    assert set(it["risk_at_coverage"].values()) == {0.0}
    assert found["faster"] == 2
    assert found["author's expectation"]["spearman"] is None, "all were expected to be alike"


def test_a_forecast_that_is_wrong_and_sure_of_it_shows() -> None:
    truth = [-0.5, -0.2, 0.1, 0.4, 0.9]
    it = report(pairs(truth, truth[::-1], [0.0, 0.0, 1.0, 1.0, 1.0]))["it"]
    assert it["spearman"] == -1.0
    assert it["top_10_percent_recovers"] == pytest.approx(2.0 ** (-0.5 - 0.9), abs=1e-3)
    assert it["faster"]["ece"] == 1.0
    assert set(it["risk_at_coverage"].values()) == {1.0}


def test_wrong_variants_are_never_faster_and_nobody_gains_by_choosing_them() -> None:
    found = report(pairs([float("nan"), -0.2, 0.1], [-3.0, 0.0, 0.2], [0.9, 0.6, 0.1]))
    assert (found["faster"], found["outcomes"]) == (1, {"incorrect": 1, "ok": 2})
    assert found["it"]["top_10_percent_recovers"] == 0.0
    assert found["it"]["fails"]["brier"] == pytest.approx(1 / 3, abs=1e-3)


def test_differences_within_the_noise_are_not_faster() -> None:
    assert report(pairs([-0.005, -0.1, 0.2], [0.0, 0.1, 0.2], [0.5] * 3))["faster"] == 1


def test_kernels_are_ranked_apart() -> None:
    """Levels of two kernels say nothing about the choice within one."""
    one = pairs([0.0, 0.1, 0.2], [5.0, 5.1, 5.2], [0.5] * 3, "a")
    two = pairs([1.0, 1.1, 1.2], [-5.0, -4.9, -4.8], [0.5] * 3, "b")
    it = report([*one, *two])["it"]
    assert it["spearman_within_kernel"] == 1.0
    assert it["spearman"] < 0


def test_forecast_and_measured_texts_must_be_the_same(tmp_path: Path) -> None:
    said = {"it": {"k/01": {"p_faster": 0.5, "log2_ratio": 0.0, "sd": 0.1, "p_fail": 0.0}}}
    row = {"case": "k/x", "sha256": {"k/01": "aa"}, "expect": {"k/01": "faster"}, "forecasts": said}
    forecasts, lines = tmp_path / "f.json", tmp_path / "m.jsonl"
    forecasts.write_text(json.dumps({"raw": {"cases": [row]}}), encoding="utf-8")

    def write(*found: dict[str, Any]) -> None:
        lines.write_text("".join(json.dumps({"case": "k/x", **f}) + "\n" for f in found), encoding="utf-8")

    write(
        {"variant": "k/01", "outcome": "crash"},
        {"variant": "k/01", "outcome": "ok", "sha256": "aa", "log2_ratio": -1},
    )
    (pair,) = join_forecasts([forecasts], lines)
    assert (pair.outcome, pair.truth, pair.faster) == ("ok", -1.0, True)
    other = row | {"forecasts": {"another": said["it"]}}
    more = tmp_path / "g.json"
    more.write_text(json.dumps({"raw": {"cases": [other]}}), encoding="utf-8")
    assert list(join_forecasts([forecasts, more], lines)[0].said) == ["it", "another"]
    write({"variant": "k/01", "outcome": "ok", "sha256": "bb", "log2_ratio": -1})
    with pytest.raises(ValueError, match="forecast as aa and measured as bb"):
        join_forecasts([forecasts], lines)
    write({"variant": "k/02", "outcome": "ok"})
    with pytest.raises(ValueError, match="measure first"):
        join_forecasts([forecasts], lines)
