"""`KERNEL.cu:FN` with `KERNEL.toml` beside it: a CUDA kernel's computation, its sizes and its checks.

The file says what a pack's definition says, and the kernel's parameters in order:

    reference = "reference.py:softmax"   # torch: inputs by name -> outputs
    parameters = [
      { name = "x", dtype = "float32", shape = ["rows", "columns"] },
      { name = "y", dtype = "float32", shape = ["rows", "columns"], output = true },
      { name = "rows", dtype = "int32", value = "rows" },
      { name = "columns", dtype = "int32", value = "columns" },
    ]
    [axes]
    rows = { low = 1, high = 64 }
    columns = { low = 1, high = 2000 }
    [[workloads]]
    name = "large"
    axes = { rows = 4096, columns = 4096 }
    large = true

Optional: description, tolerance, flops, bytes, deterministic, as packs have them. Nothing of it is run but the
reference, and that in the sandbox's judge.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forecast_autotune.errors import RecordError, SettingsError
from forecast_autotune.records import codec
from forecast_autotune.records.named_lines import read_document
from forecast_harness.targets.cuda.source import (
    KernelParameter,
    KernelSignature,
    check_signature,
    check_source_rules,
    read_launch,
)
from forecast_harness.targets.packs.schema import Definition, Pack, Workload

CUDA_PLACE = re.compile(r"^(?P<where>.+\.cu):(?P<name>[A-Za-z_]\w*)$", re.DOTALL)
"""A file and the name of a kernel in it."""
_REFERENCE = re.compile(r"(?P<file>[^:]+\.py):(?P<name>[A-Za-z_]\w*)")
_ABOUT = ("description", "tolerance", "flops", "bytes", "deterministic")
_FIELDS = ("reference", "parameters", "axes", "workloads", *_ABOUT)


@dataclass(frozen=True)
class CudaDeclaration:
    """A kernel in a user's file."""

    source: str
    signature: KernelSignature
    pack: Pack
    """Its computation, as packs describe it; a solution is called with the tensors by name."""


def read_cuda_declaration(text: str) -> CudaDeclaration:
    """Read the kernel that `KERNEL.cu:FN` names. Runs nothing of it.

    Raises `SettingsError` for files that are not there, and `RecordError` saying which rule of the declaration or of
    the source is broken, and what to write.
    """
    match = CUDA_PLACE.match(text)
    if match is None:
        raise SettingsError(f"{text!r} names no CUDA kernel: give KERNEL.cu:FN")
    file, entry = Path(match["where"]), match["name"]
    toml = file.with_suffix(".toml")
    source = _read(file, "the kernel's source")
    data = _toml(_read(toml, f"what {entry} is called with, see the how-to on CUDA kernels"), toml)
    try:
        pack, signature = _read_pack(data, entry, toml)
    except RecordError as error:
        raise RecordError(f"{toml}: {error}") from error
    try:
        check_source_rules(source)
        read_launch(source)
    except RecordError as error:
        raise RecordError(f"{file}: {error}") from error
    if not re.search(rf"\b{entry}\b", source):
        raise RecordError(f"{file}: it has no kernel {entry}: define {signature.text}")
    return CudaDeclaration(source, signature, pack)


def _read_pack(data: Mapping[str, Any], entry: str, where: Path) -> tuple[Pack, KernelSignature]:
    if unknown := sorted(set(data) - set(_FIELDS)):
        raise RecordError(f"it has {unknown[0]!r:.60}, which is none of {', '.join(_FIELDS)}")
    if missing := [name for name in _FIELDS[:4] if name not in data]:
        raise RecordError(
            f"it lacks {missing[0]!r}: a declaration has {', '.join(_FIELDS[:4])}; the reference says in torch "
            'what the kernel computes, as in reference = "reference.py:softmax"'
        )
    if not isinstance(data["parameters"], list) or not isinstance(data["workloads"], list):
        raise RecordError("parameters and workloads must be lists of tables")
    parameters = tuple(
        codec.from_json(KernelParameter, row, f"parameters[{n}]") for n, row in enumerate(data["parameters"])
    )
    tensors = {p.name: p for p in parameters if not p.is_number}
    about = {
        "schema": 1,
        "name": entry,
        "axes": data["axes"],
        "inputs": {n: _tensor(p) for n, p in tensors.items() if not p.output},
        "outputs": {n: _tensor(p) for n, p in tensors.items() if p.output},
        "destination": True,
        **{name: data[name] for name in _ABOUT if name in data},
    }
    if not tensors or not about["inputs"] or not about["outputs"]:
        check_signature(KernelSignature(entry, parameters), {})
    definition = Definition.from_json(about)
    fixed = {n: a.value for n, a in definition.axes.items() if a.value is not None}
    signature = KernelSignature(entry, parameters, fixed)
    check_signature(signature, definition.axes)
    works = tuple(Workload.from_json(w) for w in data["workloads"])
    if all(w.large or w.host for w in works):
        raise RecordError("it needs a workload that is not large: results are checked there many times")
    return Pack(definition, _reference(data["reference"], where), works), signature


def _tensor(parameter: KernelParameter) -> dict[str, Any]:
    return {"shape": list(parameter.shape), "dtype": parameter.dtype} | (
        {"values": list(parameter.values)} if parameter.values else {}
    )


def _reference(value: object, where: Path) -> str:
    """The text of a reference, which defines `reference`. Raises `RecordError`, `SettingsError`."""
    match = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise RecordError(f'reference must be "FILE.py:FUNCTION", a function of torch, not {value!r:.60}')
    text = _read(where.parent / match["file"], "the reference")
    if not re.search(rf"^def {match['name']}\(", text, re.MULTILINE):
        raise RecordError(f"reference: {match['file']} has no function {match['name']} at its top level")
    return text if match["name"] == "reference" else f"{text.rstrip()}\n\n\nreference = {match['name']}\n"


def _read(path: Path, contents: str) -> str:
    if not path.is_file():
        raise SettingsError(f"there is no {path}: it holds {contents}")
    try:
        return read_document(path).replace("\r\n", "\n")
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error}") from error


def _toml(text: str, where: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise RecordError(f"{where} is not TOML: {error!s:.300}") from error
