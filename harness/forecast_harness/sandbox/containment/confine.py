"""Put the calling process under a level of containment. Steps of no return, in the order that works."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from forecast_harness.sandbox.containment import linux
from forecast_harness.sandbox.containment.levels import ContainmentLevel
from forecast_harness.sandbox.jobs import FILES_FOLDER, ResourceLimits

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
    syscalls = [] if memfd else list(_MEMFD.values())
    syscalls += [] if connect else [_CONNECT]
    syscalls += [] if affinity else [_SCHED_SETAFFINITY]
    for numbers in syscalls:
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
    buffer = ctypes.create_string_buffer(code, len(code))
    program = _FilterProgram(len(code) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    linux.no_new_privileges()
    zero = ctypes.c_ulong(0)
    result = linux._libc.prctl(
        _PR_SET_SECCOMP, ctypes.c_ulong(_MODE_FILTER), ctypes.byref(program), zero, zero
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


def restrict_files(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Allow reading and executing below `readable`, everything below `writable`, nothing else, for good.

    Also denied, where the kernel knows how: TCP (version 4), signals to and abstract sockets of
    unrestricted processes (6). Paths that do not exist are passed over. Raises `OSError` without landlock.
    """
    abi = linux.syscall(_SYS_CREATE_RULESET, None, 0, 1)
    access = _FILES_BY_ABI.get(abi, _LATEST_FILES)
    rules = _RulesetAttributes(
        access, _TCP if abi >= 4 else 0, _SCOPE_SOCKETS | _SCOPE_SIGNALS if abi >= 6 else 0
    )
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = linux.syscall(_SYS_CREATE_RULESET, ctypes.pointer(rules), size, 0)
    try:
        for path in readable:
            _add_rule(ruleset, path, (_EXECUTE | _READ | _READ_DIR) & access)
        for path in writable:
            _add_rule(ruleset, path, access)
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


# --- a level of containment ---


SCRATCH = "/scratch"
"""The scratch directory of a cell with its own mounts."""
_FIRST_CELL_UID = 2_000_000_000
"""Users of cells start here, far from real ones; each cell is its own, so its processes can be counted."""
_SYSTEM_TREES = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/sys")
_ETC_FILES = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime", "nvidia")
_PROC_WRITABLE = ("sys", "irq", "bus", "fs", "sysrq-trigger")
"""Parts of /proc that uid 0 may write even without a capability, if a cell has to keep that uid."""
GPUS = Path("/proc/driver/nvidia/gpus")
"""Has all devices of the machine."""
_HARMLESS_DEVICES = ("null", "zero", "full", "random", "urandom")
_ACCELERATOR_NODES = ("nvidia*", "kfd", "dri", "dxg")
_COMPUTE_NODES = ("nvidia[0-9]*", "nvidiactl", "nvidia-uvm", "kfd")
_READ_ONLY_DEVICES = ("/dev/random", "/dev/urandom")


@dataclass(frozen=True, slots=True)
class Confinement:
    """The cage of a cell."""

    level: ContainmentLevel
    device: str | None
    readable: tuple[str, ...]
    """Trees that the interpreter needs, beyond the system's."""
    staging: str
    """An empty directory on which a new root can be mounted."""
    apart: bool = False
    """Whether cells without namespaces get a user of their own, which only root can give them."""

    @property
    def has_own_root(self) -> bool:
        """Whether it has its own mounts, processes and network."""
        return self.level >= ContainmentLevel.NAMESPACES


def interpreter_roots() -> tuple[str, ...]:
    """The directories this process's modules come from: installations, and packages outside them.

    An installation in development mode shows only the loaded packages, not what lies around them.
    """
    roots = [Path(sys.base_prefix), Path(sys.prefix)]
    variables = ("LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH")
    roots += [Path(p) for name in variables for p in os.environ.get(name, "").split(":") if p]
    for name, module in list(sys.modules.items()):
        top = sys.modules.get(name.partition(".")[0], module)
        file = getattr(top, "__file__", None)
        if file is None and hasattr(top, "__path__"):  # a namespace package: only its loaded part
            top, file = module, getattr(module, "__file__", None)
        if not file or not Path(file).is_absolute():
            continue
        place = Path(file).parent if hasattr(top, "__path__") else Path(file)
        if not any(place.is_relative_to(root) for root in roots):
            roots.append(place)
    roots += [Path(p).parent for p in linux.mapped_files()]
    roots += [root.resolve() for root in roots]
    system = [Path(p) for p in _SYSTEM_TREES]
    results: list[Path] = []
    for root in sorted(set(roots), key=lambda r: len(r.parts)):
        if root.exists() and not any(root.is_relative_to(tree) for tree in (*system, *results)):
            results.append(root)
    return tuple(str(root) for root in results)


