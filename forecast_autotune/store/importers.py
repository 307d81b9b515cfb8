"""Measurements of other tools, read as tables: Kernel Tuner, Helion, FlagGems and Triton's own cache.

None of their files holds source and toolchain, and some name no device: imported rows are prior knowledge of a
kernel, and never answer for a problem of their own. Nothing in them is evaluated.
"""

from __future__ import annotations

import ast
import csv
import json
import math
import re
import sqlite3
import statistics
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from forecast_autotune.errors import RecordError, StoreError
from forecast_autotune.file_access import read_regular
from forecast_autotune.python_parser import parse_expression
from forecast_autotune.records import (
    Argument,
    Candidate,
    Config,
    Device,
    Kernel,
    Measurement,
    Outcome,
    Problem,
    digest,
)
from forecast_autotune.records.bounded_json import decode_document
from forecast_autotune.records.json_fields import LARGEST_MS, LARGEST_PARAMETER, MALFORMED, read_number
from forecast_autotune.records.named_lines import (
    Refuse,
    bounded_refusals,
    csv_fields,
    numbered_lines,
    read_document,
    refuse_row,
)
from forecast_autotune.records.table import Table, read_lines, table_of_problem
from forecast_autotune.store.files import StoreWarning

KERNEL_TUNER_PROTOCOL = "kernel-tuner"
"""Timing protocol of imported measurements: Kernel Tuner's, with whatever observers it ran."""

_KERNEL_TUNER_OUTCOMES = {
    "CompilationFailedConfig": Outcome.COMPILE_ERROR,
    "RuntimeFailedConfig": Outcome.RUNTIME_ERROR,
}
_INVALID = "InvalidConfig"
"""Excluded by the space's own restrictions: not a candidate."""
_LEGACY_FAILURE = 1e20
"""The time that releases before 0.4.3 wrote for a config that could not be built or launched."""

_HEAD = 1 << 16
_CACHE = re.compile(r'"tune_params_keys"\s*:')
_T4 = re.compile(r'\A\s*\{\s*"(metadata|schema_version|results)"\s*:')


def _head_text(path: Path) -> str:
    """The first characters of a file, gzip-compressed or not; empty where it cannot be read."""
    if not path.is_file():
        return ""  # what is read from a pipe is gone for whoever reads it next
    try:
        return read_document(path, _HEAD)
    except (OSError, RecordError):
        return ""


def is_kernel_tuner_cache(path: Path) -> bool:
    """Whether a file looks like Kernel Tuner's output; False if unreadable."""
    text = _head_text(path)
    return bool(_CACHE.search(text) or _T4.match(text))


def import_kernel_tuner(
    path: Path, device: Device | None = None, *, refuse: Refuse | None = None
) -> list[Table]:
    """Read one cache file as the table of one problem: kernel, device, problem size and parameters.

    Tuned parameters become the config's meta-parameters (numbers and words, as they are); `time` in
    milliseconds, or the median of `times` where the single runs are kept, becomes the time. Configs
    that Kernel Tuner's restrictions exclude are no candidates. `device` overrides the file's (some
    files name none). The file holds neither source nor toolchain: such a
    table is prior knowledge and never answers for a problem of its own.

    Raises `RecordError`, naming the file, for anything that is not such a cache. A config that breaks a rule is
    one as well: it is raised or, with `refuse`, handed to that, and the other configs count.
    """
    try:
        text = read_document(path)
    except OSError as error:
        raise RecordError(f"{path}: unreadable: {error}") from error
    if _T4.match(text) and not _CACHE.search(text):
        raise RecordError(
            f"{path}: Kernel Tuner's T4 results name neither kernel nor device: import the cache file "
            "that the same run wrote (tune_kernel(cache=...))"
        )
    data = _decoded(text, path)
    refuse = bounded_refusals(path, refuse)
    try:
        keys, rows = data.get("tune_params_keys"), data.get("cache")
        if (
            not isinstance(keys, list)
            or not all(isinstance(k, str) for k in keys)
            or not isinstance(rows, dict)
        ):
            raise RecordError("it needs tune_params_keys, a list of names, and cache, an object")
        table = Table(_kernel_tuner_problem(data, device, keys))
    except MALFORMED as error:
        raise RecordError(f"{path}: no Kernel Tuner cache ({error})") from error
    for name, row in rows.items():
        try:
            measurement = _kernel_tuner_measurement(table.problem.id, keys, name, row)
        except RecordError as error:
            refuse_row(RecordError(f"{path}: {error}"), refuse)
        else:
            table.measurements += [] if measurement is None else [measurement]
    return [table]


