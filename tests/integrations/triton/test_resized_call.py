"""A call at another size, worked out from its record; and what cannot be worked out, refused with the reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from forecast_autotune.records import Argument
from forecast_integrations.triton.problem.rebuilt_call import (
    RebuildError,
    ResizedArguments,
    resize_arguments,
    resize_grid,
)


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


def test_dimensions_that_are_the_size_follow_it_and_others_stay() -> None:
    found = resize_arguments(MATMUL, "M", 8192).by_name()
    assert found["a_ptr"].shape == (8192, 64)
    assert found["b_ptr"] == MATMUL[1]
    assert found["c_ptr"].stride == (128, 1)
    assert [found[n].value for n in ("M", "N", "K", "stride_am", "stride_cm")] == [8192, 128, 64, 64, 128]
    given = (tensor("x", (1, 64)), number("M", 1), number("K", 64), number("stride_xm", 64))
    found = resize_arguments(given, "M", 16).by_name()
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
    found = resize_arguments(given, "T", 600).by_name()
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


ROWS = 300


def grid_at(grid: Any, size: int = 8192) -> tuple[int, ...]:
    """The grid at another number of rows, for blocks of 16; the call has x (300 x 64)."""
    arguments = (tensor("x", (300, 64)), number("M", 300), number("K", 64))
    resized: ResizedArguments = resize_arguments(arguments, "M", size)
    before = {"x": X, "M": 300, "K": 64}
    after = {"x": torch.empty(size, 64, device="meta"), "M": size, "K": 64}
    made: Any = resize_grid(grid, "M", resized, before, after, {"BLOCK": 16})
    return tuple(made({**after, "BLOCK": 16}))


X = torch.empty(300, 64, device="meta")


def closed_over(M: int, x: torch.Tensor, how: str) -> Callable[[Any], tuple[int, ...]]:
    """A grid function as programs write them: in a function, from what is there."""
    count = x.numel()
    return {
        "size": lambda meta: (M // meta["BLOCK"],),
        "tensor": lambda meta: (x.shape[0] // meta["BLOCK"],),
        "count": lambda meta: (count // 64 // meta["BLOCK"],),
        "default": lambda meta, rows=M: (rows // meta["BLOCK"],),
        "keyword": lambda meta, *, rows=M: (rows // meta["BLOCK"],),
        "parameters": lambda meta: (meta["M"] // meta["BLOCK"],),
        "of a parameter": lambda meta: (meta["x"].shape[0] // meta["BLOCK"],),
        "global": lambda meta: (ROWS // meta["BLOCK"],),
    }[how]


@pytest.mark.parametrize(
    "how", ["size", "tensor", "count", "default", "keyword", "parameters", "of a parameter", "global"]
)
def test_a_grid_function_follows_the_size_wherever_it_has_it_from(how: str) -> None:
    made = closed_over(300, X, how)
    assert grid_at(made) == (512,)
    assert made({"BLOCK": 16, "M": 300, "x": X}) == (18,), "the user's own function is as it was"


def depending_on(unknown: Any) -> Callable[[Any], tuple[int, ...]]:
    """A grid function with something of its own."""
    return lambda meta: (unknown,)


@pytest.mark.parametrize("grid", [(19,), depending_on(19), depending_on([19]), torch.nn.Identity()])
def test_a_grid_that_may_follow_in_a_way_that_nobody_sees_is_refused(grid: Any) -> None:
    with pytest.raises(RebuildError, match="grid"):
        grid_at(grid)
