"""The job that a process is a rank of: which store serves, and what it must not do."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from forecast_autotune import autotune
from forecast_autotune.settings import Settings
from forecast_integrations.triton import engine, rank_sharing
from forecast_integrations.triton.rank_sharing import TorchKeyValueStore, current_job, share_of_cores
from tests.integrations.null import configs, double, fresh, launch

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
ELASTIC = ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT")
NEVER = timedelta(days=1)
"""So long a store waits for a missing key."""


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, *ELASTIC):
        monkeypatch.delenv(name, raising=False)


def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=NEVER)


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.TCPStore]:
    made = server()
    given = ("1", "4", "2", "127.0.0.1", str(made.port))
    for name, value in zip(VARIABLES, given, strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    yield made
    del made


def test_under_torchrun_the_agents_store_serves_without_a_process_group(
    agent: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = current_job(Settings())
    assert job is not None
    assert (job.rank, job.size) == (1, 4)
    assert current_job(Settings()) is job
    job.store.set("key", "value")
    assert job.store.get("missing") is None
    found = TorchKeyValueStore(dist.PrefixStore("forecast_autotune/attempt_0", agent))
    assert found.get("key") == "value"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    second = current_job(Settings())
    assert second is not None
    assert second.store.get("key") is None, "attempts of a job are kept apart"


@pytest.mark.parametrize(
    "variables",
    [
        {"WORLD_SIZE": "1"},
        {"TORCHELASTIC_USE_AGENT_STORE": "False"},
        {"MASTER_PORT": ""},
        {"WORLD_SIZE": "many"},
    ],
    ids=str,
)
def test_without_other_ranks_or_a_store_there_is_no_job(
    agent: dist.TCPStore, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert current_job(Settings()) is None


def test_elsewhere_the_process_groups_store_serves_once_there_is_one() -> None:
    from torch.testing._internal.distributed import fake_pg  # registers the backend

    assert current_job(Settings()) is None
    store = dist.HashStore()
    dist.init_process_group("fake", store=store, rank=1, world_size=2)
    try:
        job = current_job(Settings())
        assert job is not None
        assert (job.rank, job.size) == (1, 2)
        job.store.set("key", "value")
        assert job.store.get("key") == "value"
        assert not store.check(["key"]), "below a prefix of our own"
    finally:
        dist.destroy_process_group()
    assert fake_pg is not None
    assert current_job(Settings()) is None


def test_ranks_of_a_host_share_its_cores_unless_told_or_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = 12
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert share_of_cores(Settings()).worker_count() == cores
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert share_of_cores(Settings()).worker_count() == 6
    assert share_of_cores(Settings(workers=5)).worker_count() == 5
    monkeypatch.setattr(rank_sharing, "processor_share", lambda: 7.5)
    assert share_of_cores(Settings()).worker_count() == 3, "the limit is one of all ranks together"
    monkeypatch.setattr(rank_sharing, "processor_share", lambda: math.inf)
    monkeypatch.setattr(os, "cpu_count", lambda: 2 * cores)
    assert share_of_cores(Settings()).worker_count() == cores, "this process is bound to its part"


def test_a_users_own_benchmark_function_is_called_on_every_rank(
    device: Any, agent: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may need all of them at once."""
    asked: list[Any] = []
    monkeypatch.setattr(engine, "current_job", asked.append)

    def bench(call: Any, quantiles: Any = None) -> list[float]:
        call()
        return [1.0, 1.0, 1.0]

    few = configs((2, 4), (3,))
    launch(autotune(configs=few, key=["n"], do_bench=bench, store=False)(fresh(double)))
    assert not asked
    launch(autotune(configs=few, key=["n"], store=False)(fresh(double)))
    assert len(asked) == 1