def _decoded(text: str, path: Path) -> Mapping[str, Any]:
    for form in (text, text.rstrip().rstrip(",") + "}}"):
        try:
            data = decode_document(form.strip())
        except ValueError:
            continue
        if isinstance(data, dict):
            return data
    # A run killed in the middle of a line: drop what follows the last whole config.
    cut = text[: text.rfind("},\n") + 1]
    try:
        return dict(decode_document(cut + "}}"))
    except (ValueError, TypeError) as error:
        raise RecordError(f"{path}: not a JSON object, not even up to its last config ({error})") from error


def _kernel_tuner_problem(data: Mapping[str, Any], device: Device | None, keys: Sequence[str]) -> Problem:
    name = data.get("kernel_name")
    if not isinstance(name, str) or not name:
        raise RecordError("it names no kernel (kernel_name)")
    if device is None:
        shown = data.get("device_name")
        if not isinstance(shown, str) or not shown.strip():
            raise RecordError("it names no device: say where it was measured (--device-name)")
        device = device_from_name(shown.strip())
    size = data.get("problem_size")
    sizes = size if isinstance(size, list) else [] if size is None else [size]
    arguments = [
        Argument(f"problem_size_{i}", "scalar", value=n if isinstance(n, int | float | str) else str(n))
        for i, n in enumerate(sizes)
    ]
    language = {"cuda": "cuda", "hip": "hip"}.get(device.backend, "")
    problem = Problem.of(
        Kernel(name, language),
        arguments,
        device,
        key=[str(n) for n in sizes],
        # Without the source, another list of parameters is the only sign of another kernel.
        identity=[*map(str, sizes), sorted(keys)],
    )
    return replace(problem, extra={"imported_from": KERNEL_TUNER_PROTOCOL})


def device_from_name(name: str) -> Device:
    """A device known by its name alone; AMD's models run HIP, all others are taken for CUDA's."""
    words = name.lower()
    amd = any(mark in words for mark in ("amd", "radeon", "instinct", "gfx"))
    return Device(name, "hip" if amd else "cuda", warp_size=64 if "instinct" in words else 32)


def _kernel_tuner_measurement(
    problem: str, keys: Sequence[str], name: str, row: Mapping[str, Any]
) -> Measurement | None:
    try:
        if missing := [key for key in keys if key not in row]:
            raise RecordError(f"it has no value for {missing[0]}")
        candidate = Candidate(Config.of({key: _value(key, row[key]) for key in keys}))
        at = str(row.get("timestamp") or "")
        given = row.get("time")
        if isinstance(given, str) or given == _LEGACY_FAILURE:
            if given == _INVALID:
                return None
            word = given if isinstance(given, str) else "RuntimeFailedConfig"
            if word not in _KERNEL_TUNER_OUTCOMES:
                raise RecordError(
                    f"time is {given!r:.40}: not a number, {_INVALID}, {', '.join(_KERNEL_TUNER_OUTCOMES)}"
                )
            return Measurement(
                problem,
                candidate,
                _KERNEL_TUNER_OUTCOMES[word],
                protocol=KERNEL_TUNER_PROTOCOL,
                at=at,
                extra={"message": word},
            )
        runs = [t for t in (read_number(t, "times") for t in row.get("times") or ()) if t is not None]
        spent = read_number(row.get("compile_time"), "compile_time")
        return Measurement(
            problem,
            candidate,
            Outcome.OK,
            statistics.median(runs) if runs else read_number(given, "time"),
            repeats=len(runs),
            compile_s=None if spent is None else spent / 1000.0,
            protocol=KERNEL_TUNER_PROTOCOL,
            at=at,
        )
    except MALFORMED as error:
        raise RecordError(f"config {name:.60}: {error}") from error


