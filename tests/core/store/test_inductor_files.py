"""Files as torch writes them, read into tables; and damaged ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forecast_autotune.errors import RecordError
from forecast_autotune.records import Candidate, Config, Outcome
from forecast_autotune.store.formats import format_of, inductor, read_file

SYSTEM = {
    "device": {"name": "NVIDIA H200"},
    "version": {"triton": "3.6.0-abc", "cuda": "12.8"},
    "hash": "d1f0",
}
INPUTS = (
    "[('cuda', 'torch.float16', 4096, 1024, 1024, 1, 0), ('cuda', 'torch.float16', 1024, 2048, 2048, 1, 8)]"
)
TIMINGS = {
    "bias_addmm-alpha=1-beta=-0.5-cql3aa2a": 0.05,
    "triton_mm-c2vabc": 0.04,
    "triton_mm-cfailed": float("inf"),
    "CppMicroGemmFP32Vec-cql3aa2a": 24.8,
}


def written(folder: Path, cache: Any, system: Any = SYSTEM, name: str = "d1f0") -> Path:
    path = folder / name
    path.write_text(json.dumps({"system": system, "cache": cache}, indent=4))
    return path


def one(timings: Any = TIMINGS, inputs: str = INPUTS, op: str = "addmm", precision: str = "highest") -> Any:
    return {op: {inputs: {precision: timings}}}


def test_each_op_with_its_operands_and_precision_is_a_problem(tmp_path: Path) -> None:
    both = {**one(), **one({"mm-cabc": 1.0}, op="mm")}
    both["mm"][INPUTS]["high"] = {"mm-cabc": 2.0}
    tables = read_file(written(tmp_path, both))
    assert [(t.problem.kernel.name, t.problem.key) for t in tables] == [
        ("addmm", ("precision=highest",)),
        ("mm", ("precision=highest",)),
        ("mm", ("precision=high",)),
    ]
    problem = tables[0].problem
    assert (problem.device.name, problem.device.backend) == ("NVIDIA H200", "cuda")
    assert [(a.dtype, a.shape, a.stride, a.aligned) for a in problem.arguments] == [
        ("float16", (4096, 1024), (1024, 1), True),
        ("float16", (1024, 2048), (2048, 1), False),
    ]


def test_choices_become_candidates_and_infinity_a_failure(tmp_path: Path) -> None:
    (table,) = read_file(written(tmp_path, one()))
    rows = {m.candidate: m for m in table.measurements}
    extern = Candidate(Config.of({"alpha": 1, "beta": -0.5}, num_warps=1, num_stages=1), "aten::bias_addmm")
    assert rows[extern].ms == 0.05
    named = {c.variant: dict(c.config.kwargs) for c in rows}
    assert named["cpp::CppMicroGemmFP32Vec"] == {"source": "cql3aa2a"}
    failed = [m for m in table.measurements if not m.ok]
    assert [(m.candidate.variant, m.outcome) for m in failed] == [("triton::mm", Outcome.RUNTIME_ERROR)]


def test_overridden_sizes_and_other_compilers_are_other_problems(tmp_path: Path) -> None:
    ids = {
        read_file(path)[0].problem.id
        for path in (
            written(tmp_path, one(), name="a"),
            written(tmp_path, one(inputs=f"{INPUTS}_128"), name="b"),
            written(tmp_path, one(), {**SYSTEM, "hash": "other"}, name="c"),
        )
    }
    assert len(ids) == 3


def test_what_torch_itself_writes_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codecache = pytest.importorskip("torch._inductor.codecache")
    path = tmp_path / "cache"
    monkeypatch.setattr(codecache.CacheBase, "get_local_cache_path", staticmethod(lambda: path))
    codecache.PersistentCache().update_local_cache(one({"_mkl_linear-B=None-batch_size=64-cabc": 5.25}))
    assert format_of(path) is inductor.CACHE
    (table,) = read_file(path, "some device")
    (row,) = table.measurements
    assert row.candidate.variant == "aten::_mkl_linear"
    assert dict(row.candidate.config.kwargs) == {"batch_size": 64}
    assert row.ms == 5.25


@pytest.mark.parametrize(
    ("cache", "said"),
    [
        ([], "cache must be an object"),
        ({"mm": []}, "expected an object"),
        ({"mm": {INPUTS: [1]}}, "expected an object"),
        (one([1]), "expected an object"),
        (one({"mm": 1.0}), "name-hash"),
        (one(inputs="[__import__('os').getcwd()]"), "ValueError"),
        (one(inputs="[('cuda', 'torch.float16', 4096, 1024)]"), "an operand is"),
        (one(inputs="[('cuda', 'torch.float16', 4, 'x', 1, 1, 0)]"), "an operand is"),
        (one(inputs="["), "SourceTextError"),
        (one(inputs="[]"), "list of tuples"),
    ],
)
def test_a_damaged_cache_says_where(tmp_path: Path, cache: Any, said: str) -> None:
    path = written(tmp_path, cache)
    with pytest.raises(RecordError, match=said) as raised:
        read_file(path)
    assert str(path) in str(raised.value)


def test_a_cache_of_a_cpu_needs_the_name_of_its_device(tmp_path: Path) -> None:
    inputs = "[('cpu', 'torch.float32', 64, 512, 512, 1, 0)]"
    path = written(tmp_path, one(inputs=inputs), {"hash": "44136fa3"})
    with pytest.raises(RecordError, match="--device-name"):
        read_file(path)
    (table,) = read_file(path, "some processor")
    assert (table.problem.device.name, table.problem.device.backend) == ("some processor", "cpu")


HEADER = "model_name,kernel_path,kernel_name,triton_config,latency_ms\n"
CONFIG = '"XBLOCK: 1024, num_warps: 4, num_ctas: 1, num_stages: 1, maxnreg: None"'
ROW = f"bert,/tmp/a/cabc.py,triton_poi_fused_add_0,{CONFIG},0.012000\n"


def metrics(folder: Path, *rows: str) -> Path:
    path = folder / "metric_table_kernel_autotune.csv"
    path.write_text(HEADER + "".join(rows))
    return path


def test_metrics_are_filed_by_the_source_of_the_kernel(tmp_path: Path) -> None:
    slower = ROW.replace("0.012000", "0.034").replace("1024", "256")
    failed = ROW.replace("0.012000", "inf").replace("1024", "512")
    other = ROW.replace("cabc", "cxyz")
    path = metrics(tmp_path, ROW, slower, other, failed)
    assert format_of(path) is inductor.METRICS
    first, second = read_file(path, "NVIDIA H200")
    assert [m.candidate.config.parameters() for m in first.measurements][:2] == [
        {"XBLOCK": 1024, "num_warps": 4, "num_stages": 1, "num_ctas": 1},
        {"XBLOCK": 256, "num_warps": 4, "num_stages": 1, "num_ctas": 1},
    ]
    assert [m.outcome for m in first.measurements] == [Outcome.OK, Outcome.OK, Outcome.RUNTIME_ERROR]
    assert first.problem.kernel.name == "triton_poi_fused_add_0"
    assert first.problem.extra["model"] == "bert"
    assert len(second.measurements) == 1


def test_what_torchs_metrics_write_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inductor = pytest.importorskip("torch._inductor.metrics")
    triton = pytest.importorskip("triton")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(inductor, "enabled_metric_tables", lambda: {"kernel_autotune"})
    config = triton.Config({"XBLOCK": 8, "R0_BLOCK": 256}, num_warps=2, num_stages=1)
    inductor.log_kernel_autotune_result("/x/cabc.py", "triton_red_0", config, 0.25)
    (table,) = read_file(tmp_path / "metric_table_kernel_autotune.csv", "NVIDIA H200")
    (row,) = table.measurements
    assert row.candidate.config == Config.of({"XBLOCK": 8, "R0_BLOCK": 256}, num_warps=2, num_stages=1)
    assert row.ms == 0.25


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("bert,/tmp/cabc.py,k\n", "cut off"),
        (ROW.replace("0.012000", "soon"), "could not convert"),
        (ROW.replace("0.012000", "-1"), "number of milliseconds"),
        (ROW.replace("XBLOCK: 1024, ", "what "), "a config reads"),
        (ROW.replace("num_warps: 4", "num_warps: four"), "num_warps must be an integer"),
    ],
)
def test_a_damaged_row_says_where(tmp_path: Path, row: str, said: str) -> None:
    with pytest.raises(RecordError, match=said) as raised:
        read_file(metrics(tmp_path, ROW, row), "NVIDIA H200")
    assert ".csv:3:" in str(raised.value)


def test_metrics_need_a_device_and_their_columns(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="--device-name"):
        read_file(metrics(tmp_path, ROW))


@pytest.mark.parametrize("ms", ["9" * 400, "1e999", "NaN", "-1", '"fast"', "[]", "null", "true"])
def test_an_entry_that_is_refused_costs_no_other(tmp_path: Path, ms: str) -> None:
    path = written(tmp_path, one({"mm-cabc": 1.0, "mm-cbad": "?", "mm-cdef": 2.0}))
    path.write_text(path.read_text().replace('"?"', ms))
    refused: list[RecordError] = []
    (table,) = read_file(path, None, refused.append)
    assert [m.median_ms for m in table.measurements] == [1.0, 2.0]
    (error,) = refused
    assert "addmm" in str(error)
    with pytest.raises(RecordError, match="number of milliseconds"):
        read_file(path)


def test_a_line_of_metrics_that_is_refused_costs_no_other(tmp_path: Path) -> None:
    path = tmp_path / "metric_table_kernel_autotune.csv"
    rows = [
        'k.py,triton_a,"XBLOCK: 128, num_warps: 4",0.5',
        f'k.py,triton_a,"XBLOCK: {"9" * 400}, num_warps: {"9" * 400}",0.5',
        'k.py,triton_a,"XBLOCK: 64',
        f'k.py,triton_a,"XBLOCK: 64, num_warps: 4",{"9" * 400}',
        "k.py," + "x" * 200_000,
        'k.py,triton_a,"XBLOCK: 256, num_warps: 4",0.7',
    ]
    path.write_text("\n".join(["kernel_path,kernel_name,triton_config,latency_ms", *rows]) + "\n")
    refused: list[RecordError] = []
    (table,) = read_file(path, "NVIDIA H200", refused.append)
    assert [m.candidate.config.parameters()["XBLOCK"] for m in table.measurements if m.ok] == [128, 256]
    assert [str(error).split(": ")[0] for error in refused] == [f"{path}:{n}" for n in (3, 4, 5, 6)]
