"""AutoHeuristic's logs as tables: what counts and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forecast_autotune.errors import RecordError
from forecast_autotune.records import (
    Argument,
    Candidate,
    Config,
    Device,
    Kernel,
    Measurement,
    Outcome,
    Problem,
)
from forecast_autotune.records.table import Table
from forecast_autotune.store.exchange.autoheuristic import import_autoheuristic, is_autoheuristic_log
from forecast_autotune.store.exchange.exports import write_export
from tests.core.captured_output import command

ABOUT = {
    "shared_memory": 232448,
    "device_capa": [9, 0],
    "name": "mm",
    "numerical_features": ["m", "k", "n"],
    "categorical_features": ["mat1_dtype", "mat2_dtype"],
}
HEAD = "m,k,n,mat1_dtype,mat2_dtype,choice,feedback"
TILES = "type=triton_BLOCK-M=64_BLOCK-K=16_BLOCK-N=32_numstages=2_numwarps=4"
ROW = "64,32,128,torch.float16,torch.float16"


def log(folder: Path, *rows: str, about: object = ABOUT, head: str = HEAD) -> Path:
    path = folder / "autoheuristic" / "NVIDIA_H200" / "mm.txt"
    path.parent.mkdir(parents=True)
    path.write_text("\n".join([json.dumps(about), head, *rows]) + "\n")
    return path


def test_each_product_is_a_problem_and_each_row_a_choice(tmp_path: Path) -> None:
    path = log(
        tmp_path, f"{ROW},{TILES},0.5", f"{ROW},extern_mm,0.25", f"{ROW.replace('64', '65')},extern_mm,inf"
    )
    assert is_autoheuristic_log(path)
    one, other = import_autoheuristic(path)
    assert (one.problem.kernel.name, one.problem.kernel.language) == ("mm", "inductor")
    device = one.problem.device
    assert (device.name, device.arch, device.shared_memory_bytes) == ("NVIDIA H200", "90", 232448)
    assert [a.shape for a in one.problem.arguments] == [(64, 32), (32, 128)]
    assert {m.candidate: m.median_ms for m in one.measurements} == {
        Candidate(
            Config.of({"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 16}, num_warps=4, num_stages=2), "triton::mm"
        ): 0.5,
        Candidate(Config.of({}), "aten::mm"): 0.25,
    }
    assert [m.outcome for m in other.measurements] == [Outcome.RUNTIME_ERROR]


def test_what_we_export_comes_in_again(tmp_path: Path) -> None:
    operands = [
        Argument("in0", "tensor", "fp16", (64, 32), (32, 1)),
        Argument("in1", "tensor", "fp16", (32, 128), (1, 32)),
        Argument("out", "tensor", "fp16", (64, 128), (128, 1)),
    ]
    problem = Problem.of(Kernel("mm", "inductor"), operands, Device("NVIDIA H200", "cuda", "90"))
    blocks = {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 16}
    times = {
        Candidate(Config.of(blocks, num_warps=4, num_stages=2), "triton::mm"): 0.5,
        Candidate(Config.of({}), "aten::mm"): 0.25,
    }
    rows = [Measurement(problem.id, c, Outcome.OK, ms) for c, ms in times.items()]
    (path,) = write_export("autoheuristic", tmp_path / "autoheuristic", [Table(problem, rows)], []).files
    (table,) = import_autoheuristic(path)
    assert {m.candidate: m.ms for m in table.measurements} == times
    assert [(a.shape, a.stride) for a in table.problem.arguments] == [
        ((64, 32), (32, 1)),
        ((32, 128), (1, 32)),
    ]
    assert table.problem.device.name == "NVIDIA H200"


def test_a_device_is_the_folders_or_said(tmp_path: Path) -> None:
    path = log(tmp_path, f"{ROW},extern_mm,0.25").rename(tmp_path / "mm.txt")
    with pytest.raises(RecordError, match="--device-name"):
        import_autoheuristic(path)
    (table,) = import_autoheuristic(path, Device("NVIDIA A100"))
    assert table.problem.device.name == "NVIDIA A100"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (f"{ROW},extern_mm,-1.0", "positive milliseconds"),
        (f"{ROW},extern_mm,nan", "positive milliseconds"),
        (f"{ROW},extern_mm,fast", "could not convert"),
        (f"{ROW},decompose_k,1.0", "choice is"),
        (f"{ROW},1.0", "shorter"),
        (f"many{ROW},extern_mm,1.0", "invalid literal"),
    ],
)
def test_a_row_that_breaks_a_rule_costs_no_other(tmp_path: Path, row: str, message: str) -> None:
    path = log(tmp_path, row, f"{ROW},extern_mm,0.25")
    with pytest.raises(RecordError, match=message) as refused:
        import_autoheuristic(path)
    assert f"{path}:3: " in str(refused.value)
    told: list[RecordError] = []
    (table,) = import_autoheuristic(path, refuse=told.append)
    assert [m.ms for m in table.measurements] == [0.25]
    assert len(told) == 1


@pytest.mark.parametrize(
    ("about", "head", "message"),
    [
        ({"name": "mm"}, HEAD, "no log of AutoHeuristic"),
        ([], HEAD, "no log of AutoHeuristic"),
        ({**ABOUT, "device_capa": ["nine"]}, HEAD, "device_capa"),
        (ABOUT, "m,k,n", "the columns end in"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, about: object, head: str, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        import_autoheuristic(log(tmp_path, f"{ROW},extern_mm,0.25", about=about, head=head))


def test_the_command_takes_it(tmp_path: Path) -> None:
    path = log(tmp_path, f"{ROW},{TILES},0.5", f"{ROW},extern_mm,0.25")
    done = command("import", str(path), "--store", str(tmp_path / "store"))
    assert done.returncode == 0, done.stderr
    assert "added 2 measurements of 1 problem" in done.stdout
