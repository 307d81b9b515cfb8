"""What is told of a search that was watched."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from benchmarks.lib.search.synthetic_landscape import LandscapeJudge, settings
from benchmarks.machine_code.searches import KERNELS, told
from forecast_autotune.records import Outcome
from forecast_harness.records import NodeJob, NodeResult
from tests.harness.search.simulated_search import SimulatedSearch


class _GivingUp(LandscapeJudge):
    """Times eight configs of what is faster than 1.3 times the rival's time, one of all else."""

    def judge(self, job: NodeJob) -> NodeResult:
        result = super().judge(job)
        if result.outcome is not Outcome.OK or (result.log2_ratio or 0.0) <= 0.0:
            return replace(result, measurements=8, device_seconds=0.5)
        return replace(result, measurements=1, device_seconds=0.5, facts={"given_up_after": 1})


def test_sources_given_up_count_apart_from_those_whose_configs_were_timed() -> None:
    _, state = SimulatedSearch(settings(30), judge=_GivingUp()).run(random.Random(0))
    judged = [10.0 + second for second in range(len(state.judged))]
    result = told(state, judged, 60.0)
    right = [r for n, r in state.judged.items() if r.outcome is Outcome.OK and n not in state.seeds]
    slower = sum("given_up_after" in r.facts for r in right)
    assert 0 < slower < len(right)
    assert result["given_up"] == slower
    assert result["configs_of_one_not_given_up"] == 8
    assert result["configs_of_a_right_source"] == pytest.approx(
        (8 * (len(right) - slower) + slower) / len(right)
    )
    assert result["runner_at_work"] == pytest.approx(0.5)
    assert result["first_verdict_s"] == 10.0


def test_ten_kernels_are_searched_by_default() -> None:
    assert len(set(KERNELS)) == 10
