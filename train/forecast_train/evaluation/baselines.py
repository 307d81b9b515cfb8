"""What a surrogate must beat, and the registry of everything that is evaluated.

A method is a `FitSurrogate`: it gets the training tables of a fold and returns a surrogate. Fitting accepts no
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

from forecast_autotune.features.devices import device_spec
from forecast_autotune.features.ttir.extraction import FeatureError, assignment_of, extract_facts
from forecast_autotune.records import Argument, Candidate
from forecast_autotune.records.table import Table
from forecast_autotune.surrogates.covariance import Hyperparameters
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.prior import VERSION, formula_prior
from forecast_autotune.surrogates.protocol import Array, Forecasts, Query, Surrogate
from forecast_train.evaluation.joint_normal import (
    DEFAULT_P_FAIL,
    UNKNOWN_SD,
    JointNormal,
    forecasts_from,
    log_times,
    random_places,
    relatives_by_kernel,
)
from forecast_train.evaluation.learners import boosting, single_run_gp, single_run_trees
from forecast_train.evaluation.splits import nearest_relatives
from forecast_train.surrogate.fit import fit

FitSurrogate = Callable[[Sequence[Table]], Surrogate]
"""Training tables -> a surrogate."""

_COPY_SD = 0.5
"""Error (log2) of a slowdown copied from another shape."""


@runtime_checkable
class SeededSurrogate(Protocol):
    """A surrogate that draws lots, and can be had with another seed."""

    def seeded(self, seed: int) -> Surrogate:
        """The same surrogate, drawing other lots."""
        ...


class RandomOrder:
    """An order by lot, the same for the same seed, problem and candidate."""

    name = "random"
    version = "1"
    order_only = True

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def seeded(self, seed: int) -> RandomOrder:
        """Another lot."""
        return RandomOrder(seed)

    def forecast(self, query: Query) -> Forecasts:
        """A random order, nothing else."""
        return forecasts_from(
            query, JointNormal.from_order(random_places(query, self._seed)), "a random order"
        )


class ListedOrder:
    """The order in which the user listed the configs."""

    name = "first"
    version = "1"
    order_only = True

    def forecast(self, query: Query) -> Forecasts:
        """The given order, nothing else."""
        return forecasts_from(query, JointNormal.from_order(np.arange(len(query.candidates))), "as listed")


class RooflineBaseline:
    """max(bytes of all tensors / DRAM rate, FLOPs of the dots / tensor rate): no tile, one time for all.

    The level of a problem and nothing of its order (Williams et al. 2009).
    """

    name = "roofline"
    version = "1"

    def forecast(self, query: Query) -> Forecasts:
        """The same time for every candidate."""
        device = device_spec(query.problem.device)
        moved = sum(_tensor_bytes(a) for a in query.problem.arguments)
        flops = _dot_flops(query)
        ms = max(moved / (device.memory_gb_s * 1e6), flops / (device.tensor_tflops * 1e9), 1e-3)
        mean = np.full(len(query.candidates), math.log2(ms))
        return forecasts_from(
            query, JointNormal.independent(mean, 1.0), "roofline: one time for all candidates"
        )


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
        return extract_facts(text, arguments, grid).dot_flops
    except FeatureError:
        return None


class FormulaBaseline:
    """The untrained cost formula on TTIR, its residual never learnt; errors as `AnalyticSurrogate` assumes."""

    name = "formula"
    version = VERSION

    def forecast(self, query: Query) -> Forecasts:
        """The formula's times; equal ones where there is no TTIR."""
        before = formula_prior(query.problem, query.candidates, query.grids, query.ttir)
        h = Hyperparameters()
        sd = math.sqrt(h.additive**2 + h.joint**2 + h.rough**2) if before.informed else UNKNOWN_SD
        told = "cost formula on TTIR" if before.informed else "no TTIR: nothing is known"
        return forecasts_from(
            query, JointNormal.independent(before.mean, sd, before.p_fail), told, level=h.intercept
        )