def _value(key: str, value: object) -> int | float | str | bool:
    if not isinstance(value, int | float | str):
        raise RecordError(f"{key} must be a number or a word, not {value!r:.40}")
    if isinstance(value, float) and not math.isfinite(value):
        raise RecordError(f"{key} must be a finite number, and an integer of 128 bits at most")
    return value


HELION_PROTOCOL = "helion"
"""Timing protocol of imported measurements: Helion's, interleaved or not as its release had it."""
_COLUMNS = {"status", "perf_ms", "compile_time_s", "config"}
_HELION_OUTCOMES = {"ok": Outcome.OK, "error": Outcome.RUNTIME_ERROR, "timeout": Outcome.TIMEOUT}
"""Rows of other statuses (`started`, failures of its workers) are no labels."""
_HELION_LAUNCH = {"num_warps": 4, "num_stages": 1}
"""Launch options and what Helion takes where a config leaves them out."""


def is_helion_log(path: Path) -> bool:
    """Whether a file looks like Helion's CSV log; False if unreadable."""
    try:
        return _COLUMNS.issubset(csv_fields(_head_text(path).partition("\n")[0]))
    except csv.Error:
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
    if (outcome := _HELION_OUTCOMES.get(str(row["status"]))) is None:
        return
    run = str(row.get("run_id") or "")
    problem = _helion_problem(described.get(run, {}), run, name, device)
    ms = float(row["perf_ms"]) if outcome is Outcome.OK else None
    if ms is not None and not 0 < ms <= LARGEST_MS:
        raise RecordError(f"perf_ms must be positive for an ok row, got {row['perf_ms']!r}")
    compiled = float(row["compile_time_s"]) if row.get("compile_time_s") else None
    candidate = Candidate(_config(str(row["config"])))
    measurement = Measurement(
        problem.id, candidate, outcome, median_ms=ms, compile_s=compiled, protocol=HELION_PROTOCOL
    )
    table_of_problem(tables, problem).measurements.append(measurement)


def _helion_problem(about: Mapping[str, Any], run: str, name: str, device: Device | None) -> Problem:
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
    warps, stages = (given.pop(name, default) for name, default in _HELION_LAUNCH.items())
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
        elif isinstance(value, int) and abs(value) > LARGEST_PARAMETER:
            raise RecordError(f"{name} must have 128 bits at most")
        else:
            yield name, value


FLAGGEMS_PROTOCOL = "flaggems"
"""Timing protocol of imported measurements: the benchmark function of FlagGems' tuner."""
MOST_ROWS = 1_000_000
"""A database has no more rows than this, all tables together."""
_MAGIC = b"SQLite format 3\x00"
_TABLE = re.compile(r"(?P<kernel>.+)_(?P<source>[0-9a-f]{32,64})_benchmark-[0-9a-f]{32}")
_FILE = re.compile(r"TunedConfig_(?P<device>.+)_triton_(?P<major>\d+)_(?P<minor>\d+)")
_TIMES = ("p50", "p20", "p80")
_FLAGGEMS_LAUNCH = ("num_warps", "num_stages", "num_ctas", "maxnreg")


