"""A call at another size, worked out from its record; and what cannot be worked out, refused with the reason."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from forecast_autotune.records import Argument
from forecast_integrations.triton.problem.rebuilt_call import RebuildError, resize_arguments


def tensor(name: str, shape: Sequence[int], stride: Sequence[int] | None = None) -> Argument:
    """A float16 tensor, dense unless strides are given."""
    dense = torch.empty(tuple(shape), device="meta").stride()
    return Argument(name, "tensor", "float16", tuple(shape), tuple(stride or dense), aligned=True)


def number(name: str, value: int) -> Argument:
    """An integer argument."""
    return Argument(name, "scalar", "i32", value=value)


MATMUL = (
    tensor("a_ptr", (300, 64)),
    tensor("b_ptr", (64, 128)),
    tensor("c_ptr", (300, 128)),
    number("M", 300),
    number("N", 128),
    number("K", 64),
    number("stride_am", 64),
    number("stride_cm", 128),
)


def resized(arguments: Sequence[Argument], name: str, value: int) -> dict[str, Argument]:
    """The arguments at another size, by name."""
    return {a.name: a for a in resize_arguments(arguments, name, value)[0]}


def test_dimensions_that_are_the_size_follow_it_and_others_stay() -> None:
    found = resized(MATMUL, "M", 8192)
    assert found["a_ptr"].shape == (8192, 64)
    assert found["b_ptr"] == MATMUL[1]
    assert found["c_ptr"].stride == (128, 1)
    assert [found[n].value for n in ("M", "N", "K", "stride_am", "stride_cm")] == [8192, 128, 64, 64, 128]
    given = (tensor("x", (1, 64)), number("M", 1), number("K", 64), number("stride_xm", 64))
    found = resized(given, "M", 16)
    assert (found["x"].shape, found["x"].stride, found["stride_xm"].value) == ((16, 64), (64, 1), 64)


def test_strides_that_span_the_size_follow_it_in_tensors_and_in_scalars() -> None:
    given = (
        tensor("x", (2, 300, 64)),
        tensor("y", (64, 300), (1, 64)),
        tensor("padded", (2, 300), (320, 1)),
        number("T", 300),
        number("D", 64),
        number("B", 2),
        number("stride_xb", 300 * 64),
        number("stride_xt", 64),
        number("padded_stride", 320),
        number("count", 2 * 300 * 64),
    )
    found = resized(given, "T", 600)
    assert found["x"].stride == (600 * 64, 64, 1)
    assert found["y"].stride == (1, 64)
    assert found["padded"].stride == (640, 1)
    names = ("stride_xb", "stride_xt", "padded_stride", "count")
    assert [found[n].value for n in names] == [600 * 64, 64, 640, 2 * 600 * 64]


ONE_ROW = (
    tensor("x", (4, 1, 64)),
    *(number(*one) for one in (("T", 1), ("D", 64), ("B", 4), ("stride_xb", 64))),
)
BLIND: list[tuple[Sequence[Argument], str, int, str]] = [
    ((*MATMUL, number("rows", 300)), "M", 16, "M and rows are 300"),
    ((*MATMUL, tensor("mask", (300, 300))), "M", 16, "mask has several dimensions of 300"),
    (MATMUL, "L", 16, "L is no positive integer argument"),
    ((*MATMUL, tensor("w", (1 << 24, 3))), "M", 8192, "cannot be told, as no dimension is 300"),
    ((*MATMUL, Argument("d", "tensor", "float16", (300,), (1,), extra={"descriptor": True})), "M", 16, "TMA"),
    (ONE_ROW, "T", 16, "which stride stride_xb is cannot be told"),
]


@pytest.mark.parametrize(("arguments", "name", "value", "why"), BLIND)
def test_what_cannot_be_told_is_refused(
    arguments: Sequence[Argument], name: str, value: int, why: str
) -> None:
    with pytest.raises(RebuildError, match=why):
        resize_arguments(arguments, name, value)
