"""Import of the logs in which PyTorch's AutoHeuristic collects measured choices.

The first line is JSON on the device and the features, the second names the columns, and each other line is one choice
for one product: the features, the choice and its milliseconds, `inf` for one that failed.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Mapping
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
from forecast_autotune.records.base import LARGEST_MS
from forecast_autotune.records.bounded_json import decode_bounded
from forecast_autotune.records.json_fields import MALFORMED, read_integer
from forecast_autotune.records.named_lines import (
    Refuse,
    bounded_refusals,
    csv_fields,
    numbered_lines,
    read_document,
    refuse_row,
)
from forecast_autotune.records.table import Table, table_of_problem
from forecast_autotune.store.exchange.kernel_tuner import device_from_name

PROTOCOL = "autoheuristic"
"""Timing protocol of imported measurements: that of the torch.compile that collected them."""
_HEAD = 1 << 14
_ABOUT = ("numerical_features", "categorical_features", "device_capa", "name")
_TILES = re.compile(r"type=triton_BLOCK-M=(\d+)_BLOCK-K=(\d+)_BLOCK-N=(\d+)_numstages=(\d+)_numwarps=(\d+)")
_PRODUCT = ("m", "k", "n")


def is_autoheuristic_log(path: Path) -> bool:
    """Whether a file looks like AutoHeuristic's; False if unreadable."""
    if not path.is_file():
        return False  # what is read from a pipe is gone for whoever reads it next
    try:
        first = read_document(path, _HEAD).partition("\n")[0]
        return all(f'"{name}"' in first for name in _ABOUT)
    except (OSError, RecordError):
        return False


def import_autoheuristic(
    path: Path, device: Device | None = None, *, refuse: Refuse | None = None
) -> list[Table]:
    """Read one log as tables, one per product that was tuned.

    The device's name is that of the file's folder where that lies in a folder `autoheuristic`, as PyTorch lays its
    logs out; else `device` has to say it.
    The toolchain is not known: prior knowledge, which never answers for a problem of its own.

    Raises `RecordError` for what is not such a log. A row that breaks a rule is one as well, with file and line: it
    is raised or, with `refuse`, handed to that, and the other rows count.
    """
    refuse = bounded_refusals(path, refuse)
    tables: dict[str, Table] = {}
    about: Mapping[str, Any] | None = None
    columns: list[str] = []
    try:
        for number, raw in numbered_lines(path, refuse):
            text = raw.decode("utf-8", "replace")
            if about is None:
                about = _about(path, text)
                where = device or _device(path, about)
            elif not columns:
                columns = csv_fields(text)
                if columns[-2:] != ["choice", "feedback"]:
                    raise RecordError(
                        f"{path}:{number}: the columns end in choice, feedback, not {text[-40:]!r}"
                    )
            else:
                try:
                    _add(tables, dict(zip(columns, csv_fields(text), strict=True)), str(about["name"]), where)
                except (*MALFORMED, csv.Error) as error:
                    refuse_row(RecordError(f"{path}:{number}: {error}"), refuse)
    except (OSError, csv.Error) as error:
        raise RecordError(f"{path}: unreadable: {error}") from error
    if about is None:
        raise RecordError(f"{path}: no log of AutoHeuristic: it is empty")
    return list(tables.values())


def _about(path: Path, text: str) -> Mapping[str, Any]:
    try:
        found = decode_bounded(text)
        if missing := [name for name in _ABOUT if name not in found]:
            raise RecordError(f"it has no {missing[0]}")
    except MALFORMED as error:
        raise RecordError(f"{path}: no log of AutoHeuristic ({error})") from error
    return dict(found)


def _device(path: Path, about: Mapping[str, Any]) -> Device:
    *_, above, folder = path.absolute().parent.parts
    if above != "autoheuristic":
        raise RecordError(
            f"{path}: it is in no folder autoheuristic/DEVICE, which would say where: pass --device-name"
        )
    try:
        major, minor = (read_integer(n, "device_capa") for n in about["device_capa"])
        shared = read_integer(about.get("shared_memory", 0), "shared_memory")
    except MALFORMED as error:
        raise RecordError(f"{path}: device_capa is two integers, shared_memory one: {error}") from error
    named = device_from_name(folder.replace("_", " "))
    return replace(named, arch=f"{major}{minor}" if major else "", shared_memory_bytes=shared)


def _add(tables: dict[str, Table], row: Mapping[str, str], operation: str, device: Device) -> None:
    candidate = _candidate(row["choice"])
    features = {name: value for name, value in row.items() if name not in ("choice", "feedback")}
    problem = Problem.of(
        Kernel(operation, "inductor"),
        _operands(features),
        device,
        key=[f"{name}={value}" for name, value in features.items() if name not in _PRODUCT],
        identity=[json.dumps(features, sort_keys=True)],
    )
    ms = float(row["feedback"])
    if ms == math.inf:
        measurement = Measurement(problem.id, candidate, Outcome.RUNTIME_ERROR, protocol=PROTOCOL)
    elif 0 < ms <= LARGEST_MS:
        measurement = Measurement(problem.id, candidate, Outcome.OK, ms, protocol=PROTOCOL)
    else:
        raise RecordError(f"feedback must be positive milliseconds, or inf, got {row['feedback']!r:.40}")
    table_of_problem(tables, problem).measurements.append(measurement)


def _candidate(choice: str) -> Candidate:
    if choice.startswith("extern_"):
        return Candidate(Config.of({}), f"aten::{choice.removeprefix('extern_')}")
    if (found := _TILES.fullmatch(choice)) is None:
        raise RecordError(f"choice is extern_NAME or a Triton template's tiles, got {choice!r:.80}")
    m, k, n, stages, warps = (read_integer(int(text), "a tile") for text in found.groups())
    blocks = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}
    return Candidate(Config.of(blocks, num_warps=warps, num_stages=stages), "triton::mm")


def _operands(features: Mapping[str, str]) -> list[Argument]:
    """The matrices of [m, k] x [k, n], where the features are those of a product; else none."""
    if any(name not in features for name in _PRODUCT):
        return []
    m, k, n = (read_integer(int(features[name]), name) for name in _PRODUCT)
    made = []
    for name, operand, shape in (("in0", "mat1", (m, k)), ("in1", "mat2", (k, n))):
        stride = [int(features.get(f"{operand}_stride_{i}", 0)) for i in range(2)]
        dtype = features.get(f"{operand}_dtype", "").removeprefix("torch.")
        made.append(Argument(name, "tensor", dtype, shape, (stride[0], stride[1])))
    return made
