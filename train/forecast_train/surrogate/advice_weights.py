"""How far advice should be followed: the weights under which recorded times are likeliest.

The times of a few candidates of every problem, fast ones more often, are drawn once; their log likelihood under
the process with advice is maximised over the weights of `AdviceWeights`. Kernels count alike, however many of
their problems are recorded.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from forecast_autotune.features.candidate_list import CandidateList
from forecast_autotune.features.config_encoder import ConfigEncoder
from forecast_autotune.llm.advice.record import Advice
from forecast_autotune.llm.advice.subject import AdviceError
from forecast_autotune.records.table import Table
from forecast_autotune.surrogates.advised import AdviceWeights, AdvisedSurrogate
from forecast_autotune.surrogates.covariance import Covariance, CovarianceInputs, Hyperparameters
from forecast_autotune.surrogates.learned import LearnedSurrogate
from forecast_autotune.surrogates.protocol import Array, Query

_DRAWN = 14
"""Candidates of one problem whose times count."""
NOISE = 0.006
"""Standard deviation (log2) of recorded times."""
FITTED = ("mean", "sd", "constants")
"""The others hardly change a likelihood; replays of decisions chose them."""


@dataclass(frozen=True)
class AdviceEvidence:
    """Evidence of one problem's drawn candidates about weights; arrays over the candidates."""

    kernel: str
    family: str
    hyper: Hyperparameters
    """Covariance of the process without advice."""
    inputs: CovarianceInputs
    """Without advice."""
    surprise: Array
    """Compressed log2 time less the belief without advice, [n]."""
    shifts: Array
    """Disagreement of each cost function, divided by their number, [n, functions]."""
    constants: Array
    """Shift by each constant within its stated spread, [n, constants]."""
    terms: Array
    """Shift by a doubling of each labelled term, [n, terms]."""


def advice_evidence(
    table: Table, advice: Advice, base: LearnedSurrogate, *, kernel: str, family: str, seed: int = 0
) -> AdviceEvidence | None:
    """The evidence of one table; None where the base has no IR to read or the advice does not apply."""
    rows = {c: m for c, m in table.by_candidate().items() if m.ok and c.is_base_variant}
    candidates = CandidateList.of(list(rows))
    grids = {m.candidate: m.grid for m in table.measurements if m.grid is not None}
    query = Query(table.problem, candidates, grids, ttir=table.problem.ttir)
    before = base.prior(query)
    if not before.informed or len(rows) < 4:
        return None
    plain = AdviceWeights(mean=1.0, constants=1.0, terms=1.0)
    try:
        moved = AdvisedSurrogate(base, advice, True, plain).prior(query)
    except AdviceError:
        return None
    inputs, believed = base.inputs(candidates, before, ConfigEncoder.of(candidates))
    times = np.log2([m.ms for m in rows.values()])
    generator = np.random.default_rng(seed)
    share = 2.0 ** (-2.0 * (times - times.min()))
    drawn = generator.choice(len(times), min(len(times), _DRAWN), replace=False, p=share / share.sum())
    columns = moved.parts[:, before.parts.shape[1] :]
    functions = advice.functions
    kinds = np.array([kind for f in functions for kind in [0] * len(f.constants) + [1] * len(set(f.labels))])
    slopes = np.tanh(columns[:, len(functions) :] - columns[:, len(functions) :].mean(axis=0))
    surprise = base.hyper.compress(times, float(times.min())) - believed
    return AdviceEvidence(
        kernel,
        family,
        base.hyper,
        inputs[drawn],
        surprise[drawn],
        columns[drawn, : len(functions)],
        slopes[drawn][:, kinds == 0],
        slopes[drawn][:, kinds == 1],
    )


def fit_advice_weights(
    evidence: Sequence[AdviceEvidence], start: AdviceWeights | None = None
) -> AdviceWeights:
    """The likeliest weights. Raises `ValueError` without evidence."""
    from scipy.optimize import minimize

    if not evidence:
        raise ValueError("weights are fitted to at least one problem with advice on its kernel")
    first = start or AdviceWeights()
    counts = Counter(e.kernel for e in evidence)

    def lost(x: npt.NDArray[np.float64]) -> float:
        weights = _weights(first, x)
        total = sum(log_likelihood(e, weights) / counts[e.kernel] for e in evidence)
        return -total + 0.25 * float((x[1:] ** 2).sum())

    result = minimize(
        lost, np.zeros(len(FITTED)), method="Powell", options={"maxiter": 2, "xtol": 0.05, "ftol": 1e-3}
    )
    return _weights(first, result.x)


def log_likelihood(evidence: AdviceEvidence, weights: AdviceWeights) -> float:
    """Log likelihood of one problem's drawn times, up to a constant."""
    e, w = evidence, weights
    hyper = replace(e.hyper, additive=w.additive * e.hyper.additive, joint=w.joint * e.hyper.joint)
    covariance = Covariance(hyper)(e.inputs, e.inputs, 1.0) + hyper.intercept**2
    apart = e.shifts - e.shifts.mean(axis=0)
    covariance += w.sd**2 * e.shifts.shape[1] * apart @ apart.T
    covariance += (w.mean * w.constants) ** 2 * e.constants @ e.constants.T
    covariance += (w.mean * w.terms) ** 2 * e.terms @ e.terms.T
    covariance[np.diag_indices_from(covariance)] += NOISE**2
    root = np.linalg.cholesky(covariance)
    white = np.linalg.solve(root, e.surprise - w.mean * e.shifts.sum(axis=1))
    return -0.5 * float(white @ white) - float(np.log(np.diag(root)).sum())


def _weights(first: AdviceWeights, x: npt.NDArray[np.float64]) -> AdviceWeights:
    """The mean is shifted, all others are scaled."""
    scaled = {name: getattr(first, name) * math.exp(v) for name, v in zip(FITTED[1:], x[1:], strict=True)}
    return replace(first, mean=float(np.clip(first.mean + 0.2 * x[0], 0.0, 1.5)), **scaled)
