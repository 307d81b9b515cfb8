"""About how long Inductor's choices compile, from their tiles: before any of them is compiled."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from forecast_autotune.records import Candidate, Problem
from forecast_autotune.surrogates.protocol import Array
from forecast_integrations.inductor.choices.geometry import MatmulGeometry, operation_geometry
from forecast_integrations.inductor.choices.templates import has_closed_form, matmul_blocks

_ANY_S = 0.25
"""Seconds that any template takes."""
_MOST_UNROLLED = 40
"""Steps along k up to which LLVM unrolls the loop over them, as their number is a constant of the template's."""
_UNROLLED_S, _ROLLED_S, _SCALAR_S = 4.6, 0.3, 3.5
"""Seconds for 128 accumulators of a thread: with 32 unrolled steps; with a loop; and, without tensor cores, for 64
elements of a step."""
_FULL_TILE, _FULL_STEPS, _FULL_DEPTH = 128, 32, 64
_UNROLLED_POWER = 1.5
"""Registers spill the sooner the more accumulators there are."""
_SCALAR_DTYPES = ("float32", "float64")


def compile_seconds(problem: Problem, candidates: Sequence[Candidate]) -> Array:
    """Expected seconds in a worker for each candidate, [n].

    Fitted to 690 templates of seven whole models (H200, 16 busy cores, torch 2.11, Triton 3.6), of which half are
    within a factor of 1.21. What is no template of a product counts as the
    shortest one.
    """
    shape = operation_geometry(problem)
    if not isinstance(shape, MatmulGeometry):
        return np.full(len(candidates), _ANY_S)
    operand = next(a.dtype for a in problem.arguments if a.kind == "tensor")
    scalar = operand.rpartition(".")[2] in _SCALAR_DTYPES and "precision=highest" in problem.key
    return np.array([_seconds(candidate, shape, scalar) for candidate in candidates])


def _seconds(candidate: Candidate, shape: MatmulGeometry, scalar: bool) -> float:
    blocks = matmul_blocks(dict(candidate.config.kwargs)) if has_closed_form(shape, candidate) else None
    if blocks is None:
        return _ANY_S
    height, width, depth = blocks
    accumulators = height * width / (32 * candidate.config.num_warps) / _FULL_TILE
    if scalar:
        return _ANY_S + _SCALAR_S * accumulators * depth / _FULL_DEPTH
    steps = math.ceil(shape.k / depth)
    if steps > _MOST_UNROLLED:
        return _ANY_S + _ROLLED_S * accumulators
    return _ANY_S + _UNROLLED_S * accumulators**_UNROLLED_POWER * steps / _FULL_STEPS
