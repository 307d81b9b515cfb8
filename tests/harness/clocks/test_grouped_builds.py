"""Configs of one source that a worker compiles together: each is answered as if asked for alone."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from forecast_harness.clocks.compilation.requests import (
    BuildRequest,
    BuildResult,
    CallCase,
    TensorArgument,
)
from forecast_harness.clocks.compilation.workers import CompileWorkers
from forecast_harness.sandbox.jobs import JobResult, ResourceLimits, SandboxJob
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox needs Linux")

FACTS = {"arch": 90, "properties": {}}
PATIENT_S = 120.0
"""For what takes a few seconds."""
RAISES, DIES, STAYS = 3, 5, 7
"""Sizes of blocks at which the kernel's own Python does not go on."""
SOURCE = f"""import os, time, triton, triton.language as tl

def grid(meta, args):
    if meta["BLOCK"] == {RAISES}:
        raise ValueError("no grid for so small a block")
    if meta["BLOCK"] == {DIES}:
        os._exit(9)
    if meta["BLOCK"] == {STAYS}:
        time.sleep(3600)
    return (triton.cdiv(args["n"], meta["BLOCK"]),)

@triton.jit
def kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)
"""
OTHER = SOURCE.replace("2 * tl.load", "3 * tl.load")
LAUNCHER = (
    SOURCE
    + """
def run(x, out):
    kernel[(1,)](x, out, 200, BLOCK=256)
"""
)


def case(elements: int, dtype: str) -> CallCase:
    made = TensorArgument(dtype, (elements,), (1,))
    return CallCase({"x": made, "out": replace(made, role="output")})


CASES = case(200, "float32"), case(1001, "float16")
"""Each has machine code of its own."""


def request(block: int, source: str = SOURCE, num_warps: int = 4) -> BuildRequest:
    launches = tuple(
        {"grid": [1], "scalars": {"n": n}, "meta": {"BLOCK": block}, "options": {"num_warps": num_warps}}
        for n in (200, 1001)
    )
    return BuildRequest("candidate", source, "kernel", CASES, launches=launches)


@pytest.fixture(scope="module")
def opened() -> Iterator[CompileWorkers]:
    with CompileWorkers(FACTS, 1) as found:
        yield found


