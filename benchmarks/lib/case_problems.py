"""Benchmark cases as problem records, without a GPU."""

from __future__ import annotations

from typing import Any

from benchmarks import kernels
from benchmarks.lib.processes.harvest_worker import harvested_configs
from forecast_autotune.records import Problem, digest
from forecast_integrations.triton.problem import describe
from forecast_integrations.triton.problem.source import innermost


def problem_of_case(case: kernels.Case) -> tuple[Problem, dict[str, Any]]:
    """The problem record of a case on the null device, and its arguments by name."""
    data = case.make("meta")
    named = {**dict(zip(case.kernel.arg_names, data["args"], strict=False)), **data["kwargs"]}
    record = describe.kernel_record(case.kernel)
    key = tuple(str(named[name]) for name in case.key)
    return describe.describe(case.kernel, record, named, key, data["grid"]), named


def binary_digests(case: kernels.Case) -> list[str]:
    """What each config's binary depends on: a digest that other shapes may share."""
    problem, named = problem_of_case(case)
    kind = describe.call_kind(problem, innermost(case.kernel))
    computed = describe.heuristic_values(case.kernel)
    found = []
    for config in harvested_configs(case):
        values = computed({**named, **config.all_kwargs()})
        added = {k: v for k, v in values.items() if k not in named}
        found.append(digest(kind, str(config), sorted((k, repr(v)) for k, v in added.items())))
    return found
