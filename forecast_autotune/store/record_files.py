"""Files of one JSON record each: listed, read and removed; what is damaged is noted and passed over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from forecast_autotune.errors import StoreError
from forecast_autotune.store.files import StoreNotes
from forecast_autotune.store.log import MALFORMED, decode

FileRecord = TypeVar("FileRecord")


def list_files(folder: Path, pattern: str, notes: StoreNotes) -> list[Path]:
    """The files below a folder, in order; none, with a note, where it cannot be listed."""
    try:
        return sorted(folder.glob(pattern))
    except OSError as error:
        notes.add(f"{folder}: cannot be listed: {error}")
        return []


def read_record(
    path: Path, read: Callable[[Any], FileRecord], what: str, notes: StoreNotes
) -> FileRecord | None:
    """The record in a file; None where there is no file, or, with a note, no `what` in it."""
    try:
        return read(decode(path.read_bytes()))
    except FileNotFoundError:
        return None
    except OSError as error:
        notes.add(f"{path}: cannot be read: {error}")
    except MALFORMED as error:
        notes.add(f"{path}: ignored, {what} ({type(error).__name__}: {error})"[:300])
    return None


def remove_file(path: Path) -> bool:
    """Remove a file; whether it was there. Raises `StoreError` if it cannot be removed."""
    try:
        known = path.exists()
        path.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"cannot remove {path}: {error}; remove it by hand") from error
    return known
