"""Calibration of what goes by other devices' tables: who is asked about whom, and what is fitted."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from forecast_autotune.records import Candidate, Config, Device, Kernel, Measurement, Outcome, Problem
from forecast_autotune.records.table import Table
from forecast_autotune.surrogates.calibration import ALL_GROUPS, INFORMED, UNINFORMED, SurrogateCalibration
from forecast_train.splits import SplitError
from forecast_train.surrogate.calibrate import calibrate_cross_device
from forecast_train.surrogate.replays import DEVICE_TOLERANCES, device_replays, run_device_replay


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
    for table in TABLES:
        given = [others for asked, others in jobs if asked is table]
        assert sorted(map(len, given)) == [1, 2]
        for other in itertools.chain(*given):
            assert other.problem.kernel.name == table.problem.kernel.name
            assert other.problem.device != table.problem.device
    assert [len(others) for asked, others in jobs if asked in pair] == [1, 1]
    assert not [asked for asked, _ in jobs if asked in alone]
    assert jobs == device_replays([*TABLES, *pair, *alone], 0)


def test_one_family_is_not_enough() -> None:
    with pytest.raises(SplitError, match=r"two or more kernel families .*, got conv: add tables"):
        device_replays(TABLES[:3], 0)


def test_replays_say_what_they_went_by() -> None:
    for job in device_replays(TABLES, 0)[:2]:
        seen = run_device_replay(job, seed=0)
        assert len(seen) == len(DEVICE_TOLERANCES)
        assert {s.group for s in seen} == {INFORMED if len(job[1]) > 1 else UNINFORMED}
        assert {s.family for s in seen} == {"conv"}
        assert all(len(step.p_within) <= 40 for s in seen for step in s.steps)
        assert any(step.beaten is not None for s in seen for step in s.steps)


def test_the_curves_of_both_groups_are_fitted_and_judged_by_the_other_family() -> None:
    result = calibrate_cross_device(TABLES, (0,))
    assert result["surrogate"].startswith("pooled/")
    assert (result["problems"], result["families"]) == (6, 2)
    value = SurrogateCalibration.from_json(result["calibration"])
    assert set(value.groups) == {INFORMED, UNINFORMED, ALL_GROUPS}
    # Two families that were never wrong promise no less than this.
    assert min(min(c.observed) for c in value.groups[INFORMED].risk) >= 0.5 / 3 - 1e-3
    assert set(result["reliability"]) == {INFORMED, UNINFORMED}
