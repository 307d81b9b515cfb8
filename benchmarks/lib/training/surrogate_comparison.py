"""Held-out problems before four surrogates, in processes: decisions, and bins beside the model's own."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forecast_autotune.llm.calibration import LLMCalibration
from forecast_autotune.llm.prompt import FORECAST_VERSION
from forecast_autotune.records.table import Table
from forecast_autotune.settings import Mode, Settings
from forecast_autotune.surrogates.default import DefaultSurrogate
from forecast_autotune.surrogates.language_model.ensemble import EnsembleSurrogate
from forecast_autotune.surrogates.learned import LearnedModel, LearnedSurrogate
from forecast_autotune.surrogates.protocol import Query, Surrogate
from forecast_train.evaluation.language_models import LLMOnly
from forecast_train.evaluation.problem_evaluation import TableArrays, judge_problem
from forecast_train.evaluation.rows import EvaluationRow
from forecast_train.evaluation.run import Evaluation
from forecast_train.evaluation.splits import Fold
from forecast_train.evaluation.summary import Summary, summarize
from forecast_train.llm.calibration.answer_collection import ModelAnswers
from forecast_train.llm.calibration.bin_scores import BinScoresOfProblem, forecast_bin_scores
from forecast_train.llm.calibration.saving_estimate import RecordedAnswersLLM, always_ask

ZERO, TRAINED, LEARNED, ENSEMBLE = "zero-shot", "trained", "learned", "ensemble"
METHODS = (ZERO, TRAINED, LEARNED, ENSEMBLE)
DECISION_FIGURES = {
    "spearman": "static.spearman",
    "top_10_percent_recovery": "bins.recovery",
    "regret_at_10_percent": "adaptive.max3_10%.geomean_regret",
    "regret_at_15_percent": "adaptive.max5_15%.geomean_regret",
    "regret_of_first": "static.top1.geomean_regret",
    "crps_log2": "static.crps_centred",
    "ece_within_5_percent": "static.ece_within",
    "aurc_of_decisions": "static.aurc",
    "beyond_tolerance": "default.beyond_tolerance",
    "measured_share": "default.measured_share.large",
}
"""Figures of `forecast_train.evaluation` that the report shows, by the report's names."""


@dataclass(frozen=True)
class SurrogateParts:
    """What the surrogates are made of; travels to other processes."""

    learned: Path
    zero: tuple[Sequence[ModelAnswers], LLMCalibration]
    trained: tuple[Sequence[ModelAnswers], LLMCalibration]
    seeds: tuple[int, ...]


_made: dict[str, Surrogate] = {}
_of: dict[str, ModelAnswers] = {}
_seeds: tuple[int, ...] = ()


def _start(makings: SurrogateParts) -> None:
    """Set up a worker, or this process."""
    global _seeds
    learned = LearnedSurrogate(LearnedModel.load(makings.learned))
    trained = RecordedAnswersLLM(*makings.trained, learned)
    both = EnsembleSurrogate(DefaultSurrogate(learned), trained, patient=True, gate=always_ask)
    both.name, both.version = ENSEMBLE, f"{learned.version}+{FORECAST_VERSION}"
    _made.clear()
    _made.update(
        {
            ZERO: LLMOnly(RecordedAnswersLLM(*makings.zero, learned)),
            TRAINED: LLMOnly(trained),
            LEARNED: learned,
            ENSEMBLE: both,
        }
    )
    _of.clear()
    _of.update({h.problem: h for h in makings.trained[0]})
    _seeds = makings.seeds


def _judge_table(table: Table) -> dict[str, Any]:
    """One problem: rows of all methods, and the words of those that are no model. JSON-able."""
    fold, case = Fold("held out", "family", (table,), ()), TableArrays(table)
    settings = Settings(mode=Mode.TUNE)
    rows = [
        judge_problem(case, fold, name, made, seed, settings)
        for name, made in _made.items()
        for seed in _seeds
    ]
    words: dict[str, Any] = {}
    query = Query(table.problem, list(case.rows), case.grids, ttir=table.problem.ttir)
    names = [c.id for c in query.candidates]
    for name in (LEARNED, ENSEMBLE):
        said = forecast_bin_scores(_of[table.problem.id], _made[name].forecast(query), names)
        words[name] = None if said is None else said.to_json()
    return {"problem": table.problem.id, "rows": [row.to_json() for row in rows], "words": words}


def judge_tables(
    tables: Sequence[Table],
    makings: SurrogateParts,
    kept: Path,
    *,
    jobs: int,
    progress: Callable[[int, int], None],
) -> tuple[list[EvaluationRow], dict[str, list[BinScoresOfProblem]]]:
    """Rows of all methods and words of `learned` and `ensemble`; problems on file are not judged again."""
    done: dict[str, dict[str, Any]] = {}
    if kept.is_file():
        for line in kept.read_text(encoding="utf-8").splitlines():
            try:
                done[json.loads(line)["problem"]] = json.loads(line)
            except ValueError:
                continue  # cut off by a kill
    todo = [t for t in tables if t.problem.id not in done]
    with kept.open("a", encoding="utf-8") as stream:
        for found in _work(todo, makings, jobs):
            done[found["problem"]] = found
            # A kill may have left half a line: this one begins on its own.
            stream.write("\n" + json.dumps(found, allow_nan=False))
            stream.flush()
            progress(len(done), len(tables))
    order = [done[t.problem.id] for t in tables]
    rows = [EvaluationRow.from_json(row) for found in order for row in found["rows"]]
    words = {
        name: [BinScoresOfProblem.from_json(f["words"][name]) for f in order if f["words"][name] is not None]
        for name in (LEARNED, ENSEMBLE)
    }
    return rows, words


def _work(tables: Sequence[Table], makings: SurrogateParts, jobs: int) -> Any:
    if min(jobs, len(tables)) <= 1:
        _start(makings)
        yield from map(_judge_table, tables)
        return
    # Spawned: this process has CUDA and threads, which no fork survives.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _start, (makings,)) as pool:
        try:
            for future in as_completed([pool.submit(_judge_table, table) for table in tables]):
                yield future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def decision_figures(
    rows: Sequence[EvaluationRow], seeds: Sequence[int], draws: int
) -> tuple[Summary, dict[str, Any]]:
    """The evaluation's summary, and what the report shows of it: per method [value, low, high]."""
    settings = Settings(mode=Mode.TUNE)
    made = Evaluation(
        "family", "", list(seeds), list(METHODS), {}, settings.tolerance, settings.risk, list(rows)
    )
    found = summarize(made, subject=ENSEMBLE, draws=draws)
    shown: dict[str, Any] = {}
    for name, figures in found.figures.items():
        parts = {title: figures[key].to_json() for title, key in DECISION_FIGURES.items()}
        shown[name] = {title: [f[k] for k in ("value", "low", "high")] for title, f in parts.items()}
    return found, shown


def unbeaten_baselines(summary: Summary) -> list[Mapping[str, Any]]:
    """What the ensemble does not beat with certainty, with paired differences."""
    return [u.to_json() for u in summary.unbeaten]
