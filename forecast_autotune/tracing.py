"""Which candidates to trace to TTIR, and when: all of a small list, a spread sample of a large one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from forecast_autotune.features.encode import Encoder
from forecast_autotune.features.ttir import assignment_of
from forecast_autotune.records import Candidate

ALL = 64
"""Trace every distinct assignment up to this many; one costs about 15 ms with parsing."""
SPREAD = 32
"""Beyond that: so many spread over the space first ..."""
NEXT = 16
"""... and so many of the best forecasts whenever the forecasts change."""


class Traces:
    """TTIR texts of one task, gathered lazily. Warps and stages do not change TTIR."""

    def __init__(
        self,
        candidates: Sequence[Candidate],
        trace: Callable[[Sequence[Candidate]], Mapping[str, str]] | None,
    ) -> None:
        self.texts: dict[str, str] = {}
        self._candidates = candidates
        self._trace = trace
        self._keys: list[str] = []
        self._asked: set[str] = set()

    def begin(self, *, everything: bool = False) -> None:
        """The first traces: every assignment of a small list, or a sample that covers a large one."""
        if self._trace is None:
            return
        self._keys = [assignment_of(c) for c in self._candidates]
        first: dict[str, Candidate] = {}
        for key, candidate in zip(self._keys, self._candidates, strict=True):
            first.setdefault(key, candidate)
        chosen = list(first.values())
        if len(chosen) > ALL and not everything:
            chosen = spread(chosen, SPREAD)
        self._ask(chosen)

    def extend(self, order: npt.NDArray[np.intp]) -> bool:
        """Trace the best-ranked candidates not traced yet; True if anything new came in."""
        if self._trace is None or len(self._asked) >= len(set(self._keys)):
            return False
        wanted: dict[str, Candidate] = {}
        for i in order:
            key = self._keys[int(i)]
            if key not in self._asked:
                wanted.setdefault(key, self._candidates[int(i)])
            if len(wanted) >= NEXT:
                break
        before = len(self.texts)
        self._ask(list(wanted.values()))
        return len(self.texts) > before

    def _ask(self, candidates: Sequence[Candidate]) -> None:
        if self._trace is None or not candidates:
            return
        self._asked |= {assignment_of(c) for c in candidates}
        self.texts.update(self._trace(candidates))


def spread(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """`count` candidates that cover the space: farthest-point sampling from the middle outwards."""
    points = Encoder.of(candidates, meta_only=True)(candidates)
    middle = int(np.argmin(((points - np.median(points, axis=0)) ** 2).sum(axis=1)))
    chosen = [middle]
    nearest = ((points - points[middle]) ** 2).sum(axis=1)
    while len(chosen) < min(count, len(candidates)):
        far = int(np.argmax(nearest))
        chosen.append(far)
        nearest = np.minimum(nearest, ((points - points[far]) ** 2).sum(axis=1))
    return [candidates[i] for i in chosen]
