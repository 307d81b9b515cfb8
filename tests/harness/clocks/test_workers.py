"""Compile workers: each request has its own answer, the earliest goes first, and nobody waits for ever."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import replace

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from forecast_harness.clocks.compilation.workers import (
    BuildRequest,
    BuildResult,
    CallCase,
    CompileWorkers,
    TensorArgument,
)
from forecast_harness.sandbox.jobs import ResourceLimits, SandboxError, SandboxJob
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


def case(elements: int, dtype: str) -> CallCase:
    result = TensorArgument(dtype, (elements,), (1,))
    return CallCase({"x": result, "out": replace(result, role="output")})


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
    with CompileWorkers(FACTS, 1) as result:
        yield result


def results(waiting: Sequence[Future[BuildResult]]) -> list[BuildResult]:
    return [one.result(PATIENT_S) for one in waiting]


def assert_compiled(*found: BuildResult) -> None:
    for one in found:
        assert (one.error, one.host_code, one.infrastructure) == ("", "", "")
        assert len(one.programs) == len(CASES)


def kept_busy(workers: CompileWorkers) -> Future[BuildResult]:
    """A compilation that keeps the only worker."""
    busy = workers.submit(request(STAYS))
    wait_until(lambda: workers.seconds_of(busy) > 0, "a compilation that keeps the worker")
    return busy


def end(workers: CompileWorkers, building: Future[BuildResult]) -> None:
    """Again and again, as a lane that is about to begin a job is not told."""

    def has_ended() -> bool:
        workers.end(building)
        return building.done()

    wait_until(has_ended, "the end of a compilation")
    assert building.result().infrastructure
    assert not building.result().error


def test_each_config_of_a_source_has_its_own_programs(opened: CompileWorkers) -> None:
    question = [request(block, num_warps=n) for block, n in ((64, 4), (128, 4), (64, 2))] + [
        request(64, OTHER)
    ]
    result = results([opened.submit(one) for one in question])
    assert_compiled(*result)
    codes = {kernel.image for one in result for program in one.programs for kernel in program.kernels}
    assert len(codes) == len(question) * len(CASES), "each is told apart from all others"


def test_one_that_fails_does_not_take_the_others_with_it(opened: CompileWorkers) -> None:
    odd = replace(request(32), options={"num_warps": float("nan")})  # type: ignore[dict-item]
    nonsense = replace(request(32), launches=(5, 5))  # type: ignore[arg-type]
    question = [request(64), request(RAISES), request(33), request(DIES), odd, nonsense, request(128)]
    first, raises, uneven, dies, nan, wrong, last = (opened.submit(one) for one in question)
    assert_compiled(*results([first, last]))
    assert "no grid for so small a block" in raises.result().error
    assert "power of 2" in uneven.result().error
    assert "status 9" in dies.result().error
    assert "NaN" in nan.result().infrastructure
    assert isinstance(wrong.exception(PATIENT_S), TypeError)


def test_what_is_cancelled_while_it_waits_is_not_compiled(opened: CompileWorkers) -> None:
    busy = kept_busy(opened)
    waiting = [opened.submit(request(block)) for block in (32, 64, 128)]
    assert [opened.seconds_of(one) for one in waiting] == [0.0] * 3
    assert opened.end(waiting[1])
    assert waiting[1].cancelled()
    end(opened, busy)
    assert_compiled(*results([waiting[0], waiting[2]]))


def test_a_compilation_that_nobody_waits_for_frees_its_worker(opened: CompileWorkers) -> None:
    busy, second = kept_busy(opened), opened.submit(request(64))
    assert opened.idle == 0
    end(opened, busy)
    assert not opened.seconds_of(busy)
    assert not opened.end(busy), "it has ended: nothing else is"
    assert_compiled(second.result(PATIENT_S))
    wait_until(lambda: opened.idle == 1, "nobody asks any more")


def test_nobody_waits_for_workers_that_are_closed() -> None:
    with CompileWorkers(FACTS, 1) as workers:
        question = [kept_busy(workers), *(workers.submit(request(block)) for block in (32, 64, 128))]
    _, hanging = wait_for(question, PATIENT_S)
    assert not hanging
    assert question[0].result().infrastructure
    assert [one.cancelled() for one in question] == [False] + [True] * 3
    with pytest.raises(RuntimeError):
        workers.submit(request(32))
    with pytest.raises(SandboxError, match="have ended"):
        workers.run_jobs([SandboxJob("m:f")], ResourceLimits())
