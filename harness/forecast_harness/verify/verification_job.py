"""The verification job: reads the pack, opens a cell for the candidate, runs the trials."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from forecast_autotune.errors import RecordError
from forecast_harness.sandbox.cell import CandidateFault
from forecast_harness.sandbox.jobs import CellAnswer, Fault
from forecast_harness.sandbox.judge_process import JobContext
from forecast_harness.targets.packs.schema import Language, Pack
from forecast_harness.verify.examiner import SolutionExaminer
from forecast_harness.verify.launch_cell import arithmetic_settings
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.problem import DrawSpec, LaunchCase, VerificationProblem, problem_of
from forecast_harness.verify.tolerance import raw_bytes, same_bits
from forecast_harness.verify.verdict import Reason, ReasonCode

SOLUTION_FILE = "solution.py"
_SHARE_OF_LIMIT = 0.3
"""The share of a cell's wall seconds after which no launch beyond the trials begins."""


def main(work: JobContext) -> CellAnswer:
    """Examine one solution of one pack. The payload has `pack`, `entry`, `language`, `plan`, `seed`.

    The value has `reasons`, `trials`, `checked` and `facts`. A broken pack raises `RecordError`, which the lane
    reports as the harness's own failure.
    """
    request = work.payload
    pack, plan = Pack.from_json(request["pack"]), VerificationPlan.from_json(request["plan"])
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, work.cell() as cell:
        # Drawn after the candidate's process began, so that no copy of it is in there.
        nonce = request["seed"] or os.urandom(16).hex()
        problem = problem_of(pack, Path(folder))
        judge = SolutionExaminer(pack, problem, cell, plan, hashlib.sha256(nonce.encode()).digest())
        judge.ends = time.perf_counter() + _SHARE_OF_LIMIT * work.limits.wall_s
        try:
            reasons = (
                judge.prepare(SOLUTION_FILE, request["entry"], Language(request["language"]))
                or judge.examine()
            )
        except CandidateFault as fault:
            reasons = [reason_of_fault(fault, judge)]
    return CellAnswer(verification_answer(judge, reasons, nonce))


def verification_answer(
    judge: SolutionExaminer, reasons: Sequence[Reason], nonce: str, **facts: Any
) -> dict[str, Any]:
    """A verification's value: `reasons`, `trials`, `checked` and `facts`; the judge's seed is made of the `nonce`."""
    worst = judge.worst_error_ratio
    error = float(f"{worst:.4g}") if worst < 1e30 else None
    facts = {
        **judge.facts,
        **facts,
        "seed": nonce,
        "error_over_limit": error,
        "arithmetic": arithmetic_settings(),
    }
    checked = judge.checked_launches.to_json()
    return {
        "reasons": [r.to_json() for r in reasons],
        "trials": judge.trials,
        "checked": checked,
        "facts": facts,
    }


def admit(work: JobContext) -> CellAnswer:
    """Check one pack without any candidate. The payload has `pack`; the value is a list of sentences."""
    pack = Pack.from_json(work.payload["pack"])
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        try:
            results = admission_failures(pack, problem_of(pack, Path(folder)))
        except RecordError as error:
            results = [str(error)]
    return CellAnswer(results)


_CODE_BY_FAULT: dict[Fault, ReasonCode] = {
    Fault.TIMEOUT: ReasonCode.TIMEOUT,
    Fault.CPU_TIME: ReasonCode.TIMEOUT,
    Fault.EXIT_UNFINISHED: ReasonCode.ESCAPE,
    Fault.FORBIDDEN_CALL: ReasonCode.ESCAPE,
    Fault.FORGED: ReasonCode.ESCAPE,
    Fault.KILLED: ReasonCode.ESCAPE,
    Fault.RAN_WHILE_STOPPED: ReasonCode.ESCAPE,
}


def reason_of_fault(error: CandidateFault, judge: SolutionExaminer) -> Reason:
    """The reason for a candidate's fault."""
    detail: Any = str(error)
    code = _CODE_BY_FAULT.get(error.fault, ReasonCode.FAILS)
    if "StateDictError" in detail:
        code = ReasonCode.STATE_DICT
    return Reason(code, detail[:2000], f"after {judge.trials} launches")


OutputTensors = list[torch.Tensor]


