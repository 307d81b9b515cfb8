"""Put the calling process under a level of containment. Steps of no return, in the order that works."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

from forecast_harness.sandbox.containment import filters, linux
from forecast_harness.sandbox.containment.levels import ContainmentLevel
from forecast_harness.sandbox.jobs import FILES_FOLDER, ResourceLimits

SCRATCH = "/scratch"
"""Where a cell with its own mounts finds its scratch directory."""
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
    data = ("LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH")
    roots += [Path(p) for name in data for p in os.environ.get(name, "").split(":") if p]
    for name, module in list(sys.modules.items()):
        top = sys.modules.get(name.partition(".")[0], module)
        file = getattr(top, "__file__", None)
        if file is None and hasattr(top, "__path__"):  # a namespace package: only what is loaded of it
            top, file = module, getattr(module, "__file__", None)
        if not file or not Path(file).is_absolute():
            continue
        place = Path(file).parent if hasattr(top, "__path__") else Path(file)
        if not any(place.is_relative_to(root) for root in roots):
            roots.append(place)
    roots += [Path(p).parent for p in linux.mapped_files()]
    roots += [root.resolve() for root in roots]
    system = [Path(p) for p in _SYSTEM_TREES]
    kept: list[Path] = []
    for root in sorted(set(roots), key=lambda r: len(r.parts)):
        if root.exists() and not any(root.is_relative_to(other) for other in (*system, *kept)):
            kept.append(root)
    return tuple(str(root) for root in kept)


def other_devices(device: str | None, gpus: Path = GPUS) -> set[str]:
    """Nodes of NVIDIA's devices other than `device`, a UUID; none where the driver does not list that one.

    A process that starts CUDA opens every device that it finds, and waits for all others that are doing so.
    """
    data = {}
    for file in gpus.glob("*/information"):
        with contextlib.suppress(OSError):
            pairs = [line.partition(":") for line in file.read_text().splitlines()]
            about = {name.strip(): value.strip() for name, _, value in pairs}
            data[about.get("GPU UUID", "")] = f"/dev/nvidia{about.get('Device Minor', '')}"
    return set(data.values()) - {data[device]} if device in data else set()


def device_nodes(device: str | None) -> list[str]:
    """Device nodes a cell may open: the harmless ones, and its own accelerator's if it has one."""
    nodes = [f"/dev/{name}" for name in _HARMLESS_DEVICES]
    if device is not None:
        result = {str(p) for name in _ACCELERATOR_NODES for p in Path("/dev").glob(name)}
        nodes += sorted(result - other_devices(device))
    return [node for node in nodes if Path(node).exists()]


def compute_nodes(device: str | None) -> list[str]:
    """Those nodes of an accelerator that whoever computes on it opens."""
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
        # and on a busy machine its ticks and what it tells of the time used differ by more than a little.
        most = value + 1 if name == resource.RLIMIT_CPU else value
        resource.setrlimit(name, (value, most if hard == resource.RLIM_INFINITY else min(most, hard)))
    with contextlib.suppress(OSError):
        # If the machine runs out of memory, this is what should go first.
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
    if cage.level >= ContainmentLevel.FILES and filters.abi_version():
        readable: tuple[str, ...] = ("/",)
        places: tuple[str, ...] = (SCRATCH, "/tmp", "/dev/shm")
        if not cage.has_own_root:
            places = (scratch,)
            readable = (*_SYSTEM_TREES, *(f"/etc/{name}" for name in _ETC_FILES), *cage.readable)
            readable += ("/proc", *_READ_ONLY_DEVICES, str(Path(scratch).parent / FILES_FOLDER))
        if cage.device is not None:  # CUDA writes something about itself, else it does not start
            places += ("/proc/self",)
        nodes = [node for node in device_nodes(cage.device) if node not in _READ_ONLY_DEVICES]
        filters.restrict_files(readable, (*places, *nodes))
        own_kind = own_kind or filters.scopes_signals()
    filters.install_filter(
        signal_only=None if own_kind else os.getpid(),
        # Without any to listen at, CUDA does not start (error 304 from cuInit, driver 580).
        unix_sockets=cage.has_own_root or cage.device is not None,
        memfd=cage.device is not None,
        connect=cage.has_own_root or cage.device is None,
        # On how many processors it computes is not its own choice, where processors are what is timed.
        affinity=cage.device is not None,
    )
