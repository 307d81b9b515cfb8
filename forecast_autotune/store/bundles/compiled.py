"""Compiled kernels in a bundle: the contents of Triton's cache, without the folder it was in.

They are code. A bundle carries them only where that was asked for, and nothing loads them from a bundle: who
trusts whoever made it installs them into Triton's cache, by command and by the bundle's digest.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from forecast_autotune.errors import StoreError
from forecast_autotune.file_access import read_regular
from forecast_autotune.store.bundles.manifest import is_plain_path
from forecast_autotune.store.files import write_atomically

COMPILED = "compiled"
_FOLDER = f"{COMPILED}/triton/"
_GROUP = "__grp__"
"""How files of Triton's cache begin that list others, by their paths."""
MAX_COMPILED_BYTES = 512 * 1024 * 1024
"""Of one file."""


def compiled_files(cache: Path) -> dict[str, bytes]:
    """What is in Triton's cache, by its path in a bundle. Raises `StoreError` where there is nothing."""
    found: dict[str, bytes] = {}
    for path in sorted(p for p in cache.glob("*/*") if p.is_file()):
        name = f"{path.parent.name}/{path.name}"
        if not is_plain_path(name) or path.suffix == ".lock" or ".tmp" in path.name:
            continue
        data = read_regular(path, MAX_COMPILED_BYTES)
        found[_FOLDER + name] = _relative_group(data) if path.name.startswith(_GROUP) else data
    if not found:
        raise StoreError(
            f"{cache} holds no compiled kernels: run the program once with TRITON_CACHE_DIR={cache}"
        )
    return found


def is_compiled(path: str) -> bool:
    """Whether a file of a bundle is one of these."""
    return path.startswith(_FOLDER) and path.count("/") == 3


def install_compiled(files: Mapping[str, bytes], cache: Path) -> int:
    """Put a bundle's compiled kernels into Triton's cache, where they are not there yet; returns how many files.

    Raises `StoreError` where it cannot be written.
    """
    count = 0
    # The lists of files come last: what they name is there by then.
    for path in sorted(files, key=lambda p: (p.rsplit("/", 1)[-1].startswith(_GROUP), p)):
        target = cache / path.removeprefix(_FOLDER)
        data = files[path]
        if target.name.startswith(_GROUP):
            data = _placed_group(data, target.parent)
        try:
            if target.exists():
                continue
            write_atomically(target, data)
            if target.suffix == ".so":
                target.chmod(0o755)
        except OSError as error:
            raise StoreError(f"cannot write {target}: {error}") from error
        count += 1
    return count


def _relative_group(data: bytes) -> bytes:
    """A list of files with their names alone; as it is where it is none."""
    return _mapped_group(data, lambda path: os.path.basename(path))  # noqa: PTH119 - a text of another machine


def _placed_group(data: bytes, folder: Path) -> bytes:
    return _mapped_group(data, lambda name: str(folder.absolute() / os.path.basename(name)))  # noqa: PTH119


def _mapped_group(data: bytes, move: object) -> bytes:
    try:
        listed = json.loads(data)
        paths = listed["child_paths"]
        listed["child_paths"] = {str(name): move(str(path)) for name, path in paths.items()}  # type: ignore[operator]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return data
    return json.dumps(listed).encode()
