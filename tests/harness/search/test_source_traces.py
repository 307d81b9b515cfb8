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
        value = [{"ttir": texts, "grids": [[1]] * len(texts), "arguments": arguments}]
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
