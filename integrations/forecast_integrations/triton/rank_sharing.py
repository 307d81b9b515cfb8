"""The job that this process is a rank of, found without the program's help: torchrun's store, or torch.distributed's.

torchrun's agent keeps a store for its workers, which answers from their first line on, whether or not they ever
initialise torch.distributed. Elsewhere the store of the default process group serves, once there is one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from forecast_autotune.processors import bound_processors, processor_share
from forecast_autotune.ranks.job import Job, JobLimits, StoreConnection

if TYPE_CHECKING:
    from torch.distributed import Store as TorchStore

    from forecast_autotune.settings import Settings

_TIMEOUT_S = 10.0
"""Seconds within which the job's store answers a call, or counts as lost. It takes well below a millisecond."""
_ABSENT = "absent"
"""A text that is never written: all of our values are JSON."""
_PREFIX = "forecast_autotune"


class TorchKeyValueStore:
    """A `KeyValueStore` over a store of torch.distributed. Nothing here waits for a key to be written."""

    def __init__(self, store: TorchStore) -> None:
        self._store = store

    def get(self, key: str) -> str | None:
        """Return the key's value; None where it has none."""
        # `Store.get` waits for a missing key. A comparison with an impossible value reads at once, and writes nothing.
        value = self.compare_set(key, _ABSENT, _ABSENT)
        return None if value == _ABSENT else value

    def set(self, key: str, value: str) -> None:
        """Write, whatever the key holds."""
        self._store.set(key, value)

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        """Write `desired` if the key holds `expected`, or nothing where that is ""; returns what it holds then."""
        return bytes(self._store.compare_set(key, expected, desired)).decode("utf-8", "replace")


_jobs: dict[tuple[int, str, float], Job] = {}
"""This process's job by process, store and limits: a fork's inherited ones are its parent's."""


def current_job(settings: Settings) -> Job | None:
    """The job whose ranks this process shares with; None where there is none, or the settings say so."""
    if settings.ranks == "alone":
        return None
    if (place_of_store := _agent_store() or _process_group_store()) is None:
        return None
    place, rank, size, open_store = place_of_store
    key = (os.getpid(), place, settings.ranks_wait_s)
    if key not in _jobs:
        limits = JobLimits(wait_s=settings.ranks_wait_s)
        timeout_s = min(_TIMEOUT_S, max(1.0, limits.wait_s))
        store = StoreConnection(
            lambda: TorchKeyValueStore(open_store()), timeout_s=timeout_s, beat_s=limits.beat_s
        )
        _jobs[key] = Job(store, rank, size, limits)
    return _jobs[key]


def share_of_cores(settings: Settings) -> Settings:
    """Settings with this rank's share of its host's cores as compile workers, unless the user has set a number.

    A process that is bound to some of the cores has its share of them already; a limit of their time is all ranks'.
    """
    ranks, cores = _integer("LOCAL_WORLD_SIZE", 1), bound_processors()
    if settings.workers or ranks < 2:
        return settings
    own = cores if cores < (os.cpu_count() or 1) else cores // ranks
    return settings.with_(workers=max(1, int(min(own, processor_share() / ranks))))


_JobStore = tuple[str, int, int, Callable[[], Any]]
"""A store's name, this process's rank, the number of ranks, and how to open the store."""


def _agent_store() -> _JobStore | None:
    """The store of torchrun's agent, which `torch.distributed.init_process_group` uses as well."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    size, rank, port = _integer("WORLD_SIZE", 1), _integer("RANK", 0), _integer("MASTER_PORT", 0)
    host, attempt = os.environ.get("MASTER_ADDR", ""), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if size < 2 or not host or not port:
        return None

    def open_store() -> TorchStore:
        from torch.distributed import PrefixStore, TCPStore

        # As torch has it: ranks of an earlier attempt are dead, and what they measured is in their own stores.
        store = TCPStore(
            host,
            port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=_TIMEOUT_S),
        )
        return PrefixStore(f"{_PREFIX}/attempt_{attempt}", store)

    return f"{host}:{port} {attempt}", rank, size, open_store


def _process_group_store() -> _JobStore | None:
    """A connection of our own to the store of the default process group, where there is one."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() < 2:
        return None
    store = dist.distributed_c10d._get_default_store()  # torch has no public name for it
    return (
        f"process group {id(store)}",
        dist.get_rank(),
        dist.get_world_size(),
        lambda: dist.PrefixStore(_PREFIX, store.clone() if hasattr(store, "clone") else store),
    )


def _integer(variable: str, default: int) -> int:
    try:
        return int(os.environ.get(variable, ""))
    except ValueError:
        return default
