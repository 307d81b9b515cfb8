"""Claim: programs that share one long sum beat the best config of a kernel whose programs do not.

    python -m benchmarks.machine_code.shared_reductions --out FILE.json [--only matmul] [--null]

Matrix products with few tiles, and sums with few rows. Every config of the kernel, and of its variants by
`split-reduction`, is checked and timed. Another tuner with an empty store decides among the same
candidates by forecasts, within its default budget. Their choices are timed in turns, the kernel's best config twice:
the noise.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from benchmarks import kernels
from benchmarks.lib import devices, kernel_timing
from benchmarks.lib.devices import synchronize
from benchmarks.lib.result_files import ResultFile, parse_arguments, parser, say
from forecast_autotune import Store, autotune
from forecast_autotune.variants import Check, Variant, signature_of
from forecast_harness.authors.triton import variants_of
from forecast_integrations.triton.problem import describe
from forecast_integrations.triton.problem.source import standalone_source
from forecast_integrations.triton.variants.loading import LoadedVariant
from forecast_integrations.triton.variants.loading import load_variant as load_for_kernel

NEVER_RAN = "no config could be launched"
"""The fault of a variant that never ran."""


def rewrites_of_case(case: kernels.Case, **options: Any) -> list[Variant]:
    """The variants of a case's kernel, told its configs and the arguments of its real shape."""
    record = describe.kernel_record(case.kernel)
    data = case.make("meta")
    named = {**dict(zip(case.kernel.arg_names, data["args"], strict=False)), **data["kwargs"]}
    return variants_of(
        standalone_source(case.kernel),
        record.name,
        record.source_sha256,
        configs=[describe.to_config(c) for c in kernels.configs(case)],
        arguments=describe.call_arguments(case.kernel, named),
        **options,
    )


def load_variant(case: kernels.Case, variant: Variant) -> LoadedVariant:
    """A variant, ready to run."""
    return load_for_kernel(variant, case.kernel, lambda args, kwargs: True)


def launch_variant(case: kernels.Case, data: kernels.Data, function: LoadedVariant, config: Any) -> Any:
    """Launch a variant once; returns what Triton returns."""
    return function.run(*data["args"], grid=data["grid"], **data["kwargs"], **config.all_kwargs())


def variant_failure(case: kernels.Case, variant: Variant, data: kernels.Data, expected: Any) -> str:
    """Return what is wrong with a variant under its first and its last config; empty for one that is right."""
    function = load_variant(case, variant)
    listed = function.configs(kernels.configs(case))
    ran = 0
    for index in sorted({0, len(listed) - 1}):
        kernels.reset(case, data)
        try:
            launch_variant(case, data, function, listed[index])
            synchronize()
        except Exception as error:  # too much shared memory for this config, perhaps
            say(f"{case.name} {variant.name} {listed[index]}: {type(error).__name__}")
            continue
        if wrong := kernels.mismatch(case, data, expected):
            return f"{listed[index]}: {wrong}"
        ran += 1
    return "" if ran else NEVER_RAN


def verified_variants(
    case: kernels.Case, where: str, variants: Sequence[Variant], data: kernels.Data
) -> list[Variant]:
    """Those that are right under two configs, with the check that says so; all of them without a device."""
    named = {**dict(zip(case.kernel.arg_names, data["args"], strict=False)), **data["kwargs"]}
    problem = describe.describe(case.kernel, describe.kernel_record(case.kernel), named, (), None)
    signature = signature_of(problem, [n for n, v in named.items() if any(v is o for o in data["outputs"])])
    expected = None if where == "meta" else case.reference(data)
    kept = []
    for variant in variants:
        wrong = ""
        if where != "meta":
            wrong = variant_failure(case, variant, data, expected)
        at = datetime.now(UTC).isoformat(timespec="seconds")
        check_ = Check(problem.device.slug, signature, not wrong, wrong or "two configs", at)
        if wrong:
            say(f"{case.name} {variant.name}: refused: {wrong[:300]}")
        else:
            kept.append(replace(variant, checks=(check_,)))
    return kept


REWRITE = "split-reduction"
SHAPES = {
    "matmul": [
        (256, 256, 8192),
        (64, 4096, 4096),
        (512, 1024, 8192),
        (1536, 1536, 2048),
        (2048, 2048, 2048),
    ],
    "w8a16_matmul": [(16, 1024, 8192), (16, 4096, 14336)],
    "rows_bias_grad": [(65536, 512), (8192, 4096)],
}
"""Rows, columns and inner length; of a sum over rows, rows and columns."""
FEW_TILES: kernels.Space = {
    "kwargs": {
        "BLOCK_M": [16, 32, 64, 128],
        "BLOCK_N": [32, 64, 128],
        "BLOCK_K": [64, 128],
        "GROUP_M": [8],
    },
    "num_warps": [4, 8],
    "num_stages": [3, 4],
    "where": lambda p: p["BLOCK_M"] * p["BLOCK_N"] >= 256 * p["num_warps"],
}
"""Configs of the plain product, whose own list has no tile as small as such shapes want."""
ROUNDS = 100
"""Launches of each when they are timed in turns."""


