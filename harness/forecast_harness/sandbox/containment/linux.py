"""The few Linux calls that Python has no name for, each raising `OSError` when the kernel refuses."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

NEW_NS = 0x00020000
NEW_UTS = 0x04000000
NEW_IPC = 0x08000000
NEW_USER = 0x10000000
NEW_PID = 0x20000000
NEW_NET = 0x40000000
NEW_CGROUP = 0x02000000

_MS_BIND = 0x1000
_MS_REC = 0x4000
_MS_PRIVATE = 0x40000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 0x2, 0x4, 0x8
_MNT_DETACH = 2
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_ATTR_RDONLY, _ATTR_NOSUID = 0x1, 0x2

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_SECUREBITS = 28
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_SECUREBITS_LOCKED = 0x3F
"""NOROOT, NO_SETUID_FIXUP and KEEP_CAPS, each with its lock: uid 0 gives no capability any more."""

_CAP_V3 = 0x20080522
CAP_KILL, CAP_SYS_PTRACE = 1 << 5, 1 << 19
_CPU_CLOCK_SCHED = 2
"""The kind of clock that counts a process's time on processors, in a clock's number."""

_LISTS_CHILDREN = Path(f"/proc/self/task/{os.getpid()}/children").exists()
"""`CONFIG_PROC_CHILDREN`; gVisor has none, for one."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t


def check_result(result: int, what: str) -> int:
    """Pass a libc result on. Raises `OSError` with errno and `what` when it is negative."""
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def syscall(number: int, *args: int | bytes | ctypes._Pointer[ctypes.Structure] | None) -> int:
    """A raw system call; integers are passed as 64 bits."""
    wide = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    return check_result(_libc.syscall(ctypes.c_long(number), *wide), f"system call {number}")


def prctl(option: int, argument: int = 0) -> None:
    """`prctl(2)` with one argument."""
    zero = ctypes.c_ulong(0)
    check_result(_libc.prctl(option, ctypes.c_ulong(argument), zero, zero, zero), f"prctl {option}")


def die_with_parent(parent: int) -> None:
    """Get SIGKILL when the parent ends; leave at once if it already has (`parent`: its pid, 0: unseen).

    Must come after every change of uid, which clears the wish.
    """
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def set_dumpable(flag: bool) -> None:
    """Whether processes of the same user may look into this one (ptrace, /proc/PID/mem, fds, environ)."""
    prctl(_PR_SET_DUMPABLE, int(flag))


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def no_new_privileges() -> None:
    """No setuid program gives this process anything; needed before landlock and seccomp."""
    prctl(_PR_SET_NO_NEW_PRIVS, 1)


def unshare(flags: int) -> None:
    """Enter new namespaces; a new PID namespace begins with the next child."""
    check_result(_libc.unshare(flags), "unshare")


