"""TVM MetaSchedule's databases: a record a line, in seconds. A time of 1e10 stands for any failure."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

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
    digest,
)
from forecast_autotune.records.bounded_json import decode_document
from forecast_autotune.records.json_fields import MALFORMED, read_number
from forecast_autotune.records.named_lines import numbered_lines
from forecast_autotune.store.formats.protocol import (
    IMPORTED_FROM,
    Format,
    Reading,
    Row,
    device_from_name,
    flat_parameters,
    reason,
)

_PROTOCOL = "metaschedule"
_HEAD = re.compile(r"\A\s*\[\s*\d+\s*,\s*\[\s*\[\s*\[\s*(\[|\])")
_FAILURE_S = 1e9
"""Seconds from which on a time is none: MetaSchedule writes 1e10 for whatever fails, AutoTVM wrote 1e9."""


def _read(reading: Reading) -> Iterator[Row]:
    """Read `database_tuning_record.json`, one problem for each workload and target.

    The decisions of a schedule become its parameters. A record without a time is left out; a line that is damaged
    or cut off is refused. Raises `RecordError` for a file that cannot be opened.
    """
    hashes = _workloads(reading)
    problems: dict[str, Problem] = {}
    for number, raw in numbered_lines(reading.path, reading.refuse, streamed=True):
        if not raw.strip():
            continue
        try:
            workload, (trace, seconds, target, arguments) = decode_document(raw.decode("utf-8"))
            if seconds is None:
                reading.left_out["schedules that were not measured"] += 1
                continue
            name = digest(workload, target, arguments, trace[0])
            if name not in problems:
                problems[name] = _problem(reading, workload, trace, target, arguments, hashes)
            yield problems[name], _measurement(problems[name].id, trace, seconds)
        except MALFORMED as error:
            reading.refuse_row(reason(error), f":{number}")


def _workloads(reading: Reading) -> list[str]:
    """The structural hashes of the workloads, from the file beside the records."""
    path = reading.beside(reading.path.name.replace("tuning_record", "workload"))
    if path is None or path == reading.path:
        return []
    try:
        return [str(json.loads(raw)[0]) for _, raw in numbered_lines(path) if raw.strip()]
    except (OSError, *MALFORMED) as error:
        reading.refuse_row(f"workloads beside it are damaged ({reason(error)})")
        return []


def _problem(
    reading: Reading, workload: Any, trace: Any, target: Any, arguments: Any, hashes: Sequence[str]
) -> Problem:
    blocks = [step[2] for step in trace[0] if step[0] in ("GetSBlock", "GetBlock")]
    block, function = next((b for b in blocks if b[0] != "root"), ["", "main"])[:2]
    name = hashes[workload] if isinstance(workload, int) and 0 <= workload < len(hashes) else str(workload)
    tensors = [
        Argument(f"arg{n}", "tensor", str(dtype), tuple(int(size) for size in shape))
        for n, (_, dtype, shape) in enumerate(arguments)
    ]
    return Problem.of(
        Kernel(f"{function}.{block}".strip("."), "tir"),
        tensors,
        reading.device or _device(target),
        key=[name, json.dumps(target, sort_keys=True)],
        extra={IMPORTED_FROM: _PROTOCOL},
    )


def _device(target: Any) -> Device:
    """The device of a target, as far as that describes one."""
    if not isinstance(target, Mapping):
        return device_from_name(str(target))
    kind = str(target.get("kind"))
    model = str(target.get("tag") or target.get("mcpu") or target.get("arch") or "").rpartition("/")[2]
    device = device_from_name(f"{kind} {model}".strip())
    backend = {"cuda": "cuda", "rocm": "hip", "llvm": "cpu", "c": "cpu"}.get(kind, kind)
    return replace(device, backend=backend)


def _measurement(problem: str, trace: Any, seconds: Sequence[Any]) -> Measurement:
    steps, decisions = trace
    names = [str(step[0]) for step in steps]
    kwargs = {f"{names[at]}{at}": value for at, value in decisions}
    candidate = Candidate(Config.of({**dict(flat_parameters(kwargs)), "sketch": digest(names)[:8]}))
    runs = [t for t in (read_number(t, "run_secs") for t in seconds) if t is not None]
    if not runs:
        raise RecordError("it has no times")
    if max(runs) >= _FAILURE_S:
        about = {"message": f"{max(runs):g} s stands for any failure"}
        return Measurement(problem, candidate, Outcome.RUNTIME_ERROR, protocol=_PROTOCOL, extra=about)
    return Measurement(
        problem,
        candidate,
        Outcome.OK,
        1000.0 * statistics.median(runs),
        repeats=len(runs),
        protocol=_PROTOCOL,
    )


FORMAT = Format(
    _PROTOCOL, "TVM MetaSchedule", "`database_tuning_record.json`",
    lambda path, head: bool(_HEAD.match(head)), _read,
    "0.27.0", ("median of the runs, from seconds", "one kind", "target", "yes", "no"), "the workload's program",
)  # fmt: skip
