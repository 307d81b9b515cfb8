"""Claim: what small models know of sources before and after training, and what that is worth beside the surrogate.

    python -m benchmarks.llm.distilled_source_scores --forecasts FORECASTS.jsonl.gz --states STATES.npz \
        --ranking benchmarks/results/source_ranking.json --out benchmarks/results/distilled_sources.json

No GPU: scores what `benchmarks.llm.distilled_sources` wrote. Every forecast is by a model that has seen no kernel of
the source's family; recalibration, weights and ridge regressions are fitted without the family, too (to forecasts of
other families whose models may have seen it).

    table       the paper's figures over eight bins and "fails", as stated and recalibrated (temperature and a shift
                per bin), of every arm; of rewards the mean over seeds with its standard error
    stacking    the weight of a model's means beside the learned surrogate's, as `train calibrate-llm` fits it
    ranking     orders and log scores of the learned surrogate alone, with a model, with hidden states
    states      hidden states of sources (mean over the text, less the base's), on their principal components in the
                other families, as slopes on what the surrogate's forecast leaves over

An arm of which some folds are not there is scored on the sources of those that are, beside every other arm on the same
sources: the summary has a part for each such set, and says which runs there are and after how many epochs.
"""

from __future__ import annotations

import json
import math
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.lib import result_files
from benchmarks.lib.environment import ROOT
from benchmarks.lib.training.bin_recalibration import (
    recalibrated_without_family,
    table_differences,
    table_row,
)
from benchmarks.lib.training.scored_parts import common_rows, scored_parts
from benchmarks.lib.training.source_questions import SourceExample, read_examples
from benchmarks.lib.training.source_states import state_forecasts
from benchmarks.lib.variants.source_answers import ANSWERS, read_answers
from benchmarks.lib.variants.source_comparisons import EIGHT_BINS
from benchmarks.lib.variants.source_models import forecasts_without_family
from benchmarks.lib.variants.source_orders import scores_without_family, weight_choices
from benchmarks.lib.variants.source_outcomes import change_share
from benchmarks.lib.variants.source_scores import (
    KernelForecasts,
    Sums,
    by_figure,
    differences,
    figures,
    kernel_scores,
)
from benchmarks.llm.distilled_sources import TABLE, planned_runs, read_lines
from forecast_autotune.llm.bins import BINS
from forecast_autotune.llm.question_kinds import SOURCE
from forecast_train.evaluation.metrics import spearman
from forecast_train.llm.calibration.stacking import StackingEvidence, fast_end, log_scores, pooled_weight

FloatArray = npt.NDArray[np.float64]
RowIndices = npt.NDArray[np.intp]

ANSWERS_ARM = "strong model"
DRAWS = 300


@dataclass(frozen=True)
class SourceRows:
    """The sources that are scored, with what the learned surrogate said of them."""

    examples: list[SourceExample]
    learned: FloatArray
    edit: FloatArray
    """Share of lines that differ from the base's."""

    @property
    def families(self) -> list[str]:
        """Of each source."""
        return [e.family for e in self.examples]

    @property
    def truth(self) -> FloatArray:
        """log2(best time / the base's), NaN for one that is wrong."""
        return np.array([math.nan if e.log2_ratio is None else e.log2_ratio for e in self.examples])

    @property
    def label(self) -> RowIndices:
        """Of the eight bins, "fails" last, -1 where nothing is known."""
        truth = self.truth
        ran = np.isfinite(truth)
        found = np.where(ran, EIGHT_BINS.index(np.where(ran, truth, 0.0)), EIGHT_BINS.failure_index)
        return np.where([e.known for e in self.examples], found, -1).astype(np.intp)

    @property
    def kernels(self) -> list[RowIndices]:
        """Rows of each kernel."""
        names = np.array([e.kernel for e in self.examples], dtype=object)
        return [np.flatnonzero(names == kernel) for kernel in sorted(set(names))]

    @property
    def ran_kernels(self) -> list[RowIndices]:
        """Rows of each kernel of which a time is known."""
        ran = np.isfinite(self.truth)
        return [at[ran[at]] for at in self.kernels]

    def subset(self, at: RowIndices) -> SourceRows:
        """Some of the sources, in their order."""
        return SourceRows([self.examples[int(i)] for i in at], self.learned[at], self.edit[at])


