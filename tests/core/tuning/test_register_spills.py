"""Which candidates are expected to lose, as another with more warps spills registers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forecast_autotune.features.candidate_list import CandidateList
from forecast_autotune.records import Candidate, Config, Measurement, Outcome
from forecast_autotune.records.table import Table
from forecast_autotune.store import Store
from forecast_autotune.tuning.compilations import spill_slowdowns
from tests.core.tuning.loop import TABLE, Bench, Told, constant, decide


def config(block: int, warps: int, stages: int = 3, maxnreg: int | None = None) -> Candidate:
    return Candidate(Config.of({"BLOCK": block}, num_warps=warps, num_stages=stages, maxnreg=maxnreg))


NAMES = CandidateList(
    config(block, warps, stages) for block in (32, 64) for warps in (2, 4, 8) for stages in (3, 4)
)


def measured(candidate: Candidate, spills: object, outcome: Outcome = Outcome.OK) -> Measurement:
    ms = 1.0 if outcome is Outcome.OK else None
    return Measurement(TABLE.problem.id, candidate, outcome, median_ms=ms, extra={"spills": spills})


def slower(*measurements: Measurement, names: CandidateList = NAMES) -> set[Candidate]:
    found = spill_slowdowns(names, measurements)
    assert found.shape == (len(names),)
    return {names[row] for row in found.nonzero()[0].tolist()}


def test_fewer_warps_of_a_program_that_spills_are_expected_to_lose_in_any_number_of_stages() -> None:
    assert slower(measured(config(64, 4), 36)) == {config(64, 2, 3), config(64, 2, 4)}
    assert slower(measured(config(64, 8), 36)) == {config(64, w, s) for w in (2, 4) for s in (3, 4)}
    assert slower(measured(config(64, 2), 36)) == set()


@pytest.mark.parametrize("spills", [0, 8, None, "many", float("inf")])
def test_where_hardly_anything_spills_or_nothing_is_known_all_stays_open(spills: object) -> None:
    assert slower(measured(config(64, 8), spills)) == set()


def test_what_failed_says_nothing_of_others() -> None:
    assert slower(measured(config(64, 8), 36, Outcome.RUNTIME_ERROR)) == set()
    assert slower(measured(config(128, 8), 36)) == set(), "it is not of this list"


def test_a_limit_on_registers_spills_by_itself() -> None:
    """With fewer of them allowed, another config's spills are no sign."""
    names = CandidateList([config(64, 8, maxnreg=64), config(64, 4, maxnreg=64), config(64, 4)])
    assert slower(measured(names[0], 36), names=names) == {names[1]}


@pytest.mark.parametrize(("spills", "waits"), [(36, False), (0, True)])
def test_what_must_spill_is_not_waited_for(spills: int, waits: bool) -> None:
    seconds = {config(64, 2): 0.8, config(64, 4): 0.3, config(64, 8): 0.3}
    rows = [
        replace(measured(c, spills if c == config(64, 4) else 0), compile_s=s) for c, s in seconds.items()
    ]
    table = Table(TABLE.problem, rows)
    bench = Bench(table)
    decide(Store(None), bench, table=table, surrogate=Told(constant(sd=1.0)))
    assert (config(64, 2) in bench.asked) is waits
    assert (bench.spent().wall_s >= 0.8) is waits