class NotedJobs:
    """Workers, and how many requests each of their jobs was about."""

    def __init__(self, workers: CompileWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
        self.workers, self.jobs = workers, list[int]()
        run = workers._run_job

        def noting(job: SandboxJob, limits: ResourceLimits, **more: Any) -> JobResult:
            self.jobs.append(len(job.payload["requests"]))
            return run(job, limits, **more)

        monkeypatch.setattr(workers, "_run_job", noting)

    def alone(self, *asked: BuildRequest) -> list[BuildResult]:
        """Each is asked for when the one before it is answered."""
        found = [self.workers.submit(one).result(PATIENT_S) for one in asked]
        assert self.jobs == [1] * len(asked)
        self.jobs.clear()
        return found

    def at_once(self, *asked: BuildRequest) -> list[Future[BuildResult]]:
        """All of them wait before the only worker takes the first."""
        busy = self.workers.submit(request(STAYS, SOURCE + "# another source\n"))
        wait_until(lambda: self.workers.seconds_of(busy) > 0, "a compilation that keeps the worker")
        waiting = [self.workers.submit(one) for one in asked]
        self.jobs.clear()
        self.end(busy)
        return waiting

    def end(self, building: Future[BuildResult]) -> None:
        """Again and again, as a lane that is about to begin a job is not told."""

        def has_ended() -> bool:
            self.workers.end(building)
            return building.done()

        wait_until(has_ended, "the end of a compilation")
        assert building.result().infrastructure
        assert not building.result().error


@pytest.fixture
def noted(opened: CompileWorkers, monkeypatch: pytest.MonkeyPatch) -> NotedJobs:
    return NotedJobs(opened, monkeypatch)


def results(waiting: Sequence[Future[BuildResult]]) -> list[BuildResult]:
    return [one.result(PATIENT_S) for one in waiting]


def assert_alike(found: Sequence[BuildResult], wanted: Sequence[BuildResult]) -> None:
    """But for how long they took."""
    assert [replace(one, seconds=0.0) for one in found] == [replace(one, seconds=0.0) for one in wanted]


def assert_compiled(*found: BuildResult) -> None:
    for one in found:
        assert (one.error, one.host_code, one.infrastructure) == ("", "", "")
        assert len(one.programs) == len(CASES)


@pytest.mark.slow
def test_configs_of_a_source_that_wait_give_the_programs_of_each_alone_in_fewer_jobs(
    noted: NotedJobs,
) -> None:
    asked = [
        request(block, source, num_warps)
        for block, num_warps in ((64, 4), (128, 4), (64, 2), (256, 8), (32, 1))
        for source in (SOURCE, OTHER)
    ]
    wanted = noted.alone(*asked)
    assert_compiled(*wanted)
    codes = {kernel.image for one in wanted for program in one.programs for kernel in program.kernels}
    assert len(codes) == len(asked) * len(CASES), "each is told apart from all others"
    assert_alike(results(noted.at_once(*asked)), wanted)
    assert noted.jobs == [4, 4, 1, 1]


def test_one_that_raises_has_its_own_error_and_the_others_their_programs(noted: NotedJobs) -> None:
    asked = [request(64), request(RAISES), request(33), request(128)]
    wanted = noted.alone(*asked)
    assert "no grid for so small a block" in wanted[1].error
    assert "power of 2" in wanted[2].error
    found = results(noted.at_once(*asked))
    assert_compiled(found[0], found[3])
    assert_alike(found, wanted)
    assert noted.jobs == [4, 1, 1], "what raised is asked alone why"


def test_one_whose_cell_dies_does_not_take_the_others_with_it(noted: NotedJobs) -> None:
    asked = [request(64), request(DIES), request(128)]
    wanted = noted.alone(*asked)
    assert "status 9" in wanted[1].error
    found = results(noted.at_once(*asked))
    assert_compiled(found[0], found[2])
    assert_alike(found, wanted)
    assert noted.jobs == [3, 1, 1, 1]


def test_one_that_cannot_be_told_to_a_cell_does_not_take_the_others_with_it(noted: NotedJobs) -> None:
    odd = replace(request(32), options={"num_warps": float("nan")})  # type: ignore[dict-item]
    nonsense = replace(request(32), launches=(5, 5))  # type: ignore[arg-type]
    first, second, third, fourth = noted.at_once(request(64), odd, nonsense, request(128))
    assert_compiled(*results([first, fourth]))
    assert "NaN" in second.result(PATIENT_S).infrastructure
    assert isinstance(third.exception(PATIENT_S), TypeError)


def test_one_that_nobody_waits_for_any_more_is_ended_once_it_is_alone(noted: NotedJobs) -> None:
    asked = [request(64), request(STAYS), request(128), request(256)]
    began = time.monotonic()
    waiting = noted.at_once(*asked)
    wait_until(lambda: noted.workers.seconds_of(waiting[1]) > 0.5, "the job of all four")
    shares = [noted.workers.seconds_of(one) for one in waiting]
    assert sum(shares) <= 2 * (time.monotonic() - began), "each has twice its share of the time"
    assert min(shares) > 0
    noted.end(waiting[1])
    first, _, *others = results(waiting)
    assert_compiled(first, *others)
    assert noted.jobs == [4, 1, 1, 1, 1]
    assert not any(map(noted.workers.seconds_of, waiting))
    noted.workers.end(waiting[1])  # it has ended: nothing else is
    assert_compiled(*results([noted.workers.submit(request(64))]))


def test_one_is_not_blamed_for_what_it_was_compiled_with(noted: NotedJobs) -> None:
    waiting = noted.at_once(request(64), request(STAYS), request(128))
    wait_until(lambda: noted.workers.seconds_of(waiting[0]) > 0.5, "the job of all three")
    assert not noted.workers.end(waiting[0]), "it may be another that takes so long"
    assert_compiled(waiting[0].result(PATIENT_S))
    wait_until(lambda: noted.workers.seconds_of(waiting[1]) > 0, "the one that stays, alone")
    noted.end(waiting[1])
    assert_compiled(waiting[2].result(PATIENT_S))


def test_what_was_taken_together_is_not_begun_again_once_all_is_given_up(noted: NotedJobs) -> None:
    waiting = noted.at_once(request(64), request(STAYS), request(128))
    wait_until(lambda: noted.workers.seconds_of(waiting[0]) > 0.5, "the job of all three")
    assert not noted.workers.end(waiting[0])
    wait_until(lambda: noted.workers.seconds_of(waiting[1]) > 0, "the one that stays, alone")
    noted.jobs.clear()

    def given_up() -> bool:
        noted.workers.give_up(0.0)
        return all(one.done() for one in waiting)

    wait_until(given_up, "the end of all")
    assert all(one.result().infrastructure for one in waiting[1:])
    assert noted.jobs == [], "the last one was not begun any more"


def test_several_of_one_job_can_be_ended(noted: NotedJobs) -> None:
    waiting = noted.at_once(request(STAYS), request(64), request(STAYS, num_warps=2))
    wait_until(lambda: noted.workers.seconds_of(waiting[0]) > 0, "the job of all three")
    noted.end(waiting[0])
    wait_until(lambda: noted.workers.seconds_of(waiting[2]) > 0, "the other that stays, alone")
    noted.end(waiting[2])
    assert_compiled(waiting[1].result(PATIENT_S))


def test_what_is_cancelled_while_it_waits_is_not_compiled(noted: NotedJobs) -> None:
    busy = noted.workers.submit(request(STAYS))
    wait_until(lambda: noted.workers.seconds_of(busy) > 0, "a compilation that keeps the worker")
    waiting = [noted.workers.submit(request(block)) for block in (32, 64, 128)]
    assert [noted.workers.seconds_of(one) for one in waiting] == [0.0] * 3
    noted.jobs.clear()
    noted.workers.end(waiting[1])
    assert waiting[1].cancelled()
    noted.end(busy)
    assert_compiled(*results([waiting[0], waiting[2]]))
    assert noted.jobs == [2]


def test_functions_that_launch_kernels_are_never_taken_together(noted: NotedJobs) -> None:
    asked = [
        BuildRequest("candidate", LAUNCHER, "run", CASES, options={"num_warps": warps}) for warps in (1, 2, 4)
    ]
    wanted = noted.alone(*asked)
    assert_compiled(*wanted)
    assert_alike(results(noted.at_once(*asked)), wanted)
    assert noted.jobs == [1, 1, 1]


def test_workers_are_idle_once_all_that_waited_has_ended(noted: NotedJobs) -> None:
    waiting = noted.at_once(request(64), request(RAISES), request(128))
    assert noted.workers.idle == 0
    results(waiting)
    wait_until(lambda: noted.workers.idle == 1, "nobody asks any more")


def assert_nobody_waits(asked: Sequence[Future[BuildResult]]) -> None:
    _, hanging = wait_for(asked, PATIENT_S)
    assert not hanging
    assert all(one.cancelled() or one.result().infrastructure for one in asked)


def test_nobody_waits_for_workers_that_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    with CompileWorkers(FACTS, 1) as workers:
        noted = NotedJobs(workers, monkeypatch)
        asked = noted.at_once(request(STAYS), *(request(block) for block in (32, 64, 128, 256, 512)))
        wait_until(lambda: workers.seconds_of(asked[0]) > 0, "the job of the first four")
    assert_nobody_waits(asked)
    assert [one.cancelled() for one in asked] == [False] * 4 + [True] * 2
    assert noted.jobs == [4], "none is begun again"
    with pytest.raises(RuntimeError):
        workers.submit(request(32))


def test_nobody_waits_for_what_is_asked_for_while_workers_close(monkeypatch: pytest.MonkeyPatch) -> None:
    with CompileWorkers(FACTS, 1) as workers:
        asked = [workers.submit(request(STAYS))]
        wait_until(lambda: workers.seconds_of(asked[0]) > 0, "a compilation that keeps the worker")
        cancel = workers._waiting.cancel

        def cancel_and_ask() -> None:
            cancel()
            if len(asked) == 1:  # from another thread, in the midst of `close`
                asked.append(workers.submit(request(32)))

        monkeypatch.setattr(workers._waiting, "cancel", cancel_and_ask)
    assert len(asked) == 2
    assert_nobody_waits(asked)
