"""The baselines that a surrogate must beat, and the registry of everything that is evaluated.

A method is a `FitSurrogate`: it gets the training tables of a fold and returns a surrogate. Fitting accepts no
tables at all, and a surrogate that knows nothing of a problem says so with equal forecasts, which rank
candidates as they are listed. One whose `order_only` is true states no distribution before it has
measured: its first forecast is judged as an order alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from forecast_autotune.llm.calibration import LLMCalibration
from forecast_autotune.llm.prompt import FORECAST_VERSION
from forecast_autotune.records import Candidate, Measurement, Problem, digest
from forecast_autotune.records.table import Table, latest_labels
from forecast_autotune.surrogates.covariance import Hyperparameters
from forecast_autotune.surrogates.default import DefaultSurrogate
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.language_model.ensemble import EnsembleSurrogate
from forecast_autotune.surrogates.prior import VERSION, formula_prior
from forecast_autotune.surrogates.protocol import Array, Forecasts, Query, Surrogate
from forecast_train.llm.calibration.answers import ModelAnswers
from forecast_train.llm.calibration.fit import FEWEST_FAMILIES, fit_calibration
from forecast_train.llm.calibration.saving import RecordedAnswersLLM, always_ask
from forecast_train.metrics import RowIndices
from forecast_train.splits import nearest_relatives
from forecast_train.surrogate.fit import fit

FitSurrogate = Callable[[Sequence[Table]], Surrogate]
"""Training tables -> a surrogate."""
LLM_ONLY, LEARNED_WITH_LLM = "llm", "learned+llm"
"""Names of the two methods that ask a language model."""

_LEVEL_SD = 2.0
"""Standard deviation (log2) of a problem's level before anything of it has run."""
_UNKNOWN_SD = 3.0
"""Standard deviation (log2) of a candidate of which nothing is known."""
_P_FAIL = 0.03
"""P(failure) where nothing points to one."""
_NOISE_SD = 0.02
_ORDER_STEP = 1e-3
"""Between neighbours of an order without times: small against every real difference."""
_COPY_SD = 0.5
"""Error (log2) of a slowdown copied from another shape."""


def _forecasts_from(
    query: Query, mean: Array, sd: Array, p_fail: Array, reason: str, *, level: float = _LEVEL_SD
) -> Forecasts:
    """Forecasts of independent beliefs [n], given the query's own measurements.

    The measured candidates are known; the median error on them is taken off all others, as the level of a
    problem is the least that anybody learns from measuring. Until something has run the level is uncertain
    by `level` (log2), for all candidates alike.
    """
    mean, sd, p_fail = mean.astype(float), sd.astype(float), p_fail.astype(float)
    row = {c: i for i, c in enumerate(query.candidates)}
    measured = {row[m.candidate]: m for m in latest_labels(query.measured).values() if m.candidate in row}
    times = {i: math.log2(m.ms) for i, m in measured.items() if m.ok}
    if times:
        rows, truth = np.array(list(times)), np.array(list(times.values()))
        mean = mean + np.median(truth - mean[rows])
        mean[rows], sd[rows], level = truth, _NOISE_SD, 0.0
    for i, m in measured.items():
        p_fail[i] = 0.0 if m.ok else 1.0

    def sample(rows: RowIndices, count: int, generator: np.random.Generator) -> Array:
        offset = level * generator.standard_normal((count, 1))
        return np.asarray(mean[rows] + offset + sd[rows] * generator.standard_normal((count, len(rows))))

    return Forecasts(list(query.candidates), mean, np.hypot(sd, level), p_fail, sample, reason)


def _order_forecasts(query: Query, place: RowIndices, reason: str) -> Forecasts:
    """An order and nothing else; P(failure) is 0, as candidates that fail by chance would reorder the draws."""
    nothing = np.zeros(len(place))
    return _forecasts_from(query, np.asarray(_ORDER_STEP * place, float), nothing + 1e-6, nothing, reason)


def _equal_forecasts(query: Query, reason: str) -> Forecasts:
    n = len(query.candidates)
    return _forecasts_from(query, np.zeros(n), np.full(n, _UNKNOWN_SD), np.full(n, _P_FAIL), reason)


