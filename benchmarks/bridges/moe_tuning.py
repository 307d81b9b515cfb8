"""Claim: the MoE kernels of vLLM and SGLang are tuned in minutes, as well as by what they ship and by a sweep.

    pip download --no-deps vllm sglang && unzip -d FOLDER WHEEL (each)
    python -m benchmarks.bridges.moe_tuning --vllm FOLDER --sglang FOLDER --out FILE.json [--repeats 3] \
        [--layers qwen3-30b-a3b ...] [--tokens 16 256 4096] [--sample 240] [--loop 12]

The public kernel of each package is tuned for both products of a layer, out of the 1,920 configs of vLLM's own tuner:
`forecast` is ours, in a fresh process with empty caches each time; `sample` measures so many configs by chance, all of
them, with our own engine; `shipped` is what the package's file for this device says, which its makers have found with
their tuner; `loop` times the loop of vLLM's tuner over a few configs, one after the other, from which its time for all
is extrapolated. Then what was chosen is timed in turns, both products after each other, the first one twice: the noise.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.lib import devices
from benchmarks.lib.bridges.turns import medians_in_turns, run_apart
from benchmarks.lib.result_files import ResultFile, parse_arguments, parser, say
from forecast_autotune import Store
from forecast_autotune.records import Device
from forecast_autotune.store.exports import ExpertLayer, sglang_file_name, vllm_file_name
from forecast_integrations.device import current_device
from forecast_integrations.fused_moe.layer import MoeLayer, drawn_weights, products
from forecast_integrations.fused_moe.tuning import MoeCall, moe_configs, tune_moe
from forecast_integrations.triton.null_device import null_device

LAYERS = {
    "qwen3-30b-a3b": MoeLayer(experts=128, width=768, hidden=2048, top_k=8),
    "mixtral-8x7b-tp2": MoeLayer(experts=8, width=7168, hidden=4096, top_k=2),
}
"""Layers of public models, the second one split over two devices; both packages ship files for an H200."""
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
        """Its release, as the wheel's metadata names it. Raises `FileNotFoundError` without any."""
        for path in self.root.glob(f"{self.name}-*.dist-info"):
            return path.name.removesuffix(".dist-info").partition("-")[2]
        raise FileNotFoundError(f"{self.root} has no {self.name}-*.dist-info: unpack the wheel there")

    def kernel(self, folder: Path) -> Any:
        """Its kernel, imported from a file in `folder` that holds it alone: the package needs far more to be
        imported."""
        text = (self.root / _KERNEL_FILES[self.name]).read_text(encoding="utf-8")
        lines, result = text.splitlines(keepends=True), [_HEAD]
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name in _FUNCTIONS:
                first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                result.append("".join(lines[first - 1 : node.end_lineno]) + "\n\n")
        path = folder / f"{self.name}_fused_moe.py"
        path.write_text("".join(result), encoding="utf-8")
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
    """Return what the packages' own readers take for a batch: the entry of the nearest number of tokens."""
    return shipped[min(shipped, key=lambda n: abs(n - tokens))]


def _release(path: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in path.parent.name.removeprefix("triton_").split("_"))


def _own_release() -> tuple[int, ...]:
    return tuple(int(part) for part in triton.__version__.partition("+")[0].split(".")[:3])


CLAIM = "moe_tuning"
TIMEOUT_S = 500.0
ROUNDS = 100
"""Launches of each choice when they are timed in turns."""
GRAPH_RUNS, REPLAYS, WARM_REPLAYS = 10, 100, 5
"""The space of vLLM's tuner."""


def tune(given: dict[str, Any], device: str) -> dict[str, Any]:
    """One package's kernel for one layer by one arm, in this process."""
    arms = {"forecast": by_forecast, "sample": by_sample, "loop": by_loop}
    with tempfile.TemporaryDirectory() as folder:
        kernel = MoePackage(given["package"], Path(given["root"])).kernel(Path(folder))
        devices.synchronize()  # it is opened before
        begin = time.perf_counter()
        result = arms[given["arm"]](kernel, given, device)
    return {"tune_s": time.perf_counter() - begin, **result}


def by_forecast(kernel: Any, given: dict[str, Any], device: str) -> dict[str, Any]:
    """Ours."""
    own = by_chance(96, seed=0) if device == "cpu" else None  # a dry run
    result = tune_moe(kernel, layer_of(given, device), given["tokens"], configs=own, device=device)
    return {
        "configs": {str(n): config_entry(one.config) for n, one in result.items()},
        "measured": {str(n): one.measured for n, one in result.items()},
        "candidates": next(iter(result.values())).candidates,
    }


def by_sample(kernel: Any, given: dict[str, Any], device: str) -> dict[str, Any]:
    """The best of some configs by chance, of which each is measured for both products."""
    configs = by_chance(given["sample"], seed=given["repeat"])
    layer = layer_of(given, device)
    weights = drawn_weights(layer, device)
    best = {}
    for tokens in given["tokens"]:
        sums: dict[triton.Config, list[float]] = {}
        for product in products(layer, tokens, weights):
            call = MoeCall(kernel, product, layer, tokens, configs, device)
            for config, ms in call.tune(configs, Store(None), "exhaustive").items():
                sums.setdefault(config, []).append(ms)
        able = [config for config, of in sums.items() if len(of) == 2]
        best[str(tokens)] = config_entry(min(able, key=lambda c: sum(sums[c])))
    return {"configs": best, "candidates": len(configs)}


