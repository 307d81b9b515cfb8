"""The parts that all records share: the format's version, plain values, and stable names for them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any, TypeAlias

from forecast_autotune.errors import NewerRecordError, RecordError

SCHEMA = 1
"""Version written into every `problem` and `measurement` line of a table."""

LARGEST_INTEGER = 2**128 - 1
"""Either sign. More than any parameter of a kernel has, and little enough for arithmetic with floats."""
LARGEST_MS, LARGEST_S = 1e300, 1e300
"""No time comes near; sums of as many as a file can hold stay finite."""

Scalar: TypeAlias = int | float | bool | str | None
"""A value that JSON, a config and a hash all agree on."""

Extra: TypeAlias = Mapping[str, Any]

_PLAIN = (bool, int, str)


def to_scalar(value: object) -> Scalar:
    """Reduce a meta-parameter's value to something JSON can hold; other types become their `str`."""
    if value is None or isinstance(value, _PLAIN):
        if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
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
