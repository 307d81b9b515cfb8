"""`export --format` for other tools, through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forecast_autotune.commands import main
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
from forecast_autotune.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with one problem of the MoE kernel and one of another."""
    arguments = [
        Argument("b_ptr", "tensor", "bfloat16", (8, 2048, 512), (2048 * 512, 512, 1)),
        Argument("num_valid_tokens", "scalar", "i32", value=64),
        Argument("top_k", "constexpr", value=2),
    ]
    moe = Problem.of(Kernel("fused_moe_kernel"), arguments, Device("NVIDIA H200"), key=["32"])
    other = Problem.of(Kernel("softmax"), (), Device("NVIDIA H200"), key=["1"])
    blocks = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 1}
    tables = [
        Table(p, [Measurement(p.id, Candidate(Config.of(blocks)), Outcome.OK, 1.0)]) for p in (moe, other)
    ]
    result = Store(tmp_path / "store")
    result.import_tables(tables)
    result.sync()
    return tmp_path / "store"


def test_files_are_written_and_what_has_no_place_is_named(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["export", str(tmp_path / "out"), "--format", "vllm-moe", "--store", str(store), "--json"])
    message = capsys.readouterr()
    assert code == 0
    text = json.loads(message.out)
    assert [Path(p).name for p in text["files"]] == ["E=8,N=1024,device_name=NVIDIA_H200.json"]
    assert text["left_out"] == ["softmax 1: it has no argument b_ptr: no fused_moe_kernel"]
    result = json.loads((tmp_path / "out" / "E=8,N=1024,device_name=NVIDIA_H200.json").read_text())
    assert result["32"]["BLOCK_SIZE_M"] == 16


def test_nothing_written_is_a_failure(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    assert main(["export", out, "--format", "vllm-moe", "--kernel", "softmax", "--store", str(store)]) == 1
    assert "no fused_moe_kernel" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["-", "a_file"])
def test_a_folder_is_needed(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    (tmp_path / "a_file").touch()
    given = "-" if target == "-" else str(tmp_path / target)
    assert main(["export", given, "--format", "kernel-tuner", "--store", str(store)]) == 2
    assert "kernel-tuner writes files into a folder" in capsys.readouterr().err
