"""Frozen dataclasses to plain JSON objects and back, checked against their own annotations."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Any, TypeVar, cast

from forecast_autotune.errors import RecordError
from forecast_autotune.records.json_fields import read_integer, read_list, read_number

T = TypeVar("T")


def to_json(value: Any) -> Any:
    """Dataclasses, enums, tuples and mappings of them as what `json.dumps` takes."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, tuple | list | frozenset):
        return [to_json(v) for v in (sorted(value) if isinstance(value, frozenset) else value)]
    return value


def from_json(kind: type[T], data: Any, what: str = "") -> T:
    """Read what `to_json` wrote of a `kind`.

    Fields that the class does not have are ignored (a later release wrote them); missing ones take their
    defaults. Raises `RecordError` naming the field and what it must be.
    """
    what = what or kind.__name__
    if not isinstance(data, Mapping):
        raise RecordError(f"{what} must be an object, not {data!r:.60}")
    found: dict[str, Any] = {}
    hints = _hints(cast("Any", kind))
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if field.name in data:
            found[field.name] = _read_value(hints[field.name], data[field.name], f"{what}.{field.name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise RecordError(f"{what} needs the field {field.name!r}; it has {', '.join(data) or 'none'}")
    try:
        return kind(**found)
    except ValueError as error:
        raise RecordError(f"{what}: {error}") from error


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _read_value(kind: Any, value: Any, what: str) -> Any:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        return _read_value(next(k for k in inner if k is not type(None)), value, what)
    if origin is tuple:
        values = read_list(value, what)
        kinds = [inner[0]] * len(values) if inner[-1:] == (Ellipsis,) else list(inner)
        if len(kinds) != len(values):
            raise RecordError(f"{what} must have {len(kinds)} entries, not {len(values)}")
        return tuple(_read_value(k, v, what) for k, v in zip(kinds, values, strict=True))
    if origin is not None:
        if not isinstance(value, Mapping):
            raise RecordError(f"{what} must be an object, not {value!r:.60}")
        return {str(k): _read_value(inner[1], v, f"{what}.{k}") for k, v in value.items()}
    return _read_scalar(kind, value, what)


def _read_scalar(kind: Any, value: Any, what: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return from_json(cast("Any", kind), value, what)
    if isinstance(kind, type) and issubclass(kind, Enum):
        try:
            return kind(value)
        except ValueError:
            names = ", ".join(str(k.value) for k in kind)
            raise RecordError(f"{what} must be one of {names}, not {value!r:.40}") from None
    if kind is float:
        found = read_number(value, what)
        if found is None:
            raise RecordError(f"{what} must be a number, not null")
        return found
    if kind is int:
        return read_integer(value, what)
    if not isinstance(value, kind):
        raise RecordError(f"{what} must be of type {kind.__name__}, not {value!r:.60}")
    return value
