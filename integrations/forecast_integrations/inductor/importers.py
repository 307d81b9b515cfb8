"""Timings that Inductor left on disk: its GEMM timing cache, and the `kernel_autotune` metrics table.

Both hold times without what is needed to use them alone: the cache names choices by a hash of their source
and has no parameters, the metrics table has no operands. The imported rows are prior knowledge of an op (how
fast the vendor's kernel is, how fast the best was) and never answer for a problem of their own.
"""

from __future__ import annotations

import csv
import importlib.util
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from forecast_autotune import python_parser
from forecast_autotune.errors import RecordError
from forecast_autotune.records import (
    Argument,
    Candidate,
    Config,
    Device,
    Kernel,
    Measurement,
    Outcome,
    Problem,
    Scalar,
)
from forecast_autotune.records.bounded_json import decode_document
from forecast_autotune.records.named_lines import (
    Refuse,
    bounded_refusals,
    csv_fields,
    read_document,
    refuse_row,
)
from forecast_autotune.records.table import Table, table_of_problem
from forecast_integrations.inductor.choices.records import LIBRARY, device_of

CACHE_PROTOCOL = "inductor-cache"
"""Timing protocol of the cache: Inductor's benchmarker, whatever it was then."""
METRICS_PROTOCOL = "inductor-metrics"

_HEAD_CHARS = 4096
_CACHE_START = re.compile(r'\A\s*\{\s*"system"\s*:')
_COLUMNS = ("kernel_path", "kernel_name", "triton_config", "latency_ms")
_MALFORMED = (
    *(ValueError, TypeError, LookupError, AttributeError, SyntaxError, RecursionError, OSError),
    *(ArithmeticError, csv.Error),
)
_LAUNCH = ("num_warps", "num_stages", "num_ctas", "maxnreg")


def is_inductor_cache(path: Path) -> bool:
    """Whether a file looks like Inductor's GEMM timing cache; False if unreadable."""
    return _CACHE_START.match(_head(path)) is not None


def is_kernel_autotune(path: Path) -> bool:
    """Whether a file looks like the `kernel_autotune` metrics table; False if unreadable."""
    return set(_COLUMNS) <= set(_head(path).partition("\n")[0].strip().split(","))


def _head(path: Path) -> str:
    if not path.is_file():
        return ""  # what is read from a pipe is gone for whoever reads it next
    try:
        return read_document(path, _HEAD_CHARS)
    except (OSError, RecordError):
        return ""


def import_inductor(
    path: Path, device_name: str | None = None, refuse: Refuse | None = None
) -> list[Table] | None:
    """The tables of one file that Inductor wrote; None when it is neither cache nor metrics table.

    `device_name` says where it was measured, over what the file says. Raises `RecordError` for a file that is
    damaged, and where no device is named. An entry that breaks a rule is one as well: it is raised or, with
    `refuse`, handed to that, and the other entries count.
    """
    if is_inductor_cache(path):
        return import_cache(path, device_name, refuse)
    if is_kernel_autotune(path):
        return import_kernel_autotune(path, device_name, refuse)
    return None


def import_cache(path: Path, device_name: str | None = None, refuse: Refuse | None = None) -> list[Table]:
    """Read `$TORCHINDUCTOR_CACHE_DIR/cache/<hash>`, one table per op, operands and precision.

    Vendor kernels become the candidates they are in live runs; templates become candidates named by the
    hash of their source. A time of infinity, which Inductor writes for whatever fails, becomes
    `runtime_error`. Raises `RecordError` for anything malformed, naming the entry, unless `refuse` takes it.
    """
    try:
        data = decode_document(read_document(path))
        system, cache = data["system"], data["cache"]
        named = device_name or (system.get("device") or {}).get("name")
        at = datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="seconds")
        if not isinstance(cache, Mapping):
            raise RecordError(f"cache must be an object, not {cache!r:.60}")
    except _MALFORMED as error:
        raise RecordError(f"{path}: no timing cache of Inductor's ({_error_text(error)})") from error
    refuse = bounded_refusals(path, refuse)
    tables: dict[str, Table] = {}
    for op, by_inputs in cache.items():
        for inputs, by_precision in _items(by_inputs, path, op, refuse):
            for precision, timings in _items(by_precision, path, f"{op} {inputs}", refuse):
                listed = _items(timings, path, f"{op} {inputs}", refuse)
                try:
                    problem = _problem(op, inputs, precision, named, system)
                    table = table_of_problem(tables, problem)
                except _MALFORMED as error:
                    refuse_row(RecordError(f"{path}: {op} {inputs:.80}: {_error_text(error)}"), refuse)
                    continue
                for choice, ms in listed:
                    try:
                        table.measurements.append(_measurement(problem.id, choice, ms, at))
                    except _MALFORMED as error:
                        refuse_row(RecordError(f"{path}: {op} {inputs:.80}: {_error_text(error)}"), refuse)
    return list(tables.values())


