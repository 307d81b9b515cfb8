"""Pages on this machine alone: only 127.0.0.1 listens, and nothing can be changed through it.

A request must name this server as its host: a foreign site whose name is made to point here (DNS rebinding)
names its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from forecast_autotune.errors import ForecastAutotuneError
from forecast_autotune.printable import printable

ADDRESS = "127.0.0.1"
_USUAL_PORT = 80
"""Which clients do not name."""


class CannotServePageError(ForecastAutotuneError):
    """No page can be served at the port that was asked for."""


@dataclass(frozen=True)
class ServedText:
    """The answer to a request for a path."""

    text: str
    kind: str = "text/html"


class LocalServer:
    """Serves texts until it is closed. Use as a context, or `close` it.

    `texts` has a function for every path, which is called with the query behind it; never two at once. A
    `ForecastAutotuneError` that it raises is sent in its place.
    """

    def __init__(self, texts: Mapping[str, Callable[[str], ServedText]], port: int = 0) -> None:
        """Port 0 takes any that is free. Raises `CannotServePageError` where the port cannot be had."""
        self._texts, self._mutex = texts, threading.Lock()
        try:
            self._http = _LocalHTTPServer((ADDRESS, port), _TextHandler)
        except (OSError, OverflowError) as error:
            raise CannotServePageError(
                f"port {port} of {ADDRESS} cannot be used ({error}): name another one, or 0 for a free one"
            ) from error
        self._http.owner = self
        self._thread = threading.Thread(
            target=self._http.serve_forever, args=(0.1,), name="local pages", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._http.server_address[1])

    @property
    def url(self) -> str:
        """The address to open in a browser."""
        return f"http://{ADDRESS}:{self.port}/"

    def served(self, path: str, query: str) -> ServedText | None:
        """The answer for a path; None where there is none. Raises what its function raises."""
        if path not in self._texts:
            return None
        with self._mutex:
            return self._texts[path](query)

    @property
    def paths(self) -> list[str]:
        """All that is served."""
        return list(self._texts)

    def close(self) -> None:
        """Stop listening."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _LocalHTTPServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    owner: LocalServer


class _TextHandler(BaseHTTPRequestHandler):
    server: _LocalHTTPServer
    server_version, sys_version = "forecast-autotune", ""
    timeout = 10.0

    def do_GET(self) -> None:
        """Answer the paths that there are, nothing else."""
        owner = self.server.owner
        own = [f"{host}:{owner.port}" for host in (ADDRESS, "localhost")]
        own += [ADDRESS, "localhost"] if owner.port == _USUAL_PORT else []
        if self.headers.get("Host", "").lower() not in own:
            return self._answer(HTTPStatus.FORBIDDEN, "This server answers to its own address only.\n")
        path, _, query = self.path.partition("?")
        try:
            result = owner.served(path, query)
        except ForecastAutotuneError as error:
            return self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, f"{printable(error)}\n")
        if result is None:
            return self._answer(HTTPStatus.NOT_FOUND, f"There is nothing but {' and '.join(owner.paths)}.\n")
        return self._answer(HTTPStatus.OK, result.text, result.kind)

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
        """Say nothing: the terminal belongs to whoever serves."""
