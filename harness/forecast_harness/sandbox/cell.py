"""The judge's handle on a cell: asks, times, and attributes the fault when no answer comes."""

from __future__ import annotations

import json
import secrets
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from forecast_harness.sandbox import process_stops, wire
from forecast_harness.sandbox.jobs import (
    CellAnswer,
    Fault,
    Resource,
    ResourceLimits,
    SandboxError,
    TensorArrays,
    TensorBytes,
    WireError,
    check_entry,
    printable,
)

_REPORT_TIMEOUT_S = 20.0
"""Seconds within which the server has to report the end of a cell."""
_GLANCE_S = 0.05
"""Seconds that a thread waits for the server before it looks whether another one has read its message."""
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
    """Raised by trusted code for an act of the candidate's that is no honest mistake; the text says which."""


class ServerConnection:
    """A judge's connection to its server, shared by all its cells: a reader of messages files them for all.

    Cells may be asked from several threads, each by one: a message that one thread waits for may be read by another,
    so that none waits for the server alone for long.
    """

    def __init__(self, server: socket.socket) -> None:
        self.server = server
        self._reading, self._starting = threading.Lock(), threading.Lock()
        self._cells: list[tuple[int, socket.socket, socket.socket]] = []
        self._reports: dict[int, dict[str, Any]] = {}

    def start(
        self, limits: ResourceLimits, processors: Sequence[int] = ()
    ) -> tuple[int, socket.socket, socket.socket]:
        """A cell's number, its channel, and the channel to its first process, which stops and resumes it.

        Raises `SandboxError` when the server is gone.
        """
        request = {"op": "cell", "limits": limits.to_json(), "processors": list(processors)}
        with self._starting:  # the next cell to come is this request's
            self._say(request)
            while not self._cells:
                select.select([self.server], [], [], _GLANCE_S)
                self._read()
            return self._cells.pop()

    def stop(self, number: int) -> None:
        """End a cell and wait until all of its processes are gone."""
        if number not in self._reports:
            self._say({"op": "close", "cell": number})
        self.ended(number, _REPORT_TIMEOUT_S)

    def wait(self, number: int, channel: socket.socket) -> None:
        """Wait until the channel has bytes or its end. Raises `EOFError` once the cell has ended without them."""
        while not select.select([channel], [], [], 0)[0]:
            if number in self._reports:
                if select.select([channel], [], [], 0)[0]:
                    return  # it answered, and another thread has read that it ended then
                raise EOFError
            if channel not in select.select([channel, self.server], [], [], _GLANCE_S)[0]:
                self._read()

    def ended(self, number: int, timeout_s: float) -> dict[str, Any]:
        """The server's report on a cell that is ending. Raises `SandboxError` when none comes in time."""
        limit = time.monotonic() + timeout_s
        while number not in self._reports:
            seconds = limit - time.monotonic()
            if seconds < 0:
                raise SandboxError(f"the server did not report how a cell ended within {timeout_s:g} s")
            select.select([self.server], [], [], min(seconds, _GLANCE_S))
            self._read()
        return self._reports[number]

    def _read(self) -> None:
        """File the next message, if there is one."""
        with self._reading:
            if select.select([self.server], [], [], 0)[0]:
                self._file_message()

    def _file_message(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self.server, _MESSAGE_BYTES, 2)
        except ConnectionError:
            data, fds = b"", []
        if not data:
            raise SandboxError("the server is gone")
        message = json.loads(data)
        if message["event"] == "cell":
            channel, orders = (socket.socket(fileno=fd) for fd in fds)
            self._cells.append((message["cell"], channel, orders))
        else:
            self._reports[message["cell"]] = message

    def _say(self, message: dict[str, Any]) -> None:
        try:
            self.server.send(json.dumps(message).encode())
        except ConnectionError as error:
            raise SandboxError("the server is gone") from error


