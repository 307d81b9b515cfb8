"""How many bytes arguments take."""

from __future__ import annotations

import math

from forecast_autotune.records import Argument


def tensor_bytes(argument: Argument) -> float:
    """Bytes of a tensor's elements; 0 for everything else."""
    if argument.kind != "tensor":
        return 0.0
    return math.prod(argument.shape) * element_bytes(argument.dtype)


def element_bytes(dtype: str) -> float:
    """Bytes of one element of a dtype by name; 4 when the name tells nothing."""
    digits = "".join(c for c in dtype.split("_")[0].split("e")[0] if c.isdigit())
    if dtype.startswith("bool"):
        return 1.0
    if "float8" in dtype or "f8" in dtype:
        return 1.0
    return max(1.0, int(digits) / 8.0) if digits else 4.0
