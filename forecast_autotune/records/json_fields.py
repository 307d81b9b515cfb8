"""Readers of JSON values from other programs: each returns the plain type or raises `RecordError`.

A reader's message follows the name or path of the value, as in `grid[0] must be an integer`. `read_integer` and its
neighbours take the name as an argument; callers of the readers of `annotation_reader` put it in front."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cache
from typing import Any, Literal, TypeAlias

from forecast_autotune.errors import NewerRecordError, RecordError

SCHEMA = 1
"""Version written into every `problem` and `measurement` line of a table."""

LARGEST_PARAMETER = 2**128 - 1
"""The largest parameter, of either sign: beyond any kernel's, and small enough for arithmetic with floats."""
LARGEST_MS, LARGEST_S = 1e300, 1e300
"""The largest times: far beyond real ones, and sums of as many as a file can hold stay finite."""

Scalar: TypeAlias = int | float | bool | str | None
"""A value that JSON, a config and a hash all agree on."""

Extra: TypeAlias = Mapping[str, Any]

_PLAIN = (bool, int, str)


def to_scalar(value: object) -> Scalar:
    """Reduce a meta-parameter's value to something JSON can hold; other types become their `str`."""
    if value is None or isinstance(value, _PLAIN):
        if isinstance(value, int) and abs(value) > LARGEST_PARAMETER:
            return hex(value)  # no reader of a table would take the number
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return str(value)


def digest(*parts: object) -> str:
    """A stable 24-hex-digit name for JSON-able parts; equal parts give equal names everywhere."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def check_line(data: object, kind: str, newest: int | None = SCHEMA) -> None:
    """Refuse a line that is not an object of this `type`, or whose schema is newer than the `newest` known."""
    if not isinstance(data, Mapping) or data.get("type") != kind:
        raise RecordError(f'expected a line of type "{kind}", got {data!r:.80}')
    schema = data.get("schema", newest)
    if newest is not None and (not isinstance(schema, int) or schema > newest):
        raise NewerRecordError(
            f"line has schema {schema!r}, this release reads up to {newest}: upgrade forecast-autotune"
        )


Reader: TypeAlias = Callable[[Any], Any]
"""From JSON. Raises `RecordError` whose message follows the path of the value."""
Writer: TypeAlias = Callable[[Any], Any]
MALFORMED = (ValueError, TypeError, LookupError, AttributeError, RecursionError, ArithmeticError)
"""The exceptions that reading arbitrary text or JSON as a record can raise. `RecordError` is a ValueError."""
LARGEST_INTEGER = 2**63 - 1
"""The largest integer of every tool that reads tables; Python's own integers have no end."""


def read_integer(value: object, what: str, least: int = 0) -> int:
    """An integer of at least `least`; 4.0 is 4. Raises `RecordError` for anything else, booleans too."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST_INTEGER:
        first = "-2^63" if least == -LARGEST_INTEGER else least
        raise RecordError(f"{what} must be an integer from {first} to 2^63, not {value!r:.40}")
    return value


def read_signed_integers(value: object, what: str = "") -> tuple[int, ...]:
    """A list of integers of either sign (null counts as empty). Raises `RecordError` for anything else."""
    entries = enumerate(read_list(value, what))
    return tuple(read_integer(number, f"{what}[{n}]", -LARGEST_INTEGER) for n, number in entries)


def read_list(value: object, what: str) -> Sequence[Any]:
    """A list (null counts as empty). Raises `RecordError` for anything else, texts too."""
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise RecordError(f"{what} must be a list, not {value!r:.60}")
    return value


def read_number(value: object, what: str) -> float | None:
    """A finite number or None. Raises `RecordError` for anything else."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RecordError(f"{what} must be a number or null, not {value!r:.40}")
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        raise RecordError(f"{what} must be finite, not {value!r:.40}")
    return result


def refuse_constant(word: str) -> float:
    """`parse_constant` of a decoder. Raises `RecordError`."""
    raise RecordError(f"{word} is not JSON: write null")


def parse_finite(text: str) -> float:
    """`parse_float` of a decoder. Raises `RecordError` for a number that overflows."""
    value = float(text)
    if not math.isfinite(value):
        raise RecordError(f"a number must be finite, got {text:.40}")
    return value


decode_json = json.JSONDecoder(parse_constant=refuse_constant, parse_float=parse_finite).decode
"""`json.loads` without NaN and infinity. Raises `ValueError`; `RecordError`, too, is one."""


# --- readers by annotation ---


_type_hints = cache(typing.get_type_hints)


def hint_of(kind: type, field: dataclasses.Field[Any]) -> Any:
    """Return the type that a field's annotation stands for."""
    return _type_hints(kind)[field.name]


def reason(error: Exception) -> str:
    """A reader's error as it follows the path of the value."""
    text = str(error) if isinstance(error, RecordError) else repr(error)
    return text if text[:1] in (" ", ".", "[", ":") else f": {text}"


def annotation_reader(hint: Any, lenient: bool, of_record: Callable[[type], Reader]) -> Reader:
    """Return the reader for an annotation; `of_record` gives the reader of a dataclass.

    `lenient`: any value is taken for a text, and 0 and 1 for a boolean.
    """

    def inner_reader(inner: Any) -> Reader:
        return annotation_reader(inner, lenient, of_record)

    if hint in SCALARS:
        return _LENIENT_SCALARS.get(hint, SCALARS[hint]) if lenient else SCALARS[hint]
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _union_reader([inner_reader(k) for k in inner if k is not type(None)], type(None) in inner)
    if origin is Literal:
        return one_of(inner)
    if origin in (tuple, list, frozenset) or hint in (tuple, list):
        inner = inner or (Any, ...)
        readers = [inner_reader(kind) for kind in inner if kind is not Ellipsis]
        return _list_reader(origin or hint, readers, fixed=origin is tuple and Ellipsis not in inner)
    if origin is not None:
        return _mapping_reader(inner_reader(inner[1]))
    if hint is Any or not isinstance(hint, type):
        return _take
    if issubclass(hint, Enum):
        return _enum_reader(hint)
    return of_record(hint) if dataclasses.is_dataclass(hint) else _instance_reader(hint)


