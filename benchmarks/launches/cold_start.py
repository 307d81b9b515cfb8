"""Claim: after `warm`, a fresh process compiles nothing that its requests were recorded, or forecast, to need.

    python -m benchmarks.launches.cold_start --out benchmarks/results/cold_start.json [--requests 200]

Three programs on kernels of installed libraries, unchanged: prefill and decode of a model of fla, a transformer's block
on operators of flag_gems, training steps with liger. Requests have drawn lengths. Arms, each a fresh process:
`without` (an empty cache of Triton's), `recorded` (`warm` of the records of 20 other requests, without forecasts),
`forecast` (`warm` as it is), and `floor` (without us, the cache that `without` left: programs without tuners alone, as
these would time anew). `--null` runs all of it on the CPU: it shows that the script works.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import random
import statistics
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.lib.processes.child_processes import child_command, child_environment, last_object
from benchmarks.lib.result_files import ResultFile, parse_arguments, parser, say

PHASES = (("record", "import"), ("warm recorded",), ("recorded",), ("forecast",))
"""Steps of all programs at the same time, each with one core; `without` runs beside them, as it takes longest."""
RECORDED = 20
"""Requests that are recorded; their lengths are drawn by another seed. `floor` has as many of the others."""
UNTUNED = ("flag_gems", "liger")


def fla_model() -> Callable[[int], object]:
    """A request is a prompt of so many tokens and eight tokens of an answer."""
    import torch
    from fla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM

    config = GatedDeltaNetConfig(
        hidden_size=512, num_hidden_layers=4, num_heads=4, head_dim=128, expand_v=1.0,
        vocab_size=8192, fuse_cross_entropy=False,
    )  # fmt: skip
    model = GatedDeltaNetForCausalLM(config).to("cuda", torch.bfloat16).eval()

    @torch.inference_mode()
    def request(length: int) -> object:
        result = model(torch.randint(8192, (1, length), device="cuda"), use_cache=True)
        for _ in range(8):
            token = torch.randint(8192, (1, 1), device="cuda")
            result = model(token, past_key_values=result.past_key_values, use_cache=True)
        return result.logits

    return request


def flag_gems_block() -> Callable[[int], object]:
    """A request is one pass of so many tokens through a block whose operators are flag_gems'."""
    import torch
    from flag_gems import apply_rotary_pos_emb
    from flag_gems import ops as gems
    from flag_gems.fused import fused_add_rms_norm, silu_and_mul

    width, heads = 1024, 8
    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.02).to("cuda", torch.bfloat16)

    table, scale = weight(8192, width), weight(width)
    mixed, out, up, down = (
        weight(width, 3 * width),
        weight(width, width),
        weight(width, 8 * width),
        weight(4 * width, width),
    )
    angles = (
        torch.arange(4096, device="cuda")[:, None] * 1e-3 * torch.arange(width // heads // 2, device="cuda")
    )
    cosine, sine = angles.cos().float(), angles.sin().float()

    def request(length: int) -> object:
        tokens = torch.randint(8192, (length,), device="cuda")
        x = gems.embedding(table, tokens)
        y = gems.rms_norm(x, [width], scale)
        q, k, v = (part.reshape(length, heads, -1).contiguous() for part in (y @ mixed).chunk(3, dim=-1))
        q, k = apply_rotary_pos_emb(q, k, cosine, sine, torch.arange(length, device="cuda"))
        scores = (q.transpose(0, 1) @ k.permute(1, 2, 0)).contiguous()
        shares = gems.softmax(gems.mul(scores, (width // heads) ** -0.5), -1)
        y = (shares @ v.transpose(0, 1)).transpose(0, 1).reshape(length, width) @ out
        y, x = fused_add_rms_norm(y.contiguous(), x, [width], scale)
        gate, rest = (part.contiguous() for part in (y @ up).chunk(2, dim=-1))
        x = gems.add(x, silu_and_mul(gate, rest) @ down)
        return gems.argmax(gems.log_softmax(x @ table.T, -1), dim=-1)

    return request


def liger_training() -> Callable[[int], object]:
    """A request is one training step on a sequence of so many tokens."""
    import torch
    import transformers
    from liger_kernel.transformers import apply_liger_kernel_to_qwen2

    apply_liger_kernel_to_qwen2()
    config = transformers.Qwen2Config(
        hidden_size=512, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=8192, max_position_embeddings=4096,
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config).to("cuda", torch.bfloat16).train()

    def request(length: int) -> object:
        tokens = torch.randint(8192, (1, length), device="cuda")
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        model.zero_grad()
        return loss.detach()

    return request


IMPORTS = {
    "fla": ["fla.models"],
    "flag_gems": ["flag_gems"],
    "liger": ["transformers.models.qwen2.modeling_qwen2", "liger_kernel.transformers"],
}
"""The imports of each program, to which the memory of `warm` is compared."""
PROGRAMS = {"fla": fla_model, "flag_gems": flag_gems_block, "liger": liger_training}


def lengths(count: int, seed: int) -> list[int]:
    """Lengths of requests, some of them short: uniform in the logarithm from 1 to 2,048."""
    generator = random.Random(seed)
    return [round(2 ** generator.uniform(0, 11)) for _ in range(count)]


def serve(name: str, sizes: list[int]) -> dict[str, Any]:
    """Serve requests in this process; seconds of each, and what Triton compiled or found meanwhile."""
    import torch
    from triton import knobs

    compiled: list[list[Any]] = []
    previous = knobs.compilation.listener

    def listen(**compilation: Any) -> None:
        if previous is not None:
            previous(**compilation)
        kernel, fresh = compilation["src"].name, not compilation["cache_hit"]
        compiled.append([kernel, fresh, compilation["times"].total * 1e-6 if fresh else 0.0, len(seconds)])

    seconds: list[float] = []
    request = PROGRAMS[name]()
    a = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16)
    float((a @ a).sum())  # the device's context and the libraries of torch are the program's own start
    knobs.compilation.listener = listen
    for size in sizes:
        began = time.perf_counter()
        request(size)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    fresh = [one for one in compiled if one[1]]
    return {
        "seconds": seconds,
        "fresh": len(fresh),
        "loaded": len(compiled) - len(fresh),
        "compiler_s": sum(one[2] for one in fresh),
        "compiled": [[one[0], one[3]] for one in fresh],
    }


def warm_recorded(store: Path) -> dict[str, Any]:
    """Compile what is recorded and nothing that is forecast, as `warm` would."""
    from forecast_autotune.settings import Settings
    from forecast_autotune.store import Store
    from forecast_integrations.commands.warm import binaries_of
    from forecast_integrations.triton.compile.ahead import compile_ahead

    listed = [one for one in binaries_of(Store(store), None) if not one.forecast]
    began = time.perf_counter()
    compile_ahead(listed, Settings.from_environment().worker_count())
    return {
        "seconds": time.perf_counter() - began,
        "serial_s": sum(one.seconds for one in listed),
        "troubles": [[one.compilation.name, one.trouble] for one in listed if one.trouble],
    }


def peak_of(process: subprocess.Popen[str]) -> int:
    """Peak memory of a process in bytes, its children's left out, read until it ends."""
    peak = 0
    while process.poll() is None:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8").splitlines()
            sizes = [line.split()[1] for line in lines if line.startswith(("VmHWM:", "VmRSS:"))]
            peak = max(peak, *(int(size) << 10 for size in sizes), 0)
        time.sleep(0.05)
    return peak


def run_child(command: list[str], env: dict[str, str], log: Path) -> dict[str, Any]:
    """Run a child to its end; the object that it printed, its wall seconds and peak memory.

    Raises `RuntimeError` where it printed none.
    """
    began = time.perf_counter()
    with log.open("w") as errors, ThreadPoolExecutor(1) as pool:
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=errors, text=True)
        peak = pool.submit(peak_of, process)
        text = process.communicate()[0]
    try:
        result = last_object(text) if "\n{" in f"\n{text}" else {}
    except ValueError:
        result = json.loads(text)
    if not result:
        raise RuntimeError(f"{command} ended with {process.returncode}: {log.read_text()[-2000:]}")
    return result | {"wall_s": time.perf_counter() - began, "peak_bytes": peak.result()}


def warm_report(report: dict[str, Any]) -> dict[str, Any]:
    """The figures of what `warm` says."""
    rows = report["compilations"]
    good = [row for row in rows if "trouble" not in row]
    return {
        "wall_s": report["wall_s"],
        "peak_bytes": report["peak_bytes"],
        "serial_s": sum(row["seconds"] for row in good),
        "recorded": sum(row["probability"] == 1 for row in good),
        "forecast": sum(row["probability"] < 1 for row in good),
        "troubles": [[row["kernel"], row["trouble"]] for row in rows if "trouble" in row],
    }


def measure(name: str, arguments: Namespace, folder: Path, step: str) -> dict[str, Any]:
    """One step of a program, in a process of its own."""
    more = {"FLAGGEMS_CACHE_DIR": str(folder / "flag_gems"), "PYTHONWARNINGS": "ignore"}
    cache = "without" if step == "floor" else step.split()[-1]
    if arguments.null:
        more |= {"GEMS_VENDOR": "nvidia", "TRITON_DEFAULT_FP_FUSION": "1"}
    env = child_environment(folder, **more, TRITON_CACHE_DIR=str(folder / f"triton-{cache}"))

    def child(role: str, **given: Any) -> list[str]:
        return child_command(__file__, arguments, role, {"program": name, **given})

    if step == "warm recorded":
        command = child("warm_recorded", store=env["FORECAST_AUTOTUNE_CACHE_DIR"])
    elif step == "warm forecast":
        command = [sys.executable, "-m", "forecast_autotune", "warm", "--json"]
        command = child("warm") if arguments.null else command
    elif step == "import":
        command = child("import")
    elif step == "record":
        command = child("serve", count=min(RECORDED, arguments.requests), seed=2)
    else:
        count = min(RECORDED, arguments.requests) if step == "floor" else arguments.requests
        command = child("serve", count=count, seed=1)
    if step in ("record", "recorded", "forecast"):
        command = [sys.executable, "-m", "forecast_autotune", "run", *command[1:]]
    if step in ("recorded", "forecast"):
        env |= {"FORECAST_AUTOTUNE_MODE": "frozen", "FORECAST_AUTOTUNE_ON_MISS": "forecast"}
    result = run_child(command, env, folder / f"{step.replace(' ', '-')}.log")
    return warm_report(result) if step == "warm forecast" else result


def summary_of(programs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The table: compilations in the requests, first and median request, and what `warm` took."""
    summary: dict[str, Any] = {}
    for name, steps in programs.items():
        table: dict[str, Any] = {}
        for step in ("without", "recorded", "forecast", "floor"):
            if step not in steps:
                continue
            row, median = steps[step], statistics.median(steps[step]["seconds"])
            table[step] = {key: row[key] for key in ("fresh", "loaded", "compiler_s")}
            table[step] |= {"first_s": row["seconds"][0], "median_s": median}
            table[step]["first_by_median"] = row["seconds"][0] / median
        warmed = steps["warm forecast"]
        table["warm"] = warmed | {
            "troubles": len(warmed["troubles"]),
            "replaced_s": table["without"]["compiler_s"],
            "speedup": table["without"]["compiler_s"] / warmed["wall_s"],
            "memory_by_import": warmed["peak_bytes"] / steps["import"]["peak_bytes"],
        }
        summary[name] = table
    return summary


def main() -> None:
    """Run the stages, or one child."""
    command_line = parser(__doc__)
    command_line.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    command_line.add_argument("--requests", type=int, default=200)
    arguments = parse_arguments(command_line)
    if arguments.child:
        if (result := _child(arguments)) is not None:
            print(json.dumps(result), flush=True)
        return
    file = ResultFile(arguments, "cold-start", 1)
    programs: dict[str, dict[str, Any]] = {name: {} for name in arguments.programs}
    mutex = threading.Lock()
    with TemporaryDirectory() as top:
        folders = {name: Path(top) / name for name in programs}
        for folder in folders.values():
            folder.mkdir()

        def run(job: tuple[str, str]) -> None:
            name, step = job
            began = time.perf_counter()
            result = measure(name, arguments, folders[name], step)
            with mutex:
                programs[name][step] = result
                say(f"{name} {step}: {time.perf_counter() - began:.1f} s")
                file.put(name, [programs[name]])

        without = {name: ["without", *(["floor"] if name in UNTUNED else [])] for name in programs}
        with ThreadPoolExecutor(1 if arguments.null else 4 * len(programs)) as pool:
            slowest = [pool.submit(lambda n=name: [run((n, s)) for s in without[n]]) for name in programs]
            for together in PHASES:
                list(pool.map(run, [(name, step) for step in together for name in programs]))
                if together == ("warm recorded",):
                    for name in programs:
                        run((name, "warm forecast"))
            for step in slowest:
                step.result()
    file.finish(summary_of(programs))


def _child(arguments: Namespace) -> dict[str, Any] | None:
    given, role = arguments.given, arguments.child
    with contextlib.ExitStack() as stack:
        if arguments.null:
            from benchmarks.lib.zoo.stand_ins import cuda_on_cpu

            stack.enter_context(cuda_on_cpu())
        if role == "serve":
            return serve(given["program"], lengths(given["count"], given["seed"]))
        if role == "warm_recorded":
            return warm_recorded(Path(given["store"]))
        if role == "import":
            for module in IMPORTS[given["program"]]:
                importlib.import_module(module)
            return {"imported": True}
        from forecast_autotune.commands import main as command_line

        command_line(["warm", "--json"])
    return None


if __name__ == "__main__":
    main()
