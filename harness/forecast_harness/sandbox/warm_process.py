"""Processes from which the servers of lanes are forked, shared by all lanes that need the same.

Sixteen lanes that open together would import torch and Triton sixteen times: 60 s of processor time. One process
does it, and each lane's server is a fork of it; see `fork_servers`. It ends with the last lane that uses it, or with
the process that holds them.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forecast_harness.sandbox.containment.levels import SERVER_COMMAND
from forecast_harness.sandbox.jobs import SandboxError

_IMPORT_TIMEOUT_S = 180.0
_STOP_TIMEOUT_S = 5.0
_REAP_S, _LOOK_S = 1.0, 0.001
"""A process that has closed its last descriptor is gone so soon; how often that is looked at."""
_MESSAGE_BYTES = 1 << 12
_LOG = "process.log"
_LOG_CHARACTERS = 2000


def read_log(path: Path) -> str:
    """The end of what a process printed; empty where it printed nothing."""
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")[-_LOG_CHARACTERS:]
    return ""


class _ProcessLost(Exception):
    """The process died, or does not answer."""


@dataclass(frozen=True)
class WarmUp:
    """Modules and variables that a process has before servers are forked from it."""

    modules: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    """Names and values of its variables; a server has `HOME` and `TMPDIR` besides."""


class ServerProcess:
    """A server, which is no child of this process."""

    def __init__(self, pid: int, alive: int) -> None:
        """`alive`: a pipe's end, at which the pipe ends when the server does."""
        self.pid, self._alive = pid, alive

    def wait(self, seconds: float | None = None) -> None:
        """Wait until it has ended. Raises `TimeoutError`; without `seconds` it waits for as long as it takes."""
        if self._alive < 0:
            return
        if not select.select([self._alive], [], [], seconds)[0]:
            raise TimeoutError(f"the server {self.pid} has not ended within {seconds:g} s")
        os.close(self._alive)
        self._alive = -1
        limit = time.monotonic() + _REAP_S
        with contextlib.suppress(OSError):
            while time.monotonic() < limit:
                os.kill(self.pid, 0)
                time.sleep(_LOOK_S)

    def kill(self) -> None:
        """End the server at once."""
        if self._alive >= 0:
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)


class WarmProcess:
    """A process that forks servers, started when the first one is asked for.

    `acquire` and `release` count its users.
    """

    def __init__(self, warm_up: WarmUp) -> None:
        self.warm_up = warm_up
        self.users = 0
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None
        self._scratch = ""
        self._number = 0
        self._has_answered = self._given_up = False

    def fork_server(
        self, orders: Mapping[str, Any], search_path: str, place: Path, control: int, log: int
    ) -> ServerProcess:
        """A server with these orders in the folder `place`, which talks at `control` and prints to `log`.

        It finds modules by `search_path`, as `module_search_path` writes it. Modules that all share are imported by
        that of the first: a user's file that is imported meanwhile adds its folder, and costs no second process.

        Raises `SandboxError` where none can be had, with what was printed about it.
        """
        with self._lock:
            while True:
                tried_before = self._has_answered
                try:
                    if self._process is None:
                        self._start(search_path)
                    if self._given_up:
                        raise _ProcessLost
                    request = {"orders": dict(orders), "search_path": search_path, "place": str(place)}
                    return self._ask(request, control, log)
                except (_ProcessLost, OSError) as error:
                    message = read_log(Path(self._scratch, _LOG))
                    self._end()
                    if not tried_before:  # a new one would do no better
                        why = "nobody waits for it any more" if self._given_up else error
                        raise SandboxError(f"the lane's server did not start: {why}; {message}") from error

    def give_up(self) -> bool:
        """End the process unless it has forked a server; returns whether it ends. From any thread.

        Waiting callers get an error.
        """
        if self._has_answered:
            return False
        self._given_up = True
        if (process := self._process) is not None:
            process.kill()
        return True

    def close(self) -> None:
        """End the process; servers that it has forked live on."""
        with self._lock:
            self._end()

    def _start(self, search_path: str) -> None:
        self._scratch = tempfile.mkdtemp(prefix="forecast-warm-")
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        orders = {"requests": theirs.fileno(), "warm": self.warm_up.modules, "scratch": self._scratch}
        command = [sys.executable, "-I", "-c", SERVER_COMMAND, search_path, json.dumps(orders)]
        with theirs, Path(self._scratch, _LOG).open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._scratch,
                env={**dict(self.warm_up.environment), "HOME": self._scratch, "TMPDIR": self._scratch},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def _ask(self, question: Mapping[str, Any], control: int, log: int) -> ServerProcess:
        assert self._requests is not None
        self._number += 1
        request = {"number": self._number, **question}
        socket.send_fds(self._requests, [json.dumps(request).encode()], [control, log])
        while True:
            if not select.select([self._requests], [], [], _IMPORT_TIMEOUT_S)[0]:
                raise _ProcessLost(f"no answer within {_IMPORT_TIMEOUT_S:g} s")
            data, descriptors, _, _ = socket.recv_fds(self._requests, _MESSAGE_BYTES, 1)
            if not data:
                raise _ProcessLost("the process that it is forked from hung up")
            answer = json.loads(data)
            self._has_answered = True
            if answer["number"] == self._number and "pid" in answer:
                return ServerProcess(answer["pid"], descriptors[0])
            # The answer to an interrupted request: its server finds that nobody listens, and ends.
            for descriptor in descriptors:
                os.close(descriptor)
            if answer["number"] == self._number:
                raise SandboxError(f"the lane's server did not start: {answer['error']}")

    def _end(self) -> None:
        process, self._process = self._process, None
        listens, self._has_answered = self._has_answered, False
        if self._requests is not None:
            with contextlib.suppress(OSError):
                # Heard even if another process forked from this one holds a copy.
                self._requests.shutdown(socket.SHUT_RDWR)
            self._requests.close()
            self._requests = None
        if process is not None:
            if not listens:  # it imports, and hears of nothing before that is done
                process.kill()
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        # Also where a signal came before there was a process.
        scratch, self._scratch = self._scratch, ""
        if scratch:
            shutil.rmtree(scratch, ignore_errors=True)


_processes: dict[tuple[int, WarmUp], WarmProcess] = {}
"""Warm processes, by the process that uses them: a fork has none of its parent's."""
_shared_lock = threading.Lock()


def acquire(warm_up: WarmUp) -> WarmProcess:
    """The process with these modules, for one more user, who must `release` it. Starts nothing yet."""
    with _shared_lock:
        process = _processes.setdefault((os.getpid(), warm_up), WarmProcess(warm_up))
        process.users += 1
        return process


def give_up(process: WarmProcess, users: int) -> None:
    """End a process that has forked no server yet, unless more than so many users wait for it."""
    with _shared_lock:
        if process.users <= users and process.give_up():
            _forget(process)


def _forget(process: WarmProcess) -> None:
    """Give the process to no further user."""
    if _processes.get(key := (os.getpid(), process.warm_up)) is process:
        del _processes[key]


def release(process: WarmProcess) -> None:
    """End one user's use of the process; the last user ends the process."""
    with _shared_lock:
        process.users -= 1
        if process.users:
            return
        _forget(process)
    process.close()
