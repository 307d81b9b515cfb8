"""Claim: what we export for the MoE kernels of vLLM and SGLang has the names and the content that these look for.

    pip download --no-deps vllm sglang && unzip -d FOLDER WHEEL (each)
    python -m benchmarks.bridges.moe_config_files --vllm FOLDER --sglang FOLDER --out FILE.json

For every file that the packages ship, problems of its kernel are made up whose exported file must be the same one:
the same name, and per batch size the same config. Then the package's own functions, which name a file and read it,
look it up in the folder that was exported to. Runs in seconds, without a GPU and without what the packages need.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.lib.bridges.moe_loaders import Loader, NamedLayer, sglang_loader, vllm_loader
from benchmarks.lib.result_files import ResultFile, parse_arguments, parser
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
from forecast_autotune.store.exchange.exports import write_export

FORMATS = {"vllm": "vllm-moe", "sglang": "sglang-moe"}
HIDDEN, TOP_K = 1024, 2
NAME = re.compile(
    r"E=(?P<experts>\d+),N=(?P<width>\d+),device_name=(?P<device>[^,]*?)"
    r"(?:,dtype=(?P<dtype>[a-z0-9]+(?:_w\d+a\d+)?))?(?:,block_shape=\[(?P<n>\d+), ?(?P<k>\d+)\])?"
    r"(?P<channel>,per_channel_quant=True)?(?P<backend>,backend=\w+)?(?P<down>_down)?\.json"
)
LAUNCH = {"num_warps": 4, "num_stages": 3, "num_ctas": 1}
"""Triton's own values, for files that leave them out."""


def judge_file(path: Path, loader: Loader, folder: Path) -> str:
    """`reproduced`, or why not: of another kernel or reader, or what went wrong."""
    match = NAME.fullmatch(path.name)
    if match is None:
        return "other kernel"
    if match["backend"]:
        return "other kernel"
    if match["down"]:
        return "second product alone"
    if not match["device"]:
        return "names no device"
    if match["dtype"] not in loader.names:
        return "never asked for"
    block = (int(match["n"]), int(match["k"])) if match["n"] else None
    layer = NamedLayer(
        int(match["experts"]), int(match["width"]), match["dtype"], block, bool(match["channel"])
    )
    given: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    entries = {int(tokens): config for tokens, config in given.items() if tokens != "triton_version"}
    triton = (
        path.parent.name.removeprefix("triton_").replace("_", ".")
        if "triton_" in path.parent.name
        else "3.6.0"
    )
    device = match["device"].replace("_", " ")
    tables = [product(layer, tokens, config, device, triton, loader) for tokens, config in entries.items()]
    report = write_export(FORMATS[loader.package], folder, tables, [])
    if [made.name for made in report.files] != [path.name]:
        return f"named {[made.name for made in report.files]}"
    written: dict[str, Any] = json.loads(report.files[0].read_text(encoding="utf-8"))
    written.pop("triton_version", None)
    wanted = {tokens: full(config) for tokens, config in entries.items()}
    if {int(tokens): full(config) for tokens, config in written.items()} != wanted:
        return "other configs"
    theirs = match["device"] if loader.package == "vllm" else device
    if loader.name(layer, theirs) != path.name:
        return "its own function gives another name"
    found = loader.read(layer, theirs, folder, triton)
    return (
        "reproduced"
        if found and {t: full(c) for t, c in found.items()} == wanted
        else "not found by its reader"
    )


def product(
    layer: NamedLayer, tokens: int, entry: Mapping[str, Any], device: str, triton: str, loader: Loader
) -> Table:
    """A first product of a layer that was measured under one config."""
    packed = layer.dtype == "int4_w4a16"
    width = layer.width * 2 if packed and loader.package == "sglang" else layer.width
    shape = (layer.experts, 2 * width, HIDDEN // 2 if packed else HIDDEN)
    dtype = "float32" if layer.dtype == "float32" else "bfloat16"
    flags: dict[str, Any] = {"top_k": TOP_K, "per_channel_quant": layer.per_channel}
    flags |= {
        "group_n": layer.block[0] if layer.block else 0,
        "group_k": layer.block[1] if layer.block else 0,
    }
    if layer.dtype not in (None, "float32"):
        flags[f"use_{layer.dtype}"] = True
    arguments = [
        Argument("b_ptr", "tensor", dtype, shape, (shape[1] * shape[2], shape[2], 1)),
        Argument("num_valid_tokens", "scalar", "i32", value=tokens * TOP_K),
        *(Argument(name, "constexpr", value=value) for name, value in flags.items()),
    ]
    problem = Problem.of(
        Kernel("fused_moe_kernel"), arguments, Device(device), key=[str(tokens)], toolchain={"triton": triton}
    )
    rest = {name: value for name, value in entry.items() if name not in LAUNCH}
    candidate = Candidate(Config.of(rest, **{name: entry.get(name, LAUNCH[name]) for name in LAUNCH}))
    return Table(problem, [Measurement(problem.id, candidate, Outcome.OK, 1.0)])


def full(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A config with what it leaves open."""
    return {**LAUNCH, **entry}


def judge_package(loader: Loader) -> dict[str, Any]:
    """Counts, and the names of files that went wrong."""
    counts: Counter[str] = Counter()
    wrong: dict[str, str] = {}
    configs = 0
    left_out = ("other kernel", "second product alone", "names no device", "never asked for")
    for path in loader.files:
        with tempfile.TemporaryDirectory() as name:
            verdict = judge_file(path, loader, Path(name))
        counts[verdict if verdict in (*left_out, "reproduced") else "wrong"] += 1
        if verdict == "reproduced":
            configs += sum(key != "triton_version" for key in json.loads(path.read_text(encoding="utf-8")))
        elif verdict not in left_out:
            wrong[f"{path.parent.name}/{path.name}"] = verdict
    return {
        "version": loader.version,
        "files": len(loader.files),
        "left_out": {name: counts[name] for name in left_out},
        "ours_to_write": counts["reproduced"] + counts["wrong"],
        "reproduced": counts["reproduced"],
        "configs": configs,
        "wrong": wrong,
    }


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--vllm", type=Path, required=True, help="folder with an unpacked wheel")
    made.add_argument("--sglang", type=Path, required=True, help="the same of SGLang")
    arguments = parse_arguments(made, on_host=True)
    result = ResultFile(arguments, "moe_config_files")
    summary = {
        loader.package: judge_package(loader)
        for loader in (vllm_loader(arguments.vllm), sglang_loader(arguments.sglang))
    }
    result.finish(summary)
    return int(any(one["wrong"] for one in summary.values()))


if __name__ == "__main__":
    sys.exit(main())
