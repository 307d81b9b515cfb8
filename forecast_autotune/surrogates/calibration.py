"""What a surrogate says -> how often it came true: risks, P(within a tolerance) and intervals.

Per-candidate intervals do not bound the regret of the best of many, so the statement of a decision,
"the regret exceeds the tolerance with probability p", has a curve of its own, fitted to replays of
recorded tables by `forecast_train.surrogate.calibrate` with each kernel family forecast by a surrogate
that has not seen it. Curves are kept apart by what a surrogate could go by; a group nothing was recorded
of gets the pooled curves, shifted to the pessimistic side.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, reduce
from importlib.resources import files
from typing import Any

import numpy as np

from forecast_autotune.errors import RecordError
from forecast_autotune.features.devices import known
from forecast_autotune.features.listing import Listed
from forecast_autotune.numerics import NOMINAL
from forecast_autotune.records import Candidate, Device
from forecast_autotune.surrogates.protocol import Array, Forecasts
from forecast_autotune.surrogates.relatives import Kinship

SCHEMA = 3
INFORMED, RELATED, FAR, FEW = "informed", "informed, related", "informed, far", "informed, few"
FAMILIAR, STRANGE = "informed, familiar", "informed, strange"
UNINFORMED, UNKNOWN = "uninformed", "unknown device"
POOLED = "pooled"
GROUPS = (INFORMED, FAMILIAR, STRANGE, RELATED, FAR, FEW, UNINFORMED, UNKNOWN)
"""IR was read; of a kernel like those that were learned from, or unlike them; the kernel was tuned at a like
shape, too, or at others only; the list is short, whatever was tuned; IR was not read; nothing is known of the
device's speeds, with or without IR."""
AWAY = (0.5, 0.85)
"""Distances (`corpus`) below which a kernel is familiar, and from which on it is strange: of kernels whose
family was left out of the fit, about a quarter each."""
LONG = 30
"""Candidates from which on a list is none of `FEW`: after five measurements little of a short list is left,
and the risk that is stated there comes true less often."""
OWN = (0, 1, 4, 9)
"""Lower ends of the classes of own measurements: intervals are right or wrong in another way in each."""
ODDS = 2.0
"""What the odds of being wrong are multiplied by in a group nothing was recorded of."""
WIDEN = 1.3
"""... and its intervals."""


@dataclass(frozen=True)
class Curve:
    """A monotone curve through (stated, observed) knots; linear in between."""

    stated: tuple[float, ...]
    observed: tuple[float, ...]

    def __post_init__(self) -> None:
        pairs = (self.stated, self.observed)
        rising = all(list(x) == sorted(x) for x in pairs)
        inside = all(0.0 <= p <= 1.0 for x in pairs for p in x)
        if len(self.stated) != len(self.observed) or len(self.stated) < 2 or not rising or not inside:
            raise RecordError(
                f"a calibration needs two or more rising knots in [0, 1], got {pairs}: fit it again with "
                "benchmarks/calibrate.py"
            )

    def __call__(self, stated: float) -> float:
        """The calibrated probability."""
        return float(np.interp(stated, self.stated, self.observed))

    def array(self, stated: Array) -> Array:
        """The calibrated probabilities, in the shape of `stated`."""
        return np.asarray(np.interp(stated, self.stated, self.observed))

    def odds(self, factor: float) -> Curve:
        """The same curve with the odds of every observed share multiplied; certainty stays certain."""
        shifted = tuple(factor * p / (factor * p + 1.0 - p) for p in self.observed)
        return Curve(self.stated, shifted)

    def combined(self, other: Curve, choose: Callable[[float, float], float]) -> Curve:
        """Of both curves what `choose` (`max` or `min`) takes, at the knots of either."""
        knots = tuple(sorted({*self.stated, *other.stated}))
        return Curve(knots, tuple(choose(self(x), other(x)) for x in knots))

    def to_json(self) -> list[list[float]]:
        """Knots as [stated, observed] pairs."""
        return [[x, y] for x, y in zip(self.stated, self.observed, strict=True)]

    @classmethod
    def from_json(cls, data: Any) -> Curve:
        """Read pairs. Raises `RecordError` for anything else."""
        try:
            pairs = [(float(x), float(y)) for x, y in data]
        except (TypeError, ValueError) as error:
            raise RecordError(
                f"a calibration curve is a list of [stated, observed], got {data!r:.80}"
            ) from error
        return cls(tuple(x for x, _ in pairs), tuple(y for _, y in pairs))


