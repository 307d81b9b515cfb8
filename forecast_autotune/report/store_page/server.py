"""A page on this machine alone: only 127.0.0.1 listens, and nothing can be changed through it.

A request must name this server as its host: a foreign site whose name is made to point here (DNS rebinding)
names its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from forecast_autotune.errors import ForecastAutotuneError
from forecast_autotune.printable import printable

ADDRESS = "127.0.0.1"


class CannotServePageError(ForecastAutotuneError):
    """The page cannot be served."""


class PageServer:
    """Serves what `render` gives, asked anew each time, until it is closed. Use as a context, or `close` it.

    Raises `CannotServePageError` where the port cannot be had.
    """

    def __init__(self, render: Callable[[], str], port: int = 0) -> None:
        """Port 0 takes any that is free. `render` is never called by two threads at once."""
        self._render, self._mutex = render, threading.Lock()
        try:
            self._http = _PageHTTPServer((ADDRESS, port), _PageHandler)
        except (OSError, OverflowError) as error:
            raise CannotServePageError(
                f"port {port} of {ADDRESS} cannot be used ({error}): name another one, or 0 for a free one"
            ) from error
        self._http.owner = self
        self._thread = threading.Thread(
            target=self._http.serve_forever, args=(0.1,), name="store page", daemon=True
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

    def page(self) -> str:
        """The page as it is now."""
        with self._mutex:
            return self._render()

    def close(self) -> None:
        """Stop listening."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def __enter__(self) -> PageServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _PageHTTPServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    owner: PageServer


class _PageHandler(BaseHTTPRequestHandler):
    server: _PageHTTPServer
    server_version, sys_version = "forecast-autotune", ""
    timeout = 10.0

    def do_GET(self) -> None:
        """Answer `/`, nothing else."""
        port = self.server.owner.port
        if self.headers.get("Host", "").lower() not in (f"{ADDRESS}:{port}", f"localhost:{port}"):
            return self._answer(HTTPStatus.FORBIDDEN, "This server answers to its own address only.\n")
        if urlsplit(self.path).path != "/":
            return self._answer(HTTPStatus.NOT_FOUND, "There is nothing but the page at /.\n")
        try:
            return self._answer(HTTPStatus.OK, self.server.owner.page(), "text/html")
        except ForecastAutotuneError as error:
            return self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, f"{printable(error)}\n")

    do_HEAD = do_GET

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
        """Say nothing: the terminal belongs to the command."""
