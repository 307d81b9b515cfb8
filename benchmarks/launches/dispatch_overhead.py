"""Claim: a decorated call whose key is known costs no more host time than with `triton.autotune`.

    python -m benchmarks.launches.dispatch_overhead --out benchmarks/results/dispatch.json

One process; a kernel with 4 and one with 31 arguments besides the tuned one, called by position and by
keyword through `triton.autotune`, through `forecast_autotune`, and plainly. Blocks of calls of the three
alternate, nothing waits for the device inside a block, and the median block counts. The kernel does next to
nothing. The ratio is the median over rounds of ours/triton's.
`variant` is `forecast_autotune` where a variant has won: the kernel's own text, but every call is checked.
`untuned` is the same for a kernel without a tuner, `sized` for a variant with a grid and memory of its own, which
it asks its functions for.
"""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import gc
import os
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.lib import devices, result_files
from forecast_autotune import autotune
from forecast_autotune.variants import Check, Origin, Provenance, Variant
from forecast_harness.targets.kernels.sizes import CallSizes
from forecast_integrations.device import current_device
from forecast_integrations.triton import untuned
from forecast_integrations.triton.problem import describe
from forecast_integrations.triton.problem.source import standalone_source
from forecast_integrations.triton.variants.calls import CallGuard
from forecast_integrations.triton.variants.loading import LoadedVariant, VariantConfig, load_variant

CONFIGS = [triton.Config({"BLOCK": b}, num_warps=1) for b in (32, 64)]
GRID = (1,)
UNTUNED = {"BLOCK": 32}


@triton.jit
def few_arguments_kernel(x_ptr, y_ptr, n, scale, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n) * scale, mask=at < n)


