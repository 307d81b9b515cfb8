"""The fork-server of one lane: warm, without a device, and never in contact with a candidate's code.

It forks a *judge* per job and a *cell* whenever a judge asks for one, watches
their memory, processes and time, kills what exceeds, and reports how each ended. It sees no payload and no
answer: those cross sockets that it only passes on.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from forecast_harness.sandbox import cell_supervisor, judge_process, probes, toolchain, wire
from forecast_harness.sandbox.containment import confine, linux
from forecast_harness.sandbox.containment.levels import ContainmentLevel
from forecast_harness.sandbox.jobs import ResourceLimits


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
    os._exit(0)  # nothing needs to be torn down, and modules would take long


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


# --- the server of one lane ---


_DISK_CHECK_INTERVAL_S = 1.0
_MOST_ENTRIES = 20_000


@dataclass(slots=True)
class RunningJob:
    """A judge and its place."""

    pid: int
    number: int
    channel: socket.socket
    place: str
    limits: ResourceLimits
    code: int | None = None
    why: str = ""
    left: int = 0
    """Processes that survived SIGKILL: they hang in a driver."""
    deadline: float = 0.0

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + self.limits.trusted_s


@dataclass(slots=True)
class RunningCell:
    """A keeper and the processes below it."""

    pid: int
    number: int
    limits: ResourceLimits
    status: int
    place: str = ""
    """The scratch directory's parent where no sized file system limits it, else empty."""
    why: str = ""
    began: float = field(default_factory=time.monotonic)
    _disk_check: float = 0.0

    def exceeded(self, now: float, warm_bytes: int, own: int) -> str:
        """The limit that is exceeded, if any.

        `warm_bytes`: private memory that every fork of the server begins with; `own`: how many processes at
        the top of the tree are ours.
        """
        if now - self.began > self.limits.wall_s:
            return "timeout"
        tree = [self.pid, *linux.descendants(self.pid)][own:]
        facts = [linux.memory_and_threads(pid) for pid in tree]
        if sum(threads for _, threads in facts) > self.limits.processes:
            return "processes"
        grown = sum(max(0, size - warm_bytes) for size, _ in facts)
        if grown > self.limits.memory_bytes and _proportional_memory(tree) > self.limits.memory_bytes:
            return "memory"
        if self.place and now - self._disk_check > _DISK_CHECK_INTERVAL_S:
            self._disk_check = now
            if _stored_bytes(self.place) > self.limits.output_bytes:
                return "storage"
        return ""

    def report(self) -> dict[str, Any]:
        """The report of the cell's end, for the judge. Reads and closes the status pipe."""
        os.set_blocking(self.status, False)
        try:
            line = os.read(self.status, 4096).partition(b"\n")[0]
        except BlockingIOError:  # somebody still holds the other end
            line = b""
        os.close(self.status)
        facts = json.loads(line) if line else {}
        return {"cell": self.number, "why": self.why, **facts}


