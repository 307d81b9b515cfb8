"""The process from which servers of lanes are forked: what they need is imported in it, once for all of them.

A server needs torch and Triton, and takes seconds to import them; its fork has them after milliseconds. Nothing of a
candidate comes near this process: it reads requests of the process that owns the lanes, and forks.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from forecast_harness.sandbox.containment import linux

_MESSAGE_BYTES = 1 << 17


def fork_servers(requests: socket.socket, scratch: str, serve: Callable[[Mapping[str, Any]], None]) -> None:
    """Fork a process that calls `serve` for each request, until the other end hangs up; then remove `scratch`.

    A request has a number, the server's orders, its search path of modules and its folder, with two descriptors: the
    lane's end of its control socket and a file for what the server prints. The answer has the number and the pid, or
    an error; with it comes a pipe's end, at which the pipe ends when the server does.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a server here
    linux.set_dumpable(False)
    gc.collect()
    gc.freeze()  # forks share these pages
    with contextlib.suppress(ConnectionError):
        while True:
            data, descriptors, _, _ = socket.recv_fds(requests, _MESSAGE_BYTES, 2)
            if not data:
                break
            _answer(requests, json.loads(data), descriptors, serve)
    shutil.rmtree(scratch, ignore_errors=True)
    os._exit(0)  # nothing is left to tear down, and what was imported takes long to


def _answer(
    requests: socket.socket,
    request: Mapping[str, Any],
    descriptors: list[int],
    serve: Callable[[Mapping[str, Any]], None],
) -> None:
    inward, alive = os.pipe()
    try:
        pid = os.fork()
    except OSError as error:
        answer = {"number": request["number"], "error": str(error)}
    else:
        if pid == 0:
            os.close(inward)  # `alive` stays open for as long as this process lives
            _become_server(requests, request, descriptors, serve)
        answer = {"number": request["number"], "pid": pid}
    for descriptor in (alive, *descriptors):
        os.close(descriptor)
    try:
        socket.send_fds(requests, [json.dumps(answer).encode()], [inward])
    finally:
        os.close(inward)


def _become_server(
    requests: socket.socket,
    request: Mapping[str, Any],
    descriptors: list[int],
    serve: Callable[[Mapping[str, Any]], None],
) -> NoReturn:
    code = 1
    try:
        requests.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        control, log = descriptors
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        sys.path[:] = json.loads(request["search_path"])
        place = request["place"]
        os.chdir(place)
        os.environ.update({"HOME": place, "TMPDIR": place})
        tempfile.tempdir = None  # what the TMPDIR was before
        linux.set_dumpable(True)  # until it serves: it has to write below its own /proc
        serve({**request["orders"], "control": control})
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
