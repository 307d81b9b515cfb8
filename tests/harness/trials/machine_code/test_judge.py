"""Nodes of a search, judged through machine code by many threads at once, and given up."""

from __future__ import annotations

import contextlib
import math
import random
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.lib.machine_code.sums import COUNT
from forecast_autotune.errors import RecordError
from forecast_autotune.records import Outcome
from forecast_harness.clocks.compilation.workers import BuildRequest, BuildResult
from forecast_harness.clocks.runner.client import RunnerClient
from forecast_harness.clocks.runner.messages import PAUSES
from forecast_harness.records import ConfirmationJob, FullVerification, VerificationJob
from forecast_harness.sandbox.jobs import SandboxError
from forecast_harness.trials.judge_pool import LocalJudgePool
from forecast_harness.trials.machine_code import judge as node_builds
from forecast_harness.trials.machine_code.targets import block_means
from forecast_harness.trials.protocol import LaneFailure
from forecast_harness.trials.race import log2_ratio, mean_log2_ratio
from tests.harness.trials.machine_code.judged_sums import SEED, SMALL, TARGET, Judged, job, node, verification


@pytest.fixture
def judged(runner: RunnerClient, tmp_path: Path) -> Iterator[Judged]:
    with contextlib.closing(Judged(runner, tmp_path)) as result:
        yield result


@pytest.fixture
def tuned(runner: RunnerClient, tmp_path: Path) -> Iterator[Judged]:
    with contextlib.closing(Judged(runner, tmp_path, (4, 8, 2, 16))) as result:
        yield result


def test_a_faster_node_says_by_how_much_and_waits_for_full_verification(judged: Judged) -> None:
    result = judged.judge.judge(job("fast", "honest 24000"))
    assert result.outcome is Outcome.OK
    assert result.log2_ratio == pytest.approx(-1, abs=0.1)
    assert result.seconds["large"] == pytest.approx(25e-6, rel=0.1)
    assert (result.against, result.may_lead, result.is_unverified_gain) == ("seed", False, True)
    assert result.device_seconds > 0
    assert judged.host.verified == []
    assert judged.trials.learnt == [("fast", 1)]


def test_full_verification_is_a_job_of_its_own(judged: Judged) -> None:
    fast, cheat = job("fast", "honest 24000"), job("cheat", "honest 20000")
    right = judged.judge.verify(verification(fast))
    assert right.is_right
    assert judged.host.prepared
    result = judged.judge.judge(fast).with_verification(right)
    assert (result.may_lead, result.facts["launches"], result.facts["path"]) == (True, 9, "machine code")
    wrong = judged.judge.verify(verification(cheat))
    refused = judged.judge.judge(cheat).with_verification(wrong)
    assert (refused.outcome, refused.log2_ratio, refused.stage) == (Outcome.INCORRECT, None, "verify")
    assert "hidden size" in refused.feedback
    assert judged.host.verified == ["fast", "cheat"]


@pytest.mark.parametrize(("cost", "ratio"), [(60_000, 0.26), (50_000, 0.0), (49_950, 0.0)])
def test_what_is_not_shown_to_be_faster_is_not_called_so(judged: Judged, cost: int, ratio: float) -> None:
    result = judged.judge.judge(job("other", f"honest {cost}"))
    assert result.log2_ratio >= 0
    assert result.log2_ratio == pytest.approx(ratio, abs=0.03)
    assert not result.is_unverified_gain


def test_the_best_of_all_configs_counts(tuned: Judged) -> None:
    result = tuned.judge.judge(job("many", "honest 48000"))
    assert (result.measurements, result.config) == (4, {"num_warps": 16})
    assert result.log2_ratio == pytest.approx(-2.0, abs=0.2)
    assert len(result.facts["configs"]) == 4


