"""Exports read by the tools that they are for, and what those write then read back: the same rows."""

from __future__ import annotations

import json
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forecast_autotune.records import Candidate, Config, Device, Measurement, Outcome
from forecast_autotune.records.table import Table
from forecast_autotune.store.exports import write_export
from forecast_autotune.store.formats import format_of, kernel_tuner, read_file

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


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
def test_a_cache_that_kernel_tuner_wrote_comes_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel in C, which Kernel Tuner compiles and runs on this machine."""
    pytest.importorskip("kernel_tuner", reason="needs the package kernel_tuner")
    from kernel_tuner import tune_kernel

    source = """
    float twice(float *out, float *x) {
        for (int i = 0; i < 1024; i += LANES)
            for (int lane = 0; lane < LANES; lane++) out[i + lane] = 2 * x[i + lane];
        return 1.0 + LANES;
    }
    """
    x = np.ones(1024, np.float32)
    path = tmp_path / "cache.json"
    given: dict[str, Any] = {"LANES": [1, 2, 3, 4]}
    monkeypatch.chdir(tmp_path)  # it compiles in the working directory
    options = {"cache": str(path), "lang": "C", "restrictions": ["LANES != 3"], "quiet": True}
    tune_kernel("twice", source, 1024, [np.zeros_like(x), x], given, **options)
    assert format_of(path) is kernel_tuner.FORMAT
    (imported,) = read_file(path, Device("this machine", "cpu"))
    found = {dict(m.candidate.config.kwargs)["LANES"]: m for m in imported.measurements}
    assert {lanes: m.ms for lanes, m in found.items()} == {1: 2.0, 2: 3.0, 4: 5.0}, (
        "what the function returned"
    )
    assert imported.problem.kernel.name == "twice"


def test_t4_results_keep_the_schema_of_the_package(table: Table, tmp_path: Path) -> None:
    pytest.importorskip("kernel_tuner", reason="needs the package kernel_tuner")
    import jsonschema

    (path,) = write_export("kernel-tuner-t4", tmp_path, [table], []).files
    schema = files("kernel_tuner") / "schema" / "T4" / "1.0.0" / "results-schema.json"
    jsonschema.validate(json.loads(path.read_text()), json.loads(schema.read_text(encoding="utf-8")))
