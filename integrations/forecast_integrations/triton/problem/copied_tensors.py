"""Copies of a call's tensors: of whole storages, at addresses that Triton specialises alike."""

from __future__ import annotations

import copy
import numbers
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from forecast_autotune.errors import ForecastAutotuneError
from forecast_integrations.device import has_accelerator
from forecast_integrations.triton.protocols import is_descriptor

if TYPE_CHECKING:
    import torch

MAX_COPIED_BYTES = 8 << 30
"""The most bytes of one call's tensors. Copies of so much take about 5 ms of a fast device."""
ALIGNMENT = 256
"""Copies lie as many bytes beyond a multiple of this as the originals."""


class UncopyableArgumentsError(ForecastAutotuneError):
    """Arguments that cannot be copied for timing: of an unknown type, or too large for the memory."""


def converted(value: Any, convert: Callable[[torch.Tensor], object]) -> Any:
    """Return an argument with its tensors converted. Raises `UncopyableArgumentsError` for unknown types."""
    if isinstance(value, plain_types()) or (
        type(value).__module__.partition(".")[0] == "triton" and not hasattr(value, "base")
    ):
        return value
    if _is_plain_tensor(value):
        return convert(value)
    if isinstance(value, tuple):
        members = [converted(item, convert) for item in value]
        return type(value)(*members) if hasattr(value, "_fields") else tuple(members)
    if is_descriptor(value) and _is_plain_tensor(value.base):
        descriptor: Any = copy.copy(value)
        object.__setattr__(descriptor, "base", convert(value.base))
        object.__setattr__(descriptor, "block_shape", list(value.block_shape))
        return descriptor
    raise UncopyableArgumentsError(f"nobody knows how to copy an argument of type {type(value).__name__}")


@cache
def plain_types() -> tuple[type, ...]:
    """Types of values that are no tensors and hold none."""
    import torch

    return (numbers.Number, str, bytes, type(None), torch.dtype, torch.device)


def _is_plain_tensor(value: object) -> bool:
    import torch

    return type(value) in (torch.Tensor, torch.nn.Parameter)


def require_copyable(tensor: torch.Tensor) -> None:
    """Raise `UncopyableArgumentsError` where a copy of a tensor would not do."""
    import torch

    if tensor.layout is not torch.strided:
        raise UncopyableArgumentsError(f"nobody knows how to copy a tensor of layout {tensor.layout}")
    if tensor.device.type == "cpu" and has_accelerator():
        raise UncopyableArgumentsError(
            "a copy of a tensor in the host's memory need not be seen by the device"
        )
    if tensor.untyped_storage().nbytes() > MAX_COPIED_BYTES:
        raise UncopyableArgumentsError(
            f"a tensor's storage takes {tensor.untyped_storage().nbytes()} bytes, more than the {MAX_COPIED_BYTES} "
            "that are copied"
        )


class StorageCopies:
    """Copies of tensors; those of one storage share one copy of it."""

    def __init__(self, most_bytes: int = MAX_COPIED_BYTES) -> None:
        self._storages: dict[int, torch.Tensor] = {}
        self._bytes, self._most_bytes = 0, most_bytes

    def tensor(self, original: torch.Tensor) -> torch.Tensor:
        """The copy of a tensor."""
        import torch

        require_copyable(original)
        original = original.detach()
        storage = original.untyped_storage()
        base = storage.data_ptr()
        raw = self._storages.get(base)
        if raw is None:
            self._bytes += storage.nbytes()
            if self._bytes > self._most_bytes:
                raise UncopyableArgumentsError(
                    f"its tensors take more than the {self._most_bytes} bytes that are copied"
                )
            raw = self._storages[base] = _copy_bytes(storage, original.device)
        shift = raw.storage_offset()
        size = original.element_size()
        if shift % size:
            raise UncopyableArgumentsError("a tensor lies at an address that its elements do not divide")
        bare = torch.empty(0, dtype=original.dtype, device=original.device)
        return bare.set_(
            raw.untyped_storage(),
            shift // size + original.storage_offset(),
            original.shape,
            original.stride(),
        )


def _copy_bytes(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    """Copy a storage's bytes to an address with the storage's alignment."""
    import torch

    count = storage.nbytes()
    flat = torch.empty(count + 2 * ALIGNMENT, dtype=torch.uint8, device=device)
    shift = (storage.data_ptr() - flat.data_ptr()) % ALIGNMENT
    target = flat[shift : shift + count]
    target.copy_(torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (count,), (1,)))
    return target
