"""Real processes that share a decision on the null device: under torchrun, and with one of them killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from forecast_autotune.ranks.job import JobLimits
from forecast_integrations.triton import rank_sharing
from tests.integrations.null import child, tables
from tests.integrations.triton import rank_worker

RANKS = 4
STARTED_BY_TORCHRUN = 2
"""Each attempt starts them anew, which takes seconds of a processor; more of them share in the tests that fork."""
HOST = "127.0.0.1"


@pytest.fixture
def agent(clean_environment: None, monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    """What torchrun sets up for its workers, all but the workers."""
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    given = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    return store


def start(rank: int, folder: Path, on_launch: Any = lambda launches: None) -> int:
    """A forked rank with a store of its own, as on a host of its own."""

    def work() -> None:
        os.environ["RANK"] = str(rank)
        rank_worker.decide(folder, folder / f"store-{rank}", on_launch)

    return child(work)


def decisions(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("decision-*.json"))]


@pytest.mark.slow
def test_ranks_take_over_from_one_that_was_killed_and_choose_alike(
    agent: TCPStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = partial(JobLimits, lease_s=4.0, beat_s=0.2)  # still many beats long, on a busy machine too
    monkeypatch.setattr(rank_sharing, "JobLimits", short)
    killed = start(0, tmp_path, rank_worker.die)
    assert os.waitpid(killed, 0)[1] == 9, "in the midst of deciding"
    others = [start(rank, tmp_path) for rank in range(1, RANKS)]
    assert [os.waitpid(pid, 0)[1] for pid in others] == [0] * len(others)
    found = decisions(tmp_path)
    assert [d["rank"] for d in found] == [1, 2, 3]
    assert {d["chosen"] for d in found} == {"BLOCK=128 warps=4 stages=3"}
    assert [d["warnings"] for d in found] == [[], [], []]
    assert sum(d["evidence"] == "measured" for d in found) == 1, "one decides, the others take its decision"
    for rank in range(1, RANKS):
        (table,) = tables(tmp_path / f"store-{rank}")
        rows = [m for m in table.measurements if not m.protocol.endswith("-turns")]
        assert len(rows) == len({m.candidate for m in rows}) == len(rank_worker.offered()), (
            "each has all rows, once"
        )


@pytest.mark.slow
def test_a_rank_whose_store_is_gone_tunes_by_itself(
    agent: TCPStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_PORT", str(gone.port))
    monkeypatch.setenv("FORECAST_AUTOTUNE_RANKS_WAIT", "1")
    del gone
    assert os.waitpid(start(0, tmp_path), 0)[1] == 0
    (found,) = decisions(tmp_path)
    assert found["measured"] == len(rank_worker.offered())
    assert len(found["warnings"]) == 1
    assert "rank 0 tunes by itself from here on" in found["warnings"][0]


def test_a_process_that_ends_while_it_gives_a_sign_of_life_ends_well(agent: TCPStore) -> None:
    # Without a pause between signs of life, the end of the interpreter always meets one under way.
    program = """
import sys
from torch.distributed import TCPStore
from forecast_autotune.ranks.job import StoreConnection
from forecast_integrations.triton.rank_sharing import TorchKeyValueStore

def opened():
    return TorchKeyValueStore(TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, wait_for_workers=False))

StoreConnection(opened, timeout_s=10.0, beat_s=0.0).beating("beat").__enter__()
"""
    ended = subprocess.run([sys.executable, "-c", program, str(agent.port)], capture_output=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_a_job_under_torchrun_shares_agrees_and_survives_a_kill(
    clean_environment: None, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(STARTED_BY_TORCHRUN)]
    options = ["--max-restarts", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{HOST}:0"]
    done = subprocess.run(
        [*command, *options, rank_worker.__file__, str(tmp_path), "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-4000:]
    found = decisions(tmp_path)
    assert [d["rank"] for d in found] == list(range(STARTED_BY_TORCHRUN))
    assert len({d["chosen"] for d in found}) == 1
    assert [d["warnings"] for d in found] == [[]] * STARTED_BY_TORCHRUN
    (table,) = tables(tmp_path / "store")
    rows = Counter(m.candidate for m in table.measurements if not m.protocol.endswith("-turns"))
    assert len(rows) == len(rank_worker.offered())
    assert set(rows.values()) == {1}, "no rank of any attempt measured again what is known"
