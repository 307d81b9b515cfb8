"""The prior of each candidate, before any measurement: the cost formula, or nothing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forecast_autotune.features.argument_sizes import tensor_bytes
from forecast_autotune.features.candidate_list import CandidateList, TraceUnits
from forecast_autotune.features.config_encoder import ConfigEncoder
from forecast_autotune.features.cost import (
    NUMERIC_FACTS,
    PARTS,
    VERSION,
    CostBreakdown,
    FactColumns,
    costs,
    tensor_columns,
)
from forecast_autotune.features.devices import EARLIER_AMD, DeviceSpec, device_spec
from forecast_autotune.features.inert_parameters import equivalence_classes, find_inert, trace_parameters
from forecast_autotune.features.traced_texts import facts_by_unit, facts_of_text
from forecast_autotune.features.ttir.extraction import TtirFacts
from forecast_autotune.records import Candidate, Config, Problem
from forecast_autotune.surrogates.protocol import Array

_LEAST_FAILURE, _SURE_FAILURE = 0.01, 0.98
_LOOP_DOUBT, _CHAIN_DOUBT, _COMPUTED_DOUBT, _OTHER_DOUBT = 0.0125, 0.05, 0.2, 0.5
"""Standard deviation of log2(true bytes / forecast bytes): of a loop whose dots read its loads, of one whose dots read
each other, of one with computed operands or scales, and of all others; checked on kernels that no rule was written for
by `benchmarks/devices/compile_facts.py`."""
_INTERPOLATED_DOUBT = 0.5
"""Standard deviation to add where a candidate's own TTIR was not read."""
_KNOWN_COMPILERS = ("cuda", "hip")
"""Backends whose allocations of shared memory were compared with the forecast."""
_MOST_OPAQUE_FAILURE = 0.8
"""P(failure) at most where no rule explains the bytes: such a candidate is tried late, never refused."""
_TENSOR_COLUMNS = 512

__all__ = ["VERSION", "Prior", "formula_prior", "prior_from_facts"]


@dataclass(frozen=True)
class Prior:
    """Arrays over candidates, shape [n] unless said otherwise."""

    mean: Array
    """log2(milliseconds) by the cost formula; zeros where there is none."""
    parts: Array
    """log2 of the formula's parts, shape [n, len(PARTS)]."""
    shared: Array
    """Estimated shared memory, bytes."""
    p_fail: Array
    """P(failure) before any compilation."""
    informed: bool
    """False when no candidate had TTIR, a grid and loop bounds: the means say nothing."""
    exact: npt.NDArray[np.bool_]
    """Rows whose own TTIR was read; the others are interpolated from their neighbours."""
    facts: FactColumns | None = None
    costs: CostBreakdown | None = None
    """The formula's facts and their cost; None unless `informed`."""
    leaves: npt.NDArray[np.int32] | None = None
    """Leaf of each candidate in each tree of a fitted forest, [n, trees]; None without one."""
    training_distance: float | None = None
    """Distance of the kernel from those that were learned from (`learned.TrainingCorpus`); None where nothing was."""
    same_as: npt.NDArray[np.intp] | None = None
    """Row that stands for each candidate's binary, [n]; None where each may be one of its own."""
    doubt: Array | None = None
    """Standard deviation of log2(`shared`), [n]; None where it is unknown."""
    limit: int = 0
    """Bytes of shared memory that a program may have."""


def formula_prior(
    problem: Problem,
    candidates: Sequence[Candidate],
    grids: Mapping[Candidate, tuple[int, ...]],
    ttir: Mapping[str, str],
) -> Prior:
    """Evaluate the cost formula for every candidate; facts of untraced ones are interpolated.

    Where there is no TTIR, facts in the problem's record (`features.traced_texts`) take its place.
    """
    n = len(candidates)
    candidates = CandidateList.of(candidates)
    units = candidates.units(grids, problem.grid)
    launch_grids = units.grids
    by_unit = _read_facts(problem, candidates, units, ttir)
    inert: tuple[str, ...] = ()
    if len(by_unit) < len(units.first):
        inert = find_inert(trace_parameters(candidates), units.first[list(by_unit)], list(by_unit.values()))
        if inert:
            units, by_unit = _merge_inert(candidates, units, by_unit, inert)
    # Without most grids, or the loops' bounds, the number of programs and their work are unknown: the formula
    # would rank by the size of the tile, which misleads more than no forecast.
    endless = not problem.arguments and any(facts.unknown_trips for facts in by_unit.values())
    if not by_unit or 2 * sum(map(bool, launch_grids)) < n or endless:
        zero = np.zeros(n)
        return Prior(zero, np.zeros((n, len(PARTS))), zero, np.full(n, 0.03), False, np.zeros(n, dtype=bool))
    count = len(units.first)
    if len(by_unit) < count:
        table = _interpolate_facts(candidates, units, by_unit, inert)
    else:
        table = FactColumns.of([by_unit[i] for i in range(count)])
    rows = np.array([*table.columns.values()])[:, units.of]
    table = FactColumns(dict(zip(table.columns, rows, strict=True)), table.dots[units.of])
    unique = sum(tensor_bytes(a) for a in problem.arguments)
    exact = np.zeros(count, dtype=bool)
    exact[list(by_unit)] = True
    configs = [c.config for c in candidates]
    release = dict(problem.toolchain).get("triton", "")
    spec, old = device_spec(problem.device, release), release.startswith(EARLIER_AMD)
    return prior_from_facts(table, _grids(table, launch_grids), configs, spec, unique, exact[units.of], old)


