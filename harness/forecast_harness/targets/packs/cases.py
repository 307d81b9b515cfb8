"""Packs around kernels that somebody else keeps: a `Case` object, named from outside."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from forecast_autotune.errors import RecordError
from forecast_harness.targets.packs.schema import Definition, Language, Pack, PackFormat, Solution, Workload

_REFERENCE_TEMPLATE = """from {module} import {finder} as find

CASE = find([{name!r}])[0]
"""
_SOLUTION_TEMPLATE = """from {module} import {finder} as find

CASE = find([{name!r}])[0]
SMALL, CONFIG = {small!r}, {config!r}
_data = CASE.make("meta", small=SMALL)


def run(**arguments):
    positional = [arguments[name] for name in sorted(arguments, key=lambda n: int(n[1:]))]
    CASE.kernel[_data["grid"]](*positional, **_data["kwargs"], **CONFIG)
"""


def pack_from_case(
    name: str,
    configs: Sequence[Mapping[str, Any]],
    *,
    module: str,
    finder: str = "cases",
    files: Mapping[str, str] | None = None,
    small: bool = False,
    shuffled: bool = True,
    deterministic: bool = True,
) -> Pack:
    """A pack whose solutions are one kernel in several configs.

    `module.finder([name])[0]` must be an object with `kernel` (a `@triton.jit` function), `make(device,
    small)` (a dict of `args`, `kwargs`, `grid`, `outputs`), `reference(data)`, `tolerance` (atol, rtol) and
    `reset_to_zero`. This package never imports it: the judge does, so a lane must be opened where that is
    possible, and so do cells, which see installed packages and `files` (relative path -> text). A config
    holds the meta-parameters, and `num_warps` and the like if wanted. `shuffled` puts the values of every
    floating input in a new order for every launch; without it, for inputs whose values have a structure (a
    triangle, a cumulative sum), only addresses and surroundings vary. Raises `RecordError` for names that
    are no identifiers or configs that are not plain.
    """
    if not all(part.isidentifier() for part in (*module.split("."), finder)):
        raise RecordError(f"module and finder must be importable names, got {module!r} and {finder!r}")
    solutions = []
    for n, config in enumerate(configs):
        try:
            plain = json.loads(json.dumps(dict(config)))
        except TypeError as error:
            raise RecordError(f"config {n} of {name} holds more than plain values: {error}") from error
        text = _SOLUTION_TEMPLATE.format(module=module, finder=finder, name=name, small=small, config=plain)
        solutions.append(Solution(f"config-{n}", Language.TRITON, text, files=files or {}))
    definition = Definition(name, format=PackFormat.CASE, destination=True, deterministic=deterministic)
    reference = _REFERENCE_TEMPLATE.format(module=module, finder=finder, name=name)
    return Pack(
        definition,
        reference,
        (Workload("case", {"small": int(small), "shuffled": int(shuffled)}),),
        tuple(solutions),
    )
