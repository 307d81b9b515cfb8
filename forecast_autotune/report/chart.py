"""Figures and small charts as text, for terminals and pages alike."""

from __future__ import annotations

import math
from collections.abc import Sequence

STEPS = "▁▂▃▄▅▆▇█"
_PLAIN_STEPS = "_.:-=+*#"
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def percent(share: float) -> str:
    """A share as per cent, with a decimal below ten: 0.0234 is `2.3 %`."""
    value = 100.0 * share
    text = f"{value:.1f}" if 0.05 <= value < 9.95 else f"{value:.0f}"
    return f"{text.removesuffix('.0')} %"


def seconds(value: float) -> str:
    """A duration with two or three digits: `0.84 s`, `12.3 s`, `4 min 10 s`, `2 h 5 min`."""
    if value < 9.995:
        return f"{value:.2f} s"
    if value < 119.5:
        return f"{value:.1f} s" if value < 99.95 else f"{value:.0f} s"
    minutes = value / 60.0
    if minutes < 119.5:
        whole, remainder = divmod(round(value), 60)
        return f"{whole} min {remainder} s"
    hours, remainder = divmod(round(minutes), 60)
    return f"{hours} h {remainder} min"


def milliseconds(value: float | None, digits: int = 4) -> str:
    """A kernel time with so many digits, in µs below a tenth of a millisecond; a dash for None."""
    if value is None:
        return "-"
    return f"{1000 * value:.{digits}g} µs" if value < 0.1 else f"{value:.{digits}g} ms"


def sparkline_step(regret: float, tolerance: float) -> int:
    """Height of a regret in a sparkline: 0 within the tolerance, one more per doubling, 7 at most."""
    unit = max(tolerance, 0.005)
    if regret <= tolerance + 1e-9:
        return 0
    return min(len(STEPS) - 1, 1 + max(0, math.floor(math.log2(regret / unit))))


def sparkline(path: Sequence[float], tolerance: float, width: int = 16, *, plain: bool = False) -> str:
    """The incumbent's regret after each measurement, one character each (see `sparkline_step`).

    A path longer than `width` is cut into equal pieces, each shown by its last value.
    """
    values = list(path)
    if len(values) > width:
        values = [values[math.ceil((i + 1) * len(path) / width) - 1] for i in range(width)]
    steps = _PLAIN_STEPS if plain else STEPS
    return "".join(steps[sparkline_step(regret, tolerance)] for regret in values)


def bar(share: float, width: int = 10, *, plain: bool = False) -> str:
    """A bar `width` characters wide of which `share` (0 to 1) is filled; never empty above zero."""
    share = min(1.0, max(0.0, share))
    if plain:
        length = max(round(share * width), int(share > 0))
        return "#" * length + "." * (width - length)
    eighths = max(round(share * width * 8), int(share > 0))
    whole, remainder = divmod(eighths, 8)
    text = _EIGHTHS[8] * whole + (_EIGHTHS[remainder] if remainder else "")
    return text + " " * (width - len(text))
