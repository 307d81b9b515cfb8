"""One block of bytes that holds all tensors of a launch, with canaries everywhere else.

The judge builds it, the cell copies it over its own block at the same addresses and sends the block back
afterwards. If a byte outside an output has changed, the launch wrote out of bounds or into an input.
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
"""The bytes of the widest number."""
_CANARY_PERIOD = 1 << 20
"""Bytes after which random canaries repeat themselves."""
_CANARY_FREE_BITS, _CANARY_FIXED_BITS = np.uint8(0b1000_0011), np.uint8(0b0011_1100)
"""Bits of a byte that may be random, and bits that, set in a number's first byte, keep it from being large or
vanishing, in all floating dtypes. One in 32 float16 of random bytes is no finite number, so that sums of many
are NaN like those of NaN."""


@dataclass(frozen=True)
class Slot(Record):
    """The place of a tensor: offset in bytes, shape and strides in elements."""

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
        """Bytes from the first to the last element."""
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
    result = [0] * len(shape)
    step = 1
    for position, axis in enumerate(reversed(order)):
        result[axis] = step
        step *= max(1, shape[axis])
        if layout == "padded" and position == 0 and len(shape) >= 2:
            step += 3
    return tuple(result)


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
    is_noise = rng.random() < 0.5 if noise is None else noise
    canaries = rng.randbytes(min(size, _CANARY_PERIOD)) if is_noise else b"\xff" * min(size, _CANARY_PERIOD)
    page = np.frombuffer(canaries, dtype=np.uint8)
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
    """The inputs that changed, and the number of changed bytes that belong to no tensor."""
    now = np.frombuffer(after, dtype=np.uint8)
    was = before.block.numpy()
    if len(now) != len(was):
        return [], abs(len(now) - len(was))
    inputs, stray, end = list[str](), 0, 0
    for slot in before.slots:  # they lie one behind the other
        if not slot.span:
            continue
        own = slice(slot.offset, slot.offset + slot.bytes)
        stray += int(np.count_nonzero(now[end : own.start] != was[end : own.start]))
        end = own.stop
        if slot.dense:
            is_changed = not slot.output and not np.array_equal(now[own], was[own])
        else:
            size = getattr(torch, slot.dtype).itemsize
            shape, stride = (*slot.shape, size), (*(s * size for s in slot.stride), 1)
            flags = torch.from_numpy(now[own] != was[own])
            part = flags.as_strided(shape, stride)
            is_changed = not slot.output and bool(part.any())
            part.fill_(False)  # what is left belongs to no tensor
            stray += int(flags.count_nonzero())
        if is_changed:
            inputs.append(slot.name)
    return inputs, stray + int(np.count_nonzero(now[end:] != was[end:]))


_PAGE_WORDS = 1 << 15
"""Words that share the factor of their page; each word of a page has another one."""
_PAGES_PER_OPERATION = {"cpu": 1, "cuda": 256}
"""Pages per operation: what a cache holds, and what keeps a device busy."""

# Captured on import: the cell imports this before the candidate.
_mul, _sum, _zeros, _empty, _stack = torch.mul, torch.sum, torch.zeros, torch.empty, torch.stack
_randint, _generator = torch.randint, torch.Generator
_narrow, _view, _copy, _clone = (
    torch.Tensor.narrow,
    torch.Tensor.view,
    torch.Tensor.copy_,
    torch.Tensor.clone,
)
_offset, _to, _add = torch.Tensor.storage_offset, torch.Tensor.to, torch.Tensor.add_
_or, _tolist = torch.Tensor.bitwise_or_, torch.Tensor.tolist
_int64, _uint8 = torch.int64, torch.uint8

Span = tuple[int, int]
"""First byte, and the one behind the last."""


class BlockHasher:
    """Digests with one set of factors per page, drawn from `seed`; each call has its own set of pages.

    One number for hundreds of megabytes: the sum of 64-bit words with random odd factors, modulo 2**64, the same on a
    host and on a device. One changed word always shows (odd factors are invertible), several changed words by chance
    once in 2**64 to whoever does not know the factors. It is linear, so that the judge keeps the digest of a block up
    to date from the few words that it changed. It is not cryptographic: whoever knows the seed can find other words
    with the same digest.
    """

    def __init__(self, seed: int, device: str = "cpu") -> None:
        self._device = device
        self._page = _to(_odd_factors(seed, _PAGE_WORDS), device)
        self._at_once = _PAGES_PER_OPERATION[device.partition(":")[0]]
        self._scratch = _empty((self._at_once, _PAGE_WORDS), dtype=_int64, device=device)
        self._rows: dict[tuple[int, int], torch.Tensor] = {}

    def of(self, data: torch.Tensor, seed: int, spans: Sequence[Span] | None = None) -> torch.Tensor:
        """The digest of bytes [n] (uint8, contiguous), or of some spans of them, with the pages of `seed`.

        A scalar int64 tensor on the device: reading it is what waits for the device.
        """
        if _offset(data) % _WORD_BYTES:
            data = _clone(data)
        rows = self._pages(seed, data.numel())
        total = _zeros((), dtype=_int64, device=self._device)
        for start, stop in [(0, data.numel())] if spans is None else spans:
            first, last = -(-start // _WORD_BYTES) * _WORD_BYTES, stop // _WORD_BYTES * _WORD_BYTES
            if first > last:  # within one word
                _add(total, self._edge(data, start, stop, rows))
                continue
            if start < first:
                _add(total, self._edge(data, start, first, rows))
            if first < last:
                words = _view(_narrow(data, 0, first, last - first), _int64)
                self._add_words(total, words, first // _WORD_BYTES, rows)
            if last < stop:
                _add(total, self._edge(data, last, stop, rows))
        return total

    def factors(self, where: torch.Tensor, seed: int, size: int) -> torch.Tensor:
        """Factors of the words numbered `where` [k] in data of `size` bytes, [k]."""
        rows = self._pages(seed, size)
        result: torch.Tensor = self._page[where % _PAGE_WORDS] * rows[where // _PAGE_WORDS]
        return result

    def _pages(self, seed: int, size: int) -> torch.Tensor:
        key = seed, -(-size // (_WORD_BYTES * _PAGE_WORDS))
        if key not in self._rows:
            while len(self._rows) >= 8:  # factors of launches are used once
                del self._rows[next(iter(self._rows))]
            self._rows[key] = _to(_odd_factors(seed, max(1, key[1])), self._device)
        return self._rows[key]

    def _edge(self, data: torch.Tensor, start: int, stop: int, rows: torch.Tensor) -> torch.Tensor:
        """Bytes of one word, the others taken for zero."""
        at = start // _WORD_BYTES * _WORD_BYTES
        word = _zeros(_WORD_BYTES, dtype=_uint8, device=self._device)
        _copy(_narrow(word, 0, start - at, stop - start), _narrow(data, 0, start, stop - start))
        result = _zeros((), dtype=_int64, device=self._device)
        self._add_words(result, _view(word, _int64), at // _WORD_BYTES, rows)
        return result

    def _add_words(self, total: torch.Tensor, words: torch.Tensor, first: int, rows: torch.Tensor) -> None:
        """Add the digest of words [n], of which the first is word number `first` of the data."""
        at, rest = first, words.numel()
        while rest:
            row, column = divmod(at, _PAGE_WORDS)
            pages = min(rest // _PAGE_WORDS, self._at_once) if column == 0 else 0
            count = pages * _PAGE_WORDS or min(rest, _PAGE_WORDS - column)
            part = _narrow(words, 0, at - first, count)
            if pages:
                out = _narrow(self._scratch, 0, 0, pages)
                _mul(_view(part, (pages, _PAGE_WORDS)), self._page, out=out)
                sums = _mul(_sum(out, 1), _narrow(rows, 0, row, pages))
            else:
                products = _mul(part, _narrow(self._page, 0, column, count))
                sums = _mul(_sum(products), _narrow(rows, 0, row, 1))
            _add(total, _sum(sums))
            at, rest = at + count, rest - count


def complement_spans(spans: Sequence[Span], size: int) -> list[Span]:
    """The parts of `size` bytes between spans, which are in order and do not overlap."""
    bounds = [0, *(n for span in spans for n in span), size]
    return [(a, b) for a, b in zip(bounds[::2], bounds[1::2], strict=True) if a < b]


def digest_values(digests: Sequence[torch.Tensor]) -> list[int]:
    """The digests as numbers; waits for the device once."""
    return [int(n) for n in _tolist(_stack(list(digests)))]


def _odd_factors(seed: int, count: int) -> torch.Tensor:
    """Odd 64-bit factors, [count]."""
    generator = _generator().manual_seed(seed)
    return _or(_randint(-(1 << 63), (1 << 63) - 1, (count,), generator=generator), 1)
