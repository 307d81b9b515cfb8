"""Kernel Tuner's cache files, which its simulation mode replays, and its T4 results: one file per problem.

Parameters are a config's meta-parameters and launch options together, as Kernel Tuner has no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from forecast_autotune.records import Measurement, Outcome, Problem, Scalar
from forecast_autotune.store.exchange.exports.tuned_problem import ExportReport, TunedProblem, file_stem

_FAILURES = {Outcome.COMPILE_ERROR: "CompilationFailedConfig"}
_OTHER_FAILURE = "RuntimeFailedConfig"
_INVALIDITY = {
    Outcome.OK: "correct",
    Outcome.COMPILE_ERROR: "compile",
    Outcome.INCORRECT: "correctness",
    Outcome.TIMEOUT: "timeout",
}
_T4_SCHEMA = "1.0.0"


def write_kernel_tuner(folder: Path, problems: Sequence[TunedProblem]) -> ExportReport:
    """Write a cache file for each problem into a folder. Raises `OSError`."""
    report = ExportReport()
    for tuned, rows, parameters in _usable(problems, report):
        header = {
            "device_name": tuned.problem.device.name,
            "kernel_name": tuned.problem.kernel.name,
            "problem_size": _problem_size(tuned.problem),
            "tune_params_keys": list(parameters),
            "tune_params": parameters,
            "objective": "time",
        }
        cache = {_key(values, parameters): _cache_row(values, row) for values, row in rows}
        report.write(folder / f"{file_stem(tuned.problem)}.json", {**header, "cache": cache}, indent=0)
    return report


def write_kernel_tuner_t4(folder: Path, problems: Sequence[TunedProblem]) -> ExportReport:
    """Write T4 results for each problem into a folder. Raises `OSError`."""
    report = ExportReport()
    for tuned, rows, _ in _usable(problems, report):
        results = [_t4_row(values, row) for values, row in rows]
        data = {"schema_version": _T4_SCHEMA, "results": results}
        report.write(folder / f"{file_stem(tuned.problem)}_T4.json", data)
    return report


_Rows = list[tuple[dict[str, Scalar], Measurement]]


def _usable(
    problems: Sequence[TunedProblem], report: ExportReport
) -> list[tuple[TunedProblem, _Rows, dict[str, list[Scalar]]]]:
    """Each problem with its rows of the kernel's own source, and the values of each parameter."""
    found = []
    for tuned in problems:
        rows = [
            (m.candidate.config.parameters(), m) for m in tuned.rows.values() if m.candidate.is_base_variant
        ]
        names = dict.fromkeys(name for values, _ in rows for name in values)
        rows = [(values, row) for values, row in rows if len(values) == len(names)]
        if not rows:
            report.left_out.append(
                f"{tuned.problem.kernel.name}: no two of its configs have the same parameters"
            )
            continue
        values_of = {n: sorted({values[n] for values, _ in rows}, key=_order) for n in names}
        found.append((tuned, rows, values_of))
        report.problems += 1
        report.measurements += len(rows)
    return found


def _order(value: Scalar) -> tuple[bool, float, str]:
    number = isinstance(value, int | float)
    return not number, float(value) if number else 0.0, str(value)  # type: ignore[arg-type]


def _key(values: dict[str, Scalar], parameters: dict[str, list[Scalar]]) -> str:
    return ",".join(str(values[name]) for name in parameters)


def _problem_size(problem: Problem) -> list[int | str]:
    return [int(k) if k.lstrip("-").isdigit() else k for k in problem.key]


def _stamp(row: Measurement) -> str:
    return row.at or datetime.fromtimestamp(0, UTC).isoformat(timespec="seconds")


def _compile_ms(row: Measurement) -> float:
    return 1000.0 * row.compile_s if row.compile_s is not None else 0.0


def _cache_row(values: dict[str, Scalar], row: Measurement) -> dict[str, Any]:
    timed = {"times": [row.ms]} if row.ok else {}
    return {
        **values,
        "time": row.ms if row.ok else _FAILURES.get(row.outcome, _OTHER_FAILURE),
        **timed,
        "compile_time": _compile_ms(row),
        "verification_time": 0,
        "benchmark_time": 0.0,
        "strategy_time": 0,
        "framework_time": 0.0,
        "timestamp": _stamp(row),
    }


def _t4_row(values: dict[str, Scalar], row: Measurement) -> dict[str, Any]:
    return {
        "timestamp": _stamp(row),
        "configuration": values,
        "times": {
            "compilation_time": _compile_ms(row),
            "framework": 0.0,
            "search_algorithm": 0.0,
            "validation": 0.0,
            "runtimes": [row.ms] if row.ok else [],
        },
        "invalidity": _INVALIDITY.get(row.outcome, "runtime"),
        "correctness": 0 if row.outcome is Outcome.INCORRECT else 1,
        "measurements": [{"name": "time", "value": row.ms, "unit": "ms"}] if row.ok else [],
        "objectives": ["time"],
    }
