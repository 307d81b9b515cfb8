"""The functions with which vLLM and SGLang look their MoE files up, taken out of an unpacked wheel and run alone.

Nothing of the packages is imported, which would need all that they depend on: the text of each function is compiled
with stand-ins for the few names that it uses.
"""

from __future__ import annotations

import ast
import functools
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_NO_FOLDER = os.path.join(os.sep, "no", "such", "folder", "loader.py")  # noqa: PTH118  (never opened)


@dataclass(frozen=True)
class Loader:
    """One package's reader of files: `names` are its dtype names, `name` and `read` its own functions."""

    package: str
    version: str
    files: tuple[Path, ...]
    """What it ships, in the order of their names."""
    names: frozenset[str | None]
    """Every name of a data type that it can ask for."""
    name: Callable[..., str]
    """(layer, device) to a file's name."""
    read: Callable[..., dict[int, Any] | None]
    """(layer, device, folder, release of Triton) to what it finds there."""


@dataclass(frozen=True)
class NamedLayer:
    """What a file's name says."""

    experts: int
    width: int
    dtype: str | None
    block: tuple[int, int] | None
    per_channel: bool = False


def vllm_loader(root: Path) -> Loader:
    """vLLM's, of an unpacked wheel. Raises `FileNotFoundError` where it is laid out otherwise."""
    folder = root / "vllm" / "model_executor" / "layers" / "fused_moe"
    given = SimpleNamespace(device="", folder=None)

    class Environment:
        VLLM_BATCH_INVARIANT = False

        @property
        def VLLM_TUNED_CONFIG_FOLDER(self) -> str | None:
            return given.folder

    found = compiled(
        folder / "fused_moe.py",
        ("get_config_file_name", "get_moe_configs"),
        {"envs": Environment(), "get_device_name_as_file_name": lambda: given.device},
    )
    dtypes = compiled(folder / "config.py", ("_get_config_dtype_str",))["_get_config_dtype_str"]

    def name(layer: NamedLayer, device: str) -> str:
        given.device = device
        block = list(layer.block) if layer.block else None
        return str(found["get_config_file_name"](layer.experts, layer.width, layer.dtype, block))

    def read(layer: NamedLayer, device: str, where: Path, triton: str) -> dict[int, Any] | None:
        given.device, given.folder = device, str(where)
        found["get_moe_configs"].cache_clear()
        made: dict[int, Any] | None = found["get_moe_configs"](
            layer.experts, layer.width, layer.dtype, *(layer.block or (None, None))
        )
        return made

    flags = ("use_fp8_w8a8", "use_fp8_w8a16", "use_int8_w8a16", "use_int4_w4a16")
    files = tuple(sorted((folder / "configs").glob("*.json")))
    return Loader("vllm", version_of(root, "vllm"), files, _asked_for(dtypes, flags), name, read)


def sglang_loader(root: Path) -> Loader:
    """SGLang's, of an unpacked wheel. Raises `FileNotFoundError` where it is laid out otherwise."""
    folder = root / "sglang" / "srt" / "layers" / "moe" / "moe_runner" / "triton_utils"
    given = SimpleNamespace(device="", folder="", triton="")
    running = SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=False))

    class Triton:
        @property
        def __version__(self) -> str:
            return str(given.triton)

    class System:
        path, listdir = os.path, staticmethod(os.listdir)

        @property
        def environ(self) -> Mapping[str, str]:
            return {"SGLANG_MOE_CONFIG_DIR": given.folder}

    found = compiled(
        folder / "fused_moe_triton_config.py",
        ("get_config_file_name", "get_moe_configs", "get_config_dtype_str"),
        {
            "get_device_name": lambda: given.device,
            "get_exec": lambda: running,
            "triton": Triton(),
            "os": System(),
        },
    )

    def name(layer: NamedLayer, device: str) -> str:
        given.device = device
        block = list(layer.block) if layer.block else None
        return str(
            found["get_config_file_name"](layer.experts, layer.width, layer.dtype, block, layer.per_channel)
        )

    def read(layer: NamedLayer, device: str, where: Path, triton: str) -> dict[int, Any] | None:
        given.device, given.folder, given.triton = device, str(where), triton
        found["get_moe_configs"].cache_clear()
        made: dict[int, Any] | None = found["get_moe_configs"](
            layer.experts, layer.width, layer.dtype, *(layer.block or (0, 0)), layer.per_channel
        )
        return made

    flags = ("use_int8_w8a16", "use_int4_w4a16", "use_fp8_w8a8", "use_int8_w8a8")
    files = tuple(sorted((folder / "configs").glob("triton_*/*.json")))
    asked = _asked_for(found["get_config_dtype_str"], flags)
    return Loader("sglang", version_of(root, "sglang"), files, asked, name, read)


def _asked_for(dtype_name: Callable[..., str | None], flags: tuple[str, ...]) -> frozenset[str | None]:
    """The names of all data types: of each flag alone, and of plain ones."""
    kinds = [dtype_name(dtype=kind) for kind in ("float", "bfloat16")]
    return frozenset([*kinds, *(dtype_name(dtype="bfloat16", **{flag: True}) for flag in flags)])


def version_of(root: Path, package: str) -> str:
    """The version that the wheel's metadata names. Raises `FileNotFoundError` without any."""
    for path in root.glob(f"{package}-*.dist-info"):
        return path.name.removesuffix(".dist-info").partition("-")[2]
    raise FileNotFoundError(f"{root} has no {package}-*.dist-info: unpack the wheel there")


def compiled(path: Path, wanted: tuple[str, ...], names: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The functions of a module by name, without the rest of it. Raises `LookupError` for one that is not there."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kept = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in wanted]
    if missing := {*wanted} - {node.name for node in kept}:
        raise LookupError(f"{path.name} has no function {', '.join(sorted(missing))}")
    quiet = SimpleNamespace(**dict.fromkeys(("info", "info_once", "warning", "warning_once"), _say_nothing))
    made: dict[str, Any] = {
        "functools": functools,
        "json": json,
        "logger": quiet,
        "os": os,
        "torch": SimpleNamespace(dtype=str, float="float"),
        "__file__": _NO_FOLDER,
        **(names or {}),
    }
    future = ast.parse("from __future__ import annotations").body  # so that no annotation is looked up
    exec(compile(ast.Module([*future, *kept], []), str(path), "exec"), made)
    return made


def _say_nothing(*_: Any, **__: Any) -> None:
    """In place of a logger."""
