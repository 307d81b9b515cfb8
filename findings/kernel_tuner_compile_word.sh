#!/usr/bin/env bash
# A cache of Kernel Tuner 1.5.0 has no `time` for a config that failed: it has `__error__`, and the word for a failed
# compilation means one kind of it only.
#
# Guess: the objective's field holds the name of the failure, as up to release 1.3, and any compiler error counts.
# Seen: a config whose compiler error speaks of shared memory gets "__error__": "CompilationFailedConfig" and no "time";
# the same run with another compiler error raises in `tune_kernel`, and the search is over.
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
import numpy as np
from kernel_tuner import tune_kernel

SOURCE = """
float fill(float *x) {
#if TILE == 2
#error "%s"
#endif
    for (int i = 0; i < 64; i++) x[i] = TILE;
    return 1.0f + TILE;
}
"""


def tune(words, cache):
    given = [np.zeros(64, np.float32)]
    return tune_kernel("fill", SOURCE % words, 64, given, {"TILE": [1, 2]}, lang="C", cache=cache, quiet=True)


print("kernel-tuner", version("kernel-tuner"))
tune("this kernel uses too much shared data", "shared.json")
row = json.load(open("shared.json"))["cache"]["2"]
print("error about shared memory:", {k: row.get(k) for k in ("__error__", "time")})
try:
    tune("an unknown type", "other.json")
    other = "went on"
except Exception as error:
    other = f"raised {type(error).__name__}"
print("any other error of the compiler:", other)
sys.exit(0 if row.get("__error__") == "CompilationFailedConfig" and "time" not in row and other != "went on" else 1)
PYTHON
"$folder/venv/bin/python" run.py 2>&1 | grep -v -i warning | grep -v "^Error while" | tail -3
exit "${PIPESTATUS[0]}"
