"""The MoE kernels of vLLM and SGLang, out of unpacked wheels, and the configs that these ship for a layer."""

from __future__ import annotations

import ast
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

from benchmarks.lib.bridges.moe_loaders import version_of
from forecast_autotune.records import Device
from forecast_autotune.store.exchange.exports import ExpertLayer, sglang_file_name, vllm_file_name
from forecast_integrations.fused_moe.layer import MoeLayer

LAYERS = {
    "qwen3-30b-a3b": MoeLayer(experts=128, width=768, hidden=2048, top_k=8),
    "mixtral-8x7b-tp2": MoeLayer(experts=8, width=7168, hidden=4096, top_k=2),
}
"""Of public models, the second one split over two devices; both packages ship files for an H200."""
_HEAD = "import torch\nimport triton\nimport triton.language as tl\n\n"
_FUNCTIONS = ("write_zeros_to_output", "tanh", "_apply_activation", "fused_moe_kernel")
_KERNEL_FILES = {
    "vllm": "vllm/model_executor/layers/fused_moe/fused_moe.py",
    "sglang": "sglang/kernels/ops/moe/fused_moe_triton_kernels.py",
}
_CONFIG_FOLDERS = {
    "vllm": "vllm/model_executor/layers/fused_moe/configs",
    "sglang": "sglang/srt/layers/moe/moe_runner/triton_utils/configs",
}


@dataclass(frozen=True)
class MoePackage:
    """One of the two, unpacked in a folder."""

    name: str
    root: Path

    @property
    def version(self) -> str:
        """Its release."""
        return version_of(self.root, self.name)

    def kernel(self, folder: Path) -> Any:
        """Its kernel, imported from a file in `folder` that holds it alone: the package needs far more to be
        imported."""
        text = (self.root / _KERNEL_FILES[self.name]).read_text(encoding="utf-8")
        lines, found = text.splitlines(keepends=True), [_HEAD]
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name in _FUNCTIONS:
                first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                found.append("".join(lines[first - 1 : node.end_lineno]) + "\n\n")
        path = folder / f"{self.name}_fused_moe.py"
        path.write_text("".join(found), encoding="utf-8")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.fused_moe_kernel

    def shipped(self, layer: MoeLayer, device: Device) -> dict[int, triton.Config]:
        """By the number of tokens, what it ships for a layer on a device, for the release of Triton nearest below
        ours; nothing where it ships none."""
        name = device.name.replace(" ", "_")
        plain = ExpertLayer(layer.experts, layer.width, name, "", None, triton.__version__)
        folder = self.root / _CONFIG_FOLDERS[self.name]
        if self.name == "vllm":
            paths = [folder / vllm_file_name(plain)]
        else:
            file = sglang_file_name(plain)
            paths = sorted(p for p in folder.glob(f"triton_*/{file}") if _release(p) <= _own_release())[-1:]
        if not paths or not paths[0].exists():
            return {}
        given = json.loads(paths[0].read_text(encoding="utf-8"))
        return {int(n): config_of(one) for n, one in given.items() if n != "triton_version"}


def config_of(entry: dict[str, Any]) -> triton.Config:
    """An entry of such a file, or `config_entry` of a config."""
    launch = {n: entry[n] for n in ("num_warps", "num_stages") if n in entry}
    return triton.Config({n: v for n, v in entry.items() if n.isupper() and n != "SPLIT_K"}, **launch)


def config_entry(config: triton.Config) -> dict[str, Any]:
    """A config as JSON."""
    return {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}


def nearest(shipped: dict[int, triton.Config], tokens: int) -> triton.Config:
    """What the packages' own readers take for a batch: the entry of the nearest number of tokens."""
    return shipped[min(shipped, key=lambda n: abs(n - tokens))]


def _release(path: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in path.parent.name.removeprefix("triton_").split("_"))


def _own_release() -> tuple[int, ...]:
    return tuple(int(part) for part in triton.__version__.partition("+")[0].split(".")[:3])
