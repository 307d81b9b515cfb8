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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_PERTURBATION = 2.0**-24
"""Relative size of the moves; the float64 reference resolves their effect to 8 digits."""
_PERTURBATION_COUNTS = ((1 << 16, 8), (1 << 22, 4))
"""Moves for outputs of fewer elements; one for larger ones, as each row has thousands to average over. Where
a result hangs on two inputs that cancel when they move against each other (softmax far from its maximum),
all moves do so once in 2**moves elements, and its limit comes out too small."""
_ELEMENTS_PER_PART = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Elements that are compared at a time: what a cache holds, and what keeps a device busy."""
_FEWEST_FOR_RMS = 64
"""Elements from which on a root mean square says something."""

ReferenceInputs = Mapping[str, Any]


@dataclass(frozen=True)
class ExpectedOutput:
    """One exact output (float64, or integers), its dtype as asked for, and the limit of its error."""

    want: torch.Tensor
    dtype: torch.dtype
    limit: torch.Tensor | None
    """None for integers and booleans, which have to be equal."""
    typical: torch.Tensor | None = None
    """The limits for the root mean square of the errors."""
    row_scale: float = 0.0
    """The least root mean square of a row's conditions over that of its results, 1 at most: see `surely_right`."""


def expected_outputs(
    reference: Callable[..., Any],
    inputs: ReferenceInputs,
    dtypes: Sequence[torch.dtype],
    *,
    compute: torch.dtype,
    terms: int,
    safety: float,
    floor: float = 0.0,
    generator: torch.Generator,
) -> list[ExpectedOutput]:
    """Exact outputs and limits. `reference` is called with every floating tensor in float64.

    All is computed where the tensors are, and `generator` has to be of that device.
    Raises `ValueError` when it returns another number of tensors than there are `dtypes`.
    """
    exact = {name: _as_float64(value) for name, value in inputs.items()}
    wants = tensors_of(reference(**_cloned_inputs(exact)))
    if len(wants) != len(dtypes):
        raise ValueError(f"the reference returns {len(wants)} outputs, the definition lists {len(dtypes)}")
    wants = [w.double() if d.is_floating_point else w for w, d in zip(wants, dtypes, strict=True)]
    if not any(d.is_floating_point for d in dtypes):
        return [ExpectedOutput(want, dtype, None) for want, dtype in zip(wants, dtypes, strict=True)]
    squares = [torch.zeros_like(w) if w.is_floating_point() else None for w in wants]
    largest = max(w.numel() for w in wants)
    moves = next((count for size, count in _PERTURBATION_COUNTS if largest < size), 1)
    for _ in range(moves):
        variation = {n: _perturb(v, generator) for n, v in exact.items()}
        for square, want, result in zip(squares, wants, tensors_of(reference(**variation)), strict=True):
            if square is not None:
                off = (result.double() - want).mul_(1 / _PERTURBATION).nan_to_num_(0, 0, 0)
                square += off.square_().div_(moves)
    flushed = wants
    if any(_has_denormals(v, inputs[n]) for n, v in exact.items()):
        flushed = tensors_of(reference(**{n: _flush_denormals(v, inputs[n]) for n, v in exact.items()}))
    results = []
    for want, dtype, square, flat in zip(wants, dtypes, squares, flushed, strict=True):
        if square is None:
            results.append(ExpectedOutput(want, dtype, None))
            continue
        # In place as far as possible: a fresh tensor of this size costs more than the arithmetic.
        size, rows = want.abs(), _row_rms(square)
        scale = _least_ratio(rows, _row_rms(want.square()))
        # At least 1: even where the inputs hardly matter, intermediate results are rounded.
        condition = torch.maximum(torch.maximum(square.sqrt_(), rows), size)
        info = torch.finfo(dtype)
        rounding = size.mul_(info.eps)
        unit = safety * 0.5 * torch.finfo(compute).eps
        compute_error = condition.mul_(math.sqrt(max(1, terms))).add_(floor).mul_(unit)
        least: float | torch.Tensor = info.smallest_normal
        if flat is not want:
            least = least + (flat.double() - want).abs().nan_to_num(0, 0, 0)
        limit = compute_error.add(rounding, alpha=0.75).add_(least)
        typical = compute_error.mul_(0.25).add_(rounding, alpha=0.5).add_(least)
        results.append(ExpectedOutput(want, dtype, limit, typical, scale))
    return results


