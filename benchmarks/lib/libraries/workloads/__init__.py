"""Public operations of kernel libraries at realistic shapes, each run once: forward, and backward where there is one.

Nobody on this project wrote the kernels behind them. A workload's name is `LIBRARY/OPERATION`; which tuner contexts
(kernel and key) it meets depends on the library alone, never on who tunes them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

Workload = Callable[[], object]

LIBRARIES = ("fla", "liger", "gems")
"""Short names of fla-core, liger-kernel and flag_gems: the modules of this folder."""


def workloads(only: Sequence[str] = ()) -> dict[str, Workload]:
    """Workloads by name, of libraries in turns, so that a run that is cut short has met all of them.

    `only` are names, or beginnings of names. Raises `ValueError` for one that fits nothing.
    """
    listed = {name: dict(_library(name)) for name in LIBRARIES}
    result: dict[str, Workload] = {}
    longest = max(len(entries) for entries in listed.values())
    # In proportion: every library's last workload comes about last.
    places = sorted(
        ((i + 0.5) / len(entries), library, name)
        for library, entries in listed.items()
        for i, name in enumerate(entries)
    )
    assert longest
    for _, library, name in places:
        result[f"{library}/{name}"] = listed[library][name]
    if not only:
        return result
    unknown = [text for text in only if not any(name.startswith(text) for name in result)]
    if unknown:
        raise ValueError(f"no workload is called {', '.join(unknown)}; there are: {', '.join(result)}")
    return {name: work for name, work in result.items() if any(name.startswith(text) for text in only)}


def _library(name: str) -> dict[str, Workload]:
    result: dict[str, Workload] = importlib.import_module(f"{__name__}.{name}").WORKLOADS
    return result
