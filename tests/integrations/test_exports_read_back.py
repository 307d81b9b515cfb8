"""Exports read by the package that they are for: Kernel Tuner's own simulation and schema."""

from __future__ import annotations

import json
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forecast_autotune.records import (
    Candidate,
    Config,
    Device,
    Kernel,
    Measurement,
    Outcome,
    Problem,
)
from forecast_autotune.records.table import Table
from forecast_autotune.store.exports import write_export
from forecast_autotune.store.formats import format_of, kernel_tuner, read_file

H200 = Device("NVIDIA H200", "cuda", "90", 132, 232448)


def table(problem: Problem, times: dict[Candidate, float]) -> Table:
    return Table(
        problem, [Measurement(problem.id, c, Outcome.OK, t, compile_s=0.5) for c, t in times.items()]
    )


def matmul() -> Table:
    problem = Problem.of(Kernel("matmul"), (), H200, key=["4096"])
    listed = [Candidate(Config.of({"BLOCK": b}, num_warps=w)) for b in (64, 128) for w in (4, 8)]
    return table(problem, {c: 0.5 + 0.1 * i for i, c in enumerate(listed)})


def test_kernel_tuner_simulates_a_run_from_an_exported_cache(tmp_path: Path) -> None:
    pytest.importorskip("kernel_tuner", reason="needs the package kernel_tuner")
    from kernel_tuner import tune_kernel

    (path,) = write_export("kernel-tuner", tmp_path, [matmul()], []).files
    header = json.loads(path.read_text())
    results, about = tune_kernel(
        "matmul",
        "",
        header["problem_size"],
        [],
        header["tune_params"],
        cache=str(path),
        simulation_mode=True,
        strategy="brute_force",
        lang="CUDA",
        quiet=True,
    )
    assert sorted(r["time"] for r in results) == pytest.approx([0.5, 0.6, 0.7, 0.8])
    assert (about["best_config"]["BLOCK"], about["best_config"]["num_warps"]) == (64, 4)


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


def test_t4_results_keep_the_schema_of_the_package(tmp_path: Path) -> None:
    pytest.importorskip("kernel_tuner", reason="needs the package kernel_tuner")
    import jsonschema

    (path,) = write_export("kernel-tuner-t4", tmp_path, [matmul()], []).files
    schema = files("kernel_tuner") / "schema" / "T4" / "1.0.0" / "results-schema.json"
    jsonschema.validate(json.loads(path.read_text()), json.loads(schema.read_text(encoding="utf-8")))
