"""Jobs for the sandbox's tests: launches of a workload whose block lies in the cell, some of them in windows."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from forecast_harness.clocks.paired_comparison import CANDIDATE
from forecast_harness.sandbox.api import CandidateFault, Cell, CellAnswer, JobContext, TensorBytes
from forecast_harness.targets.packs.schema import Language, Pack
from forecast_harness.trials.variants.compilation import BESIDE_ENTRY, VariantCompiler
from forecast_harness.trials.variants.files import VARIANT_FILE, WRITE_ENTRY, binaries_as_arrays
from forecast_harness.verify import examiner as judging
from forecast_harness.verify.examiner import SolutionExaminer
from forecast_harness.verify.launch_windows import AuditedCells, AuditUnavailable, WindowAudit
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.problem import problem_of
from forecast_harness.verify.verdict import ContestantRejected


class Counted:
    """A real cell, of which is noted what it is sent and what it sends; waits before it reads once more."""

    def __init__(self, cell: Cell, wait_s: float) -> None:
        self._cell, self._wait_s = cell, wait_s
        self.log: list[tuple[str, int, int]] = []

    def ask(self, entry: str, payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes]) -> CellAnswer:
        question = entry.partition(":")[2]
        if question == "again":
            time.sleep(self._wait_s)
        answer = self._cell.ask(entry, payload, arrays)
        sent, came = (sum(memoryview(a.data).nbytes for a in one.values()) for one in (arrays, answer.arrays))
        self.log.append((question, sent, came))
        return answer

    def freeze(self) -> None:
        self._cell.freeze()

    def thaw(self) -> None:
        self._cell.thaw()


def launches(work: JobContext) -> dict[str, Any]:
    """Launch the pack's last workload `count` times as it is timed, and check the last one if asked to.

    The value has `codes` (of each launch's reasons), `checked` (those of the check), `log` (question, bytes
    sent, bytes that came) and `block` (bytes of the arguments).
    """
    asked = work.payload
    pack = Pack.from_json(asked["pack"])
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, work.cell() as cell:
        counted = Counted(cell, asked.get("wait_s", 0.0))
        judge = SolutionExaminer(pack, problem_of(pack, Path(folder)), counted, VerificationPlan(), b"seed")
        assert judge.prepare("solution.py", "run", Language.TORCH) == []
        case = judge.timed_case(pack.workloads[-1])
        codes, checked = [], []
        try:
            for n in range(asked["count"]):
                case = case.next(judge.generator) if n else case
                if asked.get("idle"):
                    judge.idle(case)
                reply = judge.timed(case)
                codes.append([str(r.code) for r in reply.reasons])
            if asked.get("check"):
                checked = [str(r.code) for r in judge.checked(reply)]
        except CandidateFault as fault:
            codes.append([f"{fault.fault}: {fault.detail}"])
    return {"codes": codes, "checked": checked, "log": counted.log, "block": case.input_bytes}


def timed_launches(work: JobContext) -> dict[str, Any]:
    """`launches` that were timed of those that were planned, and the `codes` of what was found."""
    pack, plan = Pack.from_json(work.payload["pack"]), VerificationPlan.from_json(work.payload["plan"])
    torch.set_num_threads(1)
    before = judging._MOST_TIMED_S
    judging._MOST_TIMED_S = {"cpu": float(work.payload["most_s"])}
    try:
        with tempfile.TemporaryDirectory() as folder, work.cell() as cell:
            judge = judging.SolutionExaminer(pack, problem_of(pack, Path(folder)), cell, plan, b"seed")
            assert judge.prepare("solution.py", "run", Language.TORCH) == []
            reasons = judge._timed_trials()
    finally:
        judging._MOST_TIMED_S = before
    return {"launches": len(judge._history), "codes": [str(r.code) for r in reasons]}


def audited_windows(work: JobContext) -> dict[str, Any]:
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
        except ContestantRejected as found:
            return {"caught": found.which, "reasons": [r.to_json() for r in found.reasons]}
        except AuditUnavailable as error:
            return {"unavailable": str(error)}
    return {**audit.to_json(), "verdict": str(verdict)}


MARK = b"not compiled anew"


def compile_twice(work: JobContext) -> CellAnswer:
    """The value has the names of all files; the arrays are the machine code, that of the first time marked."""
    calls = work.payload["calls"]
    files = dict(VariantCompiler(work, binaries_as_arrays(work.payload["binaries"])).compiled(calls).files)
    known = {
        name: TensorBytes("uint8", (len(MARK),), MARK) if name.endswith(".cubin") else array
        for name, array in files.items()
    }
    payload = {"file": VARIANT_FILE, "architecture": 90, "calls": calls, "launchers": True}
    with work.cell() as cell:
        cell.ask(WRITE_ENTRY, {}, known)
        again = cell.ask(BESIDE_ENTRY, payload).arrays if known else {}
    return CellAnswer(sorted(files), {n: a for n, a in again.items() if n.endswith(".cubin")})