def _items(value: object, path: Path, what: str, refuse: Refuse | None) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    refuse_row(RecordError(f"{path}: {what:.100}: expected an object, not {value!r:.60}"), refuse)
    return []


def _error_text(error: BaseException) -> str:
    shown = str(error)[:160]
    return shown if isinstance(error, RecordError) else f"{type(error).__name__}: {shown}"


def _problem(op: str, inputs: str, precision: str, named: object, system: Mapping[str, Any]) -> Problem:
    # `[(device, dtype, *sizes, *strides, offset), ...]`, and `_<hint>` where sizes were overridden.
    text, _, hint = inputs.rpartition("]")
    operands = python_parser.parse_literal(f"{text}]")
    if not isinstance(operands, list) or not operands:
        raise RecordError("the operands must be a list of tuples")
    kinds = {operand[0] for operand in operands}
    arguments = [_operand(f"in{i}", operand) for i, operand in enumerate(operands)]
    key = [f"precision={precision}", *([f"hint={hint.lstrip('_')}"] if hint else [])]
    device = _device(named, next(iter(kinds)))
    shown = [argument.to_json() for argument in arguments]
    problem = Problem.of(
        Kernel(op, "inductor"),
        arguments,
        device,
        key=key,
        # The system's hash stands for the compiler's version, which the file does not name otherwise.
        identity=[CACHE_PROTOCOL, str(system.get("hash")), *shown],
    )
    return replace(problem, extra={"imported_from": CACHE_PROTOCOL})


def _operand(name: str, described: Sequence[Any]) -> Argument:
    _, dtype, *numbers = described
    rank, odd = divmod(len(numbers) - 1, 2)
    if odd or not isinstance(dtype, str) or not all(type(n) is int for n in numbers):
        raise RecordError(f"an operand is (device, dtype, *sizes, *strides, offset), not {described!r:.100}")
    shape, stride = tuple(numbers[:rank]), tuple(numbers[rank:-1])
    return Argument(name, "tensor", dtype.removeprefix("torch."), shape, stride, numbers[-1] % 16 == 0)


def _device(named: object, backend: str) -> Device:
    """The device of this name: with all its facts where it is here, else by its name alone."""
    if not isinstance(named, str) or not named:
        raise RecordError(
            "the file names no device (Inductor writes none for a CPU): say where it was measured, as in "
            "--device-name 'NVIDIA H200'"
        )
    if importlib.util.find_spec("torch") is not None:
        import torch

        count = torch.cuda.device_count() if backend == "cuda" else 0
        here = [torch.device(backend, i) for i in range(count)] if count else []
        here += [torch.device("cpu")] if backend == "cpu" else []
        same = [device for device in map(device_of, here) if device.name == named]
        if same:
            return same[0]
    return Device(named, backend)


def _measurement(problem: str, choice: str, ms: object, at: str) -> Measurement:
    candidate = _candidate(choice)
    if isinstance(ms, bool) or not isinstance(ms, int | float) or math.isnan(ms) or ms < 0:
        raise RecordError(f"the time of {choice:.60} must be a number of milliseconds, not {ms!r:.40}")
    return _row(problem, candidate, float(ms), CACHE_PROTOCOL, at, {"choice": choice})


def _row(
    problem: str, candidate: Candidate, ms: float, protocol: str, at: str, extra: dict[str, str] | None = None
) -> Measurement:
    """A time in milliseconds, or the failure that infinity or zero stand for."""
    common: dict[str, Any] = {"protocol": protocol, "at": at, "extra": extra or {}}
    if math.isinf(ms) or ms == 0:
        return Measurement(
            problem, candidate, Outcome.RUNTIME_ERROR if ms else Outcome.INFRASTRUCTURE, **common
        )
    return Measurement(problem, candidate, Outcome.OK, ms, **common)


