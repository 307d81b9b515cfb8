"""The judge's handle on a cell: ask, clock, and decide whose fault it is when no answer comes."""

from __future__ import annotations

import json
import secrets
import select
import signal
import socket
import time
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Any

from forecast_harness.sandbox import wire
from forecast_harness.sandbox.jobs import (
    CellAnswer,
    Fault,
    ResourceLimits,
    SandboxError,
    TensorArrays,
    WireError,
    check_entry,
    printable,
)

_REPORT_TIMEOUT_S = 20.0
"""How long the server may take to report the end of a cell."""
_MESSAGE_BYTES = 1 << 17
_EMPTY: Mapping[str, Any] = MappingProxyType({})
_CRASH_SIGNALS = (
    signal.SIGSEGV,
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGTRAP,
)
_FAULT_BY_LIMIT = {
    "timeout": Fault.TIMEOUT,
    "memory": Fault.MEMORY,
    "processes": Fault.PROCESSES,
    "storage": Fault.STORAGE,
}


class CandidateFault(Exception):
    """The candidate raised, died, exceeded a limit or tampered; uncaught, it decides the job's status."""

    def __init__(self, fault: Fault, detail: str, kind: str = "", trace: str = "") -> None:
        super().__init__(f"{fault}: {detail}")
        self.fault = fault
        self.detail = detail
        self.kind = kind
        """The exception's type name, if it raised."""
        self.trace = trace


class Suspicion(Exception):
    """Raised by trusted code: what the candidate did is no honest mistake. The text says what."""


class ServerConnection:
    """A judge's line to its server, shared by all its cells: who reads a message files it for the others."""

    def __init__(self, server: socket.socket) -> None:
        self.server = server
        self._cells: list[tuple[int, socket.socket]] = []
        self._ended: dict[int, dict[str, Any]] = {}
        self._frozen: dict[int, int] = {}

    def start(self, limits: ResourceLimits) -> tuple[int, socket.socket]:
        """A new cell's number and channel. Raises `SandboxError` when the server is gone."""
        self._say({"op": "cell", "limits": limits.to_json()})
        while not self._cells:
            self._read()
        return self._cells.pop()

    def stop(self, number: int) -> None:
        """End a cell and wait until nothing is left of it."""
        if number not in self._ended:
            self._say({"op": "close", "cell": number})
        self.ended(number, _REPORT_TIMEOUT_S)

    def freeze(self, number: int, op: str) -> int:
        """`freeze` or `thaw` a cell; returns how many processes would not stop."""
        self._say({"op": op, "cell": number})
        while number not in self._frozen:
            self._read()
        return self._frozen.pop(number)

    def wait(self, number: int, channel: socket.socket) -> None:
        """Until the channel has bytes or its end. Raises `EOFError` once the cell has ended without them."""
        while not select.select([channel], [], [], 0)[0]:
            if number in self._ended:
                raise EOFError
            if channel not in select.select([channel, self.server], [], [])[0]:
                self._read()

    def ended(self, number: int, timeout_s: float) -> dict[str, Any]:
        """The server's report on a cell that is ending. Raises `SandboxError` when none comes in time."""
        limit = time.monotonic() + timeout_s
        while number not in self._ended:
            left = max(0.0, limit - time.monotonic())
            if not select.select([self.server], [], [], left)[0]:
                raise SandboxError(f"the server did not report how a cell ended within {timeout_s:g} s")
            self._read()
        return self._ended[number]

    def _read(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self.server, _MESSAGE_BYTES, 1)
        except ConnectionError:
            data, fds = b"", []
        if not data:
            raise SandboxError("the server is gone")
        said = json.loads(data)
        if said["event"] == "cell":
            self._cells.append((said["cell"], socket.socket(fileno=fds[0])))
        elif said["event"] == "frozen":
            self._frozen[said["cell"]] = said["left"]
        else:
            self._ended[said["cell"]] = said

    def _say(self, message: dict[str, Any]) -> None:
        try:
            self.server.send(json.dumps(message).encode())
        except ConnectionError as error:
            raise SandboxError("the server is gone") from error


