"""What Triton has the host's C compiler build before its first launch, built once per lane.

It is the same for every candidate, and without this every cell, whose cache is empty, would take the better
part of a second for it. Each gets a copy of its own, so that no candidate can leave another one anything.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

_built: dict[str, bytes] = {}
"""Relative path in Triton's cache -> contents."""


def build() -> None:
    """Build what a device needs, in the lane's server; nothing where Triton or the driver is not there.

    Loads the driver's library and calls nothing in it: forks can still use a device.
    """
    before = os.environ.get("TRITON_CACHE_DIR")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        try:
            from triton.backends.nvidia.driver import CudaUtils

            CudaUtils()
        except Exception:  # whatever is missing: candidates build it for themselves, or need none
            return
        finally:
            os.environ.pop("TRITON_CACHE_DIR")
            if before is not None:
                os.environ["TRITON_CACHE_DIR"] = before
        keep(Path(folder))


def keep(folder: Path) -> None:
    """Take all files of this cache; cells begin with them."""
    _built.update({str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()})


def unpack(folder: Path) -> None:
    """Put a copy into the cache of a cell."""
    for name, data in _built.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
