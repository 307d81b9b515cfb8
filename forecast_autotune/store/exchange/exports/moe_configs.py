"""The JSON files from which vLLM and SGLang take the configs of their `fused_moe` kernel.

A file is of one shape of experts, device and data type, and named after them, as `vllm_file_name` and
`sglang_file_name` say; it maps batch sizes (tokens) to configs. Both products of a layer run with one config: the
first reads weights [E, 2 N, K], the second [E, K, N], and a problem of the second has `top_k` 1. Where both were
tuned at a batch size, the config is the one of the least time of both together. vLLM reads the files of the folder
that `VLLM_TUNED_CONFIG_FOLDER` names, SGLang those of `configs/triton_<release>` below `SGLANG_MOE_CONFIG_DIR`.
SGLang may have a second file for the second product, `..._down.json`; without one it uses the first for both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forecast_autotune.records import Argument, Candidate, Config, Problem
from forecast_autotune.store.exchange.exports.tuned_problem import ExportReport, TunedProblem

BLOCKS = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M")
"""Parameters that a config of the kernel must have."""
DEVICE_OPTIONS = ("waves_per_eu", "matrix_instr_nonkdim", "kpack", "grf_mode")
"""Of AMD's devices, and of Intel's; either reader passes them on to the launch."""
SGLANG_OPTIONS = ("USE_TMA",)
_PRECISIONS = ("use_fp8_w8a8", "use_fp8_w8a16", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16")
_INT4 = "int4_w4a16"
_H200 = "NVIDIA_H200"


@dataclass(frozen=True)
class ExpertLayer:
    """What a file is named after; `device` is the device's name without spaces, `triton` the release."""

    experts: int
    inner: int
    device: str
    dtype: str
    block: tuple[int, int] | None
    triton: str
    per_channel: bool = False


def vllm_file_name(layer: ExpertLayer) -> str:
    """The name that vLLM's `get_config_file_name` gives: all variants of the H200 share a file."""
    device = _H200 if "H200" in layer.device.split("_") else layer.device
    block = f",block_shape=[{layer.block[0]},{layer.block[1]}]" if layer.block else ""
    return f"E={layer.experts},N={layer.inner},device_name={device}{_selector(layer)}{block}.json"


def sglang_file_name(layer: ExpertLayer) -> str:
    """The name that SGLang's gives: a space within the block's shape, and packed int4 weights counted in bytes."""
    inner = layer.inner // 2 if layer.dtype == _INT4 else layer.inner
    block = f",block_shape=[{layer.block[0]}, {layer.block[1]}]" if layer.block else ""
    channel = ",per_channel_quant=True" if layer.per_channel else ""
    return f"E={layer.experts},N={inner},device_name={layer.device}{_selector(layer)}{block}{channel}.json"


def _selector(layer: ExpertLayer) -> str:
    return f",dtype={layer.dtype}" if layer.dtype else ""


@dataclass(frozen=True)
class _TunedProduct:
    """One tuned product of a layer."""

    layer: ExpertLayer
    tokens: int
    tuned: TunedProblem


def write_vllm_moe(folder: Path, problems: Sequence[TunedProblem]) -> ExportReport:
    """Write the files that vLLM reads into a folder. Raises `OSError`."""
    return _write(folder, problems, for_sglang=False)


def write_sglang_moe(folder: Path, problems: Sequence[TunedProblem]) -> ExportReport:
    """The same for SGLang: in a folder for each release of Triton, without its version in the file."""
    return _write(folder, problems, for_sglang=True)


def _write(folder: Path, problems: Sequence[TunedProblem], *, for_sglang: bool) -> ExportReport:
    report = ExportReport()
    layers: dict[ExpertLayer, dict[int, list[_TunedProduct]]] = defaultdict(lambda: defaultdict(list))
    for product in _products(problems, report):
        layers[product.layer][product.tokens].append(product)
    for layer, batches in layers.items():
        made: dict[str, Any] = {}
        for tokens in sorted(batches):
            config = _best_of_both([p.tuned for p in batches[tokens]])
            made[str(tokens)] = _entry(
                config, (*DEVICE_OPTIONS, *SGLANG_OPTIONS) if for_sglang else DEVICE_OPTIONS
            )
            report.problems += len(batches[tokens])
            report.measurements += sum(len(p.tuned.rows) for p in batches[tokens])
        if for_sglang:
            release = f"triton_{layer.triton.partition('+')[0].replace('.', '_')}"
            report.write(folder / "configs" / release / sglang_file_name(layer), made)
        else:
            report.write(folder / vllm_file_name(layer), {"triton_version": layer.triton, **made})
    return report


