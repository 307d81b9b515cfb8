"""All that users of the sandbox need: `SandboxLane` runs a `SandboxJob` within `ResourceLimits`.

A job's `entry` is trusted code in the *judge*, a fresh process that never loads the candidate. It opens a
`Cell`, a second fresh process in which the candidate runs, asks it for outputs and judges those. With a module
`judging` and a module `inside` of the caller's, and arrays that go as bytes::

    # judging.py: runs in the judge
    def main(work: JobContext) -> CellAnswer:
        with work.cell() as cell:
            cell.ask("inside:prepare", {"file": "solution.py"})
            answer = cell.ask("inside:call", {"name": "run"}, inputs)
        return CellAnswer({"correct": agree(answer.arrays["out"])})

    # inside.py: runs in the cell, next to the candidate; its answers are untrusted
    def prepare(payload, arrays, state):
        state["module"] = load(payload["file"])

`forecast_harness.verify.verification_job` and `forecast_harness.verify.launch_cell` are such a pair.

A candidate's fault raises `CandidateFault` from `ask`; uncaught, it becomes the job's status. Trusted code
raises `Suspicion` to quarantine a candidate. Any other exception of trusted code is an `infra_error`, so an
answer must be read with suspicion: one without the array that was asked for is the candidate's fault, and an
uncaught `KeyError` over it would not be. While one cell is timed, `freeze()` the others.
"""

from forecast_harness.sandbox.cell import CandidateFault, Cell, Suspicion
from forecast_harness.sandbox.containment.levels import ContainmentLevel, strongest_level
from forecast_harness.sandbox.jobs import (
    CellAnswer,
    Fault,
    JobResult,
    JobStatus,
    ResourceLimits,
    SandboxError,
    SandboxJob,
    TensorBytes,
    WireError,
)
from forecast_harness.sandbox.judge_process import JobContext
from forecast_harness.sandbox.lane import SandboxLane

__all__ = [
    "CandidateFault",
    "Cell",
    "CellAnswer",
    "ContainmentLevel",
    "Fault",
    "JobContext",
    "JobResult",
    "JobStatus",
    "ResourceLimits",
    "SandboxError",
    "SandboxJob",
    "SandboxLane",
    "Suspicion",
    "TensorBytes",
    "WireError",
    "strongest_level",
]
