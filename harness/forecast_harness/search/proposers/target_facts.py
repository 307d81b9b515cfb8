"""What a target's definition says that rewrites and prompts can use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forecast_harness.packs.schema import Pack, PackFormat
from forecast_harness.rewrites.torch.protocol import InputFacts
from forecast_harness.search.records import SearchTarget, TargetKind


def target_facts(target: SearchTarget) -> InputFacts:
    """What is known of a target's inputs and outputs; nothing for kernels and foreign tasks."""
    given: Mapping[str, Any] | None = target.payload.get("pack")
    if target.kind is not TargetKind.PACK or given is None:
        return InputFacts()
    return pack_facts(Pack.from_json(given))


def pack_facts(pack: Pack) -> InputFacts:
    """Which arguments have rows, and how many results there are.

    An argument has rows when its first axis is the first of every output and stands nowhere else in the
    definition's shapes: what is computed for some of them may then depend on no others.
    """
    about = pack.definition
    if about.format is not PackFormat.OWN:
        return InputFacts()
    firsts = {t.shape[0] for t in about.outputs.values() if t.shape}
    outputs = 0 if about.destination else len(about.outputs)
    if len(firsts) != 1 or len({t.shape[:1] for t in about.outputs.values()}) != 1:
        return InputFacts((), outputs)
    (axis,) = firsts
    given = {**about.inputs, **(about.outputs if about.destination else {})}
    elsewhere = [t for t in (*about.inputs.values(), *about.outputs.values()) if axis in t.shape[1:]]
    rows = tuple(name for name, t in given.items() if t.shape[:1] == (axis,))
    return InputFacts(() if elsewhere or axis not in about.axes else rows, outputs)
