"""Export formats by name; each writes files into a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from forecast_autotune.records import Decision, Problem
from forecast_autotune.records.table import Table
from forecast_autotune.store.exchange.exports.autoheuristic import write_autoheuristic
from forecast_autotune.store.exchange.exports.kernel_tuner import write_kernel_tuner, write_kernel_tuner_t4
from forecast_autotune.store.exchange.exports.moe_configs import write_sglang_moe, write_vllm_moe
from forecast_autotune.store.exchange.exports.triton_dejavu import write_triton_dejavu
from forecast_autotune.store.exchange.exports.tuned_problem import ExportReport, TunedProblem, tuned_problems

EXPORT_FORMATS: dict[str, Callable[[Path, Sequence[TunedProblem]], ExportReport]] = {
    "autoheuristic": write_autoheuristic,
    "kernel-tuner": write_kernel_tuner,
    "kernel-tuner-t4": write_kernel_tuner_t4,
    "sglang-moe": write_sglang_moe,
    "triton-dejavu": write_triton_dejavu,
    "vllm-moe": write_vllm_moe,
}


def write_export(
    form: str,
    folder: Path,
    tables: Iterable[Table],
    decisions: Iterable[tuple[Problem, Decision]],
) -> ExportReport:
    """Write tables and decisions in one of `EXPORT_FORMATS` into a folder. Raises `OSError`."""
    return EXPORT_FORMATS[form](folder, tuned_problems(tables, decisions))
