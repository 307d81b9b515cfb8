"""A problem pack: its computation (`Definition`), its sizes (`Workload`) and its sources (`Solution`).

The schema follows flashinfer-bench (definition, workloads, solutions, traces): JSON for facts, Python
text for code, nothing else. A pack is plain data. Reading one never imports or runs any of its code; that
happens in a worker only, see `forecast_harness.verify`.
"""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from operator import attrgetter
from typing import Any

from forecast_autotune import python_parser
from forecast_autotune.errors import RecordError
from forecast_autotune.python_parser import MAX_SOURCE_CHARACTERS
from forecast_autotune.records import digest
from forecast_autotune.records.codec import Record, json_option
from forecast_autotune.records.json_fields import decode_json, one_of, read_integer, tuple_of

_BINARY_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def evaluate(text: str | int, axes: Mapping[str, int]) -> int:
    """The integer that `text` gives with these axis values.

    Knows integers, axis names, `+ - * // %`, `min`, `max` and brackets. Raises `RecordError` for all else.
    """
    if isinstance(text, int):
        return text
    try:
        return _evaluate_node(python_parser.parse_expression(text), axes)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError) as error:
        names = ", ".join(sorted(axes)) or "none"
        raise RecordError(f"cannot evaluate {text!r:.80} ({error}); axes here: {names}") from error


