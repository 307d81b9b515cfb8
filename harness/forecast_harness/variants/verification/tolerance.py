"""How far a variant may be from its base kernel, from how far the base is from itself in higher precision.

A base kernel is no exact reference: it rounds, too, and another order of its sums rounds otherwise. Where it
can be run on the same inputs in a wider dtype, its own error is known, and a variant may err by a few times
as much, measured against the wider result. The scale of an element's error is its size and the root mean
square of its row, as rounding errors of a row's intermediate results do not shrink with the element (Higham,
Accuracy and Stability of Numerical Algorithms, 2002, chapter 3).
"""

from __future__ import annotations

import torch

from forecast_harness.verify.tolerance import ExpectedOutput

_ELEMENT_FACTOR = 8.0
"""Times the base's own root mean square error, without the rounding of its result, that one element may be
off."""
_RMS_FACTOR = 2.0
"""Times the base's own root mean square error that the root mean square over an output may be off."""
_ROUNDING_FACTOR = 1.01
_INTERMEDIATE_ROUNDINGS = 64.0
"""Roundings of intermediate results that are let through in any case."""
_MOST_DEVIATION = 0.05
"""A wider run that is farther than this from the plain one did something else."""

WIDER_DTYPE = {"cpu": torch.float64, "cuda": torch.float32}
"""Wide enough for an interpreter, which calculates in what it is given; on a device products of float64 are
not to be had, and of float32 they are rounded less than those of the 16-bit types."""


def widened(memory: torch.Tensor, device: str) -> torch.Tensor:
    """The same values in the wider dtype, if there is one."""
    to = WIDER_DTYPE[device]
    narrow = memory.is_floating_point() and memory.dtype.itemsize < to.itemsize
    return memory.to(to) if narrow else memory


def is_same_calculation(plain: torch.Tensor, wide: torch.Tensor | None) -> bool:
    """Whether a wider run is the same calculation, rounded less."""
    if wide is None or wide.shape != plain.shape or not plain.is_floating_point():
        return False
    a, b = plain.double(), wide.double()
    finite = a.isfinite() & b.isfinite()
    if not finite.any():
        return False
    return bool(
        _rms(a[finite] - b[finite]) <= _MOST_DEVIATION * _rms(b[finite]) + torch.finfo(plain.dtype).tiny
    )


def expected_output(plain: torch.Tensor, wide: torch.Tensor | None) -> ExpectedOutput:
    """What an output must be, given the base's own and, if there is one, that of its wider run.

    All of the output's shape; `wide` is believed, see `is_same_calculation`.
    """
    dtype = plain.dtype
    if not dtype.is_floating_point:
        return ExpectedOutput(plain, dtype, None)
    base = plain.double()
    # Where the base overflows, a variant has to, too.
    want = base if wide is None else torch.where(base.isfinite() & wide.isfinite(), wide.double(), base)
    info = torch.finfo(dtype)
    scale = want.abs() + _row_rms(want)
    rounding = info.eps * want.abs()
    own = torch.full_like(want, 0.5 * info.eps)
    if wide is not None:
        # Rounded to the output's dtype, a result errs by a 24th of `rounding` squared, or more: the rest is
        # what intermediate results add.
        squares = ((base - want) ** 2 - rounding**2 / 24) / scale.clamp_min(info.tiny) ** 2
        squares = squares.nan_to_num(0, 0, 0)
        # A row of few terms, the first of a causal attention, may err far more than the others.
        own = torch.maximum(_row_means(squares), squares.mean()).clamp_min(0).sqrt()
    unit = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps / 2
    least = torch.full_like(want, info.smallest_normal)
    # A whole step: the wider run may be rounded as well, where the kernel says to which dtype.
    limit = (
        _ROUNDING_FACTOR * rounding + scale * (_ELEMENT_FACTOR * own + _INTERMEDIATE_ROUNDINGS * unit) + least
    )
    # What the base itself gives is right, however far the wider run is from it.
    limit = torch.maximum(limit, 1.001 * (base - want).abs().nan_to_num(0, 0, 0))
    if wide is not None and torch.equal(want.to(dtype).double().nan_to_num(), want.nan_to_num()):
        # Rounded in the kernel: results that differ do so by a step, and there is no mean to speak of.
        return ExpectedOutput(want, dtype, limit)
    typical = 0.35 * rounding + scale * (_RMS_FACTOR * own + 0.25 * _INTERMEDIATE_ROUNDINGS * unit) + least
    return ExpectedOutput(want, dtype, limit, typical)


def results_agree(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two results of one calculation agree but for the order of its sums."""
    if not one.is_floating_point():
        return bool(torch.equal(one, other))
    a, b = one.double(), other.double()
    if not torch.equal(a.isfinite(), b.isfinite()):
        return False
    finite = a.isfinite()
    loose = 2 * torch.finfo(one.dtype).eps + 64 * torch.finfo(torch.float32).eps
    return bool(((a - b).abs()[finite] <= loose * (a.abs()[finite] + _rms(a[finite]))).all())


def _row_rms(want: torch.Tensor) -> torch.Tensor:
    """The root mean square of every row, or of a vector as a whole."""
    return _row_means(want.nan_to_num(0, 0, 0).square()).sqrt()


def _row_means(values: torch.Tensor) -> torch.Tensor:
    if values.dim() == 0 or values.numel() == 0:
        return values
    return values.mean(-1, keepdim=True).expand_as(values)


def _rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt()) if values.numel() else 0.0
