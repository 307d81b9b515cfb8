"""Helion's logs: the CSV of trials, and the trace beside it, which alone has the final timings, the choice and dates.

The last timings of a run are taken side by side and decide; no row of the CSV has them. Where both files lie beside
each other, either name stands for both, and the trace is read.
"""

from __future__ import annotations

import ast
import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from forecast_autotune.errors import RecordError
from forecast_autotune.python_parser import parse_expression
from forecast_autotune.records import Candidate, Config, Kernel, Measurement, Outcome, Problem, digest
from forecast_autotune.records.candidate import IN_TURNS
from forecast_autotune.records.json_fields import LARGEST_MS, MALFORMED, read_number
from forecast_autotune.records.named_lines import csv_fields, numbered_lines
from forecast_autotune.records.table import read_lines
from forecast_autotune.store.formats.protocol import (
    IMPORTED_FROM,
    Format,
    Reading,
    Row,
    flat_parameters,
    reason,
)

HELION_PROTOCOL = "helion"
"""Timing protocol of imported measurements: Helion's, interleaved or not as its release had it."""
CHOSEN = "chosen"
"""A field of the measurement whose config the run ended with: true."""
_COLUMNS = {"status", "perf_ms", "compile_time_s", "config"}
_OUTCOMES = {
    "ok": Outcome.OK,
    "deduplicated": Outcome.OK,  # with the time of another config that generates the same code
    "error": Outcome.RUNTIME_ERROR,
    "timeout": Outcome.TIMEOUT,
    "accuracy_error": Outcome.INCORRECT,
    "source_rejected": Outcome.INCORRECT,  # generates the code of a config that failed the check
}
_LAUNCH = {"num_warps": 4, "num_stages": 1}
"""Launch options and what Helion takes where a config leaves them out."""
_TRIALS = ("trial", "rebenchmark")
_TRACE = re.compile(r'\A\s*\{(?=[^\n]*"event"\s*:)(?=[^\n]*"run_id"\s*:)(?=[^\n]*"algorithm"\s*:)')
_HELD = 20_000
"""Rows of a run that are held until its choice is known."""


def _is_log(path: Path, head: str) -> bool:
    try:
        return _COLUMNS.issubset(csv_fields(head.partition("\n")[0]))
    except csv.Error:
        return False


def _read_log(reading: Reading) -> Iterator[Row]:
    """Read a log, one problem for each run that it names. Lists in a config become one parameter per place.

    Raises `RecordError` for what is not such a log; a row that breaks a rule, or is cut off, is refused.
    """
    path = reading.path
    if (trace := reading.beside(f"{path.stem}.trace.jsonl")) is not None:
        yield from _read_trace(replace(reading, path=trace))
        return
    columns: list[str] | None = None
    runs_about = {str(about.get("run_id")): about for about in _described(reading, f"{path.stem}.meta.jsonl")}
    problems: dict[str, Problem] = {}
    try:
        for number, raw in numbered_lines(path, reading.refuse, streamed=True):
            if columns is None:
                columns = csv_fields(raw.decode("utf-8", "replace"))
                if not _COLUMNS.issubset(columns):
                    break
                continue
            try:
                if fields := csv_fields(raw.decode("utf-8")):
                    row: dict[str, Any] = dict(zip(columns, fields, strict=False))
                    run, status = str(row.get("run_id") or ""), str(row["status"])
                    if run not in problems:
                        problems[run] = _problem(reading, runs_about.get(run, {}), run, path.stem)
                    config = _written_config(str(row["config"]))
                    row |= {name: float(row[name]) for name in ("perf_ms", "compile_time_s") if row[name]}
                    if (measurement := _measurement(reading, problems[run], status, config, row)) is not None:
                        yield problems[run], measurement
            except (*MALFORMED, SyntaxError, csv.Error) as error:
                if str(error).startswith(str(path)):
                    raise  # no row's fault
                reading.refuse_row(reason(error), f":{number}")
    except csv.Error as error:
        raise RecordError(f"{path}: unreadable: {error}") from error
    if not _COLUMNS.issubset(columns or ()):
        raise RecordError(f"{path}: no Helion log: it needs columns {sorted(_COLUMNS)}")


@dataclass
class _Run:
    """A run of a trace, and rows of it that are held back."""

    problem: Problem
    rows: list[Measurement] = field(default_factory=list)

    def taken(self) -> Iterator[Row]:
        """Its rows, which are held no longer."""
        rows, self.rows = self.rows, []
        return ((self.problem, row) for row in rows)

    def choose(self, candidate: Candidate) -> None:
        """Note on the last measurement of a candidate that the run chose it."""
        for n in reversed(range(len(self.rows))):
            if self.rows[n].candidate == candidate and self.rows[n].ok:
                self.rows[n] = replace(self.rows[n], extra={**self.rows[n].extra, CHOSEN: True})
                return


