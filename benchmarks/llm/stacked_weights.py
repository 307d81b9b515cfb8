"""Claim: a strong model's blind forecasts earn a weight beside the learned surrogate, however much is measured.

    python -m benchmarks.llm.stacked_weights --models FOLDER --out RESULT.json

The 72 problems that a model forecast listwise and blind (`benchmarks/data/direct_answers.jsonl.gz`), each beside the
surrogate in `--models` that was fitted without the kernel's family, with 0, 3 and 5 measurements known: those that
the surrogate calls fastest. The weight of the model is fitted by cross-validated log score, as
`train calibrate-llm` does; what is reported of a problem uses the weight that the other families have.

Scored are the candidates that the model forecast, ran, and are not measured, each as much as it is fast: log score
(nats per candidate; Student-t of the size that the same forecaster's errors have in other families), RMSE (log2)
of those within twice the best, and, where nothing is measured, the regret of the candidate that is forecast best.
Intervals are 95 %, over kernels; differences are paired with `learned`.
"""

from __future__ import annotations

import gzip
import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import t as student

from benchmarks.lib import result_files
from benchmarks.lib.advice.figures import interval
from benchmarks.lib.advice.surrogates import FamilyModels
from benchmarks.lib.environment import ROOT
from benchmarks.lib.surrogates_without import table_paths
from forecast_autotune.features.candidate_list import CandidateList
from forecast_autotune.llm.similarity import kernel_kind
from forecast_autotune.records.table import Table
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.language_model.blend import disagreement
from forecast_autotune.surrogates.protocol import Query
from forecast_autotune.tuning.replays.replay import load
from forecast_train.evaluation.splits import family_of
from forecast_train.llm.calibration.measured_evidence import forecasts_after
from forecast_train.llm.calibration.stacking import (
    CrossValidatedWeight,
    StackingEvidence,
    fast_end,
    group_weight,
    log_scores,
    pooled_weight,
)

Array = npt.NDArray[np.float64]

ANSWERS = ROOT / "benchmarks" / "data" / "direct_answers.jsonl.gz"
COUNTS = (0, 3, 5)
_DRAWS = 300
_FREEDOM = 4.0
_FAST_LOG2 = 1.0
"""Candidates that count for RMSE: within a factor of two of the best."""


def direct_log2(path: Path = ANSWERS) -> dict[str, tuple[str, dict[str, float]]]:
    """Kernel, and log2 slow-down by candidate as text, by problem."""
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        lines = [line for line in map(json.loads, stream) if line["type"] == "answer"]
    return {
        line["problem"]: (
            line["label"],
            {
                json.dumps(c, sort_keys=True): x
                for c, x in zip(line["configs"], line["log2_slowdown"], strict=True)
            },
        )
        for line in lines
    }


def evidence_of(
    table: Table, base: AnalyticSurrogate, told: Mapping[str, float]
) -> dict[int, StackingEvidence]:
    """What the answers to one problem say of the model, by number of known measurements."""
    rows = table.by_candidate()
    names = CandidateList(rows)
    before = base.prior(Query(table.problem, names, table.grids(), ttir=table.problem.ttir))
    texts = [json.dumps(c.to_json(), sort_keys=True) for c in names]
    heard = np.array([text in told for text in texts])
    if heard.sum() != len(told):
        raise ValueError(f"{table.problem.id}: {len(told) - heard.sum()} answers are about no candidate")
    stated = np.array([told.get(text, 0.0) for text in texts])
    moved = disagreement(before.mean, stated, heard.astype(float), base.hyper)
    log2_ms = np.array(table.log2_ms())
    found = {}
    for count, f in zip(COUNTS, forecasts_after(base, table, moved, COUNTS), strict=True):
        left = heard & ~f.measured
        kind, family = kernel_kind(before.facts), family_of(table.problem)
        one = fast_end(log2_ms, f.learned, f.gap, left, family=family, kind=kind, known=count)
        if one is not None:
            found[count] = one
    return found


