"""Exports read by the tools that they are for, and what those write then read back: the same rows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from forecast_autotune.records import Candidate, Config, Device, Measurement, Outcome
from forecast_autotune.records.table import Table
from forecast_autotune.store.exports import write_export
from forecast_autotune.store.formats import read_file

FILES = Path(__file__).parents[1] / "core" / "store" / "tuner_files"


@pytest.fixture
def table() -> Table:
    """Five configs, of which one has an option more, and one that fails."""
    path = next((FILES / "triton_one_option_more").rglob("*.json"))
    (table,) = read_file(path, Device("NVIDIA H200"))
    failed = Measurement(table.problem.id, Candidate(Config.of({"BLOCK": 4096})), Outcome.OUT_OF_RESOURCES)
    return Table(table.problem, [*table.measurements, failed])


def test_kernel_tuner_plays_an_export_and_its_own_output_comes_back(table: Table, tmp_path: Path) -> None:
    pytest.importorskip("kernel_tuner", reason="needs the package kernel_tuner")
    from kernel_tuner import tune_cache, tune_kernel

    (path,) = write_export("kernel-tuner", tmp_path, [table], []).files
    results, about = tune_cache(cache_path=str(path), quiet=True)
    ran = {
        tuple(r[n] for n in ("BLOCK", "num_warps", "maxnreg")): r["time"]
        for r in results
        if "__error__" not in r
    }
    expected = {
        (
            dict(m.candidate.config.kwargs)["BLOCK"],
            m.candidate.config.num_warps,
            m.candidate.config.maxnreg,
        ): m.ms
        for m in table.measurements
        if m.ok
    }
    assert ran == expected
    assert (about["best_config"]["BLOCK"], about["best_config"]["num_warps"]) == (256, 4)
    # A run of its own opens the file for more, and closes it by its own hand: the same rows come back.
    data = json.loads(path.read_text())
    for number, row in enumerate(list(data["cache"].values())):
        row["timestamp"] = f"2026-11-29 12:00:{number:02d}"
    path.write_text(json.dumps(data, indent=0)[:-3] + ",")
    (back,) = read_file(path)
    assert back.problem.id == table.problem.id
    assert {(m.candidate, m.outcome, m.median_ms) for m in back.measurements} == {
        (m.candidate, m.outcome, m.median_ms) for m in table.measurements
    }
    again = {
        "cache": shutil.copy(path, tmp_path / "copy.json"),
        "simulation_mode": True,
        "lang": "CUDA",
        "quiet": True,
    }
    # The space of a partial list is not all combinations: `tune_cache` is for it.
    with pytest.raises(ValueError, match="not in cache"):
        tune_kernel(data["kernel_name"], "", data["problem_size"], [], data["tune_params"], **again)


def test_the_autotuning_methodology_reads_milliseconds(table: Table, tmp_path: Path) -> None:
    pytest.importorskip("autotuning_methodology", reason="needs the package autotuning_methodology")
    from autotuning_methodology.searchspace_statistics import SearchspaceStatistics

    rows = [
        Measurement(m.problem, m.candidate, m.outcome, m.median_ms, compile_s=0.5) for m in table.measurements
    ]
    (path,) = write_export("kernel-tuner-t4", tmp_path, [Table(table.problem, rows)], []).files
    keys = ["compilation", "benchmark", "framework", "search_algorithm", "validation"]
    read = SearchspaceStatistics("scale", "H200", True, keys, ["time"], path)
    assert list(read.objective_times["compilation"]) == pytest.approx([0.5] * 6)  # seconds
    times = [t for t in read.objective_performances["time"] if t == t]
    assert times == pytest.approx([m.ms for m in table.measurements if m.ok])
