"""The surrogate that ships: the cost formula plus a learned residual, updated by what is measured.

Boosted trees fitted on the corpus correct the formula's log2 time from features that mean the same for
every kernel (`features.feature_vectors`), and a forest its probability of failing. The Gaussian process of
`formula` then takes over as measurements come in; candidates that end in the same leaves of a third forest
are alike to it. The trees ship as one npz file without pickle;
`forecast_train.surrogate` fits them.

How far a kernel lies from those that the model was fitted to says how much less a forecast is worth: of kernels
whose family was left out of the fit, the far ones' first forecasts are off by more than twice as much as the near
ones'. So each of both have calibrations of their own (`calibration.calibration_group`).
"""

from __future__ import annotations

import json
import operator
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from forecast_autotune.errors import RecordError
from forecast_autotune.features.candidate_list import CandidateList
from forecast_autotune.features.devices import device_spec, is_measured_device
from forecast_autotune.features.feature_vectors import VERSION as VECTOR
from forecast_autotune.features.feature_vectors import feature_matrix
from forecast_autotune.file_access import open_named_output
from forecast_autotune.surrogates.covariance import Hyperparameters, Rows
from forecast_autotune.surrogates.forest import Forest
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.prior import Prior
from forecast_autotune.surrogates.protocol import Array, Forecasts, Query

LEARNED_HYPERPARAMETERS = Hyperparameters(
    slope=0.248,
    part_slopes=(0.207, 0.207, 0.206, 0.099, 0.0127, 0.116, 0.106),
    additive=0.273,
    joint=0.162,
    rough=0.0312,
    warp_trend=0.2,
    forest=0.125,
    noise=0.003,
    additive_scale=4.44,
    joint_scale=1.97,
    warp_scale=1.25,
    stage_scale=0.807,
)
"""Hyperparameters of the Gaussian process over fitted trees: the likeliest on the corpus (type-II maximum
likelihood; Rasmussen & Williams 2006, ch. 5.4).

`warp_trend` alone was chosen by what decisions cost: whole lists make 0.02 likeliest, as few kernels have a trend.
Where one has, a decision that cannot go on from two measured numbers of warps to a third loses up to 30 %. At 0.3,
choices of the recorded corpus get worse.
"""

_LONG = 500
"""Candidates from which on the forests walk each distinct row of features once."""


@dataclass(frozen=True)
class LearnedModel:
    """The trees and hyperparameters that were fitted to a corpus."""

    names: tuple[str, ...]
    """Features, in the order of `features.feature_vectors`."""
    residual: Forest
    """log2 of true over formula time, relative to the problem's fast candidates: the mean of its trees."""
    kin: Forest
    """Candidates that share its leaves are alike; its values are not used."""
    failure: Forest | None
    """Probability of failing; None where the corpus held too few failures."""
    hyper: Hyperparameters
    """Hyperparameters of the Gaussian process under which the corpus is likeliest."""
    weight: float = 1.0
    """Factor on the residual."""
    about: Mapping[str, Any] | None = None
    """The model's origin: tables, kernels, rows, versions; shown by `doctor`."""
    corpus: TrainingCorpus | None = None
    """The problems that it was fitted to; None where the file does not hold them."""

    def save(self, path: Path) -> None:
        """Write one npz file, atomically."""
        head: dict[str, Any] = {"names": self.names, "vector": VECTOR, "hyper": vars(self.hyper)}
        head |= {"weight": self.weight, "about": dict(self.about or {})}
        arrays: dict[str, npt.NDArray[Any]] = {
            "head": np.array(json.dumps(head)),
            **self.residual.arrays("r"),
            **self.kin.arrays("k"),
        }
        if self.failure is not None:
            arrays |= self.failure.arrays("f")
        if self.corpus is not None:
            arrays |= {"c_points": self.corpus.points, "c_kernels": self.corpus.kernels}
        with open_named_output(path) as stream:
            # Not compressed: unpacking takes 25 ms of a new process's first decision, and a wheel is packed.
            np.savez(stream, allow_pickle=False, **arrays)

    @classmethod
    def load(cls, path: Path) -> LearnedModel:
        """Read what `save` wrote. Raises `RecordError` for anything else, naming the remedy."""
        try:
            with np.load(path, allow_pickle=False) as archive:
                arrays = dict(archive)
            head = json.loads(str(arrays["head"]))
            if head["vector"] != VECTOR:
                raise RecordError(f"it was fitted to features {head['vector']!r}, these are {VECTOR!r}")
            failure = Forest.of(arrays, "f") if "f_roots" in arrays else None
            corpus = TrainingCorpus(arrays["c_points"], arrays["c_kernels"]) if "c_points" in arrays else None
            fields = dict(head["hyper"])
            hyper = Hyperparameters(**{**fields, "part_slopes": tuple(fields["part_slopes"])})
            return cls(
                tuple(head["names"]),
                Forest.of(arrays, "r"),
                Forest.of(arrays, "k"),
                failure,
                hyper,
                float(head["weight"]),
                head["about"],
                corpus,
            )
        except (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile, zlib.error) as error:
            raise RecordError(
                f"{path}: no model of this release ({error}); fit one with "
                "`forecast-autotune train surrogate`"
            ) from error


