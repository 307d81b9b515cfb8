"""Reading an answer: the tensors in its bytes, and what is wrong with their form and with the block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from forecast_harness.sandbox.jobs import Answer, Data
from forecast_harness.verify.arena import Arena, changed, written
from forecast_harness.verify.digest import gaps
from forecast_harness.verify.verdict import Code, Reason

Finding = tuple[Code, str]


@dataclass(frozen=True)
class Outputs:
    """What a launch wrote or returned."""

    tensors: list[torch.Tensor]
    raw: Mapping[str, Data]
    """All bytes of the answer, by the names of its arrays."""


def outputs_in(answer: Answer, arena: Arena) -> tuple[Outputs, list[Finding]]:
    """Tensors made of the bytes that came back, and what is wrong with their form."""
    raw = {n: a.data for n, a in answer.arrays.items()}
    given = [s for s in arena.slots if s.output]
    if given:
        data = _tensor(raw["block"])
        return Outputs([s.view(data) for s in given], raw), []
    outputs: list[torch.Tensor] = []
    said: list[Finding] = []
    for n, about in enumerate(answer.value["outputs"]):
        if "problem" in about:
            said.append((Code.WRONG_STRUCTURE, str(about["problem"])))
            continue
        if about["alias"]:
            said.append((Code.ALIASES_INPUT, f"output {n} lies in the memory of the inputs"))
        dtype = getattr(torch, about["dtype"])
        if not raw[f"out{n}"]:
            outputs.append(torch.empty(about["shape"], dtype=dtype))
            continue
        outputs.append(_tensor(raw[f"out{n}"]).view(dtype).as_strided(about["shape"], about["stride"]))
    return Outputs(outputs, raw), said


def strayed(arena: Arena, after: Data) -> list[Finding]:
    """What was written where nothing may be: into inputs, or out of bounds."""
    was, now = arena.block.numpy(), np.frombuffer(after, dtype=np.uint8)
    dense = all(s.dense for s in arena.slots if s.output)
    # Asked first because it is cheap: who owns each of a billion bytes matters only if one changed.
    kept = gaps(written(arena.slots), len(was)) if dense and len(was) == len(now) else [(0, len(was))]
    if all(np.array_equal(was[a:b], now[a:b]) for a, b in kept):
        return []
    inputs, stray = changed(arena, after)
    found = []
    if inputs:
        found.append((Code.MUTATED_INPUT, f"changed its input {', '.join(inputs)}"))
    if stray:
        found.append((Code.OUT_OF_BOUNDS, f"changed {stray} bytes outside every tensor"))
    return found


def report(value: Mapping[str, Any], label: str) -> list[Reason]:
    """What the cell noticed about its own process."""
    found, said = [], value["harness"]
    if said["patched"]:
        found.append(Reason(Code.PATCHED, f"replaced {', '.join(said['patched'])}", label))
    if said["flags"]:
        changes = ", ".join(f"{n} to {v}" for n, v in said["flags"].items())
        found.append(Reason(Code.GLOBAL_STATE, f"set {changes} for the whole process", label))
    if said["threads"]:
        found.append(Reason(Code.THREADS, f"left threads running: {said['threads']}", label))
    return found


def _tensor(data: Data) -> torch.Tensor:
    # Over the wire come bytearrays, which need no copy; whoever answers in the same process may say bytes.
    return torch.frombuffer(data if isinstance(data, bytearray) else bytearray(data), dtype=torch.uint8)