def cases(kernel: str) -> list[kernels.Case]:
    """A kernel at each of its shapes."""
    first = kernels.cases([kernel])[0]
    make, tiny = first.make.func, first.make.args[1]  # type: ignore[attr-defined]
    space = FEW_TILES if kernel == "matmul" else first.space
    return [
        replace(first, name=f"{kernel}/{'x'.join(map(str, s))}", space=space, make=partial(make, s, tiny))
        for s in SHAPES[kernel]
    ]


def measure(case: kernels.Case, where: str, rounds: int) -> dict[str, Any]:
    """Everything about one kernel at one shape."""
    data = case.make("cpu", small=True) if where == "meta" else case.make(where)
    result = rewrites_of_case(case, only=[REWRITE], combine=False)
    right = verified_variants(case, where, result, data)
    stores = Store(None), Store(None)
    options = {"reset_to_zero": list(case.reset_to_zero), "variants": right}
    tune = partial(autotune, kernels.configs(case), list(case.key), **options)
    exhaustive = tune(mode="exhaustive", store=stores[0])(case.kernel)
    default = tune(store=stores[1])(case.kernel)
    results = [kernel_timing.tuned_call(case, tuner, data, lambda: None) for tuner in (exhaustive, default)]
    best: dict[str, Any] = {}
    for config, ms in sorted(exhaustive.configs_timings.items(), key=lambda pair: _first(pair[1])):
        if _first(ms) < float("inf"):
            best.setdefault(_source(config), config)
    calls = {
        "base": partial(kernels.launch, case, data, best["base"]),
        **{
            v.name: partial(launch_variant, case, data, load_variant(case, v), best[v.name])
            for v in right
            if v.name in best
        },
    }
    wrong = {}
    for name, call in calls.items():
        kernels.reset(case, data)
        call()
        devices.synchronize()
        if where != "meta" and (text := kernels.mismatch(case, data)):
            wrong[name] = text
    chosen = default.best_config
    calls["chosen"] = partial(default.__getitem__(data["grid"]), *data["args"], **data["kwargs"])
    calls["again"] = calls["base"]
    times = kernel_timing.time_in_turns(list(calls.values()), rounds)
    return {
        "case": case.name,
        "candidates": results[1]["decision"]["candidates"],
        "measured": results[1]["decision"]["measured"],
        "seconds": [round(one["seconds"], 3) for one in results],
        "made": [v.name for v in result],
        "refused": [v.name for v in result if v.name not in {r.name for r in right}],
        "wrong": wrong,
        "failed": _failures(stores[0]),
        "configs": {name: str(config) for name, config in best.items()},
        "chosen": f"{_source(chosen)}: {chosen}",
        "ms": dict(zip(calls, map(statistics.median, times), strict=True)),
    }


def _failures(store: Store) -> dict[str, list[str]]:
    """How each source's configs failed: how often, and what the first of them said."""
    result: dict[str, list[str]] = {}
    for table in store.tables():
        for one in table.measurements:
            if not one.ok:
                result.setdefault(one.candidate.variant, []).append(str(one.extra.get("message", ""))[:200])
    return {source: [str(len(text)), text[0]] for source, text in result.items()}


def _first(ms: Any) -> float:
    return float(ms[0] if isinstance(ms, list | tuple) else ms)


def _source(config: Any) -> str:
    """Return whose config it is: a variant's name, or `base`."""
    function = getattr(config, "function", None)
    return "base" if function is None else str(function.name)


def _gain(row: dict[str, Any]) -> float:
    """The kernel's best time over the best of what was made of it."""
    ms = [t for n, t in row["ms"].items() if n.startswith(REWRITE) and n not in row["wrong"]]
    return float(row["ms"]["base"] / min(ms)) if ms else 0.0


def summary_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Gains by shape, of the rewrite and of what the default decision chose."""
    return {
        "shapes": len(rows),
        "wrong": sum(len(row["wrong"]) for row in rows),
        "gain": {row["case"]: round(_gain(row), 3) for row in rows},
        "chosen": {row["case"]: round(row["ms"]["base"] / row["ms"]["chosen"], 3) for row in rows},
        "geomean": round(statistics.geometric_mean(max(1.0, _gain(row)) for row in rows), 3),
        "geomean_chosen": round(
            statistics.geometric_mean(r["ms"]["base"] / r["ms"]["chosen"] for r in rows), 3
        ),
        "noise": round(max(abs(row["ms"]["again"] / row["ms"]["base"] - 1) for row in rows), 4),
    }


def main() -> int:
    command_line = parser(__doc__)
    command_line.add_argument("--only", default="", help="comma-separated kernels")
    arguments = parse_arguments(command_line)
    result = ResultFile(arguments, "shared_reductions", 0)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, devices.device(arguments.null) as where:
        os.environ["TRITON_CACHE_DIR"] = folder
        devices.warm_up_device(where)
        for kernel in [n for n in arguments.only.split(",") if n] or SHAPES:
            for case in cases(kernel):
                rows.append(measure(case, where, 5 if arguments.null else ROUNDS))
                result.data["summary"] = summary_of(rows)  # of a run that is cut short
                result.add("shapes", rows[-1])
                gain, ms = _gain(rows[-1]), rows[-1]["ms"]
                say(f"{case.name}: {gain:.3f}x, {ms['base'] / ms['chosen']:.3f}x with {rows[-1]['chosen']}")
    result.finish(summary_of(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
