"""Statements of a surrogate -> how often they came true: risks, P(within a tolerance) and intervals.

Per-candidate intervals do not bound the regret of the best of many, so the statement of a decision,
"the regret exceeds the tolerance with probability p", has a curve of its own, fitted to replays of
recorded tables by `forecast_train.surrogate.calibrate` with each kernel family forecast by a surrogate
that has not seen it. Curves are kept apart by what a surrogate could go by; a group nothing was recorded
of gets the pooled curves, shifted to the pessimistic side.

The last correction is learnt while tuning, of a user's own store. Each `RiskVerdict` says whether a stated risk came
true, and how much of what had been trusted was looked at. A winner among the trusted is found with at least the
probability `share` when those measured were drawn at random, and more often when they were chosen for merit, so the
rate of a risk is estimated as winners found / sum of shares: right for audits, too pessimistic for the rest, never too
sure.
"""

from __future__ import annotations

import json
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, reduce
from importlib.resources import files
from typing import Any

import numpy as np

from forecast_autotune.errors import RecordError
from forecast_autotune.features.candidate_list import CandidateList
from forecast_autotune.features.devices import is_known_device, is_measured_device
from forecast_autotune.numerics import INTERVAL_LEVELS
from forecast_autotune.records import Candidate, Device, RiskVerdict
from forecast_autotune.records.codec import Knots, Record, from_json
from forecast_autotune.surrogates.protocol import Array, Forecasts
from forecast_autotune.surrogates.relatives import Kinship

SCHEMA = 3
INFORMED, RELATED, FAR, FEW = "informed", "informed, related", "informed, far", "informed, few"
FAMILIAR, STRANGE = "informed, familiar", "informed, strange"
UNINFORMED, UNKNOWN = "uninformed", "unknown device"
ALL_GROUPS = "pooled"
GROUPS = (INFORMED, FAMILIAR, STRANGE, RELATED, FAR, FEW, UNINFORMED, UNKNOWN)
"""IR was read; of a kernel like those that were learned from, or unlike them; the kernel was tuned at a like
shape, too, or at others only; the list is short, whatever was tuned; IR was not read; nothing is known of the
device's speeds, with or without IR, or it has a datasheet alone and the IR was read."""
FAMILIARITY_BOUNDS = (0.5, 0.85)
"""Distances (`learned.TrainingCorpus`) below which a kernel is familiar, and from which on it is strange: of kernels
whose family was left out of the fit, about a quarter each."""
LONG_LIST = 30
"""Candidates from which on a list is none of `FEW`: after five measurements little of a short list is left,
and the risk that is stated there comes true less often."""
OWN_MEASUREMENT_BOUNDS = (0, 1, 4, 9)
"""Lower ends of the classes of own measurements: intervals are right or wrong in another way in each."""
_PESSIMISTIC_ODDS = 2.0
"""Factor on the odds of being wrong in a group nothing was recorded of."""
_PESSIMISTIC_WIDTH = 1.3
"""Factor on intervals in a group nothing was recorded of."""


@dataclass(frozen=True)
class CalibrationCurve(Knots):
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
                "benchmarks/forecasting/calibration.py"
            )

    def __call__(self, stated: float) -> float:
        """The calibrated probability."""
        return float(np.interp(stated, self.stated, self.observed))

    def array(self, stated: Array) -> Array:
        """The calibrated probabilities, in the shape of `stated`."""
        return np.asarray(np.interp(stated, self.stated, self.observed))

    def odds(self, factor: float) -> CalibrationCurve:
        """The same curve with the odds of every observed share multiplied; certainty stays certain."""
        shares = tuple(factor * p / (factor * p + 1.0 - p) for p in self.observed)
        return CalibrationCurve(self.stated, shares)

    def combined(self, other: CalibrationCurve, choose: Callable[[float, float], float]) -> CalibrationCurve:
        """The curve of `choose` (`max` or `min`) over both curves, at the knots of either."""
        knots = tuple(sorted({*self.stated, *other.stated}))
        return CalibrationCurve(knots, tuple(choose(self(x), other(x)) for x in knots))


def measurement_class(own: int) -> int:
    """The class of `OWN_MEASUREMENT_BOUNDS` for this number of own measurements."""
    return sum(own >= least for least in OWN_MEASUREMENT_BOUNDS) - 1


def interval_class(own: int, each: int) -> int:
    """The class of `OWN_MEASUREMENT_BOUNDS` for intervals, after `own` measurements, `each` of every source.

    The first one, of whichever source, fixes the level of all times: before it, intervals are far wider.
    """
    return measurement_class(max(each, min(own, 1)))


_IDENTITY_CURVE = CalibrationCurve((0.0, 1.0), (0.0, 1.0))


def measurements_per_source(own: int, candidates: Sequence[Candidate]) -> int:
    """Measurements per source of a list: nine of one kernel tell less than nine of nine.

    Were all sources counted as one, the measurements of a decided base would vouch for later rewrites, and hardly
    any of these would be tried (`benchmarks/search/source_decisions.py`).
    """
    return own // max(1, CandidateList.of(candidates).sources)


