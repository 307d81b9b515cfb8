"""Claim: a large cache of Kernel Tuner comes into a store in a fraction of the time and the memory of an earlier build.

Both builds import the same generated cache of configs into a fresh store of their own, one after the other, and then
once more. `--beside` is a worktree of the earlier build; its own code runs, with the packages of this environment.

    git worktree add --detach /tmp/before d52b1ec4
    python -m benchmarks.store.import_speed --beside /tmp/before --out benchmarks/results/import_speed.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.lib.environment import host_environment

ROOT = Path(__file__).parents[2]
_SIZES = {"block_size_x": 64, "TILE": 64, "UNROLL": 64}


def write_cache(path: Path, configs: int) -> None:
    """A cache as Kernel Tuner writes it, five runs a config; a twentieth of the configs failed."""
    draw = random.Random(74)
    header = {"device_name": "NVIDIA A100", "kernel_name": "conv", "problem_size": [4096, 4096]}
    header |= {"tune_params_keys": list(_SIZES), "tune_params": {}, "objective": ["time"], "cache": {}}
    with path.open("w") as stream:
        stream.write(json.dumps(header, indent="")[:-3])
        for number in range(configs):
            row: dict[str, Any] = {}
            rest = number
            for name, size in _SIZES.items():
                rest, row[name] = divmod(rest, size)
            key = ",".join(map(str, row.values()))
            if number % 20 == 19:
                row["time"] = "CompilationFailedConfig"  # as up to release 1.3: both builds read that
            else:
                times = [draw.uniform(0.1, 0.3) for _ in range(5)]
                row |= {"time": sum(times) / 5, "times": times}
            row |= {"compile_time": draw.uniform(20, 200), "verification_time": 0, "benchmark_time": 8.5}
            row["timestamp"] = f"2026-11-29 15:52:{number % 60:02d}.{number % 1000000:06d}+00:00"
            stream.write(f"{',' if number else ''}\n{json.dumps(key)}: {json.dumps(row)}")
        stream.write("}\n}")


def measure(tree: Path, cache: Path, store: Path) -> dict[str, Any]:
    """Wall seconds, processor seconds and peak memory of one import by the code in a worktree."""
    path = os.pathsep.join(str(tree / part) for part in ("", "integrations", "harness", "train"))
    command = [
        sys.executable,
        "-m",
        "forecast_autotune",
        "import",
        str(cache),
        "--store",
        str(store),
        "--json",
    ]
    begin = time.perf_counter()
    child = subprocess.Popen(
        command,
        cwd=tree,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdout is not None
    text = child.stdout.read()
    _, status, used = os.wait4(child.pid, 0)
    assert status == 0, child.stderr.read() if child.stderr else ""
    return {
        "seconds": time.perf_counter() - begin,
        "processor_seconds": used.ru_utime + used.ru_stime,
        "peak_mb": used.ru_maxrss / 1000.0,
        "added": json.loads(text)["added"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--beside", type=Path, required=True, help="worktree of the earlier build")
    parser.add_argument("--configs", type=int, default=200_000)
    parser.add_argument("--before", type=int, default=2, help="imports by the earlier build")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    builds = {"now": ROOT, "before": options.beside.absolute()}
    commit = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"],
        cwd=options.beside,
        capture_output=True,
        text=True,
        check=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache.json"
        write_cache(cache, options.configs)
        times = {"now": 2, "before": options.before}
        results = {
            name: [measure(tree, cache, Path(folder) / name) for _ in range(times[name])]
            for name, tree in builds.items()
        }
        about = {"configs": options.configs, "file_mb": cache.stat().st_size / 1e6}
    data = {
        "environment": host_environment(),
        **about,
        "before_commit": commit.stdout.strip(),
        "runs": results,
    }
    options.out.write_text(json.dumps(data, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
