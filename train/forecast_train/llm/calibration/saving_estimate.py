"""What a model saves: replays of recorded tables with and without it, at equal regret.

Every family is decided by a learned surrogate and a calibration that were fitted without it. The model's
answers are those that were heard before, so nothing is asked again and the same answers always give the
same figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np

from forecast_autotune.llm.backend import BackendResponse, LLMError, Usage
from forecast_autotune.llm.bins import BINS
from forecast_autotune.llm.calibration import LLMCalibration
from forecast_autotune.llm.gate import GateDecision, GateInputs
from forecast_autotune.llm.prompt import Prompt
from forecast_autotune.llm.question_kinds import CONFIG
from forecast_autotune.records.codec import Record
from forecast_autotune.records.table import Table
from forecast_autotune.settings import Settings
from forecast_autotune.surrogates.default import DefaultSurrogate
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.language_model.ensemble import EnsembleSurrogate
from forecast_autotune.surrogates.language_model.questions import ForecastQuestion
from forecast_autotune.surrogates.language_model.surrogate import LLMForecasts, LLMSurrogate
from forecast_autotune.surrogates.prior import Prior
from forecast_autotune.surrogates.protocol import Query, Surrogate
from forecast_autotune.tuning.replays.replay import replay_one
from forecast_train.evaluation.splits import make_folds
from forecast_train.llm.calibration.answer_collection import FitSurrogate, ModelAnswers
from forecast_train.llm.calibration.calibrate import fit_calibration


def always_ask(situation: GateInputs) -> GateDecision:
    """A gate that is open: to find out what answers are worth."""
    return GateDecision(True, math.inf, 0.0, "asked to find out what it is worth")


class RecordedAnswersLLM(LLMSurrogate):
    """A model that repeats what was heard of it. Knows the problems of `heard` only."""

    def __init__(
        self, heard: Sequence[ModelAnswers], calibration: LLMCalibration, base: AnalyticSurrogate
    ) -> None:
        self._heard: Mapping[str, ModelAnswers] = {h.problem: h for h in heard}
        self.answers, self.seconds = 0, 0.0
        """How often something was repeated, and how long that took when it was said."""
        super().__init__(_UnavailableBackend(heard[0].model), calibration, base=base)

    def consult(self, query: Query, before: Prior, *, own: bool = True) -> LLMForecasts:
        """What was said of this problem; its own measurements were never shown. Raises `LLMError`."""
        h = self._heard.get(query.problem.id)
        if h is None or len(h.learned) != len(query.candidates):
            raise LLMError(f"nothing was heard of problem {query.problem.id}")
        texts = (" " * (h.characters // 2),)
        asked = ForecastQuestion(
            Prompt(h.prompt, texts[0], texts, BINS.labels),
            h.rows,
            None,
            h.reference,
            h.reference_log2_ms,
            False,
        )
        self.answers, self.seconds = self.answers + 1, self.seconds + h.seconds
        usage = Usage(1, h.tokens, seconds=h.seconds)
        return self.interpret(query, before, asked, BackendResponse(h.stated, h.mass, usage))


class _UnavailableBackend:
    """The backend of a model that is not asked any more."""

    def __init__(self, name: str) -> None:
        self.name = name

    def forecast(self, *args: object, **options: object) -> BackendResponse:
        """Raises `LLMError`."""
        raise LLMError("only what was heard before is repeated")

    def ready(self) -> bool:
        """Always."""
        return True

    def prepare(self) -> None:
        """Nothing to load."""

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True)
class PairedReplay:
    """One problem and seed, with and without the model."""

    family: str
    label: str
    seed: int
    plain_regret: float
    regret: float
    plain_measured: int
    measured: int
    plain_needed: int
    """Measurements until the worse of both final regrets was reached, or the tolerance."""
    needed: int
    plain_wall_s: float = 0.0
    """Simulated wall seconds, with the real ones of forecasting, without a model."""
    wall_s: float = 0.0
    """The same with a model, and with the seconds that it took, as if nothing had gone on beside it."""
    asked: bool = False
    question: str = CONFIG
    """See `llm.question_kinds`."""


@dataclass(frozen=True)
class SavingEstimate(Record, derived={"sure": attrgetter("lower_bound")}):
    """What replays say of a model."""

    saved: float
    """Share of the measurements saved at equal regret."""
    error: float
    """Its standard error (jackknife over families)."""
    regret: float
    """Geometric mean of regret with the model less that without, a share."""
    regret_error: float
    measured: float
    """Mean measurements per decision with the model ..."""
    plain_measured: float

    @property
    def lower_bound(self) -> float:
        """The saving less its error; 0 where regrets got worse beyond theirs."""
        if self.regret > self.regret_error:
            return 0.0
        return max(0.0, self.saved - self.error)

    @property
    def expected(self) -> float:
        """What a gate counts on: the saving itself; 0 where regrets got worse beyond their error."""
        return 0.0 if self.regret > self.regret_error else max(0.0, self.saved)

    def to_json(self) -> dict[str, float]:
        """Plain numbers, five digits."""
        return {k: round(v, 5) for k, v in super().to_json().items()}


def replay_pairs(
    tables: Sequence[Table],
    heard: Sequence[ModelAnswers],
    *,
    learn: FitSurrogate,
    seeds: Sequence[int] = (0, 1),
    settings: Settings | None = None,
    gate: Callable[[GateInputs], GateDecision] = always_ask,
    calibrated: Callable[[Sequence[ModelAnswers]], LLMCalibration] = fit_calibration,
) -> list[PairedReplay]:
    """Replay every table with and without the model.

    `calibrated` is given what was heard of the other families. Raises `SplitError` for too few families.
    """
    base, found = settings or Settings(), []
    for fold in make_folds(tables, "family"):
        learned = learn(fold.train)
        taught = [h for h in heard if h.family != fold.name]
        mine = [h for h in heard if h.family == fold.name]
        questions = {h.problem: h.question for h in mine}
        plain = DefaultSurrogate(learned)
        model = RecordedAnswersLLM(mine, calibrated(taught), learned)
        both = EnsembleSurrogate(plain, model, workers=16, patient=True, gate=gate)
        for table in fold.test:
            for seed in seeds:
                before = model.answers, model.seconds
                row = _replay_pair(fold.name, table, seed, plain, both, base.with_(seed=seed))
                told, took = model.answers - before[0], model.seconds - before[1]
                question = questions.get(table.problem.id, CONFIG)
                found.append(replace(row, wall_s=row.wall_s + took, asked=told > 0, question=question))
    return found


def _replay_pair(
    family: str, table: Table, seed: int, plain: Surrogate, both: Surrogate, settings: Settings
) -> PairedReplay:
    without, _ = replay_one(table, surrogate=plain, policy=None, settings=settings)
    with_it, _ = replay_one(table, surrogate=both, policy=None, settings=settings)
    # Whoever accepts a tolerance is served as well by anything within it.
    level = max(without.regret, with_it.regret, settings.tolerance) + 1e-9
    return PairedReplay(
        family,
        with_it.label,
        seed,
        without.regret,
        with_it.regret,
        without.measured,
        with_it.measured,
        _measurements_until(without.path, level),
        _measurements_until(with_it.path, level),
        without.tune_s,
        with_it.tune_s,
    )


def _measurements_until(path: Sequence[float], level: float) -> int:
    return next((i for i, regret in enumerate(path, 1) if regret <= level), len(path))


def estimate_saving(played: Sequence[PairedReplay]) -> SavingEstimate:
    """The figures of replays. Raises `ValueError` for replays of fewer than two families."""
    families = sorted({p.family for p in played})
    if len(families) < 2:
        raise ValueError(f"a standard error needs two or more families, got {families}")

    def share(rows: Sequence[PairedReplay]) -> float:
        return 1.0 - sum(p.needed for p in rows) / max(1, sum(p.plain_needed for p in rows))

    def worse(rows: Sequence[PairedReplay]) -> float:
        return float(np.mean([math.log1p(p.regret) - math.log1p(p.plain_regret) for p in rows]))

    without = [[p for p in played if p.family != f] for f in families]
    return SavingEstimate(
        share(played),
        _jackknife([share(rows) for rows in without]),
        worse(played),
        _jackknife([worse(rows) for rows in without]),
        float(np.mean([p.measured for p in played])),
        float(np.mean([p.plain_measured for p in played])),
    )


def with_saving(
    calibration: LLMCalibration, played: Sequence[PairedReplay]
) -> tuple[LLMCalibration, SavingEstimate]:
    """The calibration with what replays say that asking saves, by kind of question, and the pooled estimate.

    A kind's own figure counts for as many families as it has, the pooled one for one more. Raises as
    `estimate_saving` does.
    """
    pooled = estimate_saving(played)
    questions = dict(calibration.questions)
    for name, found in calibration.questions.items():
        mine = [p for p in played if p.question == name]
        families = len({p.family for p in mine})
        own = estimate_saving(mine).expected if families > 1 else pooled.expected
        mixed = (families * own + pooled.expected) / (families + 1)
        questions[name] = replace(found, saved=round(mixed, 5))
    return replace(calibration, saved=pooled.expected, questions=questions), pooled


def _jackknife(left: Sequence[float]) -> float:
    n, values = len(left), np.array(left)
    return math.sqrt((n - 1) / n * float(((values - values.mean()) ** 2).sum()))
