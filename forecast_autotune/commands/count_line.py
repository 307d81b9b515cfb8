"""The stage of a command at work: one line in place on a terminal; elsewhere a line per stage, and one a minute."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from forecast_autotune.printable import printable

if TYPE_CHECKING:
    from rich.console import Console

SILENCE_S = 60.0
"""Without a terminal, a command that works says so at least so often."""
_INTERVAL_S = 0.5


class CountLine:
    """Shows what `text()` says, at once and while it lasts; use as a context manager.

    A terminal's line is written anew with the seconds spent. Elsewhere a text is written when more of it changed than
    its numbers and what follows a colon, and after a minute without a line, with the seconds spent. The last text is
    always shown, after a second or more with the seconds in all. `between`: lines that `say` prints tell of a new text,
    and of the last.
    """

    def __init__(self, console: Console, text: Callable[[], str], *, between: bool = False) -> None:
        self._console, self._text, self._between = console, text, between
        self._end, self._lock = threading.Event(), threading.Lock()
        self._end.set()
        self._last_text, self._last_at = "", 0.0

    def __enter__(self) -> CountLine:
        self._end.clear()
        self._began = self._last_at = time.monotonic()
        if not self._between:
            self._show()
        self._thread = threading.Thread(target=self._repeat, name="count-line", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()
        if not self._between:
            self._show(last=True)
        if self._console.is_terminal:
            self._console.file.write("\r\x1b[K" if self._between else "\n")
            self._console.file.flush()

    def say(self, line: str) -> None:
        """Print a line of its own."""
        with self._lock:
            if self._console.is_terminal and not self._end.is_set():
                self._console.file.write("\r\x1b[K")
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)
            self._last_at = time.monotonic()

    def _repeat(self) -> None:
        while not self._end.wait(_INTERVAL_S):
            with self._lock:
                self._show()

    def _show(self, *, last: bool = False) -> None:
        """Write the text on a terminal; elsewhere where it says something new."""
        text, now = printable(self._text()), time.monotonic()
        seconds = now - self._began
        line_text = f"{text} ({seconds:.0f} s{' in all' if last else ''})"
        if self._console.is_terminal:
            self._console.file.write(f"\r{line_text[: max(1, self._console.width - 1)]}\x1b[K")
            self._console.file.flush()
            return
        is_new = (text if last else _stage(text)) != (self._last_text if last else _stage(self._last_text))
        if (is_new and not self._between) or (seconds >= 1.0 if last else now - self._last_at >= SILENCE_S):
            line = line_text if self._last_text or self._between else text
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)
            self._last_text, self._last_at = text, now


def _stage(text: str) -> str:
    return re.sub(r"\d+|(:| \.\.\.).*", "", text)
