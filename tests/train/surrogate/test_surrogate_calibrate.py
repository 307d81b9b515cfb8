"""Calibration from replays: curves, intervals, what the surrogate may have seen, and what is reported."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from forecast_autotune.records import Candidate, Config, Device, Kernel, Measurement, Outcome, Problem
from forecast_autotune.records.table import Table
from forecast_autotune.surrogates.calibration import (
    ALL_GROUPS,
    FAR,
    FEW,
    INFORMED,
    LONG_LIST,
    RELATED,
    UNINFORMED,
    UNKNOWN,
    SurrogateCalibration,
)
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.protocol import Forecasts, Query, Surrogate
from forecast_autotune.surrogates.relatives import KIN_DISTANCE, problem_distance
from forecast_autotune.tuning.replays.replay import load, shipped_tables, tables_of_other_shapes
from forecast_train.splits import SplitError, family_of, kernel_identities
from forecast_train.surrogate.calibrate import (
    calibrate_cross_device,
    calibrate_surrogate,
    fit_curves,
    platt_curve,
    reliability_report,
    z_scores,
)
from forecast_train.surrogate.replays import (
    ReplayRecord,
    ReplayStep,
    collect_replays,
    device_replays,
    observe_replay,
)


@cache
def tables() -> tuple[Table, ...]:
    """Two problems of each of three kernels, of three families."""
    kernels = ("transpose_kernel", "matmul_kernel", "online_softmax")
    results = [t for t in load(shipped_tables()) if t.problem.kernel.name in kernels]
    return tuple(t for name in kernels for t in [x for x in results if x.problem.kernel.name == name][:2])


def analytic(_: Sequence[Table]) -> Surrogate:
    return AnalyticSurrogate()


def made_up(family: str, risks_: Sequence[float], beaten: Sequence[bool]) -> ReplayRecord:
    """One replay; P(within) and z-scores are those of an honest surrogate whose sd is half of the truth."""
    generator = np.random.default_rng(len(family))
    steps = []
    for i, (risk, true) in enumerate(zip(risks_, beaten, strict=True)):
        p = generator.random(40)
        near = (generator.random(40) < p).astype(float)
        z = 2.0 * generator.standard_normal(400)
        steps.append(ReplayStep(4 * i, 4 * i, 4 * i, risk, true if i else None, p, near, z))
    return ReplayRecord(family, f"{family}-problem", INFORMED, 80, tuple(steps))


# --- the statistics ---


def test_a_logistic_curve_finds_a_known_distortion() -> None:
    generator = np.random.default_rng(0)
    true = generator.random(20000)
    odds = true / (1 - true)
    stated = 3 * odds / (1 + 3 * odds)  # odds three times too high
    curve = platt_curve(stated, (generator.random(20000) < true).astype(float), np.full(20000, 1.0))
    for p in (0.1, 0.5, 0.8):
        assert curve(3 * p / (1 + 2 * p)) == pytest.approx(p, abs=0.02)
    assert list(curve.observed) == sorted(curve.observed)


def test_one_measurement_of_many_sources_fixes_the_level_of_all() -> None:
    def step(own: int, each: int, size: float) -> ReplayStep:
        z = np.array([size, -size])
        return ReplayStep(own, each, own, 0.5, True if own else None, np.full(2, 0.5), np.zeros(2), z)

    steps = (step(0, 0, 0.1), step(1, 0, 3.0), step(8, 0, 3.0), step(40, 4, 1.0))
    group = fit_curves([ReplayRecord("f", "p", INFORMED, 90, steps)]).group(INFORMED)
    before, after = group.intervals[0][0], group.intervals[1][0]
    assert before == pytest.approx(after / 30, rel=1e-3), "one is told apart from none"
    assert group.intervals[2] == group.intervals[3]


def test_renamed_devices_are_checked_but_not_learnt_from() -> None:
    honest = [made_up(name, [0.3] * 5, [False] * 5) for name in ("a", "bb")]
    strange = [replace(made_up("ccc", [0.3] * 5, [True] * 5), group=UNKNOWN)]
    assert fit_curves([*honest, *strange]) == fit_curves(honest)
    assert UNKNOWN in reliability_report([*honest, *strange])
    assert fit_curves(strange) == SurrogateCalibration({})


# --- replays ---


def test_steps_tell_the_truth_about_the_table() -> None:
    """At the start nothing is known, at the end the statement is about all that is still untried."""
    one = tables()[0]
    steps, seen = observe_replay(one, AnalyticSurrogate())
    assert steps[0].beaten is None
    assert steps[0].own == 0
    assert [s.new for s in steps] == sorted({s.new for s in steps})
    best = min(m.ms for m in one.by_candidate().values() if m.ok)
    assert steps[-1].beaten == (min(m.ms for m in seen if m.ok) > 1.02 * best)
    near = sum(m.ok and m.ms <= 1.05 * best for m in one.by_candidate().values())
    assert steps[0].within.sum() == near
    assert len(steps[-1].p_within) == len(one.by_candidate()) - steps[-1].new
    assert all(((s.p_within >= 0) & (s.p_within <= 1)).all() for s in steps)
    z, weight = z_scores([ReplayRecord("f", "p", INFORMED, 1, tuple(steps))], 0)
    assert len(z) == len(weight) == sum(m.ok for m in one.by_candidate().values())


def test_what_is_observed_is_not_calibrated_already() -> None:
    class Lying(AnalyticSurrogate):
        def forecast(self, query: Query) -> Forecasts:
            return replace(super().forecast(query), calibrate_risk=lambda _: 0.77)

    plain, _ = observe_replay(tables()[0], AnalyticSurrogate())
    lying, _ = observe_replay(tables()[0], Lying())
    assert [s.risk for s in plain] == [s.risk for s in lying]


def test_a_surrogate_that_breaks_ends_the_calibration() -> None:
    class Broken(AnalyticSurrogate):
        def forecast(self, query: Query) -> Forecasts:
            raise ValueError("no idea")

    with pytest.raises(UserWarning, match="no idea"):
        observe_replay(tables()[0], Broken())


@pytest.mark.slow
def test_the_surrogate_never_saw_the_family_it_is_judged_on() -> None:
    given: list[list[Table]] = []

    def make(train: Sequence[Table]) -> Surrogate:
        given.append(list(train))
        return AnalyticSurrogate()

    name, seen = collect_replays(tables(), make, (0,))
    assert name == f"{AnalyticSurrogate.name}/{AnalyticSurrogate.version}"
    families = {family_of(t.problem) for t in tables()}
    assert {s.family for s in seen} == families
    assert len(given) == len(families)
    left_out = [families - {family_of(t.problem) for t in train} for train in given]
    assert sorted(map(len, left_out)) == [1] * len(families)
    for out, train in zip(left_out, given, strict=True):
        tested = {i for t in tables() if family_of(t.problem) in out for i in kernel_identities(t.problem)}
        assert not tested & {i for t in train for i in kernel_identities(t.problem)}


@pytest.mark.slow
def test_the_whole_calibration_is_json_and_the_same_in_two_processes() -> None:
    few = tables()[::2]
    one = calibrate_surrogate(few, analytic, (0,))
    two = calibrate_surrogate(few, analytic, (0,), jobs=2)
    assert json.loads(json.dumps(one, allow_nan=False)) == two
    read = SurrogateCalibration.from_json(one["calibration"])
    assert set(read.groups) == {INFORMED, FEW, UNINFORMED, ALL_GROUPS}
    assert read.groups[INFORMED].problems == read.groups[FEW].problems == len(few)
    assert set(one["reliability"]) == {INFORMED, FEW, UNINFORMED, UNKNOWN}
    for group in one["reliability"].values():
        assert 0.0 <= group["steps"]["ece"] <= 1.0
        assert group["decisions"]["n"] > 0


@pytest.mark.slow
def test_problems_with_a_like_shape_tuned_before_are_a_group_of_their_own() -> None:
    """Every problem is played once with its kernel's other one, which is near for some kernels only."""
    _, seen = collect_replays(tables(), analytic, (0,))
    pairs = [(t, o) for t in tables() for o in tables_of_other_shapes(t.problem, tables())]
    near = {t.problem.id for t, o in pairs if problem_distance(t.problem, o.problem) < KIN_DISTANCE}
    long = {t.problem.id for t in tables() if len(t.by_candidate()) >= LONG_LIST}
    assert {s.problem for s in seen if s.group == RELATED} == near & long
    assert {s.problem for s in seen if s.group == FAR} == {t.problem.id for t, _ in pairs} & long - near
    assert 0 < len(near & long) < len(pairs)
    for problem in near & long:
        # Alone, and after the other one.
        assert [s.group for s in seen if s.problem == problem].count(INFORMED) == 1