_UNCALIBRATED_WIDTHS = tuple((1.0,) * len(INTERVAL_LEVELS) for _ in OWN_MEASUREMENT_BOUNDS)


@dataclass(frozen=True)
class CalibrationGroup(
    Record, label="calibration group", complete=True, order=("problems", "risk", "within", "intervals")
):
    """The corrections of one group of problems."""

    risk: tuple[CalibrationCurve, ...] = (_IDENTITY_CURVE,) * len(OWN_MEASUREMENT_BOUNDS)
    """Share of joint draws in which an untried candidate wins -> how often one does, per class of
    `OWN_MEASUREMENT_BOUNDS`: the same share says less after three measurements than after ten."""
    within: tuple[CalibrationCurve, ...] = (_IDENTITY_CURVE,) * len(OWN_MEASUREMENT_BOUNDS)
    """Share of draws in which a candidate is within a tolerance of the best -> how often it is, per
    class of `OWN_MEASUREMENT_BOUNDS`."""
    intervals: tuple[tuple[float, ...], ...] = _UNCALIBRATED_WIDTHS
    """Factors on half-widths, per class of `OWN_MEASUREMENT_BOUNDS` and level of `INTERVAL_LEVELS`:
    split-conformal quantiles of |observed - mean| / sd over those of a normal (Papadopoulos et al. 2002,
    normalised scores)."""
    problems: int = 0

    def __post_init__(self) -> None:
        shape = {len(row) for row in self.intervals}
        flat = [x for row in self.intervals for x in row]
        if (
            len(self.intervals) != len(OWN_MEASUREMENT_BOUNDS)
            or shape != {len(INTERVAL_LEVELS)}
            or not all(0.0 < x < 1e3 for x in flat)
        ):
            raise RecordError(
                f"interval factors need {len(OWN_MEASUREMENT_BOUNDS)} rows of {len(INTERVAL_LEVELS)} positive numbers, "
                f"got {self.intervals}"
            )
        for name, curves in (("risk", self.risk), ("within", self.within)):
            if len(curves) != len(OWN_MEASUREMENT_BOUNDS):
                raise RecordError(
                    f"{name} needs {len(OWN_MEASUREMENT_BOUNDS)} curves, one per class "
                    f"{OWN_MEASUREMENT_BOUNDS}, got {len(curves)}"
                )

    def pessimistic(self) -> CalibrationGroup:
        """The corrections for an unrecorded kind of group: riskier, and less sure of any candidate."""
        wider = tuple(tuple(_PESSIMISTIC_WIDTH * max(1.0, x) for x in row) for row in self.intervals)
        return CalibrationGroup(
            tuple(curve.odds(_PESSIMISTIC_ODDS) for curve in self.risk),
            tuple(curve.odds(1.0 / _PESSIMISTIC_ODDS) for curve in self.within),
            wider,
            0,
        )

    def worst(self, other: CalibrationGroup) -> CalibrationGroup:
        """The less confident of both, statement by statement."""
        return CalibrationGroup(
            tuple(a.combined(b, max) for a, b in zip(self.risk, other.risk, strict=True)),
            tuple(a.combined(b, min) for a, b in zip(self.within, other.within, strict=True)),
            tuple(
                tuple(map(max, first, second))
                for first, second in zip(self.intervals, other.intervals, strict=True)
            ),
            0,
        )


@dataclass(frozen=True)
class SurrogateCalibration(Record):
    """The corrections of one surrogate, by group; `ALL_GROUPS` stands for all of them together."""

    groups: Mapping[str, CalibrationGroup] = field(default_factory=dict)

    def group(self, name: str) -> CalibrationGroup:
        """The group's own corrections, else the pooled ones on the pessimistic side, else none.

        A group without records is never trusted more than the worst recorded one, and an unknown device never more
        than a known one: its curves come from known devices under another name.
        """
        if name == UNKNOWN and {UNKNOWN, INFORMED} <= self.groups.keys():
            return self.groups[UNKNOWN].worst(self.groups[INFORMED])
        if name in self.groups:
            return self.groups[name]
        if name in (FAMILIAR, RELATED, FAR, FEW) and INFORMED in self.groups:
            return self.groups[INFORMED]
        if ALL_GROUPS not in self.groups:
            return CalibrationGroup()
        return reduce(CalibrationGroup.worst, self.groups.values(), self.groups[ALL_GROUPS].pessimistic())

    def apply_to(self, forecasts: Forecasts, group: str, own: int) -> Forecasts:
        """The forecasts with their statements corrected, after `own` measurements of this problem.

        Mean, sd and joint samples stay as they are: the plan follows from them.
        """
        corrections = self.group(group)
        each = measurements_per_source(own, forecasts.candidates)
        place = measurement_class(each)
        return replace(
            forecasts,
            calibrate_risk=corrections.risk[place],
            calibrate_within=corrections.within[place].array,
            interval_factors=corrections.intervals[interval_class(own, each)],
            group=group,
        )

    def to_json(self) -> dict[str, Any]:
        """Groups by name."""
        return {name: group.to_json() for name, group in self.groups.items()}

    @classmethod
    def from_json(cls, data: Any) -> SurrogateCalibration:
        """Read groups by name. Raises `RecordError` naming the group that is wrong."""
        if not isinstance(data, Mapping):
            raise RecordError(f"a surrogate's calibration is an object of groups, got {data!r:.80}")
        if unknown := set(data) - {*GROUPS, ALL_GROUPS}:
            raise RecordError(
                f"unknown calibration groups {sorted(unknown)}: known are {[*GROUPS, ALL_GROUPS]}"
            )
        return cls({name: from_json(CalibrationGroup, group, name) for name, group in data.items()})