def test_a_seed_beside_itself_has_its_best_config_and_is_no_lead(
    tuned: Judged, runner: RunnerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is faster than the seed's best leads, and is timed again by a new runner."""
    renewed, renew = list[str](), runner.renew
    monkeypatch.setattr(runner, "renew", lambda: (renewed.append(""), renew()))
    result = tuned.judge.judge(job("seed", SEED.source))
    assert (result.log2_ratio, result.sd, result.config, result.measurements) == (
        0.0,
        0.0,
        {"num_warps": 16},
        4,
    )
    assert not renewed
    tuned.trials.warps = (16,)
    best = replace(job("better", "honest 45000"), against_config=result.config)
    better = tuned.judge.judge(best)
    assert better.log2_ratio == pytest.approx(-0.15, abs=0.05)
    assert len(renewed) == 1


def test_a_seed_that_is_faster_than_memory_is_not_believed(judged: Judged) -> None:
    result = judged.judge.judge(job("seed", "honest 1000", node("seed", "honest 1000")))
    assert (result.outcome, result.log2_ratio) == (Outcome.INFRASTRUCTURE, None)


def test_one_config_that_fails_does_not_end_a_source(tuned: Judged) -> None:
    result = tuned.judge.judge(job("wide", "wide 40000"))
    assert (result.outcome, result.config, result.measurements) == (Outcome.OK, {"num_warps": 4}, 1)


@pytest.mark.parametrize(
    ("source", "outcome", "stage"),
    [
        ("wrong 20000", Outcome.INCORRECT, "verify"),
        ("faulty", Outcome.RUNTIME_ERROR, "verify"),
        ("broken", Outcome.COMPILE_ERROR, "compile"),
        ("honest 1000", Outcome.INFRASTRUCTURE, "time"),
    ],
)
def test_a_node_that_fails_says_at_which_stage(
    judged: Judged, source: str, outcome: Outcome, stage: str
) -> None:
    result = judged.judge.judge(job("bad", source))
    assert (result.outcome, result.stage, result.log2_ratio) == (outcome, stage, None)
    assert result.feedback
    assert judged.host.verified == []


@pytest.mark.parametrize(("source", "why"), [("host", "torch.mm"), ("odd", "could not be recorded")])
def test_what_is_no_machine_code_goes_to_the_other_judge(judged: Judged, source: str, why: str) -> None:
    result = judged.judge.judge(job("torch", source))
    assert result.against == "seed"
    assert result.facts["path"] == "host code"
    assert why in result.facts["path_reason"]
    assert judged.told == []  # no failure of ours
    judged.judge.confirm(ConfirmationJob((SEED,), {}, SEED, TARGET))
    assert judged.host.asked == ["torch", "seed"]
    judged.judge.close()
    assert judged.host.closed


def test_a_failure_of_our_own_has_the_node_judged_as_host_code_and_three_in_a_row_all(judged: Judged) -> None:
    results = [judged.judge.judge(job(f"lost-{n}", "lost")) for n in range(3)]
    assert [f.facts["path_reason"] for f in results] == ["the server was lost"] * 3
    assert [t.endswith("all is judged as host code") for t in judged.told] == [False, False, True]
    later = judged.judge.judge(job("fine", "honest 24000"))
    assert later.facts["path"] == "host code"
    assert judged.host.asked == ["lost-0", "lost-1", "lost-2", "fine"]


def test_a_failure_of_our_own_is_the_lanes_where_machine_code_is_insisted_on(
    runner: RunnerClient, tmp_path: Path
) -> None:
    with contextlib.closing(Judged(runner, tmp_path, insist=True)) as result:
        with pytest.raises(LaneFailure, match="server was lost"):
            result.judge.judge(job("lost", "lost"))
        with pytest.raises(LaneFailure, match="timed beside"):
            result.judge.judge(job("any", "honest 40000", against=node("other", "broken")))
        assert result.host.asked == []


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("honest 50000", ""),
        ("wrong", "wrong values"),
        ("host", "torch.mm"),
        ("honest 100", "faster than memory"),
    ],
)
def test_a_seed_shows_whether_a_target_can_be_judged_so(judged: Judged, source: str, said: str) -> None:
    result = judged.judge.try_seed(job("seed", source))
    assert result.startswith(said) if said else result == ""