# --- what goes by other devices' tables ---


def space(device: str, best: int, kernel: str, key: str = "1") -> Table:
    """A bowl around 2^best in BLOCK, with a little unevenness of its own."""
    problem = Problem.of(Kernel(kernel, "cuda"), (), Device(device), key=[key])
    uneven = np.random.default_rng(len(device) + best).uniform(0, 0.2, 40)
    rows = []
    for i, (block, tile) in enumerate(itertools.product(range(10), range(4))):
        candidate = Candidate(Config.of({"BLOCK": 2**block, "TILE": tile + 1}))
        cost = 2.0 ** (0.3 * abs(block - best) + 0.2 * abs(tile - 1) + uneven[i])
        rows.append(Measurement(problem.id, candidate, Outcome.OK, cost))
    return Table(problem, rows)


TABLES = [
    *(space(device, best, "conv") for device, best in (("A", 3), ("B", 4), ("C", 6))),
    *(space(device, best, "scan") for device, best in (("A", 5), ("B", 5), ("C", 8))),
]


def test_each_table_is_asked_with_all_others_and_with_one_of_them() -> None:
    pair = [space("A", 3, "pair"), space("B", 4, "pair")]
    alone = [space("A", 3, "alone"), space("A", 3, "alone", key="2")]
    jobs = device_replays([*TABLES, *pair, *alone], 0)
    for one in TABLES:
        given = [others for asked, others in jobs if asked is one]
        assert sorted(map(len, given)) == [1, 2]
        for other in itertools.chain(*given):
            assert other.problem.kernel.name == one.problem.kernel.name
            assert other.problem.device != one.problem.device
    assert [len(others) for asked, others in jobs if asked in pair] == [1, 1]
    assert not [asked for asked, _ in jobs if asked in alone]
    assert jobs == device_replays([*TABLES, *pair, *alone], 0)


def test_one_family_is_not_enough() -> None:
    with pytest.raises(SplitError, match=r"two or more kernel families .*, got conv: add tables"):
        device_replays(TABLES[:3], 0)


def test_the_curves_of_both_groups_are_fitted_and_judged_by_the_other_family() -> None:
    result = calibrate_cross_device(TABLES, (0,))
    assert result["surrogate"].startswith("pooled/")
    assert (result["problems"], result["families"]) == (6, 2)
    value = SurrogateCalibration.from_json(result["calibration"])
    assert set(value.groups) == {INFORMED, UNINFORMED, ALL_GROUPS}
    # Two families that were never wrong promise no less than this.
    assert min(min(c.observed) for c in value.groups[INFORMED].risk) >= 0.5 / 3 - 1e-3
    assert set(result["reliability"]) == {INFORMED, UNINFORMED}
