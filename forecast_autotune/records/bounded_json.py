"""JSON of other hands within bounds: integers of 128 bits, few levels, texts that every file can hold."""

from __future__ import annotations

import json
import re
from typing import Any

from forecast_autotune.errors import RecordError
from forecast_autotune.records.base import LARGEST_INTEGER
from forecast_autotune.records.json_fields import decode_json, parse_finite, refuse_constant

MAX_DEPTH = 64
"""Lists and objects within each other. Records have eight levels; whatever walks them recurses once a level."""

_LONG_NUMBER = re.compile(r"\d{38}")
_HALF_OF_PAIR = re.compile("[\ud800-\udfff]")
_ESCAPED_HALF = re.compile(r"\\u[dD][89a-fA-F]")


def _parse_bounded(digits: str) -> int:
    # Forty places are enough; to convert thousands takes its time, and Python refuses it.
    if len(digits) > 40 or abs(value := int(digits)) > LARGEST_INTEGER:
        raise RecordError(
            f"an integer must have 128 bits at most, got {digits:.24}... of {len(digits)} characters"
        )
    return value


_decode_long = json.JSONDecoder(
    parse_constant=refuse_constant, parse_float=parse_finite, parse_int=_parse_bounded
).decode
"""Calls a function of ours for every integer, and so is left to texts with long ones."""


def decode_bounded(text: str, *, repair: bool = False) -> Any:
    """One JSON value with finite integers of 128 bits, `MAX_DEPTH` levels at most, and no half of a surrogate pair.

    Such halves come with messages that hold bytes of no known encoding, and can be written nowhere later;
    `repair` puts U+FFFD in their place. Raises `ValueError`; `RecordError`, too, is one.
    """
    try:
        data = (_decode_long if _LONG_NUMBER.search(text) else decode_json)(text)
    except RecursionError:
        raise RecordError(_too_deep()) from None
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _check_depth(data)
    if _ESCAPED_HALF.search(text):
        whole = json.dumps(data, ensure_ascii=False)
        if not repair:
            whole.encode()
        elif _HALF_OF_PAIR.search(whole):
            data = decode_json(without_halves(whole))
    return data


def without_halves(text: str) -> str:
    """The text with U+FFFD for each half of a surrogate pair, which UTF-8 cannot hold."""
    return text if text.isascii() else _HALF_OF_PAIR.sub("\ufffd", text)


def _check_depth(data: Any) -> None:
    level = [data]
    for _ in range(MAX_DEPTH):
        inner = (v for x in level for v in (x.values() if isinstance(x, dict) else x))
        level = [v for v in inner if isinstance(v, list | dict)]
        if not level:
            return
    raise RecordError(_too_deep())


def _too_deep() -> str:
    return f"nested too deeply: at most {MAX_DEPTH} levels are read"
