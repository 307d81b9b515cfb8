"""About how long Inductor's choices compile, from their tiles: before any of them is compiled."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from forecast_autotune.records import Candidate, Problem
from forecast_autotune.surrogates.protocol import Array
from forecast_integrations.inductor.choices.geometry import MatmulGeometry, operation_geometry

_TRITON = "triton::"
"""How variants of templates begin that are compiled so."""
_ANY_S = 0.25
"""Seconds that any of them takes."""
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
    within a factor of 1.21 (`benchmarks.inductor.model_choices`). What is no template of a product counts as the
    shortest one.
    """
    shape = operation_geometry(problem)
    if not isinstance(shape, MatmulGeometry):
        return np.full(len(candidates), _ANY_S)
    operand = next(a.dtype for a in problem.arguments if a.kind == "tensor")
    scalar = operand.rpartition(".")[2] in _SCALAR_DTYPES and "precision=highest" in problem.key
    return np.array([_seconds(candidate, shape.k, scalar) for candidate in candidates])


def _seconds(candidate: Candidate, k: int, scalar: bool) -> float:
    if not candidate.variant.startswith(_TRITON):
        return _ANY_S
    parameters = candidate.config.parameters()
    tile = [parameters.get(name) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps")]
    if not all(isinstance(size, int) and size > 0 for size in tile):
        return _ANY_S
    height, width, depth, warps = (int(size) for size in tile if size)
    accumulators = height * width / (32 * warps) / _FULL_TILE
    if scalar:
        return _ANY_S + _SCALAR_S * accumulators * depth / _FULL_DEPTH
    steps = math.ceil(k / depth)
    if steps > _MOST_UNROLLED:
        return _ANY_S + _ROLLED_S * accumulators
    return _ANY_S + _UNROLLED_S * accumulators**_UNROLLED_POWER * steps / _FULL_STEPS