def source_rows(table: Path, answers: Path, ranking: Path) -> SourceRows:
    """The sources of a result of `source_ranking`, in its order."""
    found = {e.name: e for e in read_examples(table, read_answers(answers)[1])}
    told = json.loads(ranking.read_text(encoding="utf-8"))["raw"]["sources"]
    examples = [found[row["name"]] for row in told]
    changed = [e.name for e, row in zip(examples, told, strict=True) if e.sha256 != row["sha256"]]
    if changed:
        raise ValueError(
            f"{len(changed)} sources are not those of {ranking.name} ({changed[0]}): run it again"
        )
    learned = np.array([row["learned"] for row in told])
    return SourceRows(examples, learned, np.array([change_share(e.base, e.text) for e in examples]))


def read_forecasts(path: Path, rows: SourceRows) -> dict[str, dict[int, FloatArray]]:
    """P of the product's bins [n, labels] by arm and seed, NaN for sources whose fold is not there."""
    found: dict[str, dict[int, dict[str, Sequence[float]]]] = {}
    for line in read_lines(path):
        if "p" in line:
            said = found.setdefault(line["arm"], {}).setdefault(line["seed"], {})
            said |= dict(zip(line["names"], line["p"], strict=True))
    nothing = [math.nan] * (len(BINS) + 1)
    read: dict[str, dict[int, FloatArray]] = {}
    for arm, seeds in found.items():
        for seed, said in seeds.items():
            p = np.array([said.get(e.name, nothing) for e in rows.examples])
            read.setdefault(arm, {})[seed] = p / p.sum(axis=1, keepdims=True)
    return read


def eight_bins(p: FloatArray) -> FloatArray:
    """P of the table's bins and "fails" [n, 9] from those of the product's [n, labels]."""
    place = np.append(EIGHT_BINS.index(BINS.bounds.mean(axis=1)), EIGHT_BINS.failure_index)
    return p @ np.eye(len(EIGHT_BINS) + 1)[place]


def answered_bins(rows: SourceRows) -> FloatArray:
    """The strong model's answers as distributions over the product's bins."""
    found = []
    for e in rows.examples:
        if e.answer is None:
            raise ValueError(f"{e.name}: no recorded answer")
        runs = BINS.soft_targets([e.answer.log2_ratio], max(0.01, e.answer.sd))[0] * (1.0 - e.answer.p_wrong)
        runs[BINS.failure_index] += e.answer.p_wrong
        found.append(runs)
    return np.array(found)


