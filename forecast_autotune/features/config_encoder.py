"""Configs as points: one unit of distance is one doubling of a block size."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forecast_autotune.features.candidate_list import OPTIONS_OF_NO_TTIR, CandidateList, Column
from forecast_autotune.records import Candidate, Scalar

_STAGE_UNIT = 0.7
"""One more pipeline stage counts as this many doublings."""
_CATEGORY_UNIT = 1.5
"""Two different words (booleans, strings, variants) are this many doublings apart."""
_NO_REGISTER_LIMIT = 256
"""The value that stands for a missing `maxnreg`: the next doubling beyond what can be named."""
_COORDINATE_LIMIT = 1e6
"""Squares of larger coordinates are no numbers any more; a meta-parameter may be any integer."""


@dataclass(frozen=True)
class ConfigEncoder:
    """Maps candidates to coordinates [n, d]; learnt from the candidates of one problem."""

    numeric: tuple[tuple[str, bool], ...]
    """(parameter, is logarithmic)."""
    words: tuple[tuple[str, tuple[str, ...]], ...]
    """(parameter, values) of the categorical ones."""

    @classmethod
    def of(cls, candidates: Sequence[Candidate], *, meta_only: bool = False) -> ConfigEncoder:
        """Only parameters that differ between the candidates become coordinates.

        `meta_only` leaves out warps and stages, which do not change the TTIR.
        """
        columns = CandidateList.of(candidates).columns
        numeric: list[tuple[str, bool]] = []
        words: list[tuple[str, tuple[str, ...]]] = []
        unseen = OPTIONS_OF_NO_TTIR if meta_only else ()
        for name in sorted(set(columns).difference(unseen)):
            values = columns[name].values
            if len(values) < 2:
                continue
            if name == "maxnreg":
                numeric.append((name, True))
            elif all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
                numeric.append((name, min(values) > 0 and name != "num_stages"))
            else:
                words.append((name, tuple(sorted(set(map(repr, values))))))
        return cls(tuple(numeric), tuple(words))

    def without(self, names: Collection[str]) -> ConfigEncoder:
        """The same without the coordinates of these parameters."""
        return ConfigEncoder(
            tuple(pair for pair in self.numeric if pair[0] not in names),
            tuple(pair for pair in self.words if pair[0] not in names),
        )

    @property
    def width(self) -> int:
        """Number of coordinates."""
        return len(self.numeric) + sum(len(values) for _, values in self.words)

    def __call__(self, candidates: Sequence[Candidate]) -> npt.NDArray[np.float64]:
        """Coordinates [len(candidates), width]; unknown or odd values sit at the origin."""
        columns = CandidateList.of(candidates).columns
        points = np.zeros((len(candidates), max(1, self.width)))
        for place, (name, logarithmic) in enumerate(self.numeric):
            if (column := columns.get(name)) is not None:
                places = [_coordinate(name, value, logarithmic) for value in column.values]
                points[:, place] = np.array(places)[column.codes]
        place = len(self.numeric)
        for name, values in self.words:
            column = columns.get(name, Column((None,), np.zeros(len(candidates), dtype=np.intp)))
            # Two one-hot vectors of this length are _CATEGORY_UNIT apart.
            hot = np.zeros((len(column.values), len(values)))
            for i, value in enumerate(column.values):
                hot[i] = [_CATEGORY_UNIT / math.sqrt(2) * (repr(value) == word) for word in values]
            points[:, place : place + len(values)] = hot[column.codes]
            place += len(values)
        return points


def _coordinate(name: str, value: Scalar, logarithmic: bool) -> float:
    if name == "maxnreg" and value is None:
        value = _NO_REGISTER_LIMIT
    if not isinstance(value, int | float):
        return 0.0
    if logarithmic:
        return math.log2(value) if value > 0 else 0.0
    return float(max(-_COORDINATE_LIMIT, min(_COORDINATE_LIMIT, value))) * (
        _STAGE_UNIT if name == "num_stages" else 1.0
    )
