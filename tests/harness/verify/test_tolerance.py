"""Bits, and how far a variant may be from its base."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from forecast_harness.verify.tolerance import (
    _ELEMENT_FACTOR,
    _INTERMEDIATE_ROUNDINGS,
    _MOST_DEVIATION,
    _RMS_FACTOR,
    _ROUNDING_FACTOR,
    ExpectedOutput,
    compare_with_base,
    mismatch,
    raw_bytes,
    same_bits,
)


def test_bits_are_compared_and_not_values() -> None:
    one = torch.tensor([[1.0, float("nan")], [0.0, 4.0]])
    assert same_bits(one, one.clone())
    assert same_bits(one, one.t().contiguous().t()), "strides do not matter"
    minus = one.clone()
    minus[1, 0] = -0.0
    assert torch.equal(minus[1], one[1])
    assert not same_bits(minus, one)


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(4, dtype=torch.int32),
        torch.zeros(2, 2),
        torch.zeros(3),
        torch.tensor([0.0, 0.0, 0.0, 1e-45]),
    ],
)
def test_another_dtype_shape_or_byte_is_another_tensor(other: torch.Tensor) -> None:
    assert not same_bits(torch.zeros(4), other)


def test_tensors_without_elements_or_dimensions() -> None:
    assert same_bits(torch.empty(0, 3), torch.empty(0, 3))
    assert not same_bits(torch.empty(0, 3), torch.empty(0, 4))
    assert same_bits(torch.tensor(True), torch.tensor(True))
    assert raw_bytes(torch.tensor(1, dtype=torch.int32)).tolist() == [1, 0, 0, 0]


def test_bytes_of_a_contiguous_tensor_are_its_own() -> None:
    tensor = torch.zeros(2, 2)
    raw_bytes(tensor)[:] = 255
    assert bool(tensor.isnan().all())
    raw_bytes(tensor.t())[:] = 0
    assert bool(tensor.isnan().all()), "of any other, a copy's"


SHAPES = ((), (1,), (7,), (0, 4), (5, 6, 7), (1000, 3), (70, 1000), (65536,), (2, 70000))


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


def _row_rms(want: torch.Tensor) -> torch.Tensor:
    """The root mean square of every row, or of a vector as a whole."""
    return _row_means(want.nan_to_num(0, 0, 0).square()).sqrt()


def _row_means(values: torch.Tensor) -> torch.Tensor:
    if values.dim() == 0 or values.numel() == 0:
        return values
    return values.mean(-1, keepdim=True).expand_as(values)


def _rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt()) if values.numel() else 0.0


def whole(got: torch.Tensor, base: torch.Tensor, wide: torch.Tensor | None) -> tuple[str, float]:
    return mismatch(got, expected_output(base, wide if is_same_calculation(base, wide) else None))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_parts_say_what_the_whole_says(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    exact = torch.randn(shape, generator=generator, dtype=torch.float64)
    for special in (None, math.nan, math.inf, 7e4):
        wide = exact.clone()
        if special is not None and wide.numel():
            wide.reshape(-1)[wide.numel() // 2] = special
        base = wide.to(dtype)
        for error in (0.0, 1e-7, 3e-3):
            noise = torch.randn(shape, generator=generator, dtype=torch.float64)
            got = (base.double() * (1 + error * noise)).to(dtype)
            # Exact, rounded in the kernel, none, and another calculation.
            for other in (wide.float(), base.float(), None, 3 * wide.float()):
                problem, worst = compare_with_base(got, base, other)
                expected, most = whole(got, base, other)
                assert problem == expected
                assert worst == pytest.approx(most, rel=1e-9, nan_ok=True)


def test_what_is_wrong_is_found_at_its_place() -> None:
    base = torch.randn(40, 5000, generator=torch.Generator().manual_seed(1)).half()
    got = base.clone()
    got[31, 4321] += 1.0
    problem, worst = compare_with_base(got, base, base.float())
    assert problem.startswith("1 of 200000 elements are wrong; the first at (31, 4321) is ")
    assert worst > 1.0


def test_whole_numbers_have_to_be_equal() -> None:
    base = torch.arange(200_000).reshape(2, -1)
    assert compare_with_base(base.clone(), base, None) == ("", 0.0)
    got = base.clone()
    got[1, 99_999] = -3
    assert compare_with_base(got, base, None)[0].endswith("the first at (1, 99999) is -3, expected 199999")
