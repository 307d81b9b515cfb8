"""How long a thread has waited for a core, which is none of its own time. Linux alone tells."""

from __future__ import annotations

from pathlib import Path


def waited_for_core_s() -> float:
    """Seconds that this thread was ready to run while the kernel had given its core to another."""
    return int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
