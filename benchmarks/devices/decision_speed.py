"""Seconds and memory of forecasts, and compile seconds of decisions for AMD's targets, beside another tree's.

    python -m benchmarks.devices.decision_speed --out FILE.json --beside FOLDER

`FOLDER` is another checkout of this project (`git worktree add FOLDER COMMIT`). Both are asked in processes of their
own, in turns, on the CPU: a forecast of 1,000 configs of an attention kernel, and a decision by the null device over
each of ten lists. Times of the processor, not of the wall; times of launches are invented.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LISTS = (
    *(("matmul_fp16", model) for model in ("mi300x", "mi355x", "rx 7900 xtx")),
    *(("attention_64", model) for model in ("mi300x", "mi355x")),
    *(("matmul_fp16_1000", "mi300x"), ("matmul_gated", "mi300x"), ("matmul_split_k", "mi300x")),
    *(("matmul_int8", "mi250x"), ("attention_128_causal", "mi300x")),
)
CONFIGS, TURNS = 16, 3
_SUBREAPER = 36
"""Linux' `PR_SET_CHILD_SUBREAPER`: orphans of a child are left to this process, which then knows what they took."""


def cases() -> dict[str, Any]:
    """The kernels of this tree, whichever packages they are tuned by."""
    spec = spec_from_file_location(
        "compile_facts_kernels", ROOT / "benchmarks" / "kernels" / "compile_facts.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return dict(module.CASES)


def forecast(texts: dict[str, str]) -> dict[str, float]:
    """Milliseconds of a forecast of 1,000 configs whose IR is new and known, and the process' peak MB."""
    from forecast_autotune.features.devices import datasheet_device
    from forecast_autotune.features.ttir.extraction import assignment_key
    from forecast_autotune.records import Argument, Candidate, Config, Kernel, Problem
    from forecast_autotune.surrogates.default import default_surrogate
    from forecast_autotune.surrogates.protocol import Query

    tiles = [dict(pair.split("=") for pair in name.split()) for name in texts]
    keyed = {
        assignment_key({n: int(v) for n, v in tile.items()}): texts[name]
        for tile, name in zip(tiles, texts, strict=True)
    }
    candidates = [
        Candidate(Config.of({n: int(v) for n, v in tile.items()}, num_warps=warps, num_stages=stages))
        for tile in tiles
        for warps in (2, 4, 8, 16)
        for stages in range(1, 11)
    ]
    tensors = [Argument(n, "tensor", "float16", (4096, 4096), (4096, 1), True) for n in "qkvo"]
    scalars = [Argument(n, "scalar", "i32", value=4096) for n in "Ns"]
    given = [*tensors, *scalars, Argument("scale", "scalar", "fp32", value=0.125)]
    device = datasheet_device("h200")
    kernel = Kernel("attention", "triton", "attention", "attention")
    problem = Problem.of(kernel, given, device, key=[], grid=(32, 128, 1), toolchain={"triton": "3.9.0"})
    took = []
    first = Query(problem, candidates[:1], {}, ttir=keyed)
    default_surrogate().forecast(first)  # which imports and reads what it needs
    for _ in range(6):
        query, start = Query(problem, candidates, {}, ttir=keyed), time.process_time()
        default_surrogate().forecast(query)
        took.append(1e3 * (time.process_time() - start))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0
    return {"new_ms": took[0], "known_ms": min(took[1:]), "peak_mb": peak, "configs": len(candidates)}


def decision(name: str, model: str) -> dict[str, float]:
    """The compilations of a null device's decision over configs of a case."""
    import torch
    import triton

    from forecast_autotune import autotune
    from forecast_autotune.features.devices import datasheet_device
    from forecast_integrations.triton.null_device import null_device

    case = cases()[name]
    drawn = case.configs()
    random.Random(name).shuffle(drawn)
    listed = [triton.Config(meta, num_warps=w, num_stages=s) for meta, w, s in drawn[:CONFIGS]]
    given = [
        torch.empty(a.shape, dtype=a.dtype) if isinstance(a, torch.Tensor) else a for a in case.arguments
    ]
    with null_device(device=datasheet_device(model)):
        tuned = autotune(configs=listed, key=[], store=False)(case.fn)
        start = processor_s(resource.RUSAGE_SELF)
        tuned[(1024,)](*given, **case.fixed)
        cost = tuned.decision.cost
        return {"imports_s": start, "compile_s": cost.compile_s, "compiled": cost.compiled}


def processor_s(who: int) -> float:
    """Seconds of the processor that this process, or those that it has waited for, took."""
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def asked(root: Path, part: str, given: Any) -> dict[str, float]:
    """The output of a process that has the packages of `root`, and the seconds of the processor that all of it took."""
    packages = [str(root / folder) for folder in ("", "integrations", "harness", "train")]
    with tempfile.TemporaryDirectory() as cache:
        own = {
            "PYTHONPATH": os.pathsep.join(packages),
            "TRITON_CACHE_DIR": cache,
            "TRITON_DEFAULT_FP_FUSION": "1",
        }
        before, pipe = processor_s(resource.RUSAGE_CHILDREN), subprocess.PIPE
        child = subprocess.Popen(
            [sys.executable, __file__, part],
            stdin=pipe, stdout=pipe, env={**os.environ, **own}, text=True, cwd=cache, start_new_session=True,
        )  # fmt: skip
        said, _ = child.communicate(json.dumps(given))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        with contextlib.suppress(
            ChildProcessError
        ):  # workers that it left behind have become this process' own
            while os.waitpid(-1, 0):
                pass
    if child.returncode:
        raise SystemExit(f"{part} of {root} failed")
    result = dict(json.loads(said.splitlines()[-1]))
    result["processor_s"] = processor_s(resource.RUSAGE_CHILDREN) - before - result.pop("imports_s", 0.0)
    return result


def main() -> int:
    from benchmarks.devices.compile_facts import device_of
    from benchmarks.lib.result_files import ResultFile, parse_arguments, parser, say
    from forecast_autotune.features.trace import KernelTracer
    from forecast_integrations.triton.null_device import target_of

    command_line = parser(__doc__)
    command_line.add_argument("--beside", type=Path, required=True, help="another checkout")
    command_line.add_argument("--lists", type=int, default=len(LISTS))
    arguments = parse_arguments(command_line, on_host=True)
    result = ResultFile(arguments, "decision_speed")
    ctypes.CDLL(None).prctl(_SUBREAPER, 1)
    trees = {"here": ROOT, "beside": arguments.beside.resolve()}
    case = cases()["attention_128_causal"]
    tracer, sizes = KernelTracer.of(case.fn, target_of(device_of("cuda:90"))), (16, 32, 64, 128, 256)
    texts = {
        f"BM={m} BN={n}": tracer.text(case.arguments, {"BM": m, "BN": n, **case.fixed})
        for m in sizes
        for n in sizes
    }
    for _ in range(TURNS):
        for tree, root in trees.items():
            result.add(f"forecast {tree}", asked(root, "forecast", texts))
    ratios = []
    for name, model in LISTS[: arguments.lists]:
        row = {tree: asked(root, "decision", [name, model]) for tree, root in trees.items()}
        ratios.append(row["beside"]["processor_s"] / row["here"]["processor_s"])
        result.add("decisions", {"kernel": name, "model": model, **row})
        say(f"{name} {model}: {ratios[-1]:.2f}x {row}")
    raw = result.data["raw"]
    least = {
        tree: {n: min(one[n] for one in raw[f"forecast {tree}"]) for n in ("new_ms", "known_ms", "peak_mb")}
        for tree in trees
    }
    total = {
        f"{n} {tree}": sum(row[tree][n] for row in raw["decisions"])
        for n in ("processor_s", "compile_s")
        for tree in trees
    }
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    result.finish({"forecast": least, "decisions": total, "mean_ratio": mean})
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] in (["forecast"], ["decision"]):
        given = json.load(sys.stdin)
        print(json.dumps(forecast(given) if sys.argv[1] == "forecast" else decision(*given)))
        sys.exit(0)
    sys.exit(main())
