"""Import of Kernel Tuner's cache files: CUDA, HIP and OpenCL kernels tuned elsewhere.

The format is that of `kernel_tuner.util.store_cache` (Kernel Tuner 0.4 to 1.x): one JSON object with a
header and, under `cache`, one object per config, appended as the tuner goes. A run that was killed
leaves the file without its closing braces; it is read up to its last whole config.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
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
)
from forecast_autotune.records.bounded_json import decode_document
from forecast_autotune.records.json_fields import MALFORMED, read_number
from forecast_autotune.records.named_lines import Refuse, bounded_refusals, read_document, refuse_row
from forecast_autotune.records.table import Table

PROTOCOL = "kernel-tuner"
"""Timing protocol of imported measurements: Kernel Tuner's, with whatever observers it ran."""

_OUTCOMES = {
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


def is_kernel_tuner_cache(path: Path) -> bool:
    """Whether a file, gzip-compressed or not, looks like Kernel Tuner's output; False if unreadable."""
    if not path.is_file():
        return False  # what is read from a pipe is gone for whoever reads it next
    try:
        text = read_document(path, _HEAD)
    except (OSError, RecordError):
        return False
    return bool(_CACHE.search(text) or _T4.match(text))


def import_kernel_tuner(
    path: Path, device: Device | None = None, *, kernel: str = "", refuse: Refuse | None = None
) -> Table:
    """Read one cache file as the table of one problem: kernel, device, problem size and parameters.

    Tuned parameters become the config's meta-parameters (numbers and words, as they are); `time` in
    milliseconds, or the median of `times` where the single runs are kept, becomes the time. Configs
    that Kernel Tuner's restrictions exclude are no candidates. `device` overrides the file's (some
    files name none); `kernel` overrides its name. The file holds neither source nor toolchain: such a
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
        table = Table(_problem(data, device, kernel, keys))
    except MALFORMED as error:
        raise RecordError(f"{path}: no Kernel Tuner cache ({error})") from error
    for name, row in rows.items():
        try:
            measurement = _measurement(table.problem.id, keys, name, row)
        except RecordError as error:
            refuse_row(RecordError(f"{path}: {error}"), refuse)
        else:
            table.measurements += [] if measurement is None else [measurement]
    return table


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


def _problem(data: Mapping[str, Any], device: Device | None, kernel: str, keys: Sequence[str]) -> Problem:
    name = kernel or data.get("kernel_name")
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
    return replace(problem, extra={"imported_from": PROTOCOL})


def device_from_name(name: str) -> Device:
    """A device known by its name alone; AMD's models run HIP, all others are taken for CUDA's."""
    words = name.lower()
    amd = any(mark in words for mark in ("amd", "radeon", "instinct", "gfx"))
    return Device(name, "hip" if amd else "cuda", warp_size=64 if "instinct" in words else 32)


def _measurement(problem: str, keys: Sequence[str], name: str, row: Mapping[str, Any]) -> Measurement | None:
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
            if word not in _OUTCOMES:
                raise RecordError(f"time is {given!r:.40}: not a number, {_INVALID}, {', '.join(_OUTCOMES)}")
            return Measurement(
                problem, candidate, _OUTCOMES[word], protocol=PROTOCOL, at=at, extra={"message": word}
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
            protocol=PROTOCOL,
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
