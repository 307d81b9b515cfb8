"""triton-dejavu's caches as tables: what counts and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forecast_autotune.errors import RecordError
from forecast_autotune.records import Candidate, Config, Device, Kernel, Measurement, Outcome, Problem
from forecast_autotune.records.table import Table
from forecast_autotune.store.exchange.exports import write_export
from forecast_autotune.store.exchange.triton_dejavu import import_triton_dejavu, is_triton_dejavu_cache
from tests.core.captured_output import command

H200 = Device("NVIDIA H200", "cuda", "90")
KEY = "('4096', 'torch.float16')"
BEST = "BLOCK: 64, FAST: True, MODE: tiled, num_warps: 8, num_ctas: 1, num_stages: 2, maxnreg: None"


def cache(folder: Path, **changes: Any) -> Path:
    data = {
        "signature": "JITFunction(mine.kernels:softmax)",
        "total_bench_time_s": 3.5,
        "evaluated_configs": 24,
        "keys": ["n"],
        "cache": {KEY: BEST},
        "timings": {KEY: [0.5, 0.4, 0.6]},
        "timings_data": {"labels": ["ms", "min_ms", "max_ms"]},
        **changes,
    }
    path = folder / "gpu_NVIDIA_H200" / "softmax" / "cache.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(data))
    return path


def test_each_key_is_a_problem_with_its_best_config(tmp_path: Path) -> None:
    path = cache(tmp_path)
    assert is_triton_dejavu_cache(path)
    (table,) = import_triton_dejavu(path)
    problem, (row,) = table.problem, table.measurements
    assert (problem.kernel.name, problem.device.name) == ("softmax", "NVIDIA H200")
    assert problem.key == ("4096", "torch.float16")
    assert row.candidate.config == Config.of(
        {"BLOCK": 64, "FAST": True, "MODE": "tiled"}, num_warps=8, num_stages=2
    )
    assert (row.ms, row.p20_ms, row.p80_ms) == (0.5, 0.4, 0.6)


def test_what_we_export_comes_in_again(tmp_path: Path) -> None:
    problem = Problem.of(Kernel("mm", extra={"module": "lib"}), (), H200, key=["1024", "torch.float16"])
    best, other = (Candidate(Config.of({"BLOCK": b}, num_warps=4, maxnreg=64)) for b in (64, 128))
    rows = [Measurement(problem.id, c, Outcome.OK, ms) for c, ms in ((best, 0.5), (other, 0.9))]
    (path,) = write_export("triton-dejavu", tmp_path, [Table(problem, rows)], []).files
    (table,) = import_triton_dejavu(path)
    assert [(m.candidate, m.ms) for m in table.measurements] == [(best, 0.5)]
    assert table.problem.key == problem.key


def test_a_device_is_the_folders_or_said(tmp_path: Path) -> None:
    path = cache(tmp_path).rename(tmp_path / "cache.json")
    with pytest.raises(RecordError, match="--device-name"):
        import_triton_dejavu(path)
    (table,) = import_triton_dejavu(path, H200)
    assert table.problem.device == H200


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"signature": "softmax"}, "names no kernel"),
        ({"signature": None}, "no cache of triton-dejavu"),
        ({"cache": []}, "objects by key"),
        ({"timings": {}}, "it has no time"),
        ({"timings": {KEY: ["fast"]}}, "times must be"),
        ({"timings": {KEY: [-1.0]}}, "finite positive times"),
        ({"cache": {KEY: "BLOCK=64"}}, "no parameter with a value"),
        ({"cache": {KEY: "BLOCK: 64, num_warps: many"}}, "num_warps"),
        ({"cache": {"open('x')": BEST}, "timings": {"open('x')": [1.0]}}, "malformed"),
        ({"cache": {"4096": BEST}, "timings": {"4096": [1.0]}}, "no tuple"),
    ],
)
def test_what_breaks_a_rule_is_refused_and_named(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = cache(tmp_path, **changes)
    with pytest.raises(RecordError, match=message) as refused:
        import_triton_dejavu(path)
    assert str(path) in str(refused.value)


def test_a_bad_key_costs_no_other(tmp_path: Path) -> None:
    keys = {KEY: BEST, "('1', 'x')": "BLOCK"}
    path = cache(tmp_path, cache=keys, timings=dict.fromkeys(keys, (0.5,)))
    refused: list[RecordError] = []
    tables = import_triton_dejavu(path, refuse=refused.append)
    assert [t.problem.key for t in tables] == [("4096", "torch.float16")]
    assert len(refused) == 1


def test_the_command_takes_it(tmp_path: Path) -> None:
    path = cache(tmp_path)
    done = command("import", str(path), "--store", str(tmp_path / "store"))
    assert done.returncode == 0, done.stderr
    assert "added 1 measurement of 1 problem" in done.stdout


def test_other_files_are_not_taken_for_it(tmp_path: Path) -> None:
    other = tmp_path / "cache.json"
    other.write_text('{"evaluated_configs": 3}')
    assert not is_triton_dejavu_cache(other)
    assert not is_triton_dejavu_cache(tmp_path)
