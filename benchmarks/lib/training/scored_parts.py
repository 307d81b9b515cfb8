"""Sets of sources on which arms are compared, where some of an arm's folds may be missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
RowIndices = npt.NDArray[np.intp]


@dataclass(frozen=True)
class ScoredPart:
    """Sources on which some arms are compared: all, or those of the folds whose runs are there."""

    name: str
    at: RowIndices
    arms: tuple[str, ...]


def common_rows(seeds: Mapping[int, FloatArray]) -> tuple[dict[int, FloatArray], npt.NDArray[np.bool_]]:
    """Seeds of an arm that are scored, and on which sources [n]: whole ones, else what all of them have."""
    there = {seed: np.isfinite(p).all(axis=1) for seed, p in seeds.items()}
    whole = {seed: p for seed, p in seeds.items() if there[seed].all()}
    if whole:
        return whole, np.asarray(np.logical_or.reduce([there[seed] for seed in whole]))
    return dict(seeds), np.asarray(np.logical_and.reduce(list(there.values())))


def scored_parts(
    said: Mapping[str, Mapping[int, FloatArray]], lines: Sequence[Mapping[str, Any]]
) -> list[ScoredPart]:
    """Each set of sources that some arm has, the largest first, with all arms that have all of them.

    `lines` are those of the result file, which say the folds of the runs.
    """
    rows = {arm: common_rows(seeds)[1] for arm, seeds in said.items()}
    folds: dict[str, set[int]] = {}
    for line in lines:
        if "p" in line:
            folds.setdefault(line["arm"], set()).add(int(line["fold"]))
    found: dict[bytes, ScoredPart] = {}
    for arm, own in sorted(rows.items(), key=lambda pair: -int(pair[1].sum())):
        if not own.any() or own.tobytes() in found:
            continue
        name = "all" if own.all() else f"folds {', '.join(map(str, sorted(folds[arm])))}"
        if name in {part.name for part in found.values()}:
            name = f"{name} of {arm}"
        arms = tuple(other for other, there in rows.items() if (there | ~own).all())
        found[own.tobytes()] = ScoredPart(name, np.flatnonzero(own), arms)
    return list(found.values())
