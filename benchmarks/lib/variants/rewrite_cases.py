"""Benchmark kernels with variants that rewrites have made: which kernels, launching one, checking one."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from benchmarks import kernels
from benchmarks.lib.devices import synchronize
from benchmarks.lib.result_files import say
from forecast_autotune.variants import Check, Variant, signature_of
from forecast_harness.authors.triton import variants_of
from forecast_integrations.triton.problem import describe
from forecast_integrations.triton.problem.source import standalone_source
from forecast_integrations.triton.variants.loading import LoadedVariant
from forecast_integrations.triton.variants.loading import load_variant as load_for_kernel

NEVER_RAN = "no config could be launched"
"""What is wrong with a variant that never ran."""


def first_cases(count: int) -> list[kernels.Case]:
    """First cases of kernels, families and hands in turns."""
    groups: dict[tuple[str, str], list[kernels.Case]] = {}
    seen: set[str] = set()
    for case in kernels.every():
        if (kernel := case.name.partition("/")[0]) not in seen:
            seen.add(kernel)
            groups.setdefault((case.hand, case.family), []).append(case)
    order = [groups[key] for key in sorted(groups)]
    random.Random(0).shuffle(order)
    return [c for layer in itertools.zip_longest(*order) for c in layer if c is not None][:count]


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
    """What is wrong with a variant under its first and its last config; empty for one that is right."""
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
