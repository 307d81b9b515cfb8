"""Our own commands as children of `improve`, each in a process group of its own: a recorded program, a search."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import forecast_autotune
from forecast_autotune.commands.output import CommandError
from forecast_autotune.printable import printable
from forecast_autotune.records.program import (
    CHECK_FILE,
    PLAN_FILE,
    RECORDING_FILE,
    ProgramRecording,
    RecordingPlan,
)

OUTPUT_FILE = "output.txt"
"""All that a recorded program has printed, warnings of ours included."""
_COMMAND = f"""import sys
if not sys.flags.safe_path:
    sys.path[0] = {str(Path(forecast_autotune.__file__).parents[1])!r}
from forecast_autotune.commands import main
sys.exit(main())"""
"""Our command line without the current directory, where the user's files may have names of the standard library."""
_GRACES_S = {True: (30.0,), False: (2.0, 5.0)}
"""Seconds for the work under way of a child that is asked to end, and again; by whether its result is kept."""
_SHOWN = 300
_ERROR = "forecast-autotune: error: "
_SUMMARIES = ("forecast-autotune: captured", "forecast-autotune: no kernel")
"""Lines that `run` writes after the program's last one."""


@dataclass(frozen=True)
class UserProgram:
    """The user's program, as `run` takes it."""

    words: tuple[str, ...]
    """SCRIPT or `-m MODULE`, and the program's own arguments."""

    @property
    def script(self) -> Path | None:
        """Its file; None for a module."""
        return None if self.words[0] == "-m" else Path(self.words[0])

    @property
    def root(self) -> Path:
        """The folder of its own files."""
        return Path.cwd() if self.script is None else self.script.absolute().parent


@dataclass(frozen=True)
class ChildEnd:
    """The end of a child: its status and its output."""

    status: int
    stdout: str
    stderr: str
    in_time: bool = True

    @property
    def last_line(self) -> str:
        """The last line of its standard error, but for our summaries; printable."""
        lines = [
            line for line in self.stderr.splitlines() if line.strip() and not line.startswith(_SUMMARIES)
        ]
        return printable(lines[-1] if lines else "", _SHOWN)


def record(
    program: UserProgram,
    plan: RecordingPlan,
    folder: Path,
    store: Path,
    *,
    seconds: float,
    capture: bool = False,
    variants: bool = False,
) -> ProgramRecording:
    """Run the program under a plan and read its recording.

    A program that has not ended after `seconds` is interrupted, and counts as far as it was recorded. Raises
    `CommandError` where it fails, or leaves no recording.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in (RECORDING_FILE, CHECK_FILE):
        (folder / name).unlink(missing_ok=True)
    (folder / PLAN_FILE).write_text(json.dumps(plan.to_json()), encoding="utf-8")
    words = ["run", "--recording", str(folder), *(["--capture"] if capture else []), *program.words]
    environment = {"FORECAST_AUTOTUNE_CACHE_DIR": str(store)}
    environment["FORECAST_AUTOTUNE_VARIANTS"] = "store" if variants else "off"
    end = run_command(words, seconds=seconds, environment=environment)
    (folder / OUTPUT_FILE).write_text(end.stdout + end.stderr, encoding="utf-8", errors="replace")
    try:
        text = (folder / RECORDING_FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        text = ""
    if end.status and end.in_time:
        cause = f"with exit status {end.status}" if end.status > 0 else f"by signal {-end.status}"
        line = end.last_line.removeprefix(_ERROR)
        raise CommandError(f"the program fails, {cause}: {line or 'it says nothing'}")
    if not text:
        why = (
            "it ends by os._exit, which skips what is to be written then" if end.in_time else "it was killed"
        )
        raise CommandError(f"the program left no recording: {end.last_line or why}")
    recording = ProgramRecording.from_json(json.loads(text))
    if end.in_time:
        return recording
    recording = replace(recording, interrupted=True)
    (folder / RECORDING_FILE).write_text(json.dumps(recording.to_json()), encoding="utf-8")
    return recording


def run_command(
    words: Sequence[str], *, seconds: float | None = None, environment: Mapping[str, str] | None = None
) -> ChildEnd:
    """Run one of our commands. It is interrupted after `seconds`, or with us, and killed where it goes on."""
    child = start_command(words, environment or {})
    in_time = True
    try:
        try:
            stdout, stderr = child.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            in_time = False
            stdout, stderr = _interrupt(child, keep_result=True)
    except KeyboardInterrupt:
        _interrupt(child, keep_result=False)
        raise
    finally:
        _signal_group(child, signal.SIGKILL)  # whatever it left behind
    return ChildEnd(child.returncode, stdout, stderr, in_time)


def start_command(words: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start one of our commands in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", _COMMAND, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, **environment},
        start_new_session=True,
    )


def end_child(child: subprocess.Popen[str]) -> None:
    """Ask a child to end, and kill it and what it left behind."""
    if child.poll() is None:
        _interrupt(child, keep_result=False)
    _signal_group(child, signal.SIGKILL)


def _interrupt(child: subprocess.Popen[str], *, keep_result: bool) -> tuple[str, str]:
    for grace in _GRACES_S[keep_result]:
        _signal_group(child, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            return child.communicate(timeout=grace)
    _signal_group(child, signal.SIGKILL)
    return child.communicate()


def _signal_group(child: subprocess.Popen[str], number: int) -> None:
    try:
        os.killpg(child.pid, number)
    except ProcessLookupError:
        return
