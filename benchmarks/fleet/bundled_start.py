"""Claim: with a bundle from another machine, a program's first pass measures nothing and compiles nothing.

    python -m benchmarks.fleet.bundled_start --null --out benchmarks/results/bundled_start_null.json

Every step is a process with caches of its own. A program meets its keys in `skip` mode, which records them; `warm`
tunes what was recorded, on another machine state, without the program; a pass in `frozen` mode compiles the winners;
`store bundle --compiled` writes the bundle. On a third machine state `store install` puts the compiled kernels into
Triton's cache, and the first pass is counted: decisions that measured, kernels that were compiled. Beside it, the
seconds of the same first pass with nothing but the kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.lib import result_files
from benchmarks.lib.processes.child_processes import child_command, child_environment, last_object


def phase(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """What a child does; see the module."""
    import contextlib

    from forecast_integrations.triton.null_device import null_device
    from forecast_integrations.triton.patch import patch_triton

    with null_device() if given["null"] else contextlib.nullcontext():
        if name == "commands":
            from forecast_autotune.commands import main

            return {"status": [main([*words]) for words in given["commands"]]}
        from benchmarks.lib.fleet.served_kernels import first_pass
        from forecast_autotune.store import Store

        patch_triton()
        binaries = cubins()
        begin = time.perf_counter()
        keys = first_pass(given["keys"])
        seconds = time.perf_counter() - begin
        store = Store(Path(os.environ["FORECAST_AUTOTUNE_CACHE_DIR"]))
        return {
            "keys": keys,
            "seconds": round(seconds, 3),
            "compiled": len(cubins() - binaries),
            "measured": sum(len(table.measurements) for table in store.tables()),
            "misses": len(store.misses.all()),
        }


def cubins() -> set[Path]:
    return set(Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin"))


def in_process(machine: Path, name: str, given: dict[str, Any], **variables: str) -> dict[str, Any]:
    """One step on a machine state, in a process of its own."""
    cache = str(machine / variables.pop("triton", "triton"))
    told = {f"FORECAST_AUTOTUNE_{k}": v for k, v in variables.items()}
    env = child_environment(machine, TRITON_CACHE_DIR=cache, TRITON_DEFAULT_FP_FUSION="1", **told)
    command = child_command(__file__, argparse.Namespace(null=given["null"]), name, given)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=3600)
    if done.returncode:
        raise RuntimeError(f"{name} failed: {done.stderr[-2000:]}")
    return last_object(done.stdout)


def run(folder: Path, keys: int, null: bool) -> dict[str, Any]:
    """All steps; see the module."""
    given = {"keys": keys, "null": null}
    production, build, fresh, plain = (folder / name for name in ("production", "build", "fresh", "plain"))
    met = in_process(production, "pass", given, MODE="skip")
    warm = ["warm", "--misses", str(production / "store")]
    begin = time.perf_counter()
    warmed = in_process(build, "commands", {**given, "commands": [warm]})
    warm_s = time.perf_counter() - begin
    in_process(build, "pass", given, MODE="frozen", triton="winners")
    bundle = str(folder / "bundle")
    making = ["store", "bundle", bundle, "--compiled", str(build / "winners")]
    in_process(build, "commands", {**given, "commands": [making]})
    installed = in_process(fresh, "commands", {**given, "commands": [["store", "install", bundle]]})
    first = in_process(fresh, "pass", given, MODE="frozen", STORES=bundle)
    without = in_process(plain, "pass", given, MODE="tune")
    return {
        "keys": first["keys"],
        "missed": met["misses"],
        "warm_s": round(warm_s, 1),
        "statuses": [*warmed["status"], *installed["status"]],
        "measured": first["measured"],
        "compiled": first["compiled"],
        "missed_with_bundle": first["misses"],
        "first_pass_s": first["seconds"],
        "first_pass_without_s": without["seconds"],
        "measured_without": without["measured"],
        "compiled_without": without["compiled"],
    }


def main() -> int:
    parser = result_files.parser(__doc__)
    parser.add_argument("--keys", type=int, default=10, help="sizes of each of the three kernels")
    arguments = result_files.parse_arguments(parser)
    if arguments.child:
        print(json.dumps(phase(arguments.child, arguments.given)))
        return 0
    report = result_files.ResultFile(arguments, "bundled_start", 0)
    with tempfile.TemporaryDirectory(prefix="bundled-start-") as name:
        found = run(Path(name), arguments.keys, arguments.null)
    report.finish(found)
    bad = found["measured"] or found["compiled"] or found["missed_with_bundle"] or any(found["statuses"])
    return int(bool(bad or found["missed"] != found["keys"]))


if __name__ == "__main__":
    sys.exit(main())
