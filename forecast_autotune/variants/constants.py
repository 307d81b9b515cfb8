"""Compile-time constants on their way to another process: all that Triton takes for a `tl.constexpr`, as JSON."""

from __future__ import annotations

import contextlib
import enum
import hashlib
import importlib.util
import json
import math
import tempfile
from collections import namedtuple
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from forecast_autotune.errors import RecordError

CONSTANT = "constant"
"""The only key of an object for a value that JSON does not have; in `Argument.extra`, for such a constant."""

_ENUMS: tuple[type[enum.Enum], ...] = (enum.IntEnum, enum.StrEnum, enum.Enum)


def encode_constant(value: Any, module_of: Callable[[Any], str] | None = None) -> Any:
    """A constant as JSON: a number, a text or None as it is, else an object that `decode_constant` reads.

    Those are infinite numbers, dtypes, enums, tuples and, where `module_of` gives the text of a module that
    defines one, JIT functions. Raises `RecordError` for anything else.
    """
    if type(value).__name__ == "constexpr":
        value = value.value
    kind = type(value)
    if isinstance(value, enum.Enum) and not isinstance(value, enum.Flag):
        base = next(b for b in _ENUMS if isinstance(value, b))
        members = [[m.name, encode_constant(m.value)] for m in kind]
        return {CONSTANT: ["enum", base.__name__, kind.__name__, members, value.name]}
    if isinstance(value, float) and not math.isfinite(value):  # a bound that is none: JSON has neither
        return {CONSTANT: ["float", repr(value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        items = [encode_constant(item, module_of) for item in value]
        return {CONSTANT: ["tuple", kind.__name__, getattr(value, "_fields", None), items]}
    if kind.__name__ == "dtype" and (framework := kind.__module__.partition(".")[0]) in ("torch", "triton"):
        return {CONSTANT: ["dtype", framework, getattr(value, "name", str(value).removeprefix("torch."))]}
    if hasattr(value, "arg_names") and module_of is not None:
        # An interpreted function must see the language, whether it uses it or not.
        text = f"import triton.language as _language\n{module_of(value)}"
        return {CONSTANT: ["function", value.__name__, text]}
    raise RecordError(
        f"a {kind.__name__} cannot be handed to another process: constants are numbers, texts, None, dtypes, enums, "
        "JIT functions, and tuples of these"
    )


def decode_constant(value: Any, *, functions: bool = False) -> Any:
    """The constant that `encode_constant` was given; equal ones are the same object.

    Loads torch or triton for a dtype. Functions are imported only where that is asked for, as in a sandbox: what a
    store says runs nothing. Raises `RecordError` for one elsewhere.
    """
    if isinstance(value, Mapping) and CONSTANT in value:
        try:
            return _decoded(json.dumps(value[CONSTANT]), functions)
        except (TypeError, ValueError, LookupError, AttributeError, AssertionError) as error:
            raise RecordError(f"no constant can be read of {value!r:.80}: {error}") from error
    return value


def exact_constant(value: object) -> Mapping[str, Any]:
    """`Argument.extra` of a constant that no scalar represents in full; empty for one that cannot be encoded."""
    with contextlib.suppress(RecordError):
        if isinstance(code := encode_constant(value), dict):
            return code
    return {}


def decode_constants(scalars: Mapping[str, Any]) -> dict[str, Any]:
    """All of these, by name, functions too."""
    return {name: decode_constant(value, functions=True) for name, value in scalars.items()}


@lru_cache(maxsize=1024)
def _decoded(text: str, functions: bool) -> Any:
    kind, *parts = json.loads(text)
    if kind == "float":
        return float(parts[0])
    if kind == "enum":
        base, name, members, member = parts
        return _enum(base, name, json.dumps(members))[member]
    if kind == "tuple":
        name, fields, items = parts
        values = (decode_constant(item, functions=functions) for item in items)
        return tuple(values) if fields is None else namedtuple(name, fields)(*values)
    if kind == "dtype":
        framework, name = parts
        if framework == "torch":
            return getattr(importlib.import_module("torch"), name)
        return importlib.import_module("triton.language").dtype(name)
    if not functions:
        raise RecordError(
            f"{parts[0]} is a function, which a record of a call cannot give: define inputs(random)"
        )
    name, source = parts
    title = f"constant_{hashlib.sha256(source.encode()).hexdigest()[:24]}"
    path = Path(tempfile.mkdtemp(), f"{title}.py")  # Triton reads a function's source from its file
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(title, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


@lru_cache(maxsize=64)
def _enum(base: str, name: str, members: str) -> Any:
    """The class, once: members of two classes are never equal."""
    kinds: dict[str, Any] = {v.__name__: v for v in _ENUMS}
    return kinds[base](name, [(n, decode_constant(v)) for n, v in json.loads(members)])
