"""A trusted job: two solutions of a pack in windows of the judge, on the host instead of a device."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from forecast_harness.clocks.paired_comparison import CANDIDATE
from forecast_harness.sandbox.judge_process import JobContext
from forecast_harness.targets.packs.schema import Language, Pack
from forecast_harness.verify.examiner import SolutionExaminer
from forecast_harness.verify.launch_windows import AuditedCells, AuditRejected, AuditUnavailable, WindowAudit
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.problem import problem_of


def main(work: JobContext) -> dict[str, Any]:
    """`pack`, `files` of incumbent and candidate, `seconds` of a launch, `claimed` (log of the ratio), `rounds`,
    `device`.
    """
    asked = work.payload
    pack, plan = Pack.from_json(asked["pack"]), VerificationPlan(device=asked["device"])
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        cells = [stack.enter_context(work.cell()) for _ in range(2)]
        problem = problem_of(pack, Path(folder))
        judges = [SolutionExaminer(pack, problem, cell, plan, bytes([n])) for n, cell in enumerate(cells)]
        for judge, file in zip(judges, asked["files"], strict=True):
            judge.prepare(file, "run", Language.TORCH)
        workloads = pack.timed_workloads(plan.device)
        seconds = {w.name: asked["seconds"] for w in workloads}
        audit = WindowAudit(asked["claimed"], 0.005)
        try:
            opened = AuditedCells(work, stack, pack, judges, cells, seconds, workloads, plan.device)
            verdict = audit.run(opened, judges[CANDIDATE].rng, asked["rounds"], 60.0)
        except AuditRejected as found:
            return {"caught": found.which, "reasons": [r.to_json() for r in found.reasons]}
        except AuditUnavailable as error:
            return {"unavailable": str(error)}
    return {**audit.to_json(), "verdict": str(verdict)}
