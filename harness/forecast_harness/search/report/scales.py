"""Axes: where values lie on paper, and which of them are named."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class AxisScale:
    """A linear map of [low, high] to [start, end]; what lies beyond is drawn at the edge."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Place on paper, rounded to a tenth of a unit to keep pages small."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)


def padded_bounds(
    values: Iterable[float], *, least: float = 1e-9, margin: float = 0.06
) -> tuple[float, float]:
    """Bounds a little beyond all values, at least `least` apart; (-least / 2, least / 2) for none."""
    found = [v for v in values if math.isfinite(v)] or [0.0]
    low, high = min(found), max(found)
    middle, half = (low + high) / 2, max((high - low) / 2, least / 2)
    return middle - half * (1 + margin), middle + half * (1 + margin)


def round_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round values in [low, high]: multiples of 1, 2 or 5 times a power of ten, at most `most` + 1."""
    raw = (high - low) / max(most, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    unit = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * 0.999)
    first = math.ceil(low / unit - 1e-9)
    return [round(n * unit, 12) for n in range(first, math.floor(high / unit + 1e-9) + 1)]


def factor_ticks(low: float, high: float, most: int = 6) -> list[tuple[float, str]]:
    """Ticks of an axis in log2 of a speed-up, named as factors: (log2, `1.2x`).

    Round factors where the axis spans less than two doublings, powers of two where it spans more.
    """
    if high - low <= 2.0:
        found = [math.log2(v) for v in round_ticks(2.0**low, 2.0**high, most) if v > 0]
    else:
        unit = math.ceil((high - low) / most)
        found = [n * float(unit) for n in range(math.ceil(low / unit), math.floor(high / unit) + 1)]
        if unit == 1 and len(found) < most:  # 1, 1.5, 2, 3, 4, 6, 8
            found = sorted([*found, *(v for n in found if (v := n + math.log2(1.5)) <= high)])
    return [(at, factor_text(at)) for at in found]


def factor_text(at: float) -> str:
    """2 to the power of `at` with three digits: `1.21x`, `12.3x`, `0.845x`."""
    value = 2.0**at
    if value >= 99.95:
        return f"{value:.0f}x"
    return f"{value:.2f}x" if value < 9.995 else f"{value:.1f}x"


def amount_text(value: float) -> str:
    """A count or sum for a tick: `1,200`, `12 k`, `3.4 M`, `0.02`."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:.3g} M"
    if abs(value) >= 1e4:
        return f"{value / 1e3:.3g} k"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.3g}"
