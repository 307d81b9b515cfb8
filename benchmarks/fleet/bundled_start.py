"""Claim: with a bundle from another machine, a program's first pass measures nothing and compiles nothing.

    python -m benchmarks.fleet.bundled_start --null --out benchmarks/results/bundled_start_null.json
    python -m benchmarks.fleet.bundled_start --libraries --out benchmarks/results/bundled_start_libraries.json

Every step is a process with caches of its own. A program meets its keys in `skip` mode, which records them; `warm`
tunes what was recorded, on another machine state, without the program; a pass in `frozen` mode compiles the winners;
`store bundle --compiled` writes the bundle. On a third machine state `store install` puts the compiled kernels into
Triton's cache, and the first pass is counted: decisions that measured, kernels that were compiled. Beside it, the
seconds of the same first pass with nothing but the kernels.

The program launches three kernels of this repository at some sizes or, with `--libraries`, runs operations of
fla-core and liger-kernel, forward and backward (`benchmarks.lib.libraries.workloads`). Keys that `warm` cannot tune
without the program are tuned by running it in `tune` mode, and counted.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.lib import result_files
from benchmarks.lib.environment import ROOT
from benchmarks.lib.libraries.installation import install_libraries, library_environment
from benchmarks.lib.processes.child_processes import child_command, child_environment, last_object
from benchmarks.lib.result_files import say

WORKLOADS = (
    "fla/cumulative_sums",
    "fla/delta_attention_gate",
    "fla/gated_norm",
    "fla/layer_norm",
    "fla/linear_attention",
    "fla/logsigmoid",
    "fla/mean_pooling",
    "fla/rms_norm",
    "fla/rotary_embedding",
    "fla/rwkv7",
    "fla/softmax",
    "fla/swish",
    "fla/token_shift",
    "fla/unit_norm",
    "liger/dynamic_tanh",
    "liger/gated_mlp",
)
"""With `--libraries`: how the names of its operations begin."""


def phase(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return what a child does; see the module."""
    from forecast_integrations.triton.null_device import null_device
    from forecast_integrations.triton.patch import patch_triton

    with null_device() if given["null"] else contextlib.nullcontext():
        if name == "commands":
            return _run_commands(given["commands"])
        from forecast_autotune.store import Store

        patch_triton()
        binaries = cubins()
        begin = time.perf_counter()
        result = _run_program(given)
        seconds = time.perf_counter() - begin
        store = Store(Path(os.environ["FORECAST_AUTOTUNE_CACHE_DIR"]))
        return {
            **result,
            "seconds": round(seconds, 3),
            "compiled": len(cubins() - binaries),
            "measured": sum(len(table.measurements) for table in store.tables()),
            "misses": len(store.misses.all()),
        }


def _run_commands(commands: list[list[str]]) -> dict[str, Any]:
    """Each command's exit status, and what it printed where that is one JSON object."""
    from forecast_autotune.commands import main

    result: dict[str, Any] = {"status": [], "printed": []}
    for words in commands:
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            result["status"].append(main([*words]))
        printed = text.getvalue().strip()
        result["printed"].append(json.loads(printed) if printed.startswith("{") else {})
    return result


def _run_program(given: dict[str, Any]) -> dict[str, Any]:
    """Meet every key once: how many there are, and what failed."""
    if not given["only"]:
        from benchmarks.lib.fleet.served_kernels import first_pass

        return {"keys": first_pass(given["keys"]), "failed": []}
    from benchmarks.lib.fleet.library_program import first_pass_of_libraries

    return first_pass_of_libraries(given["only"])


def cubins() -> set[Path]:
    return set(Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin"))


def in_process(machine: Path, name: str, given: dict[str, Any], **variables: str) -> dict[str, Any]:
    """One step on a machine state, in a process of its own."""
    cache = str(machine / variables.pop("triton", "triton"))
    result = {f"FORECAST_AUTOTUNE_{k}": v for k, v in variables.items()}
    answer = library_environment(Path(given["site"]), machine, [ROOT]) if given["site"] else {}
    env = child_environment(machine, **answer, TRITON_CACHE_DIR=cache, TRITON_DEFAULT_FP_FUSION="1", **result)
    command = child_command(__file__, argparse.Namespace(null=given["null"]), name, given)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=3600)
    if done.returncode:
        raise RuntimeError(f"{name} failed: {done.stderr[-2000:]}")
    for line in done.stdout.splitlines():
        if not line.startswith("{"):
            print(line, flush=True)
    return last_object(done.stdout)