class LearnedSurrogate(AnalyticSurrogate):
    """Formula + learned residual + Gaussian-process update; see the module."""

    name = "learned"

    def __init__(self, model: LearnedModel, hyper: Hyperparameters | None = None, **limits: int) -> None:
        super().__init__(hyper or model.hyper, **limits)
        self.model = model
        self.trees = len(model.kin.roots)
        self._formula_only = AnalyticSurrogate()
        self._last: tuple[Any, Any, Any, Any, int, Prior] | None = None
        """The latest prior, after the objects that it follows from. A decision has many queries about one list, and
        with thousands of candidates the forest would be most of its work."""

    def answer(self, query: Query, before: Prior) -> Forecasts:
        """The answer of the formula where there is no IR: the forest could not read anything."""
        if not before.informed:
            return self._formula_only.answer(query, before)
        return super().answer(query, before)

    def prior(self, query: Query) -> Prior:
        """The formula's prior, corrected by the forests where there is IR to read."""
        if not isinstance(query.candidates, CandidateList):
            return self._corrected(query)
        last, question = self._last, (query.problem, query.candidates, query.grids, query.ttir)
        # Traces are only ever added: as many texts in the same mapping are the same texts.
        if last is not None and last[4] == len(query.ttir) and all(map(operator.is_, last[:4], question)):
            return last[5]
        result = self._corrected(query)
        self._last = (*question, len(query.ttir), result)
        return result

    def _corrected(self, query: Query) -> Prior:
        formula = super().prior(query)
        if formula.facts is None or formula.costs is None:
            return formula
        device = device_spec(query.problem.device)
        features, _ = feature_matrix(
            formula.facts, formula.costs, [c.config for c in query.candidates], device
        )
        corpus = self.model.corpus
        away = (
            None
            if corpus is None
            else corpus.training_distance(_problem_centroid(self.model.names, features))
        )
        features, of = _distinct_rows(features)
        residual = self.model.residual(features).mean(axis=1)
        p_fail = formula.p_fail
        if self.model.failure is not None and is_measured_device(query.problem.device):
            combination = _combine_failure_odds(p_fail, self.model.failure(features).mean(axis=1)[of])
            # Where the rules forecast too many bytes, no experience with other kernels counts.
            p_fail = np.where(p_fail > 0.5, p_fail, combination)
        mean = formula.mean + self.model.weight * residual[of]
        leaves = self.model.kin.leaves(features)[of]
        return replace(formula, mean=mean, p_fail=p_fail, leaves=leaves, training_distance=away)


