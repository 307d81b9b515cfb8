"""Timings that Inductor left on disk: its GEMM timing cache, and the metrics table of kernels.

Both hold times without what is needed to use them alone: the cache names choices by a hash of their source
and has no parameters, the metrics table has no operands. The imported rows are prior knowledge of an op (how
fast the vendor's kernel is, how fast the best was) and never answer for a problem of their own.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from forecast_autotune import python_parser
from forecast_autotune.errors import RecordError
from forecast_autotune.records import (
    LAUNCH_OPTIONS,
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
from forecast_autotune.records.named_lines import csv_fields, numbered_lines
from forecast_autotune.store.formats.protocol import IMPORTED_FROM, Format, Reading, Row, reason

LIBRARY = "aten::"
"""Prefix of the names of a vendor library's kernels."""
CACHE_PROTOCOL = "inductor-cache"
"""Timing protocol of the cache: Inductor's benchmarker, whatever it was then."""
METRICS_PROTOCOL = "inductor-metrics"

_CACHE_START = re.compile(r'\A\s*\{\s*"system"\s*:')
_COLUMNS = ("kernel_path", "kernel_name", "triton_config", "latency_ms")
_MALFORMED = (
    *(ValueError, TypeError, LookupError, AttributeError, SyntaxError, RecursionError, OSError),
    *(ArithmeticError, csv.Error),
)


def _is_table(path: Path, head: str) -> bool:
    try:
        return set(_COLUMNS) <= set(csv_fields(head.partition("\n")[0]))
    except csv.Error:
        return False


def _read_cache(reading: Reading) -> Iterator[Row]:
    """Read `$TORCHINDUCTOR_CACHE_DIR/cache/<hash>`, one problem per op, operands and precision.

    Vendor kernels become the candidates they are in live runs; templates become candidates named by the
    hash of their source. A time of infinity, which Inductor writes for whatever fails, becomes
    `runtime_error`. Raises `RecordError` for a damaged file; an entry that breaks a rule is refused.
    """
    path, data = reading.path, reading.document()
    try:
        system, cache = data["system"], data["cache"]
        device = reading.device or (system.get("device") or {}).get("name")
        if not isinstance(cache, Mapping):
            raise RecordError(f"cache must be an object, not {cache!r:.60}")
    except _MALFORMED as error:
        raise RecordError(f"{path}: no timing cache of Inductor's ({reason(error)})") from error
    for op, by_inputs in cache.items():
        for inputs, by_precision in _items(by_inputs, reading, op):
            for precision, timings in _items(by_precision, reading, f"{op} {inputs}"):
                choices = _items(timings, reading, f"{op} {inputs}")
                try:
                    problem = _problem(reading, op, inputs, precision, device, system)
                except _MALFORMED as error:
                    if str(error).startswith(str(path)):
                        raise
                    reading.refuse_row(f"{op} {inputs:.80}: {reason(error)}")
                    continue
                for choice, ms in choices:
                    try:
                        yield problem, _measurement(problem.id, choice, ms)
                    except _MALFORMED as error:
                        reading.refuse_row(f"{op} {inputs:.80}: {reason(error)}")


def _items(value: object, reading: Reading, what: str) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    reading.refuse_row(f"{what:.100}: expected an object, not {value!r:.60}")
    return []


def _problem(
    reading: Reading, op: str, inputs: str, precision: str, device_name: object, system: Mapping[str, Any]
) -> Problem:
    # `[(device, dtype, *sizes, *strides, offset), ...]`, and `_<hint>` where sizes were overridden.
    text, _, hint = inputs.rpartition("]")
    operands = python_parser.parse_literal(f"{text}]")
    if not isinstance(operands, list) or not operands:
        raise RecordError("the operands must be a list of tuples")
    kinds = {operand[0] for operand in operands}
    arguments = [_operand(f"in{i}", operand) for i, operand in enumerate(operands)]
    key = [f"precision={precision}", *([f"hint={hint.lstrip('_')}"] if hint else [])]
    device = _device(reading, device_name, next(iter(kinds)))
    records = [argument.to_json() for argument in arguments]
    return Problem.of(
        Kernel(op, "inductor"),
        arguments,
        device,
        key=key,
        # The system's hash stands for the compiler's version, which the file does not name otherwise.
        identity=[CACHE_PROTOCOL, str(system.get("hash")), *records],
        extra={IMPORTED_FROM: CACHE_PROTOCOL},
    )


def _operand(name: str, entry: Sequence[Any]) -> Argument:
    _, dtype, *numbers = entry
    rank, odd = divmod(len(numbers) - 1, 2)
    if odd or not isinstance(dtype, str) or not all(type(n) is int for n in numbers):
        raise RecordError(f"an operand is (device, dtype, *sizes, *strides, offset), not {entry!r:.100}")
    shape, stride = tuple(numbers[:rank]), tuple(numbers[rank:-1])
    return Argument(name, "tensor", dtype.removeprefix("torch."), shape, stride, numbers[-1] % 16 == 0)