def admission_failures(pack: Pack, problem: VerificationProblem) -> list[str]:
    """Why this pack must not be used; empty if it may be.

    Every workload, and two drawn ones, must accept the reference's own result and reject: zeros, each
    input copied into the output, a constant, wrong shapes, a swapped dtype, and results nearly right (one
    percent off, one element off, the last row missing, two rows swapped). Also refused: an output that does
    not depend on the inputs, since any solution could then ignore them.
    """
    generator = torch.Generator().manual_seed(0)
    results: list[str] = []
    axes = [w.axes for w in pack.checked_workloads] + [None] * 2
    for axis_values in axes:
        how = DrawSpec("normal", "contiguous", generator)
        case, another = problem.case(axis_values, how), problem.case(axis_values, how)
        right = _exact_outputs(pack, case)
        if right is None:
            continue
        if not any(t.numel() for t in right):
            continue
        finding, _ = case.check(right)
        if finding:
            results.append(
                f"{case.label}: refuses its own reference rounded to the output dtype: {finding[1]}"
            )
            continue
        results += [
            f"{case.label}: accepts {name}"
            for name, wrong in _wrong_results(case, right, public=axis_values is not None)
            if not case.check(wrong)[0]
        ]
        stale = _exact_outputs(pack, another)
        if (
            stale is not None
            and all(a.shape == b.shape for a, b in zip(stale, right, strict=True))
            and not case.check(stale)[0]
        ):
            results.append(f"{case.label}: accepts the result of other inputs, so it does not depend on them")
    return results


def _exact_outputs(pack: Pack, case: LaunchCase) -> OutputTensors | None:
    """The exact result in the output dtypes, by the checker's own reference."""
    make: Callable[[], Sequence[torch.Tensor]] | None = case.right
    return None if make is None else list(make())


def _wrong_results(case: LaunchCase, right: OutputTensors, public: bool) -> list[tuple[str, OutputTensors]]:
    """Wrong results by name. A result that is right by chance (a sum of one element is a copy) does not count
    at a drawn size; at a public one it shows that the trivial answer is the answer there."""
    wrong: list[tuple[str, OutputTensors]] = []

    def add(name: str, change: Callable[[torch.Tensor], torch.Tensor], trivial: bool = False) -> None:
        outputs = [change(t) for t in right]
        same = all(map(same_bits, outputs, right))
        if not same or (trivial and public):
            wrong.append((name, outputs))

    add("zeros", torch.zeros_like, trivial=True)
    add("a constant", lambda t: torch.full_like(t, _mean(t)), trivial=True)
    add("another shape", lambda t: t.unsqueeze(0))
    add("a missing row", lambda t: t.reshape(-1)[:-1])
    add("another dtype", lambda t: t.to(torch.int64 if t.dtype == torch.float64 else torch.float64))
    add("no output written", _unwritten_tail)
    for name, tensor in case.tensors.items():
        add(f"a copy of {name}", partial(_copy_of_input, tensor), trivial=True)
    add("results too large by a hundredth", _scaled_by_one_percent)
    add("one wrong element", _one_element_wrong)
    add("the last row left out", _without_last_row)
    add("the first two rows swapped", _rows_swapped)
    return wrong


def _mean(tensor: torch.Tensor) -> float:
    return float(tensor.double().nan_to_num(0, 0, 0).mean())


def _unwritten_tail(tensor: torch.Tensor) -> torch.Tensor:
    result = tensor.clone(memory_format=torch.contiguous_format)
    if tensor.numel():
        raw_bytes(result)[-tensor.element_size() :] = 255 if tensor.is_floating_point() else 77
    return result


def _copy_of_input(source: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    flat = source.reshape(-1)
    if flat.numel() == 0:
        return torch.zeros_like(like)
    times = -(-like.numel() // flat.numel())
    return flat.repeat(times)[: like.numel()].to(like.dtype).reshape(like.shape)


def _scaled_by_one_percent(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor + 1 if tensor.dtype != torch.bool else ~tensor
    factor = 1 + max(0.01, 2 * torch.finfo(tensor.dtype).eps)
    return (tensor.double() * factor).to(tensor.dtype)


def _one_element_wrong(tensor: torch.Tensor) -> torch.Tensor:
    result = tensor.clone().reshape(-1)
    middle = result.numel() // 2
    if result.dtype == torch.bool:
        result[middle] = ~result[middle]
    elif not result.is_floating_point():
        result[middle] += 1
    else:
        size = tensor.double().nan_to_num(0, 0, 0).square().mean().sqrt()
        result[middle] = (result[middle].double() + 0.5 * size).to(result.dtype)
    return result.reshape(tensor.shape)


def _without_last_row(tensor: torch.Tensor) -> torch.Tensor:
    result = tensor.clone()
    if result.dim():
        result[-1] = 0
    return result


def _rows_swapped(tensor: torch.Tensor) -> torch.Tensor:
    result = tensor.clone()
    if result.dim() and result.shape[0] > 1:
        result[0], result[1] = tensor[1].clone(), tensor[0].clone()
    return result