def _take(value: Any) -> Any:
    return value


def read_text(value: Any) -> str:
    """A text and nothing else, also where a class is lenient."""
    if isinstance(value, str):
        return value
    raise RecordError(f" must be a text, not {value!r:.60}")


def read_name(value: Any) -> str:
    """A text that is not empty."""
    if isinstance(value, str) and value:
        return value
    raise RecordError(f" must be a non-empty text, not {value!r:.60}")


def _read_integer(value: Any) -> int:
    # Booleans have another type.
    if type(value) is int and 0 <= value <= LARGEST_INTEGER:
        return value
    return read_integer(value, "")


def _read_float(value: Any) -> float:
    if type(value) is float and -math.inf < value < math.inf:
        return value
    result = None if isinstance(value, bool) else read_number(value, "")
    if result is None:
        raise RecordError(f" must be a number, not {value!r:.40}")
    return result


def _read_float_or_null(value: Any) -> float | None:
    if type(value) is float and -math.inf < value < math.inf:
        return value
    return None if value is None else _read_float(value)


def number_within(least: float, most: float) -> Reader:
    """Return a reader of numbers from `least` to `most`."""

    def read(value: Any) -> float:
        result = _read_float(value)
        if not least <= result <= most:
            raise RecordError(f" must be a number from {least:g} to {most:g}, not {value!r:.40}")
        return result

    return read


def or_null(read: Reader) -> Reader:
    """Return a reader that reads null as None, and other values by `read`."""
    return lambda value: None if value is None else read(value)


read_share = number_within(0.0, 1.0)
"""A share or a probability."""


def _read_boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise RecordError(f" must be true or false, not {value!r:.60}")


def _read_boolean_or_bit(value: Any) -> bool:
    return bool(value) if value in (0, 1) else _read_boolean(value)


SCALARS: dict[Any, Reader] = {
    str: read_text,
    int: _read_integer,
    float: _read_float,
    float | None: _read_float_or_null,
    bool: _read_boolean,
}
_LENIENT_SCALARS: dict[Any, Reader] = {str: str, bool: _read_boolean_or_bit}


def _union_reader(readers: Sequence[Reader], optional: bool) -> Reader:
    first, *alternatives = readers
    if not alternatives:
        return or_null(first)

    def read(value: Any) -> Any:
        if value is None and optional:
            return None
        for reader in alternatives:
            try:
                return reader(value)
            except RecordError:
                continue
        return first(value)

    return read


def one_of(words: Sequence[Any]) -> Reader:
    """Return a reader of these values and nothing else."""

    def read(value: Any) -> Any:
        if value not in words:
            raise RecordError(f" must be one of {', '.join(map(str, words))}, not {value!r:.40}")
        return value

    return read


def _enum_reader(kind: type[Enum]) -> Reader:
    members = {member.value: member for member in kind}

    def read(value: Any) -> Any:
        try:
            return members[value]
        except (KeyError, TypeError):
            names = ", ".join(map(str, members))
            raise RecordError(f" must be one of {names}, not {value!r:.40}") from None

    return read


def _list_reader(kind: Callable[[Any], Any], readers: list[Reader], *, fixed: bool) -> Reader:
    """Return a reader of lists: each entry by its own reader where their number is fixed, else all by the same."""

    def read(value: Any) -> Any:
        values = read_list(value, "")
        if fixed and len(values) != len(readers):
            raise RecordError(f" must have {len(readers)} entries, not {len(values)}")
        each = readers if fixed else readers * len(values)
        return kind([_read_part(f"[{n}]", *pair) for n, pair in enumerate(zip(each, values, strict=True))])

    return read


def tuple_of(reader: Reader) -> Reader:
    """Return a reader of lists (null counts as empty) whose entries `reader` reads."""
    return lambda value: tuple(_read_part(f"[{n}]", reader, v) for n, v in enumerate(read_list(value, "")))


def _mapping_reader(reader: Reader) -> Reader:
    def read(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise RecordError(f" must be an object, not {value!r:.60}")
        return {str(k): _read_part(f".{k}", reader, v) for k, v in value.items()}

    return read


def _read_part(place: str, reader: Reader, value: Any) -> Any:
    try:
        return reader(value)
    except MALFORMED as error:
        raise RecordError(f"{place}{reason(error)}") from error


def _instance_reader(kind: type) -> Reader:
    def read(value: Any) -> Any:
        if not isinstance(value, kind):
            raise RecordError(f" must be of type {kind.__name__}, not {value!r:.60}")
        return value

    return read


# --- writers ---


def rounded(digits: int) -> Writer:
    """A field's `write` that keeps so many decimal places of a number, or of every number in a sequence."""

    def write(value: Any) -> Any:
        if isinstance(value, Sequence):
            return [write(v) for v in value]
        return None if value is None else round(value, digits)

    return write


def significant(digits: int) -> Writer:
    """A field's `write` that keeps so many significant digits of a number."""
    return lambda value: float(f"{value:.{digits}g}")
