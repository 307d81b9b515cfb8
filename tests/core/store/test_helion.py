"""Helion's logs as tables: what counts, what does not, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forecast_autotune.errors import RecordError
from forecast_autotune.records import Device, Outcome
from forecast_autotune.store.formats import format_of, helion, read_file

DEVICE = Device("NVIDIA H100")
OLD = """\
timestamp_s,config_index,generation,status,perf_ms,compile_time_s,config
0.10,1,0,started,,,"Config(block_sizes=[32, 64], num_warps=8, num_stages=2, indexing='pointer')"
0.50,1,0,ok,1.234000,0.40,"Config(block_sizes=[32, 64], num_warps=8, num_stages=2, indexing='pointer')"
0.60,2,0,error,,,"helion.Config(block_sizes=[512, 64])"
0.70,3,0,timeout,,60.00,"Config(block_sizes=[128, 64], flags=[[True], None])"
0.80,4,0,peer_compilation_fail,,,"Config(block_sizes=[1, 1])"
0.90,1,1,ok,1.200000,0.40,"Config(block_sizes=[32, 64], num_warps=8, num_stages=2, indexing='pointer')"
"""
NEW = """\
run_id,kernel_id,sample_id,timestamp_s,config_index,generation,status,perf_ms,compile_time_s,decorator,config
r1,k,s,0.5,1,0,ok,0.5,0.4,@helion.kernel(),"Config(block_sizes=[32])"
r2,k,s,0.5,1,0,ok,0.7,0.4,@helion.kernel(),"Config(block_sizes=[32])"
"""


def log(folder: Path, text: str) -> Path:
    path = folder / "softmax.csv"
    path.write_text(text)
    return path


def test_an_old_log_is_one_problem(tmp_path: Path) -> None:
    path = log(tmp_path, OLD)
    assert format_of(path) is helion.LOG
    (table,) = read_file(path, DEVICE)
    assert table.problem.kernel.name == "softmax"
    results = {str(c): m for c, m in table.by_candidate().items()}
    assert [m.outcome for m in results.values()] == [Outcome.OK, Outcome.RUNTIME_ERROR, Outcome.TIMEOUT]
    (best, failed, hung) = results
    assert best == "block_sizes[0]=32 block_sizes[1]=64 indexing=pointer warps=8 stages=2"
    assert results[best].ms == 1.2  # the last timing of a config counts
    assert results[best].compile_s == 0.4
    assert failed == "block_sizes[0]=512 block_sizes[1]=64 warps=4 stages=1"
    assert "flags[0][0]=True flags[1]=None" in hung


def test_a_new_log_names_its_runs_and_its_device(tmp_path: Path) -> None:
    path = log(tmp_path, NEW)
    about = [
        {"run_id": f"r{n}", "kernel_name": "rms", "kernel_source": "def rms(): ...",
         "input_shapes": f"[({n}, 64)]", "dtypes": "[f16]", "hardware_info": {"device_name": "NVIDIA B200"}}
        for n in (1, 2)
    ]  # fmt: skip
    path.with_suffix(".meta.jsonl").write_text("".join(json.dumps(a) + "\n" for a in about))
    tables = read_file(path)
    assert [t.problem.key for t in tables] == [("[(1, 64)]", "[f16]"), ("[(2, 64)]", "[f16]")]
    assert {t.problem.device.name for t in tables} == {"NVIDIA B200"}
    assert len({t.problem.id for t in tables}) == 2
    assert [t.measurements[0].ms for t in tables] == [0.5, 0.7]
    assert {t.problem.kernel.name for t in tables} == {"rms"}


def test_a_log_that_names_no_device_needs_one(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="--device-name"):
        read_file(log(tmp_path, OLD))


def test_a_killed_run_loses_its_last_row_only(tmp_path: Path) -> None:
    torn = OLD + "1.0,5,1,ok,1.1000"
    refused: list[RecordError] = []
    (table,) = read_file(log(tmp_path, torn), DEVICE, refused.append)
    assert len(table.measurements) == 4
    assert "softmax.csv:8" in str(refused[0])
    with pytest.raises(RecordError, match=r"softmax\.csv:8"):
        read_file(log(tmp_path, torn + "\n" + OLD.splitlines()[2] + "\n"), DEVICE)


CONFIGS = ("Config(__import__('os').system('true'))", "Config(a=open('x'))", "Config(**{})", "32", "Config(")


@pytest.mark.parametrize(
    ("ms", "config"),
    [
        *(("1.0", config) for config in CONFIGS),
        *((ms, "Config(a=1)") for ms in ("nan", "inf", "-1", "0", "", "fast")),
    ],
)
def test_a_config_is_read_and_never_run_and_its_time_is_a_positive_number(
    tmp_path: Path, ms: str, config: str
) -> None:
    rows = f'0,1,0,ok,{ms},0.4,"{config}"\n0,1,0,ok,1.0,0.4,"Config(a=1)"\n'
    with pytest.raises(RecordError, match=r"softmax\.csv:2"):
        read_file(log(tmp_path, OLD.splitlines()[0] + "\n" + rows), DEVICE)


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "\x00\x01", '{"type":"problem"}\n'])
def test_other_files_are_not_taken_for_logs(tmp_path: Path, text: str) -> None:
    path = log(tmp_path, text)
    assert format_of(path) is not helion.LOG
    with pytest.raises(RecordError):
        read_file(path, DEVICE, form=helion.LOG)
    assert format_of(tmp_path / "missing.csv") is not helion.LOG
