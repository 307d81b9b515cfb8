"""All that users of the sandbox need: `with Lane() as lane: lane.run(Job(...), Limits(...))`.

A job's `entry` is trusted code in the *judge*, a fresh process that never loads the candidate. It opens a
`Cell`, a second fresh process in which the candidate runs, asks it for outputs and judges those::

    # forecast_harness/verify/worker.py: runs in the judge
    def main(work: Work) -> Answer:
        inputs = {"x": tensors.pack(torch.randn(64, 64))}
        with work.cell() as cell:
            cell.ask("forecast_harness.verify.inside:prepare", {"file": "solution.py"})
            answer = cell.ask("forecast_harness.verify.inside:call", {"name": "custom_kernel"}, inputs)
        got = tensors.unpack(answer.arrays["out"])         # bytes; compare here, clock: answer.seconds
        return Answer({"correct": bool(...)})

    # forecast_harness/verify/inside.py: runs in the cell, next to the candidate; its answers are untrusted
    def prepare(payload, arrays, state):
        state["module"] = inside.load(payload["file"])

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
