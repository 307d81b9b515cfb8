"""Triton's work before its first compilation or launch, done once for all lanes.

It is the same for every candidate, and without this every cell, whose cache is empty, would take the better
part of a second for it. Each gets a copy of its own, so that no candidate can leave another one anything.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

_cache: dict[str, bytes] = {}
"""Relative path in Triton's cache -> contents."""


def read_triton() -> None:
    """Compute once, in the lane's server, the key of Triton itself, which the first compilation asks for.

    That reads all of Triton and hashes it, which takes a processor for a second or two and leaves Python to others.
    """
    with contextlib.suppress(ImportError):  # where another release of Triton keeps it elsewhere
        from triton.runtime.cache import triton_key

        triton_key()


def build_driver_module() -> None:
    """Build Triton's module for the driver, in the lane's server; nothing where Triton or the driver is not there.

    Loads the driver's library and calls nothing in it: forks can still use a device.
    """
    with tempfile.TemporaryDirectory() as folder, environment_variable("TRITON_CACHE_DIR", folder):
        try:
            from triton.backends.nvidia.driver import CudaUtils

            CudaUtils()
        except Exception:  # whatever is missing: candidates build it for themselves, or need none
            return
        keep_cache_files(Path(folder))


@contextlib.contextmanager
def environment_variable(name: str, value: str) -> Iterator[None]:
    """Set a variable of this process's environment for a while."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def keep_cache_files(folder: Path) -> None:
    """Take all files of this cache; cells begin with them."""
    _cache.update({str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()})


def restore_cache_files(folder: Path) -> None:
    """Put a copy of these files into the cache of a cell."""
    for name, data in _cache.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
