"""A search's page on this machine, while it runs and afterwards. Reads the log; knows nothing of the search.

Two addresses answer: the page, and the JSON that it asks for news.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from forecast_autotune.errors import StoreError
from forecast_autotune.report.local_server import LocalServer, ServedText
from forecast_harness.search import log
from forecast_harness.search.report import render
from forecast_harness.search.report.figures import build_report
from forecast_harness.search.state import SearchState, apply_event

_REDRAW_PAUSE_FACTOR = 10
"""Drawing the page may take a tenth of one core: the search is measuring at the same time."""
_EMPTY_PAGE = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="2">'
    '<title>search</title><link rel="icon" href="data:,"><p>The search has written nothing yet.</p></html>'
)


class LogFollower:
    """Follows a log that another thread or process writes. Use under a lock."""

    def __init__(self, path: Path) -> None:
        self.path, self.state, self._read = path, SearchState(), 0

    def refresh(self) -> SearchState:
        """The state now; a line that is only half written counts the next time.

        Raises `RecordError` for a log that holds no events. A log that is not there yet is an empty one.
        """
        try:
            size = self.path.stat().st_size
            if size < self._read:  # another search took its place
                self.state, self._read = SearchState(), 0
            with self.path.open("rb") as file:
                file.seek(self._read)
                fresh = file.read()
        except FileNotFoundError:
            return self.state
        except OSError as error:
            raise StoreError(f"{self.path} cannot be read: {error}") from error
        events, taken = log.parse_log(fresh, self.path)
        for event in events:
            apply_event(self.state, event)
        self._read += taken
        return self.state

    @property
    def revision(self) -> str:
        """Changes with every event."""
        return str(self._read)


class ReportServer(LocalServer):
    """Serves a search's folder until it is closed. Use as a context, or `close` it."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        """Port 0 takes any that is free. Raises `CannotServePageError` where the port cannot be had."""
        self._reader = LogFollower(folder / "log.jsonl")
        self._lock = threading.Lock()
        self._rendered: dict[str, Any] | None = None
        self._next_render_at = 0.0
        super().__init__({"/": self._served_page, "/state.json": self._served_changes}, port)

    def page(self) -> str:
        """The page as it is now."""
        with self._lock:
            state = self._reader.refresh()
            if state.started is None:
                return _EMPTY_PAGE
            return render.render_page(build_report(state), live=True, revision=self._reader.revision)

    def changes_since(self, known: str) -> dict[str, Any]:
        """Changes since the revision `known`: that revision alone if there are none, or none drawn yet."""
        with self._lock:
            now = time.monotonic()
            if now >= self._next_render_at:
                state = self._reader.refresh()
                drawn = self._rendered["revision"] if self._rendered else ""
                if state.started is not None and self._reader.revision not in (known, drawn):
                    self._rendered = {
                        **render.render_parts(build_report(state), revision=self._reader.revision),
                        "revision": self._reader.revision,
                    }
                    after = time.monotonic()
                    self._next_render_at = after + _REDRAW_PAUSE_FACTOR * (after - now)
            if self._rendered is None or int(self._rendered["revision"]) <= _revision_number(known):
                return {"revision": known}
            return self._rendered

    def _served_page(self, query: str) -> ServedText:
        return ServedText(self.page())

    def _served_changes(self, query: str) -> ServedText:
        known = parse_qs(query).get("revision", [""])[0]
        return ServedText(json.dumps(self.changes_since(known), allow_nan=False), "application/json")


def serve(folder: Path, port: int = 0) -> ReportServer:
    """Serve the page of the search in `folder`, running or finished; port 0 takes any that is free.

    Raises `CannotServePageError` where the port cannot be had.
    """
    return ReportServer(folder, port)


def _revision_number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 18 else -1
