"""A variant's output beside its base's, looked at part by part: the same verdict as of the whole."""

from __future__ import annotations

import math

import pytest
import torch

from forecast_harness.variants.verification.tolerance import (
    compare_with_base,
    expected_output,
    is_same_calculation,
)
from forecast_harness.verify.tolerance import mismatch

SHAPES = ((), (1,), (7,), (0, 4), (5, 6, 7), (1000, 3), (70, 1000), (65536,), (2, 70000))


def whole(got: torch.Tensor, base: torch.Tensor, wide: torch.Tensor | None) -> tuple[str, float]:
    return mismatch(got, expected_output(base, wide if is_same_calculation(base, wide) else None))


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
                said, worst = compare_with_base(got, base, other)
                expected, most = whole(got, base, other)
                assert said == expected
                assert worst == pytest.approx(most, rel=1e-9, nan_ok=True)


def test_what_is_wrong_is_found_at_its_place() -> None:
    base = torch.randn(40, 5000, generator=torch.Generator().manual_seed(1)).half()
    got = base.clone()
    got[31, 4321] += 1.0
    said, worst = compare_with_base(got, base, base.float())
    assert said.startswith("1 of 200000 elements are wrong; the first at (31, 4321) is ")
    assert worst > 1.0


def test_whole_numbers_have_to_be_equal() -> None:
    base = torch.arange(200_000).reshape(2, -1)
    assert compare_with_base(base.clone(), base, None) == ("", 0.0)
    got = base.clone()
    got[1, 99_999] = -3
    assert compare_with_base(got, base, None)[0].endswith("the first at (1, 99999) is -3, expected 199999")
