"""One number for hundreds of megabytes: sums of 64-bit words with random odd factors, modulo 2**64.

The same on a host and on a device, in a few passes over memory. One changed word always shows (odd factors
are invertible), several changed words by chance once in 2**64 to whoever does not know the factors. It is
linear, so that the judge keeps the digest of a block up to date from the few words that it changed. It is
not cryptographic: whoever knows the seed can find other words with the same digest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_PAGE_WORDS = 1 << 15
"""Words that share the factor of their page; each word of a page has another one."""
_PAGES_PER_OPERATION = {"cpu": 1, "cuda": 256}
"""Pages per operation: what a cache holds, and what keeps a device busy."""
_WORD_BYTES = 8

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
    """Digests with one set of factors per page, drawn from `seed`; each call has its own set of pages."""

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
        found: torch.Tensor = self._page[where % _PAGE_WORDS] * rows[where // _PAGE_WORDS]
        return found

    def _pages(self, seed: int, size: int) -> torch.Tensor:
        key = seed, -(-size // (_WORD_BYTES * _PAGE_WORDS))
        if key not in self._rows:
            while len(self._rows) >= 8:  # those of launches are used once
                del self._rows[next(iter(self._rows))]
            self._rows[key] = _to(_odd_factors(seed, max(1, key[1])), self._device)
        return self._rows[key]

    def _edge(self, data: torch.Tensor, start: int, stop: int, rows: torch.Tensor) -> torch.Tensor:
        """Bytes of one word, the others taken for zero."""
        at = start // _WORD_BYTES * _WORD_BYTES
        word = _zeros(_WORD_BYTES, dtype=_uint8, device=self._device)
        _copy(_narrow(word, 0, start - at, stop - start), _narrow(data, 0, start, stop - start))
        found = _zeros((), dtype=_int64, device=self._device)
        self._add_words(found, _view(word, _int64), at // _WORD_BYTES, rows)
        return found

    def _add_words(self, total: torch.Tensor, words: torch.Tensor, first: int, rows: torch.Tensor) -> None:
        """Add the digest of words [n], of which the first is word number `first` of the data."""
        at, left = first, words.numel()
        while left:
            row, column = divmod(at, _PAGE_WORDS)
            whole = min(left // _PAGE_WORDS, self._at_once) if column == 0 else 0
            count = whole * _PAGE_WORDS or min(left, _PAGE_WORDS - column)
            part = _narrow(words, 0, at - first, count)
            if whole:
                out = _narrow(self._scratch, 0, 0, whole)
                _mul(_view(part, (whole, _PAGE_WORDS)), self._page, out=out)
                sums = _mul(_sum(out, 1), _narrow(rows, 0, row, whole))
            else:
                products = _mul(part, _narrow(self._page, 0, column, count))
                sums = _mul(_sum(products), _narrow(rows, 0, row, 1))
            _add(total, _sum(sums))
            at, left = at + count, left - count


def complement_spans(spans: Sequence[Span], size: int) -> list[Span]:
    """What of `size` bytes lies between spans, which are in order and do not overlap."""
    bounds = [0, *(n for span in spans for n in span), size]
    return [(a, b) for a, b in zip(bounds[::2], bounds[1::2], strict=True) if a < b]


def digest_values(digests: Sequence[torch.Tensor]) -> list[int]:
    """The digests as numbers; waits for the device once."""
    return [int(n) for n in _tolist(_stack(list(digests)))]


def _odd_factors(seed: int, count: int) -> torch.Tensor:
    """Odd 64-bit factors, [count]."""
    generator = _generator().manual_seed(seed)
    return _or(_randint(-(1 << 63), (1 << 63) - 1, (count,), generator=generator), 1)
