"""Launch options that a call itself gives beside its arguments, as `maxnreg=32`: code and speed depend on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from forecast_autotune.records import Problem, Scalar, to_scalar
from forecast_autotune.records.problem import OPTIONS
from forecast_integrations.triton.protocols import NamedArguments, is_descriptor, is_tensor

Options = Mapping[str, object]
"""Plain values by name, in order of their names; what is no plain value is a pair of its type and text."""
OWN_BENCHMARK = "do_bench"
"""Among the options of a call that a benchmark function of the user's times, whose times are not comparable to ours."""


def call_options(parameters: Sequence[str], named: NamedArguments) -> dict[str, object]:
    """Those of a call: its keywords that are none of the kernel's `parameters`.

    Tensors are none of them: they are for a wrapper of the user's.
    """
    known = {*parameters, "grid", "warmup"}
    return {
        name: _option_value(value)
        for name, value in sorted(named.items())
        if name not in known and not is_tensor(value) and not is_descriptor(value)
    }


def _option_value(value: object) -> Scalar | tuple[str, str]:
    if value is None or isinstance(value, bool | int | float | str):
        return to_scalar(value)
    text = str(value)
    return type(
        value
    ).__name__, "" if " at 0x" in text else text  # an address is another one in every process


def options_of(problem: Problem) -> Options:
    """Those of a recorded call."""
    found = problem.extra.get(OPTIONS)
    return found if isinstance(found, Mapping) else {}


def with_options(problem: Problem, options: Options) -> Problem:
    """The record of a call that gave these."""
    return replace(problem, extra={**problem.extra, OPTIONS: dict(options)}) if options else problem


def options_identity(options: Options) -> list[object]:
    """What they add to what tells problems apart: nothing for a call without any."""
    return [[OPTIONS, sorted(options.items())]] if options else []
