"""The file-system parts of the store: names, locks, writes that a kill cannot spoil, files of one record each."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from forecast_autotune.errors import NewerRecordError, RecordError, StoreError
from forecast_autotune.file_access import misplaced_file, open_regular, read_regular
from forecast_autotune.printable import printable
from forecast_autotune.records import check_line
from forecast_autotune.records.bounded_json import decode_bounded, without_halves
from forecast_autotune.records.json_fields import MALFORMED

if TYPE_CHECKING:
    from filelock import BaseFileLock

    from forecast_autotune.records import Problem

VERSION = "v1"
"""Folder of measurements and decisions below a store's root; another layout gets another name."""
VARIANTS = "variants"
"""Folder of other sources of kernels."""
MISSES = "misses.jsonl"
"""Name of the file of misses in a store's folder."""
COMPILATIONS = "compilations.jsonl"
"""Name of the file of compilations in a store's folder."""
ADVICE = "advice"
"""Folder of advice below a store's root, and its name in the record of a problem that is exported."""
CAPTURES = "captures"
"""Folder of captured calls below a store's root."""
MANIFEST = "manifest.json"
"""File that tells a bundle's folder from a store's."""
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")
_PLAIN = re.compile(r"[A-Za-z0-9_-]{1,64}")

KernelName = tuple[str, str]
"""A device class and a kernel, by the names of their folders in a store."""


class StoreWarning(UserWarning):
    """Something in the store was skipped or could not be saved; tuning goes on without it."""


class StoreNotes:
    """Human-readable notes; each distinct one is kept and issued as a `StoreWarning` once."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.unread: set[Path] = set()  # files and folders that are there, and whose contents are not known
        self._topics: set[str] = set()

    def add(self, text: str, topic: str | None = None) -> None:
        """Keep and issue `text`, unless it, or an earlier note on the same `topic`, was issued before."""
        text = printable(text)  # it may quote a file
        if (topic or text) in self._topics:
            return
        self._topics.add(topic or text)
        self.texts.append(text)
        warnings.warn(text, StoreWarning, stacklevel=4)

    def add_unread(self, path: Path, why: str) -> None:
        """Note that the contents of a file or folder are not known: a miss may be none."""
        self.unread.add(path)
        self.add(f"{path}: {why}"[:300], topic=str(path))


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def kernel_directory(name: str) -> str:
    """A readable directory name that differs for different kernel names: at most 93 characters."""
    name = without_halves(name)  # as its records will be read again
    return f"{_UNSAFE.sub('-', name).strip('-.')[:80] or 'kernel'}-{_hashed(name)}"


def device_directory(slug: str) -> str:
    """The device slug itself, or a shortened and hashed one where a file system would refuse it."""
    slug = without_halves(slug)
    return slug if len(slug.encode()) <= 120 else f"{_UNSAFE.sub('-', slug)[:80]}-{_hashed(slug)}"


def kernel_of(problem: Problem) -> KernelName:
    """The folders of a problem in a store."""
    return device_directory(problem.device.slug), kernel_directory(problem.kernel.name)


def problem_file(problem_id: str) -> str:
    """A file name for a problem id.

    Ids come out of imported files too, so one that could leave the directory is replaced by its hash.
    """
    return problem_id if _PLAIN.fullmatch(problem_id) else f"id-{_hashed(problem_id)}"


def host_name() -> str:
    """This host, as part of a file name. Two hosts never append to one file."""
    return _UNSAFE.sub("-", platform.node()).strip("-.")[:80] or "localhost"


def acquire_lock(path: Path, timeout_s: float, poll_s: float) -> BaseFileLock | None:
    """Take an exclusive lock that dies with its holder.

    Returns None where no lock can be had at all (read-only directory, no support for locks). Raises
    `TimeoutError` when somebody else kept it for `timeout_s` seconds.
    """
    import filelock

    lock = filelock.FileLock(path, poll_interval=poll_s)
    try:
        lock.acquire(timeout=max(timeout_s, 0.0))
    except TimeoutError:
        raise
    except (OSError, NotImplementedError):
        return None
    return lock


def release_lock(lock: BaseFileLock | None) -> None:
    """Release a lock, unless its file system is gone, and the lock with it."""
    if lock is not None:
        try:
            lock.release()
        except OSError as error:
            warnings.warn(f"a lock was not released cleanly: {error}", StoreWarning, stacklevel=2)


def append(path: Path, payload: bytes, *, exclusive: bool) -> None:
    """Append complete lines to a log in one write, on a line of their own.

    Opens by path each time, so that a log that was cleared meanwhile is started anew. With
    `exclusive` (the caller holds the log's lock), a write that fails half-way is undone. Raises
    `OSError` when the bytes could not be written.
    """
    with open_regular(path, "ab+") as stream:
        size = stream.seek(0, os.SEEK_END)
        if size:
            stream.seek(size - 1)
            if stream.read(1) != b"\n":
                # A kill tore the last line: end it, or its text would swallow ours.
                payload = b"\n" + payload
        try:
            write_all(stream, payload)
        except OSError:
            if exclusive:
                stream.truncate(size)
            raise


def write_all(stream: BinaryIO, payload: bytes | memoryview) -> None:
    """Write to an unbuffered stream, however often it takes. Raises `OSError` where not all can be written."""
    count = stream.write(payload)
    while count < len(payload):  # only a full disk or a quota cuts a write: asking again says which
        count += stream.write(payload[count:])


def is_bundle(root: Path) -> bool:
    """Whether a folder is a bundle, which never changes."""
    return (root / MANIFEST).exists()


def bundle_text(root: Path) -> str:
    """The error's text where a bundle would be written to."""
    return f"{root} is a bundle, which never changes: name it in FORECAST_AUTOTUNE_STORES"


def make_store_folder(folder: Path, root: Path) -> None:
    """Make a folder in the store at `root`. Raises `OSError` where that is a bundle, or it cannot be made."""
    if is_bundle(root):
        raise OSError(bundle_text(root))
    folder.mkdir(parents=True, exist_ok=True)


def make_kernel_folder(folder: Path) -> None:
    """Make the folder of a kernel, `ROOT/v1/DEVICE/KERNEL`. Raises `OSError` as above."""
    make_store_folder(folder, folder.parents[2])


def write_atomically(path: Path, payload: bytes | memoryview) -> None:
    """Replace a small file atomically: readers see the old or the new bytes, never a mixture.

    Raises `OSError` when that is impossible; the old file then stays as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{host_name()}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        with open_regular(part, "wb") as stream:
            write_all(stream, payload)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def flush_to_disk(path: Path) -> None:
    """Make a file's bytes, and its name in the directory, survive a power cut. Raises `OSError`."""
    with open_regular(path, "rb+") as stream:
        os.fsync(stream.fileno())
    if os.name == "posix":  # elsewhere a directory cannot be opened
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


_encode_line = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False).encode
"""One encoder for all calls, unlike `json.dumps`. A value that holds itself recurses too deep: see `encode`."""


