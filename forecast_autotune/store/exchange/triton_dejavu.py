"""Import of triton-dejavu's `cache.json` files: the best config of each key, with its time.

Keys and configs are texts there: a key is a tuple of words, a config what `str(triton.Config)` shows. Only literals
in them are read, nothing is evaluated. The other configs that were tried are not kept by triton-dejavu, so that such
a table says where the best of a kernel's problems lie, and little of what is slow.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forecast_autotune.errors import RecordError
from forecast_autotune.python_parser import parse_expression
from forecast_autotune.records import Candidate, Config, Device, Kernel, Measurement, Outcome, Problem
from forecast_autotune.records.bounded_json import decode_document
from forecast_autotune.records.json_fields import MALFORMED, read_number
from forecast_autotune.records.named_lines import Refuse, bounded_refusals, read_document, refuse_row
from forecast_autotune.records.table import Table, table_of_problem
from forecast_autotune.store.exchange.kernel_tuner import device_from_name

PROTOCOL = "triton-dejavu"
"""Timing protocol of imported measurements: triton-dejavu's, graphs or not as its options had it."""
_SIGNATURE = re.compile(r"JITFunction\((?P<module>[^:()]*):(?P<name>[^:()]+)\)")
_HEAD = 1 << 12
_LAUNCH = ("num_warps", "num_ctas", "num_stages", "maxnreg")
_NOT_OURS = ("pre_hook", "enable_warp_specialization", "enable_persistent")


def is_triton_dejavu_cache(path: Path) -> bool:
    """Whether a file looks like triton-dejavu's; False if unreadable."""
    if not path.is_file():
        return False  # what is read from a pipe is gone for whoever reads it next
    try:
        head = read_document(path, _HEAD)
    except (OSError, RecordError):
        return False
    return '"evaluated_configs"' in head and _SIGNATURE.search(head) is not None


def import_triton_dejavu(
    path: Path, device: Device | None = None, *, refuse: Refuse | None = None
) -> list[Table]:
    """Read one cache file as tables, one per key, of one measurement each.

    The device is that of the folder `gpu_<name>` above the file, unless `device` says it. Neither source nor
    toolchain is known: prior knowledge, which never answers for a problem of its own.

    Raises `RecordError`, naming the file, for anything that is not such a cache. A key that breaks a rule is one as
    well: it is raised or, with `refuse`, handed to that, and the other keys count.
    """
    refuse = bounded_refusals(path, refuse)
    try:
        data = decode_document(read_document(path))
        signature = _SIGNATURE.fullmatch(data["signature"])
        if signature is None:
            raise RecordError(f"its signature names no kernel: {data['signature']!r:.80}")
        best, timings = data["cache"], data.get("timings", {})
        if not isinstance(best, dict) or not isinstance(timings, dict):
            raise RecordError("it needs cache and timings, objects by key")
    except OSError as error:
        raise RecordError(f"{path}: unreadable: {error}") from error
    except MALFORMED as error:
        raise RecordError(f"{path}: no cache of triton-dejavu ({error})") from error
    where = device or _device_of(path)
    tables: dict[str, Table] = {}
    for key, config in best.items():
        try:
            problem = Problem.of(
                Kernel(signature["name"], "triton", extra={"module": signature["module"]}),
                (),
                where,
                key=_key(key),
                identity=[signature["module"]],
            )
            row = _measurement(problem.id, config, timings.get(key))
            table_of_problem(tables, problem).measurements.append(row)
        except (*MALFORMED, SyntaxError) as error:
            refuse_row(RecordError(f"{path}: key {key:.60}: {error}"), refuse)
    return list(tables.values())


def _device_of(path: Path) -> Device:
    for part in reversed(path.absolute().parts):
        if part.startswith("gpu_"):
            return device_from_name(part.removeprefix("gpu_").replace("_", " "))
    raise RecordError(f"{path}: no folder gpu_NAME above it says which device it is of: pass --device-name")


def _key(text: str) -> list[str]:
    parts = ast.literal_eval(parse_expression(text))
    if not isinstance(parts, tuple):
        raise RecordError("it is no tuple")
    return [str(part) for part in parts]


def _measurement(problem: str, config: object, times: object) -> Measurement:
    found = [read_number(t, "times") for t in times] if isinstance(times, list) else []
    ms, low, high = [*found, None, None, None][:3]
    if ms is None:
        raise RecordError("it has no time")
    if low is None or high is None or not low <= ms <= high:
        low = high = None
    candidate = Candidate(_config(str(config)))
    return Measurement(problem, candidate, Outcome.OK, ms, low, high, protocol=PROTOCOL)


def _config(text: str) -> Config:
    """A config by the text that `str(triton.Config)` gives."""
    given: dict[str, Any] = {}
    for part in text.split(", "):
        name, colon, value = part.partition(": ")
        if not colon:
            raise RecordError(f"{part!r:.60} is no parameter with a value")
        if name not in _NOT_OURS:
            given[name] = _value(value)
    launch: Mapping[str, Any] = {name: given.pop(name) for name in _LAUNCH if name in given}
    return Config.from_json({"kwargs": given, **launch})


def _value(text: str) -> object:
    try:
        return ast.literal_eval(parse_expression(text))
    except (ValueError, SyntaxError):
        return text  # a word