def problem_scores(evidence: Sequence[StackingEvidence], follow: Sequence[float]) -> dict[str, Array]:
    """Log score, RMSE and regret of each problem, following the model by each problem's share."""
    errors = [e.error - w * e.gap for e, w in zip(evidence, follow, strict=True)]
    squares = np.array([float(e.weight @ r**2) for e, r in zip(evidence, errors, strict=True)])
    family = np.array([e.family for e in evidence])
    score, rmse = np.zeros(len(evidence)), np.zeros(len(evidence))
    for i, (e, r) in enumerate(zip(evidence, errors, strict=True)):
        size = float(np.sqrt(np.median(squares[family != e.family])))
        score[i] = float(e.weight @ student.logpdf(r, _FREEDOM, scale=size))
        fast = r[e.slowdown < _FAST_LOG2]
        rmse[i] = float(np.sqrt(np.mean((fast - fast.mean()) ** 2)))
    regret = np.array([np.log1p(e.regret(w)) for e, w in zip(evidence, follow, strict=True)])
    return {"log_score": score, "rmse": rmse, "log_regret_unmeasured": regret}


def weight_interval(scores: Array, names: Sequence[str], pooled: CrossValidatedWeight | None) -> list[float]:
    """95 % of the weight, over kernels."""
    generator = np.random.default_rng(0)
    drawn = []
    for _ in range(_DRAWS):
        lot = generator.integers(len(scores), size=len(scores))
        mine = [names[i] for i in lot]
        found = (
            pooled_weight(scores[lot], mine) if pooled is None else group_weight(scores[lot], mine, pooled)
        )
        drawn.append(found.mean)
    return [round(float(x), 4) for x in np.quantile(drawn, (0.025, 0.975))]


def figures(
    evidence: Sequence[StackingEvidence], fitted: CrossValidatedWeight, alone: CrossValidatedWeight
) -> dict[str, Any]:
    """The figures at one number of known measurements: one problem a kernel."""
    stack = [fitted.without[e.family] for e in evidence]
    shares = {"learned": [0.0] * len(stack), "model": [1.0] * len(stack), "stack": stack}
    scored = {name: problem_scores(evidence, follow) for name, follow in shares.items()}
    found: dict[str, Any] = {
        "problems": len(evidence),
        "families": len(fitted.without),
        "weight": round(fitted.mean, 4),
        "weights_without_a_family": [round(f(fitted.without.values()), 4) for f in (min, max)],
        "weight_of_these_alone": round(alone.mean, 4),
        "cross_validated_gain": round(fitted.log_score, 5),
    }
    for name, values in scored.items():
        figure = {key: interval(v) for key, v in values.items()}
        if name != "learned":
            figure |= {f"{key}_difference": interval(v - scored["learned"][key]) for key, v in values.items()}
        if evidence[0].known:
            figure = {key: v for key, v in figure.items() if "regret" not in key}
        found[name] = figure
    return found


def main() -> int:
    made = result_files.parser(__doc__)
    made.add_argument("--models", type=Path, required=True, help="learned surrogates without a family each")
    made.set_defaults(stub_only=True)
    options = result_files.parse_arguments(made)
    report = result_files.ResultFile(options, "stacked_weights")
    warnings.simplefilter("ignore")
    direct = direct_log2()
    tables = {t.problem.id: t for t in load(table_paths()) if t.problem.id in direct}
    families = FamilyModels(options.models, [family_of(t.problem) for t in tables.values()])
    evidence: dict[int, list[StackingEvidence]] = {count: [] for count in COUNTS}
    for number, (problem, (kernel, told)) in enumerate(sorted(direct.items()), 1):
        base = families.without(family_of(tables[problem].problem))
        assert isinstance(base, AnalyticSurrogate)
        for count, one in evidence_of(tables[problem], base, told).items():
            evidence[count].append(one)
            curve = log_scores([one])[0]
            report.data["raw"].setdefault("problems", []).append(
                {
                    "kernel": kernel,
                    "family": one.family,
                    "kind": one.kind,
                    "known": count,
                    "candidates": len(one.error),
                    "squares": [round(x, 5) for x in one.squares(1.0)],
                    "best_weight": round(float(np.argmax(curve)) / (len(curve) - 1), 3),
                }
            )
        result_files.say(f"{number} of {len(direct)}: {kernel}")
    summary: dict[str, Any] = {}
    pooled: CrossValidatedWeight | None = None
    for count, mine in evidence.items():
        scores, names = log_scores(mine), [e.family for e in mine]
        alone = pooled_weight(scores, names)
        fitted = alone if pooled is None else group_weight(scores, names, pooled)
        pooled = pooled or alone
        drawn = weight_interval(scores, names, None if fitted is alone else pooled)
        summary[f"known_{count}"] = {"weight_interval": drawn, **figures(mine, fitted, alone)}
    report.finish(summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