def test_a_pool_of_judges_shares_one_device_and_loses_nothing(judged: Judged) -> None:
    pool = LocalJudgePool(lambda number: judged.judge, 4)
    sources = ["honest 40000", "wrong 9000", "faulty", "honest 90000", "broken", "honest 30000"]
    jobs = [job(f"node-{n}", sources[n % len(sources)]) for n in range(12)]
    try:
        results = [f.result(300) for f in [pool.submit(one) for one in jobs]]
    finally:
        pool.close()
    wanted = [
        Outcome.OK,
        Outcome.INCORRECT,
        Outcome.RUNTIME_ERROR,
        Outcome.OK,
        Outcome.COMPILE_ERROR,
        Outcome.OK,
    ]
    assert [r.outcome for r in results] == 2 * wanted
    for lead in (results[5], results[11]):
        assert lead.log2_ratio == pytest.approx(-0.7, abs=0.1)
    assert threading.active_count() < 50


def test_nodes_are_judged_while_one_is_verified_and_only_what_takes_the_lead_gets_a_new_runner(
    judged: Judged, runner: RunnerClient
) -> None:
    once = judged.host.verify
    begun, others_are_judged = threading.Event(), threading.Event()

    def verify(asked: VerificationJob) -> FullVerification:
        begun.set()
        assert others_are_judged.wait(60)
        return once(asked)

    judged.host.verify = verify  # type: ignore[method-assign]
    fast = job("fast", "honest 20000")
    before = runner.restarts
    judged.judge.judge(fast)
    assert runner.restarts == before + 1
    with ThreadPoolExecutor(1) as pool:
        verifying = pool.submit(judged.judge.verify, verification(fast))
        assert begun.wait(60)
        slower = judged.judge.judge(job("slower", "honest 90000"))
        second = judged.judge.judge(job("second", "honest 24000"))
        others_are_judged.set()
        assert verifying.result(60).is_right
    assert slower.outcome is second.outcome is Outcome.OK
    assert second.log2_ratio == pytest.approx(-1, abs=0.1)
    assert runner.restarts == before + 1


def test_a_wrong_value_at_the_timed_size_is_seen_without_full_verification(judged: Judged) -> None:
    result = judged.judge.judge(job("late", "late 24000"))
    assert result.outcome is Outcome.INCORRECT
    assert judged.host.verified == []


@pytest.mark.parametrize("error", [RecordError("breaks the contract"), SandboxError("a worker was lost")])
def test_what_cannot_be_built_is_judged_as_host_code(judged: Judged, error: Exception) -> None:
    def fail(request: object) -> object:
        raise error

    judged.builder.submit = fail  # type: ignore[assignment]
    result = judged.judge.judge(job("fast", "honest 24000"))
    assert (result.facts["path"], result.facts["path_reason"]) == ("host code", str(error))


class Hanging:
    """Has the host's verification wait until it is given up or closed."""

    def __init__(self, judged: Judged) -> None:
        self.begun, self.ended = threading.Event(), threading.Event()
        judged.host.verify = self.verify  # type: ignore[method-assign]

    def verify(self, asked: VerificationJob) -> FullVerification:
        self.begun.set()
        assert self.ended.wait(60)
        raise LaneFailure("ended", "lane")

    @contextmanager
    def waited_for(self, judged: Judged) -> Iterator[None]:
        """While it hangs in a thread of its own; what ends it is told to that."""
        with ThreadPoolExecutor(1) as pool:
            verifying = pool.submit(judged.judge.verify, verification(job("fast", "honest 24000")))
            assert self.begun.wait(60)
            yield
            with pytest.raises(LaneFailure, match="ended"):
                verifying.result(60)


