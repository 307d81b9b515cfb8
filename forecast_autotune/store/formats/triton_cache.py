"""`*.autotune.json`: of Triton's own cache, and of quack's tuner, whose keys and configs are texts."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from forecast_autotune.errors import RecordError
from forecast_autotune.python_parser import parse_expression
from forecast_autotune.records import Candidate, Config, Kernel, Measurement, Outcome, Problem
from forecast_autotune.records.json_fields import MALFORMED
from forecast_autotune.store.formats.protocol import IMPORTED_FROM, Format, Reading, Row, reason

SUFFIX = ".autotune.json"
TRITON_CACHE_PROTOCOL = "triton-cache"
"""Timing protocol of imported measurements: Triton's default benchmarker, whatever it was then."""
_QUACK = "quack"
_HASH = re.compile("[A-Z2-7]{52}")
"""Triton's name of a folder: a hash of source, compiler and list of configs."""
_PAIR = re.compile(r"(^|, )([A-Za-z_]\w*): ")
_HEAD = re.compile(r'\A\s*\{\s*"key"\s*:')


def _is_theirs(path: Path, head: str) -> bool:
    return path.name.endswith(SUFFIX) or (_HEAD.match(head) is not None and '"configs_timings"' in head)


def _read(reading: Reading) -> Iterator[Row]:
    """Read one file as one problem.

    It names neither device, source nor toolchain: the user's device counts, else the one that is here. The tuning
    key's values and dtypes become `Problem.key`. A time of infinity, which Triton writes only for configs that
    cannot be built or launched, becomes `out_of_resources`. Raises `RecordError` for a damaged file; a config that
    breaks a rule is refused.
    """
    path, data = reading.path, reading.document()
    here = reading.device or (reading.local() if reading.local is not None else None)
    if here is None or (here.backend == "cpu" and reading.device is None):
        raise RecordError(
            f"{path}: the file names no device, and there is no accelerator here: say where the cache was measured: "
            "--device-name 'NVIDIA H100 80GB HBM3', for example"
        )
    key, timings = (
        (data.get("key"), data.get("configs_timings")) if isinstance(data, Mapping) else (None, None)
    )
    if not isinstance(key, list | str) or not isinstance(timings, list):
        raise RecordError(
            f"{path}: no autotune cache file: key must be a list, or quack's text, and configs_timings a list"
        )
    protocol = _QUACK if isinstance(key, str) else TRITON_CACHE_PROTOCOL
    folder = path.absolute().parent.name
    problem = Problem.of(
        Kernel(path.name.removesuffix(SUFFIX), "cute" if protocol == _QUACK else "triton"),
        (),
        here,
        key=[key] if isinstance(key, str) else [p if isinstance(p, str) else json.dumps(p) for p in key],
        # The folder's name hashes source, compiler and config list, all unknown to us: entries that differ in them
        # must not be mixed. A file that was moved out of it is known by its contents.
        identity=[folder if _HASH.fullmatch(folder) else [key, timings]],
        extra={IMPORTED_FROM: protocol},
    )
    for number, entry in enumerate(timings):
        try:
            config, times = entry
            candidate = Candidate(
                _quack_config(config) if isinstance(config, str) else Config.from_json(_finite(config))
            )
            hash(candidate)  # a list where a number belongs would fail far from here
            yield problem, _measurement(problem.id, candidate, times, protocol)
        except (*MALFORMED, SyntaxError) as error:
            reading.refuse_row(f"config {number}: {reason(error)}")


def _finite(config: Any) -> Any:
    """The same config. Raises `RecordError` for a number that the decoder could not hold."""
    for name, value in config["kwargs"].items() if "kwargs" in config else ():
        if isinstance(value, float) and not math.isfinite(value):
            raise RecordError(f"{name} must be a finite number, and an integer of 128 bits at most")
    return config


def _measurement(problem: str, candidate: Candidate, times: object, protocol: str) -> Measurement:
    # Triton asks its benchmarker for the quantiles 0.5, 0.2 and 0.8; a user's own may return one number.
    values: list[Any] = times if isinstance(times, list) else [times]
    if not values or any(isinstance(t, bool) or not isinstance(t, int | float) for t in values):
        raise RecordError(f"times must be numbers, got {times!r:.60}")
    numbers = [float(t) for t in values[:3]]
    if numbers[0] == math.inf:
        outcome = Outcome.RUNTIME_ERROR if protocol == _QUACK else Outcome.OUT_OF_RESOURCES
        extra = {"message": f"inf in {'quack' if protocol == _QUACK else 'triton'}'s cache"}
        return Measurement(problem, candidate, outcome, protocol=protocol, extra=extra)
    median, p20, p80 = numbers if len(numbers) == 3 else (numbers[0], None, None)
    return Measurement(problem, candidate, Outcome.OK, median, p20, p80, protocol=protocol)


def _quack_config(text: str) -> Config:
    """The config that `config: GemmConfig(tile_m=128, ...)` stands for; fields of an object become parameters."""
    pairs = _PAIR.sub(r"\1\2=", text)
    call = parse_expression(f"dict({pairs})")
    assert isinstance(call, ast.Call)
    kwargs: dict[str, Any] = {}
    for pair in call.keywords:
        inner = pair.value.keywords if isinstance(pair.value, ast.Call) else [pair]
        kwargs |= {str(k.arg): _literal(k.value) for k in inner}
    if not kwargs or call.args:
        raise RecordError(f"a config reads `name: value, ...`, not {text!r:.60}")
    return Config.of(kwargs)


def _literal(node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


FORMAT = Format(
    TRITON_CACHE_PROTOCOL, "Triton", "`*.autotune.json` of `triton.autotune(cache_results=True)`",
    lambda path, head: _is_theirs(path, head) and not re.search(r'\A\s*\{\s*"key"\s*:\s*"', head), _read,
    "3.4 to 3.9", ("median, p20, p80", "one kind", "no", "key", "no"), "source",
)  # fmt: skip
QUACK = replace(
    FORMAT,
    name=_QUACK,
    tool="quack",
    files="`*.autotune.json` of its tuner",
    is_theirs=_is_theirs,
    version="0.6.5",
)
