"""A few of the programs of `benchmarks.tuning.boundary_fuzz`, as they run on the null device."""

from __future__ import annotations

import pytest

from benchmarks.tuning.boundary_fuzz import NEEDS, PLACES, compared, draw


def test_programs_are_a_function_of_their_number_and_reach_every_kind() -> None:
    drawn = [draw(number) for number in range(240)]
    assert drawn == [draw(number) for number in range(240)]
    functions = [given for one in drawn for given in one["functions"].items()]
    assert {place for place, _ in functions} == set(PLACES)
    assert {given["needs"] for _, given in functions} == set(NEEDS)


@pytest.mark.parametrize("number", [3, 15, 182])
def test_a_program_runs_with_us_as_under_triton(number: int) -> None:
    row = compared(draw(number), on_cuda=False)
    assert row["verdict"] in ("same", "went_on"), row
