"""Baselines that need scikit-learn: boosting on raw config features, and surrogates of one run alone."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from forecast_autotune.errors import ForecastAutotuneError
from forecast_autotune.features.config_encoder import ConfigEncoder
from forecast_autotune.records import Candidate, Scalar, digest
from forecast_autotune.records.table import Table
from forecast_autotune.surrogates.protocol import Array, Forecasts, Query, Surrogate
from forecast_train.evaluation.joint_normal import (
    DEFAULT_P_FAIL,
    UNKNOWN_SD,
    JointNormal,
    forecasts_from,
    known_labels,
    log_times,
    random_places,
)
from forecast_train.evaluation.metrics import RowIndices
from forecast_train.evaluation.splits import kernel_of

_LAUNCH_PARAMETERS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
_NAME_BUCKETS = 28
"""Columns that the names of meta-parameters are hashed into: few enough for trees, rarely shared."""
_TEXT_BUCKETS = 16
_RANDOM_STARTS = 3
"""Candidates by lot before a surrogate of one run is fitted."""
_TREE_COUNT = 48
_FLOOR_SD = 0.1
"""What trees that agree may still be wrong by, log2."""


class MissingLearningLibrary(ForecastAutotuneError, ImportError):
    """A baseline needs scikit-learn, and it is not installed."""


def _sklearn(module: str) -> ModuleType:
    from importlib import import_module

    try:
        return import_module(f"sklearn.{module}")
    except ImportError as error:
        raise MissingLearningLibrary(
            f"boosting, cold_trees and cold_gp need scikit-learn ({error}): "
            "pip install 'forecast-autotune[eval]', or name other --methods"
        ) from error


def raw_features(candidates: Sequence[Candidate]) -> Array:
    """Config parameters as columns, shape [n, 4 + 28]; NaN where a config does not have one.

    Launch options have columns of their own; meta-parameters are hashed by name, so that equal names of
    different kernels meet. Positive numbers enter as log2, words as a number out of 16.
    """
    columns = np.full((len(candidates), len(_LAUNCH_PARAMETERS) + _NAME_BUCKETS), np.nan)
    for i, candidate in enumerate(candidates):
        config = candidate.config
        columns[i, : len(_LAUNCH_PARAMETERS)] = [
            _feature_value(getattr(config, name)) for name in _LAUNCH_PARAMETERS
        ]
        for name, value in config.kwargs:
            columns[i, len(_LAUNCH_PARAMETERS) + _hash_bucket(name, _NAME_BUCKETS)] = _feature_value(value)
    return columns


def _feature_value(value: Scalar) -> float:
    if value is None:
        return math.nan
    if isinstance(value, str):
        return float(_hash_bucket(value, _TEXT_BUCKETS))
    return math.log2(value) if value > 0 else float(max(value, -1e6))


def _hash_bucket(text: str, count: int) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) % count


@dataclass(frozen=True)
class _TreeModel:
    columns: RowIndices
    trees: Any

    def predict(self, features: Array) -> Array:
        return np.asarray(self.trees.predict(features[:, self.columns]), float)


class BoostingBaseline:
    """Gradient-boosted trees on raw config features, forecasting log2 slowdown over the median."""

    name = "boosting"
    version = "1"

    def __init__(self, model: _TreeModel | None, sd: float) -> None:
        self._model = model
        self._sd = sd

    def forecast(self, query: Query) -> Forecasts:
        """Slowdowns of configs, whatever the kernel; equal ones when nothing was learnt."""
        if self._model is None:
            n = len(query.candidates)
            return forecasts_from(
                query, JointNormal.independent(np.zeros(n), UNKNOWN_SD), "nothing was learnt from"
            )
        mean = self._model.predict(raw_features(query.candidates))
        return forecasts_from(
            query, JointNormal.independent(mean, self._sd), "boosted trees on raw config features"
        )


def boosting(tables: Sequence[Table]) -> Surrogate:
    """Fit `BoostingBaseline`; its error is measured on kernels left out of the fit.

    Raises `MissingLearningLibrary` without scikit-learn.
    """
    regressor = _sklearn("ensemble").HistGradientBoostingRegressor
    columns, targets, kernels = [np.zeros((0, len(_LAUNCH_PARAMETERS) + _NAME_BUCKETS))], [np.zeros(0)], []
    for table in tables:
        times = log_times(table.by_candidate())
        if len(times) > 1:
            values = np.array(list(times.values()))
            columns.append(raw_features(list(times)))
            targets.append(values - np.median(values))
            kernels += [kernel_of(table.problem)] * len(values)
    x, y, groups = np.concatenate(columns), np.concatenate(targets), np.array(kernels)
    if not len(y):
        return BoostingBaseline(None, UNKNOWN_SD)

    def fitted(rows: Any) -> _TreeModel:
        # A column without a value would stop the fit.
        columns = np.flatnonzero(np.isfinite(x[rows]).any(axis=0))
        model = regressor(max_iter=200, learning_rate=0.08, early_stopping=False, random_state=0)
        return _TreeModel(columns, model.fit(x[rows][:, columns], y[rows]))

    third = np.array([_hash_bucket(str(name), 3) for name in groups])
    errors = [
        y[third == i] - fitted(third != i).predict(x[third == i])
        for i in range(3)
        if (third == i).any() and (third != i).any()
    ]
    sd = float(np.sqrt((np.concatenate(errors) ** 2).mean())) if errors else float(y.std())
    return BoostingBaseline(fitted(slice(None)), max(sd, _FLOOR_SD))


_FitFunction = Callable[[Array, RowIndices, Array, int], tuple[Array, Array, Array]]
"""(points [n, d], measured rows [m], their log2 times [m], seed) -> mean, factor, loose of a `JointNormal`."""


class SingleRunSurrogate:
    """A surrogate of one run alone: three candidates by lot, then a model of what has been measured."""

    version = "1"
    order_only = True

    def __init__(self, name: str, fit: _FitFunction, seed: int = 0) -> None:
        self.name = name
        self._fit = fit
        self._seed = seed

    def seeded(self, seed: int) -> SingleRunSurrogate:
        """Other starts, and other trees."""
        return SingleRunSurrogate(self.name, self._fit, seed)

    def forecast(self, query: Query) -> Forecasts:
        """A random order, then a joint normal forecast in the configs' log2 coordinates."""
        ran = {i: math.log2(m.ms) for i, m in known_labels(query).items() if m.ok}
        if len(ran) < _RANDOM_STARTS:
            return forecasts_from(
                query, JointNormal.from_order(random_places(query, self._seed)), "starts by lot"
            )
        points = ConfigEncoder.of(query.candidates)(query.candidates)
        # In the same order whatever the order of measuring: equal evidence, equal forecast.
        rows = np.array(sorted(ran, key=lambda i: query.candidates[i].id))
        times = np.array([ran[i] for i in rows])
        state = int(digest(self._seed, query.problem.id)[:8], 16)
        mean, factor, loose = self._fit(points, rows, times, state)
        p_fail = np.full(len(points), DEFAULT_P_FAIL)
        return forecasts_from(
            query, JointNormal(mean, factor, loose, p_fail), f"{len(ran)} own measurements alone"
        )


