"""What can be said of one Inductor choice before it is compiled: numbers and words by name."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from forecast_autotune.features.devices import device_spec
from forecast_autotune.records import Argument, Device, Kernel, Problem
from forecast_integrations.inductor.choices.geometry import MatmulGeometry, operation_geometry
from forecast_integrations.inductor.choices.records import (
    candidate_of,
    size_hints,
    template_choice,
    unwrap_choice,
)
from forecast_integrations.inductor.choices.templates import closed_form, has_closed_form

if TYPE_CHECKING:
    import torch

    from forecast_integrations.inductor.choices.records import Choice, Size

Feature: TypeAlias = float | int | str

_MISSING_ERRORS = (AttributeError, LookupError, TypeError, ValueError, NotImplementedError, AssertionError)
"""What reading a choice of another release may raise."""


def describe_choice(choice: Choice, *, facts: bool = False) -> dict[str, Feature]:
    """Features of one `ChoiceCaller` or `KernelTemplateChoice`; empty when nothing is known of it.

    `variant`, `backend` and the template's own parameters by their names (switches as 0 and 1); for
    products `op.m`, `op.n`, `op.k`, `op.batch`; for templates with a closed form `programs`, the size of
    the launch; `registers` once it is compiled. `facts` adds the closed form's own numbers as
    `fact.<name>` (`features.ttir.facts.TtirFacts`): they follow from the rest, so nothing stores them.
    """
    try:
        candidate = candidate_of(choice)
    except _MISSING_ERRORS:
        return {}
    found: dict[str, Feature] = {
        "variant": candidate.variant,
        "backend": candidate.variant.partition("::")[0],
    }
    # Vendor kernels and C++ templates have no warps: what their records hold there means nothing.
    launched = found["backend"] == "triton"
    config = candidate.config
    for name, value in (config.parameters() if launched else dict(config.kwargs)).items():
        if value is not None:
            found[name] = int(value) if isinstance(value, bool) else value
    # An attribute of its own or none: a subgraph's is a property that asserts pipelined tuning.
    registers = getattr(vars(unwrap_choice(choice)).get("bmreq"), "n_regs", None)
    if isinstance(registers, int):
        found["registers"] = registers
    try:
        problem = _problem(choice, candidate.variant)
    except _MISSING_ERRORS:
        return found
    shape = operation_geometry(problem)
    if isinstance(shape, MatmulGeometry):
        found |= {"op.m": shape.m, "op.n": shape.n, "op.k": shape.k, "op.batch": shape.batch}
    if shape is None or not has_closed_form(shape, candidate):
        return found
    sms = device_spec(problem.device).multiprocessors
    known = closed_form(shape, candidate.variant, candidate.config.parameters(), sms)
    if known is None:
        return found
    found["programs"] = math.prod(known.grid)
    if not facts:
        return found
    for field in dataclasses.fields(known.facts):
        if field.name != "dot_shapes":
            found[f"fact.{field.name}"] = getattr(known.facts, field.name)
    return found


def _problem(choice: Choice, variant: str) -> Problem:
    """The operands of a choice as a problem of no particular device, named after its template."""
    ktc, inner = template_choice(choice), unwrap_choice(choice)
    nodes = list(inner.input_nodes) if ktc is None else list(ktc.inputs.nodes())
    layout = getattr(inner, "layout", None)
    arguments = [_tensor(f"in{i}", n.get_dtype(), n.get_size(), n.get_stride()) for i, n in enumerate(nodes)]
    if layout is not None and hasattr(layout, "size"):
        arguments.append(_tensor("out", layout.dtype, layout.size, layout.stride))
    name = variant.rpartition("::")[2]
    if len(nodes) > 2 and name.startswith(("mm", "bmm", "bias")) and name != "mm_plus_mm":
        name = f"add{name}"  # addmm and baddbmm run the templates of mm and bmm, with the bias in front
    return Problem.of(Kernel(name, "inductor"), arguments, Device("unknown"))


def _tensor(name: str, dtype: torch.dtype, size: Sequence[Size], stride: Sequence[Size]) -> Argument:
    return Argument(name, "tensor", str(dtype).removeprefix("torch."), size_hints(size), size_hints(stride))
