"""Which of the framework's operations compute, and which only move data."""

from __future__ import annotations

_DATA_MOVEMENT = [
    "empty",
    "zeros",
    "ones",
    "full",
    "fill",
    "zero_",
    "copy_",
    "_to_copy",
    "view",
    "reshape",
    "as_strided",
    "slice",
    "select",
    "transpose",
    "permute",
    "expand",
    "unsqueeze",
    "squeeze",
    "t",
    "alias",
    "detach",
    "clone",
    "set_",
    "arange",
    "resize_",
    "_reshape_alias",
    "is_pinned",
    "lift_fresh",
    "new_empty",
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "empty_strided",
    "new_empty_strided",
    "new_zeros",
    "new_ones",
    "new_full",
    "contiguous",
    "unbind",
    "split",
    "narrow",
    "_unsafe_view",
    "item",
    "_local_scalar_dense",
    "to",
    "scalar_tensor",
    "record_stream",
]
"""Operations that move or make data, but compute nothing: a launcher may use them on whole tensors."""


def is_computation(name: str, size: int, largest: int) -> bool:
    """Whether a framework operation does arithmetic on tensors of the problem's size.

    `size` are the elements it touched, `largest` those of the largest output.
    """
    plain = name.partition("::")[2].partition(".")[0]
    return plain not in _DATA_MOVEMENT and size > 0 and size * 8 >= largest
