"""One line of counts while a command works: written over itself on a terminal, anew every two seconds elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from forecast_autotune.printable import printable

if TYPE_CHECKING:
    from rich.console import Console

_TERMINAL_INTERVAL_S, _PIPE_INTERVAL_S = 0.5, 2.0


class CountLine:
    """Shows what `text()` says, at once and while it lasts; use as a context manager.

    A terminal's line is written anew with the seconds spent. Elsewhere a line is written every two seconds, so that a
    log shows that work goes on: a text that has not changed with the seconds spent. The last text is always shown.
    """

    def __init__(self, console: Console, text: Callable[[], str]) -> None:
        self._console, self._text = console, text
        self._ended = threading.Event()
        self._shown, self._width = "", 0
        self._began = time.monotonic()

    def __enter__(self) -> CountLine:
        self._show()
        self._thread = threading.Thread(target=self._repeat, name="count-line", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._show()
        if self._console.is_terminal:
            self._console.file.write("\n")
            self._console.file.flush()

    def _repeat(self) -> None:
        interval = _TERMINAL_INTERVAL_S if self._console.is_terminal else _PIPE_INTERVAL_S
        while not self._ended.wait(interval):
            self._show(again=True)

    def _show(self, *, again: bool = False) -> None:
        """Write the text; elsewhere than on a terminal one that was written already only `again`."""
        text = printable(self._text())
        timed = f"{text} ({time.monotonic() - self._began:.0f} s)"
        if self._console.is_terminal:
            line = timed[: max(1, self._console.width - 1)]
            self._console.file.write(f"\r{line:{self._width}}")
            self._console.file.flush()
            self._width = len(line)
        elif again or text != self._shown:
            line = timed if text == self._shown else text
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)
        self._shown = text
