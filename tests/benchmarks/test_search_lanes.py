"""Measuring lanes: what is counted, that nothing is compiled twice alike, and a dry run of lanes on GPUs."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from benchmarks.lib import judge_lanes
from benchmarks.lib.judge_lanes import LedgerJudge, time_jobs
from benchmarks.search import lane_scaling
from forecast_autotune.errors import SettingsError
from forecast_harness.packs import load_pack
from forecast_harness.search.history.events import NodeJob
from forecast_harness.search.interfaces import LaneFailure
from forecast_harness.search.lanes.local_lanes import LocalJudgePool
from forecast_harness.search.targets import open_target
from tests.harness.search.lane_judges import ScriptedJudge, job


def tables(n: int, folder: Path) -> LocalJudgePool:
    own = folder / "tables"  # they keep a ledger, too
    own.mkdir()
    return LocalJudgePool(lambda number: LedgerJudge(ScriptedJudge(number, own), f"cpu:{number}", folder), n)


def sleepers(name: str, n: int, seconds: float) -> list[NodeJob]:
    return [job(f"{name}-{number}", f"sleep {seconds}") for number in range(n)]


def test_warm_jobs_are_done_by_every_lane_and_counted_by_none() -> None:
    row = time_jobs(partial(tables, 2), sleepers("a", 6, 0.05), sleepers("warm", 2, 4.0))
    assert row["jobs"] == row["judged_once"] == 6
    assert row["outcomes"] == {"ok": 6}
    assert row["seconds"] < 4.0
    assert set(row["judged_by"]) == {f"job-a-{n}" for n in range(6)}
    assert sum(row["jobs_of_each_lane"].values()) == 6
    assert set(row["jobs_of_each_lane"]) == {"cpu:0", "cpu:1"}
    assert row["devices"] == 2
    # A lane that has no job left does not count, so this is never less.
    assert row["jobs_per_minute_of_lanes_at_work"] > 0.9 * row["jobs_per_minute"]


def test_a_lane_that_does_not_open_ends_the_run() -> None:
    def broken(number: int) -> ScriptedJudge:
        raise LaneFailure("no device answers")

    began = time.monotonic()
    with pytest.raises(RuntimeError, match="no device answers"):
        time_jobs(lambda folder: LocalJudgePool(broken, 2), sleepers("a", 2, 0.0))
    assert time.monotonic() - began < judge_lanes.OPEN_S / 4


def test_a_lost_job_is_told_and_several_end_the_run() -> None:
    row = time_jobs(partial(tables, 2), [job("a", "lose 1"), *sleepers("b", 7, 0.05)])
    assert row["lost"] == ["the device fell off the bus"]
    assert row["jobs"] == 8
    assert row["judged_once"] == 7
    assert row["jobs_per_minute"] * row["seconds"] == pytest.approx(60 * 7)
    with pytest.raises(LaneFailure, match="fell off the bus"):
        time_jobs(partial(tables, 1), [job("a", "lose 1"), *sleepers("b", 2, 0.0)])


def test_copies_share_no_text_with_any_other_run() -> None:
    target, (seed, *_) = open_target(lane_scaling.PACK, device="cpu")
    triton = load_pack(lane_scaling.PACK).solution("triton_rows").source
    numbers = itertools.count()
    for source in (seed.source, triton):
        of = replace(seed, source=source)
        both = [*lane_scaling.copies(target, of, numbers, 3), *lane_scaling.copies(target, of, numbers, 2)]
        assert len({j.id for j in both}) == len({j.node.id for j in both}) == 5
        # What Triton's cache knows a kernel by is the text of its function.
        functions = {j.node.source.partition("NUMBER")[0] for j in both}
        assert len(functions) == (5 if "BLOCK" in source else 1)
        for one in both:
            compile(one.node.source, one.id, "exec")


def test_numbers_of_lanes_hold_one() -> None:
    assert lane_scaling.widths("4,1,2") == [1, 2, 4]
    for wrong in ("2,4", "0,1"):
        with pytest.raises(argparse.ArgumentTypeError):
            lane_scaling.widths(wrong)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox needs Linux")
def test_a_dry_run_measures_lanes_as_it_would_on_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent() -> None:
        raise SettingsError("no Ray")

    monkeypatch.setattr(lane_scaling, "load_ray", absent)
    out = tmp_path / "lanes.json"
    options = ["--gpus", "1,2", "--jobs", "4", "--rounds", "1", "--sleep", "0.02", "--null", "--out"]
    monkeypatch.setattr(sys, "argv", ["lane_scaling.py", *options, str(out)])
    lane_scaling.main()  # whether two lanes are faster on this machine is not what is tested
    found = json.loads(out.read_text())
    assert found["null"]
    assert [(row["kind"], row["lanes"], row["jobs"]) for row in found["raw"]["throughput"]] == [
        ("local", 1, 2),
        ("local", 2, 4),
    ]
    assert all(row["judged_once"] == row["jobs"] for row in found["raw"]["throughput"])
    assert set(found["raw"]["throughput"][1]["jobs_of_each_lane"]) == {"cpu:0", "cpu:1"}
    assert set(found["summary"]["met"]) == set(found["summary"]["speedups"]) == {"local 2"}
    assert found["summary"]["failed"] == []
    assert not found["summary"]["ray"]
