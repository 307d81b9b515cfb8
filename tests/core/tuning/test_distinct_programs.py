"""Of candidates that compile to one program, one is measured: recorded kernels, each config at three stages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forecast_autotune.policy import Policy, RiskBounded, WallTime
from forecast_autotune.records import Candidate, Decision
from forecast_autotune.records.table import Table
from forecast_autotune.settings import Mode, Settings
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.tuning.loop import tune
from forecast_autotune.tuning.replays.replay import ReplayStore, load, shipped_tables, task_of
from forecast_autotune.tuning.replays.table_measurer import TableMeasurer

STAGES = (2, 3, 4)


def repeated(kernel: str) -> Table:
    """A shipped table whose candidates come at each of `STAGES`, with the same times."""
    table = next(t for t in load(shipped_tables()) if t.problem.kernel.name == kernel)
    rows = {}
    for m in table.measurements:
        for stages in STAGES:
            config = replace(m.candidate.config, num_stages=stages)
            rows.setdefault(config, replace(m, candidate=Candidate(config)))
    return replace(table, measurements=list(rows.values()))


def decided(table: Table, policy: Policy, **changes: object) -> tuple[Decision, list[Candidate]]:
    asked: list[Candidate] = []

    class Noting(TableMeasurer):
        def measure(self, *args: object, **kwargs: object):  # type: ignore[no-untyped-def]
            for m in super().measure(*args, **kwargs):  # type: ignore[arg-type]
                asked.append(m.candidate)
                yield m

    settings = Settings(**changes)  # type: ignore[arg-type]
    decision = tune(
        task_of(table),
        lambda: Noting(table),
        store=ReplayStore(()),
        surrogate=AnalyticSurrogate(),
        settings=settings,
        policy=policy,
    )
    return decision, asked


def without_stages(candidates: list[Candidate]) -> list[Candidate]:
    return [Candidate(replace(c.config, num_stages=0)) for c in candidates]


@pytest.mark.parametrize("policy", [WallTime(), RiskBounded()], ids=lambda p: p.name)
def test_stages_that_change_nothing_are_not_measured_apart(policy: Policy) -> None:
    table = repeated("online_softmax")
    decision, asked = decided(table, policy)
    distinct = without_stages(asked)
    assert len(set(distinct)) == len(distinct)
    assert f"{2 * len(asked)} others compile to the same programs" in decision.reason
    best = min(m.ms for m in table.measurements if m.ok)
    assert decision.median_ms is not None
    assert decision.median_ms < 1.1 * best


def test_stages_of_a_pipelined_loop_are_measured_apart() -> None:
    decision, _ = decided(repeated("matmul_kernel"), WallTime())
    assert "same programs" not in decision.reason


def test_exhaustive_mode_measures_every_candidate() -> None:
    table = repeated("online_softmax")
    decision, asked = decided(table, WallTime(), mode=Mode.EXHAUSTIVE)
    assert len(asked) == len({m.candidate for m in table.measurements}) == decision.measured
