"""Tables -> the trees of `forecast_autotune.surrogates.learned`.

Boosted trees learn the *residual* of the untrained cost formula, every problem with the same weight and
the fast candidates with more of it: a model trained on one author's kernels adds nothing to the formula
on another's, one trained on many hands does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from forecast_autotune.errors import ForecastAutotuneError
from forecast_autotune.features.devices import device_spec
from forecast_autotune.features.feature_vectors import feature_matrix
from forecast_autotune.records import Candidate, Problem
from forecast_autotune.records.table import Table
from forecast_autotune.surrogates.covariance import Hyperparameters
from forecast_autotune.surrogates.forest import Forest
from forecast_autotune.surrogates.learned import (
    LEARNED_HYPERPARAMETERS,
    LearnedModel,
    LearnedSurrogate,
    TrainingCorpus,
)
from forecast_autotune.surrogates.prior import Prior, formula_prior
from forecast_autotune.surrogates.protocol import Array


class FitError(ForecastAutotuneError, ValueError):
    """Nothing can be fitted to these tables; the message says why."""


@dataclass(frozen=True)
class FitSettings:
    """Settings of the trees."""

    trees: int = 64
    """Trees of the forests: of kinship and of failures."""
    leaf: int = 8
    """Fewest rows of their leaves."""
    share: float = 0.3
    """Share of the features considered at a split, of forests and boosted trees."""
    bags: int = 3
    """Boosted models, alike but for what they draw, whose mean is believed: one alone is a lottery."""
    rounds: int = 300
    """Boosted trees of each, one after the other, each fitted to what those before it left over."""
    rate: float = 0.05
    """Share of that which a tree may take."""
    ends: int = 31
    """Most leaves of a boosted tree."""
    least: int = 20
    """Fewest rows of a leaf of a boosted tree."""
    drawn: float = 0.5
    """Share of the rows that a boosted tree sees."""
    weight: float = 1.0
    """Share of the residual that is believed."""
    hyper: Hyperparameters = LEARNED_HYPERPARAMETERS
    """Hyperparameters of the Gaussian process; also what compresses slowdowns here."""
    jobs: int = -1


@dataclass(frozen=True)
class ProblemArrays:
    """One problem as numbers."""

    features: Array
    """[n, width]"""
    names: tuple[str, ...]
    formula: Array
    """log2 milliseconds by the cost formula."""
    observed: Array
    """log2 milliseconds; NaN for failures."""
    failed: npt.NDArray[np.bool_]


def fit(tables: Sequence[Table], *, seed: int = 0, recipe: FitSettings | None = None) -> LearnedSurrogate:
    """A surrogate fitted to these tables alone. Raises `FitError` when none has IR and times."""
    return LearnedSurrogate(fit_model(tables, seed=seed, recipe=recipe))


_PriorFunction = Callable[
    [Problem, Sequence[Candidate], Mapping[Candidate, tuple[int, ...]], Mapping[str, str]], Prior
]
"""The belief before anything is measured, about a problem, its candidates, their grids and IR."""


def fit_model(
    tables: Sequence[Table],
    *,
    seed: int = 0,
    recipe: FitSettings | None = None,
    believe: _PriorFunction = formula_prior,
) -> LearnedModel:
    """The forests; see the module. Raises `FitError` when no table has IR, or facts of it, and times.

    `believe` is the formula whose residual is learned: another one may read other problems, too.
    """
    how = recipe or FitSettings()
    arrays = [
        (rows, t.problem.kernel.name)
        for t in tables
        if (rows := _problem_arrays(_TableKey(t), believe)) is not None
    ]
    problems = [rows for rows, _ in arrays]
    if not problems:
        raise FitError(
            f"none of {len(tables)} tables has TTIR (or facts of it that this release reads), grids and "
            "times: tune with this release, or harvest with FORECAST_AUTOTUNE_MODE=exhaustive"
        )
    try:
        from lightgbm import LGBMRegressor
        from sklearn.ensemble import ExtraTreesRegressor
    except (ImportError, OSError) as missing:  # LightGBM loads the system's OpenMP
        raise FitError(
            f"fitting needs scikit-learn and LightGBM: pip install 'forecast-autotune[eval]' ({missing})"
        ) from missing
    features = np.concatenate([p.features for p in problems])
    target, weight = (
        np.concatenate(x) for x in zip(*(_residual_targets(p, how) for p in problems), strict=True)
    )
    options: dict[str, Any] = {
        "n_estimators": how.trees,
        "min_samples_leaf": how.leaf,
        "max_features": how.share,
        "random_state": seed,
        "n_jobs": how.jobs,
    }
    use = weight > 0
    features = features.astype(np.float32)  # as they will be read
    data = features[use], target[use], weight[use] / weight[use].mean()
    models = [LGBMRegressor(**kwargs).fit(*data).booster_ for kwargs in _boosting_parameters(how, seed)]
    kin = _forest_arrays(ExtraTreesRegressor(**options).fit(*data))
    fails = np.concatenate([p.failed for p in problems])
    failure = None
    if fails.sum() >= 20:
        even = np.concatenate([np.full(len(p.failed), 1.0 / len(p.failed)) for p in problems])
        forest = ExtraTreesRegressor(**options).fit(features, fails.astype(float), sample_weight=even)
        failure = _forest_arrays(forest)
    counts = {
        "kernels": len({t.problem.kernel.name for t in tables}),
        "problems": len(problems),
        "rows": len(features),
        "failures": int(fails.sum()),
        "seed": seed,
    }
    kinship = replace(kin, value=np.zeros_like(kin.value))
    names = problems[0].names
    corpus = TrainingCorpus.of(names, [p.features for p in problems], [name for _, name in arrays])
    return LearnedModel(names, summed_forest(models), kinship, failure, how.hyper, how.weight, counts, corpus)


def _boosting_parameters(how: FitSettings, seed: int) -> list[dict[str, Any]]:
    """LightGBM's parameters, per boosted model. Two seeds have no model in common."""
    common = {
        "n_estimators": how.rounds,
        "learning_rate": how.rate,
        "num_leaves": how.ends,
        "min_child_samples": how.least,
        "feature_fraction_bynode": how.share,
        "subsample": how.drawn,
        "subsample_freq": 1,
        "reg_lambda": 1.0,
        # Sums in another order may choose other splits, and threads that wait for each other are slower than
        # one alone where others are at work.
        "deterministic": True,
        "force_row_wise": True,
        "n_jobs": 1,
        "verbose": -1,
    }
    return [{**common, "random_state": seed * how.bags + i} for i in range(how.bags)]


