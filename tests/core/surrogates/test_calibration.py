"""From what a surrogate says to how often it came true: curves, groups, intervals, the shipped file."""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest

from forecast_autotune.errors import RecordError
from forecast_autotune.numerics import INTERVAL_LEVELS
from forecast_autotune.records import Candidate, Config, Device
from forecast_autotune.records.table import Table
from forecast_autotune.settings import Settings
from forecast_autotune.surrogates import calibration
from forecast_autotune.surrogates.calibration import (
    ALL_GROUPS,
    FAMILIAR,
    FAMILIARITY_BOUNDS,
    FAR,
    FEW,
    GROUPS,
    INFORMED,
    LONG_LIST,
    OWN_MEASUREMENT_BOUNDS,
    RELATED,
    UNINFORMED,
    UNKNOWN,
    CalibrationCurve,
    CalibrationGroup,
    SurrogateCalibration,
    calibration_group,
    measurement_class,
    shipped_calibration,
)
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.protocol import Forecasts
from forecast_autotune.testing import example_table, query_of
from forecast_autotune.tuning.replays.replay import load, replay
from forecast_autotune.tuning.replays.replay import shipped_tables as recorded

H200 = Device("NVIDIA H200", "cuda", "90")
STRANGE = Device("made up", "cuda")
CURVE = CalibrationCurve((0.0, 0.5, 1.0), (0.1, 0.2, 0.6))
GROUP = CalibrationGroup(
    (CURVE,) * len(OWN_MEASUREMENT_BOUNDS),
    (CURVE,) * len(OWN_MEASUREMENT_BOUNDS),
    ((1.5,) * len(INTERVAL_LEVELS),) * len(OWN_MEASUREMENT_BOUNDS),
    7,
)


# --- groups ---


def test_the_group_follows_the_device_first_and_then_the_ir() -> None:
    assert calibration_group(H200, True) == calibration_group(H200, True, LONG_LIST) == INFORMED
    assert [calibration_group(H200, True, LONG_LIST, k) for k in ("none", "far", "near")] == [
        INFORMED,
        FAR,
        RELATED,
    ]
    assert (
        calibration_group(H200, True, LONG_LIST - 1)
        == calibration_group(H200, True, LONG_LIST - 1, "near")
        == FEW
    )
    assert calibration_group(H200, False, LONG_LIST, "near") == UNINFORMED
    assert calibration_group(H200, False) == calibration_group(H200, False, 2) == UNINFORMED
    assert (
        calibration_group(STRANGE, True)
        == calibration_group(STRANGE, False)
        == calibration_group(STRANGE, True, 2)
        == UNKNOWN
    )
    assert calibration_group(STRANGE, True, LONG_LIST, "near") == UNKNOWN
    near, far = FAMILIARITY_BOUNDS
    results = [
        calibration_group(H200, True, LONG_LIST, "none", d) for d in (0.0, near, (near + far) / 2, far, 99.0)
    ]
    assert results == [FAMILIAR, INFORMED, INFORMED, calibration.STRANGE, calibration.STRANGE]
    assert calibration_group(H200, True, LONG_LIST, "near", 99.0) == RELATED, "its own measurements say more"
    assert calibration_group(H200, True, LONG_LIST - 1, "none", 99.0) == FEW
    assert calibration_group(H200, False, LONG_LIST, "none", 0.0) == UNINFORMED
    assert calibration_group(STRANGE, True, LONG_LIST, "none", 0.0) == UNKNOWN


def test_a_group_without_data_is_less_sure_than_any_with() -> None:
    sure = replace(GROUP, risk=(CalibrationCurve((0.0, 1.0), (0.01, 0.3)),) * 4)
    bad = replace(GROUP, risk=(CalibrationCurve((0.0, 1.0), (0.05, 0.9)),) * 4, intervals=((9.0,) * 4,) * 4)
    calibration = SurrogateCalibration({INFORMED: sure, UNINFORMED: bad, ALL_GROUPS: GROUP})
    fallback = calibration.group(UNKNOWN)
    for other in (sure, bad, GROUP):
        for p in (0.0, 0.2, 0.5, 1.0):
            assert all(f(p) >= o(p) for f, o in zip(fallback.risk, other.risk, strict=True))
            assert all(f(p) <= o(p) for f, o in zip(fallback.within, other.within, strict=True))
        for mine, theirs in zip(fallback.intervals, other.intervals, strict=True):
            assert all(f >= o for f, o in zip(mine, theirs, strict=True))
    assert fallback.risk[0](0.0) > GROUP.risk[0](0.0)
    assert (
        calibration.group(INFORMED)
        is calibration.group(FEW)
        is calibration.group(RELATED)
        is calibration.group(FAR)
        is sure
    )
    assert SurrogateCalibration().group(UNKNOWN) == CalibrationGroup()


# --- the file ---


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"risk": [[[0.0, 0.5], [1.0, 0.1]]] * 4}, "rising knots"),
        ({"risk": [3] * 4}, "risk\\[0\\] must be a list"),
        ({"risk": [[[0.0, 0.0], [1.0, 1.0]]]}, "4 curves"),
        ({"within": [[[0.0, 0.0], [1.0, 1.0]]]}, "4 curves"),
        ({"intervals": [[1.0]]}, "interval factors"),
        ({"intervals": [[-1.0] * 4] * 4}, "positive"),
        ({"intervals": "wide"}, "intervals must be a list"),
        ({"problems": None}, "problems must be an integer"),
    ],
)
def test_a_damaged_group_is_refused(change: dict[str, object], rule: str) -> None:
    with pytest.raises(RecordError, match=rule):
        CalibrationGroup.from_json({**GROUP.to_json(), **change})
    missing = {name: value for name, value in GROUP.to_json().items() if name not in change}
    with pytest.raises(RecordError, match="needs the field"):
        CalibrationGroup.from_json(missing)


