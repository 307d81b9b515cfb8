"""`Robust`: the range of a key's values that one config serves, and the sizes that speak for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from forecast_autotune.errors import SettingsError
from forecast_autotune.surrogates.protocol import Array

WEIGHTS = ("log", "uniform")
"""Names that `weigh` may have."""
MEASURED_POINTS = 4
"""How many sizes are measured where `at` does not say which."""
JUDGED_POINTS = 16
"""About how many sizes the range is judged at; between those that are measured, times are interpolated."""

Rebuild = Callable[[Mapping[str, object], int], Mapping[str, object]]
"""A function (arguments by name, value) -> the arguments that change, by name; `grid` may be among them."""


@dataclass(frozen=True, init=False)
class Robust:
    """One decision for a range of one argument's values: as `bucket=` of the decorator.

    Values of `argument` inside the range share a key; other values, and other arguments, are keys of their own.
    The config is the one that is expected to be the least slower than the best config of each size.

    Args:
        argument: name of an integer argument in `key`.
        over: the range: `(lowest, highest)`, both included, or a `range`.
        at: sizes that are measured; default: four, evenly spaced on a log scale.
        weigh: how often sizes are met. "log": every power of two as often as another; "uniform": every size; or a
            function size -> relative frequency.
        worst: minimise the largest slow-down among the sizes, not the (geometric) mean.
        rebuild: gives the arguments of a call at another size, where they do not follow from the call's own:
            `rebuild(arguments, value)` returns those that change, by name, new tensors among them, and `grid`.

    Raises:
        SettingsError: a value outside its rule.
    """

    argument: str
    values: range
    measured: tuple[int, ...]
    weigh: str | Callable[[int], float]
    worst: bool
    rebuild: Rebuild | None

    def __init__(
        self,
        argument: str,
        over: range | tuple[int, int],
        *,
        at: Sequence[int] | None = None,
        weigh: str | Callable[[int], float] = "log",
        worst: bool = False,
        rebuild: Rebuild | None = None,
    ) -> None:
        values = _checked_range(over)
        if not isinstance(argument, str) or not argument:
            raise SettingsError(f"Robust needs the name of an argument, got {argument!r:.60}")
        if not callable(weigh) and weigh not in WEIGHTS:
            raise SettingsError(f"weigh is {', '.join(WEIGHTS)} or a function of a size, got {weigh!r:.60}")
        measured = spread_points(values, MEASURED_POINTS) if at is None else tuple(sorted(set(at)))
        if not measured or any(type(v) is not int or v not in values for v in measured):
            raise SettingsError(
                f"at lists integers of {_shown(values)}, at least one, got {at!r:.100}: leave it out for "
                f"{', '.join(map(str, spread_points(values, MEASURED_POINTS)))}"
            )
        for name, value in (
            ("argument", argument),
            ("values", values),
            ("measured", measured),
            ("weigh", weigh),
            ("worst", worst),
            ("rebuild", rebuild),
        ):
            object.__setattr__(self, name, value)

    def __call__(self, name: str, value: object) -> object:
        """The part of a key that an argument's value becomes."""
        return self.label if self.contains(name, value) else value

    def contains(self, name: str, value: object) -> bool:
        """Whether a value of an argument lies inside the range."""
        return name == self.argument and type(value) is int and value in self.values

    @cached_property
    def label(self) -> str:
        """The range as keys show it: `1..8192`, with the step where it is not 1."""
        return _shown(self.values)

    def points(self) -> tuple[int, ...]:
        """The sizes that the range is judged at, ascending; those that are measured are among them."""
        return tuple(sorted({*self.measured, *spread_points(self.values, JUDGED_POINTS)}))

    def weights(self) -> Array:
        """The share of calls that each of `points()` stands for: [points], the sum is 1.

        Raises `SettingsError` where the user's `weigh` gives no numbers of at least 0, with one above.
        """
        points = self.points()
        logs = np.log2(np.array(points, float))
        middles = (logs[1:] + logs[:-1]) / 2
        if self.weigh == "log":
            # The ends stand for as much on their outer side as on their inner one.
            half = np.diff(logs)[[0, -1]] / 2 if len(points) > 1 else np.array([0.5, 0.5])
            shares = np.diff([logs[0] - half[0], *middles, logs[-1] + half[1]])
        else:
            shares = np.diff([points[0] - 0.5, *np.exp2(middles), points[-1] + 0.5])
            if callable(self.weigh):
                shares = shares * np.array([float(self.weigh(p)) for p in points])
        if not np.isfinite(shares).all() or (shares < 0).any() or not shares.sum() > 0:
            raise SettingsError(
                f"weigh must give numbers of at least 0, one of them above, for {points}; got {shares.tolist()}"
            )
        return np.asarray(shares / shares.sum())

    def shares(self) -> Array:
        """How much each measured size says of each of `points()`: [points, measured], rows sum to 1.

        Linear between neighbours on a log scale; beyond the outermost, those alone.
        """
        known = np.log2(np.array(self.measured, float))
        logs = np.log2(np.array(self.points(), float))
        unit = np.eye(len(known))
        return np.stack([np.interp(logs, known, unit[i]) for i in range(len(known))], axis=1)

    def identity(self) -> list[object]:
        """The properties of this range that a stored decision depends on, as JSON."""
        weights = [round(float(w), 6) for w in self.weights()]
        return ["range", self.argument, self.label, list(self.measured), weights, bool(self.worst)]


def spread_points(values: range, count: int) -> tuple[int, ...]:
    """At most `count` members of a range of positive numbers, evenly on a log scale, both ends among them.

    Between the ends powers of two are taken, or their nearest members.
    """
    low, high = values[0], values[-1]
    exponents = np.linspace(math.log2(low), math.log2(high), max(count, 2))
    inner = {_nearest(values, 2 ** round(e)) for e in exponents[1:-1]}
    return tuple(sorted({low, high, *inner}))


def _nearest(values: range, wanted: int) -> int:
    place = round((wanted - values.start) / values.step)
    return values[min(max(place, 0), len(values) - 1)]


def _checked_range(over: object) -> range:
    if isinstance(over, range):
        values = over if over.step > 0 else over[::-1]
    elif isinstance(over, tuple) and len(over) == 2 and all(type(v) is int for v in over):
        values = range(over[0], over[1] + 1)
    else:
        raise SettingsError(f"a range is (lowest, highest), or a range of integers, got {over!r:.60}")
    if not len(values) or values[0] < 1:
        raise SettingsError(f"a range holds positive integers, at least one, got {over!r:.60}")
    return values


def _shown(values: range) -> str:
    step = "" if values.step == 1 or len(values) < 2 else f":{values.step}"
    return f"{values[0]}..{values[-1]}{step}"
