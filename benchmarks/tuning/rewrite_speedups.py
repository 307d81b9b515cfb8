"""Claim: rewrites of syntax trees alone, without a language model, speed kernels up beyond their best config.

    python -m benchmarks.tuning.rewrite_speedups --check --out benchmarks/results/mechanical_variants_cpu.json \
        [--kernels 44] [--also DIRECTORY] [--jobs 2]
    python -m benchmarks.tuning.rewrite_speedups --tune --out benchmarks/results/mechanical_variants.json \
        [--kernels 20] [--total-seconds 520] [--null]

`--check` needs no GPU: every variant of kernels from all hands runs in the interpreter on the case's small
shape against the reference, and one config of it is compiled for sm_90, each in a process of its own with a
time limit; `--also` names a directory that holds another Triton, with which everything is compiled again.
`--tune` measures every config of the base kernel for its best one. Then, as a user would have it, the
decorator decides among the base's configs; the variants are verified on the device under its fastest two, and
the decorator decides again among all configs of base and variants, both times within its default budget. The
winners are timed in turns.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks import kernels
from benchmarks.lib import devices, kernel_timing, result_files
from benchmarks.lib.environment import ROOT
from benchmarks.lib.processes import child_processes
from benchmarks.lib.result_files import say
from benchmarks.lib.variants.rewrite_cases import (
    first_cases,
    launch_variant,
    load_variant,
    rewrites_of_case,
    verified_variants,
)
from forecast_autotune import autotune
from forecast_autotune.errors import VariantError
from forecast_autotune.records import Config
from forecast_autotune.store import Store
from forecast_autotune.variants import Variant
from forecast_harness.rewrites.triton import REWRITES
from forecast_integrations.triton.null_device import null_device
from forecast_integrations.triton.variants.loading import LoadedVariant

LIMIT_S = 240.0
"""Of one variant, in the interpreter or in the compiler."""
_ALIGNMENT = re.compile(r"must be 16-byte aligned")
"""What the interpreter says of a shape whose rows no tensor descriptor can describe."""
SHARED_BYTES = 232448
"""What a program may have on sm_90."""
COMBINED = 3
"""Variants of several rewrites that are checked for each kernel, besides one of each rewrite."""
TOP = 2
"""Configs of the base that variants are verified under when tuning."""
SHORTEST_S = 10.0
"""No kernel is begun with less time left."""
LIMIT = 8
"""Variants that compete with the base when tuning."""


def selected_cases(a: Namespace) -> list[kernels.Case]:
    """The cases asked for; of a kernel that is named without a shape, the first."""
    if not a.only:
        return first_cases(a.kernels)
    return [kernels.cases([name])[0] for name in a.only.split(",")]


# --- without a device, in a child ---


def interpret(case: kernels.Case, variant: Variant) -> dict[str, Any]:
    """Run three configs on the small shape; on that of another case where descriptors cannot take it."""
    function = load_variant(case, variant)
    shapes = [case, *kernels.cases([case.name.partition("/")[0]])]
    for shape in shapes:
        try:
            return _interpreted(shape, function)
        except VariantError as error:
            if not _ALIGNMENT.search(str(error)):
                raise
    return {"verdict": "refused", "detail": f"no small shape of {len(shapes)} is aligned"}


def _interpreted(case: kernels.Case, function: LoadedVariant) -> dict[str, Any]:
    listed = function.configs(kernels.configs(case))
    data = case.make("cpu", small=True)
    expected = case.reference(data)
    for index in sorted({0, len(listed) // 2, len(listed) - 1}):
        kernels.reset(case, data)
        launch_variant(case, data, function, listed[index])
        if wrong := kernels.mismatch(case, data, expected):
            return {"verdict": "wrong", "detail": f"{listed[index]}: {wrong}"}
    return {"verdict": "right"}


def compile_one(case: kernels.Case, variant: Variant) -> dict[str, Any]:
    """Compile the config in the middle of the list at the real shape."""
    function = load_variant(case, variant)
    listed = function.configs(kernels.configs(case))
    config, data = listed[len(listed) // 2], case.make("meta")
    compiled = function.warmup(*data["args"], grid=data["grid"], **data["kwargs"], **config.all_kwargs())
    shared = int(compiled.metadata.shared)
    if "cubin" not in compiled.asm or shared > SHARED_BYTES:
        return {"verdict": "failed", "detail": f"{config}: stages {sorted(compiled.asm)}, shared {shared}"}
    return {"verdict": "compiled"}


def attempt(task: Any, case: kernels.Case, variant: Variant) -> dict[str, Any]:
    """What the task says; an error is a failure."""
    try:
        answer: dict[str, Any] = task(case, variant)
    except Exception as error:
        text = f"{type(error).__name__}: {error} {error.__cause__ or ''}"
        return {"verdict": "failed", "detail": text[-900:]}
    return answer


def check_all(task: Any, listed: Sequence[Any], jobs: int) -> None:
    """Do a task for every variant; print a JSON line as each ends."""
    checks = []
    for row in listed:
        (case,), variant = kernels.cases([row["case"]]), Variant.from_json(row["variant"])
        checks.append(({"case": case.name, "variant": variant.name}, partial(attempt, task, case, variant)))
    child_processes.check_each(checks, jobs, LIMIT_S)


# --- without a device, in the parent ---


def chosen_variants(case: kernels.Case) -> list[Variant]:
    """The most promising variant of each rewrite, and the best of those that combine rewrites."""
    best: dict[str, Variant] = {}
    every = rewrites_of_case(case, limit=10_000)
    for variant in every:
        if len(variant.extra["rewrites"]) == 1:
            best.setdefault(variant.extra["rewrites"][0], variant)
    return [*best.values(), *[v for v in every if len(v.extra["rewrites"]) > 1][:COMBINED]]


def run_in_role(
    name: str, listed: Path, jobs: int, also: Path | None, folder: Path
) -> Iterator[dict[str, Any]]:
    """Run this script in a role, and yield what it prints. Raises `RuntimeError` when it fails."""
    environment = child_processes.child_environment(
        folder,
        TRITON_INTERPRET="1" if name == "interpret" else "0",
        OMP_NUM_THREADS="1",
        TRITON_DEFAULT_FP_FUSION="1",
    )
    if also is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(also.resolve()), environment["PYTHONPATH"]])
    command = [*child_processes.module_command(__file__), "--check", "--child", name, "--jobs", str(jobs)]
    command += ["--given", json.dumps({"listed": str(listed)})]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"case"'):  # a compiler that fails may print its program
                yield json.loads(line)
    if process.returncode != 0:
        raise RuntimeError(f"role {name} ended with {process.returncode}; its error is above")


def check(a: Namespace, report: result_files.ResultFile) -> int:
    """Check the variants of many kernels; returns how many are not right, or do not compile."""
    cases = selected_cases(a)
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    listed = []
    for case in cases:
        for variant in chosen_variants(case):
            extra = {k: variant.extra[k] for k in ("rewrites", "approximate")}
            rows[case.name, variant.name] = {"case": case.name, "variant": variant.name, **extra}
            listed.append({"case": case.name, "variant": variant.to_json()})
    say(f"{len(listed)} variants of {len(cases)} kernels")
    with tempfile.TemporaryDirectory(prefix="mechanical-") as scratch:
        path = Path(scratch) / "listed.json"
        path.write_text(json.dumps(listed), encoding="utf-8")
        told = {"interpreter"}
        rounds = [("interpret", None), ("compile", None), *([("compile", a.also)] if a.also else [])]
        for name, also in rounds:
            for line in run_in_role(name, path, a.jobs, also, Path(scratch)):
                row = rows[line["case"], line["variant"]]
                key = "interpreter" if name == "interpret" else f"compiled {line['triton']}"
                told.add(key)
                row[key] = line["verdict"]
                if line["verdict"] in ("wrong", "failed", "refused"):
                    row.setdefault("details", {})[key] = line["detail"]
                    say(f"{line['case']} {line['variant']}: {key} {line['verdict']}: {line['detail'][-300:]}")
    report.data["raw"]["variants"] = list(rows.values())
    report.finish(check_figures(list(rows.values()), len(cases)))
    return sum(row[key] in ("wrong", "failed") for row in rows.values() for key in row if key in told)


def check_figures(rows: list[dict[str, Any]], kernels_: int) -> dict[str, Any]:
    """Figures by rewrite: how often it applied, was right, and was compiled by each Triton."""
    by: dict[str, Counter[str]] = {name: Counter() for name in (*(r.name for r in REWRITES), "combined")}
    for row in rows:
        single = len(row["rewrites"]) == 1
        count = by[row["rewrites"][0] if single else "combined"]
        count["applied"] += 1
        count[row["interpreter"]] += 1
        count.update(key for key, value in row.items() if key.startswith("compiled") and value == "compiled")
    return {
        "kernels": kernels_,
        "variants": len(rows),
        "wrong": sum(row["interpreter"] == "wrong" for row in rows),
        "wrong_though_exact": sum(row["interpreter"] == "wrong" and not row["approximate"] for row in rows),
        "by_rewrite": {name: dict(sorted(count.items())) for name, count in by.items() if count},
    }


# --- on a device ---


def with_fastest_configs(variants: Sequence[Variant], found: dict[str, Any]) -> list[Variant]:
    """Variants as they are verified: under the fastest configs of the base, unless they have their own."""
    fastest = tuple(Config.from_json(config) for config, _ in found["timings"][:TOP])
    return [v if v.configs else replace(v, configs=fastest) for v in variants]


def tune_case(given: dict[str, Any], null: bool) -> dict[str, Any]:
    """The child of one kernel: the base's best config against what is found among base and variants."""
    (case,) = kernels.cases([given["case"]])
    configs = kernels.configs(case)
    with devices.device(null) as where:
        # Tensors of the device `meta` all lie at address zero: they would count as overlapping.
        data = case.make("cpu", small=True) if null else case.make(where)
        devices.warm_up_device(where)
        # Kernels that make tensor descriptors themselves ask for memory at every launch.
        triton.set_allocator(
            lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=where)
        )
        options: dict[str, Any] = {"reset_to_zero": list(case.reset_to_zero)}
        every = autotune(configs, list(case.key), mode="exhaustive", store=False, **options)(case.kernel)
        oracle = kernel_timing.tuned_call(case, every, data, lambda: None)
        made = rewrites_of_case(case, limit=given["limit"])
        options["store"] = Store(None)  # of both decisions: nothing is measured twice
        alone = autotune(configs, list(case.key), **options)(case.kernel)
        first = kernel_timing.tuned_call(case, alone, data, lambda: None)
        right = {
            v.name: v.checks for v in verified_variants(case, where, with_fastest_configs(made, first), data)
        }
        kept = [replace(v, checks=right[v.name]) for v in made if v.name in right]
        ours = autotune(configs, list(case.key), variants=kept, **options)(case.kernel)
        kernels.reset(case, data)
        found = kernel_timing.tuned_call(case, ours, data, lambda: None)
        kernels.reset(case, data)
        ours[data["grid"]](*data["args"], **data["kwargs"])
        correct = kernel_timing.check_output(case, data, where)
        base = partial(kernels.launch, case, data, every.best_config)
        winner = partial(ours.__getitem__(data["grid"]), *data["args"], **data["kwargs"])
        for call in (base, winner):
            call()
        times = kernel_timing.time_in_turns([base, winner, base], given["rounds"])
        host_us = [round(1e6 * kernel_timing.host_seconds(call, 100), 1) for call in (base, winner)]
    medians = [statistics.median(t) for t in times]
    return {
        "case": case.name,
        "configs": len(configs),
        "generated": [v.name for v in made],
        "verified": len(kept),
        "base_config": oracle["winner"],
        "chosen": {"variant": found["decision"]["variant"], "config": found["winner"]},
        "measured": [d["decision"]["measured"] for d in (first, found)],
        "seconds": [d["seconds"] for d in (first, found)],
        "correct": correct,
        "base_ms": medians[0],
        "chosen_ms": medians[1],
        "speedup": medians[0] / medians[1],
        "noise": abs(medians[2] / medians[0] - 1),
        # The base is launched plainly here, the winner through its tuner, as users do.
        "host_us": {"base": host_us[0], "chosen": host_us[1]},
    }


