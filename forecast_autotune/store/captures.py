"""Captured calls on disk: `captures/<kernel>/<call>.json` below the root, tensors' bytes in `contents` beside them.

Their total size is bounded: beyond it the record of a tensor describes the distribution of its numbers only.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from forecast_autotune.errors import StoreError
from forecast_autotune.records.captured_call import CapturedCall
from forecast_autotune.store.files import (
    CAPTURES,
    StoreNotes,
    encode,
    kernel_directory,
    list_files,
    list_folders,
    make_store_folder,
    problem_file,
    read_record,
    write_atomically,
)

MOST_BYTES = 4 << 30
"""Bytes of all captured contents of a store."""
_FREE_SHARE = 0.5
"""The share of a disk's free space that one tensor's contents may take."""


class CaptureFiles:
    """The captured calls of a store below `root`."""

    def __init__(self, root: Path, notes: StoreNotes) -> None:
        self.path = root / CAPTURES
        self._notes = notes
        self._bytes: int | None = None

    def every(self, kernel: Callable[[str], bool] = lambda name: True) -> Iterator[tuple[CapturedCall, Path]]:
        """The calls of kernels with such a name, each with the file of its record; damaged ones are noted."""
        for folder in list_folders(self.path, self._notes):
            for path in list_files(folder, "[!.]*.json", self._notes):
                call = read_record(path, CapturedCall.from_json, "no captured call", self._notes)
                if call is not None and kernel(call.kernel.name):
                    yield call, path

    def folder(self, call: CapturedCall) -> Path:
        """Where a call's record lies."""
        return self.path / f"{kernel_directory(call.kernel.name)}-{call.kernel.source_sha256[:12]}"

    def put(self, call: CapturedCall) -> None:
        """Keep a record. Raises `OSError`."""
        folder = self.folder(call)
        make_store_folder(folder, self.path.parent)
        write_atomically(folder / f"{problem_file(call.id)}.json", encode(call.to_json()))

    def remove(self, call: CapturedCall) -> None:
        """Remove a record, and leave its contents, which others may share, to `clear`."""
        with contextlib.suppress(OSError):
            (self.folder(call) / f"{problem_file(call.id)}.json").unlink()

    def put_contents(self, call: CapturedCall, data: memoryview) -> str:
        """Keep bytes for a call; their digest, or '' where there is no room for them. Raises `OSError`."""
        digest = hashlib.sha256(data).hexdigest()
        path = contents_file(self.folder(call), digest)
        if path.is_file():
            return digest
        make_store_folder(path.parent, self.path.parent)
        if self._bytes is None:
            self._bytes = self.size()
        room = min(MOST_BYTES - self._bytes, int(shutil.disk_usage(path.parent).free * _FREE_SHARE))
        if data.nbytes > room:
            return ""
        write_atomically(path, data)
        self._bytes += data.nbytes
        return digest

    def size(self) -> int:
        """Bytes of all contents."""
        return sum(p.stat().st_size for p in self.path.glob("*/contents/*")) if self.path.is_dir() else 0

    def clear(self, kernel: Callable[[str], bool]) -> int:
        """Remove the calls of kernels with such a name, and their contents; returns how many.

        Raises `StoreError` where that is not permitted.
        """
        folders = [path.parent for _, path in self.every(kernel)]
        for folder in dict.fromkeys(folders):
            try:
                shutil.rmtree(folder)
            except OSError as error:
                raise StoreError(f"{folder} cannot be removed: {error}") from error
        self._bytes = None
        return len(folders)


def contents_file(folder: Path, digest: str) -> Path:
    """The file of some contents, from the folder of a call's record."""
    return folder / "contents" / problem_file(digest)