def narrow_limits(
    wants: Sequence[torch.Tensor],
    dtypes: Sequence[torch.dtype],
    row_scales: Sequence[float],
    *,
    compute: torch.dtype,
    terms: int,
    safety: float,
    floor: float = 0.0,
) -> list[ExpectedOutput]:
    """Limits of given exact outputs that are never wider than those of `expected_outputs`, without its moves.

    An element's condition is not known; that it is at least the element's own size always is, and at
    least `row_scales` times its row's where the inputs are drawn as those were that gave the scales. So an output
    within these limits is right, and any other one may still be.
    """
    results = []
    for want, dtype, scale in zip(wants, dtypes, row_scales, strict=True):
        if not dtype.is_floating_point:
            results.append(ExpectedOutput(want, dtype, None))
            continue
        want = want.double()
        info = torch.finfo(dtype)
        size = want.abs()
        compute_error = torch.maximum(size, _row_rms(want.square()).mul(scale))
        compute_error.mul_(math.sqrt(max(1, terms))).add_(floor).mul_(safety * 0.5 * torch.finfo(compute).eps)
        limit = compute_error.add(size, alpha=0.75 * info.eps).add_(info.smallest_normal)
        typical = compute_error.mul_(0.25).add_(size, alpha=0.5 * info.eps).add_(info.smallest_normal)
        squares = float(typical.square_().sum())
        results.append(ExpectedOutput(want, dtype, limit, torch.tensor(squares)))
    return results


def surely_right(output: torch.Tensor, expected: ExpectedOutput) -> bool:
    """Whether `output` keeps limits of `narrow_limits`; False where only the full check can say."""
    if expected.want.numel() == 0:
        return True
    if expected.limit is None:
        return bool(torch.equal(output.to(expected.want.dtype), expected.want))
    error = output.double().sub_(expected.want).abs_()
    # A NaN compares false with everything, infinities give one: both are for the thorough check.
    if not bool((error <= expected.limit).all()):
        return False
    few = error.numel() < _FEWEST_FOR_RMS or expected.typical is None
    return bool(few or float(error.square_().sum()) <= float(expected.typical))  # type: ignore[arg-type]


def _least_ratio(condition: torch.Tensor, size: torch.Tensor) -> float:
    """The least ratio of two tensors, 1 at most; 0 where it is none."""
    ratio = (condition / size).nan_to_num(0.0, 0.0, 0.0)
    return min(1.0, float(ratio.min())) if ratio.numel() else 0.0


