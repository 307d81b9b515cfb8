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
from forecast_harness.records import Node
from forecast_harness.targets.novelty import canonical_tokens

HASH_WIDTH = 384
"""Hashed coordinates of n-grams."""
_NGRAM_LENGTHS = (1, 2, 3)
_COUNTED_WORDS = (
    *("for", "while", "if", "load", "store", "dot", "exp", "sum", "max", "empty", "zeros", "clone", "copy_"),
    *("contiguous", "to", "float", "view", "reshape", "transpose", "matmul", "einsum", "compile", "out"),
    *("atomic_add", "num_warps", "num_stages", "static_range", "range", "eviction_policy", "cache_modifier"),
)
"""Words whose numbers say something about speed in torch, Triton or CUDA."""
_NUMBER_PATTERN = re.compile(r"^\d+(\.\d*)?(e[+-]?\d+)?$", re.IGNORECASE)


@lru_cache(maxsize=8192)
def ngram_counts(language: str, source: str) -> tuple[tuple[int, float], ...]:
    """Hashed counts of token n-grams, (coordinate, count) in order; signs keep collisions from adding up."""
    tokens = canonical_tokens(language, source)
    found: Counter[int] = Counter()
    for n in _NGRAM_LENGTHS:
        for start in range(len(tokens) - n + 1):
            code = zlib.crc32("\0".join(tokens[start : start + n]).encode("utf-8", "replace"))
            found[code % HASH_WIDTH] += 1 if code >> 31 else -1
    return tuple(sorted((k, float(v)) for k, v in found.items() if v))


@lru_cache(maxsize=8192)
def token_statistics(language: str, source: str) -> tuple[float, ...]:
    """Logarithms of how long a source is, how often it uses telling words, and how large its numbers are."""
    tokens = canonical_tokens(language, source)
    seen = Counter(tokens)
    numbers = [float(t) for t in tokens if _NUMBER_PATTERN.match(t)]
    large = [math.log2(v) for v in numbers if 2 <= v < math.inf]
    sizes = (sum(large), max(large, default=0.0), float(len(large)))
    return (math.log2(1 + len(tokens)), *sizes, *(math.log2(1 + seen[w]) for w in _COUNTED_WORDS))


def source_embedding(node: Node) -> Array:
    """Hashed n-grams of a source, [WIDTH], of length 1: what two sources have in common is their product."""
    vector = np.zeros(HASH_WIDTH)
    for place, count in ngram_counts(node.language, node.source):
        vector[place] = math.copysign(math.log1p(abs(count)), count)
    return _normalized(vector)


def edit_embedding(node: Node, parent: Node | None) -> Array:
    """What was changed, [3 WIDTH]: the signed difference of n-grams, words about the change, and its parts.

    The words are the arm, the author and the note of the provenance; they and the difference are of length 1.
    The parts are the rewrites that a mechanical author names, joined by `+`: what they do adds up, so each
    counts 1 however many there are. Zeros for a node without a parent.
    """
    if parent is None:
        return np.zeros(3 * HASH_WIDTH)
    change = np.zeros(HASH_WIDTH)
    for sign, one in ((1.0, node), (-1.0, parent)):
        for place, count in ngram_counts(one.language, one.source):
            change[place] += sign * count
    told = node.provenance
    parts = told.author.split("+") if told.origin is Origin.REWRITE and told.author else []
    by = [] if parts else [f"author {told.author}"]
    words = _normalized(_hashed_words([f"arm {node.arm}", *by, *_note_words(told.note)]))
    return np.concatenate(
        [_normalized(np.sign(change) * np.log1p(np.abs(change))), words, _hashed_words(parts)]
    )


def static_features(nodes: Sequence[tuple[Node, Node | None]]) -> Array:
    """Counts of each source and their differences against its parent's, [n, 2 counts]."""
    rows = []
    for node, parent in nodes:
        own = np.array(token_statistics(node.language, node.source))
        before = own if parent is None else np.array(token_statistics(parent.language, parent.source))
        rows.append(np.concatenate([own, own - before]))
    return np.array(rows).reshape(len(rows), -1)


def _note_words(note: str) -> list[str]:
    return [f"note {w}" for w in re.findall(r"[a-z_]+|\d+", note.lower())[:24]]


def _hashed_words(words: Iterable[str]) -> Array:
    vector = np.zeros(HASH_WIDTH)
    for word in words:
        code = zlib.crc32(word.encode())
        vector[code % HASH_WIDTH] += 1.0 if code >> 31 else -1.0
    return vector


def _normalized(vector: Array) -> Array:
    size = float(np.linalg.norm(vector))
    return vector / size if size > 0 else vector
