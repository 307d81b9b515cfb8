"""From a fork of the server to a candidate in its cage: keeper, first process, cell.

The *keeper* enters the namespaces (at NAMESPACES), the *first process* builds the file system, starts the
cell, reaps whatever the candidate leaves behind and reports how it ended; when the first process ends, the
kernel ends all others of its namespace. Without namespaces keeper and first process are one, and orphans
are found because it adopts them.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from forecast_harness.sandbox import cell_process, toolchain
from forecast_harness.sandbox.containment import confine, linux
from forecast_harness.sandbox.jobs import FILES_FOLDER, ResourceLimits
from forecast_harness.sandbox.process_stops import ProcessStopper

_KILL_TIMEOUT_S = 3.0
"""Most seconds for killing the processes that a candidate left, where no namespace does it."""
_CHANNEL_FD = 3
_ORDER_BYTES = 1 << 16


def supervise_cell(
    cage: confine.Confinement,
    limits: ResourceLimits,
    place: str,
    channel: socket.socket,
    status: int,
    server: int,
    *,
    orders: socket.socket,
    processors: Sequence[int] = (),
) -> NoReturn:
    """Become the keeper of a cell. `place` holds the candidate's files; `status` gets one JSON line.

    `orders`: where the judge asks for all of the cell's processes to be stopped and resumed. `processors`:
    those that the cell is bound to, by the kernel's numbers; empty: any.

    The line is `{"code": wait status as Python gives it, "cpu": seconds, "maxrss": bytes}` or
    `{"setup": why it could not begin}`.
    """
    os.setsid()
    linux.die_with_parent(server)
    number = os.getpid()
    user = None
    try:
        if cage.has_own_root:
            if confine.leave_namespaces():
                user = number
            first = os.fork()
            if first:
                for fd in (channel.fileno(), orders.fileno(), status):
                    os.close(fd)
                os.waitpid(first, 0)
                os._exit(0)
            linux.die_with_parent(0)  # a keeper outside the namespace shows as 0
            confine.build_root(cage, f"{place}/{FILES_FOLDER}", limits)
            scratch = confine.SCRATCH
        else:
            scratch = _plain_scratch(place, number)
            if cage.apart:
                user = number
                confine.give_scratch_to(scratch, user)
        linux.adopt_orphans()
        first = os.getpid()
        pid = os.fork()
        if pid == 0:
            orders.close()
            if processors:
                os.sched_setaffinity(0, processors)
            _become_cell(cage, limits, scratch, channel, status, first, user)
    except BaseException as error:
        _write_status(status, {"setup": f"{type(error).__name__}: {error}"})
        os._exit(1)
    channel.close()
    _reap_until_end(pid, status, cage, orders)


def _plain_scratch(place: str, number: int) -> str:
    scratch = Path(place, f"cell-{number}")
    scratch.mkdir()
    for name in ("tmp", "shm"):
        (scratch / name).mkdir()
    (scratch / FILES_FOLDER).symlink_to(f"../{FILES_FOLDER}")
    return str(scratch)


def _write_status(status: int, what: dict[str, object]) -> None:
    with contextlib.suppress(OSError):
        os.write(status, json.dumps(what).encode() + b"\n")


def _reap_until_end(pid: int, status: int, cage: confine.Confinement, orders: socket.socket) -> NoReturn:
    """Reap until the cell ends, stopping it whenever the judge says so; then report its end, and end all others."""
    if not cage.apart:  # the file system is built, and processes of its own user need no capability
        with contextlib.suppress(OSError):
            caps = linux.CAP_KILL | linux.CAP_SYS_PTRACE  # to stop another user's processes, and read them
            linux.drop_capabilities(caps if cage.has_own_root else 0)
    linux.set_dumpable(False)  # the candidate must not read this process, where both are one user
    usage = _reap_and_obey(pid, orders, ProcessStopper(os.getpid() == 1, pid))
    exit_code = os.waitstatus_to_exitcode(usage[0])
    cpu = usage[1].ru_utime + usage[1].ru_stime
    if os.getpid() != 1:
        kill_descendants(os.getpid())
    _write_status(status, {"code": exit_code, "cpu": cpu, "maxrss": usage[1].ru_maxrss * 1024})
    os._exit(0)


def _reap_and_obey(
    pid: int, orders: socket.socket, stopper: ProcessStopper
) -> tuple[int, resource.struct_rusage]:
    """Obey the judge's orders until process `pid` ends; its wait status and use of resources."""
    inward, wake = os.pipe()
    for fd in (inward, wake):
        os.set_blocking(fd, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    listening = [orders.fileno(), inward]
    while True:
        with contextlib.suppress(ChildProcessError):
            while (result := os.wait4(-1, os.WNOHANG))[0]:
                if result[0] == pid:
                    return result[1], result[2]
        ready = select.select(listening, [], [])[0]
        if inward in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(inward, 4096)
        if orders.fileno() in ready:
            try:
                question, descriptors, _, _ = socket.recv_fds(orders, _ORDER_BYTES, 1)
                stopper.answer(question, descriptors, orders)
            except OSError:
                question = b""
            if not question:  # the judge is gone, and the server will end this
                listening = [inward]


def kill_descendants(parent: int, spare: frozenset[int] = frozenset()) -> int:
    """Kill all descendants of this process, adopted ones included, except the trees of `spare`.

    Returns how many were left after three seconds of trying.
    """
    limit = time.monotonic() + _KILL_TIMEOUT_S
    while True:
        pids = [pid for pid in linux.children(parent) if pid not in spare]
        if not pids or time.monotonic() > limit:
            return len(pids)
        for pid in pids:
            for descendant in (pid, *linux.descendants(pid)):
                with contextlib.suppress(OSError):
                    os.kill(descendant, signal.SIGKILL)
        for pid in pids:  # not waited for: one that hangs in a driver must not hang us
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.002)


