"""How wrong a correct solution may be, element by element, from the operation itself.

A fixed atol lets zeros pass where results are tiny, and refuses honest sums where they are long. Here the
limit of every element follows from how much the exact result moves when the inputs move by one relative
unit (its condition, measured in float64), as in forward error analysis (Higham, Accuracy and Stability of
Numerical Algorithms, 2002, chapters 1 and 3):

    limit = 3/4 eps_out |want| + safety * 1/2 eps_compute * (sqrt(terms) * condition + floor)
            + smallest normal

The first term is the rounding of the result, the second that of intermediate results; rounding errors of
a sum of n terms add up like a random walk, so as sqrt(n); `floor` is the size of intermediate results that
cancel, which no move of the inputs shows. The third lets hardware flush denormals.

One element may use all of its limit; the root mean square over an output may not exceed what is left of the
limits when the first term is halved (the bound of one rounding) and the second is quartered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_STEP = 2.0**-24
"""Relative size of the moves; the float64 reference resolves their effect to 8 digits."""
_MOVES = 4
_ENOUGH = 64
"""Elements from which on a root mean square says something."""

Inputs = Mapping[str, Any]


@dataclass(frozen=True)
class Expected:
    """One exact output (float64, or integers), its dtype as asked for, and the limit of its error."""

    want: torch.Tensor
    dtype: torch.dtype
    limit: torch.Tensor | None
    """None for integers and booleans, which have to be equal."""
    typical: torch.Tensor | None = None
    """What the root mean square of the errors is held against."""


def expected(
    reference: Callable[..., Any],
    inputs: Inputs,
    dtypes: Sequence[torch.dtype],
    *,
    compute: torch.dtype,
    terms: int,
    safety: float,
    floor: float = 0.0,
    generator: torch.Generator,
) -> list[Expected]:
    """Exact outputs and limits. `reference` is called with every floating tensor in float64.

    Raises `ValueError` when it returns another number of tensors than there are `dtypes`.
    """
    exact = {name: _wide(value) for name, value in inputs.items()}
    wants = outputs_of(reference(**_copies(exact)))
    if len(wants) != len(dtypes):
        raise ValueError(f"the reference returns {len(wants)} outputs, the definition lists {len(dtypes)}")
    wants = [w.double() if d.is_floating_point else w for w, d in zip(wants, dtypes, strict=True)]
    squares = [torch.zeros_like(w) if w.is_floating_point() else None for w in wants]
    for _ in range(_MOVES):
        moved = {n: _moved(v, generator) for n, v in exact.items()}
        for square, want, other in zip(squares, wants, outputs_of(reference(**moved)), strict=True):
            if square is not None:
                square += ((other.double() - want) / _STEP).nan_to_num(0, 0, 0) ** 2 / _MOVES
    flushed = outputs_of(reference(**{n: _flushed(v, inputs[n]) for n, v in exact.items()}))
    found = []
    for want, dtype, square, flat in zip(wants, dtypes, squares, flushed, strict=True):
        if square is None:
            found.append(Expected(want, dtype, None))
            continue
        # At least 1: even where the inputs hardly matter, intermediate results are rounded.
        condition = torch.maximum(torch.maximum(square.sqrt(), _row_rms(square)), want.abs())
        info = torch.finfo(dtype)
        rounding = info.eps * want.abs()
        unit = safety * 0.5 * torch.finfo(compute).eps
        compute_error = unit * (math.sqrt(max(1, terms)) * condition + floor)
        least = info.smallest_normal + (flat.double() - want).abs().nan_to_num(0, 0, 0)
        limit = 0.75 * rounding + compute_error + least
        found.append(Expected(want, dtype, limit, 0.5 * rounding + 0.25 * compute_error + least))
    return found


def outputs_of(result: Any) -> list[torch.Tensor]:
    """One tensor or a sequence of them, as a list. Raises `ValueError` for anything else."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, tuple | list) and all(isinstance(t, torch.Tensor) for t in result):
        return list(result)
    raise ValueError(f"a reference must return tensors, not {type(result).__name__}")


def mismatch(got: torch.Tensor, one: Expected) -> tuple[str, float]:
    """How `got` breaks its limits ('' if it does not), and the largest error over its limit."""
    want = one.want
    if want.numel() == 0:
        return "", 0.0
    if one.limit is None:
        wrong = got.to(want.dtype) != want
        return (_first(wrong, got, want), math.inf) if wrong.any() else ("", 0.0)
    largest = torch.finfo(one.dtype).max
    over = want.abs() > largest
    value = got.double()
    error = (value - want).abs()
    # A result beyond the dtype's range may be infinite or, after honest rounding, its largest number.
    nearly = largest * (1 - torch.finfo(one.dtype).eps)
    beyond = over & (value.sign() == want.sign()) & (value.abs() >= nearly)
    same = (value.isnan() & want.isnan()) | (value == want) | beyond
    edge = value.isinf() & (value.sign() == want.sign()) & (want.abs() + one.limit >= largest)
    # A NaN compares false with everything, so it counts as wrong unless the reference has one there.
    wrong = ~(same | edge | (error <= one.limit))
    counted = ~(same | edge) & one.limit.isfinite()
    ratio = (error / one.limit)[counted]
    worst = float(ratio.max()) if ratio.numel() else 0.0
    if wrong.any():
        return _first(wrong, got, want, one.limit), math.inf if math.isnan(worst) else worst
    if one.typical is not None and counted.sum() >= _ENOUGH:
        typical, allowed = _rms(error[counted]), _rms(one.typical[counted])
        if typical > allowed:
            return f"root mean square error {typical:.3g}, allowed {allowed:.3g}: biased", worst
    return "", worst


def _first(
    wrong: torch.Tensor, got: torch.Tensor, want: torch.Tensor, limit: torch.Tensor | None = None
) -> str:
    where = tuple(int(n) for n in wrong.nonzero()[0])
    allowed = "" if limit is None else f" +- {float(limit[where]):.3g}"
    return (
        f"{int(wrong.sum())} of {wrong.numel()} elements are wrong; the first at {where} is "
        f"{got[where].item():.6g}, expected {want[where].item():.6g}{allowed}"
    )


def _rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())


def _row_rms(square: torch.Tensor) -> torch.Tensor:
    """A result that is small by cancellation has its neighbours' rounding errors, not its own size's."""
    if square.dim() == 0 or square.numel() == 0:
        return square.sqrt()
    return square.mean(-1, keepdim=True).sqrt().expand_as(square)


def _wide(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _copies(inputs: Inputs) -> dict[str, Any]:
    return {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in inputs.items()}


def _moved(value: Any, generator: torch.Generator) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if not value.is_floating_point():
        return value.clone()
    sign = torch.randint(0, 2, value.shape, generator=generator).double() * 2 - 1
    return value * (1 + _STEP * sign)


def _flushed(value: Any, original: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if not value.is_floating_point():
        return value.clone()
    least = torch.finfo(original.dtype).smallest_normal
    return torch.where(value.abs() < least, torch.zeros_like(value), value)
