"""Samples of recorded problems (sizes, grids, IR facts) for advice."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from forecast_autotune.llm.advice.question import COMPILED, MAX_PROBLEMS, AdviceSample
from forecast_autotune.records import Candidate, Problem
from forecast_autotune.records.table import Table
from forecast_autotune.store import Store
from forecast_autotune.surrogates.prior import formula_prior

_FACTS = ("load_bytes", "store_bytes", "dot_flops", "elementwise", "iterations")
"""Facts of one program that a question shows."""

_COMPILER_FACTS = ("registers", "spills", "shared")
"""Facts from the compiler about a measured config: registers of a thread, spilled and shared bytes."""


def tables_of_source(store: Store, kernel: str, source_sha256: str) -> list[Table]:
    """Return the tables of one kernel source in a store."""
    return [t for t in store.tables(kernel) if t.problem.kernel.source_sha256 == source_sha256]


def stored_samples(tables: Sequence[Table]) -> tuple[AdviceSample, ...]:
    """Samples of recorded problems, the largest first: without their times, and in an order that does not show them."""

    def order(table: Table) -> tuple[float, str]:
        tensors = (a for a in table.problem.arguments if a.kind == "tensor")
        return -sum(math.prod(a.shape) for a in tensors), table.problem.id

    samples = []
    for table in sorted(tables, key=order):
        rows = [m for m in table.measurements if m.candidate.is_base_variant]
        candidates = sorted(dict.fromkeys(m.candidate for m in rows), key=str)
        if candidates:
            grids = {m.candidate: m.grid for m in rows if m.grid is not None}
            facts = _facts(table.problem, candidates, grids)
            extra = {m.candidate: {n: m.extra[n] for n in _COMPILER_FACTS if n in m.extra} for m in rows}
            for candidate in [c for c in candidates if extra[c]][:1]:
                additions = {f"{COMPILED}{name}": float(value) for name, value in extra[candidate].items()}
                facts[candidate] = {**facts.get(candidate, {}), **additions}
            samples.append(AdviceSample(table.problem, candidates, grids, facts))
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