def tune(a: Namespace, report: result_files.ResultFile) -> int:
    """Tune case by case, each in a fresh process; returns how many failed."""
    cases, begun = selected_cases(a), time.monotonic()
    rows, failed, skipped = [], 0, list[str]()
    for place, case in enumerate(cases, 1):
        left = a.total_seconds - (time.monotonic() - begun)
        if left < SHORTEST_S:
            skipped.append(case.name)
            continue
        given = {"case": case.name, "rounds": 5 if a.null else a.rounds, "limit": a.limit}
        with tempfile.TemporaryDirectory(prefix="tune-", ignore_cleanup_errors=True) as folder:
            command = child_processes.child_command(__file__, a, "tune", given)
            try:
                row = child_processes.run_child(
                    command, child_processes.child_environment(Path(folder)), min(a.seconds, left)
                )
            except Exception as error:  # one kernel less is worth less than all of the others
                failed += 1
                report.add("failed", {"case": case.name, "error": str(error)[-1500:]})
                say(f"FAILED {case.name}: {str(error)[-300:]}")
                continue
        rows.append(row)
        report.add("tuned", row)
        noted = "noise {0:.2%}; host {base} us, chosen {chosen} us".format(row["noise"], **row["host_us"])
        at = f"{place}/{len(cases)} after {time.monotonic() - begun:.0f} s"
        say(f"{at}: {case.name}: {row['chosen']['variant']} {row['speedup']:.3f}x ({noted})")
    gained = [r for r in rows if r["speedup"] >= 1.03 and r["correct"] is not False]
    varied = [r["host_us"] for r in rows if r["chosen"]["variant"] != "base"]
    report.finish(
        {
            "kernels": len(rows),
            "failed": failed,
            "no_time_for": skipped,
            "improved_by_3_percent": len(gained),
            "geomean_speedup": round(statistics.geometric_mean([r["speedup"] for r in rows] or [1.0]), 4),
            "variant_chosen": len(varied),
            "host_us_of_base_and_variant": [
                round(statistics.median(h[side] for h in varied), 1) for side in ("base", "chosen") if varied
            ],
            "median_noise": round(statistics.median([r["noise"] for r in rows] or [0.0]), 5),
            "winners": dict(Counter(r["chosen"]["variant"].rpartition("-")[0] for r in gained)),
        }
    )
    return failed


