"""What a surrogate must beat, and the registry of everything that is evaluated.

A method is a `Fit`: it gets the training tables of a fold and returns a surrogate. Fitting accepts no
tables at all, and a surrogate that knows nothing of a problem says so with equal forecasts, which rank
candidates as they are listed. One whose `order_only` is true states no distribution before it has
measured: its first forecast is judged as an order alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol, runtime_checkable

import numpy as np

from forecast_autotune.features.devices import card
from forecast_autotune.features.ttir.walk import FeatureError, assignment_of, facts
from forecast_autotune.records import Argument, Candidate
from forecast_autotune.records.table import Table
from forecast_autotune.surrogates.covariance import Hyper
from forecast_autotune.surrogates.formula import Analytic
from forecast_autotune.surrogates.prior import VERSION, prior
from forecast_autotune.surrogates.protocol import Array, Forecasts, Query, Surrogate
from forecast_train.evaluation.answers import RARE, VAGUE_SD, Belief, answer, by_kernel, log_times, lots
from forecast_train.evaluation.learners import boosting, cold_gp, cold_trees
from forecast_train.evaluation.splits import nearest
from forecast_train.surrogate.fit import fit

Fit = Callable[[Sequence[Table]], Surrogate]
"""Training tables -> a surrogate."""

_COPY_SD = 0.5
"""Error (log2) of a slowdown copied from another shape."""


@runtime_checkable
class Seeded(Protocol):
    """A surrogate that draws lots, and can be had with another seed."""

    def seeded(self, seed: int) -> Surrogate:
        """The same surrogate, drawing other lots."""
        ...


class Random:
    """An order by lot, the same for the same seed, problem and candidate."""

    name = "random"
    version = "1"
    order_only = True

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def seeded(self, seed: int) -> Random:
        """Another lot."""
        return Random(seed)

    def forecast(self, query: Query) -> Forecasts:
        """A random order, nothing else."""
        return answer(query, Belief.ordered(lots(query, self._seed)), "a random order")


class First:
    """The order in which the user listed the configs."""

    name = "first"
    version = "1"
    order_only = True

    def forecast(self, query: Query) -> Forecasts:
        """The given order, nothing else."""
        return answer(query, Belief.ordered(np.arange(len(query.candidates))), "as listed")


class Roofline:
    """max(bytes of all tensors / DRAM rate, FLOPs of the dots / tensor rate): no tile, one time for all.

    The level of a problem and nothing of its order (Williams et al. 2009).
    """

    name = "roofline"
    version = "1"

    def forecast(self, query: Query) -> Forecasts:
        """The same time for every candidate."""
        device = card(query.problem.device)
        moved = sum(_tensor_bytes(a) for a in query.problem.arguments)
        flops = _dot_flops(query)
        ms = max(moved / (device.memory_gb_s * 1e6), flops / (device.tensor_tflops * 1e9), 1e-3)
        mean = np.full(len(query.candidates), math.log2(ms))
        return answer(query, Belief.apart(mean, 1.0), "roofline: one time for all candidates")


def _tensor_bytes(argument: Argument) -> float:
    if argument.kind != "tensor":
        return 0.0
    digits = "".join(c for c in argument.dtype.split("_")[0].split("e")[0] if c.isdigit())
    return math.prod(argument.shape) * (max(1.0, int(digits) / 8.0) if digits else 1.0)


def _dot_flops(query: Query) -> float:
    """FLOPs of all dots of a launch: the median over distinct traces with a grid; 0 without any."""
    found: dict[tuple[str, tuple[int, ...]], float] = {}
    for candidate in query.candidates:
        grid = query.grids.get(candidate, query.problem.grid)
        name = assignment_of(candidate)
        if grid and name in query.ttir and (name, grid) not in found:
            read = _dot_flops_of(query.ttir[name], query.problem.arguments, grid)
            if read is not None:
                found[name, grid] = read * math.prod(grid)
    return float(np.median(list(found.values()))) if found else 0.0


@lru_cache(maxsize=16384)
def _dot_flops_of(text: str, arguments: tuple[Argument, ...], grid: tuple[int, ...]) -> float | None:
    try:
        return facts(text, arguments, grid).dot_flops
    except FeatureError:
        return None


class Formula:
    """The untrained cost formula on TTIR, its residual never learnt; errors as `Analytic` assumes."""

    name = "formula"
    version = VERSION

    def forecast(self, query: Query) -> Forecasts:
        """The formula's times; equal ones where there is no TTIR."""
        before = prior(query.problem, query.candidates, query.grids, query.ttir)
        h = Hyper()
        sd = math.sqrt(h.additive**2 + h.joint**2 + h.rough**2) if before.informed else VAGUE_SD
        told = "cost formula on TTIR" if before.informed else "no TTIR: nothing is known"
        return answer(query, Belief.apart(before.mean, sd, before.p_fail), told, level=h.intercept)


