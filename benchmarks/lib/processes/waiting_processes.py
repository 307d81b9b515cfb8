"""Processes that get ready side by side and then work one at a time, each when it is given its turn."""

from __future__ import annotations

import json
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# --- the child ---


def say_ready() -> None:
    """Tell the parent that what comes before the work is done."""
    print(json.dumps({"ready": True}), flush=True)


def wait_for_turn() -> dict[str, Any]:
    """What the parent gives with the turn. Raises `SystemExit` when the parent has ended."""
    line = sys.stdin.readline()
    if not line:
        raise SystemExit("the parent has ended")
    found: dict[str, Any] = json.loads(line)
    return found


def give_answer(answer: Mapping[str, Any]) -> None:
    """What came of the turn; the process is expected to end then."""
    print(json.dumps({"answer": answer}, allow_nan=False), flush=True)


# --- the parent ---


class WaitingChild:
    """A process that gets ready by itself and answers once it is given its turn."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            command, env=dict(environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def wait_until_ready(self, limit_s: float) -> None:
        """Raises `RuntimeError` when it ends before, or is late."""
        self._next("ready", limit_s)

    def take_turn(self, turn: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """What it answers. Raises `RuntimeError` when it ends before, or is late."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(turn) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise RuntimeError(f"the process has ended: {error}") from error
        found: dict[str, Any] = self._next("answer", limit_s)
        try:
            self._process.wait(limit_s)  # the next one's turn must not meet this one's end
        except subprocess.TimeoutExpired:
            self._process.kill()
        return found

    def _next(self, name: str, limit_s: float) -> Any:
        end = time.monotonic() + limit_s
        try:
            while (line := self._lines.get(timeout=max(0.0, end - time.monotonic()))) is not None:
                if line.startswith(f'{{"{name}": '):  # compilers print what they abort on, in braces too
                    return json.loads(line)[name]
        except queue.Empty:
            raise RuntimeError(f"not {name} after {limit_s:g} s") from None
        raise RuntimeError(f"the process ended before it was {name}, with {self._process.wait(10)}")

    def close(self) -> None:
        """End it, whatever it does."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


def copy_missing(source: str, to: str) -> str:
    """Libraries that the waiting process has mapped must not change under it."""
    return to if Path(to).exists() else str(shutil.copy2(source, to))