Steps = dict[str, dict[str, Any]]
"""Results of each step, by its name."""


def run(folder: Path, program: dict[str, Any], on_end: Callable[[str, dict[str, Any]], None]) -> Steps:
    """All steps; see the module. `on_end` hears of each as it ends."""
    production, build, fresh, plain = (folder / name for name in ("production", "build", "fresh", "plain"))
    steps: Steps = {}

    def step(name: str, machine: Path, commands: list[list[str]] | None = None, **variables: str) -> None:
        begin = time.perf_counter()
        if commands is None:
            result = in_process(machine, "pass", program, **variables)
        else:
            result = in_process(machine, "commands", {**program, "commands": commands})
        steps[name] = {**result, "step_s": round(time.perf_counter() - begin, 1)}
        on_end(name, steps[name])

    bundle = str(folder / "bundle")
    step("met", production, MODE="skip")
    step("warm", build, [["warm", "--json", "--misses", str(production / "store")]])
    if steps["warm"]["printed"][0].get("failed", 0):
        step("warm_up", build, MODE="tune")
    step("winners", build, MODE="frozen", triton="winners")
    step("bundle", build, [["store", "bundle", bundle, "--compiled", str(build / "winners")]])
    step("install", fresh, [["store", "install", bundle]])
    step("first", fresh, MODE="frozen", STORES=bundle)
    step("without", plain, MODE="tune")
    return steps


def summarise(steps: Steps) -> dict[str, Any]:
    """The figures; None for what a step that is not there would have told."""
    warm, first, without = steps["warm"]["printed"][0], steps["first"], steps.get("without", {})
    passes = [steps[name] for name in ("met", "first", "without") if name in steps]
    return {
        "keys": first["keys"],
        "missed": steps["met"]["misses"],
        "warm_s": steps["warm"]["step_s"],
        "warmed": warm.get("tuned"),
        "not_warmed": warm.get("failed"),
        "statuses": [status for name in ("bundle", "install") for status in steps[name]["status"]],
        "failed": sorted({name for one in passes for name in one["failed"]}),
        "measured": first["measured"],
        "compiled": first["compiled"],
        "missed_with_bundle": first["misses"],
        "first_pass_s": first["seconds"],
        "undecided_pass_s": steps["met"]["seconds"],
        "compiled_undecided": steps["met"]["compiled"],
        "first_pass_without_s": without.get("seconds"),
        "measured_without": without.get("measured"),
        "compiled_without": without.get("compiled"),
    }


def main() -> int:
    parser = result_files.parser(__doc__)
    parser.add_argument("--keys", type=int, default=10, help="sizes of each of the three kernels")
    parser.add_argument("--libraries", action="store_true", help="run operations of public libraries instead")
    parser.add_argument(
        "--only", nargs="+", default=list(WORKLOADS), metavar="NAME", help="of these operations"
    )
    parser.add_argument("--wheels", type=Path, help="a folder of wheels, for a machine without network")
    parser.add_argument(
        "--site", type=Path, help="where the libraries are, or go (default: a temporary folder)"
    )
    arguments = result_files.parse_arguments(parser)
    if arguments.child:
        print(json.dumps(phase(arguments.child, arguments.given)))
        return 0
    report = result_files.ResultFile(arguments, "bundled_start", 0)
    program: dict[str, Any] = {"keys": arguments.keys, "null": arguments.null, "only": [], "site": ""}
    with tempfile.TemporaryDirectory(prefix="bundled-start-", ignore_cleanup_errors=True) as name:
        if arguments.libraries:
            site = install_libraries((arguments.site or Path(name) / "site").absolute(), arguments.wheels)
            program |= {"only": arguments.only, "site": str(site)}

        def report_step(step: str, figures: dict[str, Any]) -> None:
            report.add("steps", {"step": step, **figures})
            say(f"{step}: {figures['step_s']} s, {str(figures)[:300]}")

        result = summarise(run(Path(name), program, report_step))
    report.finish(result)
    bad = result["measured"] or result["compiled"] or result["missed_with_bundle"] or any(result["statuses"])
    return int(bool(bad or result["failed"] or result["missed"] != result["keys"]))


if __name__ == "__main__":
    sys.exit(main())