class RandomOrder:
    """An order by lot, the same for the same seed, problem and candidate, however candidates are listed."""

    name = "random"
    version = "1"
    order_only = True

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def forecast(self, query: Query) -> Forecasts:
        """A random order, nothing else."""
        drawn = [digest(self._seed, query.problem.id, c.id) for c in query.candidates]
        place = np.argsort(np.argsort(drawn, kind="stable"), kind="stable")
        return _order_forecasts(query, place, "a random order")


class ListedOrder:
    """The order in which the user listed the configs."""

    name = "first"
    version = "1"
    order_only = True

    def forecast(self, query: Query) -> Forecasts:
        """The given order, nothing else."""
        return _order_forecasts(query, np.arange(len(query.candidates)), "as listed")


class FormulaBaseline:
    """The untrained cost formula on TTIR, its residual never learnt; errors as `AnalyticSurrogate` assumes."""

    name = "formula"
    version = VERSION

    def forecast(self, query: Query) -> Forecasts:
        """The formula's times; equal ones where there is no TTIR."""
        before = formula_prior(query.problem, query.candidates, query.grids, query.ttir)
        if not before.informed:
            return _equal_forecasts(query, "no TTIR: nothing is known")
        h = Hyperparameters()
        sd = np.full(len(before.mean), math.sqrt(h.additive**2 + h.joint**2 + h.rough**2))
        return _forecasts_from(
            query, before.mean, sd, before.p_fail, "cost formula on TTIR", level=h.intercept
        )


class MedianConfigBaseline:
    """A config's mean log-slowdown over the kernel's other problems; equal forecasts without any."""

    name = "median_config"
    version = "1"

    def __init__(self, tables: Sequence[Table]) -> None:
        self._relatives = _relatives_by_kernel(tables)

    def forecast(self, query: Query) -> Forecasts:
        """Slowdowns over the fastest; a config that no problem has gets the mean of the known ones."""
        slowdowns: dict[Candidate, list[float]] = {}
        for table in self._relatives(query.problem):
            times = _log_times(table.by_candidate())
            best = min(times.values(), default=0.0)
            for candidate, value in times.items():
                slowdowns.setdefault(candidate, []).append(value - best)
        means = {c: float(np.mean(slowdowns[c])) for c in query.candidates if c in slowdowns}
        return _copied_forecasts(query, means, {}, "the config's mean slowdown at other shapes")


class NearestProblemBaseline:
    """The times of the nearest other problem of the kernel, copied; equal forecasts without one."""

    name = "nearest"
    version = "1"

    def __init__(self, tables: Sequence[Table]) -> None:
        self._relatives = _relatives_by_kernel(tables)

    def forecast(self, query: Query) -> Forecasts:
        """Its ranking and its level; a config that it does not have gets the mean of the known ones."""
        for relative in nearest_relatives(query.problem, self._relatives(query.problem)):
            rows = Table(relative.problem, list(relative.measurements)).by_candidate()
            times = {c: t for c, t in _log_times(rows).items() if c in set(query.candidates)}
            if times:
                failed = {c: 0.9 for c, m in rows.items() if not m.ok}
                return _copied_forecasts(query, times, failed, f"copied from {relative.problem.key}")
        return _copied_forecasts(query, {}, {}, "")


def _copied_forecasts(
    query: Query, times: dict[Candidate, float], fails: dict[Candidate, float], reason: str
) -> Forecasts:
    if not times:
        return _equal_forecasts(query, "no other problem of this kernel is known")
    usual = float(np.mean(list(times.values())))
    mean = np.array([times.get(c, usual) for c in query.candidates])
    sd = np.array([_COPY_SD if c in times else 2 * _COPY_SD for c in query.candidates])
    return _forecasts_from(
        query, mean, sd, np.array([fails.get(c, _P_FAIL) for c in query.candidates]), reason
    )


def _relatives_by_kernel(tables: Sequence[Table]) -> Callable[[Problem], list[Table]]:
    """Look-up of the other tables of a problem's kernel function and device."""
    groups: dict[tuple[str, str], list[Table]] = {}
    for table in tables:
        groups.setdefault((table.problem.kernel.name, table.problem.device.slug), []).append(table)

    def of(problem: Problem) -> list[Table]:
        rows = groups.get((problem.kernel.name, problem.device.slug), [])
        return [t for t in rows if t.problem.id != problem.id]

    return of


