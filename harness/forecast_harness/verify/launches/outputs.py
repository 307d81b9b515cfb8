"""Reading an answer: the tensors in its bytes, and what is wrong with their form and with the block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from forecast_harness.sandbox.jobs import BytesLike, CellAnswer
from forecast_harness.verify.launches.arena import Arena, changed_bytes, output_spans
from forecast_harness.verify.launches.digest import complement_spans
from forecast_harness.verify.verdict import Reason, ReasonCode

OutputFinding = tuple[ReasonCode, str]


@dataclass(frozen=True)
class LaunchOutputs:
    """What a launch wrote or returned."""

    tensors: list[torch.Tensor]
    raw: Mapping[str, BytesLike]
    """All bytes of the answer, by the names of its arrays."""


def read_outputs(answer: CellAnswer, arena: Arena) -> tuple[LaunchOutputs, list[OutputFinding]]:
    """Tensors made of the bytes that came back, and what is wrong with their form."""
    raw = {n: a.data for n, a in answer.arrays.items()}
    given = [s for s in arena.slots if s.output]
    if given:
        data = _tensor(raw["block"])
        return LaunchOutputs([s.view(data) for s in given], raw), []
    outputs: list[torch.Tensor] = []
    said: list[OutputFinding] = []
    for n, about in enumerate(answer.value["outputs"]):
        if "problem" in about:
            said.append((ReasonCode.WRONG_STRUCTURE, str(about["problem"])))
            continue
        if about["alias"]:
            said.append((ReasonCode.ALIASES_INPUT, f"output {n} lies in the memory of the inputs"))
        dtype = getattr(torch, about["dtype"])
        if not raw[f"out{n}"]:
            outputs.append(torch.empty(about["shape"], dtype=dtype))
            continue
        outputs.append(_tensor(raw[f"out{n}"]).view(dtype).as_strided(about["shape"], about["stride"]))
    return LaunchOutputs(outputs, raw), said


def stray_writes(arena: Arena, after: BytesLike) -> list[OutputFinding]:
    """What was written where nothing may be: into inputs, or out of bounds."""
    was, now = arena.block.numpy(), np.frombuffer(after, dtype=np.uint8)
    dense = all(s.dense for s in arena.slots if s.output)
    # Asked first because it is cheap: who owns each of a billion bytes matters only if one changed.
    kept = (
        complement_spans(output_spans(arena.slots), len(was))
        if dense and len(was) == len(now)
        else [(0, len(was))]
    )
    if all(np.array_equal(was[a:b], now[a:b]) for a, b in kept):
        return []
    inputs, stray = changed_bytes(arena, after)
    found = []
    if inputs:
        found.append((ReasonCode.MUTATED_INPUT, f"changed its input {', '.join(inputs)}"))
    if stray:
        found.append((ReasonCode.OUT_OF_BOUNDS, f"changed {stray} bytes outside every tensor"))
    return found


def process_findings(value: Mapping[str, Any], label: str) -> list[Reason]:
    """What the cell noticed about its own process."""
    found, said = [], value["harness"]
    if said["patched"]:
        found.append(Reason(ReasonCode.PATCHED, f"replaced {', '.join(said['patched'])}", label))
    if said["flags"]:
        changes = ", ".join(f"{n} to {v}" for n, v in said["flags"].items())
        found.append(Reason(ReasonCode.GLOBAL_STATE, f"set {changes} for the whole process", label))
    if said["threads"]:
        found.append(
            Reason(
                ReasonCode.THREADS, f"computed while nothing was asked: {'; '.join(said['threads'])}", label
            )
        )
    return found


def _tensor(data: BytesLike) -> torch.Tensor:
    # Over the wire come bytearrays, which need no copy; whoever answers in the same process may say bytes.
    return torch.frombuffer(data if isinstance(data, bytearray) else bytearray(data), dtype=torch.uint8)