def test_verification_has_a_lane_beside_those_of_nodes_and_confirmation_follows_at_once(
    judged: Judged,
) -> None:
    pytest.importorskip("triton")
    pytest.importorskip("torch")
    from forecast_harness.trials.machine_lanes import MachineCodeLanes

    hanging = Hanging(judged)
    judged.host.give_up = hanging.ended.set  # type: ignore[method-assign]
    with contextlib.closing(MachineCodeLanes([judged.judge], 1, ExitStack())) as lanes:
        assert lanes.capacity == 1
        verifying = lanes.verify(verification(job("fast", "honest 24000")))
        assert hanging.begun.wait(60)
        results = [lanes.submit(job(f"node-{n}", "honest 40000")) for n in range(3)]
        assert {f.result(60).outcome for f in results} == {Outcome.OK}
        lanes.give_up()
        assert list(lanes.confirm(ConfirmationJob((SEED,), {}, SEED, TARGET)).result(60)) == ["seed"]
        with pytest.raises(LaneFailure, match="ended"):
            verifying.result(60)
        assert not judged.host.closed, "what it has opened for the confirmation would be lost"
        assert lanes.capacity == 1


def test_a_node_whose_sources_still_compile_is_given_up_without_waiting_for_them(judged: Judged) -> None:
    question, never = threading.Event(), Future[BuildResult]()

    def submit(request: BuildRequest) -> Future[BuildResult]:
        question.set()
        return never

    judged.builder.submit = submit  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as pool:
        judging = pool.submit(judged.judge.judge, job("fast", "honest 24000"))
        assert question.wait(60)
        while not judging.done():
            judged.judge.give_up()
        with pytest.raises(LaneFailure, match="given up"):
            judging.result(60)
    assert never.cancelled()