def class_of(own: int) -> int:
    """Which class of `OWN` so many own measurements fall in."""
    return sum(own >= least for least in OWN) - 1


def width_class(own: int, each: int) -> int:
    """Which class of `OWN` a forecast's intervals are of, after `own` measurements, `each` of every source.

    The first fixes the level of all times, whichever source it is of: before it, they are far wider.
    """
    return class_of(max(each, min(own, 1)))


IDENTITY = Curve((0.0, 1.0), (0.0, 1.0))


def per_source(own: int, candidates: Sequence[Candidate]) -> int:
    """Measurements of each of the sources in a list: what nine tell of one kernel, they do not of nine.

    Counted as one source's, a base that was decided vouches for rewrites that come later, and hardly any of
    them is tried (`benchmarks/decide_sources.py`).
    """
    return own // max(1, Listed.of(candidates).sources)


_PLAIN = tuple((1.0,) * len(NOMINAL) for _ in OWN)


@dataclass(frozen=True)
class Group:
    """The corrections of one group of problems."""

    risk: tuple[Curve, ...] = (IDENTITY,) * len(OWN)
    """Share of joint draws in which an untried candidate wins -> how often one does, per class of `OWN`:
    the same share says less after three measurements than after ten."""
    within: tuple[Curve, ...] = (IDENTITY,) * len(OWN)
    """Share of draws in which a candidate is within a tolerance of the best -> how often it is, per
    class of `OWN`."""
    intervals: tuple[tuple[float, ...], ...] = _PLAIN
    """Factors on half-widths, per class of `OWN` and level of `NOMINAL`: split-conformal quantiles of
    |observed - mean| / sd over those of a normal (Papadopoulos et al. 2002, normalised scores)."""
    problems: int = 0

    def __post_init__(self) -> None:
        shape = {len(row) for row in self.intervals}
        flat = [x for row in self.intervals for x in row]
        if len(self.intervals) != len(OWN) or shape != {len(NOMINAL)} or not all(0.0 < x < 1e3 for x in flat):
            raise RecordError(
                f"interval factors need {len(OWN)} rows of {len(NOMINAL)} positive numbers, "
                f"got {self.intervals}"
            )
        for name, curves in (("risk", self.risk), ("within", self.within)):
            if len(curves) != len(OWN):
                raise RecordError(f"{name} needs {len(OWN)} curves, one per class {OWN}, got {len(curves)}")

    def pessimistic(self) -> Group:
        """For a group like none that was recorded: riskier, and less sure of any candidate."""
        wider = tuple(tuple(WIDEN * max(1.0, x) for x in row) for row in self.intervals)
        return Group(
            tuple(curve.odds(ODDS) for curve in self.risk),
            tuple(curve.odds(1.0 / ODDS) for curve in self.within),
            wider,
            0,
        )

    def worst(self, other: Group) -> Group:
        """The less confident of both, statement by statement."""
        return Group(
            tuple(a.combined(b, max) for a, b in zip(self.risk, other.risk, strict=True)),
            tuple(a.combined(b, min) for a, b in zip(self.within, other.within, strict=True)),
            tuple(
                tuple(map(max, mine, theirs))
                for mine, theirs in zip(self.intervals, other.intervals, strict=True)
            ),
            0,
        )

    def to_json(self) -> dict[str, Any]:
        """One JSON object; `from_json` reads it back."""
        return {
            "problems": self.problems,
            "risk": [curve.to_json() for curve in self.risk],
            "within": [curve.to_json() for curve in self.within],
            "intervals": [list(row) for row in self.intervals],
        }

    @classmethod
    def from_json(cls, data: Any) -> Group:
        """Read a group. Raises `RecordError` naming what is wrong."""
        try:
            rows = tuple(tuple(float(x) for x in row) for row in data["intervals"])
            within = tuple(Curve.from_json(curve) for curve in data["within"])
            risk = tuple(Curve.from_json(curve) for curve in data["risk"])
            return cls(risk, within, rows, int(data["problems"]))
        except RecordError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise RecordError(
                f"a calibration group needs problems, risk, within and intervals ({error!r}): {data!r:.80}"
            ) from error


