"""Claim: for GPUs that are not here, kernels trace, compile and are priced by what their compiler makes of them.

    python -m benchmarks.devices.compiled_targets --out FILE.json [--each 12] [--kernels matmul,attention]

Needs no GPU: Triton compiles for other targets on any machine. Configs of the benchmark kernels, some with the
launch options of the target's backend, are compiled for each; the compile-free estimates of shared memory and
registers, made from the target's own TTIR and its entry in `features.devices`, are compared with what the
compiler says. No time is measured, and none of the targets was ever measured: what this shows is that forecasts
there begin from right facts, not that they are right.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import kernels
from benchmarks.lib.case_problems import problem_of_case
from benchmarks.lib.compiled_binaries import compile_config, cubin_resources
from benchmarks.lib.result_files import ResultFile, parse_arguments, parser, say
from forecast_autotune.features.devices import BACKEND_OPTIONS, datasheet_device
from forecast_autotune.features.trace import trace
from forecast_autotune.features.ttir.extraction import assignment_of
from forecast_autotune.records import Candidate
from forecast_autotune.surrogates.prior import formula_prior
from forecast_integrations.triton.null_device import null_device
from forecast_integrations.triton.problem import describe
from forecast_train.evaluation.metrics import spearman

if TYPE_CHECKING:
    import triton

MODELS = ("mi300x", "mi355x", "b200", "rtx 5090")
"""By datasheet: CDNA3, CDNA4, and both of Blackwell's compute capabilities."""
KERNELS = "matmul,softmax,layer_norm,w8a16_matmul"
CLOSE = 0.03
"""An estimate of shared memory within this share of the truth is right."""
_VGPRS, _SPILLS = re.compile(r"\.vgpr_count:\s+(\d+)"), re.compile(r"\.vgpr_spill_count:\s+(\d+)")


def sampled_configs(case: kernels.Case, backend: str, each: int) -> list[triton.Config]:
    """At most `each` configs of a case, every other one with an option of the backend's beside its own."""
    options = [(o, v) for o in BACKEND_OPTIONS[backend] for v in o.values if v != o.default]
    found = []
    for row, config in enumerate(kernels.thinned(case, each)):
        option, value = options[row // 2 % len(options)]
        if row % 2 and option.name in ("num_ctas", "maxnreg"):
            setattr(config, option.name, value)
        elif row % 2:
            config.kwargs[option.name] = value
        found.append(config)
    return found


def compiled_facts(case: kernels.Case, config: triton.Config, data: kernels.Data) -> dict[str, Any]:
    """What the compiler makes of a config for the active target."""
    made, found = compile_config(case, config, data)
    if made is None:
        return found
    if "amdgcn" in made.asm:
        text = made.asm["amdgcn"]
        return found | {
            "registers": max(map(int, _VGPRS.findall(text))),
            "spilt": sum(map(int, _SPILLS.findall(text))) > 0,
        }
    usage = cubin_resources(made.asm["cubin"])
    return found | {"registers": usage["registers"], "spilt": bool(usage.get("stack"))}


def rows_of_case(case: kernels.Case, backend: str, each: int) -> list[dict[str, Any]]:
    """Truth and estimate of each sampled config of a case on the active null device."""
    problem, named = problem_of_case(case)
    data = case.make("meta")
    configs = {
        Candidate(describe.to_config(config)): config for config in sampled_configs(case, backend, each)
    }
    texts: dict[str, str] = {}
    for candidate, config in configs.items():
        if assignment_of(candidate) not in texts:
            texts[assignment_of(candidate)] = trace(case.kernel, data["args"], data["kwargs"], config.kwargs)
    grids = describe.launch_grids(configs, data["grid"], named, case.kernel)
    before = formula_prior(problem, list(configs), grids, texts)
    found = []
    for row, (candidate, config) in enumerate(configs.items()):
        truth = compiled_facts(case, config, data)
        found.append(
            {
                "kernel": case.name.partition("/")[0],
                "config": candidate.config.to_json(),
                "informed": bool(before.informed and before.exact[row]),
                "estimated_shared": float(before.shared[row]),
                "estimated_registers": float(before.costs.registers[row]) if before.costs else None,
                "forecast_ms": round(float(2 ** before.mean[row]), 6),
                **truth,
            }
        )
    return found


def summary_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How one target's estimates compare with its compiler."""
    ok = [r for r in rows if r["outcome"] == "ok"]
    large = [r for r in ok if r["shared"] > 8192]
    near = [abs(r["estimated_shared"] - r["shared"]) <= CLOSE * r["shared"] for r in large]
    registers = np.array([r["registers"] for r in ok], float)
    expected = np.array([r["estimated_registers"] for r in ok], float)
    known = np.isfinite(expected)
    return {
        "configs": len(rows),
        "informed": sum(r["informed"] for r in rows),
        "compiled": len(ok),
        "with_shared_memory": len(large),
        "shared_right": round(float(np.mean(near)), 4) if near else None,
        "with_estimated_registers": int(known.sum()),
        "registers_spearman": round(spearman(expected[known], registers[known]), 4),
        "compile_s": round(sum(r["compile_s"] for r in ok), 1),
    }


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--each", type=int, default=12, help="configs of one kernel on one target")
    made.add_argument("--kernels", default=KERNELS)
    made.add_argument("--models", default=",".join(MODELS))
    arguments = parse_arguments(made, on_host=True)
    result = ResultFile(arguments, "compiled_targets")
    summary: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        for model in arguments.models.split(","):
            device = datasheet_device(model)
            rows: list[dict[str, Any]] = []
            with null_device(device=device):
                for name in arguments.kernels.split(","):
                    rows += rows_of_case(kernels.cases([name])[0], device.backend, arguments.each)
            for row in rows:
                result.add(model, row)
            summary[model] = {"backend": device.backend, "arch": device.arch, **summary_of(rows)}
            say(f"{model}: {summary[model]}")
    result.finish(summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
