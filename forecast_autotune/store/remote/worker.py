"""The process that talks to a remote store; `client` starts it.

A program's launches must not wait for a network, nor for the interpreter lock while a client's modules are
loaded or its answers read. So all that happens here, in a child with bounded memory. The address comes by the
environment, where other users' `ps` does not see it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

from forecast_autotune.errors import StoreError
from forecast_autotune.store.remote.backends import (
    VARIABLE,
    Entry,
    RemoteBackend,
    open_backend,
    plain_reason,
    sound_rows,
)
from forecast_autotune.store.rows import KernelRows, Row

MEMORY_BYTES = 1 << 30
"""Beyond what is mapped when the client is loaded."""
MAX_ANSWER_BYTES = 1 << 18
"""The most bytes of rows in an answer, more than a problem of thousands of candidates has; the rest is cut."""
LINGER_S = 20.0
"""How long it goes on writing what it was given, once its program is gone."""


def main() -> int:
    """Serve one program until it is gone; the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program's affair
    connection = Connection(int(sys.argv[1]))
    backend: RemoteBackend | None = None
    lingering = False
    while True:
        try:
            request = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return 0
        try:
            if backend is None:
                backend = open_backend(os.environ.get(VARIABLE, ""))
                _bound_memory()
            answer = _answer(backend, request)
        except MemoryError:
            answer = {"error": "MemoryError: it sends more than is read"}
        except Exception as error:
            answer = {"error": plain_reason(error)}
        try:
            connection.send_bytes(json.dumps({**answer, "id": request["id"]}).encode("ascii"))
        except OSError:
            if not lingering:
                signal.alarm(int(LINGER_S))  # nobody listens: go on with what was sent, for a while
            lingering = True


def _answer(backend: RemoteBackend, request: dict[str, Any]) -> dict[str, Any]:
    what = request.get("do")
    if what == "ready":
        return {}
    entry: Entry = tuple(request["entry"])
    if what == "get":
        return {"lines": [line.decode("ascii") for line in _found(backend, entry, request["problem"])]}
    if what == "put":
        backend.add(entry, {row.digest: row.line for row in map(_row, request["lines"])})
        return {}
    raise StoreError(f"a request {what!r:.40} that nobody answers")


def _row(line: str) -> Row:
    row = Row.read(line.encode("ascii"))
    if row is None:
        raise StoreError("a line that is no row")
    return row


def _found(backend: RemoteBackend, entry: Entry, problem_id: str) -> list[bytes]:
    """The latest decision and the newest measurements, as many as fit into an answer."""
    rows: KernelRows = sound_rows(backend.lines(entry), problem_id)
    listed = [*rows.decisions.values(), *reversed(rows.of_problem(problem_id))]
    kept, size = [], 0
    for row in listed:
        size += len(row.line)
        if size > MAX_ANSWER_BYTES:
            break
        kept.append(row.line)
    return kept


def _bound_memory() -> None:
    with contextlib.suppress(ImportError, OSError, ValueError, IndexError):
        import resource
        from pathlib import Path

        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_BYTES, mapped + MEMORY_BYTES))