def paper_table(
    said: Mapping[str, Mapping[int, FloatArray]], rows: SourceRows
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rows of the table by arm, and differences of recalibrated forecasts (seed 0) between arms."""
    label, kernels, truth = rows.label, rows.kernels, rows.truth
    found: dict[str, Any] = {}
    fitted: dict[str, FloatArray] = {}
    for arm, seeds in said.items():
        both: dict[str, list[dict[str, Any]]] = {}
        for seed, p in seeds.items():
            mean, _, p_fail = BINS.moments(p)
            order = mean + 9.0 * (p_fail > 0.5)
            eight = eight_bins(p)
            made = {
                "as it is": eight,
                "recalibrated": recalibrated_without_family(eight, label, rows.families),
            }
            if seed == 0:
                fitted[arm] = made["recalibrated"]
            for name, one in made.items():
                both.setdefault(name, []).append(table_row(one, label, order, truth, kernels))
        found[arm] = {name: {**several[0], **seed_spread(several)} for name, several in both.items()}
    pairs = [
        (one, other)
        for one in fitted
        for other in ("untrained", "measured", "distilled", ANSWERS_ARM)
        if other in fitted and one not in (other, "untrained", ANSWERS_ARM)
    ]
    told = {
        f"{one} - {other}": dict(table_differences(fitted[one], fitted[other], label, kernels))
        for one, other in pairs
    }
    return found, told


def seed_spread(several: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean over seeds and its standard error of every figure; nothing for one seed."""
    if len(several) < 2:
        return {}
    found = {}
    for name in several[0]:
        values = [row[name][0] if isinstance(row[name], list) else row[name] for row in several]
        error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
        found[name] = [round(float(np.mean(values)), 4), round(error, 4)]
    return {"seeds": len(several), "over_seeds": found}


def model_features(p: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Mean [n] of what a model forecasts, given that it runs, and the logarithm of its spread."""
    mean, sd, _ = BINS.moments(p)
    return mean, np.log(np.maximum(0.01, sd))


@dataclass(frozen=True)
class RankingArm:
    """What one way of forecasting says of every source: everything fitted without its family."""

    mean: FloatArray
    sums: Sums


def bend(x: FloatArray) -> FloatArray:
    """A forecast, how far it is below and above 0: what is said of slow ones may be worth another share."""
    return np.column_stack([np.clip(x, -0.5, 0.0), np.clip(x, 0.0, 1.0)])


def ranking_arm(rows: SourceRows, means: Sequence[FloatArray], spreads: Sequence[FloatArray]) -> RankingArm:
    """Forecasts from several means, scored; `spreads` are logarithms of what belongs to them."""
    truth, kernels, families = rows.truth, rows.kernels, rows.families
    scale = np.column_stack([*spreads, *(np.abs(m) for m in means), rows.edit])
    mean, said = forecasts_without_family(np.column_stack([bend(m) for m in means]), scale, truth, families)
    columns = np.column_stack([np.clip(m, -0.5, 1.0) for m in means])
    choices = weight_choices(len(means), False)
    score, _ = scores_without_family(columns, choices, truth, kernels, families)
    found = []
    for at in kernels:
        mine = said.rows(at)
        scored = KernelForecasts(
            truth[at], mean[at], -score[at], mine.log_density(truth[at]), mine.crps(truth[at])
        )
        found.append(kernel_scores(scored))
    return RankingArm(mean, by_figure(found))


def stacking_evidence(rows: SourceRows, learned: FloatArray, model: FloatArray) -> list[StackingEvidence]:
    """A problem per kernel: its sources, forecast by the surrogate, and where the model would move them."""
    truth = rows.truth
    found = []
    for at in rows.kernels:
        family, told = rows.examples[int(at[0])].family, model[at] - learned[at]
        ran = np.isfinite(truth[at])
        filled = np.where(ran, truth[at], math.inf)
        one = fast_end(filled, learned[at], told, ran, family=family, kind="", question=SOURCE)
        if one is not None:
            found.append(one)
    return found


def stacking_weight(evidence: Sequence[StackingEvidence]) -> dict[str, Any]:
    """The cross-validated weight, its 95 % interval over kernels, and what it gains."""
    scores, names = log_scores(evidence), [e.family for e in evidence]
    fitted = pooled_weight(scores, names)
    generator = np.random.default_rng(0)
    drawn = []
    for _ in range(DRAWS):
        lot = generator.integers(len(evidence), size=len(evidence))
        drawn.append(pooled_weight(scores[lot], [names[i] for i in lot]).mean)
    return {
        "weight": round(fitted.mean, 4),
        "interval_95": [round(float(x), 4) for x in np.quantile(drawn, (0.025, 0.975))],
        "gain_nats": round(fitted.log_score, 5),
        "kernels": len(evidence),
    }


def held_out_families(path: Path, rows: SourceRows) -> dict[int, frozenset[str]]:
    """Families of each fold of the distilled runs that are there."""
    family = {e.name: e.family for e in rows.examples}
    lines = [line for line in read_lines(path) if line["arm"] == "distilled" and line["seed"] == 0]
    return {
        int(line["fold"]): frozenset(family[name] for name in line["names"] if name in family)
        for line in lines
    }


def told_runs(path: Path, folds: int) -> dict[str, Any]:
    """Which runs there are, on how many sources and after how many epochs; which arms have none at all."""
    lines = read_lines(path)
    runs = []
    for line in lines:
        training = line.get("training", {})
        runs.append(
            {
                "run": line["run"],
                "sources": len(line.get("names", ())),
                "epochs": training.get("epochs", 0.0),
                "cut": bool(training.get("cut", False)),
            }
        )
    planned = {run.arm: None for run in planned_runs(folds)}
    return {
        "folds": folds,
        "runs": runs,
        "arms_without_a_run": [arm for arm in planned if arm not in {line["arm"] for line in lines}],
    }


def score_part(
    rows: SourceRows, said: Mapping[str, Mapping[int, FloatArray]], added: Mapping[str, FloatArray]
) -> dict[str, Any]:
    """Figures of arms that have forecast all `rows`; `added` is what hidden states add, [n] by kind."""
    table, table_changes = paper_table(said, rows)
    alone = ranking_arm(rows, [rows.learned], [])
    arms, weights = {"learned": alone}, {}
    for arm, seeds in said.items():
        mean, spread = model_features(seeds[min(seeds)])
        only = ranking_arm(rows, [mean], [spread])
        arms[arm] = only
        arms[f"learned + {arm}"] = ranking_arm(rows, [rows.learned, mean], [spread])
        weights[arm] = stacking_weight(stacking_evidence(rows, alone.mean, only.mean))
        result_files.say(f"{arm}: weight {weights[arm]}")
    for name, more in added.items():
        arms[f"learned + {name}"] = both = ranking_arm(rows, [rows.learned, more], [])
        weights[name] = stacking_weight(stacking_evidence(rows, alone.mean, both.mean))
        result_files.say(f"{name}: weight {weights[name]}")
    stated = {
        arm: figures({"spearman": [(spearman(mean[at], rows.truth[at]), 1.0) for at in rows.ran_kernels]})
        for arm, mean in [
            ("learned", rows.learned),
            *((a, model_features(p[min(p)])[0]) for a, p in said.items()),
        ]
    }
    changes = {
        f"{name} - learned": differences(arm.sums, alone.sums)
        for name, arm in arms.items()
        if name.startswith("learned +")
    }
    return {
        "sources": len(rows.examples),
        "kernels": len(rows.kernels),
        "families": sorted(set(rows.families)),
        "table": table,
        "table_differences": table_changes,
        "stacking": weights,
        "ranking_as_stated": stated,
        "ranking": {name: figures(arm.sums) for name, arm in arms.items()},
        "ranking_differences": changes,
    }


def score_everything(a: Namespace) -> dict[str, Any]:
    """The summary: every arm on the sources that it has forecast, beside all others that have them, too."""
    rows = source_rows(a.table, a.answers, a.ranking)
    said = read_forecasts(a.forecasts, rows)
    said[ANSWERS_ARM] = {0: answered_bins(rows)}
    added: dict[str, FloatArray] = {}
    if a.states is not None:
        names = [e.name for e in rows.examples]
        groups = held_out_families(a.forecasts, rows)
        added = state_forecasts(a.states, names, rows.families, rows.truth - rows.learned, groups)
    parts = {}
    for part in scored_parts(said, read_lines(a.forecasts)):
        result_files.say(f"{part.name}: {len(part.at)} sources, arms {', '.join(part.arms)}")
        mine = {arm: {seed: p[part.at] for seed, p in common_rows(said[arm])[0].items()} for arm in part.arms}
        theirs = {kind: x[part.at] for kind, x in added.items() if np.isfinite(x[part.at]).all()}
        parts[part.name] = score_part(rows.subset(part.at), mine, theirs)
    return {
        "sources": len(rows.examples),
        "kernels": len(rows.kernels),
        **told_runs(a.forecasts, a.folds),
        "parts": parts,
    }


def main() -> int:
    made = result_files.parser(__doc__)
    made.add_argument("--forecasts", type=Path, required=True, help="of distilled_sources")
    made.add_argument("--states", type=Path, help="of distilled_sources")
    made.add_argument("--ranking", type=Path, default=ROOT / "benchmarks" / "results" / "source_ranking.json")
    made.add_argument("--folds", type=int, default=4, help="that the runs were planned with")
    made.add_argument("--table", type=Path, default=TABLE)
    made.add_argument("--answers", type=Path, default=ANSWERS)
    made.set_defaults(stub_only=True)
    a = result_files.parse_arguments(made)
    report = result_files.ResultFile(a, "distilled_sources")
    report.finish(score_everything(a))
    return 0


if __name__ == "__main__":
    sys.exit(main())
