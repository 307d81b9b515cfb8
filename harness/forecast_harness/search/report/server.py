"""A search's page on this machine, while it runs and afterwards. Reads the log; knows nothing of the search.

Only 127.0.0.1 listens, and only two addresses answer: the page, and the JSON that it asks for news. A request
must name this server as its host: a foreign site whose name is made to point here (DNS rebinding) names its
own. Nothing can be changed through it.
"""

from __future__ import annotations

import json
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, urlsplit

from forecast_autotune.errors import ForecastAutotuneError, StoreError
from forecast_harness.search.history import log
from forecast_harness.search.history.state import SearchState, apply_event
from forecast_harness.search.report import render
from forecast_harness.search.report.report_model import build_report

ADDRESS = "127.0.0.1"
_REDRAW_PAUSE_FACTOR = 10
"""Drawing the page may take a tenth of one core: the search is measuring at the same time."""
_EMPTY_PAGE = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="2">'
    '<title>search</title><link rel="icon" href="data:,"><p>The search has written nothing yet.</p></html>'
)


class CannotServeReport(ForecastAutotuneError):
    """The page cannot be served."""


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


class ReportServer:
    """Serves a search's folder until it is closed. Use as a context, or `close` it."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        self._reader = LogFollower(folder / "log.jsonl")
        self._lock = threading.Lock()
        self._rendered: dict[str, Any] | None = None
        self._next_render_at = 0.0
        try:
            self._http = _ReportHTTPServer((ADDRESS, port), _ReportHandler)
        except (OSError, OverflowError) as error:
            raise CannotServeReport(
                f"port {port} of {ADDRESS} cannot be used ({error}): name another one, or 0 for a free one"
            ) from error
        self._http.owner = self
        self._thread = threading.Thread(
            target=self._http.serve_forever, args=(0.1,), name="search page", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._http.server_address[1])

    @property
    def url(self) -> str:
        """What to open in a browser."""
        return f"http://{ADDRESS}:{self.port}/"

    def close(self) -> None:
        """Stop listening."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def __enter__(self) -> ReportServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def page(self) -> str:
        """The page as it is now."""
        with self._lock:
            state = self._reader.refresh()
            if state.started is None:
                return _EMPTY_PAGE
            return render.render_page(build_report(state), live=True, revision=self._reader.revision)

    def changes_since(self, known: str) -> dict[str, Any]:
        """What changed since the revision `known`: that revision alone if nothing did, or not yet shown."""
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


def serve(folder: Path, port: int = 0) -> ReportServer:
    """Serve the page of the search in `folder`, running or finished; port 0 takes any that is free.

    Raises `CannotServeReport` where the port cannot be had.
    """
    return ReportServer(folder, port)


def _revision_number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 18 else -1


class _ReportHTTPServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    owner: ReportServer


class _ReportHandler(BaseHTTPRequestHandler):
    server: _ReportHTTPServer
    server_version, sys_version = "forecast-autotune", ""
    timeout = 10.0

    def do_GET(self) -> None:
        """Answer `/` and `/state.json`, nothing else."""
        if self.headers.get("Host", "").lower() not in self._allowed_hosts():
            return self._answer(HTTPStatus.FORBIDDEN, "This server answers to its own address only.\n")
        asked = urlsplit(self.path)
        try:
            if asked.path == "/":
                return self._answer(HTTPStatus.OK, self.server.owner.page(), "text/html")
            if asked.path == "/state.json":
                known = parse_qs(asked.query).get("revision", [""])[0]
                news = self.server.owner.changes_since(known)
                return self._answer(HTTPStatus.OK, json.dumps(news, allow_nan=False), "application/json")
        except ForecastAutotuneError as error:
            return self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, f"{error}\n")
        return self._answer(HTTPStatus.NOT_FOUND, "There is nothing but the page at / and its state.json.\n")

    do_HEAD = do_GET

    def _allowed_hosts(self) -> tuple[str, str]:
        port = self.server.owner.port
        return f"{ADDRESS}:{port}", f"localhost:{port}"

    def _answer(self, status: HTTPStatus, text: str, kind: str = "text/plain") -> None:
        raw = text.encode("utf-8", "backslashreplace")
        self.send_response(status)
        for name, value in {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(raw)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the terminal belongs to the search."""