class MedianConfig:
    """A config's mean log-slowdown over the kernel's other problems; equal forecasts without any."""

    name = "median_config"
    version = "1"

    def __init__(self, tables: Sequence[Table]) -> None:
        self._others = by_kernel(tables)

    def forecast(self, query: Query) -> Forecasts:
        """Slowdowns over the fastest; a config that no problem has gets the mean of the known ones."""
        seen: dict[Candidate, list[float]] = {}
        for table in self._others(query.problem):
            times = log_times(table.by_candidate())
            best = min(times.values(), default=0.0)
            for candidate, value in times.items():
                seen.setdefault(candidate, []).append(value - best)
        means = {c: float(np.mean(seen[c])) for c in query.candidates if c in seen}
        return _copied(query, means, {}, "the config's mean slowdown at other shapes")


class Nearest:
    """The times of the nearest other problem of the kernel, copied; equal forecasts without one."""

    name = "nearest"
    version = "1"

    def __init__(self, tables: Sequence[Table]) -> None:
        self._others = by_kernel(tables)

    def forecast(self, query: Query) -> Forecasts:
        """Its ranking and its level; a config that it does not have gets the mean of the known ones."""
        for relative in nearest(query.problem, self._others(query.problem)):
            rows = Table(relative.problem, list(relative.measurements)).by_candidate()
            times = {c: t for c, t in log_times(rows).items() if c in set(query.candidates)}
            if times:
                failed = {c: 0.9 for c, m in rows.items() if not m.ok}
                return _copied(query, times, failed, f"copied from {relative.problem.key}")
        return _copied(query, {}, {}, "")


def _copied(
    query: Query, times: dict[Candidate, float], fails: dict[Candidate, float], reason: str
) -> Forecasts:
    n = len(query.candidates)
    if not times:
        return answer(query, Belief.apart(np.zeros(n), VAGUE_SD), "no other problem of this kernel is known")
    usual = float(np.mean(list(times.values())))
    mean: Array = np.array([times.get(c, usual) for c in query.candidates])
    loose = np.array([_COPY_SD if c in times else 2 * _COPY_SD for c in query.candidates])
    p_fail = np.array([fails.get(c, RARE) for c in query.candidates])
    return answer(query, Belief(mean, np.zeros((0, n)), loose, p_fail), reason)


def random(tables: Sequence[Table]) -> Surrogate:
    """A random order."""
    return Random()


def first(tables: Sequence[Table]) -> Surrogate:
    """The listed order."""
    return First()


def roofline(tables: Sequence[Table]) -> Surrogate:
    """Roofline alone."""
    return Roofline()


def formula(tables: Sequence[Table]) -> Surrogate:
    """The cost formula without the update."""
    return Formula()


def analytic(tables: Sequence[Table]) -> Surrogate:
    """The cost formula with the update: the surrogate that ships."""
    return Analytic()


def learned(tables: Sequence[Table]) -> Surrogate:
    """The surrogate that ships, fitted to these tables alone; without any, the formula it starts from."""
    return fit(tables) if tables else Analytic()


methods: dict[str, Fit] = {
    "learned": learned,
    "random": random,
    "first": first,
    "roofline": roofline,
    "formula": formula,
    "analytic": analytic,
    "median_config": MedianConfig,
    "nearest": Nearest,
    "boosting": boosting,
    "cold_trees": cold_trees,
    "cold_gp": cold_gp,
}
"""Everything that `forecast-autotune eval` knows by name."""


def chosen(names: Sequence[str]) -> dict[str, Fit]:
    """The methods of these names. Raises `ValueError` naming those that do not exist."""
    unknown = [name for name in names if name not in methods]
    if unknown or not names:
        raise ValueError(
            f"unknown method {', '.join(unknown) or '(none given)'}: choose from {', '.join(methods)}"
        )
    return {name: methods[name] for name in dict.fromkeys(names)}


def with_seed(surrogate: Surrogate, seed: int) -> Surrogate:
    """The surrogate with another seed, if it draws lots at all."""
    return surrogate.seeded(seed) if isinstance(surrogate, Seeded) else surrogate
