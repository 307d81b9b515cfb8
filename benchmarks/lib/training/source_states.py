"""What hidden states of sources say beyond a forecast: principal components, and ridge slopes on its residuals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

COMPONENTS = (4, 16, 48)
PENALTIES = (3.0, 30.0, 300.0, 3000.0)
"""Of a slope on a component of unit spread, in squared residuals."""
CLIP = 1.0
"""log2 beyond which a residual counts no more."""
FOLDS = "_folds"
"""Behind a kind of states: the folds that its first axis is about."""


def state_slopes(
    states: npt.NDArray[Any], residual: FloatArray, train: npt.NDArray[np.bool_], families: Sequence[str]
) -> FloatArray:
    """Ridge forecasts [n] of residuals from hidden states [n, width]; all is fitted to the rows of `train`.

    Number of components and penalty are those that do best on families of the training rows left out in turn.
    """
    x = states.astype(np.float64)
    fit = train & np.isfinite(residual)
    centre = x[fit].mean(axis=0)
    _, _, axes = np.linalg.svd(x[fit] - centre, full_matrices=False)
    z = (x - centre) @ axes[: max(COMPONENTS)].T
    z = z / np.maximum(z[fit].std(axis=0), 1e-9)
    y = np.clip(np.nan_to_num(residual), -CLIP, CLIP)
    names = np.asarray(families, dtype=object)
    own = sorted(set(names[fit]))
    best, chosen = math.inf, (COMPONENTS[0], PENALTIES[-1])
    for count in COMPONENTS:
        for penalty in PENALTIES:
            error = 0.0
            for part in range(5):
                out = fit & np.isin(names, own[part::5])
                error += float(((y - _ridge(z[:, :count], y, fit & ~out, penalty))[out] ** 2).sum())
            if error < best:
                best, chosen = error, (count, penalty)
    return _ridge(z[:, : chosen[0]], y, fit, chosen[1])


def _ridge(z: FloatArray, y: FloatArray, fit: npt.NDArray[np.bool_], penalty: float) -> FloatArray:
    gram = z[fit].T @ z[fit] + penalty * np.eye(z.shape[1])
    return np.asarray(z @ np.linalg.solve(gram, z[fit].T @ y[fit]))


def state_forecasts(
    path: Path,
    names: Sequence[str],
    families: Sequence[str],
    residual: FloatArray,
    groups: Mapping[int, frozenset[str]],
) -> dict[str, FloatArray]:
    """What hidden states add to a forecast of each source, [n] by kind of state; NaN where no fold covers it.

    `names`, `families` and `residual` (log2, NaN where unknown) are [n]. States of trained models are
    [folds, n, width]: those of a fold have seen all families but its `groups`. Raises `KeyError` for a source
    without states.
    """
    with np.load(path) as held:
        place = {name: i for i, name in enumerate(held["names"])}
        kinds = {k: held[k] for k in held.files if k != "names" and not k.endswith(FOLDS)}
        numbers = {k: [int(n) for n in held[k + FOLDS]] for k in kinds if k + FOLDS in held.files}
    at = np.array([place[name] for name in names])
    everyone = np.asarray(families, dtype=object)
    found: dict[str, FloatArray] = {}
    for kind, states in kinds.items():
        added = np.full(len(at), math.nan)
        parts: list[tuple[npt.NDArray[Any], frozenset[str]]]
        if states.ndim == 3:
            folds = numbers.get(kind, range(len(states)))
            parts = [(own, groups[n]) for own, n in zip(states, folds, strict=True) if n in groups]
        else:
            parts = [(states, frozenset([family])) for family in sorted(set(families))]
        for mine, left_out in parts:
            own = np.isin(everyone, list(left_out))
            added[own] = state_slopes(mine[at], residual, ~own, families)[own]
        found[f"states, {kind}"] = added
    return found
