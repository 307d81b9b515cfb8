"""Measurements and decisions in other tools' formats: names, keys and values exactly as their readers take them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
    Scalar,
)
from forecast_autotune.records.table import Table
from forecast_autotune.store import Store
from forecast_autotune.store.exports import ExportReport, write_export

H200 = Device("NVIDIA H200", "cuda", "90", 132, 232448)
EXPERTS, HIDDEN, INNER = 8, 4096, 14336


def config(m: int, warps: int = 4, **others: Scalar) -> Candidate:
    blocks = {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 8, **others}
    return Candidate(Config.of(blocks, num_warps=warps, num_stages=4))


def table(problem: Problem, times: dict[Candidate, float | Outcome]) -> Table:
    rows = [
        Measurement(problem.id, c, t, compile_s=0.5)
        if isinstance(t, Outcome)
        else Measurement(problem.id, c, Outcome.OK, t, compile_s=0.5, protocol="events")
        for c, t in times.items()
    ]
    return Table(problem, rows)


def product(
    tokens: int, shape: tuple[int, int, int], top_k: int, device: Device = H200, valid: int = 0, **flags: Any
) -> Problem:
    arguments = [
        Argument("a_ptr", "tensor", "bfloat16", (tokens, shape[2]), (shape[2], 1)),
        Argument("b_ptr", "tensor", "bfloat16", shape, (shape[1] * shape[2], shape[2], 1)),
        Argument("num_valid_tokens", "scalar", "i32", value=valid or tokens * top_k),
        Argument("top_k", "constexpr", value=top_k),
        *(Argument(name, "constexpr", value=value) for name, value in flags.items()),
    ]
    return Problem.of(
        Kernel("fused_moe_kernel"),
        arguments,
        device,
        key=[str(tokens), str(shape)],
        toolchain={"triton": "3.6.0"},
    )


def first(tokens: int, **others: Any) -> Problem:
    return product(tokens, (EXPERTS, 2 * INNER, HIDDEN), 2, **others)


def second(tokens: int, **others: Any) -> Problem:
    return product(2 * tokens, (EXPERTS, HIDDEN, INNER), 1, **others)


def export(form: str, folder: Path, *tables: Table) -> ExportReport:
    return write_export(form, folder, tables, [])


def only_file(report: ExportReport, folder: Path) -> tuple[str, Any]:
    (path,) = report.files
    return str(path.relative_to(folder)), json.loads(path.read_text())


def test_vllm_finds_a_file_by_experts_width_and_device(tmp_path: Path) -> None:
    small = table(first(16), {config(16): 0.5, config(64): 0.75})
    large = table(first(4096), {config(16): 9.0, config(64, 8): 4.0, config(128): Outcome.OUT_OF_RESOURCES})
    name, data = only_file(export("vllm-moe", tmp_path, large, small), tmp_path)
    assert name == "E=8,N=14336,device_name=NVIDIA_H200.json"
    assert list(data) == ["triton_version", "16", "4096"], "batch sizes rise, as the tuner's own files do"
    assert data["triton_version"] == "3.6.0"
    assert data["4096"] == {
        "BLOCK_SIZE_M": 64,
        "BLOCK_SIZE_N": 128,
        "BLOCK_SIZE_K": 64,
        "GROUP_SIZE_M": 8,
        "num_warps": 8,
        "num_stages": 4,
    }


def test_both_products_of_a_layer_share_the_config_that_is_best_for_both(tmp_path: Path) -> None:
    one = table(first(64), {config(16): 1.0, config(64): 1.2, config(128): 3.0})
    other = table(second(64), {config(16): 2.0, config(64): 0.5, config(128): 0.4})
    report = export("vllm-moe", tmp_path, other, one)
    _, data = only_file(report, tmp_path)
    assert set(data) == {"triton_version", "64"}
    assert data["64"]["BLOCK_SIZE_M"] == 64
    assert report.problems == 2


def test_devices_have_files_of_their_own_and_amd_its_options(tmp_path: Path) -> None:
    amd = Device("AMD Instinct MI300X", "hip", "gfx942")
    there = table(first(16, device=amd), {config(32, waves_per_eu=2, matrix_instr_nonkdim=16, kpack=2): 1.0})
    report = export("vllm-moe", tmp_path, there, table(first(16), {config(16): 1.0}))
    names = {path.name for path in report.files}
    assert names == {
        "E=8,N=14336,device_name=AMD_Instinct_MI300X.json",
        "E=8,N=14336,device_name=NVIDIA_H200.json",
    }
    result = json.loads((tmp_path / "E=8,N=14336,device_name=AMD_Instinct_MI300X.json").read_text())["16"]
    assert (result["waves_per_eu"], result["matrix_instr_nonkdim"], result["kpack"]) == (2, 16, 2)


@pytest.mark.parametrize(
    ("flags", "suffix"),
    [
        ({"use_fp8_w8a8": True, "group_n": 128, "group_k": 64}, ",dtype=fp8_w8a8,block_shape=[128, 64]"),
        ({"use_fp8_w8a8": True, "per_channel_quant": True}, ",dtype=fp8_w8a8,per_channel_quant=True"),
        ({"use_int8_w8a8": True, "per_channel_quant": False}, ",dtype=int8_w8a8"),
    ],
)
def test_sglang_spaces_the_block_and_names_quantization_by_channel(
    tmp_path: Path, flags: dict[str, Any], suffix: str
) -> None:
    given = table(first(16, **flags), {config(16): 1.0})
    name, _ = only_file(export("sglang-moe", tmp_path, given), tmp_path)
    assert Path(name).name == f"E=8,N=14336,device_name=NVIDIA_H200{suffix}.json"


def test_variants_of_the_h200_share_a_file_in_vllm_alone(tmp_path: Path) -> None:
    given = table(first(16, device=Device("NVIDIA H200 NVL", "cuda", "90")), {config(16): 1.0})
    theirs, _ = only_file(export("vllm-moe", tmp_path, given), tmp_path)
    other, _ = only_file(export("sglang-moe", tmp_path, given), tmp_path)
    assert theirs == "E=8,N=14336,device_name=NVIDIA_H200.json"
    assert Path(other).name == "E=8,N=14336,device_name=NVIDIA_H200_NVL.json"


def test_packed_weights_count_twice_in_vllm_and_once_in_sglang(tmp_path: Path) -> None:
    """Rows of int4 weights hold two in a byte; the width of vLLM's name counts weights, SGLang's bytes."""
    flags: dict[str, Any] = {"use_int4_w4a16": True}
    one = table(product(16, (8, 4096, 512), 2, **flags), {config(16): 1.0})
    other = table(product(32, (8, 1024, 1024), 1, **flags), {config(16): 1.0})
    report = export("vllm-moe", tmp_path, one, other)
    name, _ = only_file(report, tmp_path)
    assert name == "E=8,N=2048,device_name=NVIDIA_H200,dtype=int4_w4a16.json"
    assert report.problems == 2, "the second product is of the same layer"
    theirs, _ = only_file(export("sglang-moe", tmp_path, one, other), tmp_path)
    assert Path(theirs).name == "E=8,N=1024,device_name=NVIDIA_H200,dtype=int4_w4a16.json"


def test_other_kernels_and_configs_are_left_out_and_named(tmp_path: Path) -> None:
    other = Problem.of(Kernel("softmax"), (), H200, key=["1024"])
    odd = Candidate(Config.of({"BLOCK": 64}))
    report = export("vllm-moe", tmp_path, table(other, {odd: 1.0}), table(first(16), {odd: 1.0}))
    assert report.files == []
    assert report.left_out == [
        "softmax 1024: it has no argument b_ptr: no fused_moe_kernel",
        f"fused_moe_kernel 16 {(EXPERTS, 2 * INNER, HIDDEN)}: its configs have no BLOCK_SIZE_M",
    ]


def test_t4_results_say_what_was_wrong_with_a_config(tmp_path: Path) -> None:
    given = table(
        Problem.of(Kernel("matmul"), (), H200, key=["1"]),
        {config(16): 0.5, config(64): Outcome.COMPILE_ERROR, config(128): Outcome.INCORRECT},
    )
    _, data = only_file(export("kernel-tuner-t4", tmp_path, given), tmp_path)
    assert [r["invalidity"] for r in data["results"]] == ["correct", "compile", "correctness"]
    assert [r["times"]["runtimes"] for r in data["results"]] == [[0.5], [], []]
    assert (data["metadata"]["timeunit"], data["results"][0]["times"]["compilation"]) == ("milliseconds", 500)


def test_what_was_decided_counts_over_what_was_fastest(tmp_path: Path) -> None:
    from forecast_autotune.records import Decision, Evidence

    given = table(first(16), {config(16): 1.0, config(64): 0.99})
    decision = Decision(given.problem.id, config(16), Evidence.MEASURED, "", 0.0, 0.02, 2, 2)
    report = write_export("vllm-moe", tmp_path, [given], [(given.problem, decision)])
    assert only_file(report, tmp_path)[1]["16"]["BLOCK_SIZE_M"] == 16


# --- by command ---


@pytest.fixture
def stored(tmp_path: Path) -> list[str]:
    """Words for a store with one problem of the kernel that has a place, and one of another."""
    softmax = Problem.of(Kernel("softmax"), (), H200, key=["1"])
    store = Store(tmp_path / "store")
    store.import_tables([table(first(32), {config(16): 1.0}), table(softmax, {config(16): 1.0})])
    store.sync()
    return ["--store", str(tmp_path / "store")]


def test_files_are_written_and_what_has_no_place_is_named(
    stored: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(tmp_path / "out"), "--format", "vllm-moe", "--json", *stored]) == 0
    data = json.loads(capsys.readouterr().out)
    (path,) = data["files"]
    assert Path(path).name == "E=8,N=14336,device_name=NVIDIA_H200.json"
    assert data["left_out"] == ["softmax 1: it has no argument b_ptr: no fused_moe_kernel"]
    assert json.loads(Path(path).read_text())["32"]["BLOCK_SIZE_M"] == 16


def test_nothing_written_is_a_failure(
    stored: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    assert main(["export", out, "--format", "vllm-moe", "--kernel", "softmax", *stored]) == 1
    assert "no fused_moe_kernel" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["-", "a_file"])
def test_a_folder_is_needed(
    stored: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    (tmp_path / "a_file").touch()
    words = "-" if target == "-" else str(tmp_path / target)
    assert main(["export", words, "--format", "kernel-tuner", *stored]) == 2
    assert "kernel-tuner writes files into a folder" in capsys.readouterr().err
