"""How strongly a candidate is contained, and what each level leaves open.

| what | PROCESS | SYSCALLS | FILES | NAMESPACES |
|---|---|---|---|---|
| forge the result, patch the clock, read what is expected | contained | contained | contained | contained |
| crash, hang, exit, memory, CPU time, output flood | contained | contained | contained | contained |
| secrets in the environment of the lane's processes | contained | contained | contained | contained |
| secrets in the environment of the user's other processes | OPEN | OPEN | contained | contained |
| ptrace, process memory, mount, bpf, clock setting | OPEN | contained | contained | contained |
| internet sockets | OPEN | contained | contained | contained |
| local sockets | OPEN | contained (with a device: datagrams OPEN) | the same | none to reach outside |
| signals to the judge or to other processes | OPEN | contained | contained | contained |
| writes outside scratch | OPEN | OPEN | contained (not: chmod, chown, times) | contained |
| reading the user's files | OPEN | OPEN | contained (names can be tested) | contained |
| daemons (setsid, double fork) | swept by a subreaper | swept | swept | contained: they die with it |
| fork bomb | watchdog, 10/s | watchdog, 10/s | watchdog, 10/s | contained: RLIMIT_NPROC, watchdog |
| many files in scratch | watchdog, 1/s | watchdog, 1/s | watchdog, 1/s | contained: sized tmpfs |
| seeing other processes (names, command lines) | OPEN | OPEN | OPEN | contained |
| running out of its turn (see `process_stops`) | found | found | found | contained, or found |
| more processors than it is bound to | OPEN | contained without a device | the same | the same |

At PROCESS the judge itself may be reached by a candidate of the same user (ptrace is refused only because
judge and server are not dumpable; a signal is not), so a result at this level is an accident-proof one, not
an attack-proof one. Where the lane belongs to root, cells below NAMESPACES get users of their own
(`Lane.apart`), so that root's files, /proc/sys among them, cannot be written and the judge cannot be
signalled, provided that such a user can read the interpreter and open the device. Where it cannot, PROCESS
and SYSCALLS leave root's files open: run there only what you would run yourself.

No level contains: kernel and driver exploits, side channels (timing, caches, shared device memory that the
driver does not clear), a candidate slowing the machine within its limits while it is not stopped, or
anything within its own cell. Patched torch, patched clocks and forged *answers* are expected there, which is
why clock and comparison live in the judge, and only bytes cross. Nobody reads a cell's prints.

CUDA: all cells of a device share its driver; a kernel that wedges the device is noticed by the canary, not
prevented. A cell at NAMESPACES has its own IPC and PID namespace, across which CUDA IPC handles may not open.
"""

from __future__ import annotations

import json
import subprocess
import sys
from enum import IntEnum
from functools import cache

from forecast_harness.sandbox.jobs import SandboxError


class ContainmentLevel(IntEnum):
    """Levels of containment; each includes those below it. The module's table says what each contains."""

    PROCESS = 1
    """A process of its own: session, limits, clean environment, closed descriptors, private scratch, no
    capabilities."""
    SYSCALLS = 2
    """`PROCESS` and a system-call filter (seccomp)."""
    FILES = 3
    """`SYSCALLS` and a file-system rule set (landlock)."""
    NAMESPACES = 4
    """`FILES` and user or root-made namespaces: own PIDs, mounts, network, IPC. The root file system is a
    read-only view of the interpreter and the system libraries. Needs seccomp; landlock is added if there."""

    def __str__(self) -> str:
        return self.name


SERVER_COMMAND = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from forecast_harness.sandbox.server import main; main(sys.argv[2])"
)
"""The code with which a server starts, in isolated mode, which ignores PYTHONPATH: the path is an argument."""


def module_search_path() -> str:
    """This process's module search path as JSON, without the working directory and without repeats."""
    return json.dumps([entry for entry in dict.fromkeys(sys.path) if entry])


@cache
def strongest_level() -> ContainmentLevel:
    """The strongest level that works on this machine, by trying each in a process of its own.

    Raises `SandboxError` where there is none, with the result of each try.
    """
    command = [sys.executable, "-I", "-c", SERVER_COMMAND, module_search_path(), json.dumps({"probe": True})]
    if sys.platform != "linux":
        raise SandboxError(f"the sandbox needs Linux, this is {sys.platform}; run it in a container there")
    process = subprocess.run(command, capture_output=True, text=True, env={}, timeout=60, check=False)
    try:
        result = json.loads(process.stdout)
    except ValueError:
        raise SandboxError(f"the probe did not answer: {process.stderr[-500:]}") from None
    if not result["level"]:
        raise SandboxError(f"no level of containment works here: {result['refused']}")
    return ContainmentLevel(result["level"])