def _forest_arrays(forest: Any) -> Forest:
    """A fitted scikit-learn forest as arrays; nodes of a tree are in pre-order, so parents come first."""
    trees = [e.tree_ for e in forest.estimators_]
    sizes = [t.node_count for t in trees]
    roots = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int32)
    shift = np.repeat(roots, sizes)

    def join(name: str) -> Any:
        return np.concatenate([getattr(t, name) for t in trees])

    leaf = join("children_left") < 0
    return Forest(
        feature=np.where(leaf, -1, join("feature")).astype(np.int16),
        threshold=join("threshold").astype(np.float32),
        left=np.where(leaf, 0, join("children_left") + shift).astype(np.int32),
        right=np.where(leaf, 0, join("children_right") + shift).astype(np.int32),
        value=np.concatenate([t.value[:, 0, 0] for t in trees]).astype(np.float32),
        roots=roots,
    )


def summed_forest(boosters: Sequence[Any]) -> Forest:
    """The trees of LightGBM's models as one forest, whose mean is the mean of the models' sums."""
    trees = [tree for booster in boosters for tree in booster.dump_model()["tree_info"]]
    scale = len(trees) / len(boosters)
    rows: list[tuple[int, float, int, int, float]] = []

    def grow(node: Any) -> int:
        at = len(rows)
        if "split_feature" not in node:
            rows.append((-1, 0.0, 0, 0, node["leaf_value"] * scale))
            return at
        if node["decision_type"] != "<=":
            raise FitError(f"a split by {node['decision_type']!r} has no place in a `Forest`: use numbers")
        rows.append((node["split_feature"], node["threshold"], 0, 0, 0.0))
        left, right = grow(node["left_child"]), grow(node["right_child"])
        rows[at] = (node["split_feature"], node["threshold"], left, right, 0.0)
        return at

    roots = [grow(tree["tree_structure"]) for tree in trees]
    feature, threshold, left, right, value = zip(*rows, strict=True)
    return Forest(
        feature=np.array(feature, dtype=np.int16),
        # A threshold lies between two numbers of single precision; rounded up it would let the upper one in.
        threshold=_largest_float32_below(np.array(threshold)),
        left=np.array(left, dtype=np.int32),
        right=np.array(right, dtype=np.int32),
        value=np.array(value, dtype=np.float32),
        roots=np.array(roots, dtype=np.int32),
    )


def _largest_float32_below(values: Array) -> npt.NDArray[np.float32]:
    """The largest numbers of single precision that are not above these."""
    near = values.astype(np.float32)
    return np.where(near > values, np.nextafter(near, np.float32(-np.inf)), near)


def _residual_targets(rows: ProblemArrays, how: FitSettings) -> tuple[Array, Array]:
    """(target, weight) per candidate: compressed log2 slowdown, observed minus formula, centred."""
    ok = ~rows.failed
    slowdown = how.hyper.compress(rows.observed - np.nanmin(rows.observed), 0.0)
    forecast = how.hyper.compress(rows.formula - rows.formula.min(), 0.0)
    weight = np.where(ok, 2.0 ** -np.where(ok, slowdown, 0.0), 0.0)
    weight = weight / weight.sum()
    residual = np.where(ok, slowdown - forecast, 0.0)
    return residual - (residual * weight).sum(), weight


class _TableKey:
    """A table as a cache key: hashed by identity, which `lru_cache` keeps alive."""

    def __init__(self, table: Table) -> None:
        self.table = table

    def __hash__(self) -> int:
        return id(self.table)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _TableKey) and other.table is self.table


@lru_cache(maxsize=8192)
def _problem_arrays(ref: _TableKey, believe: _PriorFunction = formula_prior) -> ProblemArrays | None:
    """The numbers of one table; None where there is no IR or nothing ran. Folds share tables: cached."""
    table = ref.table
    observed = np.array(table.log2_ms())
    is_ok = np.isfinite(observed)
    if is_ok.sum() < 2:
        return None
    problem, candidates = table.problem, list(table.by_candidate())
    prior = believe(problem, candidates, table.grids(), problem.ttir)
    if prior.facts is None or prior.costs is None:
        return None
    x, names = feature_matrix(
        prior.facts, prior.costs, [c.config for c in candidates], device_spec(problem.device)
    )
    return ProblemArrays(x, tuple(names), prior.mean, observed, ~is_ok)