class Cell:
    """A process of its own in which the candidate runs. Use as a context manager."""

    def __init__(self, link: ServerConnection, limits: ResourceLimits) -> None:
        self._link = link
        self._limits = limits
        self._number, self._channel = link.start(limits)
        self._end_error: CandidateFault | SandboxError | None = None
        self._frozen = False

    def __enter__(self) -> Cell:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def ask(
        self, entry: str, payload: Mapping[str, Any] = _EMPTY, arrays: TensorArrays = _EMPTY
    ) -> CellAnswer:
        """Call `module:function(payload, arrays, state)` in the cell and wait; `state` is a dict of the cell.

        `seconds` of the answer is this process's wall time from the question's first byte to the answer's
        last. The answer is the candidate's word: bytes to be judged, never a verdict. Raises
        `CandidateFault`; after one that is not `Fault.EXCEPTION` the cell is gone.
        """
        check_entry(entry)
        if self._end_error is not None:
            raise self._end_error
        if self._frozen:
            raise SandboxError("a frozen cell cannot answer; thaw() it first")
        nonce = secrets.token_hex(16)
        # Before anything is sent: a question that cannot be encoded is not the candidate's fault.
        question = {"nonce": nonce, "entry": entry, "payload": dict(payload)}
        frame = wire.encode({**question, "limit": self._limits.answer_bytes}, arrays)
        if select.select([self._channel], [], [], 0)[0] and self._has_stray_bytes():
            raise self._end(Fault.FORGED, "bytes came before they were asked for")
        began = time.perf_counter()
        try:
            wire.send_encoded(self._channel, frame, arrays)
            wait = partial(self._link.wait, self._number, self._channel)
            said, given = wire.receive(self._channel, self._limits.answer_bytes, wait)
        except (EOFError, ConnectionError):
            raise self._how_it_ended() from None
        except WireError as error:
            raise self._end(Fault.FORGED, f"the answer is none: {error}") from error
        seconds = time.perf_counter() - began
        if not isinstance(said, dict) or said.get("nonce") != nonce:
            raise self._end(Fault.FORGED, "an answer does not carry the question's number")
        if "error" in said:
            raise _exception_fault(said["error"])
        return CellAnswer(said.get("value"), given, seconds)

    def freeze(self) -> None:
        """Stop all processes of the cell, so that they cannot slow down another that is being timed.

        Its wall time runs on, and work that it has queued on a device is not stopped: have it synchronise
        first. Raises `CandidateFault` when it forks faster than it can be stopped.
        """
        left = self._link.freeze(self._number, "freeze")
        self._frozen = True
        if left:
            raise self._end(Fault.PROCESSES, f"{left} processes could not be stopped")

    def thaw(self) -> None:
        """Let them go on."""
        self._link.freeze(self._number, "thaw")
        self._frozen = False

    def _has_stray_bytes(self) -> bool:
        """Whether there are bytes; at the end of the stream there are none, and `ask` finds out why."""
        try:
            return bool(self._channel.recv(1, socket.MSG_PEEK))
        except ConnectionError:
            return False

    def _how_it_ended(self) -> CandidateFault | SandboxError:
        if self._end_error is None:
            # It may have closed its channel and live on, until its time is up.
            said = self._link.ended(self._number, self._limits.wall_s + _REPORT_TIMEOUT_S)
            self._end_error = self._attribute(said)
        return self._end_error

    def _attribute(self, said: dict[str, Any]) -> CandidateFault | SandboxError:
        if "setup" in said:
            return SandboxError(f"the cell could not be set up: {said['setup']}")
        if said["why"] in _FAULT_BY_LIMIT:
            return CandidateFault(_FAULT_BY_LIMIT[said["why"]], f"the {said['why']} limit was exceeded")
        if "code" not in said:
            return CandidateFault(Fault.KILLED, "the cell's keeper was killed")
        code = said["code"]
        spent = said["cpu"] >= 0.95 * self._limits.cpu_s
        if code == 0:
            return CandidateFault(Fault.EXIT_UNFINISHED, "it left with status 0 before it had answered")
        if code > 0:
            return CandidateFault(Fault.EXIT, f"it left with status {code} before it had answered")
        name = signal.Signals(-code).name
        if -code == signal.SIGSYS:
            return CandidateFault(Fault.FORBIDDEN_CALL, "it made a system call that only an attack makes")
        if -code == signal.SIGXCPU or (-code == signal.SIGKILL and spent):
            return CandidateFault(Fault.CPU_TIME, f"it used {said['cpu']:.1f} s of CPU time")
        if -code in _CRASH_SIGNALS:
            return CandidateFault(Fault.CRASH, f"it died of {name}")
        return CandidateFault(Fault.KILLED, f"it was ended by {name}, and no limit was exceeded")

    def _end(self, fault: Fault, detail: str) -> CandidateFault:
        self.close()
        self._end_error = CandidateFault(fault, detail)
        return self._end_error

    def close(self) -> None:
        """End the cell and all that it has started. Safe to call twice."""
        if self._channel.fileno() < 0:
            return
        self._channel.close()
        if self._end_error is None:
            self._end_error = SandboxError("this cell is closed; open another with work.cell()")
            self._link.stop(self._number)


def _exception_fault(error: Any) -> CandidateFault:
    facts = error if isinstance(error, dict) else {}
    kind, text, trace = (printable(str(facts.get(name, ""))[:8000]) for name in ("kind", "text", "trace"))
    fault = Fault.MEMORY if kind in ("MemoryError", "OutOfMemoryError") else Fault.EXCEPTION
    return CandidateFault(fault, f"{kind}: {text}", kind, trace)