def prior_from_facts(
    table: FactColumns,
    grids: Sequence[tuple[int, ...] | None],
    configs: Sequence[Config],
    device: DeviceSpec,
    unique: float,
    exact: npt.NDArray[np.bool_],
    earlier: bool = False,
) -> Prior:
    """The formula on facts of n candidates; `unique` is the bytes of all tensors.

    `earlier`: the compiler is one of `EARLIER_AMD`, which passes tiles of atomic additions in two halves.
    """
    if earlier:
        table = FactColumns({**table.columns, "added_bytes": table["added_bytes"] / 2.0}, table.dots)
    cost = costs(table, grids, configs, device, unique)
    doubt = np.hypot(_doubt(table), np.where(exact, 0.0, _INTERPOLATED_DOUBT))
    p_fail = memory_failure(cost.shared_bytes, doubt, device.shared_memory_bytes)
    # AMD's earlier pipeliners leave operands of flattened loops out, by their layouts, and scales.
    hip = device.backend == "hip"
    opaque = (table["opaque"] > 0.5) | (hip & earlier & (table["scaled"] + table["flattened"] > 0.5))
    # RDNA's products of int8 keep operands in registers that those of fp8 pass on; the facts know bits alone.
    eight = (table["transposed_right_bytes"] > 0) & (table["dot_input_bits"] == 8)
    opaque |= eight & (hip & (device.warp_size == 32) & (not device.copies_ahead))
    opaque |= device.backend not in _KNOWN_COMPILERS
    p_fail = np.minimum(p_fail, np.where(opaque, _MOST_OPAQUE_FAILURE, 1.0))
    warps = np.array([float(c.num_warps) for c in configs])
    hopeless = tensor_columns(table, warps, device) > _TENSOR_COLUMNS
    hopeless |= np.array([c.num_ctas > 1 and not device.clusters for c in configs], dtype=bool)
    p_fail = np.where(hopeless, _SURE_FAILURE, p_fail + 0.05 * (cost.registers > 512) * (p_fail < 0.5))
    return Prior(
        np.log2(cost.total_ms),
        cost.parts(),
        cost.shared_bytes,
        p_fail,
        True,
        exact,
        table,
        cost,
        doubt=doubt,
        limit=device.shared_memory_bytes,
    )


def _grids(table: FactColumns, grids: Sequence[tuple[int, ...] | None]) -> Sequence[tuple[int, ...] | None]:
    """The launch grids; missing ones are estimated from the work of one program.

    All candidates do the same work together, so one that does half as much per program launches
    twice as many; the same count for all would make the smallest tiles look fastest by far.
    """
    if all(grids):
        return grids
    # Bytes that no other program touches: the stored ones of a product, else all.
    store_bytes = table["store_bytes"] + 4.0 * table["atomic_elements"]
    traffic = np.maximum(1.0, table["load_bytes"] + table["store_bytes"])
    work = np.where((table["dot_flops"] > 0) & (store_bytes > 0), store_bytes, traffic)
    total = statistics.median(math.prod(grid) * size for grid, size in zip(grids, work, strict=True) if grid)
    return [grid or (max(1, round(total / size)),) for grid, size in zip(grids, work, strict=True)]


def _doubt(facts: FactColumns) -> Array:
    """Standard deviation of log2(true bytes / forecast bytes), [n], by the kernel's kind of loop."""
    chain = (
        sum(facts[name] for name in ("chained_bytes", "resident_bytes", "computed_bytes", "flattened")) > 0
    )
    doubt = np.where(chain, _CHAIN_DOUBT, _LOOP_DOUBT)
    is_computed = (facts["load_levels"] > 1) | (facts["indirect_bytes"] > 0) | (facts["scaled"] > 0.5)
    doubt = np.where(is_computed, _COMPUTED_DOUBT, doubt)
    is_explained = (facts["loop_dots"] > 0.5) & (facts["loop_dots"] < 2.5) & (facts["opaque"] < 0.5)
    return np.asarray(np.where(is_explained, doubt, _OTHER_DOUBT))


