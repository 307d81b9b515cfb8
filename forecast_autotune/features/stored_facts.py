"""Facts of TTIR as JSON, kept beside measurements: what a refit reads where nobody kept the texts.

A text has tens of kilobytes, its facts a few hundred bytes. They are those of one release's reading: facts of
another version are passed over, as if nothing had been kept.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from forecast_autotune.features.candidate_list import CandidateList, Grid
from forecast_autotune.features.traced_texts import facts_of_text
from forecast_autotune.features.ttir.facts import TtirFacts, facts_from_json, facts_to_json
from forecast_autotune.records import Candidate, Problem, digest
from forecast_autotune.records.problem import FACTS

_SEMANTICS_VERSION = 2
"""Counts up when a fact is read otherwise; new and renamed facts change the version by themselves."""
VERSION = f"{_SEMANTICS_VERSION}-{digest([f.name for f in fields(TtirFacts)])[:8]}"


def collect_facts(
    problem: Problem,
    candidates: Sequence[Candidate],
    grids: Mapping[Candidate, tuple[int, ...]],
    ttir: Mapping[str, str],
    *,
    within_s: float,
) -> dict[str, Any]:
    """The facts of these candidates as `FACTS` holds them; without units where there is no TTIR.

    Texts that a surrogate has read in this process cost nothing. What is not read after `within_s` seconds is
    left out.
    """
    end = time.perf_counter() + within_s
    listed = CandidateList.of(candidates)
    names, keys = listed.assignments
    units = listed.units(grids, problem.grid)
    found: dict[tuple[str, Grid], TtirFacts] = {}
    for row in units.first.tolist():
        name, grid = names[keys[row]], units.grids[row]
        if name not in ttir or (name, grid) in found:
            continue
        if time.perf_counter() > end:
            break
        if (one := facts_of_text(ttir, name, problem.arguments, grid)) is not None:
            found[name, grid] = one
    return {"version": VERSION, "units": [_encode_unit(*unit, one) for unit, one in found.items()]}


def merge_facts(old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> dict[str, Any]:
    """Both, as far as `old` is of this version; of units in both, the new one."""
    units = {**_decode_units(old), **_decode_units(new)}
    return {"version": VERSION, "units": [_encode_unit(*unit, one) for unit, one in units.items()]}


def facts_by_unit(problem: Problem) -> dict[tuple[str, Grid], TtirFacts]:
    """What a problem's record has kept, by (assignment, grid); empty for nothing, or of another version."""
    return _decode_units(problem.extra.get(FACTS))


def fact_count(problem: Problem) -> int:
    """How many units a record has kept facts of, readable or not; looks at none of them."""
    kept = problem.extra.get(FACTS)
    units = kept.get("units") if isinstance(kept, Mapping) else None
    return len(units) if isinstance(units, list) else 0


def has_facts(problem: Problem) -> bool:
    """Whether a formula can be computed for this record: TTIR, or facts that this release understands."""
    return bool(problem.ttir) or bool(facts_by_unit(problem))


def _encode_unit(assignment: str, grid: Grid, one: TtirFacts) -> list[Any]:
    return [assignment, None if grid is None else list(grid), facts_to_json(one)]


def _decode_units(data: Any) -> dict[tuple[str, Grid], TtirFacts]:
    """Whole units only: stores are edited and merged by people."""
    if not isinstance(data, Mapping) or data.get("version") != VERSION:
        return {}
    found: dict[tuple[str, Grid], TtirFacts] = {}
    units = data.get("units")
    for unit in units if isinstance(units, list) else []:
        try:
            assignment, grid, told = unit
            where = None if grid is None else tuple(int(n) for n in grid)
            found[str(assignment), where] = facts_from_json(told)
        except (TypeError, ValueError, KeyError, OverflowError, AttributeError):
            continue
    return found