class _CapHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _CapData(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable"))


def drop_capabilities(keep: int = 0) -> None:
    """Give up every capability, also those that uid 0 would get by executing something.

    `keep`: a mask of those below the 32nd that stay, where they are held.
    """
    zero = ctypes.c_ulong(0)
    _libc.prctl(_PR_CAP_AMBIENT, ctypes.c_ulong(4), zero, zero, zero)  # clear all; absent before 4.3
    _libc.prctl(_PR_SET_SECUREBITS, ctypes.c_ulong(_SECUREBITS_LOCKED), zero, zero, zero)
    header, data = _CapHeader(_CAP_V3, 0), (_CapData * 2)()
    if keep:
        check_result(_libc.capget(ctypes.byref(header), ctypes.byref(data)), "capget")
        permitted = int(data[0].permitted) & keep
        data = (_CapData * 2)(_CapData(permitted, permitted, 0))
    check_result(_libc.capset(ctypes.byref(header), data), "capset")


def map_own_user(uid: int, gid: int) -> None:
    """After `unshare(NEW_USER)`: keep the own uid and gid, so that the caller is still who it was."""
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """`mount(2)`."""
    check_result(
        _libc.mount(
            source.encode(),
            target.encode(),
            kind.encode() or None,
            ctypes.c_ulong(flags),
            options.encode() or None,
        ),
        f"mount {kind or source} on {target}",
    )


def make_mounts_private() -> None:
    """Later mounts of this namespace do not travel to others."""
    mount("none", "/", flags=_MS_REC | _MS_PRIVATE)


def bind_mount(source: str, target: str) -> None:
    """Show a file or tree, with what is mounted below it, at another path too."""
    mount(source, target, flags=_MS_BIND | _MS_REC)


def mount_tmpfs(target: str, nbytes: int, mode: int) -> None:
    """An empty file system in memory that holds at most `nbytes` and 65536 files."""
    options = f"size={nbytes},nr_inodes=65536,mode={mode:o}"
    mount("tmpfs", target, "tmpfs", _MS_NOSUID | _MS_NODEV, options)


def mount_proc(target: str) -> None:
    """The processes of this PID namespace."""
    mount("proc", target, "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)


class _MountAttr(ctypes.Structure):
    _fields_ = tuple((n, ctypes.c_uint64) for n in ("attr_set", "attr_clr", "propagation", "userns_fd"))


def remount_read_only(target: str, *, recursive: bool = True) -> None:
    """Make a mount, and by default all below it, read-only and without setuid (Linux 5.12)."""
    attr = _MountAttr(_ATTR_RDONLY | _ATTR_NOSUID, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    syscall(
        442, _AT_FDCWD, target.encode() + b"\0", flags, ctypes.pointer(attr), ctypes.sizeof(attr)
    )  # mount_setattr has one number everywhere


def pivot_root(new_root: str) -> None:
    """Make `new_root` (a mount) the root and forget the old one."""
    number = {"x86_64": 155, "aarch64": 41}[os.uname().machine]
    os.chdir(new_root)
    syscall(number, b".\0", b".\0")
    check_result(_libc.umount2(b".", _MNT_DETACH), "umount2 of the old root")
    os.chdir("/")


def children(pid: int) -> list[int]:
    """Pids of the children of every thread of a process; none for one that is gone."""
    result: list[int] = []
    if not _LISTS_CHILDREN:
        return children_by_search(pid)
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            result += [int(n) for n in (task / "children").read_text().split()]
    except OSError:
        pass
    return result


def children_by_search(pid: int) -> list[int]:
    """The children of a process by the parents of all processes, for kernels that do not list children."""
    return _families().get(pid, [])


def _families() -> dict[int, list[int]]:
    """Children by parent, of all processes that can be seen."""
    result: dict[int, list[int]] = {}
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            try:
                text = (place / "stat").read_text()
            except OSError:
                continue
            # pid (name) state parent ...; a name may contain spaces and parentheses.
            result.setdefault(int(text.rpartition(")")[2].split()[1]), []).append(int(place.name))
    return result


def descendants(pid: int) -> list[int]:
    """Pids of all processes below a process."""
    # One look at all processes for the whole tree: with a look for each of its members, lanes that work at
    # once would slow down each other's watchdogs with all the processes that they add.
    families = None if _LISTS_CHILDREN else _families()
    result: list[int] = []
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        below = children(parent) if families is None else families.get(parent, [])
        new = [child for child in below if child not in result]
        result += new
        waiting += new
    return result


def mapped_files() -> set[str]:
    """Paths of the files whose code is mapped into this process."""
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    return {line[5] for line in lines if len(line) == 6 and "x" in line[1] and line[5].startswith("/")}


def task_states(pid: int) -> str:
    """The letters of all threads of a process; empty for one that is gone."""
    result = ""
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                result += (task / "stat").read_text().rpartition(")")[2].split()[0]
    return result


class _IoVector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def read_process_memory(pid: int, address: int, into: memoryview) -> bool:
    """Fill writable memory with what another process holds from an address on; whether it holds all of that."""
    if not len(into):
        return True
    if not 0 <= address < 1 << 63:
        return False
    ours = _IoVector(ctypes.addressof(ctypes.c_char.from_buffer(into)), len(into))
    theirs = _IoVector(address, len(into))
    count: int = _libc.process_vm_readv(
        pid, ctypes.byref(ours), ctypes.c_ulong(1), ctypes.byref(theirs), ctypes.c_ulong(1), ctypes.c_ulong(0)
    )
    return count == len(into)


def processor_time_ns(pid: int) -> int:
    """Nanoseconds that all threads of a process have spent on processors; -1 where the kernel does not tell."""
    try:
        return time.clock_gettime_ns((~pid << 3) | _CPU_CLOCK_SCHED)
    except OSError:
        return -1


def memory_and_threads(pid: int) -> tuple[int, int]:
    """(private bytes in memory, threads) of one process; zeros when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0, 0
    facts = dict(line.split(":", 1) for line in lines if ":" in line)
    kib = sum(int(facts.get(name, "0").split()[0]) for name in ("RssAnon", "RssShmem"))
    return kib * 1024, int(facts.get("Threads", "0"))
