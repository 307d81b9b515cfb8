"""Serves batches of launches in the cell, next to the candidate: many launches in one window.

Inputs lie in memory that the judge fills, outputs are copied to memory that the judge reads. The judge relies on
nothing that is said here: its clock times a window, and the contents of its memory when the window ends count. All
that can be said before a window is said before, so that as little as possible has to be done in it.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from forecast_harness.clocks.devices import DeviceTimer
from forecast_harness.sandbox.cell_process import receive_descriptor
from forecast_harness.sandbox.jobs import CellAnswer, TensorBytes
from forecast_harness.verify import launch_cell as inside
from forecast_harness.verify.blocks import Slot, aligned_size
from forecast_harness.verify.exported_memory import LIBRARY, import_memory
from forecast_harness.verify.inputs import decode_arguments
from forecast_harness.verify.launch_cell import (
    BlockStore,
    bytes_at,
    note_answer,
    note_question,
    process_report,
)

_copy, _narrow, _pointer = torch.Tensor.copy_, torch.Tensor.narrow, torch.Tensor.data_ptr
_synchronize = torch.cuda.synchronize


@dataclass
class _BatchOutputs:
    """Descriptions of each launch's outputs, and their offsets in the judge's memory."""

    descriptions: list[Any]
    places: list[list[int]]


@dataclass
class _ServedBatch:
    """The work of windows until other launches are armed."""

    run: Callable[[list[Any]], _BatchOutputs]
    replay: Callable[[], None] | None
    results: list[Any]
    """The results of launches that are replayed: their memory must not be used for anything else."""


def attach(
    payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes], state: dict[str, Any]
) -> CellAnswer:
    """Map the judge's memory called `name` for a `batch`, of so many `bytes`; its descriptor follows."""
    note_question(state)
    fd = receive_descriptor(state)
    memory = import_memory(fd, int(payload["bytes"]), state["device"])
    state.setdefault("judges_memory", {})[payload["batch"], payload["name"]] = memory
    os.close(fd)
    note_answer(state)
    return CellAnswer({})


def arm(payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes], state: dict[str, Any]) -> CellAnswer:
    """Keep the launches of later windows, and launch once: `calls`, one by one on `slots` of the judge's memory.

    Outputs of the launch n are copied to the judge's memory from n times `room` on. `null`: forms of tensors that are
    returned instead of calling anything. The value has `outputs` (a list of descriptions for each launch), `places`
    (offsets in the judge's memory) and `recorded`: whether windows replay all of it, and say nothing; only with
    `record`. Recorded launches have their outputs in the judge's memory at once, behind the room for
    copies, where torch can do so.
    """
    note_question(state)
    inputs, outputs = (state["judges_memory"][payload["batch"], n] for n in ("inputs", "outputs"))
    blocks = BlockStore(state["device"])
    blocks.adopt(inputs, int(inputs.numel()))
    calls: list[Callable[[], Any]] = []
    for slots, call in zip(payload["slots"], payload["calls"], strict=True):
        if payload.get("null") is None:
            views = blocks.views([Slot.from_json(s) for s in slots])
            positional = [decode_arguments(s, views) for s in call["args"]]
            keywords = {n: decode_arguments(s, views) for n, s in call["kwargs"].items()}
            calls.append(partial(inside._callable({}, {}, state), *positional, **keywords))
        else:
            calls.append(partial(_no_work, payload["null"], state["device"]))
    room = int(payload["room"])
    run = partial(_launch_all, calls, room, outputs, {**state, "held": blocks, "most": room})
    result = run([])
    batch = _ServedBatch(run, None, [])
    if state["device"] != "cpu":
        _synchronize()
        if payload["record"]:
            memory = outputs[len(calls) * room :]
            batch.replay, result = _record(partial(run, batch.results), state["timer"], result, memory)
    state.setdefault("batches", {})[payload["batch"]] = batch
    value = {"outputs": result.descriptions, "places": result.places, "recorded": batch.replay is not None}
    return CellAnswer({**value, "harness": process_report(state)})


def launches(
    payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes], state: dict[str, Any]
) -> CellAnswer:
    """Launch all of a `batch`, with outputs where the judge reads them; to be asked within a window."""
    batch: _ServedBatch = state["batches"][payload["batch"]]
    if batch.replay is not None:
        batch.replay()
        _synchronize()
        return CellAnswer({})
    result = batch.run([])
    if state["device"] != "cpu":
        _synchronize()
    return CellAnswer({"outputs": result.descriptions, "places": result.places})


