"""The smaller parts of a pack: sizes, tensors, tolerances, and strict readers of their JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forecast_autotune.errors import RecordError
from forecast_harness.packs.expressions import evaluate

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


def parse_fields(data: object, what: str, known: str, required: str = "") -> dict[str, Any]:
    """A JSON object with known names only. Raises `RecordError` for another, or for a missing name."""
    if not isinstance(data, dict):
        raise RecordError(f"{what} must be a JSON object, not {data!r:.60}")
    if strange := sorted(set(data) - set(known.split())):
        raise RecordError(f"{what} has unknown fields {strange}; known are {known}")
    if missing := sorted(set(required.split()) - set(data)):
        raise RecordError(f"{what} lacks {missing}")
    return data


def parse_text(data: Mapping[str, Any], name: str, what: str, default: str | None = None) -> str:
    """A text field, or its default. Raises `RecordError` for anything else."""
    value = data.get(name, default)
    if not isinstance(value, str):
        raise RecordError(f"{what}.{name} must be a text, not {value!r:.60}")
    return value


def parse_choice(value: object, words: tuple[str, ...] | list[str], what: str) -> str:
    """One of the words. Raises `RecordError` listing them."""
    if value not in words:
        raise RecordError(f"{what} must be one of {', '.join(words)}, not {value!r:.60}")
    return str(value)


def parse_size(value: object, what: str, least: int = 0) -> int:
    """An integer of at least `least`. Raises `RecordError` for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise RecordError(f"{what} must be an integer >= {least}, not {value!r:.60}")
    return value


@dataclass(frozen=True)
class AxisSpec:
    """One size: a constant, or a variable with the range that hidden workloads draw from."""

    value: int | None = None
    """The size of a constant axis."""
    low: int = 1
    high: int = 64
    multiple: int = 1
    """A hidden size is a multiple of this in [low, high], drawn anew for every run."""

    @classmethod
    def from_json(cls, data: object, what: str) -> AxisSpec:
        """Read `{"value": 64}` or `{"low": 1, "high": 65, "multiple": 1}`."""
        found = parse_fields(data, what, "value low high multiple")
        if "value" in found:
            if len(found) > 1:
                raise RecordError(f"{what} has a value and a range: it is either constant or variable")
            return cls(value=parse_size(found["value"], f"{what}.value"))
        axis = cls(**{n: parse_size(v, f"{what}.{n}") for n, v in found.items()})
        if axis.multiple < 1 or axis.high // axis.multiple < -(-axis.low // axis.multiple):
            raise RecordError(f"{what} has no multiple of {axis.multiple} in [{axis.low}, {axis.high}]")
        return axis

    def to_json(self) -> dict[str, int]:
        """The object that `from_json` reads."""
        if self.value is not None:
            return {"value": self.value}
        return {"low": self.low, "high": self.high, "multiple": self.multiple}


@dataclass(frozen=True)
class TensorSpec:
    """An input or output: its shape in axis expressions, its dtype, how inputs of it may look."""

    shape: tuple[str, ...]
    dtype: str
    values: tuple[str, ...] = ("normal", "uniform", "offset")
    """Regimes its numbers are drawn from; each must be defined for the operation."""
    layouts: tuple[str, ...] = ("contiguous",)
    static: bool = False
    """A weight: a solution may keep what it derives from it. One of a given shape keeps its values for as
    long as the candidate's process lives."""

    @classmethod
    def from_json(cls, data: object, what: str) -> TensorSpec:
        """Read `{"shape": ["M", "2*N"], "dtype": "float32", ...}`."""
        found = parse_fields(data, what, "shape dtype values layouts static", "shape dtype")
        if not isinstance(found["shape"], list) or not all(isinstance(s, str | int) for s in found["shape"]):
            raise RecordError(f"{what}.shape must be a list of axis expressions, not {found['shape']!r:.60}")
        return cls(
            tuple(str(s) for s in found["shape"]),
            parse_choice(found["dtype"], DTYPES, f"{what}.dtype"),
            tuple(parse_choice(v, VALUE_REGIMES, f"{what}.values") for v in found.get("values", cls.values)),
            tuple(parse_choice(v, LAYOUTS, f"{what}.layouts") for v in found.get("layouts", cls.layouts)),
            found.get("static", False) is True,
        )

    def to_json(self) -> dict[str, Any]:
        """The object that `from_json` reads."""
        return {
            "shape": list(self.shape),
            "dtype": self.dtype,
            "values": list(self.values),
            "layouts": list(self.layouts),
            "static": self.static,
        }

    def sizes(self, axes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape with these axis values."""
        return tuple(evaluate(s, axes) for s in self.shape)


@dataclass(frozen=True)
class ToleranceSpec:
    """How far a correct solution may be from the exact result; see `forecast_harness.verify.tolerance`."""

    compute: str = "float32"
    """The dtype in which a solution may hold intermediate results."""
    reduction: str = "1"
    """Terms of the longest sum: an axis expression."""
    safety: float = 8.0
    """How many times the expected error of one honest evaluation is let through."""
    floor: float = 0.0
    """Size of intermediate results that may cancel to far less (1 - p near p = 1): their rounding stays."""

    @classmethod
    def from_json(cls, data: object, what: str) -> ToleranceSpec:
        """Read `{"compute": "float32", "reduction": "K", "safety": 8}`."""
        found = parse_fields(data, what, "compute reduction safety floor")
        floor = found.get("floor", 0.0)
        if isinstance(floor, bool) or not isinstance(floor, int | float) or not 0 <= floor <= 1e6:
            raise RecordError(f"{what}.floor must be a number in [0, 1e6], not {floor!r:.60}")
        safety = found.get("safety", 8.0)
        if isinstance(safety, bool) or not isinstance(safety, int | float) or not 1 <= safety <= 1000:
            raise RecordError(f"{what}.safety must be a number in [1, 1000], not {safety!r:.60}")
        compute = parse_choice(found.get("compute", "float32"), DTYPES[:4], f"{what}.compute")
        return cls(compute, str(found.get("reduction", "1")), float(safety), float(floor))

    def to_json(self) -> dict[str, Any]:
        """The object that `from_json` reads."""
        return {
            "compute": self.compute,
            "reduction": self.reduction,
            "safety": self.safety,
            "floor": self.floor,
        }
