"""The check of MoE files: which are ours to write, and that a reader of other names or of other content is noticed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bridges.moe_config_files import judge_package
from benchmarks.lib.bridges.moe_loaders import compiled, sglang_loader, vllm_loader

CONFIG = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1}
LAUNCH = {"num_warps": 4, "num_stages": 3}
NAMING = """
def get_config_file_name(E, N, dtype, block_shape=None{more}):
    kind = "" if not dtype else ",dtype=" + dtype
    sizes = "{comma}".join(map(str, block_shape or []))
    block = "" if not block_shape or not all(block_shape) else ",block_shape=[" + sizes + "]"
    return f"E={{E}},N={{N}},device_name=" + {device} + kind + block + {channel} + ".json"

@functools.lru_cache
def get_moe_configs(E, N, dtype, block_n=None, block_k=None{more}):
    path = os.path.join({folder}, get_config_file_name(E, N, dtype, [block_n, block_k]{given}))
    if not os.path.exists(path):
        return None
    found = json.load(open(path))
    found.pop("triton_version", None)
    return {{int(k): v for k, v in found.items()}}
"""
DTYPES = """
def {name}(dtype, use_fp8_w8a8=False, use_int4_w4a16=False, **others):
    plain = "float32" if dtype == torch.float else None
    return "fp8_w8a8" if use_fp8_w8a8 else "int4_w4a16" if use_int4_w4a16 else plain
"""


def vllm(root: Path, files: dict[str, Any], comma: str = ",") -> Path:
    """A package that is laid out as vLLM is, and names files as it does."""
    folder = root / "vllm" / "model_executor" / "layers" / "fused_moe"
    folder.mkdir(parents=True)
    (root / "vllm-1.0.dist-info").mkdir()
    parts = {
        "more": "",
        "given": "",
        "channel": "''",
        "comma": comma,
        "folder": "envs.VLLM_TUNED_CONFIG_FOLDER",
    }
    text = NAMING.format(device="get_device_name_as_file_name()", **parts)
    (folder / "fused_moe.py").write_text("import not_installed\n" + text)
    (folder / "config.py").write_text(DTYPES.format(name="_get_config_dtype_str"))
    write(folder / "configs", files)
    return root


def sglang(root: Path, files: dict[str, Any]) -> Path:
    folder = root / "sglang" / "srt" / "layers" / "moe" / "moe_runner" / "triton_utils"
    folder.mkdir(parents=True)
    (root / "sglang-2.0.dist-info").mkdir()
    where = (
        'os.environ.get("SGLANG_MOE_CONFIG_DIR"), "configs", "triton_" + triton.__version__.replace(".", "_")'
    )
    parts = {
        "more": ", per_channel_quant=False",
        "given": ", per_channel_quant",
        "comma": ", ",
        "folder": where,
    }
    channel = '(",per_channel_quant=True" if per_channel_quant else "")'
    text = NAMING.format(device='get_device_name().replace(" ", "_")', channel=channel, **parts)
    (folder / "fused_moe_triton_config.py").write_text(text + DTYPES.format(name="get_config_dtype_str"))
    write(folder / "configs" / "triton_3_5_1", files)
    return root


def write(folder: Path, files: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_text(json.dumps(data))


def test_every_file_that_is_ours_to_write_is_reproduced(tmp_path: Path) -> None:
    one = {"1": {**CONFIG, **LAUNCH}, "64": CONFIG}
    found = judge_package(
        vllm_loader(
            vllm(
                tmp_path,
                {
                    "E=8,N=512,device_name=NVIDIA_H200.json": {"triton_version": "3.6.0", **one},
                    "E=8,N=512,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,64].json": one,
                    "E=8,N=512,device_name=AMD,dtype=int4_w4a16.json": {
                        "4": {**CONFIG, **LAUNCH, "kpack": 2}
                    },
                    "E=8,N=512,device_name=AMD,dtype=int4_w4a16,backend=flydsl.json": {"4": {"tile_m": 16}},
                    "E=8,N=512,device_name=AMD,dtype=bf16.json": one,
                },
            )
        )
    )
    assert (found["version"], found["files"], found["wrong"]) == ("1.0", 5, {})
    assert (found["reproduced"], found["configs"]) == (3, 5)
    assert (found["left_out"]["other kernel"], found["left_out"]["never asked for"]) == (1, 1)


def test_sglang_has_names_of_its_own(tmp_path: Path) -> None:
    one = {"1": {**CONFIG, **LAUNCH, "USE_TMA": True}}
    files = {
        "E=8,N=512,device_name=NVIDIA_H200_NVL,dtype=fp8_w8a8,block_shape=[128, 64].json": one,
        "E=8,N=512,device_name=NVIDIA_H200,dtype=fp8_w8a8,per_channel_quant=True.json": one,
        "E=8,N=256,device_name=NVIDIA_H200,dtype=int4_w4a16.json": one,
        "E=8,N=512,device_name=NVIDIA_H200_down.json": one,
        "E=8,N=512,device_name=,dtype=int4_w4a16.json": one,
    }
    found = judge_package(sglang_loader(sglang(tmp_path, files)))
    assert (found["reproduced"], found["ours_to_write"], found["wrong"]) == (3, 3, {})
    assert (found["left_out"]["second product alone"], found["left_out"]["names no device"]) == (1, 1)


def test_a_reader_that_names_files_otherwise_is_noticed(tmp_path: Path) -> None:
    name = "E=8,N=512,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,64].json"
    found = judge_package(vllm_loader(vllm(tmp_path, {name: {"1": CONFIG}}, comma=";")))
    assert found["reproduced"] == 0
    assert found["wrong"] == {f"configs/{name}": "its own function gives another name"}


def test_content_that_we_cannot_write_is_noticed(tmp_path: Path) -> None:
    name = "E=8,N=512,device_name=NVIDIA_H200.json"
    found = judge_package(vllm_loader(vllm(tmp_path, {name: {"1": {**CONFIG, "NEW_OPTION": 3}}})))
    assert found["wrong"] == {f"configs/{name}": "other configs"}


def test_a_package_without_the_function_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "loader.py").write_text("def other():\n    pass\n")
    with pytest.raises(LookupError, match="no function get_moe_configs"):
        compiled(tmp_path / "loader.py", ("get_moe_configs",))
    root = vllm(tmp_path / "other", {})
    (root / "vllm-1.0.dist-info").rmdir()
    with pytest.raises(FileNotFoundError, match="unpack the wheel"):
        vllm_loader(root)
