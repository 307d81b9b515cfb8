"""Filters of Linux: system calls (seccomp, in classic BPF) and files (landlock).

A kernel under test gets nothing that it never needs. Three answers to a system call. *Killed* (SIGSYS, which the
harness reports as an attack): calls that only serve to reach into other processes or into the kernel. *Refused*
(EPERM): calls that honest libraries try and can do without. Everything else is allowed: this is a deny list on
purpose, since an allow list breaks with every new release of CUDA, and the namespaces and landlock carry the rest.

Landlock says which files a process and its children may reach, without any privilege (Linux 5.13).
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterable
from pathlib import Path

from forecast_harness.sandbox.containment import linux

_PR_SET_SECCOMP = 22
_MODE_FILTER = 2
_KILL = 0x80000000
_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_OFFSET_NUMBER, _OFFSET_ARCH, _OFFSET_ARGUMENT = 0, 4, 16
_X32 = 0x40000000
_AF_UNIX = 1

# name: (x86_64, aarch64); numbers from the kernel's unistd tables.
_KILLED = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "bpf": (321, 280),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setns": (308, 268),
}
_REFUSED = {
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "pidfd_open": (434, 434),
}
_REPORTED_ABSENT = {
    # Callers fall back when these do not exist, and their arguments lie in memory, unseen by a filter.
    "clone3": (435, 435),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
}
_MEMFD = {"memfd_create": (319, 279), "memfd_secret": (447, 447)}
_SCHED_SETAFFINITY = (203, 122)
_SIGNALS = {
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
}
_SOCKET = (41, 198)
_CONNECT = (42, 203)
_CLONE = (56, 220)
_NAMESPACES = (
    linux.NEW_NS
    | linux.NEW_UTS
    | linux.NEW_IPC
    | linux.NEW_USER
    | linux.NEW_PID
    | linux.NEW_NET
    | linux.NEW_CGROUP
)
_ARCHES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def _instruction(code: int, k: int, true: int = 0, false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, true, false, k)


def _return_for_syscall(number: int, action: int) -> list[bytes]:
    return [_instruction(_EQUAL, number, 0, 1), _instruction(_RETURN, action)]


def _branch_on_argument(number: int, test: bytes, hit: int, miss: int) -> list[bytes]:
    """Decide by the low half of the first argument; `test` must jump (0, 1)."""
    return [
        _instruction(_EQUAL, number, 0, 4),
        _instruction(_LOAD, _OFFSET_ARGUMENT),
        test,
        _instruction(_RETURN, hit),
        _instruction(_RETURN, miss),
    ]


def filter_program(
    machine: str,
    *,
    signal_only: int | None,
    unix_sockets: bool,
    memfd: bool,
    connect: bool = True,
    affinity: bool = True,
) -> bytes:
    """The filter as `sock_filter` records.

    signal_only: the only pid that may be signalled (None: any that the process sees). unix_sockets:
    whether local sockets may be made; internet and all other families never are. memfd: whether anonymous
    files in memory, which no size limit counts, may be made. connect: whether a socket may be connected to
    somebody else's. affinity: whether a process may choose its processors.
    Raises `OSError` for a machine whose numbers are unknown.
    """
    if machine not in _ARCHES:
        raise OSError(errno.ENOSYS, f"no system-call table for {machine}; known are {sorted(_ARCHES)}")
    column, arch = _ARCHES[machine]
    refuse = _ERRNO | errno.EPERM
    code = [
        _instruction(_LOAD, _OFFSET_ARCH),
        _instruction(_EQUAL, arch, 1, 0),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _OFFSET_NUMBER),
    ]
    if machine == "x86_64":
        code += [_instruction(_AT_LEAST, _X32, 0, 1), _instruction(_RETURN, _KILL)]
    for table, action in ((_KILLED, _KILL), (_REFUSED, refuse), (_REPORTED_ABSENT, _ERRNO | errno.ENOSYS)):
        for numbers in table.values():
            code += _return_for_syscall(numbers[column], action)
    denied = [] if memfd else list(_MEMFD.values())
    denied += [] if connect else [_CONNECT]
    denied += [] if affinity else [_SCHED_SETAFFINITY]
    for numbers in denied:
        code += _return_for_syscall(numbers[column], refuse)
    if signal_only is not None:
        own = _instruction(_EQUAL, signal_only, 0, 1)
        for name, numbers in _SIGNALS.items():
            if name in ("tkill", "pidfd_send_signal"):  # named by thread or descriptor, not by process
                code += _return_for_syscall(numbers[column], refuse)
            else:
                code += _branch_on_argument(numbers[column], own, _ALLOW, refuse)
    local = _instruction(_EQUAL, _AF_UNIX, 0, 1)
    code += _branch_on_argument(_SOCKET[column], local, _ALLOW if unix_sockets else refuse, refuse)
    code += _branch_on_argument(_CLONE[column], _instruction(_ANY_BIT, _NAMESPACES, 0, 1), refuse, _ALLOW)
    return b"".join([*code, _instruction(_RETURN, _ALLOW)])


def install_filter(
    *, signal_only: int | None, unix_sockets: bool, memfd: bool, connect: bool = True, affinity: bool = True
) -> None:
    """Filter this thread and all it will start, for good. Raises `OSError` if the kernel does not."""
    code = filter_program(
        os.uname().machine,
        signal_only=signal_only,
        unix_sockets=unix_sockets,
        memfd=memfd,
        connect=connect,
        affinity=affinity,
    )
    held = ctypes.create_string_buffer(code, len(code))
    described = _FilterProgram(len(code) // 8, ctypes.cast(held, ctypes.c_void_p))
    linux.no_new_privileges()
    zero = ctypes.c_ulong(0)
    result = linux._libc.prctl(
        _PR_SET_SECCOMP, ctypes.c_ulong(_MODE_FILTER), ctypes.byref(described), zero, zero
    )
    linux.check_result(result, "seccomp filter")


_SYS_CREATE_RULESET, _SYS_ADD_RULE, _SYS_RESTRICT_SELF = 444, 445, 446
_PATH_BENEATH = 1
_EXECUTE, _WRITE, _READ, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_TRUNCATE, _IOCTL_DEVICE = 1 << 14, 1 << 15
_ON_FILES = _EXECUTE | _WRITE | _READ | _TRUNCATE | _IOCTL_DEVICE
_FILES_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}
_LATEST_FILES = (1 << 16) - 1
_TCP = 0b11
"""Binding and connecting."""
_SCOPE_SOCKETS, _SCOPE_SIGNALS = 0b01, 0b10


class _RulesetAttributes(ctypes.Structure):
    _fields_ = (("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneathRule(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def abi_version() -> int:
    """The kernel's landlock version; 0 when it has none or it is switched off."""
    try:
        return linux.syscall(_SYS_CREATE_RULESET, None, 0, 1)
    except OSError:
        return 0