def _products(problems: Sequence[TunedProblem], report: ExportReport) -> list[_TunedProduct]:
    """The products of layers that the problems are; the second of a layer takes its tokens from the first."""
    first: list[_TunedProduct] = []
    second: list[tuple[TunedProblem, dict[str, Argument]]] = []
    for tuned in problems:
        named = {a.name: a for a in tuned.problem.arguments}
        if why := _refusal(tuned, named):
            report.left_out.append(f"{tuned.problem.kernel.name} {' '.join(tuned.problem.key)}: {why}")
            continue
        experts, columns, _ = _weights(named)
        top_k, valid = _number(named, "top_k"), _number(named, "num_valid_tokens")
        if top_k == 1 and _has_first(problems, named):
            second.append((tuned, named))
            continue
        first.append(
            _TunedProduct(_layer(tuned.problem, named, experts, columns // 2), valid // top_k, tuned)
        )
    for tuned, named in second:
        experts, _, inner = _weights(named)
        layer = _layer(tuned.problem, named, experts, inner)
        valid = _number(named, "num_valid_tokens")
        for one in list(first):
            same = _number({a.name: a for a in one.tuned.problem.arguments}, "num_valid_tokens")
            if one.layer == layer and same == valid:
                first.append(_TunedProduct(layer, one.tokens, tuned))
                break
        else:
            report.left_out.append(
                f"{tuned.problem.kernel.name}: the layer's first product was not tuned as well"
            )
    return first


def _has_first(problems: Sequence[TunedProblem], second: dict[str, Argument]) -> bool:
    """Whether any problem is the first product of a layer whose second these arguments are of."""
    experts, hidden, inner = _weights(second)
    for other in problems:
        named = {a.name: a for a in other.problem.arguments}
        tensor = "b_ptr" in named and len(named["b_ptr"].shape) == 3
        if tensor and _weights(named) == (experts, 2 * inner, hidden):
            return True
    return False


def _weights(named: dict[str, Argument]) -> tuple[int, int, int]:
    """Experts, columns and rows of the weights; of those in 4 bits, two share a byte of a row."""
    experts, columns, rows = named["b_ptr"].shape
    return experts, columns, rows * 2 if _precision(named) == _INT4 else rows


def _refusal(tuned: TunedProblem, named: dict[str, Argument]) -> str:
    """Why a problem is none of the kernel's, or has no config for it; empty if it is one."""
    if missing := [n for n in ("b_ptr", "num_valid_tokens", "top_k") if n not in named]:
        return f"it has no argument {missing[0]}: no fused_moe_kernel"
    if len(named["b_ptr"].shape) != 3:
        return "b_ptr must be [experts, columns, rows]"
    if _number(named, "top_k") < 1:
        return "top_k must be a number"
    if tuned.chosen is None:
        return "none of its configs ran"
    if missing := [n for n in BLOCKS if n not in dict(tuned.chosen.config.kwargs)]:
        return f"its configs have no {missing[0]}"
    return ""


def _number(named: dict[str, Argument], name: str) -> int:
    """An integer argument; 0 where it is not there, or is none."""
    value = named[name].value if name in named else None
    return value if isinstance(value, int) else 0


def _layer(problem: Problem, named: dict[str, Argument], experts: int, inner: int) -> ExpertLayer:
    dtype = _precision(named)
    if not dtype and named["b_ptr"].dtype in ("float32", "fp32"):
        dtype = "float32"
    sizes = [n for n in (_number(named, "group_n"), _number(named, "group_k")) if n]
    block = (sizes[0], sizes[1]) if len(sizes) == 2 else None
    device = problem.device.name.replace(" ", "_")
    triton = dict(problem.toolchain).get("triton", "")
    return ExpertLayer(experts, inner, device, dtype, block, triton, _is_set(named, "per_channel_quant"))


def _precision(named: dict[str, Argument]) -> str:
    """How weights and activations are quantized, in the words of the kernel's own flags; empty if they are not."""
    used = [name for name in _PRECISIONS if _is_set(named, name)]
    return used[0].removeprefix("use_") if used else ""


def _is_set(named: dict[str, Argument], flag: str) -> bool:
    return flag in named and bool(named[flag].value)


def _best_of_both(tuned: Sequence[TunedProblem]) -> Config:
    """The config of the least time of all products that tried it; without a common one, the slowest product's."""
    shared: set[Candidate] = set.intersection(*({c for c, m in t.rows.items() if m.ok} for t in tuned))
    shared = {c for c in shared if c.is_base_variant}
    if len(tuned) > 1 and shared:
        return min(shared, key=lambda c: (sum(t.rows[c].ms for t in tuned), str(c))).config

    def time_of(one: TunedProblem) -> float:
        row = one.rows.get(one.chosen) if one.chosen else None
        return row.ms if row is not None and row.ok else 0.0

    chosen = max(tuned, key=time_of).chosen
    assert chosen is not None  # by `_refusal`
    return chosen.config


def _entry(config: Config, options: Sequence[str]) -> dict[str, Any]:
    """A config by the names that the readers know, in their order."""
    given = dict(config.kwargs)
    made = {name: given[name] for name in BLOCKS}
    if "SPLIT_K" in given:
        made["SPLIT_K"] = given["SPLIT_K"]
    made["num_warps"] = config.num_warps
    if config.num_ctas != 1:
        made["num_ctas"] = config.num_ctas
    made["num_stages"] = config.num_stages
    return {**made, **{name: given[name] for name in options if name in given}}
