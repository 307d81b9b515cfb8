"""Traces of sources: each config of each is traced once, and what is asked for together is traced together."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

from forecast_autotune.records import Config
from forecast_harness.sandbox.jobs import Fault, JobResult, JobStatus, SandboxJob
from forecast_harness.search.forecasters.source_traces import SourceTraces
from forecast_harness.search.records import SearchTarget, TargetKind
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
        which, grids = list(range(len(texts))), [[1]] * len(texts)
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
        (found,) = traces.get("one", CONFIGS)
        assert traces.get("broken", CONFIGS) == ()
    assert warps(list(found.texts)) == [1, 2, 4, 8]
    first, second = [asked for asked in cells.asked if asked]
    assert first == {"one": [1, 2], "broken": [1, 2]}
    assert second == {"one": [4, 8], "two": [1]}


def test_idle_sandboxes_share_the_configs_of_a_source() -> None:
    many = [replace(BASE.configs[0], num_warps=1 << n) for n in range(40)]
    idle = [8]
    cells = Sandboxes()
    split: list[list[int]] = []

    def noted(jobs: Sequence[SandboxJob]) -> list[JobResult]:
        split.append([len(job.payload["configs"]) for job in jobs])
        return cells(jobs)

    with contextlib.closing(SourceTraces(TARGET)) as traces:
        traces.trace_in(noted, lambda: idle[0])
        (found,) = traces.get("one", many)
        assert set(found.texts) == set(many)
        idle[0] = 0
        traces.get("two", many)
        idle[0] = 3
        traces.prepare({"three": many, "four": many})
    assert [one for one in split if one] == [[20, 20], [40], [40, 40]]


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
