"""The cell's blocks: the one that the candidate's tensors lie in, and what it is restored from.

A block of hundreds of megabytes is sent once. A pristine copy of it stays on the device; the judge changes a
few values in it from launch to launch, and before each launch the whole of it is copied over the block that
the candidate sees, at the same addresses and behind the same version counters.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import torch

from forecast_harness.sandbox.jobs import TensorBytes
from forecast_harness.verify.launches.arena import Slot
from forecast_harness.verify.problems.input_mutation import INTEGER_DTYPES

# Captured on import, before the candidate's code loads.
_move = ctypes.memmove
_empty, _frombuffer = torch.empty, torch.frombuffer
_pointer, _narrow, _view = torch.Tensor.data_ptr, torch.Tensor.narrow, torch.Tensor.view
_copy, _to, _set, _storage = (
    torch.Tensor.copy_,
    torch.Tensor.to,
    torch.Tensor.set_,
    torch.Tensor.untyped_storage,
)
_size, _stride = torch.Tensor.size, torch.Tensor.stride
_put, _contiguous, _numel = torch.Tensor.index_copy_, torch.Tensor.is_contiguous, torch.Tensor.numel
_uint8, _int64 = torch.uint8, torch.int64

_DOUBLING_LIMIT = 1 << 26
"""Bytes up to which a block is made twice as large as asked for, so that it grows, and moves, less often."""


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor's storage, through another tensor: its own version counter must not tell."""
    return _set(_empty(0, dtype=_uint8, device=tensor.device), _storage(tensor))


def address_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Address of a tensor's first element, and bytes from there to the end of its last one."""
    shape = list(_size(tensor))
    count = 0 if 0 in shape else 1 + sum((k - 1) * s for k, s in zip(shape, _stride(tensor), strict=True))
    return _pointer(tensor), count * tensor.dtype.itemsize


def bytes_at(owner: torch.Tensor, address: int, size: int) -> torch.Tensor:
    """So many bytes of a tensor's storage from an address on; what holds no element may have no address."""
    whole = storage_bytes(owner)
    return _narrow(whole, 0, address - _pointer(whole) if size else 0, size)


class BlockStore:
    """Blocks on one device."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._pristine: dict[str, torch.Tensor] = {}
        self._views: dict[tuple[object, ...], torch.Tensor] = {}
        self.block = _empty(0, dtype=_uint8, device=device)
        self.size = 0
        """Bytes of the block that are in use."""

    def put(self, name: str, array: TensorBytes) -> None:
        """Take new contents for `name`."""
        source = _frombuffer(array.data, dtype=_uint8)
        kept = self._pristine.get(name)
        if kept is None or _numel(kept) != _numel(source):
            self._pristine.pop(name, None)
            kept = self._pristine[name] = _empty(_numel(source), dtype=_uint8, device=self._device)
        _copy(kept, source)

    def patch(self, name: str, slot: Slot, where: TensorBytes, values: TensorBytes) -> None:
        """Change elements of one tensor of `name`, numbered as they lie in memory, to other bytes."""
        width = getattr(torch, slot.dtype).itemsize
        flat = _narrow(self._pristine[name], 0, slot.offset, slot.span * width)
        index = _to(_frombuffer(where.data, dtype=_int64), self._device)
        fresh = _to(_frombuffer(values.data, dtype=INTEGER_DTYPES[width]), self._device)
        _put(_view(flat, INTEGER_DTYPES[width]), 0, index, fresh)

    def restore(self, name: str) -> None:
        """Copy all of `name` over the block."""
        kept = self._pristine[name]
        size = self.size = int(_numel(kept))
        if _numel(self.block) < size:
            room = max(size, 1 << 16) * 2 if size <= _DOUBLING_LIMIT else size
            self._views.clear()
            self.block = _empty(0, dtype=_uint8, device=self._device)  # frees the old one first
            self.block = _empty(room, dtype=_uint8, device=self._device)
        if self._device == "cpu":
            _move(_pointer(self.block), _pointer(kept), size)
        else:
            _copy(_narrow(storage_bytes(self.block), 0, 0, size), kept)

    def adopt(self, memory: torch.Tensor, size: int) -> None:
        """Use the first `size` bytes of memory that somebody else fills."""
        if self.block is not memory:
            self._views.clear()
            self.block = memory
        self.size = size

    def bytes(self) -> torch.Tensor:
        """The block's bytes in use, now."""
        return _narrow(storage_bytes(self.block), 0, 0, self.size)

    def views(self, slots: Sequence[Slot]) -> Mapping[str, torch.Tensor]:
        """The tensors in the block, the same objects in every launch."""
        found = {}
        for slot in slots:
            key = (slot.dtype, slot.shape, slot.stride, slot.offset)
            if key not in self._views:
                self._views[key] = slot.view(self.block)
            found[slot.name] = self._views[key]
        return found
