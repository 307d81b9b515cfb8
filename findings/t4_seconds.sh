#!/usr/bin/env bash
# T4 results without `metadata.timeunit` are read in seconds, also where every unit that they do name is "ms".
#
# Guess: the unit of a measurement, "ms", holds for the times of its config; Kernel Tuner's schema has no other field.
# Seen in autotuning-methodology 1.1.0: compile times are taken for seconds unless `metadata.timeunit` says otherwise, and
# are found under `compilation` alone, while the schema that Kernel Tuner 1.5.0 ships calls the field `compilation_time`.
# Fails (status 1) where a release behaves otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q autotuning-methodology==1.1.0 kernel-tuner==1.5.0
cd "$folder"
cat > run.py <<'PYTHON'
import json, sys
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from autotuning_methodology.searchspace_statistics import SearchspaceStatistics

print(*(f"{name} {version(name)}" for name in ("autotuning-methodology", "kernel-tuner")))
KEYS = ["compilation", "benchmark", "framework", "search_algorithm", "validation"]


def read(metadata):
    times = {**dict.fromkeys(KEYS, 0.0), "compilation": 500.0, "runtimes": [1.5]}
    row = {"configuration": {"X": 1}, "times": times, "invalidity": "correct", "correctness": 1}
    row |= {"measurements": [{"name": "time", "value": 1.5, "unit": "ms"}], "objectives": ["time"]}
    path = Path("t4.json")
    path.write_text(json.dumps({"schema_version": "1.0.0", "metadata": metadata, "results": [row]}))
    return float(SearchspaceStatistics("k", "d", True, KEYS, ["time"], path).objective_times["compilation"][0])


plain, said = read({}), read({"timeunit": "milliseconds"})
print(f"500 in the file: {plain:g} s without timeunit, {said:g} s with milliseconds")
schema = json.loads((files("kernel_tuner") / "schema/T4/1.0.0/results-schema.json").read_text())
names = schema["properties"]["results"]["items"]["properties"]["times"]["properties"]
print("the schema has:", ", ".join(n for n in names if n.startswith("compilation")))
sys.exit(0 if (plain, said) == (500.0, 0.5) and "compilation_time" in names else 1)
PYTHON
"$folder/venv/bin/python" run.py 2>&1 | grep -v -i warning | tail -3
exit "${PIPESTATUS[0]}"