def other_devices(device: str | None, gpus: Path = GPUS) -> set[str]:
    """Nodes of NVIDIA's devices other than `device`, a UUID; none where the driver does not list that one.

    A process that starts CUDA opens every device that it finds, and waits for all others that are doing so.
    """
    nodes = {}
    for file in gpus.glob("*/information"):
        with contextlib.suppress(OSError):
            pairs = [line.partition(":") for line in file.read_text().splitlines()]
            facts = {name.strip(): value.strip() for name, _, value in pairs}
            nodes[facts.get("GPU UUID", "")] = f"/dev/nvidia{facts.get('Device Minor', '')}"
    return set(nodes.values()) - {nodes[device]} if device in nodes else set()


def device_nodes(device: str | None) -> list[str]:
    """Device nodes a cell may open: the harmless ones, and its own accelerator's if it has one."""
    nodes = [f"/dev/{name}" for name in _HARMLESS_DEVICES]
    if device is not None:
        result = {str(p) for name in _ACCELERATOR_NODES for p in Path("/dev").glob(name)}
        nodes += sorted(result - other_devices(device))
    return [node for node in nodes if Path(node).exists()]


def compute_nodes(device: str | None) -> list[str]:
    """The nodes of an accelerator that every process computing on it opens."""
    names = () if device is None else _COMPUTE_NODES
    return sorted({str(p) for name in names for p in Path("/dev").glob(name)} - other_devices(device))


def leave_namespaces() -> bool:
    """Enter new namespaces; the next child is the first process of the new PID namespace.

    Root makes them directly and can take another user later, which is told by True. Everybody else, and a
    root that is none (in a container), needs a user namespace and stays who it is.
    """
    flags = linux.NEW_NS | linux.NEW_PID | linux.NEW_NET | linux.NEW_IPC | linux.NEW_UTS
    if os.geteuid() == 0:
        try:
            linux.unshare(flags)
        except PermissionError:
            pass
        else:
            return True
    uid, gid = os.getuid(), os.getgid()
    linux.set_dumpable(True)  # else /proc/self/uid_map belongs to root
    linux.unshare(flags | linux.NEW_USER)
    linux.map_own_user(uid, gid)
    return False


def build_root(cage: Confinement, files: str, limits: ResourceLimits) -> None:
    """Make a read-only view of the interpreter and the system the root, with an empty scratch in memory."""
    linux.make_mounts_private()
    root = cage.staging
    linux.mount_tmpfs(root, 1 << 20, 0o755)
    for name in ("tmp", "dev/shm", "proc"):
        Path(root, name).mkdir(parents=True, exist_ok=True)
    linux.mount_proc(f"{root}/proc")
    for name in _PROC_WRITABLE:
        part = f"{root}/proc/{name}"
        if Path(part).exists():
            linux.bind_mount(part, part)
            linux.remount_read_only(part)
    scratch = root + SCRATCH
    Path(scratch).mkdir()
    linux.mount_tmpfs(scratch, limits.output_bytes, 0o777)
    for name, place in (("tmp", f"{root}/tmp"), ("shm", f"{root}/dev/shm")):
        Path(scratch, name).mkdir()
        Path(scratch, name).chmod(0o777)
        linux.bind_mount(f"{scratch}/{name}", place)  # one limit for all that can be written
    for tree in (*_SYSTEM_TREES, *(f"/etc/{name}" for name in _ETC_FILES), *cage.readable):
        _bind_read_only(root, tree)  # after /tmp: an environment may lie there
    for node in device_nodes(cage.device):
        _bind_read_only(root, node, writable=True)
    Path(scratch, FILES_FOLDER).mkdir()
    linux.bind_mount(files, f"{scratch}/{FILES_FOLDER}")
    linux.remount_read_only(f"{scratch}/{FILES_FOLDER}")
    linux.pivot_root(root)
    linux.remount_read_only("/", recursive=False)