def _distinct_rows(features: Array) -> tuple[Array, Rows]:
    """The distinct rows, and the number of its own for each row; all rows of a short list, as comparing costs more."""
    if len(features) < _LONG:
        return features, np.arange(len(features))
    x = np.ascontiguousarray(features, dtype=np.float32)  # as the forests read them
    # Sorting whole rows takes ten times as long as sorting one number for each.
    weights = np.random.default_rng(0).integers(1, 2**63, x.shape[1], dtype=np.uint64)
    marks = (x.view(np.uint32) * weights).sum(axis=1, dtype=np.uint64)
    first, of = np.unique(marks, return_index=True, return_inverse=True)[1:]
    if not np.array_equal(x[first[of]], x, equal_nan=True):  # two rows with the same number
        return features, np.arange(len(features))
    return features[first], of


def _combine_failure_odds(formula: Array, forest: Array) -> Array:
    """P(failure) at the mean of both log odds."""
    odds = sum(np.log(p) - np.log1p(-p) for p in (np.clip(x, 0.002, 0.995) for x in (formula, forest))) / 2
    return np.asarray(1.0 / (1.0 + np.exp(-odds)))


@cache
def shipped_model() -> LearnedModel | None:
    """The model inside the package; None when there is none (the formula then stands alone)."""
    return LearnedModel.load(_shipped_path()) if has_shipped_model() else None


def has_shipped_model() -> bool:
    """Whether the package has a model inside."""
    return _shipped_path().is_file()


def _shipped_path() -> Path:
    return Path(str(files("forecast_autotune") / "assets" / "surrogate.npz"))


_NEIGHBOURS = 3
"""Number of nearest kernels whose distances are averaged."""
_MAX_FEATURE_DEVIATION = 6.0
"""Most standard deviations that one feature may add to a distance: it must not decide alone."""


def _problem_centroid(names: Sequence[str], features: Array) -> Array:
    """Means [plain features] over a problem's candidates' features [candidates, names].

    Features relative to the problem's own candidates are left out: they do not describe the kernel.
    """
    columns = [i for i, name in enumerate(names) if not name.endswith("~")]
    return np.asarray(features[:, columns].mean(axis=0))


@dataclass(frozen=True)
class TrainingCorpus:
    """Positions, in feature space, of the problems that a model was fitted to."""

    points: npt.NDArray[np.float32]
    """Each problem's `_problem_centroid`, [problems, plain features]."""
    kernels: npt.NDArray[np.int32]
    """Number of each problem's kernel, [problems]."""

    @classmethod
    def of(cls, names: Sequence[str], features: Sequence[Array], kernels: Sequence[str]) -> TrainingCorpus:
        """Build it from the features [candidates, names] of each problem, and its kernel's name."""
        points = np.stack([_problem_centroid(names, x) for x in features]).astype(np.float32)
        return cls(points, np.unique(kernels, return_inverse=True)[1].reshape(-1).astype(np.int32))

    @cached_property
    def _feature_scale(self) -> npt.NDArray[np.float32]:
        return np.asarray(self.points.std(axis=0) + 1e-6)

    @cached_property
    def _scaled_points(self) -> Array:
        return np.asarray(self.points / self._feature_scale.astype(float))

    def training_distance(self, at: Array) -> float:
        """Distance of a problem's `_problem_centroid` from the nearest kernels.

        Root mean square over features, in standard deviations of the corpus, to the nearest problem of each kernel;
        the mean over the nearest `_NEIGHBOURS` kernels.
        """
        gaps = self._scaled_points - at / self._feature_scale
        np.clip(gaps, -_MAX_FEATURE_DEVIATION, _MAX_FEATURE_DEVIATION, out=gaps)
        each = np.sqrt(np.einsum("pf,pf->p", gaps, gaps) / gaps.shape[1])
        nearest = np.full(int(self.kernels.max()) + 1, np.inf)
        np.minimum.at(nearest, self.kernels, each)
        return float(np.sort(nearest)[:_NEIGHBOURS].mean())