def _candidate(choice: str) -> Candidate:
    """The candidate of a `ChoiceCaller.hash_key()`: `name-[kwarg=value-...]hash`."""
    name, *parts = choice.split("-")
    if not name or not parts:
        raise RecordError(f"a choice is called name-hash, not {choice!r:.60}")
    source = parts.pop()
    if name.startswith("triton_"):
        return _make_candidate(f"triton::{name.removeprefix('triton_')}", {"source": source})
    if name.lower().startswith("cpp"):
        return _make_candidate(f"cpp::{name}", {"source": source})
    pairs: list[str] = []
    for part in parts:
        if "=" in part or not pairs:
            pairs.append(part)
        else:  # a minus sign inside a value
            pairs[-1] += f"-{part}"
    given = dict(pair.partition("=")[::2] for pair in pairs)
    kwargs = {k: v for k, text in given.items() if (v := _literal(text)) is not None}
    return _make_candidate(f"{LIBRARY}{name}", kwargs)


def _make_candidate(variant: str, kwargs: Mapping[str, Scalar]) -> Candidate:
    return Candidate(Config.of(kwargs, num_warps=1, num_stages=1), variant)


def _literal(text: str) -> Scalar:
    try:
        value = python_parser.parse_literal(text)
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, int | float | str) or value is None else text


def import_kernel_autotune(
    path: Path, device_name: str | None = None, refuse: Refuse | None = None
) -> list[Table]:
    """Read `metric_table_kernel_autotune.csv`, one table per kernel source.

    Inductor appends a row per config and run. The generated file's name, a hash of its text, tells kernels
    apart: their own names carry a counter. Raises `RecordError` naming the line that is wrong, unless `refuse`
    takes it.
    """
    try:
        text = read_document(path)
        at = datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="seconds")
    except OSError as error:
        raise RecordError(f"{path}: unreadable: {error}") from error
    if not device_name:
        raise RecordError(
            f"{path}: a metrics table names no device: say where it was measured, as in "
            "--device-name 'NVIDIA H200'"
        )
    device = _device(device_name, "cuda")
    refuse = bounded_refusals(path, refuse)
    tables: dict[str, Table] = {}
    columns, *lines = text.split("\n")
    names = csv_fields(columns)
    if missing := set(_COLUMNS) - set(names):
        raise RecordError(f"{path}:1: no column {sorted(missing)[0]}: not a kernel_autotune metrics table")
    for number, line in enumerate(lines, 2):
        try:
            if not (fields := csv_fields(line)):
                continue
            row = dict(zip(names, fields, strict=False))
            if any(row.get(column) in (None, "") for column in _COLUMNS):
                raise RecordError("the line is cut off")
            kernel = Kernel(row["kernel_name"], "triton")
            problem = Problem.of(
                kernel, (), device, identity=[METRICS_PROTOCOL, Path(row["kernel_path"]).stem]
            )
            problem = replace(
                problem, extra={"imported_from": METRICS_PROTOCOL, "model": row.get("model_name")}
            )
            measurement = _metric_measurement(
                problem.id, row["triton_config"], _latency(row["latency_ms"]), at
            )
            table_of_problem(tables, problem).measurements.append(measurement)
        except _MALFORMED as error:
            refuse_row(RecordError(f"{path}:{number}: {_error_text(error)}"), refuse)
    return list(tables.values())


def _latency(text: str) -> float:
    ms = float(text)
    if math.isinf(ms) and "inf" not in text.lower():  # a number of hundreds of digits is no failure
        raise RecordError(f"latency_ms must be a number of milliseconds or inf, not {text:.40}")
    return ms


def _metric_measurement(problem: str, config: str, ms: float, at: str) -> Measurement:
    parts = [part.partition(": ") for part in config.split(", ")]
    if not all(name.isidentifier() and sign for name, sign, _ in parts):
        raise RecordError(f"a config reads `XBLOCK: 128, num_warps: 4, ...`, not {config!r:.80}")
    values = {name: _literal(text) for name, _, text in parts}
    launch = {name: values.pop(name) for name in _LAUNCH if name in values}
    kwargs = {k: v for k, v in values.items() if v is not None}
    candidate = Candidate(Config.from_json({"kwargs": kwargs, **launch}))
    if math.isnan(ms) or ms < 0:
        raise RecordError(f"latency_ms must be a number of milliseconds, not {ms}")
    return _row(problem, candidate, ms, METRICS_PROTOCOL, at)
