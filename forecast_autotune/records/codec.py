"""Dataclasses to JSON objects and back: one mechanism for every record, checked against its annotations.

`to_json(value)` and `from_json(kind, data)` work on any dataclass. A class that derives from `Record` has them
as methods; keywords of its class statement state how its object differs from its fields by name, and
`json_option` does so for one field. The reader of each class is built once, at its first use.

Texts, numbers, booleans, enums, lists, objects and records are read strictly: `true` is no number, `4.0` is
the integer 4, and NaN and infinity are refused. A value that breaks a rule raises `RecordError` with the path to
it: `measurement.grid[0] must be an integer from 0 to 2^63, not 1.5`.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from operator import attrgetter
from typing import Any, ClassVar, Literal, Self, TypeAlias, TypeVar

from forecast_autotune.errors import RecordError
from forecast_autotune.records.json_fields import (
    MALFORMED,
    SCALARS,
    Reader,
    Writer,
    annotation_reader,
    check_line,
    hint_of,
    reason,
)

T = TypeVar("T")

EXTRA = "extra"
"""The field for keys of newer releases, where a class has one."""
_ABSENT, _CLASS_DEFAULT = object(), object()


@dataclasses.dataclass(frozen=True)
class _Layout:
    """How a class's JSON object differs from its fields by name; see `Record`."""

    tag: str = ""
    schema: int | None = None
    label: str = ""
    order: tuple[str, ...] = ()
    unknown: Literal["ignore", "refuse"] = "ignore"
    lenient: bool = False
    complete: bool = False
    remedy: str = ""
    derived: Mapping[str, Callable[[Any], Any]] = dataclasses.field(default_factory=dict)


_PLAIN_LAYOUT = _Layout()


