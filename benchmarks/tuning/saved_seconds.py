"""Claim: what a decision says it saved is what the host tool takes on top, within a quarter.

    python -m benchmarks.tuning.saved_seconds --out benchmarks/results/saved_seconds.json

Six programs: four kernels with 12 to 72 configs under `triton.autotune`, and two small models under torch.compile's
max-autotune. Each runs without us and with us, in fresh processes with empty caches; imports, inputs and one trivial
launch come before the clock starts. `real_s` is the difference of the two, `said_s` what the decisions with us said.
Of the kernels, every compilation is kept with its seconds, and `fitted_ratio` is the value of
`host_seconds.HOST_COMPILE_RATIO` that would make the prediction exact.
"""

# Modules are subclasses of Any here: torch is untyped to us.
# mypy: disable-error-code="misc"

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from torch import nn

from benchmarks import kernels
from benchmarks.lib import devices, kernel_timing, result_files
from benchmarks.lib.processes import child_processes
from benchmarks.lib.processes.compile_processes import (
    compile_separately,
    restart_compile_workers,
    synchronize,
)
from forecast_autotune import autotune
from forecast_autotune.records import Candidate, Measurement
from forecast_autotune.store import Store
from forecast_autotune.tuning.host_seconds import HOST_COMPILE_RATIO, seconds_saved, triton_autotune_seconds
from forecast_integrations.triton.problem.describe import configs_by_candidate

KERNELS = (
    ("softmax/8192x32768", 12),
    ("bp_linear_gelu/16384x3072x768", 20),
    ("matmul/4096x4096x4096", 24),
    ("transpose/16384x8192", 72),
)
"""Cases with how many of their configs."""
MODELS = ("perceptron", "convolutions")
ARMS = ("without", "with")
WITHIN = 0.25
"""Share by which a claim may be off."""
_MIN_SHARE = 0.5
"""Of the configs of a dry run: it has no time for more."""


class Perceptron(nn.Module):
    """Two linear layers, in half precision on a GPU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.relu(self.first(x)))


class Convolutions(nn.Module):
    """A convolution, a pointwise one and a classifier."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, 2 * width, 1)
        self.last = nn.Linear(2 * width, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.narrow(torch.relu(self.wide(x))))
        return self.last(x.mean(dim=(2, 3)))


# --- children ---


def tune_kernel(given: dict[str, Any], null: bool) -> dict[str, Any]:
    """One kernel in one arm: its wall seconds, its compilations, and what was said to be saved."""
    case = kernels.cases([given["name"]])[0]
    compilations: list[dict[str, Any]] = []

    def listen(**told: Any) -> None:
        compilations.append({"seconds": told["times"].total / 1e6, "cached": told["cache_hit"]})

    with devices.device(null) as where:
        data = case.make(where)
        devices.warm_up_device(where)
        configs = kernels.thinned(case, given["configs"])
        make = autotune if given["arm"] == "with" else triton.autotune
        tuner = make(configs=configs, key=list(case.key))(case.kernel)
        if given["arm"] == "without" and hasattr(triton.knobs.compilation, "listener"):
            triton.knobs.compilation.listener = listen
        found: dict[str, Any] = kernel_timing.tuned_call(case, tuner, data, lambda: None)
    found |= {"arm": given["arm"], "program": case.name, "configs": len(configs)}
    found["compilations"] = compilations
    if given["arm"] == "with":
        found |= predictions(list(configs_by_candidate(configs)))
    return found


def predictions(candidates: list[Candidate]) -> dict[str, Any]:
    """What the decision of this process says, and what the formula makes of its measurements."""
    store = Store.default()
    problem, decision = next(iter(store.decisions()))
    measured: dict[Candidate, Measurement] = {}
    for m in store.measurements(problem):
        if m.candidate not in measured or measured[m.candidate].compile_s is None:
            measured[m.candidate] = m
    release = dict(problem.toolchain).get("triton", "")
    refused = decision.refused
    ready = {c: replace(m, compile_s=0.0) for c, m in measured.items()}
    timing = triton_autotune_seconds(candidates, ready, failing=refused, triton=release)
    return {
        "said_s": decision.saved_s,
        "formula_s": seconds_saved(
            problem, candidates, measured, refused=refused, wall_s=decision.cost.wall_s
        ),
        "predicted_s": triton_autotune_seconds(candidates, measured, failing=refused, triton=release),
        "predicted_timing_s": timing,
        "seconds_by_config": [[c.config.to_json(), m.compile_s, m.median_ms] for c, m in measured.items()],
    }


def model_of(name: str, device: str) -> tuple[nn.Module, torch.Tensor]:
    """A model in eval mode with random weights, and its input; small ones on a CPU."""
    torch.manual_seed(0)
    small = device == "cpu"
    dtype = torch.float32 if small else torch.float16
    if name == "perceptron":
        width, tokens = (64, 128) if small else (2048, 4096)
        module: nn.Module = Perceptron(width)
        x = torch.randn(tokens, width)
    else:
        width, side = (16, 16) if small else (256, 56)
        module = Convolutions(width).to(memory_format=torch.channels_last)
        x = torch.randn(2 if small else 16, width, side, side).to(memory_format=torch.channels_last)
    return module.to(device, dtype).eval(), x.to(device, dtype)