@dataclass(frozen=True)
class Calibration:
    """What is known of one surrogate's honesty, by group; `POOLED` stands for all of them together."""

    groups: Mapping[str, Group] = field(default_factory=dict)

    def group(self, name: str) -> Group:
        """The group's own corrections, else the pooled ones on the pessimistic side, else none.

        A group that nothing was recorded of is never trusted more than one that was found wanting, and an
        unknown device never more than a known one: its curves come from known ones under another name.
        """
        if name == UNKNOWN and {UNKNOWN, INFORMED} <= self.groups.keys():
            return self.groups[UNKNOWN].worst(self.groups[INFORMED])
        if name in self.groups:
            return self.groups[name]
        if name in (FAMILIAR, RELATED, FAR, FEW) and INFORMED in self.groups:
            return self.groups[INFORMED]
        if POOLED not in self.groups:
            return Group()
        return reduce(Group.worst, self.groups.values(), self.groups[POOLED].pessimistic())

    def applied(self, forecasts: Forecasts, group: str, own: int) -> Forecasts:
        """The forecasts with their statements corrected, after `own` measurements of this problem.

        Mean, sd and joint samples stay as they are: what to measure follows from them.
        """
        chosen = self.group(group)
        each = per_source(own, forecasts.candidates)
        place = class_of(each)
        return replace(
            forecasts,
            calibrate=chosen.risk[place],
            calibrate_within=chosen.within[place].array,
            factors=chosen.intervals[width_class(own, each)],
            group=group,
        )

    def to_json(self) -> dict[str, Any]:
        """Groups by name."""
        return {name: group.to_json() for name, group in self.groups.items()}

    @classmethod
    def from_json(cls, data: Any) -> Calibration:
        """Read groups by name. Raises `RecordError` naming the group that is wrong."""
        if not isinstance(data, Mapping):
            raise RecordError(f"a surrogate's calibration is an object of groups, got {data!r:.80}")
        if unknown := set(data) - {*GROUPS, POOLED}:
            raise RecordError(f"unknown calibration groups {sorted(unknown)}: known are {[*GROUPS, POOLED]}")
        return cls({name: Group.from_json(group) for name, group in data.items()})


def group_of(
    device: Device,
    informed: bool,
    candidates: int = LONG,
    tuned: Kinship = "none",
    away: float | None = None,
) -> str:
    """The group of a problem: an unknown device outweighs what its IR says, that the list's length, that what
    was tuned before (`relatives.kinship`), and that how far the kernel lies from those learned from."""
    if not known(device):
        return UNKNOWN
    if not informed:
        return UNINFORMED
    if candidates < LONG:
        return FEW
    if tuned != "none":
        return {"far": FAR, "near": RELATED}[tuned]
    if away is None or AWAY[0] <= away < AWAY[1]:
        return INFORMED
    return FAMILIAR if away < AWAY[0] else STRANGE


def parse(text: str) -> dict[str, Calibration]:
    """Calibrations by surrogate (`name/version`). Raises `RecordError` for another format."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise RecordError(f"calibration is not JSON: {error}") from error
    if not isinstance(data, Mapping) or data.get("schema") != SCHEMA or "surrogates" not in data:
        raise RecordError(
            f"calibration needs schema {SCHEMA} and surrogates, got {text[:80]!r}: write it again with "
            "benchmarks/calibrate.py"
        )
    return {name: Calibration.from_json(one) for name, one in data["surrogates"].items()}


@cache
def shipped(surrogate: str) -> Calibration:
    """The calibration fitted for a surrogate (`name/version`); one that changes nothing if none was."""
    path = files("forecast_autotune") / "assets" / "calibration.json"
    if not path.is_file():
        return Calibration()
    return parse(path.read_text(encoding="utf-8")).get(surrogate, Calibration())