def memory_failure(shared: Array, doubt: Array, limit: int) -> Array:
    """P(failure) of candidates that take `shared` bytes, give or take `doubt`, where there are `limit`, [n] each.

    Tiles are powers of two, as limits often are: a candidate that takes exactly the limit fits, and is no even bet.
    """
    beyond = (np.log2(np.maximum(shared, 1.0)) - math.log2(max(limit, 1))) / doubt - 1.0
    return np.asarray(
        _LEAST_FAILURE
        + (_SURE_FAILURE - _LEAST_FAILURE) / (1.0 + np.exp(np.clip(-1.702 * beyond, -50.0, 50.0)))
    )  # nearly the normal distribution's


def _read_facts(
    problem: Problem, candidates: CandidateList, units: TraceUnits, ttir: Mapping[str, str]
) -> dict[int, TtirFacts]:
    """Facts by unit: from its TTIR where there is a readable one, else from the problem's record."""
    names, keys = candidates.assignments
    record = facts_by_unit(problem)
    by_unit: dict[int, TtirFacts] = {}
    for unit, row in enumerate(units.first.tolist()):
        name, grid = names[keys[row]], units.grids[row]
        facts = (
            facts_of_text(ttir, name, problem.arguments, grid) if name in ttir else record.get((name, grid))
        )
        if facts is not None:
            by_unit[unit] = facts
    return by_unit


def _merge_inert(
    candidates: CandidateList, units: TraceUnits, by_unit: Mapping[int, TtirFacts], inert: Sequence[str]
) -> tuple[TraceUnits, dict[int, TtirFacts]]:
    """Join units that differ in inert meta-parameters only; their facts are the same.

    Nothing is joined where one assignment has several grids, as facts may depend on the grid.
    """
    columns = trace_parameters(candidates)
    if equivalence_classes(columns, units.first, ()).max() + 1 < len(units.first):
        return units, dict(by_unit)
    alike = equivalence_classes(columns, units.first, inert)
    first = np.unique(alike, return_index=True)[1]
    sizes = np.bincount(alike, weights=units.sizes, minlength=len(first)).astype(float)
    result = TraceUnits(units.first[first], alike[units.of], sizes, units.grids)
    return result, {int(alike[unit]): facts for unit, facts in by_unit.items()}


def _interpolate_facts(
    candidates: CandidateList, units: TraceUnits, by_unit: Mapping[int, TtirFacts], inert: Sequence[str]
) -> FactColumns:
    """Facts of every unit: the traced ones, and a log-linear fit in the meta-parameters.

    Each numeric fact is regressed (ridge, with squares; a unit weighs as much as it has candidates) on
    the log2 coordinates of the meta-parameters; a unit's dot shapes come from its nearest traced
    neighbour. Closed forms are not reliable (many facts bend), so these rows only decide which assignments are
    traced next.
    """
    points = ConfigEncoder.of(candidates, meta_only=True).without(inert)(candidates)[units.first]
    rows = np.array(sorted(by_unit))
    weights = units.sizes[rows][:, None]
    centre = (weights * points[rows]).sum(axis=0) / weights.sum()
    offsets = points - centre
    design = np.concatenate([np.ones((len(points), 1)), offsets, offsets**2], axis=1)
    samples = FactColumns.of([by_unit[int(i)] for i in rows])
    numbers = np.stack([samples[name] for name in NUMERIC_FACTS], axis=1)
    logs = np.log2(1.0 + np.maximum(numbers, 0.0))
    weighted_design = (weights * design[rows]).T
    gram = weighted_design @ design[rows] + 1e-2 * np.eye(design.shape[1])
    fit = design @ np.linalg.solve(gram, weighted_design @ logs)
    # A fit must not leave the range of the traced facts by more than a factor of four.
    fit = np.clip(fit, logs.min(axis=0) - 2.0, logs.max(axis=0) + 2.0)
    values = np.maximum(2.0**fit - 1.0, 0.0)
    values[rows] = numbers
    squares = (points**2).sum(axis=1)
    distance = squares[:, None] + squares[rows][None, :] - 2.0 * points @ points[rows].T
    nearest = np.argmin(distance, axis=1)
    nearest[rows] = np.arange(len(rows))
    return FactColumns(dict(zip(NUMERIC_FACTS, values.T, strict=True)), samples.dots[nearest])
