"""Nested arguments as JSON: tensors by name, everything else by value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from forecast_autotune.errors import RecordError


def encode_arguments(value: Any, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A nest of tuples, lists, dicts and scalars as JSON; its tensors go into `tensors` by number.

    Raises `RecordError` for anything else, because a candidate must get it through JSON and bytes.
    """
    if isinstance(value, torch.Tensor):
        name = f"t{len(tensors)}"
        tensors[name] = value.detach().cpu()
        return {"t": name}
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [encode_arguments(v, tensors) for v in value]}
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        return {"dict": {k: encode_arguments(v, tensors) for k, v in value.items()}}
    if value is None or isinstance(value, bool | int | float | str):
        return {"v": value}
    raise RecordError(f"an argument of type {type(value).__name__} cannot be handed to another process")


def decode_arguments(shape: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The value that a skeleton stands for; the inverse of `encode_arguments`."""
    ((kind, inner),) = shape.items()
    if kind == "t":
        return tensors[inner]
    if kind == "v":
        return inner
    if kind == "dict":
        return {k: decode_arguments(v, tensors) for k, v in inner.items()}
    items = [decode_arguments(v, tensors) for v in inner]
    return tuple(items) if kind == "tuple" else items
