"""`verify(pack, solution)`: one verdict, from a fresh process of a sandbox lane."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from forecast_harness.sandbox.api import JobResult, JobStatus, ResourceLimits, SandboxJob, SandboxLane
from forecast_harness.targets.packs.schema import Pack, Solution
from forecast_harness.verify.cell_limits import cell_limits_for
from forecast_harness.verify.checked_launches import CheckedLaunches
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.screen import static_hints
from forecast_harness.verify.verdict import Reason, ReasonCode, SolutionVerdict

DEFAULT_PLAN = VerificationPlan()
VERIFICATION_LIMITS = ResourceLimits(wall_s=240.0, trusted_s=300.0, cpu_s=240.0)
"""Enough for a solution that `torch.compile` compiles for several sizes, on a processor that others use, too."""


def verify(
    pack: Pack,
    solution: Solution,
    lane: SandboxLane,
    *,
    plan: VerificationPlan = DEFAULT_PLAN,
    limits: ResourceLimits = VERIFICATION_LIMITS,
    seed: str = "",
) -> SolutionVerdict:
    """Judge `solution` with fresh hidden seeds.

    `seed` repeats an earlier verification (`facts.seed`); a candidate that knows it can cheat, so leave it
    empty for anything but a look at a failure. Nothing the candidate does raises here; a pack with a workload
    that is too large raises `RecordError`.
    """
    begin = time.perf_counter()
    payload = verification_payload(pack, solution, plan, seed)
    job = SandboxJob(
        "forecast_harness.verify.verification_job:main",
        payload,
        {**solution.files, "solution.py": solution.source},
    )
    result = lane.run(job, cell_limits_for(pack, limits, plan.device))
    facts: dict[str, Any] = {"harness": harness_hash(), "plan": plan.to_json(), "pack_id": pack.id}
    facts |= {"solution_id": solution.id, "language": str(solution.language)}
    facts["level"] = lane.level.name.lower()
    reasons: tuple[Reason, ...]
    trials, checked = 0, CheckedLaunches()
    if result.status is JobStatus.OK:
        reasons = tuple(
            Reason(ReasonCode(r["code"]), r["detail"], r["trial"]) for r in result.value["reasons"]
        )
        trials = int(result.value["trials"])
        checked = CheckedLaunches.from_json(result.value["checked"])
        facts |= result.value["facts"]
    else:
        reasons = (reason_of_result(result),)
    return SolutionVerdict(
        pack.definition.name,
        solution.name,
        reasons,
        static_hints(solution.source),
        trials,
        checked,
        time.perf_counter() - begin,
        facts,
    )


def check_pack(pack: Pack, lane: SandboxLane, limits: ResourceLimits = VERIFICATION_LIMITS) -> list[str]:
    """Why a pack must not be used; empty if its checker rejects every wrong result tried."""
    result = lane.run(
        SandboxJob("forecast_harness.verify.verification_job:admit", {"pack": pack.to_json()}), limits
    )
    if result.status is not JobStatus.OK:
        return [f"its reference could not be run: {result.fault} {result.detail}"]
    return [str(s) for s in result.value]


def verification_payload(
    pack: Pack, solution: Solution, plan: VerificationPlan, seed: str = ""
) -> Mapping[str, Any]:
    """What the judge is told; the candidate's own process gets none of it."""
    return {
        "pack": pack.to_json(),
        "entry": solution.entry,
        "language": str(solution.language),
        "plan": plan.to_json(),
        "seed": seed,
    }


def reason_of_result(result: JobResult) -> Reason:
    """The reason that a lane's result amounts to, where the judge gave none."""
    code = ReasonCode.HARNESS
    if result.status is JobStatus.SUSPICIOUS:
        code = ReasonCode.ESCAPE
    elif result.status is JobStatus.CANDIDATE_ERROR:
        code = ReasonCode.TIMEOUT if "time" in str(result.fault) else ReasonCode.FAILS
    return Reason(code, f"{result.fault}: {result.detail}"[:2000])


@cache
def harness_hash() -> str:
    """A name for the code that judged and timed: labels of different harnesses are not comparable."""
    found = hashlib.sha256()
    root = Path(__file__).parents[1]
    for folder in ("verify", "timing", "sandbox"):
        for file in sorted((root / folder).glob("*.py")):
            found.update(file.name.encode() + b"\0" + file.read_bytes())
    return found.hexdigest()[:16]