def is_flaggems_cache(path: Path) -> bool:
    """Whether a file is an SQLite database; False if unreadable."""
    if not path.is_file():
        return False  # what is read from a pipe is gone for whoever reads it next
    try:
        with path.open("rb") as stream:
            return stream.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def import_flaggems(path: Path, device: Device | None = None, *, refuse: Refuse | None = None) -> list[Table]:
    """Read a database, one table per kernel, source and key; `device` overrides the one that its name gives.

    Raises `RecordError`, naming the file, for a database that is damaged or is none of FlagGems', and where no
    device is named. A row that breaks a rule is one as well: it is raised or, with `refuse`, handed to that.
    """
    named = _FILE.search(path.stem)
    where = device or (device_from_name(named["device"].replace("_", " ")) if named else None)
    if where is None:
        raise RecordError(f"{path}: its name does not say which device it is of: pass --device-name")
    release = f"{named['major']}.{named['minor']}" if named else ""
    refuse = bounded_refusals(path, refuse)
    tables: dict[str, Table] = {}
    try:
        address = f"{path.resolve().as_uri()}?mode=ro"
        with closing(sqlite3.connect(address, uri=True)) as database:
            results = [m for name in _table_names(database) if (m := _TABLE.fullmatch(name))]
            if not results:
                raise RecordError(f"{path}: a database without FlagGems' tables of times")
            left = MOST_ROWS
            for match in results:
                for row in _rows(database, match[0], left):
                    left -= 1
                    try:
                        _read_row(tables, match, row, where, release)
                    except MALFORMED as error:
                        refuse_row(RecordError(f"{path}: {match['kernel']}: {error}"), refuse)
    except sqlite3.Error as error:
        raise RecordError(f"{path}: no readable database ({error})") from error
    return list(tables.values())


def _table_names(database: sqlite3.Connection) -> list[str]:
    listed = database.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
    return [str(name) for (name,) in listed]


def _rows(database: sqlite3.Connection, name: str, most: int) -> Iterator[dict[str, Any]]:
    quoted = '"' + name.replace('"', '""') + '"'
    cursor = database.execute(f"SELECT * FROM {quoted} LIMIT ?", (most,))
    columns = [str(column[0]) for column in cursor.description]
    for row in cursor:
        yield dict(zip(columns, row, strict=True))


def _read_row(
    tables: dict[str, Table], match: re.Match[str], row: dict[str, Any], device: Device, release: str
) -> None:
    if missing := [name for name in _TIMES if not isinstance(row.get(name), float | int)]:
        raise RecordError(f"{missing[0]} must be a number of milliseconds, not {row.get(missing[0])!r:.40}")
    median, fast, slow = (float(row.pop(name)) for name in _TIMES)
    numbered = sorted((int(name[4:]), name) for name in row if re.fullmatch(r"key_\d+", name))
    key = [str(row.pop(name)) for _, name in numbered]
    launch = {name: row.pop(name) for name in _FLAGGEMS_LAUNCH if row.get(name) is not None}
    kwargs = {
        name: value for name, value in row.items() if name not in _FLAGGEMS_LAUNCH and value is not None
    }
    kernel = Kernel(match["kernel"], "triton", "", "")
    versions = {"triton": release} if release else {}
    problem = Problem.of(
        kernel, (), device, key=key, toolchain=versions, identity=[FLAGGEMS_PROTOCOL, match["source"], *key]
    )
    problem = replace(problem, extra={"imported_from": FLAGGEMS_PROTOCOL})
    candidate = Candidate(Config.from_json({"kwargs": kwargs, **launch}))
    # A failing config has three infinities.
    failed = median == float("inf")
    measurement = (
        Measurement(problem.id, candidate, Outcome.RUNTIME_ERROR, protocol=FLAGGEMS_PROTOCOL)
        if failed
        else Measurement(problem.id, candidate, Outcome.OK, median, fast, slow, protocol=FLAGGEMS_PROTOCOL)
    )
    table_of_problem(tables, problem).measurements.append(measurement)


_SUFFIX = ".autotune.json"
TRITON_CACHE_PROTOCOL = "triton-cache"
"""Timing protocol of imported measurements: Triton's default benchmarker, whatever it was then."""


