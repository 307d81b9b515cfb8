"""One block of bytes that holds all tensors of a launch, with canaries everywhere else.

The judge builds it, the cell copies it over its own block at the same addresses and sends the block back
afterwards. Whatever byte outside an output changed was written out of bounds or into an input.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from forecast_autotune.records.codec import Record
from forecast_harness.sandbox.jobs import BytesLike

GUARD_BYTES = 256
"""Bytes of canary before, behind and between tensors, at least."""
_ALIGN = 64
_WORD_BYTES = 8
"""Of the widest number."""
_CANARY_PERIOD = 1 << 20
"""Bytes after which random canaries repeat themselves."""
_CANARY_FREE_BITS, _CANARY_FIXED_BITS = np.uint8(0b1000_0011), np.uint8(0b0011_1100)
"""Bits of a byte that may be anything, and those of a number's first byte that make it neither large nor
vanish, in all floating dtypes. Of random bytes, one in 32 float16 is no finite number, so that sums of many
are NaN like those of NaN."""


@dataclass(frozen=True)
class Slot(Record):
    """Where a tensor lies: offset in bytes, shape and strides in elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    output: bool = False

    @property
    def span(self) -> int:
        """Elements from the first to the last, gaps included; 0 for an empty tensor."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))

    @property
    def bytes(self) -> int:
        """From the first to the last element."""
        return self.span * int(getattr(torch, self.dtype).itemsize)

    @property
    def dense(self) -> bool:
        """Whether there are no gaps between its elements."""
        return self.span == math.prod(self.shape)

    def view(self, block: torch.Tensor) -> torch.Tensor:
        """The tensor inside a uint8 block."""
        dtype = getattr(torch, self.dtype)
        size = torch.empty((), dtype=dtype).element_size()
        flat = block[self.offset : self.offset + self.span * size].view(dtype)
        return flat.as_strided(self.shape, self.stride)


def aligned_size(size: int) -> int:
    """So many bytes, rounded up to where the next tensor may begin."""
    return -(-size // _ALIGN) * _ALIGN


def output_spans(slots: Iterable[Slot]) -> list[tuple[int, int]]:
    """First byte of every output and the one behind its last, in order."""
    return sorted((s.offset, s.offset + s.bytes) for s in slots if s.output)


@dataclass(frozen=True)
class Arena:
    """A filled block and the slots in it."""

    block: torch.Tensor
    slots: tuple[Slot, ...]

    def data(self) -> memoryview:
        """The block's bytes, as they are now."""
        return memoryview(self.block.numpy())


def strides_of(shape: Sequence[int], layout: str) -> tuple[int, ...]:
    """Element strides of `shape` in a layout; those that do not apply to so few axes are contiguous."""
    order = list(range(len(shape)))
    if layout == "transposed" and len(shape) >= 2:
        order[-1], order[-2] = order[-2], order[-1]
    found = [0] * len(shape)
    step = 1
    for position, axis in enumerate(reversed(order)):
        found[axis] = step
        step *= max(1, shape[axis])
        if layout == "padded" and position == 0 and len(shape) >= 2:
            step += 3
    return tuple(found)


def build_arena(
    tensors: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
    layouts: Mapping[str, str],
    rng: random.Random,
    *,
    shift: int = 0,
    behind: int = 0,
    noise: bool | None = None,
) -> Arena:
    """Lay out inputs and given outputs; `shift` moves all of them by so many aligned steps.

    Outputs are filled with NaN (integers: all bits set); canaries are random bytes, or all bits set,
    which reads as NaN, so that a result that depends on what lies beyond a tensor shows: chance says which.
    With `noise`, they are random finite numbers, whatever they are read as, and half of the words are zero, so that
    masks that are read there are not all true; NaN is what it says without.
    `behind` more bytes of canary follow the last tensor.
    """
    slots: list[Slot] = []
    position = GUARD_BYTES + shift * _ALIGN
    for name, value in (*tensors.items(), *outputs.items()):
        layout = layouts.get(name, "contiguous")
        size = value.element_size()
        offset = aligned_size(position) + (size if layout == "offset" else 0)
        kind = str(value.dtype).removeprefix("torch.")
        slot = Slot(name, kind, tuple(value.shape), strides_of(value.shape, layout), offset, name in outputs)
        slots.append(slot)
        position = offset + slot.span * size + GUARD_BYTES
    size = aligned_size(position + behind)
    scattered = rng.random() < 0.5 if noise is None else noise
    drawn = rng.randbytes(min(size, _CANARY_PERIOD)) if scattered else b"\xff" * min(size, _CANARY_PERIOD)
    page = np.frombuffer(drawn, dtype=np.uint8)
    if noise:
        zero = np.repeat(
            np.frombuffer(rng.randbytes(-(-len(page) // _WORD_BYTES)), dtype=np.uint8) & 1, _WORD_BYTES
        )
        page = (page & _CANARY_FREE_BITS | _CANARY_FIXED_BITS) * zero[: len(page)]
    block = torch.from_numpy(np.resize(page, size))
    for slot in slots:
        if slot.span:
            slot.view(block).copy_(outputs[slot.name] if slot.output else tensors[slot.name])
    return Arena(block, tuple(slots))


def changed_bytes(before: Arena, after: BytesLike) -> tuple[list[str], int]:
    """Which inputs changed, and how many bytes changed that belong to no tensor."""
    now = np.frombuffer(after, dtype=np.uint8)
    was = before.block.numpy()
    if len(now) != len(was):
        return [], abs(len(now) - len(was))
    differs = now != was
    flags = torch.from_numpy(differs)
    inputs = []
    for slot in before.slots:
        if not slot.span:
            continue
        size = getattr(torch, slot.dtype).itemsize
        shape, stride = (*slot.shape, size), (*(s * size for s in slot.stride), 1)
        part = flags[slot.offset : slot.offset + slot.span * size].as_strided(shape, stride)
        if not slot.output and _any(part):
            inputs.append(slot.name)
        part.fill_(False)  # what is left belongs to no tensor
    return inputs, int(np.count_nonzero(differs))


def _any(flags: torch.Tensor) -> bool:
    """Whether one of them is set; numpy tells it sooner of those that lie side by side, and counts them sooner, too."""
    return bool(flags.numpy().any()) if flags.is_contiguous() else bool(flags.any())
