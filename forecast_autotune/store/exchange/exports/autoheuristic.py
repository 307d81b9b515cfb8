"""Logs as PyTorch's AutoHeuristic collects them, for its scripts that learn a decision tree from measured choices.

One text file per operation and device, where AutoHeuristic would have put it: a line of JSON on the device and the
features, a line of column names, then a row per choice with its milliseconds (`inf` for one that failed). Only
products of two matrices that were tuned under torch.compile have the features that the scripts expect.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forecast_autotune.records import Argument, Candidate, Device, Measurement
from forecast_autotune.store.exchange.exports.tuned_problem import ExportReport, TunedProblem

OPERATIONS = ("mm", "addmm")
"""Whose logs the scripts read; the two matrices of a product are the last two operands before the result."""
_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
_BLOCKS = ("BLOCK_M", "BLOCK_K", "BLOCK_N")


def write_autoheuristic(folder: Path, problems: Sequence[TunedProblem]) -> ExportReport:
    """Write `<device>/<operation>.txt` files into a folder. Raises `OSError`."""
    report = ExportReport()
    files: dict[tuple[Device, str], list[tuple[dict[str, Any], TunedProblem]]] = defaultdict(list)
    for tuned in problems:
        features = _features(tuned)
        if features is None:
            report.left_out.append(
                f"{tuned.problem.kernel.name}: no product of two matrices under torch.compile"
            )
            continue
        files[tuned.problem.device, tuned.problem.kernel.name].append((features, tuned))
    for (device, name), rows in files.items():
        numbers = [k for k, v in rows[0][0].items() if type(v) is int]
        words = [k for k in rows[0][0] if k not in numbers]
        about = {
            "shared_memory": device.shared_memory_bytes,
            "device_capa": [int(device.arch[:-1] or 0), int(device.arch[-1:] or 0)],
            "name": name,
            "numerical_features": numbers,
            "categorical_features": words,
        }
        lines = [json.dumps(about), ",".join([*rows[0][0], "choice", "feedback"])]
        for features, tuned in rows:
            for candidate, row in tuned.rows.items():
                if (choice := choice_name(candidate)) is not None:
                    values = [str(v) for v in features.values()]
                    lines.append(",".join([*values, choice, _feedback(row)]))
                    report.measurements += 1
            report.problems += 1
        path = folder / device.name.replace(" ", "_") / f"{name}.txt"
        report.write_text(path, "\n".join(lines) + "\n")
    return report


def choice_name(candidate: Candidate) -> str | None:
    """A candidate as AutoHeuristic names it; None for one that it has no name for."""
    library, _, name = candidate.variant.partition("::")
    if library == "aten":
        return f"extern_{name}"
    given = dict(candidate.config.kwargs)
    if library != "triton" or any(block not in given for block in _BLOCKS):
        return None
    blocks = "_".join(f"{block.replace('_', '-')}={given[block]}" for block in _BLOCKS)
    config = candidate.config
    return f"type=triton_{blocks}_numstages={config.num_stages}_numwarps={config.num_warps}"


def _feedback(row: Measurement) -> str:
    return str(row.ms if row.ok else math.inf)


def _features(tuned: TunedProblem) -> dict[str, Any] | None:
    """What AutoHeuristic notes of a product [m, k] x [k, n], in its order."""
    problem = tuned.problem
    operands = [a for a in problem.arguments if a.name.startswith("in")]
    if problem.kernel.language != "inductor" or problem.kernel.name not in OPERATIONS or len(operands) < 2:
        return None
    left, right = operands[-2:]
    if len(left.shape) != 2 or len(right.shape) != 2:
        return None
    (m, k), n = left.shape, right.shape[1]
    found: dict[str, Any] = {"m": m, "k": k, "n": n, "mat1_dtype": _dtype(left), "mat2_dtype": _dtype(right)}
    for name, operand in (("mat1", left), ("mat2", right)):
        found |= {f"{name}_stride_{i}": stride for i, stride in enumerate(operand.stride)}
    found |= {"mat1_iscontig": _is_contiguous(left), "mat2_iscontig": _is_contiguous(right)}
    if problem.kernel.name == "mm":
        precise = "precision=highest" in problem.key
        found["using_tf32"] = not precise if left.dtype in ("fp32", "float32") else "not_float_32"
    return found


def _dtype(operand: Argument) -> str:
    return f"torch.{_DTYPES.get(operand.dtype, operand.dtype)}"


def _is_contiguous(operand: Argument) -> bool:
    rows, columns = operand.shape
    return operand.stride == (columns, 1) or (rows == 1 and operand.stride[1] == 1)