def holds_timings(directory: Path) -> bool:
    """Whether a file of timings is below a directory, at any depth."""
    return next(directory.rglob(f"*{_SUFFIX}"), None) is not None


def import_triton_cache(directory: Path, device: Device) -> list[Table]:
    """Read every `*.autotune.json` below a Triton cache directory, one table per file.

    The files name neither device, source nor toolchain: `device` says where they were measured, and
    the rest stays empty, so such a table is prior knowledge and never answers for a problem of its
    own. The tuning key's values and dtypes become `Problem.key`. A time of infinity, which Triton
    writes only for configs that cannot be built or launched, becomes `out_of_resources`.

    Malformed files, and configs in them, are skipped with a `StoreWarning`. Raises `StoreError` if there is no
    such directory.
    """
    if not directory.is_dir():
        raise StoreError(
            f"{directory} is no directory: pass the Triton cache, $TRITON_CACHE_DIR or ~/.triton/cache"
        )
    tables = []
    for path in sorted(directory.rglob(f"*{_SUFFIX}")):
        try:
            tables.append(_table(path, device))
        except (OSError, *MALFORMED) as error:
            reason = f"{type(error).__name__}: {error}"[:200]
            warnings.warn(
                f"{path}: skipped, not an autotune cache file ({reason})", StoreWarning, stacklevel=2
            )
    return tables


def _table(path: Path, device: Device) -> Table:
    data = decode_document(read_regular(path).decode("utf-8"))
    key, timings = data["key"], data["configs_timings"]
    if not isinstance(key, list) or not isinstance(timings, list):
        raise RecordError("key and configs_timings must be lists")
    problem = Problem.of(
        Kernel(path.name.removesuffix(_SUFFIX)),
        (),
        device,
        key=[part if isinstance(part, str) else json.dumps(part) for part in key],
        # Triton's directory name hashes source, compiler and config list, all unknown to us: entries
        # that differ in them must not be mixed.
        identity=[path.parent.name],
    )
    at = datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="seconds")
    table = Table(replace(problem, extra={"imported_from": TRITON_CACHE_PROTOCOL}))
    bad: list[str] = []
    for number, entry in enumerate(timings):
        try:
            config, times = entry
            table.measurements.append(_triton_cache_measurement(problem.id, config, times, at))
        except MALFORMED as error:
            bad.append(f"the first, number {number}: {type(error).__name__}: {error}"[:200])
    if bad and not table.measurements:
        raise RecordError(f"none of its configs can be read ({bad[0]})")
    if bad:
        message = f"{path}: skipped {len(bad)} of {len(timings)} configs ({bad[0]})"
        warnings.warn(message, StoreWarning, stacklevel=3)
    return table


def _triton_cache_measurement(
    problem_id: str, config: Mapping[str, Any], times: object, at: str
) -> Measurement:
    candidate = Candidate(Config.from_json(config))
    hash(candidate)  # a list where a number belongs would fail far from here
    # Triton asks its benchmarker for the quantiles 0.5, 0.2 and 0.8; a user's own may return one number.
    given: list[Any] = times if isinstance(times, list) else [times]
    if not given or any(isinstance(t, bool) or not isinstance(t, int | float) for t in given):
        raise RecordError(f"times must be numbers, got {times!r:.60}")
    shown = [float(t) for t in given[:3]]
    if shown[0] == math.inf:
        extra = {"message": "inf in triton's cache"}
        return Measurement(
            problem_id,
            candidate,
            Outcome.OUT_OF_RESOURCES,
            protocol=TRITON_CACHE_PROTOCOL,
            at=at,
            extra=extra,
        )
    median, p20, p80 = shown if len(shown) == 3 else (shown[0], None, None)
    return Measurement(
        problem_id, candidate, Outcome.OK, median, p20, p80, protocol=TRITON_CACHE_PROTOCOL, at=at
    )
