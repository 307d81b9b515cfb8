"""Compiled graphs of torch.compile in a bundle: one file of `torch.compiler.save_cache_artifacts()`, as it is.

They are code, pickled. A bundle carries them only where that was asked for, and nothing of ours ever reads one: who
trusts whoever made it takes the file out, by command and by the bundle's digest, and the program loads it itself.
"""

from __future__ import annotations

import zlib
from pathlib import Path

from forecast_autotune.errors import StoreError
from forecast_autotune.file_access import read_regular
from forecast_autotune.store.bundles.compiled import MAX_COMPILED_BYTES
from forecast_autotune.store.files import write_atomically

GRAPHS = "graphs"
GRAPHS_PATH = f"{GRAPHS}/mega_cache.bin"
_VERSION = (1).to_bytes(8, "big")


def graphs_file(path: Path) -> dict[str, bytes]:
    """The file by its path in a bundle.

    Raises `StoreError` where it is empty, too large, no regular file, or has another form.
    """
    try:
        data = read_regular(path, MAX_COMPILED_BYTES)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
    if not data:
        raise StoreError(f"{path} is empty: write the bytes of torch.compiler.save_cache_artifacts() to it")
    if not _is_saved_cache(data):
        raise StoreError(
            f"{path} holds no compiled graphs: write the bytes of torch.compiler.save_cache_artifacts() to it"
        )
    return {GRAPHS_PATH: data}


def _is_saved_cache(data: bytes) -> bool:
    """Whether bytes have the form that torch writes: a version, before which later releases put a checksum."""
    return data.startswith(_VERSION) or zlib.crc32(data[4:]).to_bytes(4, "big") == data[:4]


def take_out_graphs(data: bytes, target: Path) -> None:
    """Write a bundle's compiled graphs to a file. Raises `StoreError` where it exists or cannot be written."""
    try:
        if target.exists():
            raise StoreError(f"{target} exists: name a new file")
        write_atomically(target, data)
    except OSError as error:
        raise StoreError(f"cannot write {target}: {error}") from error
