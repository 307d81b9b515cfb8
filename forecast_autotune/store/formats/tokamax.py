"""Tokamax's autotuning results, as `dumps()` writes them. A config that failed is not in them."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from forecast_autotune.errors import RecordError
from forecast_autotune.records import Argument, Candidate, Config, Kernel, Measurement, Outcome, Problem
from forecast_autotune.records.json_fields import MALFORMED, read_number
from forecast_autotune.store.formats.protocol import (
    IMPORTED_FROM,
    Format,
    Reading,
    Row,
    flat_parameters,
    reason,
)

_PROTOCOL = "tokamax"
_HEAD = re.compile(r'"(tokamax_version|evaluation_times_ms)"\s*:|"__type"\s*:\s*"tokamax\.')
_SHAPE = re.compile(r"([a-z]+\d*\w*)\[([\d,]*)\]")
_DTYPES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "i8": "int8",
    "i32": "int32",
}


def _read(reading: Reading) -> Iterator[Row]:
    """Read the results, one problem for each operation and its arguments. Raises `RecordError` for a damaged file."""
    path, data = reading.path, reading.document()
    entries = data.get("data") if isinstance(data, Mapping) else None
    if not isinstance(entries, list):
        raise RecordError(f"{path}: no results of Tokamax: it needs data, a list")
    device = reading.device_named(data.get("device_kind"))
    for number, entry in enumerate(entries):
        try:
            (bound, configs) = entry
            name = str(bound["op"]["__type"]).rpartition(".")[2]
            arguments = bound["arguments"]
            settings = {k: v for k, v in bound["op"].items() if k != "__type"}
            key = [f"{k}={json.dumps(v)}" for k, v in (*arguments.items(), *settings.items())]
            problem = Problem.of(
                Kernel(name, "pallas" if "pallas" in name.lower() else ""),
                [_argument(k, v) for k, v in arguments.items()],
                device,
                key=key,
                toolchain={"tokamax": str(data.get("tokamax_version") or "")},
                extra={IMPORTED_FROM: _PROTOCOL},
            )
            results = list(configs.items())
        except MALFORMED as error:
            reading.refuse_row(f"data[{number}]: {reason(error)}")
            continue
        for text, result in results:
            try:
                yield problem, _measurement(problem.id, text, result)
            except MALFORMED as error:
                reading.refuse_row(f"{name} {text:.80}: {reason(error)}")


def _argument(name: str, value: Any) -> Argument:
    match = _SHAPE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return Argument(
            name, "scalar", value=value if isinstance(value, int | float | str) else json.dumps(value)
        )
    shape = tuple(int(n) for n in match[2].split(",") if n)
    return Argument(name, "tensor", _DTYPES.get(match[1], match[1]), shape)


def _measurement(problem: str, text: str, result: Mapping[str, Any]) -> Measurement:
    runs = [t for t in (read_number(t, "evaluation_times_ms") for t in result["evaluation_times_ms"]) if t]
    if not runs:
        raise RecordError("it has no times")
    compile_ms = sum(read_number(result.get(k), k) or 0.0 for k in ("compile_time_ms", "lower_time_ms"))
    return Measurement(
        problem,
        Candidate(Config.of(dict(flat_parameters(json.loads(text))))),
        Outcome.OK,
        statistics.median(runs),
        repeats=len(runs),
        compile_s=compile_ms / 1000.0,
        protocol=_PROTOCOL,
    )


FORMAT = Format(
    _PROTOCOL, "Tokamax", "`AutotuningResult.dumps()`",
    lambda path, head: bool(_HEAD.search(head)) and '"data"' in head, _read,
    "0.0.17", ("median of the runs", "no", "named", "yes", "no"), "failures, source",
)  # fmt: skip
