"""Find the strongest level of containment by trying each: a cell tries to get out, and to do honest work."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from forecast_harness.sandbox import cell_supervisor, wire
from forecast_harness.sandbox.containment import confine
from forecast_harness.sandbox.containment.levels import ContainmentLevel
from forecast_harness.sandbox.jobs import FILES_FOLDER, ResourceLimits, TensorArrays, WireError

_LIMITS = ResourceLimits(wall_s=20, cpu_s=20, memory_bytes=256 << 20, processes=64, output_bytes=16 << 20)
_PLANTED_SECRET = "a secret of the user's"


def probe_strongest(
    device: str | None, roots: tuple[str, ...], staging: str | None = None
) -> tuple[int, dict[str, str]]:
    """The strongest level that works (0: none), and why each stronger one was refused."""
    refusals: dict[str, str] = {}
    for level in sorted(ContainmentLevel, reverse=True):
        result, why = probe_level(level, device, roots, staging)
        if result:
            return result, refusals
        refusals |= why
    return 0, refusals


def can_separate_users(
    level: ContainmentLevel, device: str | None, roots: tuple[str, ...], staging: str | None = None
) -> bool:
    """Whether cells of this level, without namespaces, can do with users of their own.

    Only root can give them one. It keeps root's files from being written, and other cells, judge and server
    from being signalled, where nothing else does.
    """
    if os.geteuid() != 0 or level >= ContainmentLevel.NAMESPACES:
        return False
    with _probe_place(staging) as (place, root):
        return not _probe(confine.Confinement(level, device, roots, root, True), place)


def probe_level(
    level: ContainmentLevel, device: str | None, roots: tuple[str, ...], staging: str | None = None
) -> tuple[int, dict[str, str]]:
    """The level if it works here, else 0 and why not."""
    with _probe_place(staging) as (place, root):
        why = _probe(confine.Confinement(level, device, roots, root), place)
    return (0, {level.name: why}) if why else (int(level), {})


@contextlib.contextmanager
def _probe_place(staging: str | None) -> Iterator[tuple[str, str]]:
    place = tempfile.mkdtemp(prefix="forecast-probe-")
    try:
        Path(place).chmod(0o711)  # the candidate may be another user
        Path(place, FILES_FOLDER).mkdir()
        outside = Path(place, "outside")
        outside.mkdir()
        outside.chmod(0o777)
        (outside / "secret").write_text(_PLANTED_SECRET)
        root = staging or f"{place}/root"
        Path(root).mkdir(exist_ok=True)
        yield place, root
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _probe(cage: confine.Confinement, place: str) -> str:
    """The faults of a level as a sentence; '' for none."""
    ours, theirs = socket.socketpair()
    inward, status = os.pipe()
    judge_orders, orders = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            judge_orders.close()
            cell_supervisor.supervise_cell(cage, _LIMITS, place, theirs, status, server, orders=orders)
        finally:
            os._exit(1)
    theirs.close()
    orders.close()
    os.close(status)
    try:
        ours.settimeout(_LIMITS.wall_s)
        question = {"level": int(cage.level), "outside": f"{place}/outside", "judge": server}
        question["readable"] = list(cage.readable)
        question["nodes"] = confine.compute_nodes(cage.device) if cage.apart else []
        entry = f"{__name__}:attempt"
        wire.send(ours, {"nonce": "", "entry": entry, "payload": question, "limit": 0}, {})
        answer, _ = wire.receive(ours, 0)
        return str(answer["value"]) if "value" in answer else str(answer["error"]["text"])
    except (EOFError, OSError, WireError, KeyError) as error:
        os.set_blocking(inward, False)
        with contextlib.suppress(BlockingIOError):
            return os.read(inward, 4096).decode() or f"the cell is gone: {error!r}"
        return f"the cell does not answer: {error!r}"
    finally:
        ours.close()
        judge_orders.close()
        os.close(inward)
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def attempt(payload: dict[str, Any], arrays: TensorArrays, state: dict[str, Any]) -> str:
    """Try, in the cell, acts that must be impossible and acts that must be possible; the faults as a sentence."""
    level = ContainmentLevel(payload["level"])
    secret = Path(payload["outside"], "secret")
    wrong: dict[str, bool] = {
        "it holds capabilities": not _without_capabilities(),
        "scratch cannot be written": not _is_allowed(lambda: Path("tmp/x").write_text("x")),
        "the interpreter cannot be read": not all(_is_allowed(Path(r).stat) for r in payload["readable"])
        or not _is_allowed(lambda: Path(os.__file__).read_bytes()),
        "a device cannot be opened": not all(
            _is_allowed(partial(_open_and_close, node)) for node in payload["nodes"]
        ),
        "no program can be started": not _is_allowed(
            lambda: subprocess.run([sys.executable, "-I", "-S", "-c", ""], check=True, timeout=15)
        ),
    }
    if level >= ContainmentLevel.SYSCALLS:
        wrong["an internet socket could be made"] = _is_allowed(lambda: socket.socket().close())
        wrong["another process could be signalled"] = _is_allowed(lambda: os.kill(payload["judge"], 0))
    if level >= ContainmentLevel.FILES:
        wrong["a file outside could be read"] = _is_allowed(secret.read_text)
        wrong["a file outside could be written"] = _is_allowed(lambda: secret.write_text("x"))
    if level >= ContainmentLevel.NAMESPACES:
        pids = [p.name for p in Path("/proc").iterdir() if p.name.isdigit()]
        wrong["other processes are visible"] = len(pids) > 3 or os.getpid() > 3
        # Not by its interfaces: some kernels put idle tunnels into every new network.
        wrong["there is a network"] = len(Path("/proc/net/route").read_text().splitlines()) > 1
    return "; ".join(text for text, is_so in wrong.items() if is_so)


def _open_and_close(node: str) -> None:
    os.close(os.open(node, os.O_RDWR))


def _is_allowed(what: Any) -> bool:
    try:
        what()
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def _without_capabilities() -> bool:
    lines = Path("/proc/self/status").read_text().splitlines()
    return any(line.startswith("CapEff:") and int(line.split()[1], 16) == 0 for line in lines)
