"""The measurements that a model saves: replays of recorded tables with and without it, at equal regret.

Every family is decided by a learned surrogate and a calibration that were fitted without it. The model's
answers are those that were collected before, so nothing is asked again and the same answers always give the
same figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from forecast_autotune.llm.backend import Backend, BackendResponse, LLMError, Usage
from forecast_autotune.llm.bins import BINS
from forecast_autotune.llm.calibration import LLMCalibration
from forecast_autotune.llm.gate import GateDecision, GateInputs
from forecast_autotune.llm.prompt import Prompt
from forecast_autotune.records.codec import Record
from forecast_autotune.records.table import Table
from forecast_autotune.settings import Settings
from forecast_autotune.surrogates.default import DefaultSurrogate
from forecast_autotune.surrogates.language_model.ensemble import EnsembleSurrogate
from forecast_autotune.surrogates.language_model.questions import ForecastQuestion
from forecast_autotune.surrogates.language_model.surrogate import LLMForecasts, LLMSurrogate
from forecast_autotune.surrogates.prior import Prior
from forecast_autotune.surrogates.protocol import Query, Surrogate
from forecast_autotune.tuning.replays.replay import replay_one
from forecast_train.llm.calibration.answers import FitSurrogate, ModelAnswers
from forecast_train.llm.calibration.fit import fit_calibration
from forecast_train.splits import make_folds
from forecast_train.surrogate.fit import fit


def always_ask(situation: GateInputs) -> GateDecision:
    """A gate that is open: to find out what answers are worth."""
    return GateDecision(True, math.inf, "asked to find out what it is worth")


class RecordedAnswersLLM(LLMSurrogate):
    """A model that repeats its answers. Knows the problems of `answers` only."""

    def __init__(self, answers: Sequence[ModelAnswers], calibration: LLMCalibration) -> None:
        self._answers = {a.problem: a for a in answers}
        super().__init__(_UnavailableBackend(answers[0].model), calibration)

    def consult(self, query: Query, before: Prior) -> LLMForecasts:
        """The model's answer about this problem; its own measurements were never shown. Raises `LLMError`."""
        a = self._answers.get(query.problem.id)
        if a is None or len(a.learned) != len(query.candidates):
            raise LLMError(f"nothing was answered about problem {query.problem.id}")
        texts = (" " * (a.characters // 2),)
        prompt = Prompt(a.prompt, texts[0], texts, BINS.labels)
        row_of = {candidate.id: row for row, candidate in enumerate(query.candidates)}
        if not a.candidates or not row_of.keys() >= set(a.candidates):
            raise LLMError(f"the answers about problem {query.problem.id} name other candidates: ask again")
        rows = np.array([row_of[one] for one in a.candidates], dtype=np.intp)
        question = ForecastQuestion(prompt, rows, None, a.reference, a.reference_log2_ms, False)
        usage = Usage(1, a.tokens, seconds=a.seconds)
        return self.interpret(query, before, question, BackendResponse(a.stated, a.mass, usage))


class _UnavailableBackend(Backend):
    """The backend of a model that is not asked any more."""

    def __init__(self, name: str) -> None:
        self.name = name

    def forecast(self, *args: object, **options: object) -> BackendResponse:
        """Raises `LLMError`."""
        raise LLMError("only recorded answers are repeated")


@dataclass(frozen=True)
class PairedReplay:
    """One problem and seed, with and without the model."""

    family: str
    plain_regret: float
    regret: float
    plain_needed: int
    """Measurements until the worse of both final regrets was reached, or the tolerance."""
    needed: int


@dataclass(frozen=True)
class SavingEstimate(Record):
    """Result of replays with and without a model."""

    saved: float
    """Share of the measurements saved at equal regret."""
    error: float
    """Its standard error (jackknife over families)."""
    regret: float
    """Geometric mean of regret with the model less that without, a share."""
    regret_error: float

    @property
    def expected(self) -> float:
        """The saving that a gate counts on: the mean; 0 where regrets got worse beyond their error."""
        return 0.0 if self.regret > self.regret_error else max(0.0, self.saved)

    def to_json(self) -> dict[str, float]:
        """Plain numbers, five digits."""
        return {k: round(v, 5) for k, v in super().to_json().items()}


def replay_pairs(
    tables: Sequence[Table],
    answers: Sequence[ModelAnswers],
    *,
    learn: FitSurrogate = fit,
    seeds: Sequence[int] = (0, 1),
    settings: Settings | None = None,
    calibrated: Callable[[Sequence[ModelAnswers]], LLMCalibration] = fit_calibration,
) -> list[PairedReplay]:
    """Replay every table with and without the model.

    `calibrated` is given the answers about the other families. Raises `SplitError` for too few families.
    """
    base, pairs = settings or Settings(), []
    for fold in make_folds(tables, "family"):
        surrogate = learn(fold.train)
        other_answers = [a for a in answers if a.family != fold.name]
        model = RecordedAnswersLLM([a for a in answers if a.family == fold.name], calibrated(other_answers))
        plain = DefaultSurrogate(surrogate)
        both = EnsembleSurrogate(plain, model, patient=True, gate=always_ask)
        for table in fold.test:
            pairs += [_replay_pair(fold.name, table, plain, both, base.with_(seed=seed)) for seed in seeds]
    return pairs


def _replay_pair(
    family: str, table: Table, plain: Surrogate, both: Surrogate, settings: Settings
) -> PairedReplay:
    without, with_it = (
        replay_one(table, surrogate=surrogate, policy=None, settings=settings)[0]
        for surrogate in (plain, both)
    )
    # Whoever accepts a tolerance is served as well by anything within it.
    level = max(without.regret, with_it.regret, settings.tolerance) + 1e-9
    counts = [_measurements_until(row.path, level) for row in (without, with_it)]
    return PairedReplay(family, without.regret, with_it.regret, *counts)


def _measurements_until(path: Sequence[float], level: float) -> int:
    return next((i for i, regret in enumerate(path, 1) if regret <= level), len(path))


def estimate_saving(pairs: Sequence[PairedReplay]) -> SavingEstimate:
    """The figures of replays. Raises `ValueError` for replays of fewer than two families."""
    families = sorted({p.family for p in pairs})
    if len(families) < 2:
        raise ValueError(f"a standard error needs two or more families, got {families}")

    def share(rows: Sequence[PairedReplay]) -> float:
        return 1.0 - sum(p.needed for p in rows) / max(1, sum(p.plain_needed for p in rows))

    def worse(rows: Sequence[PairedReplay]) -> float:
        return float(np.mean([math.log1p(p.regret) - math.log1p(p.plain_regret) for p in rows]))

    without = [[p for p in pairs if p.family != f] for f in families]
    return SavingEstimate(
        share(pairs),
        _jackknife([share(rows) for rows in without]),
        worse(pairs),
        _jackknife([worse(rows) for rows in without]),
    )


def _jackknife(estimates: Sequence[float]) -> float:
    n, values = len(estimates), np.array(estimates)
    return math.sqrt((n - 1) / n * float(((values - values.mean()) ** 2).sum()))
