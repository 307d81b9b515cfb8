"""The processors that this process may keep busy.

A container's limit of processors (`docker run --cpus=4`, or that of a pod) is a share of time: the process
still sees all processors of its host, and is stopped for the rest of each tenth of a second once its group has used up
its share. Compilations on all of them would end late together, and stop the thread that times kernels as well.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from pathlib import Path

_GROUPS, _ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def usable_processors() -> int:
    """The processors that this process is bound to, and no more than its control groups leave time for; at least 1."""
    return math.ceil(max(1, min(bound_processors(), processor_share())))


def bound_processors() -> int:
    """The processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.cache
def processor_share(groups: Path = _GROUPS, root: Path = _ROOT) -> float:
    """Processors whose time the process' control groups may use; infinite without a limit, or where none is known.

    `groups` says which these are, one a line (cgroups(7)); `root` is where their files are. Every group above one of
    them limits it, too. A container may see the paths of its host: then the topmost folder is its own.
    """
    least = math.inf
    with contextlib.suppress(OSError, ValueError):
        for line in groups.read_text(encoding="ascii").splitlines():
            _, controllers, path = line.split(":", 2)
            top = root / "cpu"
            if not controllers:
                top = root / "unified" if (root / "unified").is_dir() else root
            elif "cpu" not in controllers.split(","):
                continue
            names = [name for name in path.split("/") if name not in ("", "..")]
            folders = [top.joinpath(*names[:depth]) for depth in range(len(names) + 1)]
            least = min([least, *map(_share, folders)])
    return least


def _share(folder: Path) -> float:
    """Processors by the limit of one group, of either version of control groups."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            quota, period = " ".join((folder / name).read_text(encoding="ascii") for name in names).split()
            return int(quota) / int(period) if int(quota) > 0 else math.inf
    return math.inf