# fmt: off
@triton.jit
def many_arguments_kernel(p0, p1, p2, p3, p4, p5, p6, p7, n0, n1, n2, n3, n4, n5, n6, n7, n8, n9, n10,
         n11, n12, n13, n14, n15, n16, n17, n18, n19, n20, n21, n22, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(p7 + at, tl.load(p0 + at, mask=at < n0), mask=at < n22)
# fmt: on


OWN_FUNCTIONS = """

def grid(meta, arguments, base):
    return (base[0], 1)


def workspace(meta, arguments, base, grid):
    return grid[0] * meta["BLOCK"], grid[0]
"""


def sized_source(text: str) -> str:
    """A kernel's text with a grid and memory of its own."""
    return text.replace("BLOCK: tl.constexpr", "WORKSPACE, COUNTERS, BLOCK: tl.constexpr") + OWN_FUNCTIONS


def tuner_with_variant(
    kernel: Any, key: list[str], args: tuple[Any, ...], source: str
) -> tuple[Any, LoadedVariant]:
    """A tuner for which a variant has won, whatever the clock says; and that variant."""
    record = describe.kernel_record(kernel)
    named = dict(zip(kernel.arg_names, args, strict=False))
    forms = [describe.call_arguments(kernel, {**named, **block}) for block in ({}, UNTUNED)]
    pointers = [a.name for a in forms[0] if a.kind == "tensor"]
    signatures = [CallSizes.of([form]).signature(pointers[-1:]) for form in forms]
    passed = tuple(Check(current_device().slug, signature, True) for signature in signatures)
    result = Variant.of(record.name, record.source_sha256, source, Provenance(Origin.HAND))
    result = replace(result, checks=passed)
    tuner = autotune(CONFIGS, key, store=False, variants=[result])(kernel)
    tuner[GRID](*args)
    function = load_variant(result, kernel, CallGuard(result, record, kernel))
    tuner.cache = {known: VariantConfig.of(tuner.configs[0], function) for known in tuner.cache}
    return tuner, function


def contenders(kernel: Any, key: list[str], args: tuple[Any, ...], named: bool) -> dict[str, Any]:
    """Name -> a function that makes one call; every tuner has seen the key."""
    theirs = triton.autotune(CONFIGS, key)(kernel)
    ours = autotune(CONFIGS, key, store=False)(kernel)
    text = standalone_source(kernel)
    other, function = tuner_with_variant(kernel, key, args, text)
    sized, _ = tuner_with_variant(kernel, key, args, sized_source(text))
    served = untuned.ServedKernel(kernel, [function.variant])
    vars(kernel)[untuned.ENTRY] = (served,)
    launch_served = untuned.serving(triton.JITFunction.run)
    for tuner in (theirs, ours):
        tuner[GRID](*args)
    launch = ours.best_config.all_kwargs()
    given: dict[str, Any] = {}
    if named:
        given, args = dict(zip(kernel.arg_names, args, strict=False)), ()
    calls = {
        "triton": lambda: theirs[GRID](*args, **given),
        "forecast": lambda: ours[GRID](*args, **given),
        "variant": lambda: other[GRID](*args, **given),
        "sized": lambda: sized[GRID](*args, **given),
        "untuned": lambda: launch_served(
            kernel, *args, grid=GRID, warmup=False, **given, **UNTUNED, num_warps=1
        ),
        "plain": lambda: kernel[GRID](*args, **given, **launch),
    }
    calls["untuned"]()
    (bare,) = served._tuners.values()
    bare.cache = {known: VariantConfig.of(bare.configs[0], function) for known in bare.cache}
    for name, tuner in {"variant": other, "sized": sized, "untuned": bare}.items():
        calls[name]()  # a real kernel, for once: how a call is handed on is found out at the first one
        assert isinstance(tuner.best_config, VariantConfig)
    return calls


def time_alternately(
    calls: dict[str, Callable[[], object]], blocks: int, count: int
) -> dict[str, list[float]]:
    """Microseconds per call: per contender one figure for each block of `count` calls."""
    result: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for call in calls.values():
        for _ in range(count):
            call()
    gc.collect()
    gc.disable()
    try:
        for block in range(blocks):
            for name in names[block % len(names) :] + names[: block % len(names)]:
                call = calls[name]
                devices.synchronize()
                begin = time.perf_counter_ns()
                for _ in range(count):
                    call()
                result[name].append((time.perf_counter_ns() - begin) / count / 1000)
    finally:
        gc.enable()
    devices.synchronize()
    return result


def run(a: Namespace, report: result_files.ResultFile) -> None:
    summary: dict[str, Any] = {}
    with (
        devices.device(a.null or not torch.cuda.is_available()) as where,
        tempfile.TemporaryDirectory() as store,
    ):
        os.environ |= {"FORECAST_AUTOTUNE_VARIANTS": "store", "FORECAST_AUTOTUNE_CACHE_DIR": store}
        # Tensors of the device `meta` all lie at address zero: they would count as overlapping.
        x, y = (torch.empty(64, device="cpu" if where == "meta" else where) for _ in range(2))
        kernels = {
            4: (few_arguments_kernel, ["n"], (x, y, 64, 2.0)),
            31: (many_arguments_kernel, ["n0", "n1"], (*[x] * 7, y, *range(64, 87))),
        }
        for arguments, (kernel, key, args) in kernels.items():
            assert len(args) == arguments
            for named in (False, True):
                name = f"device/{arguments}/{'keyword' if named else 'position'}"
                calls = contenders(kernel, key, args, named)
                # At most 1000: a full launch queue would make the host wait for the device.
                times = time_alternately(calls, a.blocks, min(a.calls, 1000))
                report.add(name, {k: [round(t, 3) for t in v] for k, v in times.items()})
                summary[name] = summarise(times)
                result_files.say(f"{name}: {summary[name]}")
    report.finish(summary)


def summarise(times: dict[str, list[float]]) -> dict[str, Any]:
    """Medians in microseconds per call, and ratios."""
    medians = {name: round(statistics.median(t), 3) for name, t in times.items()}
    pairs = zip(times["forecast"], times["triton"], strict=True)
    return {
        "us_per_call": medians,
        "ratio_to_triton": round(statistics.median(f / t for f, t in pairs), 4),
        "us_above_plain": round(medians["forecast"] - medians["plain"], 3),
        "variant_us_above_plain": round(medians["variant"] - medians["plain"], 3),
        "sized_us_above_plain": round(medians["sized"] - medians["plain"], 3),
        "untuned_to_plain": round(medians["untuned"] / medians["plain"], 3),
        "triton_us_above_plain": round(medians["triton"] - medians["plain"], 3),
    }


def main() -> int:
    parser = result_files.parser(__doc__)
    parser.add_argument("--blocks", type=int, default=150, help="blocks per contender and row")
    parser.add_argument("--calls", type=int, default=200, help="calls per block, at most 1000")
    a = result_files.parse_arguments(parser)
    run(a, result_files.ResultFile(a, "dispatch"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
