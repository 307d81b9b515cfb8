"""The arguments of a CUDA kernel: its parameters in order, and where sizes are read off its tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from forecast_autotune.errors import RecordError
from forecast_autotune.records.codec import Record, json_option
from forecast_autotune.records.json_fields import one_of
from forecast_harness.targets.packs.schema import DTYPES, evaluate

_POINTERS: Mapping[str, tuple[str, str]] = {
    "float64": ("*fp64", "double"),
    "float32": ("*fp32", "float"),
    "float16": ("*fp16", "__half"),
    "bfloat16": ("*bf16", "__nv_bfloat16"),
    "float8_e4m3fn": ("*fp8e4nv", "__nv_fp8_e4m3"),
    "float8_e5m2": ("*fp8e5", "__nv_fp8_e5m2"),
    "int64": ("*i64", "long long"),
    "int32": ("*i32", "int"),
    "int16": ("*i16", "short"),
    "int8": ("*i8", "signed char"),
    "uint8": ("*u8", "unsigned char"),
    "bool": ("*i1", "bool"),
}
"""By dtype: the pointer's type as launch plans have it, and the type of an element in C++."""
_SCALARS: Mapping[str, tuple[str, str]] = {
    "int32": ("i32", "int"),
    "int64": ("i64", "long long"),
    "float32": ("fp32", "float"),
    "float64": ("fp64", "double"),
}
MOST_PARAMETERS = 64
MOST_EXPRESSION_CHARACTERS = 200


def read_expression(value: object) -> str:
    """An integer or an expression, as text. Raises `RecordError` for anything else, and for a long one."""
    if type(value) is int:
        value = str(value)
    if not isinstance(value, str) or not 0 < len(value) <= MOST_EXPRESSION_CHARACTERS:
        raise RecordError(
            f" must be an integer, or an expression of at most {MOST_EXPRESSION_CHARACTERS} characters, "
            f"not {value!r:.60}"
        )
    return value


def _read_shape(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise RecordError(f' must be a list of sizes such as ["rows", 64], not {value!r:.60}')
    return tuple(read_expression(size) for size in value)


def _read_value(value: object) -> str:
    if type(value) is float and math.isfinite(value):
        return repr(value)
    return read_expression(value)


@dataclass(frozen=True)
class KernelParameter(Record, label="parameter", unknown="refuse"):
    """One parameter of a kernel: a pointer to a contiguous tensor or, where it has a `value`, a number."""

    name: str
    dtype: str = field(metadata=json_option(read=one_of(DTYPES)))
    shape: tuple[str, ...] = field(default=(), metadata=json_option(read=_read_shape))
    """Shape of a tensor: expressions of axes."""
    output: bool = False
    """Whether the kernel writes it, all of it; it is given without values then."""
    value: str = field(default="", metadata=json_option(read=_read_value, when=attrgetter("value")))
    """Value of a number: a constant, or an expression of axes."""
    values: tuple[str, ...] = ()
    """Regimes that a tensor's values are drawn from, as packs have them."""

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or len(self.name) > 80:
            raise RecordError(f".name must be an identifier of at most 80 characters, not {self.name!r:.90}")
        if self.is_number and (self.shape or self.output or self.values):
            raise RecordError(
                f" {self.name}: what has a `value` is a number: leave out shape, output and values"
            )
        if self.is_number and self.dtype not in _SCALARS:
            raise RecordError(f" {self.name}: a number is {', '.join(_SCALARS)}, not {self.dtype}")

    @property
    def is_number(self) -> bool:
        """Whether it is a number and no tensor."""
        return bool(self.value)

    @property
    def kind(self) -> str:
        """Its type as launch plans have it."""
        return _SCALARS[self.dtype][0] if self.is_number else _POINTERS[self.dtype][0]

    @property
    def text(self) -> str:
        """As C++ declares it."""
        if self.is_number:
            return f"{_SCALARS[self.dtype][1]} {self.name}"
        return f"{'' if self.output else 'const '}{_POINTERS[self.dtype][1]}* {self.name}"

    def number(self, axes: Mapping[str, int]) -> int | float:
        """The number that is passed at these sizes. Raises `RecordError` where it is none of its type."""
        if not self.dtype.startswith("float"):
            return evaluate(self.value, axes)
        try:
            return float(self.value)
        except ValueError:
            return float(evaluate(self.value, axes))


@dataclass(frozen=True)
class KernelSignature(Record, label="signature", unknown="refuse"):
    """A kernel's name and parameters, and the sizes that never change."""

    entry: str
    parameters: tuple[KernelParameter, ...]
    constants: Mapping[str, int] = field(default_factory=dict)
    """Axes with one value."""

    @property
    def text(self) -> str:
        """As C++ declares it."""
        return f'extern "C" __global__ void {self.entry}({", ".join(p.text for p in self.parameters)})'

    @property
    def tensors(self) -> dict[str, KernelParameter]:
        """Parameters that are pointers."""
        return {p.name: p for p in self.parameters if not p.is_number}

    @property
    def kinds(self) -> tuple[str, ...]:
        """Types of the parameters as launch plans have them."""
        return tuple(p.kind for p in self.parameters)

    def axis_places(self) -> dict[str, tuple[str, int]]:
        """Where each variable axis can be read: a tensor's name, and which of its sizes is that axis."""
        result: dict[str, tuple[str, int]] = {}
        for name, one in self.tensors.items():
            for place, size in enumerate(one.shape):
                if size.isidentifier() and size not in self.constants:
                    result.setdefault(size, (name, place))
        return result

    def axes_of(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """All axes of a call with tensors of these shapes."""
        places = self.axis_places()
        return {**self.constants, **{a: int(shapes[name][n]) for a, (name, n) in places.items()}}


def check_signature(signature: KernelSignature, axes: Mapping[str, Any]) -> None:
    """Raises `RecordError` for a signature that cannot be called at every size of these axes."""
    names = [p.name for p in signature.parameters]
    if not 1 <= len(names) <= MOST_PARAMETERS or len(set(names)) != len(names):
        raise RecordError(
            f"parameters must be 1 to {MOST_PARAMETERS}, each with a name of its own, not {names}"
        )
    if same := sorted(set(names) & set(axes)):
        others = {p.name for p in signature.parameters if p.value == p.name}
        if clash := [n for n in same if n not in others]:
            raise RecordError(
                f"parameter {clash[0]} has the name of an axis and is not that axis: rename one"
            )
    if not any(p.output for p in signature.parameters):
        raise RecordError(
            "no parameter is an output: add `output = true` to the tensors that the kernel writes"
        )
    if all(p.output for p in signature.tensors.values()):
        raise RecordError("every tensor is an output: declare the tensors that the kernel reads, too")
    places = signature.axis_places()
    for name, axis in axes.items():
        if axis.value is None and name not in places:
            raise RecordError(
                f"axis {name} is no size of any tensor, so that it cannot be told from a call: "
                f'use it alone in a shape, as in shape = ["{name}"], or give it a constant value'
            )
    ones = {n: (1 if a.value is None else a.value) for n, a in axes.items()}
    for one in signature.parameters:
        if one.is_number:
            one.number(ones)
        for size in one.shape:
            evaluate(size, ones)