class Record:
    """Base of dataclasses that are JSON objects. Keywords of the class statement:

    - `tag`: the object's `type`, written first and demanded;
    - `schema`: the version that is written; later ones are refused (without a tag, all others);
    - `label`: what messages call it (default: the tag, or the class's name);
    - `order`: the fields and `derived` keys that are written, in this order (default: all, as in the class);
    - `unknown="refuse"`: fields that the class does not have are errors. Otherwise they are kept and written
      back where the class has a field `extra`, and ignored where it has none;
    - `lenient`: for lines that other programs write. Any value is taken for a text, 0 and 1 for a boolean, and
      null for a missing field;
    - `complete`: no field may be missing, whatever its default;
    - `remedy`: what to do about an object that cannot be read, at the end of every message;
    - `derived`: keys that are written and not read, each with a function of the record.

    A class whose JSON is no object of its fields overrides both methods, which records around it use then.
    """

    __slots__ = ()
    _json_layout: ClassVar[_Layout] = _PLAIN_LAYOUT

    def __init_subclass__(cls, **layout: Any) -> None:
        super().__init_subclass__()
        # `dataclass(slots=True)` makes the class a second time, without its keywords.
        if "_json_layout" not in cls.__dict__:
            cls._json_layout = _Layout(**layout)

    def to_json(self) -> dict[str, Any]:
        """One JSON object; `from_json` reads it back."""
        return _write(self)

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Read what `to_json` wrote. Raises `RecordError` naming the field that is wrong."""
        return from_json(cls, data)


def json_option(
    *,
    read: Reader | None = None,
    write: Writer | None = None,
    when: Callable[[Any], object] | None = None,
    omit_null: bool = False,
    flat: bool = False,
    default: Any = _ABSENT,
    private: bool = False,
) -> dict[str, Any]:
    """`metadata` of a dataclass field whose JSON does not follow from its annotation.

    - `read`, `write`: in place of the annotation's reader and writer. `read` may raise `RecordError`,
      `ValueError`, `TypeError`, `KeyError` or `AttributeError` for a malformed value;
    - `when`: a function of the record that tells whether to write the field;
    - `omit_null`: the field is not written where it is None;
    - `flat`: the fields of this record stand in the outer object;
    - `default`: its value where the object lacks it, though the class demands it;
    - `private`: neither written nor read.
    """
    return {
        "read": read,
        "write": write,
        "when": when,
        "omit_null": omit_null,
        "flat": flat,
        "default": default,
        "private": private,
    }


def to_json(value: Any) -> Any:
    """Records, dataclasses, enums, tuples, sets and mappings of them as values for `json.dumps`."""
    if isinstance(value, Record):
        return value.to_json()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _write(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, tuple | list | frozenset):
        return [to_json(v) for v in (sorted(value) if isinstance(value, frozenset) else value)]
    return value


def from_json(kind: type[T], data: Any, what: str = "") -> T:
    """Read the JSON of a `kind`, a dataclass, as `to_json` writes it.

    Missing fields take their defaults. Raises `RecordError` with the field and its rule; `what` is the object's name
    in the message.
    """
    layout = _layout_of(kind)
    try:
        result: T = _read(kind, data)
    except RecordError as error:
        remedy = f": {layout.remedy}" if layout.remedy else ""
        raise type(error)(f"{what or _label(kind)}{error}{remedy}") from error
    return result


# --- reading ---


_FieldReader: TypeAlias = tuple[str, type | None, Reader, Any]
"""Name; a type whose values need no reader (most have it, and a call costs as much as all the rest); reader of
other values; value where the field is missing (`_CLASS_DEFAULT`, or `_ABSENT`: it must be there)."""
_EXACT: dict[Any, type] = {str: str, bool: bool}


class _ReadPlan:
    """How an object of a class is read."""

    __slots__ = ("extra", "fields", "flat", "headed", "known", "layout")

    def __init__(self, kind: type) -> None:
        self.layout = layout = _layout_of(kind)
        self.headed = bool(layout.tag) or layout.schema is not None
        self.extra = False
        """Whether unknown fields are kept."""
        header = {name for name, value in (("type", layout.tag), ("schema", layout.schema)) if value}
        self.known = {*header, *layout.derived}
        """All known keys."""
        self.flat: list[tuple[str, type]] = []
        """Name and class of the records whose fields stand in this object."""
        self.fields: list[_FieldReader] = []
        for field in dataclasses.fields(kind):
            option = field.metadata
            if field.name == EXTRA:
                self.extra = True
            elif option and option["flat"]:
                part = hint_of(kind, field)
                self.flat.append((field.name, part))
                self.known |= _read_plan(part).known
            elif not (option and option["private"]):
                self._add(kind, field)

    def _add(self, kind: type, field: dataclasses.Field[Any]) -> None:
        option = field.metadata
        self.known.add(field.name)
        exact = None
        reader = option["read"] if option else None
        if reader is None:
            hint = hint_of(kind, field)
            exact, reader = _EXACT.get(hint), annotation_reader(hint, self.layout.lenient, _record_reader)
        default = option["default"] if option else _ABSENT
        if default is _ABSENT and not self.layout.complete and _has_default(field):
            default = _CLASS_DEFAULT
        self.fields.append((field.name, exact, reader, default))


@cache
def _read_plan(kind: Any) -> _ReadPlan:
    return _ReadPlan(kind)


def _layout_of(kind: type) -> _Layout:
    return kind._json_layout if issubclass(kind, Record) else _PLAIN_LAYOUT


def _label(kind: type) -> str:
    layout = _layout_of(kind)
    return layout.label or layout.tag or kind.__name__


def _read(kind: Any, data: Any) -> Any:
    if type(data) is not dict and not isinstance(data, Mapping):
        raise RecordError(f" must be an object, not {data!r:.60}")
    plan = _read_plan(kind)
    layout, get = plan.layout, data.get
    if plan.headed and (get("type", "") != layout.tag or get("schema") != layout.schema):
        _check_header(layout, data)
    values: dict[str, Any] = {}
    for name, part in plan.flat:
        values[name] = _read(part, data)
    lenient = layout.lenient
    for name, exact, reader, default in plan.fields:
        value = get(name, _ABSENT)
        if type(value) is exact:
            values[name] = value
        elif value is _ABSENT or (lenient and value is None):
            if default is _ABSENT:
                raise RecordError(f" needs the field {name!r}; it has {', '.join(map(str, data)) or 'none'}")
            if default is not _CLASS_DEFAULT:
                values[name] = default
        else:
            try:
                values[name] = reader(value)
            except MALFORMED as error:
                raise RecordError(f".{name}{reason(error)}") from error
    if plan.extra:
        keys = plan.known
        values[EXTRA] = {k: v for k, v in data.items() if k not in keys}
    elif layout.unknown == "refuse" and (strange := sorted(set(data) - plan.known)):
        raise RecordError(f" has unknown fields {strange}; known are {', '.join(sorted(plan.known))}")
    try:
        return kind(**values)
    except ValueError as error:
        raise RecordError(f": {error}") from error


def _check_header(layout: _Layout, data: Mapping[str, Any]) -> None:
    if layout.tag:
        try:
            check_line(data, layout.tag, layout.schema)
        except RecordError as error:
            raise type(error)(f": {error}") from error
    elif data.get("schema") != layout.schema:
        raise RecordError(f".schema must be {layout.schema}, not {data.get('schema')!r:.20}")


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def reader_of(hint: Any) -> Reader:
    """Return a strict reader for an annotation, for a field's own `read`."""
    return annotation_reader(hint, False, _record_reader)