def calibration_group(
    device: Device,
    informed: bool,
    candidates: int = LONG_LIST,
    tuned: Kinship = "none",
    away: float | None = None,
) -> str:
    """The group of a problem, by the first that applies: an unknown device, no IR, a short list, problems tuned
    before (`relatives.kinship`), the kernel's distance from the training corpus.

    To a forecast that reads the IR, a device with a datasheet is as unknown as one without, if nothing was ever
    measured on its like.
    """
    if not is_known_device(device) or (informed and not is_measured_device(device)):
        return UNKNOWN
    if not informed:
        return UNINFORMED
    if candidates < LONG_LIST:
        return FEW
    if tuned != "none":
        return {"far": FAR, "near": RELATED}[tuned]
    if away is None or FAMILIARITY_BOUNDS[0] <= away < FAMILIARITY_BOUNDS[1]:
        return INFORMED
    return FAMILIAR if away < FAMILIARITY_BOUNDS[0] else STRANGE


@cache
def shipped_calibration(surrogate: str) -> SurrogateCalibration:
    """The calibration fitted for a surrogate (`name/version`); one that changes nothing if none was."""
    return SurrogateCalibration(_ShippedGroups(_shipped_surrogates().get(surrogate, {})))


class _ShippedGroups(UserDict[str, CalibrationGroup]):
    """Groups by name, parsed at their first use: all would take a third of a new process's first forecast."""

    def __getitem__(self, name: str) -> CalibrationGroup:
        if not isinstance(group := self.data[name], CalibrationGroup):
            group = self.data[name] = from_json(CalibrationGroup, group, name)
        return group


@cache
def _shipped_surrogates() -> Mapping[str, Any]:
    path = files("forecast_autotune") / "assets" / "calibration.json"
    surrogates: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))["surrogates"]
    return surrogates


KNOTS = (0.0, 0.05, 0.1, 0.2, 0.35, 0.6, 1.0)
_RAISE_PRIOR_WEIGHT = 8.0
"""Verdicts of full share that the shipped curve is worth, at each knot, against a higher risk."""
_LOWER_PRIOR_WEIGHT = 40.0
"""The same against a lower risk: becoming surer takes more evidence than becoming less sure."""
_MIN_SLOPE = 1e-3
"""Least slope of a correction: it stays invertible, so that the shipped risk follows from the stated one."""


@dataclass(frozen=True)
class CorrectedRisk:
    """A surrogate's own calibration, followed by a correction."""

    shipped: Callable[[float], float]
    correction: CalibrationCurve

    def __call__(self, stated: float) -> float:
        """The corrected risk of a share of draws."""
        return self.correction(self.shipped(stated))

    def invert(self, risk: float) -> float:
        """The shipped risk that is corrected to this one."""
        return float(np.interp(risk, self.correction.observed, self.correction.stated))


def fit_correction(verdicts: Sequence[RiskVerdict]) -> CalibrationCurve | None:
    """Shipped risk -> corrected risk; None without verdicts. A pure function, whatever their order.

    Every verdict counts at the two knots next to its risk, as its difference from what was expected
    there, and each knot is shrunk towards the shipped curve. Where a lower risk came true more often than
    a higher one, both count as the higher share: whichever is chance, the correction is not too sure.
    """
    if not verdicts:
        return None
    knots = np.array(KNOTS)
    x = np.array([v.shipped for v in verdicts])
    share = np.array([v.share for v in verdicts])
    # The expectation is scaled by the measured share: a verdict on no candidate says nothing.
    off = np.array([float(v.beaten) for v in verdicts]) - share * x
    right = np.clip(np.searchsorted(knots, x, side="right"), 1, len(knots) - 1)
    part = (x - knots[right - 1]) / (knots[right] - knots[right - 1])
    surplus, counts = np.zeros(len(knots)), np.zeros(len(knots))
    for place, weight in ((right - 1, 1.0 - part), (right, part)):
        np.add.at(surplus, place, weight * off)
        np.add.at(counts, place, weight * share)
    worth = np.where(surplus > 0.0, _RAISE_PRIOR_WEIGHT, _LOWER_PRIOR_WEIGHT)
    values = np.clip(knots + surplus / (worth + counts), 0.0, 1.0)
    curve = (1.0 - _MIN_SLOPE) * np.maximum.accumulate(values) + _MIN_SLOPE * knots
    return CalibrationCurve(KNOTS, tuple(float(p) for p in curve))