def tensors_of(result: Any) -> list[torch.Tensor]:
    """One tensor or a sequence of them, as a list. Raises `ValueError` for anything else."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, tuple | list) and all(isinstance(t, torch.Tensor) for t in result):
        return list(result)
    raise ValueError(f"a reference must return tensors, not {type(result).__name__}")


def mismatch(output: torch.Tensor, expected: ExpectedOutput) -> tuple[str, float]:
    """How `output` breaks its limits ('' if it does not), and the largest error over its limit."""
    want = expected.want
    if want.numel() == 0:
        return "", 0.0
    if expected.limit is None:
        return unequal(output, want)
    flats = [t.reshape(-1) for t in (output, want, expected.limit)]
    typical = None if expected.typical is None else expected.typical.reshape(-1)
    result = ErrorCount(expected.dtype, tuple(want.shape))
    step = _ELEMENTS_PER_PART.get(want.device.type, want.numel())
    for at in range(0, want.numel(), step):
        part = slice(at, at + step)
        output_part, want_part, limit = (t[part] for t in flats)
        result.add(output_part, want_part, limit, None if typical is None else typical[part], at)
    return result.message(biased=typical is not None)


def unequal(output: torch.Tensor, want: torch.Tensor) -> tuple[str, float]:
    """How integers or booleans differ ('' if they do not), and infinity where they do."""
    wrong = output.to(want.dtype) != want
    if not wrong.any():
        return "", 0.0
    where = int(wrong.reshape(-1).nonzero()[0])
    pair = tuple(float(t.reshape(-1)[where]) for t in (output, want))
    return _error_text(int(wrong.sum()), where, tuple(want.shape), *pair), math.inf


class ErrorCount:
    """The errors of one output, which is compared part by part."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self._dtype, self._shape = dtype, shape
        self._wrong, self._first_error = 0, (0, 0.0, 0.0, 0.0)
        """The number of wrong elements; index, value, expected value and limit of the first."""
        self._worst, self._count, self._squares, self._limits = 0.0, 0, 0.0, 0.0

    def add(
        self,
        output: torch.Tensor,
        want: torch.Tensor,
        limit: torch.Tensor,
        typical: torch.Tensor | None,
        at: int,
    ) -> None:
        """Compare a part, one-dimensional, whose first element is the output's element `at`, row by row."""
        wrong, error, counts = _compare_elements(output, want, limit, self._dtype)
        if wrong.any():
            if not self._wrong:
                here = int(wrong.nonzero()[0])
                self._first_error = at + here, float(output[here]), float(want[here]), float(limit[here])
            self._wrong += int(wrong.sum())
        if not counts.all():
            error, limit = error[counts], limit[counts]
            typical = None if typical is None else typical[counts]
        if error.numel():
            self._worst = float(np.maximum(self._worst, float((error / limit).max())))  # NaN if either is
            self._count += error.numel()
            self._squares += float(error.square_().sum())
            self._limits += 0.0 if typical is None else float(typical.square().sum())

    def message(self, *, biased: bool) -> tuple[str, float]:
        """The fault ('' for none), and the largest error over its limit; `biased`: means have limits, too."""
        if self._wrong:
            where, output, want, limit = self._first_error
            text = _error_text(self._wrong, where, self._shape, output, want, limit)
            return text, math.inf if math.isnan(self._worst) else self._worst
        if biased and self._count >= _FEWEST_FOR_RMS and self._squares > self._limits:
            result, most = math.sqrt(self._squares / self._count), math.sqrt(self._limits / self._count)
            return f"root mean square error {result:.3g}, allowed {most:.3g}: biased", self._worst
        return "", self._worst