def _proportional_memory(pids: list[int]) -> int:
    """Private memory of processes in bytes, pages that they share with each other counted once."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, rest = line.partition(":")
            if name in ("Pss_Anon", "Pss_Shmem"):
                total += int(rest.split()[0]) * 1024
    return total


def _stored_bytes(place: str) -> int:
    """Bytes of all files below a directory; a huge number when there are too many to count."""
    total = count = 0
    for folder, _, files in os.walk(place):
        for name in files:
            count += 1
            if count > _MOST_ENTRIES:
                return 1 << 62
            try:
                total += Path(folder, name).lstat().st_blocks * 512
            except OSError:
                continue
    return total


_POLL_INTERVAL_S = 0.1
_MESSAGE_BYTES = 1 << 17


class ForkServer:
    """The event loop. `control` is the lane's end; everything ends when the lane hangs up."""

    def __init__(self, control: socket.socket, cage: confine.Confinement) -> None:
        self._control = control
        self._confinement = cage
        self._selector = selectors.DefaultSelector()
        self._job: RunningJob | None = None
        self._cells: dict[int, RunningCell] = {}
        self._cell_count = 0
        self._pid = os.getpid()
        self._anonymous = linux.memory_and_threads(self._pid)[0]
        self._last_watch = 0.0
        self._told_to_stop = False
        inward, self._wake = os.pipe()
        for fd in (inward, self._wake):
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        self._listen(control.fileno(), self._on_lane)
        self._listen(inward, lambda: self._drop(inward))

    def serve(self) -> bool:
        """Run until the lane hangs up, then kill everything. True after the lane's order to stop."""
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                for key, _ in self._selector.select(_POLL_INTERVAL_S):
                    if key.fd in self._selector.get_map():  # not closed by one before it
                        key.data()
                self._reap()
                self._watch()
        cell_supervisor.kill_descendants(self._pid)
        return self._told_to_stop

    # --- requests ---

    def _on_lane(self) -> None:
        data, fds, _, _ = socket.recv_fds(self._control, _MESSAGE_BYTES, 1)
        if not data:
            raise EOFError
        request = json.loads(data)
        match request["op"]:
            case "stop":
                self._told_to_stop = True
            case "ping":
                self._tell({"event": "pong"})
            case "run":
                self._start_job(request, fds[0])

    def _start_job(self, request: dict[str, Any], result: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        limits = ResourceLimits(**request["limits"])

        def body() -> NoReturn:
            channel = socket.socket(fileno=result)
            judge_process.run_judge(
                theirs, channel, request["place"], limits, self._confinement.level, self._pid
            )

        pid = self._fork(body, spare={theirs.fileno(), result})
        os.close(result)
        theirs.close()
        self._job = RunningJob(pid, request["job"], ours, request["place"], limits)
        self._listen(ours.fileno(), self._on_judge)

    def _on_judge(self) -> None:
        job = self._job
        assert job is not None
        try:
            data = job.channel.recv(_MESSAGE_BYTES)
        except ConnectionError:
            data = b""
        if not data:
            self._selector.unregister(job.channel.fileno())
            return
        request = json.loads(data)
        if request["op"] == "cell":
            self._start_cell(job, ResourceLimits(**request["limits"]), request["processors"])
        elif (cell := self._cells.get(request["cell"])) is not None:
            self._end(cell, "closed")

    def _start_cell(self, job: RunningJob, limits: ResourceLimits, processors: Sequence[int]) -> None:
        judge_end, cell_end = wire.channel_pair()
        judge_orders, orders = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        status, status_end = os.pipe()

        def body() -> NoReturn:
            cell_supervisor.supervise_cell(
                self._confinement,
                limits,
                job.place,
                cell_end,
                status_end,
                self._pid,
                orders=orders,
                processors=processors,
            )

        pid = self._fork(body, spare={cell_end.fileno(), orders.fileno(), status_end})
        cell_end.close()
        orders.close()
        os.close(status_end)
        scratch = "" if self._confinement.has_own_root else job.place
        cell = RunningCell(pid, self._cell_count, limits, status, scratch)
        self._cell_count += 1
        job.deadline += limits.wall_s
        self._cells[cell.number] = cell
        message = {"event": "cell", "cell": cell.number}
        with judge_end, judge_orders, contextlib.suppress(OSError):
            ends = [judge_end.fileno(), judge_orders.fileno()]
            socket.send_fds(job.channel, [json.dumps(message).encode()], ends)

    def _fork(self, body: Callable[[], NoReturn], spare: set[int]) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for fd in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
                if fd > 2 and fd not in spare:
                    with contextlib.suppress(OSError):  # the listing's own
                        os.close(fd)
            body()
        finally:
            os._exit(1)

    # --- events ---

    def _reap(self) -> None:
        while True:
            try:
                pid, code = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            exit_code = os.waitstatus_to_exitcode(code)
            if self._job is not None and pid == self._job.pid:
                self._job.code = exit_code
                for cell in list(self._cells.values()):
                    self._end(cell, "closed")
            else:
                for cell in [r for r in self._cells.values() if r.pid == pid]:
                    self._report_cell_end(cell)
            self._report_job_end()

    def _report_cell_end(self, cell: RunningCell) -> None:
        del self._cells[cell.number]
        survivors = cell_supervisor.kill_descendants(self._pid, self._own_pids())
        report = cell.report()
        job = self._job
        if job is None:
            return
        job.left += survivors
        with contextlib.suppress(OSError):
            job.channel.send(json.dumps({"event": "end", **report}).encode())

    def _own_pids(self) -> frozenset[int]:
        pids = {cell.pid for cell in self._cells.values()}
        if self._job is not None and self._job.code is None:
            pids.add(self._job.pid)
        return frozenset(pids)

    def _report_job_end(self) -> None:
        job = self._job
        if job is None or job.code is None or self._cells:
            return
        if job.channel.fileno() in self._selector.get_map():
            self._selector.unregister(job.channel.fileno())
        job.channel.close()
        self._job = None
        facts = {"job": job.number, "code": job.code, "why": job.why, "left": job.left}
        self._tell({"event": "end", **facts})

    def _watch(self) -> None:
        now = time.monotonic()
        if now - self._last_watch < _POLL_INTERVAL_S:
            return
        self._last_watch = now
        for cell in list(self._cells.values()):
            why = cell.exceeded(now, self._anonymous, 1 + int(self._confinement.has_own_root))
            if why:
                self._end(cell, why)
        job = self._job
        if job is not None and job.code is None and now > job.deadline:
            job.why = "overdue"
            self._kill(job.pid)

    def _end(self, cell: RunningCell, why: str) -> None:
        """Kill a cell; its keeper's death takes the namespace along, or leaves orphans that are swept."""
        cell.why = cell.why or why
        self._kill(cell.pid)

    def _kill(self, pid: int) -> None:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)

    def _listen(self, fd: int, handler: Callable[[], None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, handler)

    def _drop(self, fd: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(fd, 4096)

    def _tell(self, message: dict[str, Any]) -> None:
        self._control.send(json.dumps(message).encode())


def main(text: str) -> None:
    """Fork servers on request, or with `probe` print the level that works here.

    `text`: the orders in JSON; `warm` are modules to import first.
    """
    orders = json.loads(text)
    device = "" if orders.get("probe") else os.environ.get("CUDA_VISIBLE_DEVICES", "")
    gc.disable()  # collections take a tenth of an import, and find next to nothing
    warm = orders.get("warm", [])
    with ThreadPoolExecutor(2) as reading:  # its threads have ended before anything is forked
        if "triton" in warm:
            importlib.import_module("triton")
            reading.submit(toolchain.read_triton)
            if device:
                reading.submit(toolchain.build_driver_module)
        for module in warm:
            importlib.import_module(module)
    gc.enable()
    if orders.get("probe"):
        linux.adopt_orphans()
        level, refusals = probes.probe_strongest(None, confine.interpreter_roots())
        print(json.dumps({"level": level, "refused": refusals}))
        return
    fork_servers(socket.socket(fileno=orders["requests"]), orders["scratch"], serve_lane)


def serve_lane(orders: Mapping[str, Any]) -> None:
    """Serve one lane, in a process of its own, until the lane hangs up."""
    linux.adopt_orphans()
    roots = confine.interpreter_roots()
    control = socket.socket(fileno=orders["control"])
    if orders["level"] is None:
        level, refusals = probes.probe_strongest(orders["device"], roots, orders["staging"])
    else:
        level, refusals = probes.probe_level(
            ContainmentLevel(orders["level"]), orders["device"], roots, orders["staging"]
        )
    place = (orders["device"], roots, orders["staging"])
    apart = bool(level and orders["apart"] and probes.can_separate_users(ContainmentLevel(level), *place))
    # Only now: where many lanes open at once, all this takes longer than a server may be silent after its hello.
    hello = {"event": "hello", "level": level, "refused": refusals, "apart": apart}
    control.send(json.dumps(hello).encode())
    if not level:
        return
    linux.set_dumpable(False)
    gc.freeze()  # collected before this process was forked; forks share these pages for good
    gc.disable()
    cage = confine.Confinement(ContainmentLevel(level), *place, apart)
    if not ForkServer(control, cage).serve():  # nobody is left to remove the lane's files
        shutil.rmtree(orders["scratch"], ignore_errors=True)
