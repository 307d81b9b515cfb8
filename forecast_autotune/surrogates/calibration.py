"""Stated risk -> observed frequency: the decision is calibrated, not the single forecast.

Per-candidate intervals do not bound the regret of the best of many, so what is checked is the very
statement a decision makes, "the regret exceeds the tolerance with probability p", against replays of
recorded tables. `benchmarks/calibrate.py` fits the curve and prints its reliability with each kernel
left out in turn.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np

from forecast_autotune.errors import RecordError


@dataclass(frozen=True)
class Calibration:
    """A monotone curve through (stated, observed) knots; linear in between."""

    stated: tuple[float, ...]
    observed: tuple[float, ...]

    def __post_init__(self) -> None:
        pairs = (self.stated, self.observed)
        rising = all(list(x) == sorted(x) for x in pairs)
        inside = all(0.0 <= p <= 1.0 for x in pairs for p in x)
        if len(self.stated) != len(self.observed) or len(self.stated) < 2 or not rising or not inside:
            raise RecordError(f"a calibration needs two or more rising knots in [0, 1], got {pairs}")

    def __call__(self, stated: float) -> float:
        """The calibrated probability."""
        return float(np.interp(stated, self.stated, self.observed))


def identity() -> Calibration:
    """The curve that changes nothing."""
    return Calibration((0.0, 1.0), (0.0, 1.0))


@cache
def shipped(surrogate: str) -> Calibration:
    """The curve fitted for a surrogate (`name/version`); the identity if none was."""
    path = files("forecast_autotune") / "assets" / "calibration.json"
    if not path.is_file():
        return identity()
    curves = json.loads(path.read_text(encoding="utf-8"))["curves"]
    if surrogate not in curves:
        return identity()
    knots: Sequence[Sequence[float]] = curves[surrogate]
    return Calibration(tuple(x for x, _ in knots), tuple(y for _, y in knots))
