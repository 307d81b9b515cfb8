"""A source as numbers, for any language: what it holds, and what was changed against its parent.

Nothing is parsed beyond tokens, nothing is run. Token n-grams are hashed to a fixed width (Weinberger et al.
2009) with a stable hash, so that equal texts give equal numbers in every process.
"""

from __future__ import annotations

import math
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

from forecast_autotune.surrogates.protocol import Array
from forecast_autotune.variants.records import Origin
from forecast_harness.search.novelty import canonical
from forecast_harness.search.records import Node

WIDTH = 384
"""Hashed coordinates of n-grams."""
_GRAMS = (1, 2, 3)
_COUNTED = (
    *("for", "while", "if", "load", "store", "dot", "exp", "sum", "max", "empty", "zeros", "clone", "copy_"),
    *("contiguous", "to", "float", "view", "reshape", "transpose", "matmul", "einsum", "compile", "out"),
    *("atomic_add", "num_warps", "num_stages", "static_range", "range", "eviction_policy", "cache_modifier"),
)
"""Words whose numbers say something about speed in torch, Triton or CUDA."""
_NUMBER = re.compile(r"^\d+(\.\d*)?(e[+-]?\d+)?$", re.IGNORECASE)


@lru_cache(maxsize=8192)
def grams(language: str, source: str) -> tuple[tuple[int, float], ...]:
    """Hashed counts of token n-grams, (coordinate, count) in order; signs keep collisions from adding up."""
    tokens = canonical(language, source)
    found: Counter[int] = Counter()
    for n in _GRAMS:
        for start in range(len(tokens) - n + 1):
            code = zlib.crc32("\0".join(tokens[start : start + n]).encode("utf-8", "replace"))
            found[code % WIDTH] += 1 if code >> 31 else -1
    return tuple(sorted((k, float(v)) for k, v in found.items() if v))


@lru_cache(maxsize=8192)
def counts(language: str, source: str) -> tuple[float, ...]:
    """Logarithms of how long a source is, how often it uses telling words, and how large its numbers are."""
    tokens = canonical(language, source)
    seen = Counter(tokens)
    numbers = [float(t) for t in tokens if _NUMBER.match(t)]
    large = [math.log2(v) for v in numbers if v >= 2]
    sizes = (sum(large), max(large, default=0.0), float(len(large)))
    return (math.log2(1 + len(tokens)), *sizes, *(math.log2(1 + seen[w]) for w in _COUNTED))


def whole(node: Node) -> Array:
    """Hashed n-grams of a source, [WIDTH], of length 1: what two sources have in common is their product."""
    vector = np.zeros(WIDTH)
    for place, count in grams(node.language, node.source):
        vector[place] = math.copysign(math.log1p(abs(count)), count)
    return _unit(vector)


def edit(node: Node, parent: Node | None) -> Array:
    """What was changed, [3 WIDTH]: the signed difference of n-grams, words about the change, and its parts.

    The words are the arm, the author and the note of the provenance; they and the difference are of length 1.
    The parts are the rewrites that a mechanical author names, joined by `+`: what they do adds up, so each
    counts 1 however many there are. Zeros for a node without a parent.
    """
    if parent is None:
        return np.zeros(3 * WIDTH)
    change = np.zeros(WIDTH)
    for sign, one in ((1.0, node), (-1.0, parent)):
        for place, count in grams(one.language, one.source):
            change[place] += sign * count
    told = node.provenance
    parts = told.author.split("+") if told.origin is Origin.MECHANICAL and told.author else []
    by = [] if parts else [f"author {told.author}"]
    words = _unit(_hashed([f"arm {node.arm}", *by, *_words(told.note)]))
    return np.concatenate([_unit(np.sign(change) * np.log1p(np.abs(change))), words, _hashed(parts)])


def static(nodes: Sequence[tuple[Node, Node | None]]) -> Array:
    """Counts of each source and their differences against its parent's, [n, 2 counts]."""
    rows = []
    for node, parent in nodes:
        own = np.array(counts(node.language, node.source))
        before = own if parent is None else np.array(counts(parent.language, parent.source))
        rows.append(np.concatenate([own, own - before]))
    return np.array(rows).reshape(len(rows), -1)


def _words(note: str) -> list[str]:
    return [f"note {w}" for w in re.findall(r"[a-z_]+|\d+", note.lower())[:24]]


def _hashed(words: Iterable[str]) -> Array:
    vector = np.zeros(WIDTH)
    for word in words:
        code = zlib.crc32(word.encode())
        vector[code % WIDTH] += 1.0 if code >> 31 else -1.0
    return vector


def _unit(vector: Array) -> Array:
    size = float(np.linalg.norm(vector))
    return vector / size if size > 0 else vector
