"""Samples of recorded problems (sizes, grids, IR facts) for advice, and measurements that contradict it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from forecast_autotune.llm.advice.question import MAX_PROBLEMS, AdviceSample
from forecast_autotune.llm.advice.record import Advice
from forecast_autotune.llm.advice.subject import AdviceError, AdviceSubject
from forecast_autotune.records import Candidate, Problem
from forecast_autotune.records.table import Table
from forecast_autotune.store import Store
from forecast_autotune.surrogates.prior import formula_prior

MAX_CONTRADICTIONS = 12
"""Measurements that a revision is shown."""
_FACTS = ("load_bytes", "store_bytes", "dot_flops", "elementwise", "iterations")
"""Facts of one program that a question shows."""


def tables_of_source(store: Store, kernel: str, source_sha256: str) -> list[Table]:
    """Return the tables of one kernel source in a store."""
    return [t for t in store.tables(kernel) if t.problem.kernel.source_sha256 == source_sha256]


def stored_samples(tables: Sequence[Table]) -> tuple[AdviceSample, ...]:
    """Samples of recorded problems, the largest first: nothing of their times, not even their order."""

    def order(table: Table) -> tuple[float, str]:
        tensors = (a for a in table.problem.arguments if a.kind == "tensor")
        return -sum(math.prod(a.shape) for a in tensors), table.problem.id

    samples = []
    for table in sorted(tables, key=order):
        rows = [m for m in table.measurements if m.candidate.is_base_variant]
        candidates = sorted(dict.fromkeys(m.candidate for m in rows), key=str)
        if candidates:
            grids = {m.candidate: m.grid for m in rows if m.grid is not None}
            samples.append(
                AdviceSample(table.problem, candidates, grids, _facts(table.problem, candidates, grids))
            )
    return tuple(samples[:MAX_PROBLEMS])


def _facts(
    problem: Problem, candidates: Sequence[Candidate], grids: Mapping[Candidate, tuple[int, ...]]
) -> dict[Candidate, dict[str, float]]:
    prior = formula_prior(problem, candidates, grids, problem.ttir)
    if prior.facts is None or prior.costs is None:
        return {}
    columns = {name: prior.facts[name] for name in _FACTS}
    columns["registers_per_thread_estimate"] = prior.costs.registers
    columns["shared_bytes_estimate"] = prior.costs.shared_bytes
    return {
        c: {name: float(values[i]) for name, values in columns.items() if values[i]}
        for i, c in enumerate(candidates)
    }


def contradictions(advice: Advice, tables: Sequence[Table]) -> list[tuple[str, float, float]]:
    """Candidates of the problem measured most: log2 slow-down over its fastest, as forecast and as measured.

    Those where the two disagree most come first, `MAX_CONTRADICTIONS` at most.
    """
    best: list[tuple[str, float, float]] = []
    most = 1
    for table in tables:
        rows = [m for m in table.by_candidate().values() if m.ok and m.candidate.is_base_variant]
        if len(rows) <= most:
            continue
        subject = AdviceSubject.of(table.problem, [m.candidate for m in rows], table.grids())
        try:
            forecast = advice.function.evaluate(subject).log2
        except AdviceError:
            continue
        true = np.log2([m.ms for m in rows])
        first, most = int(np.argmin(true)), len(rows)
        best = [
            (str(m.candidate.config), float(forecast[i] - forecast[first]), float(true[i] - true[first]))
            for i, m in enumerate(rows)
        ]
    return sorted(best, key=lambda row: -abs(row[1] - row[2]))[:MAX_CONTRADICTIONS]