def _launch_all(
    calls: Sequence[Callable[[], Any]],
    room: int,
    target: torch.Tensor,
    state: dict[str, Any],
    results: list[Any],
) -> _BatchOutputs:
    """All calls, and their outputs in `target`: copied to it where they do not lie there; `results` gets the others."""
    outputs = _BatchOutputs([], [])
    for n, call in enumerate(calls):
        result = call()
        descriptions, spans = inside._described(result, state)
        places: list[int] = []
        at, has_copies = n * room, False
        for address, size, owner in spans.values():
            offset = address - _pointer(target)
            if size and not 0 <= offset <= target.numel() - size:
                if at + size > (n + 1) * room:
                    descriptions, places = [{"problem": "outputs take more room than asked for"}], []
                    break
                _copy(_narrow(target, 0, at, size), bytes_at(owner, address, size))
                offset, at, has_copies = at, at + aligned_size(size), True
            if size:
                places.append(offset)
        outputs.descriptions.append(descriptions)
        outputs.places.append(places)
        if not has_copies:
            results.append(result)
    return outputs


def _no_work(forms: Sequence[Mapping[str, Any]], device: str) -> list[torch.Tensor]:
    """Tensors of these forms, with whatever values: nobody can return any sooner."""
    return [torch.empty(form["shape"], dtype=getattr(torch, form["dtype"]), device=device) for form in forms]


def _record(
    run: Callable[[], _BatchOutputs], timer: DeviceTimer, result: _BatchOutputs, memory: torch.Tensor
) -> tuple[Callable[[], None] | None, _BatchOutputs]:
    """A replay of all launches, and their results there; None where they cannot be recorded."""
    sizes = [
        math.prod(output["shape"]) * int(getattr(torch, output["dtype"]).itemsize)
        for outputs in result.descriptions
        for output in outputs
        if "dtype" in output
    ]
    pool = open_output_pool(memory, sizes, timer.recorder.stream)
    try:
        graph, recording = timer.recorder.record(run, pool=None if pool is None else pool.id)
    except Exception:  # whatever the candidate raises where it may not wait for the device
        _synchronize()
        return None, result
    return graph.replay, recording


_ALIGN = 512
_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED: memory may be allocated during a recording."""
_Allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
_Release = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)


class OutputPool:
    """A pool of torch's in `block`; beyond its end, memory is the driver's.

    Recorded launches have their outputs where the judge reads them: to copy them there, in every window, would be work
    that a candidate could leave out by writing its outputs there itself.
    """

    def __init__(self, block: torch.Tensor) -> None:
        """Raises `RuntimeError`, `AttributeError` or `TypeError` where torch has no such pools."""
        self._driver = ctypes.CDLL(LIBRARY)
        self._next: int = block.data_ptr()
        self._end = self._next + int(block.numel())
        # Torch keeps addresses of these functions alone, and may call them as long as the process lives.
        self._functions = _Allocate(self._allocate), _Release(self._release)
        _pools.append(self)
        addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in self._functions]
        make: Any = torch._C._cuda_customAllocator
        self._allocator = make(*addresses)
        self._pool = torch.cuda.MemPool(self._allocator)
        self.id = self._pool.id

    def fill(self, sizes: Sequence[int], stream: torch.cuda.Stream) -> None:
        """Ask for all memory that this stream will need now, before anything is recorded."""
        with torch.cuda.stream(stream), torch.cuda.use_mem_pool(self._pool):
            tensors = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
        del tensors

    def _allocate(self, size: int, device: int, stream: int) -> int:
        if self._next + size <= self._end:
            result = self._next
            self._next += -(-size // _ALIGN) * _ALIGN
            return result
        mode, address = ctypes.c_int(_RELAXED), ctypes.c_uint64()
        self._driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        self._driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size))
        self._driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        return int(address.value)

    def _release(self, address: int, size: int, device: int, stream: int) -> None:
        """The process ends soon."""


_pools: list[OutputPool] = []


def open_output_pool(
    block: torch.Tensor, sizes: Sequence[int], stream: torch.cuda.Stream
) -> OutputPool | None:
    """A pool with memory of these `sizes`, or None where torch has no pools."""
    with suppress(RuntimeError, AttributeError, TypeError, OSError):
        pool = OutputPool(block)
        pool.fill(sizes, stream)
        return pool
    return None
