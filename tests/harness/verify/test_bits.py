"""Bits of tensors are compared, not values."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from forecast_harness.verify.bits import raw_bytes, same_bits


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
