"""Benchmark kernels with their mechanical variants: which kernels, their variants, launching one."""

from __future__ import annotations

import itertools
import random
from typing import Any

from benchmarks import kernels
from forecast_autotune.variants import Variant
from forecast_autotune.variants.mechanical import variants_of
from forecast_integrations import describe
from forecast_integrations.standalone import module_text
from forecast_integrations.variants import Loaded, load


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


def generated(case: kernels.Case, **options: Any) -> list[Variant]:
    """The variants of a case's kernel, told its configs and the arguments of its real shape."""
    record = describe.kernel_record(case.kernel)
    data = case.make("meta")
    named = {**dict(zip(case.kernel.arg_names, data["args"], strict=False)), **data["kwargs"]}
    return variants_of(
        module_text(case.kernel),
        record.name,
        record.source_sha256,
        configs=[describe.to_config(c) for c in kernels.configs(case)],
        arguments=describe.arguments(case.kernel, named),
        **options,
    )


def loaded(case: kernels.Case, variant: Variant) -> Loaded:
    """A variant, ready to run."""
    return load(variant, case.kernel, lambda _: True)


def launch(case: kernels.Case, data: kernels.Data, function: Loaded, config: Any) -> Any:
    """Launch a variant once; returns what Triton returns."""
    return function.run(*data["args"], grid=data["grid"], **data["kwargs"], **config.all_kwargs())