def compile_model(given: dict[str, Any], null: bool) -> dict[str, Any]:
    """One model in one arm: its first call's wall seconds, and what was said to be saved."""
    from torch._inductor.utils import fresh_cache

    from forecast_autotune import enable_torch_compile
    from forecast_integrations.inductor.summary import LISTENERS

    device = "cpu" if null else "cuda"
    options = dict(torch._inductor.list_mode_options("max-autotune-no-cudagraphs"))
    if null:
        options["max_autotune_gemm_backends"] = "ATEN,CPP"
        torch._inductor.config.freezing = True
    else:
        restart_compile_workers()
    decisions: list[Any] = []
    LISTENERS.append(lambda label, decision: decisions.append(decision))
    with torch.no_grad():
        with fresh_cache():  # what either arm may have done before
            torch.compile(nn.Linear(48, 40, device=device), options=options)(
                torch.randn(32, 48, device=device)
            )
        module, x = model_of(given["name"], device)
        ours = enable_torch_compile(store=Store(None)) if given["arm"] == "with" else contextlib.nullcontext()
        with ours, fresh_cache():
            begin = time.perf_counter()
            compile_separately(module, options)(x)
            synchronize(device)
            seconds = time.perf_counter() - begin
    return {
        "program": given["name"],
        "arm": given["arm"],
        "seconds": seconds,
        "said_s": sum(d.saved_s for d in decisions),
        "operations": [
            {
                "candidates": d.candidates,
                "measured": d.measured,
                "trusted": d.trusted,
                "refused": d.refused,
                "saved_s": d.saved_s,
                "cost": d.cost.to_json(),
            }
            for d in decisions
        ],
    }


# --- the whole ---


def compare(raw: dict[str, dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Per program: the real difference and what was said; then over all."""
    programs: dict[str, Any] = {}
    for name, arms in raw.items():
        if set(arms) != set(ARMS):
            continue
        without, ours = arms["without"], arms["with"]
        real = without["seconds"] - ours["seconds"]
        row = {"without_s": without["seconds"], "with_s": ours["seconds"], "real_s": real}
        row |= {"said_s": ours["said_s"], "said_over_real": ours["said_s"] / real if real > 0 else None}
        if (predicted := ours.get("predicted_s")) is not None:
            timing = ours["predicted_timing_s"]
            compiled = without["seconds"] - timing
            row |= {"formula_s": ours["formula_s"], "formula_over_real": ours["formula_s"] / real}
            row["fitted_ratio"] = HOST_COMPILE_RATIO * compiled / (predicted - timing)
        programs[name] = {k: None if v is None else round(v, 3) for k, v in row.items()}
    # A program of which nothing is said keeps the promise: it claims nothing.
    shown = [p for p in programs.values() if p["said_over_real"] is not None and p["said_s"] >= 1]
    ratios = [p["fitted_ratio"] for p in programs.values() if "fitted_ratio" in p]
    return {
        "programs": programs,
        "claims": len(shown),
        "within_a_quarter": sum(abs(p["said_over_real"] - 1) <= WITHIN for p in shown),
        "worst_said_over_real": max(
            (p["said_over_real"] for p in shown), key=lambda ratio: abs(ratio - 1), default=None
        ),
        "median_fitted_ratio": round(statistics.median(ratios), 3) if ratios else None,
    }


def run(a: argparse.Namespace, report: result_files.ResultFile) -> None:
    """All programs in both arms; what has no time left is not begun."""
    until = time.monotonic() + a.seconds
    listed = [("kernel", name, count) for name, count in KERNELS] + [("model", name, 0) for name in MODELS]
    raw: dict[str, dict[str, dict[str, Any]]] = {}
    for role, name, count in listed:
        if a.programs and name.partition("/")[0] not in a.programs:
            continue
        for arm in ARMS[::-1]:
            if time.monotonic() > until:
                result_files.say(f"no time left for {name} {arm}")
                continue
            configs = max(4, round(count * _MIN_SHARE)) if a.null else count
            given = {"name": name, "configs": configs, "arm": arm}
            with tempfile.TemporaryDirectory(prefix="saved-", ignore_cleanup_errors=True) as folder:
                result = child_processes.run_child(
                    child_processes.child_command(__file__, a, role, given),
                    child_processes.child_environment(
                        Path(folder), TORCHINDUCTOR_CACHE_DIR=f"{folder}/inductor"
                    ),
                )
            raw.setdefault(name, {})[arm] = result
            report.add(role, result)
            result_files.say(
                f"{name} {arm}: {result['seconds']:.2f} s, said {result.get('said_s')}, "
                f"formula {result.get('formula_s')}"
            )
    report.finish(compare(raw))


def main() -> int:
    made = result_files.parser(__doc__)
    made.add_argument("--programs", nargs="*", default=[], help="kernels and models by name; all by default")
    made.add_argument("--seconds", type=float, default=300.0, help="begin nothing after so many")
    a = result_files.parse_arguments(made)
    if a.child:
        result = tune_kernel(a.given, a.null) if a.child == "kernel" else compile_model(a.given, a.null)
        print(json.dumps(result), flush=True)
        return 0
    run(a, result_files.ResultFile(a, "saved_seconds"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