class MedianConfigBaseline:
    """A config's mean log-slowdown over the kernel's other problems; equal forecasts without any."""

    name = "median_config"
    version = "1"

    def __init__(self, tables: Sequence[Table]) -> None:
        self._others = relatives_by_kernel(tables)

    def forecast(self, query: Query) -> Forecasts:
        """Slowdowns over the fastest; a config that no problem has gets the mean of the known ones."""
        seen: dict[Candidate, list[float]] = {}
        for table in self._others(query.problem):
            times = log_times(table.by_candidate())
            best = min(times.values(), default=0.0)
            for candidate, value in times.items():
                seen.setdefault(candidate, []).append(value - best)
        means = {c: float(np.mean(seen[c])) for c in query.candidates if c in seen}
        return _copied_forecasts(query, means, {}, "the config's mean slowdown at other shapes")


class NearestProblemBaseline:
    """The times of the nearest other problem of the kernel, copied; equal forecasts without one."""

    name = "nearest"
    version = "1"

    def __init__(self, tables: Sequence[Table]) -> None:
        self._others = relatives_by_kernel(tables)

    def forecast(self, query: Query) -> Forecasts:
        """Its ranking and its level; a config that it does not have gets the mean of the known ones."""
        for relative in nearest_relatives(query.problem, self._others(query.problem)):
            rows = Table(relative.problem, list(relative.measurements)).by_candidate()
            times = {c: t for c, t in log_times(rows).items() if c in set(query.candidates)}
            if times:
                failed = {c: 0.9 for c, m in rows.items() if not m.ok}
                return _copied_forecasts(query, times, failed, f"copied from {relative.problem.key}")
        return _copied_forecasts(query, {}, {}, "")


def _copied_forecasts(
    query: Query, times: dict[Candidate, float], fails: dict[Candidate, float], reason: str
) -> Forecasts:
    n = len(query.candidates)
    if not times:
        return forecasts_from(
            query,
            JointNormal.independent(np.zeros(n), UNKNOWN_SD),
            "no other problem of this kernel is known",
        )
    usual = float(np.mean(list(times.values())))
    mean: Array = np.array([times.get(c, usual) for c in query.candidates])
    loose = np.array([_COPY_SD if c in times else 2 * _COPY_SD for c in query.candidates])
    p_fail = np.array([fails.get(c, DEFAULT_P_FAIL) for c in query.candidates])
    return forecasts_from(query, JointNormal(mean, np.zeros((0, n)), loose, p_fail), reason)


def random_order(tables: Sequence[Table]) -> Surrogate:
    """A random order."""
    return RandomOrder()


def listed_order(tables: Sequence[Table]) -> Surrogate:
    """The listed order."""
    return ListedOrder()


def roofline(tables: Sequence[Table]) -> Surrogate:
    """Roofline alone."""
    return RooflineBaseline()


def formula(tables: Sequence[Table]) -> Surrogate:
    """The cost formula without the update."""
    return FormulaBaseline()


def analytic(tables: Sequence[Table]) -> Surrogate:
    """The cost formula with the update: the surrogate that ships."""
    return AnalyticSurrogate()


def learned(tables: Sequence[Table]) -> Surrogate:
    """The surrogate that ships, fitted to these tables alone; without any, the formula it starts from."""
    return fit(tables) if tables else AnalyticSurrogate()


methods: dict[str, FitSurrogate] = {
    "learned": learned,
    "random": random_order,
    "first": listed_order,
    "roofline": roofline,
    "formula": formula,
    "analytic": analytic,
    "median_config": MedianConfigBaseline,
    "nearest": NearestProblemBaseline,
    "boosting": boosting,
    "cold_trees": single_run_trees,
    "cold_gp": single_run_gp,
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


def with_seed(surrogate: Surrogate, seed: int) -> Surrogate:
    """The surrogate with another seed, if it draws lots at all."""
    return surrogate.seeded(seed) if isinstance(surrogate, SeededSurrogate) else surrogate