def _compare_elements(
    output: torch.Tensor, want: torch.Tensor, limit: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The wrong elements, the errors of all elements, and the errors that count."""
    largest = torch.finfo(dtype).max
    over = want.abs() > largest
    value = output.double()
    error = (value - want).abs()
    # A result beyond the dtype's range may be infinite or, after honest rounding, its largest number.
    nearly = largest * (1 - torch.finfo(dtype).eps)
    beyond = over & (value.sign() == want.sign()) & (value.abs() >= nearly)
    same = (value.isnan() & want.isnan()) | (value == want) | beyond
    edge = value.isinf() & (value.sign() == want.sign()) & (want.abs() + limit >= largest)
    # A NaN compares false with everything, so it counts as wrong unless the reference has one there; nothing is near
    # an infinite one, whose limit may be infinite, too.
    wrong = ~(same | edge | (want.isfinite() & (error <= limit)))
    return wrong, error, ~(same | edge) & limit.isfinite()


def _error_text(
    bad: int, first: int, shape: tuple[int, ...], output: float, want: float, limit: float | None = None
) -> str:
    """The sentence on `bad` wrong elements; `first`: the index of the first, counted row by row."""
    where = tuple(int(n) for n in np.unravel_index(first, shape))
    tolerance = "" if limit is None else f" +- {limit:.3g}"
    return (
        f"{bad} of {math.prod(shape)} elements are wrong; the first at {where} is "
        f"{output:.6g}, expected {want:.6g}{tolerance}"
    )


def _row_rms(square: torch.Tensor) -> torch.Tensor:
    """Root mean squares of rows: a result that is small by cancellation has rounding errors as large as its row's."""
    if square.dim() == 0 or square.numel() == 0:
        return square.sqrt()
    return square.mean(-1, keepdim=True).sqrt().expand_as(square)


def _as_float64(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _cloned_inputs(inputs: ReferenceInputs) -> dict[str, Any]:
    return {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in inputs.items()}


def _perturb(value: Any, generator: torch.Generator) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if not value.is_floating_point():
        return value.clone()
    up = torch.randint(0, 2, value.shape, generator=generator, dtype=torch.int8, device=value.device)
    return up.double().mul_(2 * _PERTURBATION).add_(1 - _PERTURBATION).mul_(value)


def _has_denormals(value: Any, original: Any) -> bool:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.numel():
        return False
    size = value.abs()
    return bool(((size > 0) & (size < torch.finfo(original.dtype).smallest_normal)).any())


def _flush_denormals(value: Any, original: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if not value.is_floating_point():
        return value.clone()
    least = torch.finfo(original.dtype).smallest_normal
    return torch.where(value.abs() < least, torch.zeros_like(value), value)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether dtype, shape and every byte are the same; strides do not matter."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bool(torch.equal(raw_bytes(a), raw_bytes(b)))


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of its elements in order, shape (bytes,): itself where it is contiguous, else a copy."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


_ELEMENT_FACTOR = 8.0
"""One element may err by so many times the base's own root mean square error, without the rounding of its result."""
_RMS_FACTOR = 2.0
"""The root mean square error over an output may be so many times the base's own."""
_ROUNDING_FACTOR = 1.01
_INTERMEDIATE_ROUNDINGS = 64.0
"""Roundings of intermediate results that are always allowed."""
_MOST_DEVIATION = 0.05
"""A wider run that is farther than this from the plain one has computed something else."""
_ELEMENTS_BESIDE_BASE = {"cpu": 1 << 16, "cuda": 1 << 24}
"""Elements that are compared with a base's at a time: more would cost a host many times more, in fresh memory."""

WIDER_DTYPE = {"cpu": torch.float64, "cuda": torch.float32}
"""The wider dtype, by device: an interpreter computes in float64; on a device there are no products of float64, and
those of float32 are rounded less than those of the 16-bit types."""


def widened(memory: torch.Tensor, device: str) -> torch.Tensor:
    """The same values in the wider dtype, if there is one."""
    to = WIDER_DTYPE[device]
    narrow = memory.is_floating_point() and memory.dtype.itemsize < to.itemsize
    return memory.to(to) if narrow else memory


def compare_with_base(own: torch.Tensor, base: torch.Tensor, wide: torch.Tensor | None) -> tuple[str, float]:
    """How a variant's output breaks the limits that its base's sets ('' if it does not), and the largest error over its
    limit.

    `wide` is the base's result in a wider dtype, or None. It is used unless it is so far from the plain result that
    something else was computed. All is computed where the tensors are, which is torch's default device.
    """
    if base.numel() == 0:
        return "", 0.0
    if not base.dtype.is_floating_point:
        return unequal(own, base)
    length = base.shape[-1] if base.dim() else 1
    believable = None if wide is None or wide.shape != base.shape else wide.reshape(-1, length)
    comparison = _RowwiseComparison(base.reshape(-1, length), believable)
    return comparison.compare(own.reshape(-1, length), tuple(base.shape))


class _RowwiseComparison:
    """The limits of one output, [rows, length], from sums over its rows. All in double precision, part by part.

    A base kernel is no exact reference: it rounds, too, and another order of its sums rounds otherwise. Where it can be
    run on the same inputs in a wider dtype, its own error is known, and a variant may err by a few times as much,
    measured against the wider result. The scale of an element's error is its size and the root mean square of its row,
    as rounding errors of a row's intermediate results do not shrink with the element (Higham 2002, chapter 3).
    """

    def __init__(self, base: torch.Tensor, wide: torch.Tensor | None) -> None:
        self._base, self._wide = base, wide
        self._info = torch.finfo(base.dtype)
        if wide is not None and not self._is_same():
            self._wide = None
        self._sizes = self._row_means(lambda base, want: want.nan_to_num(0, 0, 0).square()).sqrt()
        """Root mean square of every row, [rows]."""
        self._is_rounded = self._wide is not None
        self._own: torch.Tensor | None = None
        """The base's own relative error in every row, [rows]; None where no wider run tells it."""
        if self._wide is not None:
            squares = self._row_means(self._relative_squares, self._sizes)
            self._own = torch.maximum(squares, squares.mean()).clamp_min(0).sqrt()

    def compare(self, own: torch.Tensor, shape: tuple[int, ...]) -> tuple[str, float]:
        """See `compare_with_base`."""
        result = ErrorCount(self._base.dtype, shape)
        for rows, columns in _parts(self._base):
            base, want = self._part(rows, columns)
            limit, typical = self._limits(base, want, rows)
            part, want, limit, typical = (t.reshape(-1) for t in (own[rows, columns], want, limit, typical))
            result.add(part, want, limit, typical, rows.start * own.shape[1] + columns.start)
        return result.message(biased=not self._is_rounded)

    def _part(self, rows: slice, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """The base's result, and the expected one, in double precision."""
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
        result = torch.zeros(len(self._base), dtype=torch.float64)
        for rows, columns in _parts(self._base):
            row_sizes = () if sizes is None else (sizes[rows, None],)
            result[rows] += values(*self._part(rows, columns), *row_sizes).sum(-1)
        return result / self._base.shape[1]

    def _relative_squares(self, base: torch.Tensor, want: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        if self._is_rounded:
            again = want.to(self._base.dtype).double()
            self._is_rounded = torch.equal(again.nan_to_num(), want.nan_to_num())
        size = want.abs()
        # Rounded to the output's dtype, a result errs by a 24th of its rounding squared, or more: intermediate results
        # add the rest.
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
        # The base's own results are right, however far the wider run is from it.
        limit = torch.maximum(limit, (base - want).abs_().nan_to_num_(0, 0, 0).mul_(1.001))
        typical = 0.35 * rounding + info.smallest_normal
        typical += scale * (_RMS_FACTOR * own + 0.25 * _INTERMEDIATE_ROUNDINGS * unit)
        return limit, typical


def _parts(whole: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Some rows, or a part of one, at a time, in order; of `whole`, [rows, length]."""
    count, length = whole.shape
    most = _ELEMENTS_BESIDE_BASE[whole.device.type]
    rows_at_once = max(1, most // length)
    for row in range(0, count, rows_at_once):
        for column in range(0, length, most):
            yield slice(row, min(row + rows_at_once, count)), slice(column, min(column + most, length))


def results_agree(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two results of one calculation agree but for the order of its sums."""
    if not a.is_floating_point():
        return bool(torch.equal(a, b))
    x, y = a.double(), b.double()
    if not torch.equal(x.isfinite(), y.isfinite()):
        return False
    finite = x.isfinite()
    loose = 2 * torch.finfo(a.dtype).eps + 64 * torch.finfo(torch.float32).eps
    return bool(((x - y).abs()[finite] <= loose * (x.abs()[finite] + _rms(x[finite]))).all())


def _rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt()) if values.numel() else 0.0
