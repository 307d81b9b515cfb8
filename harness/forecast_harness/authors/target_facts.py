"""What a target's definition says that rewrites and prompts can use."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from forecast_harness.authors.torch.protocol import InputFacts
from forecast_harness.records import SearchTarget, TargetKind
from forecast_harness.targets.packs.expressions import evaluate
from forecast_harness.targets.packs.schema import Definition, Pack, PackFormat

_BYTES_OF_BITS = {"64": 8, "32": 4, "16": 2, "8": 1}


def target_facts(target: SearchTarget) -> InputFacts:
    """What is known of a target's inputs and outputs; nothing for kernels and foreign tasks."""
    pack = _own_pack(target)
    return InputFacts() if pack is None else pack_facts(pack)


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


def timed_work(target: SearchTarget) -> dict[str, dict[str, Any]]:
    """What one launch of each workload of a pack of our own format has to do: `axes`, `bytes` and `flops`."""
    if (pack := _own_pack(target)) is None:
        return {}
    found = {}
    for work in pack.workloads:
        moved, flops = _traffic_and_operations(pack.definition, work.axes)
        found[work.name] = {"axes": dict(work.axes), "bytes": moved, "flops": flops}
    return found


def _own_pack(target: SearchTarget) -> Pack | None:
    """A target's pack of our own format; None for kernels and foreign tasks."""
    given: Mapping[str, Any] | None = target.payload.get("pack")
    if target.kind is not TargetKind.PACK or given is None:
        return None
    pack = Pack.from_json(given)
    return pack if pack.definition.format is PackFormat.OWN else None


def _traffic_and_operations(about: Definition, axes: Mapping[str, int]) -> tuple[int, int]:
    """Bytes that must be moved and useful operations at one size."""
    known = {**{n: a.value for n, a in about.axes.items() if a.value is not None}, **axes}
    if about.bytes:
        moved = evaluate(about.bytes, known)
    else:
        every = (*about.inputs.values(), *about.outputs.values())
        moved = sum(math.prod(t.sizes(known)) * _element_bytes(t.dtype) for t in every)
    return moved, evaluate(about.flops, known)


def _element_bytes(dtype: str) -> int:
    digits = "".join(c for c in dtype.partition("_")[0] if c.isdigit())
    return _BYTES_OF_BITS.get(digits, 1)