class Cell(Resource):
    """A process of its own in which the candidate runs. Use as a context manager."""

    def __init__(
        self,
        link: ServerConnection,
        limits: ResourceLimits,
        processors: Sequence[int] = (),
    ) -> None:
        """`processors`: the only ones that the cell may use, by the kernel's numbers; empty: any."""
        self._link, self._limits = link, limits
        self._number, self._channel, self._orders = link.start(limits, processors)
        self._end_error: CandidateFault | SandboxError | None = None
        self._frozen = False

    def ask(
        self,
        entry: str,
        payload: Mapping[str, Any] = _EMPTY,
        arrays: TensorArrays = _EMPTY,
        *,
        descriptor: int | None = None,
    ) -> CellAnswer:
        """Call `module:function(payload, arrays, state)` in the cell and wait; `state` is a dict of the cell.

        `seconds` of the answer is this process's wall time from the question's first byte to the answer's
        last. The candidate may have written it: an answer is bytes to judge, never a verdict. A `descriptor` is sent
        after the question, for `cell_process.receive_descriptor`. Raises `CandidateFault`; after one that is
        not `Fault.EXCEPTION` the cell is gone.
        """
        nonce, frame = self._question(entry, payload, arrays)
        if self._frozen:
            raise SandboxError("a frozen cell cannot answer; thaw() it first")
        began = time.perf_counter()
        message, outputs = self._converse(frame, arrays, descriptor)
        return self._check_answer(message, outputs, nonce, time.perf_counter() - began)

    def ask_in_window(
        self,
        entry: str,
        payload: Mapping[str, Any] = _EMPTY,
        reveal: Callable[[], None] | None = None,
        collect: Callable[[], None] | None = None,
    ) -> CellAnswer:
        """Put a question to a frozen cell, which runs from the question to the answer and no longer.

        `seconds` of the answer is all the time in which any of the cell's processes could run, by this
        process's clock: it begins before the question is sent and they are resumed, and ends when they have
        been stopped again. Afterwards the cell is frozen. Raises `CandidateFault`, also where a process has
        run while it was stopped.

        `reveal` is called first, and `collect` after the answer, both on that clock, which ends with `collect` where
        there is one: later writes do not count.
        """
        nonce, frame = self._question(entry, payload, _EMPTY)
        if not self._frozen:
            raise SandboxError("only a frozen cell has a window; freeze() it first")
        self._must_have_stood_still()
        self._frozen = False
        began = time.perf_counter()
        if reveal is not None:
            reveal()
        try:
            self._channel.sendall(frame)
        except OSError:
            raise self._end_reason() from None
        self._order(process_stops.RESUME)
        message, outputs = self._converse(None, _EMPTY)
        if collect is None:
            end = self._stop()
        else:
            collect()
            end = time.perf_counter()
            self._stop()
        return self._check_answer(message, outputs, nonce, end - began)

    def _question(self, entry: str, payload: Mapping[str, Any], arrays: TensorArrays) -> tuple[str, bytes]:
        """The nonce of a question and its frame. Raises where no question may be asked now."""
        check_entry(entry)
        if self._end_error is not None:
            raise self._end_error
        nonce = secrets.token_hex(16)
        # Before anything is sent: a question that cannot be encoded is not the candidate's fault.
        question = {"nonce": nonce, "entry": entry, "payload": dict(payload)}
        frame = wire.encode({**question, "limit": self._limits.answer_bytes}, arrays)
        if select.select([self._channel], [], [], 0)[0] and self._has_stray_bytes():
            raise self._end(Fault.FORGED, "bytes came before they were asked for")
        return nonce, frame

    def _converse(
        self, frame: bytes | None, arrays: TensorArrays, descriptor: int | None = None
    ) -> tuple[Any, dict[str, TensorBytes]]:
        """The cell's answer, after a question is sent where there is one."""
        try:
            if frame is not None:
                wire.send_encoded(self._channel, frame, arrays)
            if descriptor is not None:
                socket.send_fds(self._channel, [b"\0"], [descriptor])
            wait = partial(self._link.wait, self._number, self._channel)
            return wire.receive(self._channel, self._limits.answer_bytes, wait)
        except (EOFError, ConnectionError):
            raise self._end_reason() from None
        except WireError as error:
            raise self._end(Fault.FORGED, f"the answer is none: {error}") from error

    def _check_answer(
        self, message: Any, arrays: Mapping[str, TensorBytes], nonce: str, seconds: float
    ) -> CellAnswer:
        if not isinstance(message, dict) or message.get("nonce") != nonce:
            raise self._end(Fault.FORGED, "an answer does not carry the question's number")
        if "error" in message:
            raise _exception_fault(message["error"])
        return CellAnswer(message.get("value"), arrays, seconds)

    def share(self, descriptor: int, size: int) -> None:
        """Let the cell's first process, which is trusted, map memory of so many bytes, for `copy_out`."""
        try:
            socket.send_fds(self._orders, [process_stops.SHARE + b"%d" % size], [descriptor])
        except OSError:
            raise self._end_reason() from None

    def copy_out(self, places: Sequence[tuple[int, int, int]]) -> int:
        """Copy memory of the frozen cell to the shared memory: (address, bytes, offset) of each place.

        Returns how many places the cell does not have. Raises `SandboxError` unless it is frozen.
        """
        if not self._frozen:
            raise SandboxError("only a frozen cell holds still; freeze() it first")
        self._order(process_stops.COPY + json.dumps(list(places)).encode())
        return int(self._report())

    @property
    def frozen(self) -> bool:
        """Whether all of its processes are stopped."""
        return self._frozen

    def freeze(self) -> None:
        """Stop all processes of the cell, so that they can neither slow down another nor work unseen.

        Its wall time runs on, and work that it has queued on a device is not stopped: have it synchronise
        first. Raises `CandidateFault` when it forks faster than it can be stopped.
        """
        if not self._frozen:
            self._stop()

    def thaw(self) -> None:
        """Resume all processes of the cell. Raises `CandidateFault` where one has run while it was stopped."""
        if self._frozen:
            self._must_have_stood_still()
            self._order(process_stops.RESUME)
            self._frozen = False

    def _stop(self) -> float:
        """Stop all processes, and wait until they stand still; the time of the stop, by `time.perf_counter`."""
        self._order(process_stops.STOP)
        self._report()
        end = time.perf_counter()
        self._frozen = True
        if count := int(self._report()):
            raise self._end(Fault.PROCESSES, f"{count} processes could not be stopped")
        return end

    def _must_have_stood_still(self) -> None:
        self._order(process_stops.CHECK)
        if count := int(self._report()):
            raise self._end(Fault.RAN_WHILE_STOPPED, f"{count} processes ran while they were stopped")

    def _order(self, message: bytes) -> None:
        """Send an order to the cell's first process. Raises the reason of the cell's end where it is gone."""
        try:
            self._orders.send(message)
        except OSError:
            raise self._end_reason() from None

    def _report(self) -> bytes:
        """The next report of the cell's first process."""
        limit = time.monotonic() + _REPORT_TIMEOUT_S
        while True:
            seconds = max(0.0, limit - time.monotonic())
            if not select.select([self._orders], [], [], seconds)[0]:
                raise SandboxError(f"the cell's first process was silent for {_REPORT_TIMEOUT_S:g} s")
            try:
                message = self._orders.recv(64)
            except ConnectionError:
                message = b""
            if not message:
                raise self._end_reason()
            return message

    def _has_stray_bytes(self) -> bool:
        """Whether there are bytes; at the end of the stream there are none, and `ask` raises the reason."""
        try:
            return bool(self._channel.recv(1, socket.MSG_PEEK))
        except ConnectionError:
            return False

    def _end_reason(self) -> CandidateFault | SandboxError:
        if self._end_error is None:
            # The cell may have closed its channel and live on, until its time is up.
            message = self._link.ended(self._number, self._limits.wall_s + _REPORT_TIMEOUT_S)
            self._end_error = self._attribute(message)
        return self._end_error

    def _attribute(self, message: dict[str, Any]) -> CandidateFault | SandboxError:
        if "setup" in message:
            return SandboxError(f"the cell could not be set up: {message['setup']}")
        if (why := message["why"]) in _FAULT_BY_LIMIT:
            limits = self._limits
            values = {
                "timeout": f"{limits.wall_s:.0f} s",
                "memory": f"{limits.memory_bytes >> 20} MiB",
                "processes": f"{limits.processes} processes and threads",
                "storage": f"{limits.output_bytes >> 20} MiB of files",
            }
            return CandidateFault(_FAULT_BY_LIMIT[why], f"the {why} limit was exceeded: {values[why]}")
        if "code" not in message:
            return CandidateFault(Fault.KILLED, "the cell's keeper was killed")
        code = message["code"]
        is_out_of_time = message["cpu"] >= 0.95 * self._limits.cpu_s
        if code == 0:
            return CandidateFault(Fault.EXIT_UNFINISHED, "it left with status 0 before it had answered")
        if code > 0:
            return CandidateFault(Fault.EXIT, f"it left with status {code} before it had answered")
        name = signal.Signals(-code).name
        if -code == signal.SIGSYS:
            return CandidateFault(Fault.FORBIDDEN_CALL, "it made a system call that only an attack makes")
        if -code == signal.SIGXCPU or (-code == signal.SIGKILL and is_out_of_time):
            return CandidateFault(Fault.CPU_TIME, f"it used {message['cpu']:.1f} s of CPU time")
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
        self._orders.close()
        if self._end_error is None:
            self._end_error = SandboxError("this cell is closed; open another with work.cell()")
            self._link.stop(self._number)


def _exception_fault(error: Any) -> CandidateFault:
    facts = error if isinstance(error, dict) else {}
    kind, text, trace = (printable(str(facts.get(name, ""))[:8000]) for name in ("kind", "text", "trace"))
    fault = Fault.MEMORY if kind in ("MemoryError", "OutOfMemoryError") else Fault.EXCEPTION
    return CandidateFault(fault, f"{kind}: {text}", kind, trace)