def by_loop(kernel: Any, given: dict[str, Any], device: str) -> dict[str, Any]:
    """Seconds a config of a loop as vLLM's tuner has it: compile, record ten runs, replay them a hundred times."""
    layer, tokens = layer_of(given, device), given["tokens"][0]
    configs = by_chance(given["loop"], seed=0)
    weights = drawn_weights(layer, device)
    calls = [MoeCall(kernel, p, layer, tokens, configs, device) for p in products(layer, tokens, weights)]
    each = []
    for config in configs:
        begin = time.perf_counter()
        with contextlib.suppress(triton.OutOfResources):  # as vLLM's goes on to the next
            looped(calls, config)
        each.append(time.perf_counter() - begin)
    return {"each_s": each, "configs": {}}


def looped(calls: Sequence[MoeCall], config: triton.Config) -> None:
    """One config in that loop."""
    both(calls, config)
    if not torch.cuda.is_available():
        return
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GRAPH_RUNS):
            both(calls, config)
    for _ in range(WARM_REPLAYS):
        graph.replay()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(REPLAYS):
        torch.cuda.synchronize()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()


def retime(given: dict[str, Any], device: str) -> dict[str, Any]:
    """Median milliseconds of both products under each of some configs, in turns; the first once more."""
    layer, configs = layer_of(given, device), [config_of(one) for one in given["configs"]]
    with tempfile.TemporaryDirectory() as folder:
        kernel = MoePackage(given["package"], Path(given["root"])).kernel(Path(folder))
        pair = products(layer, given["tokens"], drawn_weights(layer, device))
        calls = [MoeCall(kernel, p, layer, given["tokens"], configs, device) for p in pair]
        return {**medians_in_turns([partial(both, calls, c) for c in configs], ROUNDS), "wrong": wrong(calls)}


def both(calls: Sequence[MoeCall], config: triton.Config) -> None:
    """Both products under a config."""
    for call in calls:
        call.launch(config)


