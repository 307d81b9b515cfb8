"""`verify(pack, solution)`: one verdict, from a fresh process of a sandbox lane."""

from __future__ import annotations

import ast
import hashlib
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from forecast_autotune import python_parser
from forecast_harness.sandbox.api import JobResult, JobStatus, ResourceLimits, SandboxJob, SandboxLane
from forecast_harness.targets.packs.schema import Pack, Solution
from forecast_harness.verify.plan import VerificationPlan, cell_limits_for
from forecast_harness.verify.verdict import CheckedLaunches, Reason, ReasonCode, SolutionVerdict

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
    payload = verification_payload(pack, solution, plan, seed)
    files = {**solution.files, "solution.py": solution.source}
    job = SandboxJob("forecast_harness.verify.verification_job:main", payload, files)
    facts = {"pack_id": pack.id, "solution_id": solution.id, "language": str(solution.language)}
    names = pack.definition.name, solution.name, solution.source
    return run_verification(job, lane, cell_limits_for(pack, limits, plan.device), names, plan, facts)[0]


def run_verification(
    job: SandboxJob,
    lane: SandboxLane,
    limits: ResourceLimits,
    names: tuple[str, str, str],
    plan: VerificationPlan,
    facts: Mapping[str, Any],
) -> tuple[SolutionVerdict, JobResult]:
    """The verdict of a judge's answer, see `verification_answer`, and the job's result.

    `names`: the pack, the solution and its text.
    """
    begin = time.perf_counter()
    result = lane.run(job, limits)
    value: Mapping[str, Any] = {}
    reasons: tuple[Reason, ...] = (reason_of_result(result),)
    if result.status is JobStatus.OK:
        value = result.value
        reasons = tuple(Reason.from_json(r) for r in value["reasons"])
    verdict = SolutionVerdict(
        *names[:2],
        reasons,
        static_hints(names[2]),
        int(value.get("trials", 0)),
        CheckedLaunches.from_json(value["checked"]) if "checked" in value else CheckedLaunches(),
        time.perf_counter() - begin,
        {
            "harness": harness_hash(),
            "plan": plan.to_json(),
            "level": lane.level.name.lower(),
            **facts,
            **value.get("facts", {}),
        },
    )
    return verdict, result


def check_pack(pack: Pack, lane: SandboxLane, limits: ResourceLimits = VERIFICATION_LIMITS) -> list[str]:
    """Why a pack must not be used; empty if its checker rejects every wrong result tried."""
    result = lane.run(
        SandboxJob("forecast_harness.verify.verification_job:admit", {"pack": pack.to_json()}), limits
    )
    if result.status is not JobStatus.OK:
        reason = result.detail.strip().rpartition("\n")[2]  # of a traceback, whose beginning tells nothing
        return [f"its reference could not be run: {result.fault}, {reason}"]
    return [str(s) for s in result.value]


def verification_payload(
    pack: Pack, solution: Solution, plan: VerificationPlan, seed: str = ""
) -> Mapping[str, Any]:
    """The judge's payload; the candidate's own process gets none of it."""
    return {
        "pack": pack.to_json(),
        "entry": solution.entry,
        "language": str(solution.language),
        "plan": plan.to_json(),
        "seed": seed,
    }


def reason_of_result(result: JobResult) -> Reason:
    """The reason for a lane's result, where the judge gave none."""
    code = ReasonCode.HARNESS
    if result.status is JobStatus.SUSPICIOUS:
        code = ReasonCode.ESCAPE
    elif result.status is JobStatus.CANDIDATE_ERROR:
        code = ReasonCode.TIMEOUT if "time" in str(result.fault) else ReasonCode.FAILS
    return Reason(code, f"{result.fault}: {result.detail}"[:2000])


@cache
def harness_hash() -> str:
    """A hash of the code that judges and times: labels of different harnesses are not comparable."""
    result = hashlib.sha256()
    root = Path(__file__).parents[1]
    for folder in ("verify", "trials", "clocks", "sandbox"):
        for file in sorted((root / folder).rglob("*.py")):
            result.update(file.name.encode() + b"\0" + file.read_bytes())
    return result.hexdigest()[:16]


_MODULES = {
    "gc": "walks all objects of the process",
    "inspect": "looks at its callers",
    "ctypes": "reads and writes arbitrary memory",
    "importlib": "imports by name",
    "subprocess": "starts programs",
    "socket": "uses the network",
    "threading": "starts threads",
    "multiprocessing": "starts processes",
    "pickle": "unpickles, which executes",
    "signal": "handles or sends signals",
    "atexit": "runs code at exit",
    "tempfile": "keeps files",
    "pathlib": "touches files",
    "sys": "reaches the interpreter",
    "os": "reaches the operating system",
}
_CALLS = {"exec", "eval", "compile", "__import__", "open", "globals", "vars", "setattr", "getattr"}
_ATTRIBUTES = {
    "data_ptr": "asks for addresses",
    "_version": "asks for version counters",
    "_getframe": "looks at its callers",
    "Stream": "makes streams",
    "CUDAGraph": "records graphs",
    "elapsed_time": "handles timing events",
    "perf_counter": "asks the clock",
    "allow_tf32": "changes precision",
    "_make_subclass": "makes tensor subclasses",
}


def static_hints(source: str) -> tuple[str, ...]:
    """A sentence on each suspicious construct, in the order of lines; a syntax error is one, too."""
    try:
        tree = python_parser.parse_module(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        return (f"cannot be parsed: {error}",)
    results: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
            for name in names:
                if problem := _MODULES.get(name.partition(".")[0]):
                    results.append((line, f"line {line}: imports {name}, which {problem}"))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _CALLS:
            literal = len(node.args) > 1 and isinstance(node.args[1], ast.Constant)
            if node.func.id != "getattr" or not literal:
                results.append((line, f"line {line}: calls {node.func.id}"))
        elif isinstance(node, ast.Attribute) and node.attr in _ATTRIBUTES:
            results.append((line, f"line {line}: {node.attr} {_ATTRIBUTES[node.attr]}"))
        elif isinstance(node, ast.Assign):
            results += [
                (line, f"line {line}: replaces {ast.unparse(t)}")
                for t in node.targets
                if _is_foreign_assignment(t)
            ]
        elif isinstance(node, ast.Try):
            results.append((line, f"line {line}: has a fallback for exceptions"))
    return tuple(dict.fromkeys(text for _, text in sorted(results)))


def _is_foreign_assignment(target: ast.expr) -> bool:
    root = target
    while isinstance(root, ast.Attribute):
        root = root.value
    return isinstance(target, ast.Attribute) and isinstance(root, ast.Name) and root.id in ("torch", "time")
