"""How far a variant may be from its base kernel, from how far the base is from itself in higher precision.

A base kernel is no exact reference: it rounds, too, and another order of its sums rounds otherwise. Where it
can be run on the same inputs in a wider dtype, its own error is known, and a variant may err by a few times
as much, measured against the wider result. The scale of an element's error is its size and the root mean
square of its row, as rounding errors of a row's intermediate results do not shrink with the element (Higham,
Accuracy and Stability of Numerical Algorithms, 2002, chapter 3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from forecast_harness.verify.tolerance import ErrorCount, unequal

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
_PART = 1 << 16
"""Elements that are compared at a time: what a cache holds. Whole outputs cost many times more, in fresh memory."""

WIDER_DTYPE = {"cpu": torch.float64, "cuda": torch.float32}
"""Wide enough for an interpreter, which calculates in what it is given; on a device products of float64 are
not to be had, and of float32 they are rounded less than those of the 16-bit types."""


def widened(memory: torch.Tensor, device: str) -> torch.Tensor:
    """The same values in the wider dtype, if there is one."""
    to = WIDER_DTYPE[device]
    narrow = memory.is_floating_point() and memory.dtype.itemsize < to.itemsize
    return memory.to(to) if narrow else memory


def compare_with_base(got: torch.Tensor, base: torch.Tensor, wide: torch.Tensor | None) -> tuple[str, float]:
    """How a variant's output breaks the limits that its base's sets ('' if it does not), and the largest error over its
    limit.

    `wide` is what the base gives in a wider dtype, or None. It is believed unless it is so far from the plain result
    that something else was calculated.
    """
    if base.numel() == 0:
        return "", 0.0
    if not base.dtype.is_floating_point:
        return unequal(got, base)
    length = base.shape[-1] if base.dim() else 1
    believable = None if wide is None or wide.shape != base.shape else wide.reshape(-1, length)
    comparison = _RowwiseComparison(base.reshape(-1, length), believable)
    return comparison.compare(got.reshape(-1, length), tuple(base.shape))


class _RowwiseComparison:
    """The limits of one output, [rows, length], from sums over its rows. All in double precision, part by part."""

    def __init__(self, base: torch.Tensor, wide: torch.Tensor | None) -> None:
        self._base, self._wide = base, wide
        self._info = torch.finfo(base.dtype)
        if wide is not None and not self._is_same():
            self._wide = None
        self._sizes = self._row_means(lambda base, want: want.nan_to_num(0, 0, 0).square()).sqrt()
        """Root mean square of every row, [rows]."""
        self._rounded = self._wide is not None
        self._own: torch.Tensor | None = None
        """The base's own relative error in every row, [rows]; None where no wider run tells it."""
        if self._wide is not None:
            squares = self._row_means(self._relative_squares, self._sizes)
            self._own = torch.maximum(squares, squares.mean()).clamp_min(0).sqrt()

    def compare(self, got: torch.Tensor, shape: tuple[int, ...]) -> tuple[str, float]:
        """See `compare_with_base`."""
        found = ErrorCount(self._base.dtype, shape)
        for rows, columns in _parts(self._base):
            base, want = self._part(rows, columns)
            limit, typical = self._limits(base, want, rows)
            part, want, limit, typical = (t.reshape(-1) for t in (got[rows, columns], want, limit, typical))
            found.add(part, want, limit, typical, rows.start * got.shape[1] + columns.start)
        return found.said(biased=not self._rounded)

    def _part(self, rows: slice, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """The base's result, and the one that is wanted, in double precision."""
        base = self._base[rows, columns].double()
        if self._wide is None:
            return base, base
        wide = self._wide[rows, columns].double()
        # Where the base overflows, a variant has to, too.
        return base, torch.where(base.isfinite() & wide.isfinite(), wide, base)

    def _is_same(self) -> bool:
        off = size = count = 0.0
        assert self._wide is not None
        for rows, columns in _parts(self._base):
            a, b = self._base[rows, columns].double(), self._wide[rows, columns].double()
            finite = a.isfinite() & b.isfinite()
            zero = torch.zeros((), dtype=torch.float64)
            off += float(torch.where(finite, a - b, zero).square_().sum())
            size += float(torch.where(finite, b, zero).square_().sum())
            count += float(finite.sum())
        if not count:
            return False
        return bool((off / count) ** 0.5 <= _MOST_DEVIATION * (size / count) ** 0.5 + self._info.tiny)

    def _row_means(
        self, values: Callable[..., torch.Tensor], sizes: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Means over rows of `values(base, want)`, or of `values(base, want, sizes of its rows)`; [rows]."""
        found = torch.zeros(len(self._base), dtype=torch.float64)
        for rows, columns in _parts(self._base):
            more = () if sizes is None else (sizes[rows, None],)
            found[rows] += values(*self._part(rows, columns), *more).sum(-1)
        return found / self._base.shape[1]

    def _relative_squares(self, base: torch.Tensor, want: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        if self._rounded:
            again = want.to(self._base.dtype).double()
            self._rounded = torch.equal(again.nan_to_num(), want.nan_to_num())
        size = want.abs()
        # Rounded to the output's dtype, a result errs by a 24th of its rounding squared, or more: the rest is what
        # intermediate results add.
        squares = (base - want).square_().sub_((self._info.eps * size).square_(), alpha=1 / 24)
        return squares.div_((size + sizes).clamp_min_(self._info.tiny).square_()).nan_to_num_(0, 0, 0)

    def _limits(
        self, base: torch.Tensor, want: torch.Tensor, rows: slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        info = self._info
        size = want.abs()
        scale = size + self._sizes[rows, None]
        own = 0.5 * info.eps if self._own is None else self._own[rows, None]
        unit = torch.finfo(torch.float64 if self._base.dtype == torch.float64 else torch.float32).eps / 2
        rounding = info.eps * size
        # A whole step: the wider run may be rounded as well, where the kernel says to which dtype.
        limit = _ROUNDING_FACTOR * rounding + info.smallest_normal
        limit += scale * (_ELEMENT_FACTOR * own + _INTERMEDIATE_ROUNDINGS * unit)
        # What the base itself gives is right, however far the wider run is from it.
        limit = torch.maximum(limit, (base - want).abs_().nan_to_num_(0, 0, 0).mul_(1.001))
        typical = 0.35 * rounding + info.smallest_normal
        typical += scale * (_RMS_FACTOR * own + 0.25 * _INTERMEDIATE_ROUNDINGS * unit)
        return limit, typical


def _parts(whole: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Some rows, or a part of one, at a time, in order; of `whole`, [rows, length]."""
    count, length = whole.shape
    some = max(1, _PART // length)
    for row in range(0, count, some):
        for column in range(0, length, _PART):
            yield slice(row, min(row + some, count)), slice(column, min(column + _PART, length))


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


def _rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt()) if values.numel() else 0.0