def _read_trace(reading: Reading) -> Iterator[Row]:
    """Read a trace: the trials, then the timings in turns of those that were left, with dates."""
    path = reading.path
    name = path.name.removesuffix(".trace.jsonl")
    descriptions = list(_described(reading, f"{name}.meta.jsonl"))
    runs: dict[str, _Run] = {}
    for number, data in read_lines(path, reading.refuse, streamed=True):
        event, run = data.get("event"), str(data.get("run_id"))
        try:
            if run not in runs and event in _TRIALS:
                about = _of_run(descriptions, len(runs), data.get("config_id"))
                runs[run] = _Run(_problem(reading, about, str(about.get("run_id") or run), name))
            if event in _TRIALS:
                turns = IN_TURNS if event == "rebenchmark" else ""
                row = _measurement(
                    reading, runs[run].problem, str(data["status"]), _config(data["config"]), data, turns
                )
                runs[run].rows += [] if row is None else [row]
            elif event == "selected" and run in runs:
                runs[run].choose(Candidate(_config(data["config"])))
            if run in runs and (event == "run_end" or len(runs[run].rows) >= _HELD):
                yield from runs[run].taken()
        except MALFORMED as error:
            if str(error).startswith(str(path)):
                raise
            reading.refuse_row(reason(error), f":{number}")
    for each in runs.values():
        yield from each.taken()


def _described(reading: Reading, name: str) -> Iterator[Mapping[str, Any]]:
    """Descriptions of the runs, from the file beside the log."""
    if (path := reading.beside(name)) is not None:
        yield from (data for _, data in read_lines(path, reading.refuse))


def _of_run(descriptions: list[Mapping[str, Any]], number: int, config_id: object) -> Mapping[str, Any]:
    """The description of a trace's run, whose id it does not share: the one in its place, if it has its configs."""
    in_place = descriptions[number : number + 1]
    return next((a for a in (*in_place, *descriptions) if config_id in (a.get("configs") or ())), {})


def _measurement(
    reading: Reading, problem: Problem, status: str, config: Config, row: Mapping[str, Any], turns: str = ""
) -> Measurement | None:
    if (outcome := _OUTCOMES.get(status)) is None:
        if status != "started":
            reading.left_out[f"rows of status {status:.40}, which is no verdict on a config"] += 1
        return None
    ms = read_number(row["perf_ms"], "perf_ms") if outcome is Outcome.OK and row["perf_ms"] != "" else None
    if outcome is Outcome.OK and (ms is None or not 0 < ms <= LARGEST_MS):
        raise RecordError(f"perf_ms must be positive for an ok row, got {row['perf_ms']!r:.40}")
    return Measurement(
        problem.id,
        Candidate(config),
        outcome,
        median_ms=ms,
        compile_s=read_number(row.get("compile_time_s") or None, "compile_time_s"),
        protocol=HELION_PROTOCOL + turns,
        at=str(row.get("timestamp") or ""),
        extra={} if status in ("ok", "error", "timeout") else {"message": status},
    )


def _problem(reading: Reading, about: Mapping[str, Any], run: str, name: str) -> Problem:
    hardware = about.get("hardware_info")
    device_name = hardware.get("device_name") if isinstance(hardware, Mapping) else about.get("hardware")
    where = reading.device_named(device_name)
    source = str(about.get("kernel_source") or "")
    kernel = Kernel(str(about.get("kernel_name") or name), "helion", source, digest(source) if source else "")
    key = [str(about[k]) for k in ("input_shapes", "dtypes") if about.get(k)]
    about = {IMPORTED_FROM: HELION_PROTOCOL}
    return Problem.of(kernel, (), where, key=key, identity=[run or name], extra=about)


def _written_config(text: str) -> Config:
    """The config that a call in text form stands for. Raises `ValueError` or `SyntaxError` for all but literals."""
    call = parse_expression(text)
    if not isinstance(call, ast.Call) or call.args or any(k.arg is None for k in call.keywords):
        raise RecordError(f"a config is a call with keywords, got {text!r:.60}")
    return _config({str(k.arg): ast.literal_eval(k.value) for k in call.keywords})


def _config(values: Mapping[str, Any]) -> Config:
    values = dict(values)
    warps, stages = (values.pop(name, default) for name, default in _LAUNCH.items())
    return Config.from_json(
        {"kwargs": dict(flat_parameters(values)), "num_warps": warps, "num_stages": stages}
    )


LOG = Format(
    HELION_PROTOCOL, "Helion", "CSV of `HELION_AUTOTUNE_LOG`",
    _is_log, _read_log,
    "1.4, 1.5.1", ("each trial", "error, wrong result, time-out", "in `.meta.jsonl`", "in `.meta.jsonl`", "no"),
    "final timings, the choice",
)  # fmt: skip
TRACE = Format(
    HELION_PROTOCOL, "Helion", "`.trace.jsonl` beside it, read in its place",
    lambda path, head: bool(_TRACE.match(head)), _read_trace,
    "1.5.1",
    ("trials; final ones in turns", "wrong result, error, time-out", "in `.meta.jsonl`", "the same", "each row"),
    "questions to language models",
)  # fmt: skip
