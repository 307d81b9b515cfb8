"""Import of the logs that Helion's autotuner writes with HELION_AUTOTUNE_LOG: one CSV row per config tried.

Older logs hold one run without saying of what; newer ones name each run, and describe it in a file with
`.meta.jsonl` in place of `.csv`. Configs are Python calls in text form: only literals in them are read,
nothing is evaluated.
"""

from __future__ import annotations

import ast
import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from forecast_autotune.errors import RecordError
from forecast_autotune.python_parser import parse_expression
from forecast_autotune.records import Candidate, Config, Device, Kernel, Measurement, Outcome, Problem, digest
from forecast_autotune.records.base import LARGEST_INTEGER, LARGEST_MS
from forecast_autotune.records.json_fields import MALFORMED
from forecast_autotune.records.named_lines import (
    Refuse,
    bounded_refusals,
    csv_fields,
    numbered_lines,
    read_document,
    refuse_row,
)
from forecast_autotune.records.table import Table, read_lines, table_of_problem
from forecast_autotune.store.exchange.kernel_tuner import device_from_name

PROTOCOL = "helion"
"""Timing protocol of imported measurements: Helion's, interleaved or not as its release had it."""
_HEAD = 1 << 16
_COLUMNS = {"status", "perf_ms", "compile_time_s", "config"}
_OUTCOMES = {"ok": Outcome.OK, "error": Outcome.RUNTIME_ERROR, "timeout": Outcome.TIMEOUT}
"""Rows of other statuses (`started`, failures of its workers) are no labels."""
_LAUNCH = {"num_warps": 4, "num_stages": 1}
"""Launch options and what Helion takes where a config leaves them out."""


def is_helion_log(path: Path) -> bool:
    """Whether a file looks like Helion's CSV log; False if unreadable."""
    if not path.is_file():
        return False  # what is read from a pipe is gone for whoever reads it next
    try:
        return _COLUMNS.issubset(csv_fields(read_document(path, _HEAD).partition("\n")[0]))
    except (OSError, RecordError, csv.Error):
        return False


def import_helion(path: Path, device: Device | None = None, *, refuse: Refuse | None = None) -> list[Table]:
    """Read one log as tables, one per run that it names.

    Lists in a config become one parameter per place (`block_sizes[0]`). `device` says where it was measured
    for logs that do not. The toolchain is not known, so such a table is prior knowledge and never answers
    for a problem of its own. A row that a killed run left unfinished is passed over if it is the last.

    Raises `RecordError` for what is not such a log. A row that breaks a rule is one as well, with file and line:
    it is raised or, with `refuse`, handed to that, and the other rows count.
    """
    tables: dict[str, Table] = {}
    refuse = bounded_refusals(path, refuse)
    columns: list[str] | None = None
    torn: RecordError | None = None
    try:
        described = _described(path.with_suffix(".meta.jsonl"), refuse)
        for number, raw in numbered_lines(path, refuse):
            if columns is None:
                columns = csv_fields(raw.decode("utf-8", "replace"))
                if not _COLUMNS.issubset(columns):
                    break
                continue
            if torn is not None:
                refuse_row(torn, refuse)
                torn = None
            try:
                if fields := csv_fields(raw.decode("utf-8")):
                    row = dict(zip(columns, fields, strict=False))
                    _add(tables, row, described, path.stem, device)
            except (*MALFORMED, SyntaxError, csv.Error) as error:
                # The last row of a killed run may be half a row; any other is a mistake.
                torn = RecordError(f"{path}:{number}: {_reason(error)}")
    except (OSError, csv.Error) as error:
        raise RecordError(f"{path}: unreadable: {error}") from error
    if not _COLUMNS.issubset(columns or ()):
        raise RecordError(f"{path}: no Helion log: it needs columns {sorted(_COLUMNS)}")
    return list(tables.values())


def _reason(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)


def _described(path: Path, refuse: Refuse | None) -> dict[str, Mapping[str, Any]]:
    if not path.is_file():
        return {}
    return {str(data.get("run_id")): data for _, data in read_lines(path, refuse)}


def _add(
    tables: dict[str, Table],
    row: Mapping[str, Any],
    described: Mapping[str, Mapping[str, Any]],
    name: str,
    device: Device | None,
) -> None:
    if (outcome := _OUTCOMES.get(str(row["status"]))) is None:
        return
    run = str(row.get("run_id") or "")
    problem = _problem(described.get(run, {}), run, name, device)
    ms = float(row["perf_ms"]) if outcome is Outcome.OK else None
    if ms is not None and not 0 < ms <= LARGEST_MS:
        raise RecordError(f"perf_ms must be positive for an ok row, got {row['perf_ms']!r}")
    compiled = float(row["compile_time_s"]) if row.get("compile_time_s") else None
    candidate = Candidate(_config(str(row["config"])))
    measurement = Measurement(
        problem.id, candidate, outcome, median_ms=ms, compile_s=compiled, protocol=PROTOCOL
    )
    table_of_problem(tables, problem).measurements.append(measurement)


def _problem(about: Mapping[str, Any], run: str, name: str, device: Device | None) -> Problem:
    hardware = about.get("hardware_info")
    named = hardware.get("device_name") if isinstance(hardware, Mapping) else about.get("hardware")
    where = device or (device_from_name(str(named)) if named else None)
    if where is None:
        raise RecordError("the log does not say which device it is of: pass --device-name")
    source = str(about.get("kernel_source") or "")
    kernel = Kernel(str(about.get("kernel_name") or name), "helion", source, digest(source) if source else "")
    key = [str(about[k]) for k in ("input_shapes", "dtypes") if about.get(k)]
    return Problem.of(kernel, (), where, key=key, identity=[run or name])


def _config(text: str) -> Config:
    """The config that a call in text form stands for. Raises `ValueError` or `SyntaxError` for all but literals."""
    call = parse_expression(text)
    if not isinstance(call, ast.Call) or call.args or any(k.arg is None for k in call.keywords):
        raise RecordError(f"a config is a call with keywords, got {text!r:.60}")
    given = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    warps, stages = (given.pop(name, default) for name, default in _LAUNCH.items())
    return Config.from_json(
        {"kwargs": dict(flat_parameters(given)), "num_warps": warps, "num_stages": stages}
    )


def flat_parameters(given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each parameter of a Helion config, its lists spread over numbered ones: `block_sizes[0]`.

    Raises `RecordError` for an integer that no record holds.
    """
    for name, value in given.items():
        if isinstance(value, list | tuple):
            yield from flat_parameters({f"{name}[{i}]": part for i, part in enumerate(value)})
        elif isinstance(value, int) and abs(value) > LARGEST_INTEGER:
            raise RecordError(f"{name} must have 128 bits at most")
        else:
            yield name, value
