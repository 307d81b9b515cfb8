"""Traces of sources: each config of each is traced once, and what is asked for together is traced together."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

import pytest

from forecast_autotune.records import Config
from forecast_harness.records import SearchTarget, TargetKind
from forecast_harness.sandbox.jobs import Fault, JobResult, JobStatus, SandboxJob
from forecast_harness.trials.configs.variant_tracing import SourceTraces
from tests.harness.variant_kernels import DOUBLE, subject, vector_call

BASE = subject(DOUBLE, vector_call(1000))
TARGET = SearchTarget(
    TargetKind.KERNEL, "kernel", "id", "triton", "kernel", "", {"subjects": [BASE.to_json()]}
)
CONFIGS = [replace(BASE.configs[0], num_warps=warps) for warps in (1, 2, 4, 8)]


class Sandboxes:
    """Answer as cells do; what they were asked, by source, run by run."""

    def __init__(self) -> None:
        self.asked: list[dict[str, list[int]]] = []

    def __call__(self, jobs: Sequence[SandboxJob]) -> list[JobResult]:
        self.asked.append(
            {str(j.payload["source"]): [c["num_warps"] for c in j.payload["configs"]] for j in jobs}
        )
        return [self._answer(job) for job in jobs]

    def _answer(self, job: SandboxJob) -> JobResult:
        if job.payload["source"] == "broken":
            return JobResult(JobStatus.CANDIDATE_ERROR, Fault.EXCEPTION)
        texts = [f"ttir of {c['num_warps']} warps" for c in job.payload["configs"]]
        arguments = [a.to_json() for a in vector_call(1000)]
        if job.payload["source"] == "lost" and len(self.asked) == 1:
            return JobResult(JobStatus.INFRA_ERROR, Fault.SERVER_LOST)
        which, grids = list(range(len(texts))), [[1]] * len(texts)
        if job.payload["source"] == "odd":
            return JobResult(JobStatus.OK, value=[{"ttir": texts, "which": [True], "grids": 5, "facts": {}}])
        facts = {str(n): [[[1], None]] for n in which}  # texts that nobody can read
        value = [{"ttir": texts, "which": which, "grids": grids, "arguments": arguments, "facts": facts}]
        return JobResult(JobStatus.OK, value=value)


def warps(configs: Sequence[Config]) -> list[int]:
    return [c.num_warps for c in configs]


def test_only_what_is_missing_is_traced_and_all_of_it_together() -> None:
    cells = Sandboxes()
    with contextlib.closing(SourceTraces(TARGET)) as traces:
        traces.trace_in(cells)
        traces.prepare({"one": CONFIGS[:2], "broken": CONFIGS[:2]})
        traces.prepare({"one": CONFIGS, "broken": CONFIGS, "two": CONFIGS[:1]})
        (result,) = traces.get("one", CONFIGS)
        assert traces.get("broken", CONFIGS) == ()
    assert warps(list(result.texts)) == [1, 2, 4, 8]
    first, second = [request for request in cells.asked if request]
    assert first == {"one": [1, 2], "broken": [1, 2]}
    assert second == {"one": [4, 8], "two": [1]}


def test_a_source_of_which_a_part_cannot_be_traced_has_no_trace() -> None:
    many = [replace(BASE.configs[0], num_warps=1 << n) for n in range(40)]
    cells = Sandboxes()

    def failing(jobs: Sequence[SandboxJob]) -> list[JobResult]:
        lost = JobResult(JobStatus.CANDIDATE_ERROR, Fault.EXCEPTION)
        odd = [any(c["num_warps"] == 2 for c in job.payload["configs"]) for job in jobs]
        return [lost if bad else answer for bad, answer in zip(odd, cells(jobs), strict=True)]

    with contextlib.closing(SourceTraces(TARGET)) as traces:
        traces.trace_in(failing, lambda: 8)
        assert traces.get("one", many) == ()


def test_an_answer_of_another_form_is_no_trace() -> None:
    with contextlib.closing(SourceTraces(TARGET)) as traces:
        traces.trace_in(Sandboxes())
        traces.prepare({"odd": CONFIGS[:1], "one": CONFIGS[:1]})
        assert traces.get("odd", CONFIGS[:1]) == ()
        assert traces.known("one")


@pytest.mark.parametrize(
    "grid", [5, ["x"], [0], [-1], [1.5], [True], [], [1] * 4, [10**39], [1 << 31], {"x": 1}, None]
)
def test_a_grid_that_no_device_launches_is_none(grid: object) -> None:
    pytest.importorskip("torch")
    from forecast_harness.trials.kernel_calls import TimedCall
    from forecast_harness.trials.race_job import _with_facts

    value = {"ttir": ["no module"], "which": [0, None], "grids": [grid, [2, 3]]}
    result = _with_facts(TimedCall.of(BASE), value, 2)
    assert result["grids"] == [None, [2, 3]]
    assert result["facts"] == {"0": [[None, None]]}


@pytest.mark.parametrize("which", [[True, None], [1, None], [-1, None], ["0", None], [0], [0, None, None]])
def test_texts_that_are_not_there_are_no_trace(which: list[object]) -> None:
    pytest.importorskip("torch")
    from forecast_harness.trials.kernel_calls import TimedCall
    from forecast_harness.trials.race_job import _with_facts

    with pytest.raises(ValueError, match="a trace"):
        _with_facts(TimedCall.of(BASE), {"ttir": ["no module"], "which": which, "grids": [[1], [1]]}, 2)
