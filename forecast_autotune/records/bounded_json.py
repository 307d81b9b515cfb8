"""JSON from other programs within bounds: integers of 128 bits, few levels, texts that every file can hold."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from forecast_autotune.errors import RecordError
from forecast_autotune.records.json_fields import (
    LARGEST_PARAMETER,
    decode_json,
    parse_finite,
    refuse_constant,
)

MAX_DEPTH = 64
"""Lists and objects within each other. Records have eight levels; functions that walk them recurse once a level."""
MAX_VALUES = 4_000_000
"""The most values of a document: the largest caches of tuners have half of it; in Python they take half a gigabyte."""

_BLOCK = 19
"""Half the digits of the longest integers that are sure to be within bounds."""
_HALF_OF_PAIR = re.compile("[\ud800-\udfff]")
_ESCAPED_HALF = re.compile(r"\\u[dD][89a-fA-F]")


def _parse_bounded(digits: str) -> int:
    # Forty digits are enough for 128 bits; converting thousands is slow, and Python refuses it.
    if len(digits) > 40 or abs(value := int(digits)) > LARGEST_PARAMETER:
        raise RecordError(
            f"an integer must have 128 bits at most, got {digits:.24}... of {len(digits)} characters"
        )
    return value


_decode_long = json.JSONDecoder(
    parse_constant=refuse_constant, parse_float=parse_finite, parse_int=_parse_bounded
).decode
"""Slow, as it calls a Python function for every integer: only for texts with long ones."""


def decode_bounded(text: str, *, repair: bool = False) -> Any:
    """One JSON value with finite integers of 128 bits, `MAX_DEPTH` levels at most, and no half of a surrogate pair.

    Such halves come with messages that hold bytes of no known encoding, and can be written nowhere later;
    `repair` puts U+FFFD in their place. Raises `ValueError`; `RecordError`, too, is one.
    """
    try:
        data = (_decode_long if _may_hold_long_integer(text) else decode_json)(text)
    except RecursionError:
        raise RecordError(_too_deep()) from None
    if text.count("[") + text.count("{") > MAX_DEPTH:
        check_depth(data)
    if _ESCAPED_HALF.search(text):
        whole = json.dumps(data, ensure_ascii=False)
        if not repair:
            whole.encode()
        elif _HALF_OF_PAIR.search(whole):
            data = decode_json(without_halves(whole))
    return data


def decode_document(text: str) -> Any:
    """One JSON value that holds many records: a number that is not finite is NaN or infinity, for the
    reader of each record to refuse, and half of a surrogate pair becomes U+FFFD.

    Raises `ValueError` for other texts than JSON, more than `MAX_VALUES` values and more than `MAX_DEPTH` levels.
    """
    if text.count(",") + text.count("[") + text.count("{") > MAX_VALUES:
        raise RecordError(f"it has more than {MAX_VALUES} values: split it into files of fewer configs")
    text = without_halves(text)
    try:
        data = _decode_leniently(text)
    except RecursionError:
        raise RecordError(_too_deep()) from None
    check_depth(data)
    if _ESCAPED_HALF.search(text) and _HALF_OF_PAIR.search(whole := json.dumps(data, ensure_ascii=False)):
        data = _decode_leniently(without_halves(whole))
    return data


def _parse_or_nan(digits: str) -> int | float:
    value = int(digits) if len(digits) <= 40 else LARGEST_PARAMETER + 1
    return value if abs(value) <= LARGEST_PARAMETER else math.nan


def _finite_or_nan(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else math.nan


lenient_decoder = json.JSONDecoder(parse_int=_parse_or_nan, parse_float=_finite_or_nan)
_decode_leniently = lenient_decoder.decode


def _may_hold_long_integer(text: str) -> bool:
    # A run of twice the block's length covers a whole block, wherever it begins; ten times as fast as a pattern.
    return any([text[at : at + _BLOCK].isdigit() for at in range(0, len(text) - _BLOCK, _BLOCK)])


def without_halves(text: str) -> str:
    """The text with U+FFFD for each half of a surrogate pair, which UTF-8 cannot hold."""
    return text if text.isascii() else _HALF_OF_PAIR.sub("\ufffd", text)


def check_depth(data: Any) -> None:
    """Raise `RecordError` for more than `MAX_DEPTH` levels."""
    level = [data] if isinstance(data, list | dict) else []
    for _ in range(MAX_DEPTH):
        inner = (v for x in level for v in (x.values() if isinstance(x, dict) else x))
        level = [v for v in inner if isinstance(v, list | dict)]
        if not level:
            return
    raise RecordError(_too_deep())


def _too_deep() -> str:
    return f"nested too deeply: at most {MAX_DEPTH} levels are read"
