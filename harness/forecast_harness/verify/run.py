"""`verify(pack, solution)`: one verdict, from a fresh process of a sandbox lane."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from forecast_harness.packs.schema import Pack, Solution
from forecast_harness.sandbox.api import Job, Lane, Limits, Result, Status
from forecast_harness.verify.needs import limits_for
from forecast_harness.verify.plan import Plan
from forecast_harness.verify.screen import screen
from forecast_harness.verify.verdict import Code, Reason, Verdict

THOROUGH = Plan()
LIMITS = Limits(wall_s=120.0, trusted_s=300.0)


def verify(
    pack: Pack,
    solution: Solution,
    lane: Lane,
    *,
    plan: Plan = THOROUGH,
    limits: Limits = LIMITS,
    seed: str = "",
) -> Verdict:
    """Judge `solution` with fresh hidden seeds.

    `seed` repeats an earlier verification (`facts.seed`); a candidate that knows it can cheat, so leave it
    empty for anything but a look at a failure. Nothing the candidate does raises here; a pack with a workload
    that is too large raises `RecordError`.
    """
    begin = time.perf_counter()
    payload = job_payload(pack, solution, plan, seed)
    job = Job(
        "forecast_harness.verify.worker:main", payload, {**solution.files, "solution.py": solution.source}
    )
    result = lane.run(job, limits_for(pack, limits, plan.device))
    facts: dict[str, Any] = {"harness": harness_hash(), "plan": plan.to_json(), "pack_id": pack.id}
    facts |= {"solution_id": solution.id, "language": str(solution.language)}
    facts["level"] = lane.level.name.lower()
    reasons: tuple[Reason, ...]
    trials = 0
    if result.status is Status.OK:
        reasons = tuple(Reason(Code(r["code"]), r["detail"], r["trial"]) for r in result.value["reasons"])
        trials = int(result.value["trials"])
        facts |= result.value["facts"]
    else:
        reasons = (lane_reason(result),)
    return Verdict(
        pack.definition.name,
        solution.name,
        reasons,
        screen(solution.source),
        trials,
        time.perf_counter() - begin,
        facts,
    )


def refuse(pack: Pack, lane: Lane, limits: Limits = LIMITS) -> list[str]:
    """Why a pack must not be used; empty if its checker rejects every wrong result tried."""
    result = lane.run(Job("forecast_harness.verify.worker:admit", {"pack": pack.to_json()}), limits)
    if result.status is not Status.OK:
        return [f"its reference could not be run: {result.fault} {result.detail}"]
    return [str(s) for s in result.value]


def job_payload(pack: Pack, solution: Solution, plan: Plan, seed: str = "") -> Mapping[str, Any]:
    """What the judge is told; the candidate's own process gets none of it."""
    return {
        "pack": pack.to_json(),
        "entry": solution.entry,
        "language": str(solution.language),
        "plan": plan.to_json(),
        "seed": seed,
    }


def lane_reason(result: Result) -> Reason:
    """The reason that a lane's result amounts to, where the judge gave none."""
    code = Code.HARNESS
    if result.status is Status.SUSPICIOUS:
        code = Code.ESCAPE
    elif result.status is Status.CANDIDATE_ERROR:
        code = Code.TIMEOUT if "time" in str(result.fault) else Code.FAILS
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
