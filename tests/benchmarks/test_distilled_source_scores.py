"""Figures of small models on sources: recalibration, the table's rows, weights, and slopes on hidden states."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import special

from benchmarks.lib.training.bin_recalibration import (
    calibration_error,
    near_best_shares,
    recalibrated_without_family,
    table_differences,
    table_row,
)
from benchmarks.lib.training.scored_parts import common_rows, scored_parts
from benchmarks.lib.training.source_questions import SourceExample
from benchmarks.lib.training.source_states import state_forecasts, state_slopes
from benchmarks.lib.variants.source_answers import SourceAnswer
from benchmarks.lib.variants.source_comparisons import EIGHT_BINS
from benchmarks.llm import distilled_source_scores as scores
from forecast_autotune.llm.bins import BINS

RNG = np.random.default_rng(0)
COUNT, FAMILIES = 240, [f"f{i // 40}" for i in range(240)]
KERNELS = [np.arange(i, i + 10) for i in range(0, 240, 10)]


def made_rows() -> scores.SourceRows:
    """Sources of 24 kernels of 6 families; the surrogate knows half of what there is to know."""
    seen, unseen = 0.3 * RNG.normal(size=(2, COUNT))
    truth = seen + unseen
    examples = []
    for i in range(COUNT):
        said = SourceAnswer(float(truth[i]), 0.1, 0.02)
        source = SourceExample(
            f"k{i // 10}", FAMILIES[i], f"k{i // 10}/{i}", "", "", "", "", float(truth[i]), False, said
        )
        examples.append(replace(source, log2_ratio=None, wrong=True) if i % 60 == 7 else source)
    return scores.SourceRows(examples, seen, np.full(COUNT, 0.1))


ROWS = made_rows()


def stated(noise: float, sd: float) -> np.ndarray:
    truth = np.nan_to_num(ROWS.truth, nan=0.3)
    p = np.array([BINS.soft_targets([t + noise * RNG.normal()], sd)[0] for t in truth]) * 0.97
    p[:, -1] += 0.03
    return p


def test_recalibration_mends_what_is_too_sure() -> None:
    logits = 2.0 * RNG.normal(size=(COUNT * 8, 4))
    label = np.array([RNG.choice(4, p=row) for row in special.softmax(logits, axis=1)])
    families = [f"f{i % 5}" for i in range(len(label))]
    sure = special.softmax(4.0 * logits, axis=1)
    mended = recalibrated_without_family(sure, label, families)
    assert mended.sum(axis=1) == pytest.approx(1.0)
    assert calibration_error(mended, label) < 0.04 < 0.1 < calibration_error(sure, label)
    own = np.array(families) == "f2"
    other = recalibrated_without_family(sure, np.where(own, 0, label), families)
    assert other[own] == pytest.approx(mended[own]), "labels of a family say nothing in its own forecasts"
    assert not np.allclose(other[~own], mended[~own])


def test_rows_of_the_table() -> None:
    label = ROWS.label
    assert (label >= 0).all()
    assert (label == EIGHT_BINS.failure_index).sum() == 4
    good, bad = (scores.eight_bins(stated(noise, 0.1)) for noise in (0.02, 1.0))
    assert good.sum(axis=1) == pytest.approx(1.0)
    order = np.nan_to_num(ROWS.truth, nan=9.0)
    row = table_row(good, label, order, ROWS.truth, KERNELS)
    worse = table_row(bad, label, -order, ROWS.truth, KERNELS)
    assert row["accuracy"][0] > worse["accuracy"][0]
    assert row["crps"][0] < worse["crps"][0]
    assert row["top_10_percent_within_20"] == 1.0 > worse["top_10_percent_within_20"]
    low, high = table_differences(good, bad, label, KERNELS)["brier"][1:]
    assert low is not None
    assert high is not None
    assert low <= high < 0
    unknown = np.where(np.arange(COUNT) < 100, -1, label)
    assert table_row(good, unknown, order, ROWS.truth, KERNELS[10:])["accuracy"][0] is not None
    assert near_best_shares(order, ROWS.truth, KERNELS)["top_10_percent_within_2"] == 1.0


def test_seeds_have_a_mean_and_an_error() -> None:
    assert scores.seed_spread([{"ece": 0.1}]) == {}
    told = scores.seed_spread([{"ece": 0.1, "nll": [1.0, 0.9, 1.1]}, {"ece": 0.3, "nll": [2.0, 1.9, 2.1]}])
    assert told == {"seeds": 2, "over_seeds": {"ece": [0.2, 0.1], "nll": [1.5, 0.5]}}


def test_a_model_that_knows_more_has_a_weight_and_noise_has_none() -> None:
    told = ROWS.learned + 0.8 * (np.nan_to_num(ROWS.truth) - ROWS.learned)
    knowing = scores.stacking_weight(scores.stacking_evidence(ROWS, ROWS.learned, told))
    noise = scores.stacking_weight(scores.stacking_evidence(ROWS, ROWS.learned, RNG.normal(size=COUNT)))
    assert knowing["kernels"] == 24
    assert knowing["weight"] > 0.8
    assert knowing["interval_95"][0] > 0.5
    assert noise["weight"] < 0.1


@pytest.mark.slow
def test_both_together_rank_better_than_the_surrogate() -> None:
    mean, spread = scores.model_features(stated(0.05, 0.1))
    alone = scores.ranking_arm(ROWS, [ROWS.learned], [])
    both = scores.ranking_arm(ROWS, [ROWS.learned, mean], [spread])
    gain = scores.differences(both.sums, alone.sums)
    for name in ("spearman", "recovered", "log_score"):
        low = gain[name][1]
        assert low is not None
        assert low > 0, name


def test_slopes_on_states_find_what_is_left_over() -> None:
    residual = ROWS.truth - ROWS.learned
    states = RNG.normal(size=(COUNT, 24))
    states[:, 5] += 20.0 * np.nan_to_num(residual)
    families = np.array(FAMILIES)
    own = families == "f3"
    told = state_slopes(states.astype(np.float16), residual, ~own, FAMILIES)
    kept = own & np.isfinite(residual)
    assert np.corrcoef(told[kept], residual[kept])[0, 1] > 0.8
    hidden = np.where(own, 5.0, residual)
    again = state_slopes(states.astype(np.float16), hidden, ~own, FAMILIES)
    assert again == pytest.approx(told), "nothing of the family is in its own slopes"


def made_files(folder: Path) -> Path:
    """Forecasts of two folds by one arm, of the second fold by another; states of the first fold."""
    path = folder / "forecasts.jsonl.gz"
    names = [e.name for e in ROWS.examples]
    p = stated(0.1, 0.1).round(5).tolist()
    first = {"arm": "distilled", "fold": 0, "seed": 0, "names": names[:120], "p": p[:120]}
    second = {"arm": "measured", "fold": 1, "seed": 0, "names": names[120:], "p": p[120:]}
    lines = [
        {**first, "run": "distilled-0-0", "training": {"epochs": 1.5, "cut": True}},
        {**second, "run": "distilled-1-0", "arm": "distilled", "training": {"epochs": 3.0, "cut": False}},
        {**second, "run": "measured-1-0", "training": {"epochs": 3.0, "cut": False}},
        {"run": "whole-all-0", "arm": "whole", "fold": -1, "seed": 0},
    ]
    with gzip.open(path, "wt", encoding="utf-8") as stream:
        stream.writelines(json.dumps(line) + "\n" for line in lines)
    return path


def test_an_arm_is_scored_on_what_it_has_forecast(tmp_path: Path) -> None:
    path = made_files(tmp_path)
    read = scores.read_forecasts(path, ROWS)
    assert set(read) == {"distilled", "measured"}
    assert read["distilled"][0].sum(axis=1) == pytest.approx(1.0, abs=1e-9)
    assert np.isnan(read["measured"][0][:120]).all()
    assert np.isfinite(read["measured"][0][120:]).all()
    whole, second = scored_parts(read, scores.read_lines(path))
    assert (whole.name, whole.arms, len(whole.at)) == ("all", ("distilled",), COUNT)
    assert (second.name, second.arms) == ("folds 1", ("distilled", "measured"))
    assert second.at.tolist() == list(range(120, 240))
    told = scores.told_runs(path, 2)
    assert [(run["epochs"], run["cut"]) for run in told["runs"]] == [
        (1.5, True),
        (3.0, False),
        (3.0, False),
        (0.0, False),
    ]
    assert told["arms_without_a_run"] == ["untrained", "correctness_crps", "correctness", "correctness_brier"]


@pytest.mark.slow
def test_a_part_compares_all_arms_on_the_same_sources() -> None:
    at = np.arange(120, 240)
    some = ROWS.subset(at)
    p = stated(0.05, 0.1)[at]
    part = scores.score_part(some, {"measured": {0: p}}, {"states, untrained": np.zeros(len(at))})
    assert (part["sources"], part["kernels"], part["families"]) == (120, 12, ["f3", "f4", "f5"])
    assert part["stacking"]["measured"]["weight"] > 0.5
    assert part["stacking"]["measured"]["kernels"] == part["stacking"]["states, untrained"]["kernels"] == 12
    order = {arm: row["spearman"][0] for arm, row in part["ranking_as_stated"].items()}
    assert order["measured"] > order["learned"] > 0.3
    assert set(part["ranking"]) == {
        "learned",
        "measured",
        "learned + measured",
        "learned + states, untrained",
    }


def test_seeds_without_all_sources_do_not_hide_those_that_have_them() -> None:
    whole = stated(0.1, 0.1)
    part = np.where(np.arange(COUNT)[:, None] < 120, whole, math.nan)
    seeds, rows = common_rows({0: whole, 1: part})
    assert set(seeds) == {0}
    assert rows.all()
    seeds, rows = common_rows({0: part, 1: part})
    assert set(seeds) == {0, 1}
    assert rows.sum() == 120


def test_states_of_some_folds_cover_the_sources_of_those(tmp_path: Path) -> None:
    names = [e.name for e in ROWS.examples]
    groups = scores.held_out_families(made_files(tmp_path), ROWS)
    assert groups == {0: frozenset({"f0", "f1", "f2"}), 1: frozenset({"f3", "f4", "f5"})}
    states = RNG.normal(size=(1, COUNT, 8))
    kept = {"untrained": states[0], "distilled": states, "distilled_folds": np.array([1])}
    np.savez(tmp_path / "states.npz", names=np.array(names), **kept)
    residual = ROWS.truth - ROWS.learned
    added = state_forecasts(tmp_path / "states.npz", names, ROWS.families, residual, groups)
    assert set(added) == {"states, untrained", "states, distilled"}
    assert np.isfinite(added["states, untrained"]).all()
    assert np.isnan(added["states, distilled"][:120]).all()
    assert np.isfinite(added["states, distilled"][120:]).all()


def test_answers_are_distributions() -> None:
    p = scores.answered_bins(ROWS)
    assert p.sum(axis=1) == pytest.approx(1.0)
    assert p[:, -1] == pytest.approx(0.02)
    missing = scores.SourceRows([replace(ROWS.examples[0], answer=None)], ROWS.learned[:1], ROWS.edit[:1])
    with pytest.raises(ValueError, match="no recorded answer"):
        scores.answered_bins(missing)
    assert math.isnan(ROWS.truth[7])
