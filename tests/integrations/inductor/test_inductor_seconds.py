"""What Inductor would have taken in its own way: a pool of workers, then one timing after the other."""

from __future__ import annotations

import pytest

from forecast_autotune.records import Candidate, Config, Decision, Evidence
from forecast_integrations.inductor.inductor_seconds import (
    RECOMPILE_RATIO,
    OperationSeconds,
    inductor_seconds_saved,
)
from forecast_integrations.inductor.summary import TorchCompileSummary

LIBRARY = Candidate(Config(), "aten::mm")
TEMPLATES = [
    Candidate(Config.of({"BLOCK_M": 64, "BLOCK_N": 64, "GROUP_M": 8}, num_stages=i + 1), "triton::mm")
    for i in range(20)
]
COMPILED = dict.fromkeys(TEMPLATES[:4], 0.5)


def saved(
    *, workers: int = 16, twice: bool = False, later_rounds: float = 0.0, forecast_s: float = 0.0
) -> float:
    spent = OperationSeconds(later_rounds=later_rounds)
    spent.add_benchmark(0.1, 5)
    return inductor_seconds_saved(
        [LIBRARY, *TEMPLATES],
        COMPILED,
        TEMPLATES[4:],
        spent,
        forecast_s=forecast_s,
        workers=workers,
        compiles_twice=twice,
    )


def test_seconds_of_workers_are_shared_by_the_workers() -> None:
    assert saved() == pytest.approx(16 * 0.5 / 16 + 16 * 0.02)
    assert saved(workers=1) == pytest.approx(16 * 0.5 + 16 * 0.02)


def test_what_inductor_compiles_once_more_by_itself_is_one_after_the_other() -> None:
    assert saved(twice=True) - saved() == pytest.approx(20 * 0.5 * RECOMPILE_RATIO)


def test_forecasts_and_further_rounds_are_ours_alone() -> None:
    assert saved(forecast_s=0.1, later_rounds=0.2) == pytest.approx(saved() - 0.3)
    assert saved(later_rounds=10.0) == 0.0


def test_nothing_is_claimed_without_three_compilations_or_a_benchmark() -> None:
    few = dict(list(COMPILED.items())[:2])
    timed = OperationSeconds(benchmark=0.1, benchmarked=5)
    for compiled, spent in ((few, timed), (COMPILED, OperationSeconds())):
        found = inductor_seconds_saved(
            TEMPLATES, compiled, TEMPLATES[4:], spent, forecast_s=0.0, workers=16, compiles_twice=True
        )
        assert found == 0.0


@pytest.mark.parametrize(("saved_s", "said"), [(0.0, False), (12.4, True)])
def test_the_line_at_exit_names_a_saving_where_there_is_one(saved_s: float, said: bool) -> None:
    summary = TorchCompileSummary()
    decision = Decision("p", LIBRARY, Evidence.MEASURED, "why", 0.1, 0.02, 21, 5, saved_s=saved_s)
    summary.add_decision("mm", decision, say=False)
    assert ("saved" in summary.line()) is said
    assert ("about 12 s saved" in summary.line()) is said