def scopes_signals() -> bool:
    """Whether a restricted process can signal only its own kind."""
    return abi_version() >= 6


def restrict_files(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Allow reading and executing below `readable`, everything below `writable`, nothing else, for good.

    Also denied, where the kernel knows how: TCP (version 4), signals to and abstract sockets of
    unrestricted processes (6). Paths that do not exist are passed over. Raises `OSError` without landlock.
    """
    abi = linux.syscall(_SYS_CREATE_RULESET, None, 0, 1)
    handled = _FILES_BY_ABI.get(abi, _LATEST_FILES)
    rules = _RulesetAttributes(
        handled, _TCP if abi >= 4 else 0, _SCOPE_SOCKETS | _SCOPE_SIGNALS if abi >= 6 else 0
    )
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = linux.syscall(_SYS_CREATE_RULESET, ctypes.pointer(rules), size, 0)
    try:
        for path in readable:
            _add_rule(ruleset, path, (_EXECUTE | _READ | _READ_DIR) & handled)
        for path in writable:
            _add_rule(ruleset, path, handled)
        linux.no_new_privileges()
        linux.syscall(_SYS_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _add_rule(ruleset: int, path: str, access: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        rule = _PathBeneathRule(access if Path(path).is_dir() else access & _ON_FILES, place)
        linux.syscall(_SYS_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.pointer(rule), 0)
    finally:
        os.close(place)