def _become_cell(
    cage: confine.Confinement,
    limits: ResourceLimits,
    scratch: str,
    channel: socket.socket,
    status: int,
    parent: int,
    user: int | None,
) -> NoReturn:
    """Become the cell: leave everything behind, then serve the judge."""
    try:
        os.setsid()
        os.chdir(scratch)
        status = _keep_descriptors(channel, status)
        _environment(scratch)
        confine.set_resource_limits(cage, limits)
        confine.drop_privileges(user)
        toolchain.restore_cache_files(Path(os.environ["TRITON_CACHE_DIR"]))
        linux.die_with_parent(parent)
        confine.install_filters(cage, scratch)
    except BaseException as error:
        _write_status(status, {"setup": f"{type(error).__name__}: {error}"})
        os._exit(1)
    os.close(status)  # from here on nothing the cell holds can report its end
    code = 1
    try:
        cell_process.serve(socket.socket(fileno=_CHANNEL_FD))
        code = 0
    finally:
        os._exit(code)


def _keep_descriptors(channel: socket.socket, status: int) -> int:
    """Keep standard streams that lead nowhere, the channel (3) and for a moment the status pipe (its new number)."""
    nothing = os.open(os.devnull, os.O_RDWR)
    high = [
        os.dup2(fd, 500 + i) for i, fd in enumerate((nothing, nothing, nothing, channel.detach(), status))
    ]
    for target, fd in enumerate(high):
        os.dup2(fd, target)
    os.closerange(len(high), 1 << 16)
    return len(high) - 1


def _environment(scratch: str) -> None:
    """Nothing but what a toolchain needs; the server's own environment is an allow-list already."""
    for name in ("HOME", "TMPDIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH"):
        os.environ[name] = scratch if name == "HOME" else f"{scratch}/tmp"
    os.environ["USER"] = os.environ["LOGNAME"] = "candidate"
    tempfile.tempdir = None  # it holds the server's TMPDIR
