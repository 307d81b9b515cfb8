"""Nodes that nobody waits for any more, and what is not waited for on their account."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from forecast_autotune.records import Outcome
from forecast_harness.clocks.compilation.requests import BuildRequest, BuildResult
from forecast_harness.records import ConfirmationJob, FullVerification, NodeJob, VerificationJob
from forecast_harness.trials.machine_code import node_builds
from forecast_harness.trials.protocol import LaneFailure
from tests.harness.machine_code.judged_sums import SEED, TARGET, Judged, job, verification


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


def test_what_is_given_up_ends_at_once_and_the_judge_goes_on(judged: Judged) -> None:
    hanging = Hanging(judged)
    judged.host.give_up = hanging.ended.set  # type: ignore[method-assign]
    with hanging.waited_for(judged):
        judged.judge.give_up()
    assert not judged.host.closed
    assert judged.judge.judge(job("fast", "honest 24000")).outcome is Outcome.OK
    judged.judge.confirm(ConfirmationJob((SEED,), {}, SEED, TARGET))
    assert judged.host.asked == ["seed"]


def test_verification_has_a_lane_beside_those_of_nodes_and_confirmation_follows_at_once(
    judged: Judged,
) -> None:
    pytest.importorskip("triton")
    pytest.importorskip("torch")
    from forecast_harness.trials.machine_code.opening import MachineCodeLanes

    hanging = Hanging(judged)
    judged.host.give_up = hanging.ended.set  # type: ignore[method-assign]
    lanes = MachineCodeLanes([judged.judge], 1, ExitStack())
    try:
        assert lanes.capacity == 1
        verifying = lanes.verify(verification(job("fast", "honest 24000")))
        assert hanging.begun.wait(60)
        found = [lanes.submit(job(f"node-{n}", "honest 40000")) for n in range(3)]
        assert {f.result(60).outcome for f in found} == {Outcome.OK}
        lanes.give_up()
        assert list(lanes.confirm(ConfirmationJob((SEED,), {}, SEED, TARGET)).result(60)) == ["seed"]
        with pytest.raises(LaneFailure, match="ended"):
            verifying.result(60)
        assert not judged.host.closed, "what it has opened for the confirmation would be lost"
        assert lanes.capacity == 1
    finally:
        lanes.close()


def test_a_node_whose_sources_still_compile_is_given_up_without_waiting_for_them(judged: Judged) -> None:
    asked, never = threading.Event(), Future[BuildResult]()

    def submit(request: BuildRequest) -> Future[BuildResult]:
        asked.set()
        return never

    judged.builder.submit = submit  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as pool:
        judging = pool.submit(judged.judge.judge, job("fast", "honest 24000"))
        assert asked.wait(60)
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
    submit, slow, asked = tuned.builder.submit, Future[BuildResult](), list[BuildRequest]()
    ended: list[Future[BuildResult]] = []
    tuned.builder.end = lambda building: ended.append(building) is None  # type: ignore[method-assign,func-returns-value]
    tuned.builder.seconds_of = lambda building: float(building.running())  # type: ignore[method-assign]

    def delayed(request: BuildRequest) -> Future[BuildResult]:
        if request.options.get("num_warps") != 2:
            return submit(request)
        asked.append(request)
        if begun:  # otherwise it waits for a worker
            slow.set_running_or_notify_cancel()
        return slow

    tuned.builder.submit = delayed  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as pool:
        judging = pool.submit(tuned.judge.judge, job("fast", "honest 24000"))
        if not begun:
            with pytest.raises(TimeoutError):
                judging.result(2.0)  # far longer than the patience
            slow.set_result(submit(asked[0]).result(60))
        found = judging.result(60)
    assert found.outcome is Outcome.OK
    assert (found.measurements, found.facts.get("late_configs", 0)) == ((3, 1) if begun else (4, 0))
    assert ended == ([slow] if begun else [])


def test_all_of_a_node_is_compiled_before_what_is_of_a_later_one(tuned: Judged) -> None:
    submit, asked = tuned.builder.submit, list[BuildRequest]()

    def noting(request: BuildRequest) -> Future[BuildResult]:
        asked.append(request)
        return submit(request)

    tuned.builder.submit = noting  # type: ignore[method-assign]
    when = []
    for name, source in (("first", "honest 24000"), ("second", "honest 23000")):
        asked.clear()
        assert tuned.judge.judge(job(name, source)).outcome is Outcome.OK
        assert len(asked) > 1
        (began,) = {request.began for request in asked}
        when.append(began)
    assert 0 < when[0] < when[1]


def test_nodes_that_wait_for_their_configs_are_given_up_before_they_are_chosen(
    judged: Judged, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, may_go, chosen = threading.Event(), threading.Event(), list[str]()

    def configs(
        job: NodeJob, check: Callable[[], None] = lambda: None
    ) -> tuple[Sequence[Mapping[str, Any]], str]:
        waits.set()
        assert may_go.wait(60)
        check()
        chosen.append(job.node.id)
        return [{}], ""

    monkeypatch.setattr(judged.trials, "configs", configs)
    with ThreadPoolExecutor(1) as pool:
        judging = pool.submit(judged.judge.judge, job("fast", "honest 24000"))
        assert waits.wait(60)
        judged.judge.give_up()
        may_go.set()
        with pytest.raises(LaneFailure, match="given up"):
            judging.result(60)
    assert chosen == []


def test_the_end_ends_compilations_that_have_begun_and_calls_none_a_failure(judged: Judged) -> None:
    asked, running, told = threading.Event(), Future[BuildResult](), list[float]()
    running.set_running_or_notify_cancel()

    def submit(request: BuildRequest) -> Future[BuildResult]:
        asked.set()
        return running

    def give_up(after_s: float = 3.0) -> None:
        told.append(after_s)
        if after_s == 0:  # as a worker's lane does, whose job has just begun
            request = judged.trials.request(job("fast", "honest 24000").node, {})
            running.set_result(BuildResult(request, infrastructure="the job was given up"))

    judged.builder.submit = submit  # type: ignore[method-assign]
    judged.builder.give_up = give_up  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as pool:
        judging = pool.submit(judged.judge.judge, job("fast", "honest 24000"))
        assert asked.wait(60)
        judged.judge.give_up()
        assert told == [3.0], "what has just begun may be of use to others"
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
