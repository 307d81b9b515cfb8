"""The base kernel's binaries: compiled once while it is surveyed or verified against, used by later verifications.

The files are Triton's own cache, under Triton's own keys: source, config, options, toolchain. Only a cell that runs
the base kernel and nothing else writes it, and only such cells read it: what a variant runs in never sees it, but for
the modules that kernels of equal signatures are launched through, which Triton makes of the signature alone.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path, PurePath
from typing import Any

from forecast_autotune.variants.signature import ADDRESSES
from forecast_harness.sandbox.jobs import CellAnswer, TensorArrays, TensorBytes

READ_ENTRY, WRITE_ENTRY = f"{__name__}:read_cache", f"{__name__}:write_cache"
_GROUP = "__grp__"
"""The prefix of the name of a file that lists the files of a binary."""
_KEPT = (".json", ".cubin")
"""The files that a launch needs; the others are stages on the way."""
_LAUNCHERS = "*/__triton_launcher*"
"""Modules that releases up to 3.6 launch through: one for each signature, which tells types alone."""
_MOST_BYTES = 32 << 20


@dataclass
class BaseBinaries:
    """Files of Triton's cache, by `key/name`; empty until a survey has filled it."""

    files: dict[str, bytes] = field(default_factory=dict)
    steps: dict[str, float] = field(default_factory=dict)
    """Seconds of the survey, by step."""

    def take(self, arrays: TensorArrays) -> None:
        """Add the files of a base kernel's cell, as `read_cache` gives them. Others may be reading the files."""
        space = _MOST_BYTES - sum(map(len, self.files.values()))
        if sum(len(a.data) for a in arrays.values()) <= space:
            self.files = {**self.files, **{name: bytes(a.data) for name, a in arrays.items()}}

    def to_payload(self) -> dict[str, str]:
        """The files as JSON."""
        return {name: base64.b64encode(data).decode() for name, data in self.files.items()}


def binaries_as_arrays(payload: Mapping[str, str]) -> dict[str, TensorBytes]:
    """The arrays that `write_cache` is given, from `BaseBinaries.to_payload`."""
    return _as_arrays({name: base64.b64decode(data) for name, data in payload.items()})


def launchers_among(arrays: Mapping[str, TensorBytes]) -> dict[str, TensorBytes]:
    """The files through which a variant may be launched, too."""
    return {name: array for name, array in arrays.items() if PurePath(name).match(_LAUNCHERS)}


def architecture_of(arrays: Mapping[str, TensorBytes]) -> int | None:
    """The architecture that these were compiled for, as Triton's `GPUTarget` has it; None where none of them tells."""
    for name, array in arrays.items():
        path = PurePath(name)
        if path.suffix == ".json" and not path.name.startswith(_GROUP):
            with contextlib.suppress(KeyError, TypeError, ValueError):
                return int(json.loads(bytes(array.data))["target"]["arch"])
    return None


def _as_arrays(files: Mapping[str, bytes]) -> dict[str, TensorBytes]:
    return {name: TensorBytes("uint8", (len(data),), data) for name, data in files.items()}


def read_cache(
    payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes], state: dict[str, Any]
) -> CellAnswer:
    """The files of all binaries in this cell's cache, as far as they are not too many."""
    results: dict[str, TensorBytes] = {}
    space = _MOST_BYTES
    for group in sorted(_cache_folder().glob(f"*/{_GROUP}*")):
        members = [group.with_name(name) for name in _children(group) if name.endswith(_KEPT)]
        files = {f"{p.parent.name}/{p.name}": p.read_bytes() for p in (group, *members) if p.is_file()}
        if (size := sum(map(len, files.values()))) > space or len(files) <= 1:
            continue
        space -= size
        results |= _as_arrays(files)
    for launcher in sorted(_cache_folder().glob(_LAUNCHERS)):
        data = launcher.read_bytes()
        if len(data) <= space:
            space -= len(data)
            results |= _as_arrays({f"{launcher.parent.name}/{launcher.name}": data})
    return CellAnswer({}, results)


def write_cache(
    payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes], state: dict[str, Any]
) -> CellAnswer:
    """Put files into this cell's cache, before they would be compiled."""
    for name, array in arrays.items():
        if len(parts := PurePath(name).parts) != 2 or ".." in parts:
            continue
        path = _cache_folder() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = bytes(array.data)
        if path.name.startswith(_GROUP):  # it names its files by where they lay
            names = [n for n in _names(json.loads(data)) if f"{path.parent.name}/{n}" in arrays]
            data = json.dumps({"child_paths": {n: str(path.with_name(n)) for n in names}}).encode()
        path.write_bytes(data)
    return CellAnswer({})


def _cache_folder() -> Path:
    return Path(os.environ["TRITON_CACHE_DIR"])


def _children(group: Path) -> list[str]:
    try:
        return _names(json.loads(group.read_text()))
    except (OSError, ValueError):
        return []


def _names(answer: Any) -> list[str]:
    children = answer.get("child_paths", {}) if isinstance(answer, dict) else {}
    return [str(name) for name in children if "/" not in str(name)]


VARIANT_FILE = "solution.py"
BASE_FILE = "base_solution.py"

_LAUNCHER_TEMPLATE = """import torch
import triton

import {module} as source
from forecast_autotune.variants.entry import KernelEntry, nested_arguments
from forecast_harness.trials.variants.files import viewed

ENTRY = KernelEntry.of(vars(source), {kernel!r})
triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda"))


def run(_views, _grid, _meta, _options, **named):
    ENTRY.run(_grid, nested_arguments(viewed(_views, named)), _meta, _options)


def compile_only(_views, _grid, _meta, _options, **named):
    return ENTRY.warmup(_grid, nested_arguments(viewed(_views, named)), _meta, _options)
"""


def viewed(views: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a launch, of flat tensors and others.

    `views` are [shape, stride, `Argument.extra`] of tensors, host-side descriptors, and tensors of addresses, which
    become those of where their tensors lie in this process. Runs in a cell.
    """
    results = dict(arguments)
    for name, (shape, stride, _) in views.items():
        results[name] = arguments[name].as_strided(shape, stride)
    tensors = dict(results)
    for name, (shape, stride, extra) in views.items():
        if descriptor := extra.get("descriptor"):
            from triton.tools.tensor_descriptor import TensorDescriptor

            shape, strides = descriptor.get("shape", shape), descriptor.get("strides", stride)
            results[name] = TensorDescriptor(
                tensors[name], list(shape), list(strides), list(descriptor["block"])
            )
        elif places := extra.get(ADDRESSES):
            addresses = (0 if p is None else tensors[f"{name}.{p[0]}"].data_ptr() + p[1] for p in places)
            flat = _address_tensor(tuple(addresses), tensors[name].dtype, tensors[name].device)
            results[name] = flat.as_strided(shape, stride)
    return results


@lru_cache(maxsize=64)
def _address_tensor(addresses: tuple[int, ...], dtype: Any, device: Any) -> Any:
    import torch

    # Kept: while a graph records a launch, nothing may be copied to the device.
    return torch.tensor(addresses, dtype=torch.int64).view(dtype).to(device)


def launcher_files(kernel: str, base: str, variant: str) -> dict[str, str]:
    """Files of a job, by name. A variant may read the base's: being equal to it is no cheating."""
    return {
        "base_kernel.py": base,
        BASE_FILE: _LAUNCHER_TEMPLATE.format(module="base_kernel", kernel=kernel),
        "variant_kernel.py": variant,
        VARIANT_FILE: _LAUNCHER_TEMPLATE.format(module="variant_kernel", kernel=kernel),
    }
