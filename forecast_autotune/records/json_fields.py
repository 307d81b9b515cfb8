"""Fields of JSON lines that other hands wrote: each reader returns the plain type or says what is wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from forecast_autotune.errors import RecordError

LARGEST_INTEGER = 2**63 - 1
"""What every tool that reads tables can hold; Python's own integers have no end."""


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
    listed = enumerate(read_list(value, what))
    return tuple(read_integer(number, f"{what}[{n}]", -LARGEST_INTEGER) for n, number in listed)


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
        found = float(value)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise RecordError(f"{what} must be finite, not {value!r:.40}")
    return found


def _refuse_constant(word: str) -> float:
    raise RecordError(f"{word} is not JSON: write null")


def _parse_finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise RecordError(f"a number must be finite, got {text:.40}")
    return value


decode_json = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_parse_finite).decode
"""`json.loads` without NaN and infinity. Raises `ValueError`; `RecordError`, too, is one."""
