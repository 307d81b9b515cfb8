"""The smaller parts of a pack: sizes, tensors, tolerances."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forecast_autotune.errors import RecordError
from forecast_autotune.records.codec import Record, json_option
from forecast_autotune.records.json_fields import one_of, tuple_of
from forecast_harness.targets.packs.expressions import evaluate

DTYPES = [
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
]
LAYOUTS = ("contiguous", "padded", "offset", "transposed")
"""Plain; rows further apart than their length; one element off alignment; last two axes swapped."""
VALUE_REGIMES = ("normal", "uniform", "offset", "large", "tiny", "denormal", "cauchy", "zeros", "nan", "inf")


def _read_shape(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(size, str | int) for size in value):
        raise RecordError(f" must be a list of axis expressions, not {value!r:.60}")
    return tuple(str(size) for size in value)


def _is_variable(axis: AxisSpec) -> bool:
    return axis.value is None


@dataclass(frozen=True)
class AxisSpec(Record, label="axis", unknown="refuse"):
    """One size: a constant, or a variable with the range that hidden workloads draw from."""

    value: int | None = field(default=None, metadata=json_option(omit_null=True))
    """The size of a constant axis."""
    low: int = field(default=1, metadata=json_option(when=_is_variable))
    high: int = field(default=64, metadata=json_option(when=_is_variable))
    multiple: int = field(default=1, metadata=json_option(when=_is_variable))
    """A hidden size is a multiple of this in [low, high], drawn anew for every run."""

    def __post_init__(self) -> None:
        if self.value is None and (
            self.multiple < 1 or self.high // self.multiple < -(-self.low // self.multiple)
        ):
            raise RecordError(f"it has no multiple of {self.multiple} in [{self.low}, {self.high}]")

    @classmethod
    def from_json(cls, data: Any) -> AxisSpec:
        """Read `{"value": 64}` or `{"low": 1, "high": 65, "multiple": 1}`. Raises `RecordError`."""
        if isinstance(data, Mapping) and "value" in data and len(data) > 1:
            raise RecordError(f"an axis is either constant or variable, not both: {data!r:.80}")
        return super().from_json(data)


@dataclass(frozen=True)
class TensorSpec(Record, label="tensor", unknown="refuse"):
    """An input or output: its shape in axis expressions, its dtype, how inputs of it may look."""

    shape: tuple[str, ...] = field(metadata=json_option(read=_read_shape))
    dtype: str = field(metadata=json_option(read=one_of(DTYPES)))
    values: tuple[str, ...] = field(
        default=("normal", "uniform", "offset"), metadata=json_option(read=tuple_of(one_of(VALUE_REGIMES)))
    )
    """Regimes its numbers are drawn from; each must be defined for the operation."""
    layouts: tuple[str, ...] = field(
        default=("contiguous",), metadata=json_option(read=tuple_of(one_of(LAYOUTS)))
    )
    static: bool = False
    """A weight: a solution may keep what it derives from it. One of a given shape keeps its values for as
    long as the candidate's process lives."""

    def sizes(self, axes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape with these axis values."""
        return tuple(evaluate(s, axes) for s in self.shape)


@dataclass(frozen=True)
class ToleranceSpec(Record, label="tolerance", unknown="refuse"):
    """How far a correct solution may be from the exact result; see `forecast_harness.verify.tolerance`."""

    compute: str = field(default="float32", metadata=json_option(read=one_of(DTYPES[:4])))
    """The dtype in which a solution may hold intermediate results."""
    reduction: str = field(default="1", metadata=json_option(read=str))
    """Terms of the longest sum: an axis expression."""
    safety: float = 8.0
    """How many times the expected error of one honest evaluation is let through."""
    floor: float = 0.0
    """Size of intermediate results that may cancel to far less (1 - p near p = 1): their rounding stays."""

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= 1e6:
            raise RecordError(f"floor must be a number in [0, 1e6], not {self.floor!r:.60}")
        if not 1 <= self.safety <= 1000:
            raise RecordError(f"safety must be a number in [1, 1000], not {self.safety!r:.60}")
