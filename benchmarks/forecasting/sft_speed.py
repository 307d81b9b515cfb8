"""Claim: supervised training takes less time and memory than with an earlier build, and the probe costs a load nothing.

    python -m benchmarks.forecasting.sft_speed --model FOLDER --data FOLDER --before TREE --out FILE

`--data` is a folder that `train data` wrote, `--before` a checkout of the earlier build. Every run is a fresh process
on a CPU: the earlier build trains, this one takes as many optimizer steps, and its adapter is then loaded without and
with the probe in turns. The earlier build stops at the first step that ends after `--seconds`.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.lib.environment import ROOT
from benchmarks.lib.result_files import ResultFile, parse_arguments, parser, say

LOADS = 3


def trained(model: str, data: str, out: str, most: int, seconds: float) -> dict[str, Any]:
    """One run in this process, of one example a step and one epoch, or of `most` steps."""
    import transformers

    import forecast_train
    from forecast_train.llm.settings import LoraSettings, ScheduleSettings, SftRun
    from forecast_train.llm.sft import train

    began, cpu = time.perf_counter(), time.process_time()

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop |= time.perf_counter() - began > seconds

    start = transformers.Trainer.__init__

    def start_with_stop(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        self.add_callback(Stop())

    transformers.Trainer.__init__ = start_with_stop
    steps = ScheduleSettings(epochs=1.0, most=most, tokens=6144, examples=1)
    done = train(SftRun(model, data, out, lora=LoraSettings(), steps=steps))
    return {
        "wall_s": time.perf_counter() - began,
        "cpu_s": time.process_time() - cpu,
        "steps": done["steps"],
        "package": str(Path(str(forecast_train.__file__)).parents[2].name),
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }


def loaded(model: str, adapter: str, probed: bool) -> dict[str, Any]:
    """One load in this process, in float32; imports come before."""
    import torch  # noqa: F401

    from forecast_integrations.models.transformers import backend

    if not probed:
        vars(backend)["find_probe"] = lambda *_: None
    began = time.perf_counter()
    backend.TransformersBackend(model, adapter, device="cpu", dtype="float32").prepare()
    return {"probed": probed, "wall_s": time.perf_counter() - began}


def child(tree: Path, step: str, *given: object) -> dict[str, Any]:
    """Run a step in a process that has the packages of a checkout."""
    paths = [str(tree / folder) for folder in ("", "train", "integrations")]
    code = (
        f"import json, sys; sys.path.insert(0, {str(ROOT)!r}); from benchmarks.forecasting import sft_speed; "
        f"sys.path[:0] = {paths!r}; print(json.dumps(sft_speed.{step}(*{given!r})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    say(f"{step} {tree.name}: {result}")
    return result


def main() -> int:
    command_line = parser(__doc__)
    command_line.add_argument("--model", type=Path, required=True)
    command_line.add_argument("--data", type=Path, required=True)
    command_line.add_argument("--before", type=Path, required=True)
    command_line.add_argument("--seconds", type=float, default=420.0)
    arguments = parse_arguments(command_line, on_host=True)
    result = ResultFile(arguments, "sft-speed")
    with tempfile.TemporaryDirectory() as scratch:
        given = str(arguments.model), str(arguments.data)
        before = child(arguments.before, "trained", *given, f"{scratch}/before", 0, arguments.seconds)
        ours = child(ROOT, "trained", *given, f"{scratch}/ours", before["steps"], 1e9)
        result.add("training", {"before": before, "ours": ours})
        adapter = f"{scratch}/ours/trained"
        loads = [child(ROOT, "loaded", given[0], adapter, bool(n % 2)) for n in range(2 * LOADS)]
        result.add("loads", loads)
    by_probe = [statistics.median(r["wall_s"] for r in loads if r["probed"] is p) for p in (False, True)]
    ratios = {name: ours[name] / before[name] for name in ("wall_s", "cpu_s", "peak_gb")}
    result.finish({**ratios, "load": by_probe[1] / by_probe[0]})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