def _trees(points: Array, rows: RowIndices, times: Array, state: int) -> tuple[Array, Array, Array]:
    model = _sklearn("ensemble").ExtraTreesRegressor(_TREE_COUNT, random_state=state, n_jobs=1)
    model.fit(points[rows], times)
    each = np.array([tree.predict(points) for tree in model.estimators_])
    mean = each.mean(axis=0)
    return mean, (each - mean) / math.sqrt(_TREE_COUNT - 1), np.full(len(points), _FLOOR_SD)


def _gaussian(points: Array, rows: RowIndices, times: Array, state: int) -> tuple[Array, Array, Array]:
    process, kernels = _sklearn("gaussian_process"), _sklearn("gaussian_process.kernels")
    covariance = kernels.ConstantKernel(1.0, (0.1, 10.0)) * kernels.Matern(2.0, (0.3, 20.0), nu=2.5)
    covariance += kernels.WhiteKernel(1e-3, (1e-5, 1e-1))
    model = process.GaussianProcessRegressor(covariance, normalize_y=True, random_state=state)
    with warnings.catch_warnings():
        # Three points do not settle a length scale: an end of its range is an answer, too.
        warnings.simplefilter("ignore", _sklearn("exceptions").ConvergenceWarning)
        model.fit(points[rows], times)
        mean, joint = model.predict(points, return_cov=True)
    values, vectors = np.linalg.eigh(np.asarray(joint, float))
    keep = values > 1e-9 * max(float(values.max()), 1e-12)
    factor = (vectors[:, keep] * np.sqrt(values[keep])).T
    return np.asarray(mean, float), np.asarray(factor), np.full(len(points), 1e-3)


def single_run_trees(tables: Sequence[Table]) -> Surrogate:
    """Extra trees on the run's own measurements; the tables teach it nothing."""
    _sklearn("ensemble")
    return SingleRunSurrogate("cold_trees", _trees)


def single_run_gp(tables: Sequence[Table]) -> Surrogate:
    """A Matern Gaussian process on the run's own measurements; the tables teach it nothing."""
    _sklearn("gaussian_process")
    return SingleRunSurrogate("cold_gp", _gaussian)
