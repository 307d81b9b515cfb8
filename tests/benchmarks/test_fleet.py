"""Short runs of the scripts on bundles, merges and remote stores."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks.fleet import fuzzed_bundles, merged_stores


def test_no_damaged_bundle_is_accepted() -> None:
    found = fuzzed_bundles.run(60, seed=10**6)
    assert found["refused"] > 30
    assert (found["accepted_wrongly"], found["crashes"]) == (0, 0), found["wrong"]


def test_merges_of_many_processes_are_the_union(tmp_path: Path) -> None:
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    found = merged_stores.run(processes=4, merges=16, seed=5)
    assert found["merges"] == 16
    assert found["rows"] > 0
    assert {name: found[name] for name in merged_stores.BAD} == dict.fromkeys(merged_stores.BAD, 0)
