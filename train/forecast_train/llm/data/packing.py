"""An example as one sequence: the prefix once, every candidate behind it, none seeing another.

Training reads as forecasting does (`forecast_integrations.models`): the same tokens, positions that
continue from the prefix for every suffix, and the labels' logits at each suffix' last token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forecast_autotune.errors import RecordError
from forecast_autotune.llm.bins import BINS
from forecast_autotune.llm.tokenizer import ForecastTokenizer
from forecast_train.llm.data.examples import Example

TokenIds = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PackedSequence:
    """One sequence of `length` tokens with n candidates."""

    ids: TokenIds
    """[length]"""
    positions: TokenIds
    """[length]"""
    segment: TokenIds
    """[length]: 0 for the prefix, k + 1 for candidate k."""
    last: TokenIds
    """[n]: where each candidate's answer is read."""
    target: npt.NDArray[np.float64]
    """[n, bins + 1] soft targets."""
    log2_ratio: npt.NDArray[np.float64]
    """[n], NaN: failed."""
    label: TokenIds
    """[n]"""

    def attention_mask(self) -> npt.NDArray[np.bool_]:
        """Which token (second axis) each token (first axis) may attend to, [length, length]."""
        order = np.arange(len(self.ids))
        mine = (self.segment[None, :] == 0) | (self.segment[None, :] == self.segment[:, None])
        return np.asarray((order[None, :] <= order[:, None]) & mine)


def pack_example(
    example: Example, tokens: ForecastTokenizer, *, most: int, sigma: float
) -> list[PackedSequence]:
    """The example as sequences of at most `most` tokens; each repeats the prefix.

    `sigma` is the width of soft targets; where a measurement's own noise is larger, that is used. Raises
    `RecordError` where the prefix and one candidate are longer than `most`.
    """
    prefix = tokens.prefix(example.prefix)
    suffixes = tokens.suffixes([a.suffix for a in example.candidates])
    room = most - len(prefix)
    if max(map(len, suffixes)) > room:
        raise RecordError(
            f"an example of {example.origin.kernel} needs {len(prefix)} + {max(map(len, suffixes))} tokens, "
            f"more than steps.tokens = {most}: raise it"
        )
    dealt: list[list[int]] = [[]]
    for i, suffix in enumerate(suffixes):
        if sum(len(suffixes[k]) for k in dealt[-1]) + len(suffix) > room:
            dealt.append([])
        dealt[-1].append(i)
    return [_pack_candidates(example, prefix, suffixes, rows, sigma) for rows in dealt]


def _pack_candidates(
    example: Example, prefix: TokenIds, suffixes: Sequence[TokenIds], rows: Sequence[int], sigma: float
) -> PackedSequence:
    chosen = [suffixes[i] for i in rows]
    lengths = np.array([len(s) for s in chosen])
    behind = [np.arange(len(s)) + len(prefix) for s in chosen]
    asked = [example.candidates[i] for i in rows]
    widths = [sigma if math.isnan(a.log2_sd) else max(sigma, a.log2_sd) for a in asked]
    target = [BINS.soft_targets([a.log2_ratio], width) for a, width in zip(asked, widths, strict=True)]
    return PackedSequence(
        np.concatenate([prefix, *chosen]),
        np.concatenate([np.arange(len(prefix)), *behind]),
        np.repeat(np.arange(len(chosen) + 1), [len(prefix), *lengths]),
        len(prefix) + lengths.cumsum() - 1,
        np.concatenate(target),
        np.array([a.log2_ratio for a in asked]),
        np.array([a.label for a in asked]),
    )
