"""Calls that the base kernel is compiled for before they are launched: one of each form that is drawn. In the judge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from forecast_autotune.errors import RecordError
from forecast_autotune.records import Argument, Config
from forecast_autotune.variants.signature import memory_span
from forecast_harness.trials.variants.base_runner import call_arguments, memory_bytes
from forecast_harness.trials.variants.call_sampling import CallSource, RecordedCalls, with_heuristics
from forecast_harness.trials.variants.compilation.compiled_forms import call_form
from forecast_harness.trials.variants.tolerance import WIDER_DTYPE

_ARGUMENT_DRAWS, _CALL_DRAWS = 40, 24
"""Draws among which forms are looked for: of sizes alone, and of calls with values, which take longer."""
_FEWEST_CALL_DRAWS, _MOST_DRAWN_BYTES = 6, 64 << 20
"""No more calls with values than the first number are drawn once their tensors have taken so much."""
_MOST_CALLS = 24


def calls_to_compile(
    source: CallSource,
    config: Config,
    layers: Sequence[Mapping[str, Any]],
    generator: torch.Generator,
    *,
    wide_on: str = "",
) -> list[dict[str, Any]]:
    """Calls as `compile_calls` takes them, one for each form; with `wide_on` a device, in its wider dtype, too.

    Where there are many, those that are drawn most often.
    """
    found: dict[Hashable, dict[str, Any]] = {}
    drawn = Counter[Hashable]()
    for arguments, scalars, grid in _drawn(source, config, layers, generator):
        for given in (arguments, *([widened_arguments(arguments, wide_on)] if wide_on else [])):
            tensors = {
                a.name: [a.dtype, memory_span(a), int(not a.aligned)] for a in given if a.kind == "tensor"
            }
            call = call_arguments(given, scalars, grid, config)
            form = call_form(given, scalars)
            drawn[form] += 1
            found.setdefault(form, {"tensors": tensors, "call": call})
    return [found[form] for form, _ in drawn.most_common(_MOST_CALLS)]


def widened_arguments(arguments: Sequence[Argument], device: str) -> tuple[Argument, ...]:
    """The same with every floating tensor of the dtype that results are compared in there."""
    wide = WIDER_DTYPE[device]

    def widened(a: Argument) -> Argument:
        dtype = getattr(torch, a.dtype)
        narrow = dtype.is_floating_point and dtype.itemsize < wide.itemsize
        return replace(a, dtype=str(wide).removeprefix("torch.")) if narrow else a

    return tuple(widened(a) if a.kind == "tensor" else a for a in arguments)


def _drawn(
    source: CallSource, config: Config, layers: Sequence[Mapping[str, Any]], generator: torch.Generator
) -> list[tuple[Sequence[Argument], Mapping[str, Any], Sequence[int]]]:
    """Arguments, scalars and grids of calls that may come."""
    found: list[tuple[Sequence[Argument], Mapping[str, Any], Sequence[int]]] = []
    meta = config.parameters()
    try:
        if isinstance(source, RecordedCalls) and not layers:
            own = source.with_sizes(source.sizes)  # what it draws in turns is for launches
            for _ in range(_ARGUMENT_DRAWS):
                arguments = own.draw_arguments(generator)
                scalars = {
                    a.name: None if a.kind == "none" else a.value for a in arguments if a.kind != "tensor"
                }
                if (grid := own.grid_of(arguments, meta)) is not None:
                    found.append((arguments, scalars, grid))
            return found
        held = 0
        for number in range(_CALL_DRAWS):
            if number >= _FEWEST_CALL_DRAWS and held > _MOST_DRAWN_BYTES:
                break
            drawn = source.draw("normal", generator)
            held += memory_bytes(drawn.memory)
            if (grid := drawn.grid(meta)) is not None:
                found.append((drawn.arguments, with_heuristics(drawn, layers, meta), grid))
    except RecordError:
        return found  # who launches will hear of it
    return found