def encode(data: Mapping[str, Any]) -> bytes:
    """One record as a line of bytes.

    Pure ASCII, so that no tear can fall inside a character. Raises `RecordError` for values that
    JSON cannot hold.
    """
    try:
        return _encode_line(data).encode("ascii") + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        kind = data.get("type", "record")
        raise RecordError(
            f"a {kind} line holds only JSON values (no NaN, no infinity, no objects): {error}; "
            "convert what was put into its extra fields"
        ) from error


def decode(raw: bytes) -> dict[str, Any]:
    """Read one JSON object within the bounds of `decode_bounded`. Raises one of `MALFORMED`; runs nothing."""
    data = decode_bounded(raw.decode("utf-8"), repair=True)
    if not isinstance(data, dict):
        raise RecordError(f"expected an object, got {data!r:.60}")
    return data


FileRecord = TypeVar("FileRecord")
STORE_NAMES = (VERSION, VARIANTS, ADVICE, CAPTURES, MISSES, COMPILATIONS)
"""Names in a store's folder; one with none of it was never written to."""
_LAYOUT = re.compile(r"v[1-9]")


def check_folders(root: Path) -> None:
    """Raise `StoreError` where a store's folder, or one of those in it, is something else."""
    for folder in (root, root / VERSION, root / VARIANTS, root / ADVICE, root / CAPTURES):
        if message := misplaced_file(folder):
            raise StoreError(
                f"{folder} is {message} where a folder of the store belongs: move it away, or name another"
            )


def newer_layout_text(root: Path) -> str:
    """The warning about a store that a newer release keeps in another layout; empty where none does."""
    results = sorted(
        path.name for path in root.glob("v*") if _LAYOUT.fullmatch(path.name) and path.name > VERSION
    )
    names = " and ".join(results)
    return f"{root}: {names} is of a newer release and not read: upgrade forecast-autotune" if results else ""


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
    if message := misplaced_file(folder):
        _note_misplaced(folder, message, notes)
        return []
    try:
        return sorted(folder.glob(pattern))
    except OSError as error:
        notes.add_unread(folder, f"cannot be listed: {error}")
        return []


def list_folders(folder: Path, notes: StoreNotes) -> list[Path]:
    """The folders in a folder, in order; a note on what else is there, names with a leading dot left out."""
    result = list_files(folder, "[!.]*", notes)
    for path in result:
        if message := misplaced_file(path):
            _note_misplaced(path, message, notes)
    return [path for path in result if path.is_dir()]


def _note_misplaced(path: Path, kind: str, notes: StoreNotes) -> None:
    notes.add_unread(path, f"ignored, it is {kind} where a folder belongs: move it away")


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
        for folder in path.parents:
            if message := misplaced_file(folder):
                _note_misplaced(folder, message, notes)
    except OSError as error:
        notes.add_unread(path, f"cannot be read: {error}")
    except MALFORMED as error:
        notes.add_unread(path, f"ignored, {what} ({type(error).__name__}: {error})")
    return None


def remove_file(path: Path) -> bool:
    """Remove a file; whether it was there. Raises `StoreError` if it cannot be removed."""
    try:
        existed = path.exists()
        path.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"cannot remove {path}: {error}; remove it by hand") from error
    return existed