def _record_reader(kind: Any) -> Reader:
    own: Any = getattr(kind, "from_json", None)
    if own is not None and own.__func__ is not Record.from_json.__func__:  # type: ignore[attr-defined]
        reader: Reader = own
        return reader
    return lambda value: _read(kind, value)


class Knots(Record):
    """Base of curves that are lists of pairs: their two fields hold the first and the second of each."""

    __slots__ = ()

    def to_json(self) -> Any:
        """The pairs."""
        first, second = (getattr(self, field.name) for field in dataclasses.fields(self))  # type: ignore[arg-type]
        return [[a, b] for a, b in zip(first, second, strict=True)]

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Read pairs. Raises `RecordError` for anything else."""
        pairs = _read_pairs(data)
        return cls(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))  # type: ignore[call-arg]


_read_pairs = reader_of(tuple[tuple[float, float], ...])


# --- writing ---


_FieldWriter: TypeAlias = tuple[
    str, Callable[[Any], Any], Writer | None, bool, Callable[[Any], object] | None, bool
]
"""Name; getter; writer (None: the value is JSON already); `omit_null`; `when`; `flat`."""


class _WritePlan:
    """How an object of a class is written."""

    __slots__ = ("extra", "fields", "header")

    def __init__(self, kind: type) -> None:
        layout = _layout_of(kind)
        self.header: dict[str, Any] = {"type": layout.tag} if layout.tag else {}
        if layout.schema is not None:
            self.header["schema"] = layout.schema
        fields = {f.name: f for f in dataclasses.fields(kind) if not f.metadata.get("private")}
        self.extra = fields.pop(EXTRA, None) is not None
        self.fields = [
            (name, layout.derived[name], to_json, False, None, False)
            if name in layout.derived
            else _field_writer(kind, fields[name])
            for name in layout.order or (*fields, *layout.derived)
        ]


@cache
def _write_plan(kind: Any) -> _WritePlan:
    return _WritePlan(kind)


def _field_writer(kind: type, field: dataclasses.Field[Any]) -> _FieldWriter:
    option, get = field.metadata, attrgetter(field.name)
    if not option:
        return field.name, get, _writer(hint_of(kind, field)), False, None, False
    write = option["write"] or _writer(hint_of(kind, field))
    return field.name, get, write, option["omit_null"], option["when"], option["flat"]


def _write(record: Any) -> dict[str, Any]:
    kind: Any = type(record)
    plan = _write_plan(kind)
    data: dict[str, Any] = {**record.extra, **plan.header} if plan.extra else {**plan.header}
    for name, get, write, omit_null, when, flat in plan.fields:
        value = get(record)
        if (omit_null and value is None) or (when is not None and not when(record)):
            continue
        if flat:
            data |= _write(value)
        else:
            data[name] = value if write is None else write(value)
    return data


def _writer(hint: Any) -> Writer | None:
    """Return the writer for an annotation; None for values that are JSON already."""
    if hint in SCALARS or hint is type(None):
        return None
    if isinstance(hint, type) and issubclass(hint, Enum):
        return attrgetter("value")
    if isinstance(hint, type) and issubclass(hint, Record):
        return hint.to_json
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType) and all(_writer(kind) is None for kind in inner):
        return None
    if origin in (tuple, list) and all(_writer(k) is None for k in inner if k is not Ellipsis):
        return list
    return to_json