@pytest.mark.parametrize("begun", [False, True])
def test_a_config_is_waited_for_unless_it_compiles_far_longer_than_others(
    tuned: Judged, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    monkeypatch.setattr(node_builds, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(node_builds, "_PATIENCE", 0.0)
    monkeypatch.setattr(node_builds, "_LOOK_S", 0.05)
    submit, slow, question = tuned.builder.submit, Future[BuildResult](), list[BuildRequest]()
    ended: list[Future[BuildResult]] = []
    tuned.builder.end = lambda building: ended.append(building) is None  # type: ignore[method-assign,func-returns-value]
    tuned.builder.seconds_of = lambda building: float(building.running())  # type: ignore[method-assign]

    def delayed(request: BuildRequest) -> Future[BuildResult]:
        if request.options.get("num_warps") != 2:
            return submit(request)
        question.append(request)
        if begun:  # otherwise it waits for a worker
            slow.set_running_or_notify_cancel()
        return slow

    tuned.builder.submit = delayed  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as pool:
        judging = pool.submit(tuned.judge.judge, job("fast", "honest 24000"))
        if not begun:
            with pytest.raises(TimeoutError):
                judging.result(2.0)  # far longer than the patience
            slow.set_result(submit(question[0]).result(60))
        result = judging.result(60)
    assert result.outcome is Outcome.OK
    assert (result.measurements, result.facts.get("late_configs", 0)) == ((3, 1) if begun else (4, 0))
    assert ended == ([slow] if begun else [])


def test_the_end_ends_compilations_that_have_begun_and_calls_none_a_failure(judged: Judged) -> None:
    question, running, answer = threading.Event(), Future[BuildResult](), list[float]()
    running.set_running_or_notify_cancel()

    def submit(request: BuildRequest) -> Future[BuildResult]:
        question.set()
        return running

    def give_up(after_s: float = 3.0) -> None:
        answer.append(after_s)
        if after_s == 0:  # as a worker's lane does, whose job has just begun
            request = judged.trials.request(job("fast", "honest 24000").node, {})
            running.set_result(BuildResult(request, infrastructure="the job was given up"))

    judged.builder.submit = submit  # type: ignore[method-assign]
    judged.builder.give_up = give_up  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as pool:
        judging = pool.submit(judged.judge.judge, job("fast", "honest 24000"))
        assert question.wait(60)
        judged.judge.give_up()
        assert answer == [3.0], "what has just begun may be of use to others"
        judged.judge.end()
        with pytest.raises(LaneFailure, match="the lanes are closed"):
            judging.result(60)
    assert judged.told == []
    assert judged.host.asked == []


def test_after_the_end_nothing_more_is_judged_and_a_host_judge_at_work_is_ended(judged: Judged) -> None:
    hanging = Hanging(judged)
    judged.host.close = hanging.ended.set  # type: ignore[method-assign]
    with hanging.waited_for(judged):
        judged.judge.end()
        judged.judge.close()
    with pytest.raises(LaneFailure, match="the lanes are closed"):
        judged.judge.judge(job("faster", "honest 20000"))


def test_what_strays_in_another_block_of_each_call_moves_nothing() -> None:
    """All calls take as long for both; of the rival's four blocks of each call, one was disturbed."""
    disturbed = [[0.4 if n == number else 0.0 for n in range(4)] for number in range(3)]
    ratio, error = mean_log2_ratio(disturbed)
    assert ratio == 0.0
    assert error >= 0.0
    together = [sum(call[n] for call in disturbed) / 3 for n in range(4)]
    assert log2_ratio(together)[0] < -0.1, "taken together first, most blocks are disturbed"


@pytest.mark.parametrize("recorded", [True, False])
def test_a_launch_that_was_held_up_is_left_out_where_blocks_are_few(recorded: bool) -> None:
    chance = random.Random(3)
    seconds = [6e-6 + 1e-7 * chance.random() for _ in range(4 * PAUSES)]
    seconds[5] = 60e-6
    held_up, usual = block_means(seconds, recorded), block_means(seconds, recorded, strays=False)
    assert max(held_up) > 1.5 * min(held_up)
    assert max(usual) < 1.02 * min(usual)
    assert len(held_up) == len(usual) == len(seconds) // (PAUSES if recorded else 4)


def test_a_source_that_is_slow_every_other_time_is_slow() -> None:
    slow = [6e-6, 12e-6] * (2 * PAUSES)
    assert min(block_means(slow, True, strays=False)) >= 8e-6
    assert min(block_means(slow, True)) == pytest.approx(9e-6)


MIDDLE = 4 * SMALL
SIZES = {"middle": MIDDLE, "large": COUNT, "larger": 2 * COUNT}
RIVAL = node("rival", "special 50000")


@pytest.fixture
def special(runner: RunnerClient, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Judged]:
    """Nodes with other code for the small call and for the middle one; the parameter is the warps of their configs."""
    with contextlib.closing(Judged(runner, tmp_path, request.param, SIZES)) as result:
        yield result


def _compiled(judged: Judged) -> dict[int, list[list[int]]]:
    """Elements of the calls that each config was compiled for, by warps: a list for each time."""
    results: dict[int, list[list[int]]] = {}
    for candidate, warps, counts in judged.builder.counts:
        if candidate == "node":
            results.setdefault(warps, []).append(counts)
    return results


ALL, FIRST, REST = [SMALL, MIDDLE, COUNT, 2 * COUNT], [COUNT, 2 * COUNT], [SMALL, MIDDLE]


@pytest.mark.parametrize("special", [(16, 8, 4, 2)], indirect=True)
def test_a_config_that_is_behind_where_most_calls_share_their_code_is_compiled_for_no_others(
    special: Judged,
) -> None:
    result = special.judge.judge(job("node", "special 48000", RIVAL))
    assert _compiled(special) == {16: [ALL], 8: [ALL], 4: [FIRST], 2: [FIRST]}
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
    built = _compiled(special)
    assert (built[2], built[4], built[16]) == ([ALL], [ALL], [FIRST, REST])
    assert (result.outcome, result.config, result.measurements) == (Outcome.OK, {"num_warps": 16}, 4)
    assert set(result.seconds) == set(SIZES)
    assert result.log2_ratio == pytest.approx(math.log2(30 / 50 / 4), abs=0.3)


@pytest.mark.parametrize("special", [(4, 4, 16)], indirect=True)
def test_one_that_is_wrong_at_the_small_call_is_never_the_best(special: Judged) -> None:
    result = special.judge.judge(job("node", "narrow 48000", RIVAL))
    assert _compiled(special)[16] == [FIRST, REST]
    assert (result.outcome, result.config) == (Outcome.OK, {"num_warps": 4})
    assert {config["num_warps"] for config, _ in special.trials.timed["node"]} == {4}
