"""What is counted of configs that are expected to lose as another with more warps spills."""

from __future__ import annotations

from benchmarks.forecasting.register_spills import expected_losers
from forecast_autotune.records import Candidate, Config, Measurement, Outcome
from forecast_autotune.records.table import Table
from tests.core.tuning.loop import TABLE


def row(warps: int, ms: float, spills: int) -> Measurement:
    candidate = Candidate(Config.of({"BLOCK": 64}, num_warps=warps))
    return Measurement(TABLE.problem.id, candidate, Outcome.OK, median_ms=ms, extra={"spills": spills})


def test_losers_are_compared_with_the_best_of_their_list() -> None:
    slow = Table(TABLE.problem, [row(8, 1.0, 20), row(4, 4.0, 90), row(2, 8.0, 400)])
    found = expected_losers([slow], 16)
    assert (found["configs"], found["lists"], found["near_best"]) == (2, 1, 0)
    assert (found["median_ratio"], found["largest_loss"]) == (6.0, 0.0)
    assert expected_losers([slow], 64)["configs"] == 1


def test_a_loser_that_wins_is_a_loss() -> None:
    found = expected_losers([Table(TABLE.problem, [row(8, 1.5, 20), row(4, 1.0, 90)])], 16)
    assert (found["near_best"], found["largest_loss"]) == (1, 0.5)