def _log_times(rows: Mapping[Candidate, Measurement]) -> dict[Candidate, float]:
    """log2 milliseconds of the candidates that ran."""
    return {c: math.log2(m.ms) for c, m in rows.items() if m.ok}


def _random_order(tables: Sequence[Table]) -> Surrogate:
    """A random order."""
    return RandomOrder()


def _listed_order(tables: Sequence[Table]) -> Surrogate:
    """The listed order."""
    return ListedOrder()


def formula(tables: Sequence[Table]) -> Surrogate:
    """The cost formula without the update."""
    return FormulaBaseline()


def analytic(tables: Sequence[Table]) -> Surrogate:
    """The cost formula with the update: the surrogate that ships."""
    return AnalyticSurrogate()


def learned(tables: Sequence[Table]) -> AnalyticSurrogate:
    """The surrogate that ships, fitted to these tables alone; without any, the formula it starts from."""
    return fit(tables) if tables else AnalyticSurrogate()


methods: dict[str, FitSurrogate] = {
    "learned": learned,
    "random": _random_order,
    "first": _listed_order,
    "formula": formula,
    "analytic": analytic,
    "median_config": MedianConfigBaseline,
    "nearest": NearestProblemBaseline,
}
"""Everything that `forecast-autotune eval` knows by name."""


def methods_by_name(names: Sequence[str]) -> dict[str, FitSurrogate]:
    """The methods of these names. Raises `ValueError` naming those that do not exist."""
    unknown = [name for name in names if name not in methods]
    if unknown or not names:
        raise ValueError(
            f"unknown method {', '.join(unknown) or '(none given)'}: choose from {', '.join(methods)}"
        )
    return {name: methods[name] for name in dict.fromkeys(names)}


class LLMOnly:
    """A model's answers about a problem, and its level learnt from what was measured; nothing else."""

    name = LLM_ONLY

    def __init__(self, model: RecordedAnswersLLM) -> None:
        self._model = model
        self.version = f"{FORECAST_VERSION}-{model.backend.name}"

    def forecast(self, query: Query) -> Forecasts:
        """The corrected bins as normal forecasts; a vague one where the model said nothing."""
        view = self._model.consult(query, AnalyticSurrogate().prior(query))
        answered = view.trust > 0
        sd = np.where(answered, np.maximum(view.sd, _NOISE_SD), _UNKNOWN_SD)
        reason = f"{int(answered.sum())} candidates forecast by {self._model.backend.name}"
        return _forecasts_from(query, view.log2_ms, sd, view.p_fail, reason)


def llm_methods(answers: Sequence[ModelAnswers]) -> dict[str, FitSurrogate]:
    """A language model alone, and beside the learned surrogate; they can travel to other processes.

    Each fold's calibration is fitted to the answers on the fold's training problems alone.
    """
    return {
        LLM_ONLY: partial(fit_llm_only, answers=list(answers)),
        LEARNED_WITH_LLM: partial(fit_learned_with_llm, answers=list(answers)),
    }


def fit_llm_only(tables: Sequence[Table], *, answers: Sequence[ModelAnswers]) -> Surrogate:
    """The model alone, calibrated on these tables."""
    return LLMOnly(RecordedAnswersLLM(answers, _calibration(tables, answers)))


def fit_learned_with_llm(tables: Sequence[Table], *, answers: Sequence[ModelAnswers]) -> Surrogate:
    """The learned surrogate fitted to these tables, with the model beside it, whatever asking costs."""
    plain = learned(tables)
    model = RecordedAnswersLLM(answers, _calibration(tables, answers))
    both = EnsembleSurrogate(DefaultSurrogate(plain), model, patient=True, gate=always_ask)
    # One name for all folds: their calibrations differ, the method does not.
    both.name, both.version = LEARNED_WITH_LLM, f"{plain.version}+{FORECAST_VERSION}-{answers[0].model}"
    return both


def _calibration(tables: Sequence[Table], answers: Sequence[ModelAnswers]) -> LLMCalibration:
    ids = {t.problem.id for t in tables}
    training = [a for a in answers if a.problem in ids]
    if len({a.family for a in training}) < FEWEST_FAMILIES:
        return LLMCalibration(answers[0].model, FORECAST_VERSION)
    return fit_calibration(training)
