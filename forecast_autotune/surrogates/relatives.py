"""Slowdowns of the same configs at other problems of the same kernel, pooled: usually other GPUs.

A relative that tried most of the candidates is worth more than correlated points: its slowdown of a
config is a regressor for the slowdown of that config here. The weighted mean over relatives is a mean
function with no model behind it; its error in predicting one relative from the rest says how far to trust
it here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from forecast_autotune.records import Candidate, Device, Problem
from forecast_autotune.records.problem import ADDRESS
from forecast_autotune.surrogates.protocol import Array, Relative

Kinship = Literal["none", "far", "near"]
DENSE_SHARE = 0.5
"""Share of the candidates that a relative must have tried to be a regressor."""
_FAST_END_LOG2 = 1.0
"""log2 slowdowns up to this count as the fast end, where errors matter."""
KIN_DISTANCE = 2.5
"""Problems less than this `problem_distance` apart are alike: the best of five configs is more than 2 % off for one
in eight of them, and for one in six without such a relative or with farther ones (recorded replays)."""
MIN_TUNED = 4
"""Candidates that ran from which on a relative counts as tuned."""
_BACKEND_DISTANCE = 2.0
_ARCH_DISTANCE = 0.7
_MODEL_DISTANCE = 0.3
_FAILED_QUANTILE = 0.9
"""A config without a time on any relative is assumed to be as slow as this quantile of the others."""


@dataclass(frozen=True)
class PooledRelatives:
    """Slowdowns by `r` dense relatives of `n` candidates; log2 units."""

    columns: Array
    """Slowdown over the relative's own fastest, slow end compressed, [n, r]; gaps hold the others' mean."""
    weights: Array
    """Weight of each relative by the likeness of its device, [r], summing to 1."""
    mean: Array
    """Weighted mean of the columns over those that ran the config, [n]."""
    support: Array
    """Weight of the relatives that ran the config, [n], 0 to 1."""
    spread: Array
    """Weighted standard deviation between the relatives that ran the config, [n]; 0 for a single one."""
    failed: Array
    """Weight of the relatives where the config failed among those that tried it, [n]."""
    error: float
    """Root mean square error of a relative predicted from the others, at the fast end; nan for one."""
    tries: Array
    """Configs taken in predicted order until one is within `tolerance` of the best, per left-out
    relative, [r]; empty for a single one."""

    def miss_probability(self, count: int) -> float:
        """P(still beyond the tolerance after `count` tries in predicted order), smoothed.

        Jeffreys' estimate from the left-out relatives: few of them never promise certainty. 0.5 when
        there is nothing to leave out.
        """
        return float(((self.tries > count).sum() + 0.5) / (len(self.tries) + 1.0))


def pool_relatives(
    problem: Problem,
    candidates: Sequence[Candidate],
    relatives: Sequence[Relative],
    *,
    knee: float = 1.5,
    beyond: float = 0.25,
    tolerance: float = 0.05,
) -> PooledRelatives | None:
    """Pool the relatives that tried at least `DENSE_SHARE` of the candidates; None when none did.

    Slowdowns beyond 2^knee are compressed by the factor `beyond`, as in `formula`: how slow a slow
    config is must not decide the mean. `tolerance` is the regret (0.05 is 5 %) that `tries` counts to.
    """
    columns, failures, devices = [], [], []
    for relative in relatives:
        if len(relative.measurements) < DENSE_SHARE * len(candidates):
            continue  # the case of most relatives, and cheaper than counting labels
        rows = relative.labels
        results = [rows.get(c) for c in candidates]
        times = np.array([math.log2(m.ms) if m is not None and m.ok else math.nan for m in results])
        if np.mean([m is not None for m in results]) < DENSE_SHARE or np.isfinite(times).sum() < 2:
            continue
        over = times - np.nanmin(times)
        columns.append(np.where(over > knee, knee + beyond * (over - knee), over))
        failures.append(np.array([m is not None and not m.ok for m in results]))
        devices.append(relative.problem.device)
    if not columns:
        return None
    raw, fails = np.stack(columns, axis=1), np.stack(failures, axis=1)
    away = [device_distance(problem.device, d) for d in devices]
    weights = _normalized(np.exp(-np.array(away)))
    mean, support = _weighted_mean(raw, weights)
    has_time = np.isfinite(raw)
    gap = np.where(has_time, raw - mean[:, None], 0.0)
    weight = np.maximum(support, 1e-12)
    spread = np.sqrt((gap**2 * weights * has_time).sum(axis=1) / weight)
    failed = (fails * weights).sum(axis=1) / np.maximum(((fails | has_time) * weights).sum(axis=1), 1e-12)
    error, tries = _leave_one_out(raw, devices, tolerance)
    complete = np.where(has_time, raw, mean[:, None])
    return PooledRelatives(complete, weights, mean, support, spread, failed, error, tries)


def kinship(problem: Problem, relatives: Sequence[Relative]) -> Kinship:
    """Whether another problem of the kernel has been tuned on this device, and whether it is near.

    Decisions after a `near` one are surer; after `far` ones alone, forecasts are surer than they should be.
    """
    distances = [
        problem_distance(problem, r.problem)
        for r in relatives
        if r.problem.device.slug == problem.device.slug and sum(m.ok for m in r.labels.values()) >= MIN_TUNED
    ]
    if not distances:
        return "none"
    return "near" if min(distances) < KIN_DISTANCE else "far"


def problem_distance(a: Problem, b: Problem) -> float:
    """How far apart two problems of one kernel are: mean |log2 ratio| of their sizes, and their devices."""
    away = 0.0 if a.device.slug == b.device.slug else device_distance(a.device, b.device)
    sizes_a, sizes_b = _log2_sizes(a), _log2_sizes(b)
    names = sizes_a.keys() & sizes_b.keys()
    if not names:
        return 2.0 + away
    steps = sorted((abs(math.log2(sizes_a[k] / sizes_b[k])) for k in names), reverse=True)
    # Strides and sizes repeat each other, so the few largest steps describe the change best.
    top = steps[: max(1, len(steps) // 3)]
    extra = 0.0 if a.kernel.source_sha256 == b.kernel.source_sha256 else 1.0
    layouts = {x.name: x.layout for x in a.arguments} != {x.name: x.layout for x in b.arguments}
    extra += KIN_DISTANCE if _addresses(a) != _addresses(b) else 0.0
    return sum(top) / len(top) + extra + float(layouts) + away


def _addresses(problem: Problem) -> dict[str, object]:
    """Operands that begin within a line: an aligned operand's best config may take 1.7 times the best one's time."""
    return {a.name: a.extra[ADDRESS] for a in problem.arguments if ADDRESS in a.extra}


def _log2_sizes(problem: Problem) -> dict[str, float]:
    results: dict[str, float] = {}
    for a in problem.arguments:
        if a.kind == "tensor":
            results |= {f"{a.name}[{i}]": float(n) for i, n in enumerate(a.shape) if n > 0}
        elif isinstance(a.value, int) and not isinstance(a.value, bool) and a.value > 0:
            results[a.name] = float(a.value)
    return results


def device_distance(a: Device, b: Device) -> float:
    """How unlike two devices are, 0 for one model: another backend counts most, then architecture."""
    if a.backend != b.backend:
        return _BACKEND_DISTANCE
    if a.arch and b.arch and a.arch != b.arch:
        return _ARCH_DISTANCE
    return 0.0 if a.name == b.name else _MODEL_DISTANCE


def _normalized(weights: Array) -> Array:
    return np.asarray(weights / weights.sum())


def _weighted_mean(raw: Array, weights: Array) -> tuple[Array, Array]:
    """Weighted mean over the columns that have a value, and their weight; gaps take a slow value."""
    has_time = np.isfinite(raw)
    support = (has_time * weights).sum(axis=1)
    total = (np.where(has_time, raw, 0.0) * weights).sum(axis=1)
    some = support > 0
    mean = np.divide(total, support, out=np.zeros(len(raw)), where=some)
    if not some.all():
        mean[~some] = np.quantile(mean[some], _FAILED_QUANTILE)
    return mean, support


def _leave_one_out(raw: Array, devices: Sequence[Device], tolerance: float) -> tuple[float, Array]:
    """Each relative predicted from the others: error at the fast end, and tries."""
    count = raw.shape[1]
    if count < 2:
        return math.nan, np.zeros(0)
    errors, tries = [], []
    for target in range(count):
        sources = [i for i in range(count) if i != target]
        away = np.array([device_distance(devices[target], devices[i]) for i in sources])
        guess, _ = _weighted_mean(raw[:, sources], _normalized(np.exp(-away)))
        has_time = np.isfinite(raw[:, target])
        near = has_time & ((guess - guess.min() < _FAST_END_LOG2) | (raw[:, target] < _FAST_END_LOG2))
        errors.append(guess[near] - guess[near].mean() - raw[near, target] + raw[near, target].mean())
        tries.append(_tries_needed(guess, raw[:, target], tolerance))
    return float(np.sqrt(np.mean(np.concatenate(errors) ** 2))), np.array(tries, dtype=np.float64)


def _tries_needed(guess: Array, slowdown: Array, tolerance: float) -> int:
    """Rank, from 1, of the first row in the order of `guess` that is within the tolerance."""
    order: npt.NDArray[np.intp] = np.argsort(guess, kind="stable")
    good = np.nan_to_num(slowdown[order], nan=math.inf) <= math.log2(1 + tolerance) + 1e-9
    return int(np.argmax(good)) + 1
