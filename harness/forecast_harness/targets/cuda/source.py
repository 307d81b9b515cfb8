"""A CUDA source as text: the rules for its preprocessor lines, and the comment that describes its launch.

The cell in which a source is compiled has no files of the user's. The rules come before that, and hold where a system
has no such cells: a file that a compiler reads may end up in its messages, which language models are shown.

The comment is TOML, whose sizes are expressions of axes and macros:

    /* launch
    grid = ["rows"]
    block = ["BLOCK"]
    shared_bytes = "4 * BLOCK"
    [macros]
    BLOCK = [256, 128, 512]
    */

A config is one choice of every macro; the source as it stands takes the first value of each. Nothing of the comment is
run: expressions are read as those of packs are.
"""

from __future__ import annotations

import itertools
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from forecast_autotune.errors import RecordError
from forecast_autotune.records.codec import Record, json_option
from forecast_autotune.records.json_fields import one_of
from forecast_harness.targets.cuda import MOST_BLOCK, MOST_GRID, MOST_THREADS
from forecast_harness.targets.packs.schema import DTYPES, evaluate, source_problem

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
        """Its declaration in C++."""
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
        """Its declaration in C++."""
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
        """A tensor's name and dimension for each variable axis, from which the axis can be read."""
        result: dict[str, tuple[str, int]] = {}
        for name, parameter in self.tensors.items():
            for place, size in enumerate(parameter.shape):
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
    if common := sorted(set(names) & set(axes)):
        axis_parameters = {p.name for p in signature.parameters if p.value == p.name}
        if clash := [n for n in common if n not in axis_parameters]:
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
    for parameter in signature.parameters:
        if parameter.is_number:
            parameter.number(ones)
        for size in parameter.shape:
            evaluate(size, ones)


# --- sources ---


_TRIGRAPH = re.compile(r"\?\?[=/'()!<>-]")
_LINE_SPLICE = re.compile(r"\\[ \t\f\v]*\r?\n")
_MARK = r"(?:\#|%:)\s*"
_HIDDEN_DIRECTIVE = re.compile(rf"{_MARK}/[*/]")
_DIRECTIVE = re.compile(rf"{_MARK}(?P<name>include_next|include|import|embed|line)\b(?P<rest>[^\r\n]*)")
_PRAGMA = re.compile(r"\b(?:pragma|_Pragma)[\s(\"]+GCC\b")
_QUESTION = re.compile(r"\b__has_(?:include|include_next|embed)\b")
_PLAIN_NAME = r"[A-Za-z0-9_][\w./+-]*"
_HEADER = re.compile(rf"\s*(?:<(?P<system>{_PLAIN_NAME})>|\"(?P<plain>{_PLAIN_NAME})\")\s*(?://.*|/\*.*)?")


def check_source_rules(source: str) -> None:
    """Raises `RecordError` for a source that asks the preprocessor for more than headers of the toolkit.

    Directives in comments and texts count, too: only a compiler can decide which they are.
    """
    if message := source_problem(source):
        raise RecordError(message)
    if "\0" in source:
        raise RecordError("the source holds a NUL character, which no program needs: leave it out")
    if result := _TRIGRAPH.search(source):
        raise RecordError(f"{result[0]!r} is a trigraph: write the character that it stands for")
    text = _LINE_SPLICE.sub("", source)
    if result := _QUESTION.search(text):
        raise RecordError(f"{result[0]} asks which files there are: leave it out")
    if _PRAGMA.search(text):
        raise RecordError("#pragma GCC is for the host's compiler: leave it out")
    if result := _HIDDEN_DIRECTIVE.search(text):
        raise RecordError(
            f"a comment follows {result[0]!r}: write directives without comments before their names"
        )
    for result in _DIRECTIVE.finditer(text):
        header = _HEADER.fullmatch(result["rest"]) if result["name"] == "include" else None
        name = "" if header is None else header["system"] or header["plain"]
        if not name or ".." in name.split("/"):
            raise RecordError(
                f"#{result['name']}{result['rest']!s:.80} is refused: include headers of the toolkit and of C++ by "
                "their plain names, such as <cuda_fp16.h>"
            )


_COMMENT_HEAD = re.compile(r"/\*[ \t]*launch[ \t]*\r?\n")
_EXAMPLE = '/* launch\ngrid = ["rows"]\nblock = [256]\n*/'
_MOST_CHARACTERS = 4000
_MACRO = re.compile(r"[A-Z][A-Z0-9_]{0,39}")
_MOST_MACRO = 2**31 - 1
MOST_CONFIGS = 512
_FIELDS = ("grid", "block", "shared_bytes", "macros")

CudaConfig = Mapping[str, Any]
"""Values of macros; those that are left out have their first one."""


