"""Files of one JSON record each: listed, read and removed; what is damaged is noted and passed over."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from forecast_autotune.errors import NewerRecordError, StoreError
from forecast_autotune.file_access import misplaced_file, read_regular
from forecast_autotune.records import check_line
from forecast_autotune.records.json_fields import MALFORMED
from forecast_autotune.store.files import ADVICE, VARIANTS, VERSION, StoreNotes, write_atomically
from forecast_autotune.store.log import decode
from forecast_autotune.store.misses import MISSES

FileRecord = TypeVar("FileRecord")
STORE_NAMES = (VERSION, VARIANTS, ADVICE, MISSES)
"""What a store's folder may hold; one with none of it was never written to."""
_LAYOUT = re.compile(r"v[1-9]")


def check_folders(root: Path) -> None:
    """Raise `StoreError` where a store's folder, or one of those in it, is something else."""
    for folder in (root, root / VERSION, root / VARIANTS, root / ADVICE):
        if said := misplaced_file(folder):
            raise StoreError(
                f"{folder} is {said} where a folder of the store belongs: move it away, or name another"
            )


def newer_layout_text(root: Path) -> str:
    """What is said of a store that a newer release keeps in another layout; empty where none does."""
    found = sorted(
        path.name for path in root.glob("v*") if _LAYOUT.fullmatch(path.name) and path.name > VERSION
    )
    listed = " and ".join(found)
    return f"{root}: {listed} is of a newer release and not read: upgrade forecast-autotune" if found else ""


def is_newer(path: Path) -> bool:
    """Whether a file holds a record that only a newer release can read."""
    try:
        data = decode(read_regular(path))
        check_line(data, str(data.get("type")))
    except NewerRecordError:
        return True
    except (OSError, *MALFORMED):
        pass
    return False


def replace_record(path: Path, payload: bytes) -> None:
    """Replace a file atomically. Raises `OSError` where it cannot be, and where a newer release wrote it."""
    if is_newer(path):
        raise OSError(f"a newer release wrote {path.name}: upgrade forecast-autotune")
    write_atomically(path, payload)


def list_files(folder: Path, pattern: str, notes: StoreNotes) -> list[Path]:
    """The files below a folder, in order; none, with a note, where it cannot be listed or is no folder."""
    if said := misplaced_file(folder):
        _note_misplaced(folder, said, notes)
        return []
    try:
        return sorted(folder.glob(pattern))
    except OSError as error:
        notes.add(f"{folder}: cannot be listed: {error}", topic=str(folder))
        return []


def list_folders(folder: Path, notes: StoreNotes) -> list[Path]:
    """The folders in a folder, in order; a note on what else is there, names with a leading dot left out."""
    found = list_files(folder, "[!.]*", notes)
    for path in found:
        if said := misplaced_file(path):
            _note_misplaced(path, said, notes)
    return [path for path in found if path.is_dir()]


def _note_misplaced(path: Path, said: str, notes: StoreNotes) -> None:
    notes.add(f"{path}: ignored, it is {said} where a folder belongs: move it away", topic=str(path))


def read_record(
    path: Path, read: Callable[[Any], FileRecord], what: str, notes: StoreNotes, *, holding: bytes = b""
) -> FileRecord | None:
    """The record in a file; None where there is no file, or, with one note for each file, no sound `what` in it.

    A file without the bytes `holding` is not even parsed.
    """
    try:
        raw = read_regular(path)
        return read(decode(raw)) if holding in raw else None
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        if said := misplaced_file(path.parent):
            _note_misplaced(path.parent, said, notes)
    except OSError as error:
        notes.add(f"{path}: cannot be read: {error}", topic=str(path))
    except MALFORMED as error:
        notes.add(f"{path}: ignored, {what} ({type(error).__name__}: {error})"[:300], topic=str(path))
    return None


def remove_file(path: Path) -> bool:
    """Remove a file; whether it was there. Raises `StoreError` if it cannot be removed."""
    try:
        known = path.exists()
        path.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"cannot remove {path}: {error}; remove it by hand") from error
    return known
