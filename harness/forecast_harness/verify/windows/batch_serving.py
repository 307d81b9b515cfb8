"""Serves batches of launches in the cell, next to the candidate: many launches in one window.

Inputs lie in memory that the judge fills, outputs are copied to memory that the judge reads. Nothing said here is
believed: a window's time is the judge's, and what lies in its memory when the window ends counts. All that can
be told before a window is told before, so that as little as possible has to be done in it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from forecast_harness.clocks.devices import DeviceTimer
from forecast_harness.sandbox.cell_process import receive_descriptor
from forecast_harness.sandbox.jobs import CellAnswer, TensorBytes
from forecast_harness.verify import inside
from forecast_harness.verify.launches.arena import Slot, aligned_size
from forecast_harness.verify.launches.block_store import BlockStore, bytes_at
from forecast_harness.verify.launches.process_watch import note_answer, note_question, process_report
from forecast_harness.verify.problems.argument_codec import decode_arguments
from forecast_harness.verify.windows.exported_memory import import_memory
from forecast_harness.verify.windows.output_pool import open_output_pool

_copy, _narrow, _pointer = torch.Tensor.copy_, torch.Tensor.narrow, torch.Tensor.data_ptr
_synchronize = torch.cuda.synchronize


@dataclass
class _Launched:
    """Of each launch: descriptions of its outputs, and their offsets in the judge's memory."""

    told: list[Any]
    places: list[list[int]]


@dataclass
class _ServedBatch:
    """What windows do until other launches are armed."""

    run: Callable[[list[Any]], _Launched]
    replay: Callable[[], None] | None
    kept: list[Any]
    """What launches that are replayed returned: its memory must not be used for anything else."""


def attach(
    payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes], state: dict[str, Any]
) -> CellAnswer:
    """Map the judge's memory called `name` for a `batch`, of so many `bytes`; its descriptor follows."""
    note_question(state)
    fd = receive_descriptor(state)
    mapped = import_memory(fd, int(payload["bytes"]), state["device"])
    state.setdefault("judges_memory", {})[payload["batch"], payload["name"]] = mapped
    os.close(fd)
    note_answer(state)
    return CellAnswer({})


def arm(payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes], state: dict[str, Any]) -> CellAnswer:
    """Keep what later windows launch, and launch it once: `calls`, one by one on `slots` of the judge's memory.

    Outputs of the launch n are copied to the judge's memory from n times `room` on. `null`: forms of tensors that are
    returned instead of calling anything. The value has `outputs` (a list of descriptions for each launch), `places`
    (offsets in the judge's memory) and `recorded`: whether windows replay all of it, and say nothing; only where
    `record` asks for it. What is recorded has its outputs in the judge's memory at once, behind the room for copies,
    where torch can do so.
    """
    note_question(state)
    inputs, outputs = (state["judges_memory"][payload["batch"], n] for n in ("inputs", "outputs"))
    held = BlockStore(state["device"])
    held.adopt(inputs, int(inputs.numel()))
    calls: list[Callable[[], Any]] = []
    for slots, call in zip(payload["slots"], payload["calls"], strict=True):
        if payload.get("null") is None:
            views = held.views([Slot.from_json(s) for s in slots])
            positional = [decode_arguments(s, views) for s in call["args"]]
            named = {n: decode_arguments(s, views) for n, s in call["kwargs"].items()}
            calls.append(partial(inside._callable({}, {}, state), *positional, **named))
        else:
            calls.append(partial(_no_work, payload["null"], state["device"]))
    room = int(payload["room"])
    run = partial(_run_all, calls, room, outputs, {**state, "held": held, "most": room})
    found = run([])
    batch = _ServedBatch(run, None, [])
    if state["device"] != "cpu":
        _synchronize()
        if payload["record"]:
            memory = outputs[len(calls) * room :]
            batch.replay, found = _recorded(partial(run, batch.kept), state["timer"], found, memory)
    state.setdefault("batches", {})[payload["batch"]] = batch
    said = {"outputs": found.told, "places": found.places, "recorded": batch.replay is not None}
    return CellAnswer({**said, "harness": process_report(state)})


def launches(
    payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes], state: dict[str, Any]
) -> CellAnswer:
    """All launches of a `batch`, and their outputs where the judge reads them; to be asked within a window."""
    batch: _ServedBatch = state["batches"][payload["batch"]]
    if batch.replay is not None:
        batch.replay()
        _synchronize()
        return CellAnswer({})
    found = batch.run([])
    if state["device"] != "cpu":
        _synchronize()
    return CellAnswer({"outputs": found.told, "places": found.places})


def _run_all(
    calls: Sequence[Callable[[], Any]],
    room: int,
    target: torch.Tensor,
    state: dict[str, Any],
    kept: list[Any],
) -> _Launched:
    """All calls, and their outputs in `target`: copied to it where they do not lie there; `kept` gets the others."""
    found = _Launched([], [])
    for n, call in enumerate(calls):
        result = call()
        about, spans = inside._described(result, state)
        places: list[int] = []
        at, copied = n * room, False
        for address, size, owner in spans.values():
            offset = address - _pointer(target)
            if size and not 0 <= offset <= target.numel() - size:
                if at + size > (n + 1) * room:
                    about, places = [{"problem": "outputs take more room than asked for"}], []
                    break
                _copy(_narrow(target, 0, at, size), bytes_at(owner, address, size))
                offset, at, copied = at, at + aligned_size(size), True
            if size:
                places.append(offset)
        found.told.append(about)
        found.places.append(places)
        if not copied:
            kept.append(result)
    return found


def _no_work(forms: Sequence[Mapping[str, Any]], device: str) -> list[torch.Tensor]:
    """Tensors of these forms, with whatever values: what nobody can return sooner."""
    return [torch.empty(one["shape"], dtype=getattr(torch, one["dtype"]), device=device) for one in forms]


def _recorded(
    run: Callable[[], _Launched], timer: DeviceTimer, found: _Launched, memory: torch.Tensor
) -> tuple[Callable[[], None] | None, _Launched]:
    """A replay of all launches, and what they return there; None where they cannot be recorded."""
    sizes = [math.prod(one["shape"]) * _width(one) for told in found.told for one in told if "dtype" in one]
    pool = open_output_pool(memory, sizes, timer.recorder.stream)
    try:
        graph, recorded = timer.recorder.record(run, pool=None if pool is None else pool.id)
    except Exception:  # whatever the candidate raises where it may not wait for the device
        _synchronize()
        return None, found
    return graph.replay, recorded


def _width(about: Mapping[str, Any]) -> int:
    return int(getattr(torch, about["dtype"]).itemsize)
