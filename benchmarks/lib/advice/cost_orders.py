"""How well the order of a cost function is that of recorded times, and what its constants do to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from forecast_autotune.llm.advice.language import CostFunction
from forecast_autotune.llm.advice.subject import AdviceError, AdviceSubject
from forecast_autotune.records.table import Table

Array = npt.NDArray[np.float64]
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Of a constant's stated value: what is chosen among."""
FEW = 5
"""Configs that are measured before one is kept."""
_LEAST_EFFECT = 1e-3
"""log2 of the cost between candidates: a constant with less does not change their order."""


@dataclass(frozen=True)
class OrderFigures:
    """Of one order of a problem's candidates."""

    spearman: float
    """With the recorded times, over candidates that ran; 0 for an order without any preference."""
    log_regret: float
    """ln(best time among the first `FEW` / best time of all)."""


@dataclass(frozen=True)
class RecordedTimes:
    """A problem's candidates with their recorded times."""

    subject: AdviceSubject
    log2_ms: Array
    """[n]; NaN for candidates that did not run."""

    @classmethod
    def of(cls, table: Table) -> RecordedTimes:
        """All candidates of a table."""
        rows = table.by_candidate()
        times = np.array([np.log2(m.ms) if m.ok else np.nan for m in rows.values()])
        return cls(AdviceSubject.of(table.problem, list(rows), table.grids()), times)


def order_figures(cost: Array, times: RecordedTimes, seed: int = 0) -> OrderFigures:
    """Of the order of these costs [n]. Ties are broken by lot: the order of a recorded list may be a hint."""
    from scipy.stats import rankdata

    true = times.log2_ms
    ran = np.isfinite(true)
    one, other = (rankdata(np.round(x[ran], 9)) for x in (cost, true))
    flat = one.std() == 0 or other.std() == 0
    lot = np.random.default_rng(seed).random(len(cost))
    first = true[np.lexsort((lot, np.round(cost, 9)))[:FEW]]
    # Where none of them ran, the worst that is known is what one is left with.
    kept = float(np.nanmin(first)) if np.isfinite(first).any() else float(np.nanmax(true))
    regret = (kept - float(np.nanmin(true))) * float(np.log(2.0))
    return OrderFigures(0.0 if flat else float(np.corrcoef(one, other)[0, 1]), regret)


def mean_figures(found: Sequence[OrderFigures]) -> OrderFigures:
    """Over problems, or over choices."""
    return OrderFigures(
        float(np.mean([f.spearman for f in found])), float(np.mean([f.log_regret for f in found]))
    )


def cost_figures(function: CostFunction, problems: Sequence[RecordedTimes]) -> OrderFigures:
    """Of a cost function as it is stated, mean over problems. Raises `AdviceError` where it cannot be evaluated."""
    return mean_figures([order_figures(function.evaluate(p.subject).log2, p) for p in problems])


def deciding_constants(function: CostFunction, subject: AdviceSubject, count: int) -> list[int]:
    """Numbers of the constants that change the costs of candidates most, the first one first; no time is read."""
    effects = []
    for constant in function.constants:
        try:
            low, high = (function.evaluate(subject, {constant.name: move}).log2 for move in (-1.0, 1.0))
        except AdviceError:  # it decides whether there is a cost at all
            effects.append(np.inf)
            continue
        effects.append(float(np.std(high - low)))
    ranked = sorted(range(len(effects)), key=lambda i: -effects[i])[:count]
    return sorted(i for i in ranked if effects[i] > _LEAST_EFFECT)


def choices_of_constants(
    function: CostFunction, constants: Sequence[int], problems: Sequence[RecordedTimes]
) -> dict[tuple[int, ...], OrderFigures]:
    """Figures for every way to choose one of `FACTORS` for each constant: numbers of factors, mean over problems.

    A choice with which a problem cannot be evaluated says nothing there: all costs alike.
    """
    ways = list(product(range(len(FACTORS)), repeat=len(constants)))
    names = [function.constants[constant].name for constant in constants]
    moves = np.log2([[FACTORS[i] for i in way] for way in ways])
    by_problem = []
    for problem in problems:
        n = problem.subject.size
        shifts = {name: np.repeat(moves[:, place], n) for place, name in enumerate(names)}
        try:
            costs = function.evaluate(problem.subject.repeated(len(ways)), shifts).log2.reshape(len(ways), n)
        except AdviceError:  # by one of the choices: which one is found out one by one
            costs = np.array(
                [_cost_or_nothing(function, dict(zip(names, m, strict=True)), problem) for m in moves]
            )
        by_problem.append([order_figures(row, problem) for row in costs])
    return {way: mean_figures(found) for way, found in zip(ways, zip(*by_problem, strict=True), strict=True)}


def _cost_or_nothing(function: CostFunction, shifts: Mapping[str, float], problem: RecordedTimes) -> Array:
    try:
        return function.evaluate(problem.subject, shifts).log2
    except AdviceError:
        return np.zeros(problem.subject.size)


def value_text(value: float) -> str:
    """A constant's value with three significant digits, as a person writes it."""
    return f"{float(f'{value:.3g}'):.10g}"
