"""How near two problems of one kernel are: the order in which prior knowledge is offered."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forecast_autotune.records import Problem, Scalar

_MISMATCH_DISTANCE = 1.0
"""What a differing dtype, flag or missing argument counts: as much as one size off by a factor of two."""


def _size(value: Scalar) -> float | str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return math.copysign(math.log2(1.0 + abs(value)), value)
    return str(value)


def _key_part(text: str) -> float | str:
    try:
        value = float(text)
    except ValueError:
        return text
    return _size(value) if math.isfinite(value) else text


@cache
def _log2_of_size(n: int) -> float:
    return math.log2(1.0 + max(n, 0))


def similarity_features(problem: Problem) -> dict[str, float | str]:
    """Sizes on a log2 scale and everything else as text, by name.

    Shapes per argument and axis, scalars, constexprs, and the tuning key by position: what the user
    put into the key therefore counts twice, and problems known by their key alone still compare.
    """
    found: dict[str, float | str] = {}
    for argument in problem.arguments:
        found[argument.name] = argument.dtype
        if argument.kind == "tensor":
            for axis, n in enumerate(argument.shape):
                found[f"{argument.name}.{axis}"] = _log2_of_size(n)
        else:
            found[f"{argument.name}="] = _size(argument.value)
    for position, text in enumerate(problem.key):
        found[f"key.{position}"] = _key_part(text)
    return found


def feature_distance(a: dict[str, float | str], b: dict[str, float | str]) -> float:
    """Sum over names of |difference| of the log2 sizes; anything else that differs counts 1."""
    total = 0.0
    for name in a.keys() | b.keys():
        x, y = a.get(name), b.get(name)
        if isinstance(x, float) and isinstance(y, float):
            total += abs(x - y)
        elif x != y:
            total += _MISMATCH_DISTANCE
    return total


def nearness_key(problem: Problem, other: Problem) -> tuple[bool, float, str]:
    """Sort key, nearest first: same source before others, then `feature_distance`, then the id."""
    source = problem.kernel.source_sha256
    changed = not source or source != other.kernel.source_sha256
    return changed, feature_distance(similarity_features(problem), similarity_features(other)), other.id
