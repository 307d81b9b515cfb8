"""Forecasts of the baselines: a joint normal distribution, and what has been measured taken as it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from forecast_autotune.records import Candidate, Measurement, Problem, digest
from forecast_autotune.records.table import Table, latest_labels
from forecast_autotune.surrogates.protocol import Array, Forecasts, Query
from forecast_train.evaluation.metrics import RowIndices

LEVEL_SD = 2.0
"""Standard deviation (log2) of a problem's level before anything of it has run; as `Analytic` has it."""
UNKNOWN_SD = 3.0
"""Standard deviation (log2) of a candidate of which nothing is known."""
DEFAULT_P_FAIL = 0.03
"""P(failure) where nothing points to one."""
_NOISE_SD = 0.02
_ORDER_STEP = 1e-3
"""Between neighbours of an order without times: small against every real difference."""


@dataclass(frozen=True)
class JointNormal:
    """log2 milliseconds of n candidates = mean + z @ factor + loose * noise, z and noise standard normal."""

    mean: Array
    factor: Array
    """Shape [k, n]: what candidates have in common."""
    independent_sd: Array
    """Shape [n]: the standard deviation of each on its own."""
    p_fail: Array

    @classmethod
    def independent(cls, mean: Array, sd: float, p_fail: Array | None = None) -> JointNormal:
        """Independent errors of one size."""
        n = len(mean)
        fails = np.full(n, DEFAULT_P_FAIL) if p_fail is None else p_fail
        return cls(mean, np.zeros((0, n)), np.full(n, sd), fails)

    @classmethod
    def from_order(cls, place: RowIndices) -> JointNormal:
        """An order and nothing else: one vague error that all share, so every draw keeps the order.

        `place` [n] is each candidate's place. P(failure) is 0: by chance failing draws would reorder.
        """
        n = len(place)
        return cls(
            np.asarray(_ORDER_STEP * place, float), np.full((1, n), UNKNOWN_SD), np.zeros(n), np.zeros(n)
        )


def forecasts_from(query: Query, belief: JointNormal, reason: str, *, level: float = LEVEL_SD) -> Forecasts:
    """Forecasts of a belief, given the query's own measurements.

    The measured candidates are known; the median error on them is taken off all others, as the level of a
    problem is the least that anybody learns from measuring. Until something has run the level is uncertain
    by `level` (log2), for all candidates alike.
    """
    mean, factor = belief.mean.astype(float), belief.factor
    loose, p_fail = belief.independent_sd.copy(), belief.p_fail.copy()
    known = known_labels(query)
    ran = {i: math.log2(m.ms) for i, m in known.items() if m.ok}
    if ran:
        rows, truth = np.array(list(ran)), np.array(list(ran.values()))
        mean = mean + np.median(truth - mean[rows])
        mean[rows] = truth
        factor = factor.copy()
        factor[:, rows] = 0.0
        loose[rows] = _NOISE_SD
    elif level > 0:
        factor = np.concatenate([factor, np.full((1, len(mean)), level)])
    for i, m in known.items():
        p_fail[i] = 0.0 if m.ok else 1.0
    loose = np.maximum(loose, 1e-6)

    def sample(rows: RowIndices, count: int, generator: np.random.Generator) -> Array:
        shared = generator.standard_normal((count, len(factor))) @ factor[:, rows]
        return np.asarray(mean[rows] + shared + loose[rows] * generator.standard_normal((count, len(rows))))

    sd = np.sqrt((factor**2).sum(axis=0) + loose**2)
    return Forecasts(list(query.candidates), mean, sd, p_fail, sample, reason)


def known_labels(query: Query) -> dict[int, Measurement]:
    """The labels known of the query's candidates, by row."""
    row = {c: i for i, c in enumerate(query.candidates)}
    return {row[m.candidate]: m for m in latest_labels(query.measured).values() if m.candidate in row}


def relatives_by_kernel(tables: Sequence[Table]) -> Callable[[Problem], list[Table]]:
    """Look-up of the other tables of a problem's kernel function and device."""
    found: dict[tuple[str, str], list[Table]] = {}
    for table in tables:
        found.setdefault((table.problem.kernel.name, table.problem.device.slug), []).append(table)

    def of(problem: Problem) -> list[Table]:
        rows = found.get((problem.kernel.name, problem.device.slug), [])
        return [t for t in rows if t.problem.id != problem.id]

    return of


def log_times(rows: Mapping[Candidate, Measurement]) -> dict[Candidate, float]:
    """log2 milliseconds of the candidates that ran."""
    return {c: math.log2(m.ms) for c, m in rows.items() if m.ok}


def random_places(query: Query, seed: int) -> RowIndices:
    """A random place for each candidate, whatever the order in which they are listed; shape [n]."""
    drawn = [digest(seed, query.problem.id, c.id) for c in query.candidates]
    return np.argsort(np.argsort(drawn, kind="stable"), kind="stable")
