"""Who was being launched when a process died: a crash is recorded although nobody survived to tell.

Around a candidate's first launch a small file says what runs. If the process dies there (a kernel that
takes the process down, or hangs until somebody kills it), the file stays behind; the next process that
tunes the problem turns it into a failed measurement and does not try that candidate again.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from forecast_autotune.file_access import open_regular
from forecast_autotune.records import Candidate, Measurement, Outcome, Problem
from forecast_autotune.store.files import StoreNotes, host_name, make_kernel_folder, problem_file, write_all
from forecast_autotune.store.log import encode
from forecast_autotune.store.record_files import read_record

_PROCESS_ID = re.compile("[0-9]{1,9}")


@contextlib.contextmanager
def launch_marker(directory: Path | None, problem: Problem, candidate: Candidate) -> Iterator[None]:
    """Leave a note while the block runs. Any ordinary way out, an exception too, removes it."""
    path = None if directory is None else directory / _marker_name(problem, os.getpid())
    text = encode(candidate.to_json())
    if path is not None:
        try:
            make_kernel_folder(path.parent)
            with open_regular(path, "wb") as stream:
                write_all(stream, text)
        except OSError:
            path = None  # a read-only store cannot watch; the launch goes on
    try:
        yield
    finally:
        if path is not None:
            with contextlib.suppress(OSError):
                path.unlink()


def recover_crashes(directory: Path | None, problem: Problem, notes: StoreNotes) -> list[Measurement]:
    """What dead processes of this host left behind, as failed measurements; removes what they left."""
    found: list[Measurement] = []
    if directory is None or not directory.is_dir():
        return found
    for path in directory.glob(_marker_name(problem, None)):
        pid = path.stem.rpartition("-")[2]
        # A note with our own number is from before a restart: we are not launching anything now.
        if not _PROCESS_ID.fullmatch(pid) or (int(pid) != os.getpid() and _is_alive(int(pid))):
            continue
        candidate = read_record(path, _sound_candidate, "no candidate", notes)
        if candidate is not None:
            found.append(
                Measurement(
                    problem.id,
                    candidate,
                    Outcome.RUNTIME_ERROR,
                    protocol="watch",
                    at=datetime.now(UTC).isoformat(timespec="seconds"),
                    extra={"message": "the process died or was killed during the first launch"},
                )
            )
        with contextlib.suppress(OSError):
            path.unlink()
    return found


def _sound_candidate(data: Any) -> Candidate:
    candidate = Candidate.from_json(data)
    hash(candidate)
    return candidate


def forget(directory: Path) -> None:
    """Remove all notes of a kernel's directory, those of running processes too."""
    for path in directory.glob("running-*.json"):
        with contextlib.suppress(OSError):
            path.unlink()


def _marker_name(problem: Problem, pid: int | None) -> str:
    return f"running-{problem_file(problem.id)}-{host_name()}-{'*' if pid is None else pid}.json"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # somebody else's process: it exists
    return True