def wrong(calls: Sequence[MoeCall]) -> list[float]:
    """The largest relative error of some rows of each product, against the same in float32."""
    results = []
    for call in calls:
        one, chosen = call.product, call.chosen.reshape(-1)
        wanted = call.arguments["topk_weights_ptr"].reshape(-1)
        errors = []
        for pair in range(0, one.out.shape[0], max(1, one.out.shape[0] // 16)):
            exact = one.weights[int(chosen[pair])].float() @ one.rows[pair // one.top_k].float()
            exact = exact * wanted[pair] if one.is_weighted else exact
            error = float((one.out[pair].float() - exact).abs().max() / exact.abs().max())
            errors.append(error if math.isfinite(error) else 1e9)
        results.append(max(errors))
    return results


def layer_of(given: dict[str, Any], device: str) -> MoeLayer:
    """The layer; in a dry run a small one, and of few tokens."""
    return LAYERS[given["layer"]] if device == "cuda" else MoeLayer(16, 64, 128, 2)


def by_chance(count: int, seed: int) -> list[triton.Config]:
    """So many configs of vLLM's list."""
    return random.Random(seed).sample(moe_configs(), count)


def run_arms(result: ResultFile, arguments: Any, packages: Sequence[MoePackage]) -> list[dict[str, Any]]:
    """All runs, each in a process of its own with empty caches."""
    rows: list[dict[str, Any]] = []
    begun = time.monotonic()
    for package, layer, arm, repeat in _turns(arguments, packages):
        longest = max((row["tune_s"] for row in rows), default=0.0)
        if time.monotonic() - begun + longest > arguments.seconds:
            say(f"{package.name} {layer} {arm}, repeat {repeat}: left out, the time is up")
            continue
        which = {"package": package.name, "layer": layer, "arm": arm, "repeat": repeat}
        given = {"root": str(package.root.resolve()), "tokens": arguments.tokens}
        given |= {"sample": arguments.sample, "loop": arguments.loop}
        try:
            row = run_apart(__file__, arguments, "tune", {**which, **given}, timeout_s=TIMEOUT_S)
        except Exception as error:  # one run less
            say(f"{package.name} {layer} {arm}: {type(error).__name__}: {error}"[:300])
            continue
        rows.append({**which, **row})
        result.add("runs", rows[-1])
        say(f"{package.name} {layer} {arm}: {row['tune_s']:.1f} s, measured {row.get('measured', '')}")
    return rows


def _turns(arguments: Any, packages: Sequence[MoePackage]) -> Iterator[tuple[MoePackage, str, str, int]]:
    """Ours as often as asked for, the others once."""
    for repeat in range(arguments.repeats):
        for layer in arguments.layers:
            for package in packages:
                yield package, layer, "forecast", repeat
                if repeat == 0 and arguments.sample:
                    yield package, layer, "sample", repeat
                if repeat == 0 and arguments.loop and package is packages[0]:
                    yield package, layer, "loop", repeat


def retime_all(
    result: ResultFile, arguments: Any, packages: Sequence[MoePackage], rows: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return what each arm chose at each batch, in turns, with what the package ships."""
    results = []
    device = current_device() if torch.cuda.is_available() else None
    for package in packages:
        for layer in arguments.layers:
            shipped = package.shipped(LAYERS[layer], device) if device else {}
            for tokens in arguments.tokens:
                own = [
                    r for r in rows if (r["package"], r["layer"]) == (package.name, layer) and r["configs"]
                ]
                chosen = [(r["arm"], r["configs"][str(tokens)]) for r in own]
                if shipped:
                    chosen.append(("shipped", config_entry(nearest(shipped, tokens))))
                given = {"package": package.name, "root": str(package.root.resolve()), "layer": layer}
                given |= {"tokens": tokens, "configs": [config for _, config in chosen]}
                times = run_apart(__file__, arguments, "retime", given, timeout_s=TIMEOUT_S)
                arms = [arm for arm, _ in chosen]
                one = {**given, "arms": arms, **times}
                del one["root"]
                results.append(one)
                result.add("retimed", one)
                each = ", ".join(f"{arm} {ms:.4f}" for arm, ms in zip(arms, times["ms"], strict=True))
                say(f"{package.name} {layer} {tokens}: {each} ms, errors {times['wrong']}")
    return results


def summary_of(rows: Sequence[dict[str, Any]], timed: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Seconds of each arm, and the time of our choice over that of each other's."""
    ours = [r for r in rows if r["arm"] == "forecast"]
    figures: dict[str, Any] = {
        "packages": len({r["package"] for r in rows}),
        "seconds": {},
        "measured_share": statistics.fmean(m / r["candidates"] for r in ours for m in r["measured"].values()),
    }
    for row in rows:
        name = f"{row['package']} {row['layer']}"
        figures["seconds"].setdefault(name, {}).setdefault(row["arm"], []).append(round(row["tune_s"], 2))
    loops = [s for r in rows if r["arm"] == "loop" for s in r["each_s"]]
    if loops:
        figures["loop_config_s"] = statistics.fmean(loops)
        batches = len(ours[0]["configs"])
        figures["loop_all_s"] = figures["loop_config_s"] * len(moe_configs()) * batches
        figures["loop_over_ours"] = figures["loop_all_s"] / statistics.fmean(r["tune_s"] for r in ours)
    ratios: dict[str, list[float]] = {}
    for one in timed:
        ms = {
            arm: [m for a, m in zip(one["arms"], one["ms"], strict=True) if a == arm] for arm in one["arms"]
        }
        for other in [*sorted(ms.keys() - {"forecast"}), "best"]:
            theirs = min(ms[other] if other != "best" else one["ms"])
            ratios.setdefault(other, []).extend(mine / theirs for mine in ms["forecast"])
    figures["time_over"] = {
        other: {
            "geomean": statistics.geometric_mean(of),
            "worst": max(of),
            "decisions": len(of),
            "within_2_percent": sum(ratio <= 1.02 for ratio in of),
        }
        for other, of in ratios.items()
    }
    figures["noise"] = max(max(o["ms"][0] / o["again_ms"], o["again_ms"] / o["ms"][0]) for o in timed)
    figures["largest_error"] = max(e for o in timed for e in o["wrong"])
    return figures


def main() -> int:
    command_line = parser(__doc__)
    command_line.add_argument("--vllm", type=Path, help="folder with an unpacked wheel")
    command_line.add_argument("--sglang", type=Path, help="the same of SGLang")
    command_line.add_argument("--layers", nargs="+", default=["qwen3-30b-a3b"], choices=tuple(LAYERS))
    command_line.add_argument("--tokens", type=int, nargs="+", default=[16, 256, 4096])
    command_line.add_argument("--repeats", type=int, default=3)
    command_line.add_argument(
        "--sample", type=int, default=240, help="configs by chance that are all measured; 0: none"
    )
    command_line.add_argument("--seconds", type=float, default=3600.0, help="in which a run may begin")
    command_line.add_argument(
        "--loop", type=int, default=12, help="configs in the loop of vLLM's tuner; 0: none"
    )
    arguments = parse_arguments(command_line)
    device = "cpu" if arguments.null else "cuda"
    if arguments.child:
        with null_device() if arguments.null else contextlib.nullcontext():
            print(json.dumps({"tune": tune, "retime": retime}[arguments.child](arguments.given, device)))
        return 0
    result = ResultFile(arguments, CLAIM)
    folders = {"vllm": arguments.vllm, "sglang": arguments.sglang}
    packages = [MoePackage(name, root) for name, root in folders.items() if root is not None]
    result.add("versions", {package.name: package.version for package in packages})
    rows = run_arms(result, arguments, packages)
    timed = retime_all(result, arguments, packages, rows)
    result.finish(summary_of(rows, timed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
