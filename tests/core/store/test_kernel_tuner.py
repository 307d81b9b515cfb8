"""Import of Kernel Tuner's cache files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from forecast_autotune.errors import RecordError
from forecast_autotune.records import Config, Device
from forecast_autotune.records.table import write_tables
from forecast_autotune.store.formats import format_of, kernel_tuner, read_file
from forecast_autotune.testing import example_table


def row(block: int, time: object, **more: object) -> dict[str, Any]:
    return {"block_size_x": block, "method": "tiled", "time": time, **more}


def cache(**changes: object) -> dict[str, Any]:
    return {
        "device_name": "NVIDIA RTX A4000",
        "kernel_name": "convolution",
        "problem_size": [4096, 2048],
        "tune_params_keys": ["block_size_x", "method"],
        "tune_params": {"block_size_x": [16, 32, 64, 128], "method": ["tiled"]},
        "objective": "time",
        "cache": {
            "16,tiled": row(16, 2.0, times=[3.0, 1.0, 1.5], compile_time=918.5, timestamp="2023-12-22 09:54"),
            "32,tiled": row(32, 0.5),
            "48,tiled": row(48, "InvalidConfig"),
            "64,tiled": row(64, "CompilationFailedConfig"),
            "128,tiled": row(128, "RuntimeFailedConfig"),
            "256,tiled": row(256, 1e20),
        },
        **changes,
    }


def written(path: Path, data: object) -> Path:
    path.write_text(json.dumps(data, indent=1), encoding="utf-8")
    return path


def test_a_cache_becomes_one_problem_with_its_outcomes(tmp_path: Path) -> None:
    packed = tmp_path / "A4000.json.gz"
    packed.write_bytes(gzip.compress(json.dumps(cache()).encode()))
    (table,) = read_file(packed)
    problem = table.problem
    assert (problem.kernel.name, problem.kernel.language) == ("convolution", "cuda")
    assert (problem.device.name, problem.device.backend) == ("NVIDIA RTX A4000", "cuda")
    assert problem.key == ("4096", "2048")
    assert [a.value for a in problem.arguments] == [4096, 2048]
    assert [str(m.outcome) for m in table.measurements] == [
        "ok",
        "ok",
        "compile_error",
        "runtime_error",
        "runtime_error",
    ]
    first, second = table.measurements[:2]
    assert first.candidate.config == Config.of({"method": "tiled", "block_size_x": 16})
    assert (first.median_ms, first.repeats, first.compile_s) == (1.5, 3, 0.9185)
    assert (second.median_ms, second.repeats, second.compile_s) == (0.5, 0, None)
    assert first.at == "2023-12-22 09:54"
    assert table.measurements[2].extra["message"] == "CompilationFailedConfig"


def test_device_size_kernel_and_parameters_make_different_problems(tmp_path: Path) -> None:
    def identity(**changes: object) -> str:
        return read_file(written(tmp_path / "c.json", cache(**changes)))[0].problem.id

    other_space = {"tune_params_keys": ["block_size_x"]}
    ids = [
        identity(),
        identity(device_name="AMD Radeon PRO W6600"),
        identity(problem_size=[4096, 4096]),
        identity(problem_size=4096),
        identity(kernel_name="gemm"),
        identity(**other_space),
    ]
    assert len(set(ids)) == len(ids)
    assert identity(objective="energy") == ids[0]


def test_a_device_that_the_file_does_not_name_must_be_given(tmp_path: Path) -> None:
    path = written(tmp_path / "MI250X.json", cache(device_name=""))
    with pytest.raises(RecordError, match="--device-name"):
        read_file(path)
    given = Device("AMD Instinct MI250X", "hip")
    (table,) = read_file(path, given)
    assert (table.problem.device, table.problem.kernel.language) == (given, "hip")


@pytest.mark.parametrize(("ending", "refused"), [("}\n}", 0), ("", 0), (",\n", 0), (',\n  "1,ti', 1)])
def test_a_cache_left_open_by_a_killed_run_is_read(tmp_path: Path, ending: str, refused: int) -> None:
    data = cache()
    rows = data.pop("cache")
    lines = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in rows.items())
    text = json.dumps(data, indent=1)[:-2] + ',\n"cache": {\n' + lines + ending
    (tmp_path / "open.json").write_text(text, encoding="utf-8")
    told: list[RecordError] = []
    assert len(read_file(tmp_path / "open.json", None, told.append)[0].measurements) == 5
    assert ["open.json" in str(error) for error in told] == [True] * refused


BROKEN = [
    ({"tune_params_keys": "block"}, "tune_params_keys"),
    ({"cache": []}, "cache, an object"),
    ({"kernel_name": ""}, "names no kernel"),
    ({"cache": {"8,tiled": {"block_size_x": 8, "time": 1.0}}}, "config 8,tiled: it has no value for method"),
    ({"cache": {"8,tiled": row(8, "Exploded")}}, "Exploded"),
    ({"cache": {"8,tiled": row(8, None)}}, "config 8,tiled"),
    ({"cache": {"8,tiled": row(8, -1.0)}}, "positive"),
    ({"cache": {"8,tiled": row(8, 1.0, times=["x"])}}, "times must be a number"),
    ({"cache": {"8,tiled": {**row(8, 1.0), "method": [1]}}}, "method must be a number or a word"),
    ({"cache": {"8,tiled": 3}}, "config 8,tiled"),
]


@pytest.mark.parametrize(("changes", "match"), BROKEN)
def test_malformed_input_is_named(tmp_path: Path, changes: dict[str, Any], match: str) -> None:
    path = written(tmp_path / "bad.json", cache(**changes))
    with pytest.raises(RecordError, match=match) as caught:
        read_file(path)
    assert "bad.json" in str(caught.value)


def test_other_files_are_not_taken_for_a_cache(tmp_path: Path) -> None:
    write_tables(tmp_path / "table.jsonl.gz", [example_table()])
    assert format_of(tmp_path / "table.jsonl.gz") is not kernel_tuner.FORMAT
    assert format_of(tmp_path / "missing.json") is not kernel_tuner.FORMAT
    for content in (b"", b"\x1f\x8bno gzip"):
        (tmp_path / "odd.json").write_bytes(content)
        assert format_of(tmp_path / "odd.json") is not kernel_tuner.FORMAT
    (tmp_path / "cut.json").write_text('{"tune_params_keys": [', encoding="utf-8")
    assert format_of(tmp_path / "cut.json") is kernel_tuner.FORMAT
    with pytest.raises(RecordError, match=r"cut\.json: no Kernel Tuner cache"):
        read_file(tmp_path / "cut.json")


def test_t4_results_are_refused_with_the_remedy(tmp_path: Path) -> None:
    path = written(tmp_path / "t4.json", {"metadata": {}, "results": [], "schema_version": "1.0.0"})
    assert format_of(path) is kernel_tuner.FORMAT
    with pytest.raises(RecordError, match="import the cache file"):
        read_file(path)
