"""Keys and values of prompts that were read before: most prompts of a kernel begin alike.

The tensors are never written to again: a reader that would grow them in place makes a copy first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from forecast_autotune.llm.tokenizer import Ids

if TYPE_CHECKING:
    from torch import Tensor

Layers: TypeAlias = "tuple[tuple[Tensor, Tensor], ...]"
"""Keys and values per layer, tensors [1, heads, tokens, width]; empty where a model's are not kept."""


@dataclass(frozen=True)
class Prefix:
    """Tokens that were read, and what the model's layers keep of them."""

    ids: Ids
    layers: Layers = ()

    def __len__(self) -> int:
        return len(self.ids)

    def cropped(self, tokens: int) -> Prefix:
        """The first `tokens` of it: a view, as attention is causal."""
        if tokens == 0:
            return EMPTY_PREFIX
        layers = tuple((k[:, :, :tokens], v[:, :, :tokens]) for k, v in self.layers)
        return Prefix(self.ids[:tokens], layers)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values."""
        return sum(t.numel() * t.element_size() for pair in self.layers for t in pair)


EMPTY_PREFIX = Prefix(np.zeros(0, np.int64))
"""Before the first token."""


class PrefixCache:
    """Prefixes of the most recent prompts, within a limit of bytes."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._kept: OrderedDict[bytes, Prefix] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def longest_match(self, ids: Ids) -> Prefix:
        """The longest beginning of `ids` that was read before, cropped from whichever prompt had it."""
        best, length = None, 0
        for key, prefix in self._kept.items():
            shared = common_prefix_length(prefix.ids, ids)
            if shared > length:
                best, length = key, shared
        if best is None:
            return EMPTY_PREFIX
        self._kept.move_to_end(best)
        found = self._kept[best]
        return found if length == len(found) else found.cropped(length)

    def put(self, prefix: Prefix) -> None:
        """Remember a prefix; those asked for longest ago make room. One beyond the limit is not kept."""
        self._kept[prefix.ids.tobytes()] = prefix
        while self.nbytes > self._limit:
            self._kept.popitem(last=False)

    @property
    def nbytes(self) -> int:
        """Bytes of everything kept."""
        return sum(prefix.nbytes for prefix in list(self._kept.values()))

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()


def common_prefix_length(a: Ids, b: Ids) -> int:
    """How many first tokens two sequences share."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n
