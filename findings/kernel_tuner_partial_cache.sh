#!/usr/bin/env bash
# A sound cache that holds a part of a space is replayed by `tune_cache` and refused by `tune_kernel` in simulation mode.
#
# Guess: simulation needs only what the cache holds, as it runs nothing.
# Seen in 1.5.0: `tune_kernel(simulation_mode=True)` takes the space from its arguments and raises ValueError for the first
# combination that the file does not hold; `tune_cache` takes the configs of the file for the space, and returns all.
# Fails (status 1) where a release behaves otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q kernel-tuner==1.5.0
cd "$folder"
cat > run.py <<'PYTHON'
import json, sys
from importlib.metadata import version
from kernel_tuner import tune_cache, tune_kernel

print("kernel-tuner", version("kernel-tuner"))
space = {"X": [1, 2], "Y": [1, 2]}
times = {"1,1": 1.0, "1,2": 2.0, "2,2": 3.0}
about = {"compile_time": 1.0, "verification_time": 0, "benchmark_time": 1.0, "timestamp": "2026-01-01 00:00:00"}
rows = {k: {"X": int(k[0]), "Y": int(k[2]), "time": t, "times": [t], **about} for k, t in times.items()}
header = {"device_name": "A100", "kernel_name": "k", "problem_size": 64, "tune_params_keys": ["X", "Y"]}
json.dump({**header, "tune_params": space, "objective": "time", "cache": rows}, open("cache.json", "w"))
results, _ = tune_cache(cache_path="cache.json", quiet=True)
print("tune_cache returns", len(results), "of", len(rows))
try:
    tune_kernel("k", "", 64, [], space, cache="cache.json", simulation_mode=True, lang="CUDA", quiet=True)
    simulated = "returns"
except ValueError as error:
    simulated = "ValueError: " + str(error)[:60]
print("tune_kernel in simulation mode:", simulated)
sys.exit(0 if len(results) == len(rows) and simulated.startswith("ValueError") else 1)
PYTHON
"$folder/venv/bin/python" run.py 2>&1 | grep -v -i warning | tail -3
exit "${PIPESTATUS[0]}"