def _evaluate_node(node: ast.expr, axes: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        if node.id not in axes:
            raise ValueError(f"{node.id} is no axis")
        return axes[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY_OPERATORS:
        return int(
            _BINARY_OPERATORS[type(node.op)](
                _evaluate_node(node.left, axes), _evaluate_node(node.right, axes)
            )
        )
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords and node.args:
        arguments = [_evaluate_node(a, axes) for a in node.args]
        if node.func.id == "min":
            return min(arguments)
        if node.func.id == "max":
            return max(arguments)
    raise ValueError("only integers, axis names, + - * // %, min and max")


# --- sizes, tensors, tolerances ---


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
    """The largest error of a correct solution against the exact result; see `forecast_harness.verify.tolerance`."""

    compute: str = field(default="float32", metadata=json_option(read=one_of(DTYPES[:4])))
    """The dtype in which a solution may hold intermediate results."""
    reduction: str = field(default="1", metadata=json_option(read=str))
    """Terms of the longest sum: an axis expression."""
    safety: float = 8.0
    """The multiple of one honest evaluation's expected error that is let through."""
    floor: float = 0.0
    """Size of intermediate results that may cancel to far less (1 - p near p = 1): their rounding stays."""

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= 1e6:
            raise RecordError(f"floor must be a number in [0, 1e6], not {self.floor!r:.60}")
        if not 1 <= self.safety <= 1000:
            raise RecordError(f"safety must be a number in [1, 1000], not {self.safety!r:.60}")


# --- packs ---


PACK_SCHEMA = 1


class Language(StrEnum):
    """The language of a solution."""

    TORCH = "torch"
    TRITON = "triton"
    CUDA = "cuda"


class PackFormat(StrEnum):
    """The convention that reference and solutions of a pack follow."""

    OWN = "own"
    """`reference(**inputs)` and `run(**inputs)`, or with outputs as further arguments."""
    KERNELBENCH = "kernelbench"
    """`Model`, `ModelNew`, `get_inputs`, `get_init_inputs`."""


@dataclass(frozen=True)
class Definition(Record, schema=PACK_SCHEMA, label="definition", unknown="refuse"):
    """The operation of a pack, without a way to compute it."""

    name: str
    description: str = ""
    source: str = ""
    """Where the operation was published."""
    format: PackFormat = PackFormat.OWN
    axes: Mapping[str, AxisSpec] = field(default_factory=dict)
    inputs: Mapping[str, TensorSpec] = field(default_factory=dict)
    outputs: Mapping[str, TensorSpec] = field(default_factory=dict)
    destination: bool = False
    """Whether a solution writes into given outputs instead of returning new ones."""
    deterministic: bool = True
    """Whether equal inputs must give equal bits."""
    tolerance: ToleranceSpec = ToleranceSpec()
    flops: str = field(default="0", metadata=json_option(read=str))
    """Useful floating-point operations: an axis expression."""
    bytes: str = field(default="", metadata=json_option(read=str))
    """Bytes that must cross the memory bus, where that is not every input and output once."""

    @classmethod
    def from_json(cls, data: Any) -> Definition:
        """Read a `definition.json`. Raises `RecordError` saying which field breaks which rule."""
        definition = super().from_json(data)
        definition._check()
        return definition

    def _check(self) -> None:
        # Holds for files alone: what a kernel's own arguments define has neither inputs nor outputs here.
        if self.format is PackFormat.OWN and not (self.inputs and self.outputs):
            raise RecordError("definition needs at least one input and one output")
        for name in ("axes", "inputs", "outputs"):
            if strange := [n for n in getattr(self, name) if not n.isidentifier()]:
                raise RecordError(f"definition.{name} must map identifiers to objects, not {strange}")
        ones = {n: (1 if a.value is None else a.value) for n, a in self.axes.items()}
        for tensor in (*self.inputs.values(), *self.outputs.values()):
            tensor.sizes(ones)
        evaluate(self.flops, ones)
        evaluate(self.bytes or "0", ones)
        evaluate(self.tolerance.reduction, ones)


def _read_axes(value: object) -> dict[str, Any]:
    # Values are of any type: foreign generators take more than sizes.
    if not isinstance(value, dict):
        raise RecordError(f" must be an object, not {value!r:.60}")
    return dict(value)


@dataclass(frozen=True)
class Workload(Record, label="workload", unknown="refuse"):
    """One public size at which solutions are compared; `values` name arguments of foreign generators."""

    name: str
    axes: Mapping[str, int] = field(metadata=json_option(read=_read_axes, write=dict))
    large: bool = field(default=False, metadata=json_option(when=attrgetter("large")))
    """Only timed, and only on a device: too large to be drawn and checked often."""
    host: bool = field(default=False, metadata=json_option(when=attrgetter("host")))
    """Only timed, and only on a CPU: a size that takes milliseconds there, and too little time on a device."""

    def check_axes(self, definition: Definition) -> None:
        """An own-format pack needs a size for every variable axis. Raises `RecordError`."""
        if definition.format is not PackFormat.OWN:
            return
        names = {n for n, a in definition.axes.items() if a.value is None}
        if set(self.axes) != names:
            raise RecordError(f"workload {self.name} gives axes {sorted(self.axes)}, not {sorted(names)}")
        for name, size in self.axes.items():
            read_integer(size, f"workload {self.name}: {name}")


def source_problem(text: str) -> str:
    """Why a text cannot be handed to anybody as a source; '' where it can, though it may be no program."""
    if len(text) > MAX_SOURCE_CHARACTERS:
        return f"the source has {len(text)} characters; at most {MAX_SOURCE_CHARACTERS} are read"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"character {error.start} of the source is a lone surrogate, which no file holds"
    return ""


@dataclass(frozen=True)
class Solution(Record, label="solution", unknown="refuse"):
    """A candidate's source. Immutable; its identity is the hash of its text and language."""

    name: str
    language: Language
    source: str
    entry: str = "run"
    """The function (KernelBench: the class) that is called."""
    author: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files that `source` imports beside installed packages: relative path -> text."""

    def __post_init__(self) -> None:
        for name, text in {self.name: self.source, **self.files}.items():
            if problem := source_problem(text):
                raise RecordError(f"solution {name!r:.80}: {problem}")

    @property
    def id(self) -> str:
        """A stable name of the code that would be executed."""
        return digest(str(self.language), self.entry, self.source, dict(self.files))


@dataclass(frozen=True)
class Pack(Record, label="pack", unknown="refuse"):
    """A definition with its reference code, public workloads and known solutions."""

    definition: Definition
    reference: str
    """Python text: `reference(**inputs)` and optionally `make(axes, draw)`; or a foreign module."""
    workloads: tuple[Workload, ...]
    solutions: tuple[Solution, ...] = field(default=(), metadata=json_option(private=True))
    """A worker is not told of them."""

    def __post_init__(self) -> None:
        for workload in self.workloads:
            workload.check_axes(self.definition)

    @property
    def id(self) -> str:
        """A stable name of the problem: equal packs give comparable traces."""
        return digest(self.definition.to_json(), self.reference, [w.to_json() for w in self.workloads])

    @property
    def checked_workloads(self) -> tuple[Workload, ...]:
        """Workloads at which results are checked many times."""
        return tuple(w for w in self.workloads if not w.large and not w.host)

    def timed_workloads(self, device: str, *languages: Language) -> tuple[Workload, ...]:
        """Workloads at which solutions in these languages are compared: those for the device, if any.

        On a CPU Triton is interpreted, which takes minutes at any size that would say something; and all
        solutions of a comparison are timed at the same workloads.
        """
        if device == "cpu" and Language.TRITON in languages:
            return self.checked_workloads
        workloads = tuple(w for w in self.workloads if (w.host if device == "cpu" else w.large))
        return workloads or self.checked_workloads

    def solution(self, name: str) -> Solution:
        """The solution of this name. Raises `RecordError` listing those there are."""
        for solution in self.solutions:
            if solution.name == name:
                return solution
        names = [s.name for s in self.solutions]
        raise RecordError(f"pack {self.definition.name} has no solution {name!r}; it has {names}")

    def with_(self, **changes: Any) -> Pack:
        """A copy with some fields replaced."""
        return replace(self, **changes)

    @classmethod
    def from_json(cls, data: Any) -> Pack:
        """Read what `to_json` wrote: all but the solutions. Raises `RecordError`."""
        pack = super().from_json(data)
        if all(w.large or w.host for w in pack.workloads):
            raise RecordError(
                f"pack {pack.definition.name} has only workloads that are large or for the host"
            )
        return pack


def parse_json(text: str, place: str) -> Any:
    """JSON text -> object, without NaN. Raises `RecordError` naming the file."""
    try:
        return decode_json(text)
    except (ValueError, json.JSONDecodeError) as error:
        raise RecordError(f"{place} is not JSON: {error}") from error
