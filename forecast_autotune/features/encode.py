"""Configs as points: one unit of distance is one doubling of a block size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forecast_autotune.records import Candidate, Scalar

_STAGE_UNIT = 0.7
"""One more pipeline stage counts as this many doublings."""
_CATEGORY_UNIT = 1.5
"""Two different words (booleans, strings, variants) are this many doublings apart."""
_FAR = 1e6
"""Squares of larger coordinates are no numbers any more; a meta-parameter may be any integer."""


@dataclass(frozen=True)
class Encoder:
    """Maps candidates to coordinates [n, d]; learnt from the candidates of one problem."""

    numeric: tuple[tuple[str, bool], ...]
    """(parameter, is logarithmic)."""
    words: tuple[tuple[str, tuple[str, ...]], ...]
    """(parameter, values) of the categorical ones."""

    @classmethod
    def of(cls, candidates: Sequence[Candidate], *, meta_only: bool = False) -> Encoder:
        """Only parameters that differ between the candidates become coordinates.

        `meta_only` leaves out warps and stages, which do not change the TTIR.
        """
        rows = [parameters(c) for c in candidates]
        numeric: list[tuple[str, bool]] = []
        words: list[tuple[str, tuple[str, ...]]] = []
        unseen = ("num_warps", "num_stages") if meta_only else ()
        for name in sorted({name for row in rows for name in row}.difference(unseen)):
            values = [row.get(name) for row in rows]
            if len(set(map(repr, values))) < 2:
                continue
            if all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
                positive = all(v > 0 for v in values if isinstance(v, int | float))
                numeric.append((name, positive and name != "num_stages"))
            else:
                words.append((name, tuple(sorted(set(map(repr, values))))))
        return cls(tuple(numeric), tuple(words))

    @property
    def width(self) -> int:
        """Number of coordinates."""
        return len(self.numeric) + sum(len(values) for _, values in self.words)

    def __call__(self, candidates: Sequence[Candidate]) -> npt.NDArray[np.float64]:
        """Coordinates [len(candidates), width]; unknown or odd values sit at the origin."""
        points = np.zeros((len(candidates), max(1, self.width)))
        for i, candidate in enumerate(candidates):
            row = parameters(candidate)
            column = 0
            for name, logarithmic in self.numeric:
                points[i, column] = _coordinate(name, row.get(name), logarithmic)
                column += 1
            for name, values in self.words:
                shown = repr(row.get(name))
                if shown in values:
                    # Two one-hot vectors of this length are _CATEGORY_UNIT apart.
                    points[i, column + values.index(shown)] = _CATEGORY_UNIT / math.sqrt(2)
                column += len(values)
        return points


def parameters(candidate: Candidate) -> dict[str, Scalar]:
    """Every parameter of a candidate by name, the variant among them."""
    return {**candidate.config.parameters(), "variant": candidate.variant}


def _coordinate(name: str, value: Scalar, logarithmic: bool) -> float:
    if not isinstance(value, int | float):
        return 0.0
    if logarithmic:
        return math.log2(value) if value > 0 else 0.0
    return float(max(-_FAR, min(_FAR, value))) * (_STAGE_UNIT if name == "num_stages" else 1.0)