@dataclass(frozen=True)
class LaunchSizes:
    """One launch in numbers."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    """Bytes of dynamic shared memory."""


@dataclass(frozen=True)
class SourceLaunch:
    """The launch comment of a source."""

    grid: tuple[str, ...]
    block: tuple[str, ...]
    shared_bytes: str
    macros: Mapping[str, tuple[int, ...]]

    @property
    def configs(self) -> list[dict[str, int]]:
        """All choices of macros but the first, by their differences from it."""
        names = list(self.macros)
        every = itertools.product(*(self.macros[n] for n in names))
        first = self.with_defaults({})
        result = [{n: v for n, v in zip(names, values, strict=True) if v != first[n]} for values in every]
        return [config for config in result if config]

    def with_defaults(self, config: CudaConfig) -> dict[str, int]:
        """A value for every macro. Raises `RecordError` for a config that is none of this source."""
        for name, value in config.items():
            if value not in self.macros.get(name, ()):
                choices = {n: list(v) for n, v in self.macros.items()}
                raise RecordError(f"config {name} = {value!r:.40} is not among the source's macros {choices}")
        return {n: int(config.get(n, values[0])) for n, values in self.macros.items()}

    def sizes(self, axes: Mapping[str, int], config: CudaConfig) -> LaunchSizes:
        """The launch at these sizes. Raises `RecordError` for one that no device can do."""
        macros = self.with_defaults(config)
        if common := sorted(set(macros) & set(axes)):
            raise RecordError(f"macro {common[0]} has the name of an axis: rename it")
        values = {**axes, **macros}
        grid = _three([evaluate(e, values) for e in self.grid])
        block = _three([evaluate(e, values) for e in self.block])
        shared = evaluate(self.shared_bytes, values)
        if not all(1 <= n <= most for n, most in zip(grid, MOST_GRID, strict=True)):
            raise RecordError(f"the grid is {_size_text(grid)} at {dict(values)}; at most {MOST_GRID}")
        fits = all(1 <= n <= most for n, most in zip(block, MOST_BLOCK, strict=True))
        if not fits or math.prod(block) > MOST_THREADS:
            raise RecordError(
                f"the block is {_size_text(block)} at {dict(values)}; at most {MOST_BLOCK}, and {MOST_THREADS} threads"
            )
        if not 0 <= shared <= 1 << 20:
            raise RecordError(
                f"shared_bytes is {shared!s:.40} at {dict(values)}; 0 to {1 << 20} can be asked for"
            )
        return LaunchSizes(grid, block, shared)


def launch_comments(source: str) -> list[str]:
    """Texts of the comments that say how a source is launched, in linear time."""
    result: list[str] = []
    at = 0
    while (head := _COMMENT_HEAD.search(source, at)) and (end := source.find("*/", head.end())) >= 0:
        result.append(source[head.end() : end])
        at = end
    return result


def read_launch(source: str) -> SourceLaunch:
    """The launch comment of a source. Raises `RecordError` saying what is wrong with it, and what to write."""
    result = launch_comments(source)
    if len(result) != 1:
        raise RecordError(f"the source needs one launch comment, and has {len(result)}: write\n{_EXAMPLE}")
    (text,) = result
    if len(text) > _MOST_CHARACTERS:
        raise RecordError(
            f"the launch comment has {len(text)} characters; at most {_MOST_CHARACTERS} are read"
        )
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise RecordError(f"the launch comment is not TOML: {error!s:.200}; write\n{_EXAMPLE}") from error
    if unknown := sorted(set(data) - set(_FIELDS)):
        raise RecordError(f"the launch comment has {unknown[0]!r:.60}; it may have {', '.join(_FIELDS)}")
    return SourceLaunch(
        _axes_of_launch("grid", data),
        _axes_of_launch("block", data),
        _expression("shared_bytes", data.get("shared_bytes", 0)),
        _macros(data.get("macros", {})),
    )


def _axes_of_launch(name: str, data: Mapping[str, object]) -> tuple[str, ...]:
    value = data.get(name)
    if not isinstance(value, list) or not 1 <= len(value) <= 3:
        raise RecordError(
            f'launch.{name} must be a list of one to three sizes such as ["rows", 1], not {value!r:.60}'
        )
    return tuple(_expression(f"{name}[{n}]", size) for n, size in enumerate(value))


def _expression(name: str, value: object) -> str:
    try:
        return read_expression(value)
    except RecordError as error:
        raise RecordError(f"launch.{name}{error}") from error


def _macros(value: object) -> dict[str, tuple[int, ...]]:
    if not isinstance(value, dict):
        raise RecordError(f"launch.macros must be a table such as BLOCK = [128, 256], not {value!r:.60}")
    for name, values in value.items():
        if not _MACRO.fullmatch(name):
            raise RecordError(
                f"launch.macros: {name!r:.60} must be an upper-case name of at most 40 characters"
            )
        numbers = isinstance(values, list) and values and all(type(v) is int for v in values)
        if not numbers or len(set(values)) != len(values) or not all(0 <= v <= _MOST_MACRO for v in values):
            raise RecordError(
                f"launch.macros.{name} must be a list of different integers in [0, {_MOST_MACRO}], "
                f"not {values!r:.60}"
            )
    if (count := math.prod(len(v) for v in value.values())) > MOST_CONFIGS:
        raise RecordError(f"launch.macros make {count} configs; at most {MOST_CONFIGS} are taken")
    return {name: tuple(values) for name, values in value.items()}


def _three(sizes: list[int]) -> tuple[int, int, int]:
    axes = [*sizes, 1, 1]
    return axes[0], axes[1], axes[2]


def _size_text(sizes: tuple[int, int, int]) -> str:
    return "(" + ", ".join(f"{n!s:.24}" for n in sizes) + ")"


def cuda_configs(source: str) -> list[dict[str, int]]:
    """Configs that a source lists besides its first one. Raises `RecordError` for a source without a launch."""
    return read_launch(source).configs