def _bind_read_only(root: str, path: str, *, writable: bool = False) -> None:
    source, target = Path(path), Path(root + path)
    if path in _SYSTEM_TREES and source.is_symlink():  # /bin -> usr/bin
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(source.readlink())
        return
    if not source.exists() or target.exists():
        return
    if source.is_dir():
        target.mkdir(parents=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    linux.bind_mount(path, str(target))
    if not writable:
        linux.remount_read_only(str(target))


def set_resource_limits(cage: Confinement, limits: ResourceLimits) -> None:
    """Resource limits of this process and of each of its children."""
    caps = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: max(1, round(limits.cpu_s)),
        resource.RLIMIT_FSIZE: limits.output_bytes,
        resource.RLIMIT_NOFILE: 1024,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    if cage.has_own_root:
        caps[resource.RLIMIT_NPROC] = limits.processes
    if cage.device is None:  # CUDA reserves address space by the terabyte
        caps[resource.RLIMIT_AS] = _address_space() + limits.memory_bytes
    for name, value in caps.items():
        hard = resource.getrlimit(name)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        # A second more, so that SIGXCPU says which limit it was: at the hard one the kernel sends SIGKILL,
        # and on a busy machine its ticks and its account of the time used differ by more than a little.
        most = value + 1 if name == resource.RLIMIT_CPU else value
        resource.setrlimit(name, (value, most if hard == resource.RLIM_INFINITY else min(most, hard)))
    with contextlib.suppress(OSError):
        # If the machine runs out of memory, this process should go first.
        Path("/proc/self/oom_score_adj").write_text("1000")


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def give_scratch_to(scratch: str, user: int) -> None:
    """Give a plain scratch directory to the user of this number, and let it find the way there."""
    uid = _FIRST_CELL_UID + user
    for path in (Path(scratch), *Path(scratch).iterdir()):
        os.chown(path, uid, uid, follow_symlinks=False)
    Path(scratch).chmod(0o700)


def drop_privileges(user: int | None) -> None:
    """Give up every privilege, and with `user`, a number that tells cells apart, the user too."""
    if user is not None:
        uid = _FIRST_CELL_UID + user
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    linux.drop_capabilities()
    linux.set_dumpable(True)  # its own /proc/self, which a change of user hides
    linux.no_new_privileges()


def install_filters(cage: Confinement, scratch: str) -> None:
    """Landlock and seccomp, as the level and the kernel have them. Nothing can be undone afterwards."""
    if cage.level < ContainmentLevel.SYSCALLS:
        return
    own_kind = cage.has_own_root
    if cage.level >= ContainmentLevel.FILES and abi_version():
        readable: tuple[str, ...] = ("/",)
        places: tuple[str, ...] = (SCRATCH, "/tmp", "/dev/shm")
        if not cage.has_own_root:
            places = (scratch,)
            readable = (*_SYSTEM_TREES, *(f"/etc/{name}" for name in _ETC_FILES), *cage.readable)
            readable += ("/proc", *_READ_ONLY_DEVICES, str(Path(scratch).parent / FILES_FOLDER))
        if cage.device is not None:  # CUDA writes something about itself, else it does not start
            places += ("/proc/self",)
        nodes = [node for node in device_nodes(cage.device) if node not in _READ_ONLY_DEVICES]
        restrict_files(readable, (*places, *nodes))
        own_kind = own_kind or abi_version() >= 6  # where a restricted process can signal only its own kind
    install_filter(
        signal_only=None if own_kind else os.getpid(),
        # Without any to listen at, CUDA does not start (error 304 from cuInit, driver 580).
        unix_sockets=cage.has_own_root or cage.device is not None,
        memfd=cage.device is not None,
        connect=cage.has_own_root or cage.device is None,
        # A candidate must not choose its number of processors where these are timed.
        affinity=cage.device is not None,
    )