# --- what is shipped, and what it does ---


def test_the_shipped_surrogate_is_calibrated_and_uses_it() -> None:
    name = f"{AnalyticSurrogate.name}/{AnalyticSurrogate.version}"
    calibration = shipped_calibration(name)
    assert {INFORMED, UNINFORMED, ALL_GROUPS} <= set(calibration.groups)
    assert shipped_calibration("somebody/else") == SurrogateCalibration()
    forecasts = AnalyticSurrogate().forecast(query_of(example_table(), 3))
    group = calibration.group(UNKNOWN)  # the example's device and IR are made up
    assert forecasts.calibrate_risk(0.9) == group.risk[measurement_class(3)](0.9)
    assert forecasts.interval_factors == group.intervals[measurement_class(3)]
    plain = forecasts.uncalibrated()
    expected = group.within[measurement_class(3)].array(plain.p_within(0.05))
    np.testing.assert_allclose(forecasts.p_within(0.05), expected)
    assert plain.calibrate_risk(0.9) == 0.9


def test_a_measurement_of_any_source_makes_intervals_those_of_a_known_level() -> None:
    wide = ((9.0,) * 4, (1.0,) * 4, (2.0,) * 4, (3.0,) * 4)
    risk = tuple(CalibrationCurve((0.0, 1.0), (0.0, x)) for x in (0.9, 0.8, 0.7, 0.6))
    curves = SurrogateCalibration({INFORMED: replace(GROUP, risk=risk, intervals=wide)})
    names = [Candidate(Config.of({"N": n}), f"source {n % 3}") for n in range(9)]
    plain = Forecasts(names, np.zeros(9), np.ones(9), np.zeros(9))
    results = [curves.apply_to(plain, INFORMED, own) for own in (0, 1, 2, 3, 12)]
    assert [f.interval_factors[0] for f in results] == [9.0, 1.0, 1.0, 1.0, 2.0]
    assert [f.calibrate_risk(1.0) for f in results] == [0.9, 0.9, 0.9, 0.8, 0.7], "risks go by source"


@pytest.mark.parametrize("group", GROUPS)
def test_shipped_risks_are_never_nothing_and_rise(group: str) -> None:
    curves = shipped_calibration(f"{AnalyticSurrogate.name}/{AnalyticSurrogate.version}").group(group)
    for risk in curves.risk:
        risks = [risk(p / 100) for p in range(101)]
        assert risks == sorted(risks)
        assert risks[0] >= 0.01
    for curve in curves.within:
        assert 0.0 < curve(0.0) < curve(1.0) <= 1.0


@pytest.mark.parametrize("own", [0, 5])
def test_doubt_grows_without_ir_and_on_an_unknown_device(own: int) -> None:
    table = next(t for t in load(recorded()) if t.problem.kernel.name == "matmul_kernel")
    known = query_of(table, own)
    bare = replace(known, ttir={}, problem=replace(table.problem, ttir={}))
    strange = replace(known, problem=replace(table.problem, device=STRANGE))
    informed, uninformed, unknown = (AnalyticSurrogate().forecast(q) for q in (known, bare, strange))
    for share in (0.1, 0.3, 0.5):
        assert (
            informed.calibrate_risk(share) < uninformed.calibrate_risk(share) <= unknown.calibrate_risk(share)
        )
    best = [float(f.p_within(0.05).max()) for f in (informed, uninformed, unknown)]
    assert best[0] > max(best[1:])
    wide = [float(np.median(np.subtract(*f.interval(0.9)[::-1]))) for f in (informed, unknown)]
    assert wide[0] < wide[1]


def test_a_forecast_alone_is_never_sure_on_an_unknown_device() -> None:
    table = next(t for t in load(recorded()) if t.problem.kernel.name == "matmul_kernel")
    strange = Table(replace(table.problem, device=STRANGE), table.measurements)
    (row,) = replay(
        [strange],
        surrogate=AnalyticSurrogate(),
        policy=lambda _: None,
        settings=Settings().with_(mode="skip"),
    ).rows
    assert row.measured == 0
    assert row.stated_risk > 0.5


# --- intervals ---


def test_intervals_cover_what_they_promise() -> None:
    """Errors with heavier tails than a normal's: factors fitted to one half are right for the other."""
    errors = np.abs(np.random.default_rng(0).standard_t(3, 8000))
    normal = [NormalDist().inv_cdf(0.5 + level / 2) for level in INTERVAL_LEVELS]
    factors = tuple(
        float(np.quantile(errors[:4000], p)) / z for p, z in zip(INTERVAL_LEVELS, normal, strict=True)
    )
    n = 4000
    names = query_of(example_table()).candidates
    result = Forecasts(
        [names[0]] * n,
        np.full(n, 2.0),
        np.full(n, 0.5),
        np.zeros(n),
        interval_factors=(1.0,) * len(INTERVAL_LEVELS),
    )
    honest = replace(result, interval_factors=factors)
    truth = 2.0 + 0.5 * errors[4000:]
    for level in INTERVAL_LEVELS:
        low, high = honest.interval(level)
        assert ((low <= truth) & (truth <= high)).mean() == pytest.approx(level, abs=0.03)
    one = honest[0]
    np.testing.assert_allclose(
        [one.quantiles[0], one.quantiles[4]], [honest.interval(0.9)[0][0], honest.interval(0.9)[1][0]]
    )
    np.testing.assert_allclose(
        [one.quantiles[1], one.quantiles[3]], [honest.interval(0.5)[0][0], honest.interval(0.5)[1][0]]
    )
    assert one.spread > result[0].spread == pytest.approx(0.5)
    assert one.point == 2.0
