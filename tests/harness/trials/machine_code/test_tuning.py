"""Which configs of a node are compiled for which calls, where a kernel has other code for some of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks.lib.machine_code.fake_code import addition, honest
from benchmarks.lib.machine_code.sums import COUNT
from forecast_autotune.records import Outcome
from forecast_harness.clocks.runner.client import RunnerClient
from forecast_harness.trials.machine_code.tuning import NodeTrial, parts_by_code
from tests.harness.trials.machine_code.judged_sums import Judged, job, node
from tests.harness.trials.machine_code.written_sources import SMALL

MIDDLE = 4 * SMALL
SIZES = {"middle": MIDDLE, "large": COUNT, "larger": 2 * COUNT}
RIVAL = node("rival", "special 50000")


@pytest.fixture
def special(runner: RunnerClient, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Judged]:
    """Nodes with other code for the small call and for the middle one; the parameter is the warps of their configs."""
    result = Judged(runner, tmp_path, request.param, SIZES)
    yield result
    result.close()


def _compiled(judged: Judged, name: str) -> dict[int, list[list[int]]]:
    """Elements of the calls that each config was compiled for, by warps: a list for each time."""
    results: dict[int, list[list[int]]] = {}
    for candidate, warps, counts in judged.builder.counts:
        if candidate == name:
            results.setdefault(warps, []).append(counts)
    return results


ALL, FIRST, REST = [SMALL, MIDDLE, COUNT, 2 * COUNT], [COUNT, 2 * COUNT], [SMALL, MIDDLE]


@pytest.mark.parametrize("special", [(16, 8, 4, 2)], indirect=True)
def test_a_config_that_is_behind_where_most_calls_share_their_code_is_compiled_for_no_others(
    special: Judged,
) -> None:
    result = special.judge.judge(job("node", "special 48000", RIVAL))
    assert _compiled(special, "node") == {16: [ALL], 8: [ALL], 4: [FIRST], 2: [FIRST]}
    assert (result.outcome, result.config, result.measurements) == (Outcome.OK, {"num_warps": 16}, 4)
    assert [one["config"] for one in result.facts["configs"]] == [{"num_warps": 16}, {"num_warps": 8}]
    answer = {config["num_warps"]: seconds for config, seconds in special.trials.timed["node"]}
    assert {w: [math.isnan(s) for s in t] for w, t in answer.items()} == {
        16: [False, False, False],
        8: [False, False, False],
        4: [True, False, False],
        2: [True, False, False],
    }


@pytest.mark.parametrize("special", [(2, 4, 8, 16)], indirect=True)
def test_one_that_may_be_the_best_is_compiled_and_timed_at_all_calls(special: Judged) -> None:
    result = special.judge.judge(job("node", "special 30000", RIVAL))
    built = _compiled(special, "node")
    assert (built[2], built[4], built[16]) == ([ALL], [ALL], [FIRST, REST])
    assert (result.outcome, result.config, result.measurements) == (Outcome.OK, {"num_warps": 16}, 4)
    assert set(result.seconds) == set(SIZES)
    assert result.log2_ratio == pytest.approx(math.log2(30 / 50 / 4), abs=0.3)


@pytest.mark.parametrize("special", [(4, 4, 16)], indirect=True)
def test_one_that_is_wrong_at_the_small_call_is_never_the_best(special: Judged) -> None:
    result = special.judge.judge(job("node", "narrow 48000", RIVAL))
    assert _compiled(special, "node")[16] == [FIRST, REST]
    assert (result.outcome, result.config) == (Outcome.OK, {"num_warps": 4})
    assert {config["num_warps"] for config, _ in special.trials.timed["node"]} == {4}


@pytest.mark.parametrize(
    ("costs", "first", "rest"),
    [
        ((1, 1, 1), [0, 1, 2], []),
        ((1, 2, 2, 1), [1, 2], [0, 3]),
        ((1, 1, 2, 3), [0, 1], [2, 3]),
        ((1, 2, 2), [1, 2], [0]),
        ((1, 2, 3), [1], [0, 2]),
    ],
)
def test_the_first_part_is_the_code_that_most_timed_calls_share(
    costs: Sequence[int], first: Sequence[int], rest: Sequence[int]
) -> None:
    assert parts_by_code([addition("one", honest(c), COUNT) for c in costs]) == (first, rest)


@pytest.mark.parametrize(("slower", "behind"), [(1.0, False), (1.03, False), (1.05, True), (0.9, False)])
def test_a_config_is_behind_that_would_have_to_be_far_better_elsewhere(slower: float, behind: bool) -> None:
    rivals = dict.fromkeys(SIZES, addition("rival", honest(), COUNT))
    trial = NodeTrial(job("node", "special 1"), [{}, {}], "", rivals, dict.fromkeys(SIZES, 1.0))
    trial.add(0, {}, dict.fromkeys(SIZES, 1.0), is_whole=True)
    trial.add(1, {}, {"large": slower, "larger": slower}, is_whole=False)
    assert trial.is_behind(1) == behind
    trial.add(1, {}, {"middle": 1.0}, is_whole=True)
    assert (trial.is_behind(1), trial.tried, len(trial.seconds)) == (False, 2, 2)
