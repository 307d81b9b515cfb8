"""What an import leaves out: rows that break a rule, each by file and line, and files that cannot be read."""

from __future__ import annotations

import warnings

from forecast_autotune.errors import RecordError
from forecast_autotune.printable import count_text
from forecast_autotune.store.files import StoreWarning

_SHOWN = 3
"""Refusals said one by one, of each file; garbage cannot flood a terminal."""


class Refusals:
    """Counts what is refused, and says the first of each file as `StoreWarning`s."""

    def __init__(self) -> None:
        self.rows = 0
        self.files = 0
        """Files that were refused as a whole."""
        self._of_file = 0

    def begin_file(self) -> None:
        """The rows refused from here on are those of another file."""
        self._of_file = 0

    def refuse_row(self, error: RecordError) -> None:
        """Count a row, which the others of its file do without."""
        self.rows += 1
        self._of_file += 1
        if self._of_file <= _SHOWN:
            warnings.warn(f"refused: {error}", StoreWarning, stacklevel=3)

    def refuse_file(self, error: Exception) -> None:
        """Count a file, which the other files do without."""
        self.files += 1
        warnings.warn(f"refused: {error}", StoreWarning, stacklevel=3)

    def summary(self) -> str:
        """How much was refused, in words; empty for nothing."""
        counts = [(self.rows, "row"), (self.files, "file")]
        return " and ".join(count_text(n, noun) for n, noun in counts if n)