def main() -> int:
    parser = result_files.parser(__doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="all variants, without a GPU")
    what.add_argument("--tune", action="store_true", help="base against base and variants, on the GPU")
    parser.add_argument("--kernels", type=int, default=44, help="how many kernels")
    parser.add_argument("--only", default="", help="comma-separated kernels or cases, in place of that")
    parser.add_argument("--also", type=Path, help="directory with another Triton to compile with")
    parser.add_argument("--jobs", type=int, default=2, help="variants that are checked at a time")
    parser.add_argument("--limit", type=int, default=LIMIT, help="variants that compete when tuning")
    parser.add_argument("--rounds", type=int, default=100, help="launches of each in the final timing")
    parser.add_argument("--seconds", type=float, default=400.0, help="time limit of one kernel when tuning")
    parser.add_argument(
        "--total-seconds", type=float, default=7200.0, help="time limit of all kernels when tuning"
    )
    parser.set_defaults(stub_only="--check" in sys.argv)
    a = result_files.parse_arguments(parser)
    if a.child == "tune":
        print(json.dumps(tune_case(a.given, a.null)), flush=True)
    elif a.child:
        listed = json.loads(Path(a.given["listed"]).read_text(encoding="utf-8"))
        if a.child == "interpret":
            check_all(interpret, listed, a.jobs)
        else:
            with null_device():
                check_all(compile_one, listed, a.jobs)
    elif a.check:
        return int(check(a, result_files.ResultFile(a, "mechanical_variants_cpu")) > 0)
    else:
        return int(tune(a, result_files.ResultFile(a, "mechanical_variants", 0)) > 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
