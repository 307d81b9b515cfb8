"""A call's arguments at another size: what follows from one integer argument, worked out from the call's record.

A dimension of a tensor follows the argument if it is equal to it, and strides follow the dimensions. Where that says
too little the call is refused, with the reason: a wrong guess would time another problem. What is made has at least
the storage of both sizes, so that even a wrong guess reads and writes nothing else.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from forecast_autotune.records import Argument
from forecast_integrations.triton.problem.describe import DESCRIPTOR
from forecast_integrations.triton.problem.rebuilt_call import RebuildError

MAX_SLACK_BYTES = 1 << 31
"""The most storage for a tensor of which nobody knows how it grows."""


@dataclass(frozen=True)
class ResizedArguments:
    """Arguments of a call at another size."""

    arguments: tuple[Argument, ...]
    """In the order of the call's."""
    before: tuple[Argument, ...]
    """The call's own."""
    elements: Mapping[str, int]
    """Storage of each tensor, in elements: of those that changed, or may have to hold more than their shape says."""
    changed: Mapping[int, int]
    """Sizes and strides of the call that are others now: old -> new, as far as that is unique."""

    def by_name(self) -> dict[str, Argument]:
        """The arguments by name."""
        return {a.name: a for a in self.arguments}


def resize_arguments(arguments: Sequence[Argument], name: str, value: int) -> ResizedArguments:
    """The arguments of a call whose argument `name` is `value`. Raises `RebuildError` where they cannot be told."""
    old = _size(arguments, name)
    others = {
        a.name: a.value
        for a in arguments
        if a.name != name
        and a.kind in ("scalar", "constexpr")
        and type(a.value) is int
        and not is_stride(a.name)
    }
    tensors = [a for a in arguments if a.kind == "tensor"]
    same = sorted(n for n, v in others.items() if v == old)
    if value != old and same and any(old in t.shape for t in tensors):
        raise RebuildError(
            f"{name} and {', '.join(same)} are {old} in this call: which dimensions follow {name} cannot be told"
        )
    twice = [t.name for t in tensors if t.shape.count(old) > 1]
    if value != old and twice:
        raise RebuildError(
            f"{twice[0]} has several dimensions of {old} in this call: which of them follow {name} cannot be told"
        )
    resized: dict[str, Argument] = {}
    elements: dict[str, int] = {}
    for tensor in tensors:
        sized = _resized_tensor(tensor, old, value)
        resized[tensor.name] = sized
        needed = max(_extent(tensor), _extent(sized))
        if sized.shape == tensor.shape and not set(tensor.shape) <= {1, *others.values()}:
            needed = math.ceil(needed * max(1.0, value / old))
            if needed > _extent(tensor) and 8 * needed > MAX_SLACK_BYTES:
                raise RebuildError(
                    f"how the shape {tensor.shape} of {tensor.name} follows from {name} cannot be told, as no "
                    f"dimension is {old}"
                )
        if needed > _extent(sized):
            elements[tensor.name] = needed
    products = _changed_products(tensors, resized, old)
    scalars = {
        a.name: replace(a, value=_resized_scalar(a, name, value, tensors, resized, products))
        for a in arguments
        if a.kind in ("scalar", "constexpr") and type(a.value) is int
    }
    new = {**resized, **scalars}
    made = tuple(new.get(a.name, a) for a in arguments)
    return ResizedArguments(made, tuple(arguments), elements, {old: value, **products})


def _size(arguments: Sequence[Argument], name: str) -> int:
    for argument in arguments:
        if argument.name == name and type(argument.value) is int and argument.value > 0:
            return argument.value
    raise RebuildError(f"{name} is no positive integer argument of this call")


def is_stride(name: str) -> bool:
    """Whether a scalar is, by its name, a stride of a tensor."""
    return "stride" in name.lower()


def _extent(tensor: Argument) -> int:
    """Elements from the first to the last, both included."""
    if 0 in tensor.shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride, strict=True))


def _resized_tensor(tensor: Argument, old: int, value: int) -> Argument:
    """Dimensions of the old size become `value`; a stride grows with what lies within it."""
    if tensor.extra.get(DESCRIPTOR):
        raise RebuildError(
            f"argument {tensor.name} is a TMA descriptor, whose own shape would have to follow"
        )
    if len(tensor.stride) != len(tensor.shape) or any(s < 0 for s in tensor.stride):
        raise RebuildError(f"argument {tensor.name} has shape {tensor.shape} and strides {tensor.stride}")
    shape = tuple(value if n == old else n for n in tensor.shape)
    stride = list(tensor.stride)
    # From the innermost: of equal strides, the later dimension lies within the earlier one.
    order = sorted((d for d in range(len(shape)) if stride[d] > 0), key=lambda d: (stride[d], -d))
    for inner, outer in itertools.pairwise(order):
        before = tensor.stride[inner] * tensor.shape[inner]
        after = stride[inner] * shape[inner]
        if before == after:
            continue
        # Dense, or padded by as much as before.
        stride[outer] = (
            after if tensor.stride[outer] == before else math.ceil(tensor.stride[outer] * after / before)
        )
    return replace(tensor, shape=shape, stride=tuple(stride))


def _changed_products(
    tensors: Sequence[Argument], resized: Mapping[str, Argument], old: int
) -> dict[int, int]:
    """Numbers of elements that are others now, of tensors that follow the argument: a kernel may take one of them."""
    found: dict[int, int | None] = {}
    for tensor in tensors:
        before, after = math.prod(tensor.shape), math.prod(resized[tensor.name].shape)
        if before != after and before != old:
            found[before] = after if found.get(before, after) == after else None
    sizes = {n for t in tensors for n in t.shape}
    return {b: a for b, a in found.items() if a is not None and b not in sizes}


def _resized_scalar(
    argument: Argument,
    name: str,
    value: int,
    tensors: Sequence[Argument],
    resized: Mapping[str, Argument],
    products: Mapping[int, int],
) -> int:
    given = argument.value
    assert isinstance(given, int)
    if argument.name == name:
        return value
    if not is_stride(argument.name):
        return products.get(given, given)
    places = [
        (t.name, resized[t.name].stride[d]) for t in tensors for d, s in enumerate(t.stride) if s == given
    ]
    own = [new for tensor, new in places if _belongs(argument.name, tensor)]
    found = set(own or [new for _, new in places]) or {given}
    if len(found) > 1:
        raise RebuildError(
            f"which stride {argument.name} is cannot be told: at {name} = {value} it may be "
            f"{' or '.join(map(str, sorted(found)))}"
        )
    return found.pop()


def _belongs(stride: str, tensor: str) -> bool:
    """Whether a stride's name begins or ends with a tensor's: `stride_am` and `a_ptr`, `x_row_stride` and `x`."""
    bare = tensor.lower().removesuffix("_ptr").removesuffix("ptr")
    rest = stride.lower().replace("strides", "").replace("stride", "").strip("_")
    return bool(bare) and (rest.startswith(bare) or rest.endswith("_" + bare))