def _device(reading: Reading, name: object, backend: str) -> Device:
    """The device of this name: with all its facts where it is here, else by its name alone.

    Operands on ROCm are called `cuda`, too, and the file then names the architecture: `gfx942:sramecc+:xnack-`.
    """
    device = name if isinstance(name, Device) else reading.device_named(name)
    if backend == "cpu" or (device.backend not in ("cuda", "hip") and backend != "cuda"):
        device = Device(device.name, backend)
    here = reading.local() if reading.local is not None else None
    return here if here is not None and (here.name, here.backend) == (device.name, device.backend) else device


def _measurement(problem: str, choice: str, ms: object) -> Measurement:
    candidate = _candidate(choice)
    if isinstance(ms, bool) or not isinstance(ms, int | float) or math.isnan(ms) or ms < 0:
        raise RecordError(f"the time of {choice:.60} must be a number of milliseconds, not {ms!r:.40}")
    return _row(problem, candidate, float(ms), CACHE_PROTOCOL, {"choice": choice})


def _row(
    problem: str, candidate: Candidate, ms: float, protocol: str, extra: dict[str, str] | None = None
) -> Measurement:
    """A time in milliseconds, or the failure that infinity or zero stand for."""
    common: dict[str, Any] = {"protocol": protocol, "extra": extra or {}}
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
    options = dict(pair.partition("=")[::2] for pair in pairs)
    kwargs = {k: v for k, text in options.items() if (v := _literal(text)) is not None}
    return _make_candidate(f"{LIBRARY}{name}", kwargs)


def _make_candidate(variant: str, kwargs: Mapping[str, Scalar]) -> Candidate:
    return Candidate(Config.of(kwargs, num_warps=1, num_stages=1), variant)


def _literal(text: str) -> Scalar:
    try:
        value = python_parser.parse_literal(text)
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, int | float | str) or value is None else text


def _read_table(reading: Reading) -> Iterator[Row]:
    """Read `metric_table_kernel_autotune.csv`, one problem per kernel source.

    Inductor appends a row per config and run. The generated file's name, a hash of its text, tells kernels
    apart: their own names carry a counter. A line that is wrong is refused.
    """
    path = reading.path
    device = _device(reading, reading.device_named(None), "cuda")
    names: list[str] = []
    for number, raw in numbered_lines(path, reading.refuse, streamed=True, end=b"\n"):
        try:
            fields = csv_fields(raw.decode("utf-8"))
            if number == 1:
                names = fields
                continue
            if not fields:
                continue
            row = dict(zip(names, fields, strict=False))
            if not raw.endswith(b"\n") or any(row.get(column) in (None, "") for column in _COLUMNS):
                raise RecordError("the line is cut off")
            kernel = Kernel(row["kernel_name"], "triton")
            identity = [METRICS_PROTOCOL, Path(row["kernel_path"]).stem]
            about = {IMPORTED_FROM: METRICS_PROTOCOL, "model": row.get("model_name")}
            problem = Problem.of(kernel, (), device, identity=identity, extra=about)
            yield (
                problem,
                _metric_measurement(problem.id, row["triton_config"], _latency(row["latency_ms"])),
            )
        except _MALFORMED as error:
            reading.refuse_row(reason(error), f":{number}")


def _latency(text: str) -> float:
    ms = float(text)
    if math.isinf(ms) and "inf" not in text.lower():  # a number of hundreds of digits is no failure
        raise RecordError(f"latency_ms must be a number of milliseconds or inf, not {text:.40}")
    return ms


def _metric_measurement(problem: str, config: str, ms: float) -> Measurement:
    parts = [part.partition(": ") for part in config.split(", ")]
    if not all(name.isidentifier() and sign for name, sign, _ in parts):
        raise RecordError(f"a config reads `XBLOCK: 128, num_warps: 4, ...`, not {config!r:.80}")
    values = {name: _literal(text) for name, _, text in parts}
    launch = {name: values.pop(name) for name in LAUNCH_OPTIONS if name in values}
    kwargs = {k: v for k, v in values.items() if v is not None}
    candidate = Candidate(Config.from_json({"kwargs": kwargs, **launch}))
    if math.isnan(ms) or ms < 0:
        raise RecordError(f"latency_ms must be a number of milliseconds, not {ms}")
    return _row(problem, candidate, ms, METRICS_PROTOCOL)


CACHE = Format(
    CACHE_PROTOCOL, "Inductor", "GEMM timing cache, `$TORCHINDUCTOR_CACHE_DIR/cache/<hash>`",
    lambda path, head: bool(_CACHE_START.match(head)), _read_cache,
    "torch 2.11, 2.13", ("one", "one kind", "named, but for a CPU", "yes", "no"), "parameters of templates",
)  # fmt: skip
METRICS = Format(
    METRICS_PROTOCOL, "Inductor", "`metric_table_kernel_autotune.csv`",
    _is_table, _read_table,
    "torch 2.11, 2.13", ("one", "one kind", "no", "no", "no"), "operands",
)  # fmt: skip
