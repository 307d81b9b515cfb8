"""What runs next to the candidate, in the cell: places inputs, calls, copies bytes out.

Nothing said here is believed for its own sake: outputs are bytes that the judge compares, seconds must
agree with the judge's clock. All functions that a candidate could replace are captured on import, before
its code loads. Candidates see one entry for every purpose: checks and timings are the same call.
"""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from forecast_harness.sandbox.inside import load
from forecast_harness.sandbox.jobs import Answer, Array
from forecast_harness.sandbox.tensors import unpack
from forecast_harness.timing.device import DeviceTimer
from forecast_harness.verify import tracing
from forecast_harness.verify.arena import Slot
from forecast_harness.verify.skeleton import filled

_clock = time.perf_counter_ns
_move = ctypes.memmove
_read = ctypes.string_at
_pointer = torch.Tensor.data_ptr
_size, _stride = torch.Tensor.size, torch.Tensor.stride
_is_neg, _is_conj = torch.Tensor.is_neg, torch.Tensor.is_conj
_threads = threading.enumerate

WATCHED: tuple[tuple[Any, str], ...] = (
    (time, "perf_counter"),
    (time, "perf_counter_ns"),
    (time, "time"),
    (time, "monotonic"),
    (time, "sleep"),
    (statistics, "median"),
    (statistics, "mean"),
    (ctypes, "string_at"),
    (ctypes, "memmove"),
    (gc, "collect"),
    (os, "urandom"),
    (sys, "settrace"),
    (threading, "enumerate"),
    (torch, "allclose"),
    (torch, "equal"),
    (torch, "isclose"),
    (torch, "empty"),
    (torch, "zeros"),
    (torch, "as_strided"),
    (torch.testing, "assert_close"),
    (torch.cuda, "synchronize"),
    (torch.cuda, "Event"),
    (torch.cuda.Event, "elapsed_time"),
    (torch.cuda.Event, "record"),
    (torch.Tensor, "data_ptr"),
    (torch.Tensor, "clone"),
    (torch.Tensor, "copy_"),
    (torch.Tensor, "allclose"),
    (torch.Tensor, "equal"),
    (torch.Tensor, "__eq__"),
    (torch.Tensor, "cpu"),
    (torch.Tensor, "to"),
)
"""Functions a harness rests on; a candidate has no reason to replace any of them."""


def _identities() -> list[int]:
    return [id(getattr(place, name, None)) for place, name in WATCHED]


def _flags() -> dict[str, str]:
    """Settings that change what other code computes."""
    return {name: _setting(read) for name, read in _SETTINGS.items()}


_SETTINGS: dict[str, Callable[[], Any]] = {
    "default dtype": torch.get_default_dtype,
    "float32 matmul precision": torch.get_float32_matmul_precision,
    "cuda tf32": lambda: torch.backends.cuda.matmul.allow_tf32,
    "cudnn tf32": lambda: torch.backends.cudnn.allow_tf32,
    "cudnn benchmark": lambda: torch.backends.cudnn.benchmark,
    "fp16 reduced reduction": lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
    "deterministic": torch.are_deterministic_algorithms_enabled,
    "grad mode": torch.is_grad_enabled,
    "denormals": lambda: bool((torch.tensor([1e-40]) * 1.0 != 0).item()),
    "threads": torch.get_num_threads,
}


def _setting(read: Callable[[], Any]) -> str:
    try:
        return str(read())
    except RuntimeError:  # torch refuses to tell when old and new ways of setting it were mixed
        return "inconsistent"


def prepare(payload: Mapping[str, Any], arrays: Mapping[str, Array], state: dict[str, Any]) -> Answer:
    """Import the candidate. Raises whatever its code raises."""
    tempfile.tempdir = None  # the server's folder, remembered by the fork, is not ours
    torch.set_num_threads(max(1, int(payload.get("threads", 1))))
    state["device"] = payload.get("device", "cpu")
    state["format"] = payload["format"]
    state["identities"], state["flags"] = _identities(), _flags()
    state["before"] = set(_threads())
    if state["device"] != "cpu":
        state["timer"] = DeviceTimer(torch)
    state["kernels"] = tracing.Kernels() if payload["language"] == "triton" else None
    module = load(payload["file"])
    state["entry"] = getattr(module, payload["entry"])
    return Answer({"harness": _report(state)})


def launch(payload: Mapping[str, Any], arrays: Mapping[str, Array], state: dict[str, Any]) -> Answer:
    """Place the block, call the candidate once, read what it returned.

    The value has `seconds`, `outputs` (see `_read_outputs`), `operations`, `kernels` and `compiled` (see
    `tracing`) and `harness` (see `_report`); the arrays are `block`, as it is afterwards, and the bytes of
    every output.
    """
    block = _place(arrays["block"], state)
    slots = [Slot.from_json(s) for s in payload["slots"]]
    views = _views(slots, block, state)
    function = _callable(payload, arrays, state)
    shape = payload["call"]
    positional = [filled(s, views) for s in shape["args"]]
    named = {n: filled(s, views) for n, s in shape["kwargs"].items()}
    _poison(int(payload["output_bytes"]), state)
    kernels = state["kernels"]
    before = (0, 0) if kernels is None else (kernels.launches, kernels.compilations)
    with tracing.watch(payload.get("watch", ""), kernels) as seen:
        seconds, result = _timed(function, positional, named, state)
    state["last"] = result
    state["most"] = 4 * int(payload["output_bytes"]) + 4096
    found, raw = _read_outputs(result, state)
    state["size"] = len(arrays["block"].data)
    raw["block"] = _block(state)
    after = before if kernels is None else (kernels.launches, kernels.compilations)
    said = {
        "seconds": seconds,
        "outputs": found,
        "operations": seen,
        "kernels": after[0] - before[0],
        "compiled": after[1] - before[1],
        "harness": _report(state),
    }
    return Answer(said, raw)


def again(payload: Mapping[str, Any], arrays: Mapping[str, Array], state: dict[str, Any]) -> Answer:
    """Read the last outputs once more: nothing may have changed since the candidate returned."""
    found, raw = _read_outputs(state["last"], state)
    raw["block"] = _block(state)
    return Answer({"outputs": found, "harness": _report(state)}, raw)


def idle(payload: Mapping[str, Any], arrays: Mapping[str, Array], state: dict[str, Any]) -> Answer:
    """All that `launch` does around the call, without the call: the cost of asking."""
    _place(arrays["block"], state)
    _poison(int(payload["output_bytes"]), state)
    report = _report(state)
    return again(payload, arrays, state) if "last" in state else Answer({"harness": report})


def _block(state: dict[str, Any]) -> Array:
    return Array(
        "uint8", (state["size"],), _bytes_at(_pointer(state["block"]), state["size"], state["block"])
    )


def _timed(
    function: Callable[..., Any], positional: list[Any], named: dict[str, Any], state: dict[str, Any]
) -> tuple[float, Any]:
    if state["device"] == "cpu":
        begin = _clock()
        result = function(*positional, **named)
        return (_clock() - begin) * 1e-9, result
    timer: DeviceTimer = state["timer"]
    return timer.time(lambda: function(*positional, **named))


def _callable(
    payload: Mapping[str, Any], arrays: Mapping[str, Array], state: dict[str, Any]
) -> Callable[..., Any]:
    """The entry itself, or a module built from it with the judge's parameters in it."""
    entry: Callable[..., Any] = state["entry"]
    if state["format"] != "kernelbench":
        return entry
    if "init" in payload:
        state["model"] = entry(*(filled(s, {}) for s in payload["init"])).to(state["device"])
        state["model"].eval()
    fresh = {n.removeprefix("state."): unpack(a) for n, a in arrays.items() if n.startswith("state.")}
    if fresh:
        try:
            state["model"].load_state_dict(fresh, strict=True)
        except RuntimeError as error:
            raise StateDictError(str(error)) from error
    model: Callable[..., Any] = state["model"]

    def call(*positional: Any, **named: Any) -> Any:
        with torch.no_grad():
            return model(*positional, **named)

    return call


class StateDictError(Exception):
    """The solution's module has other parameters than the task's."""


def _poison(size: int, state: dict[str, Any]) -> None:
    """Leave NaN in the memory that the allocator will hand out next."""
    count = max(size, 64)
    held = [torch.full((count,), 255, dtype=torch.uint8, device=state["device"]) for _ in range(3)]
    del held


def _read_outputs(result: Any, state: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Array]]:
    """What was returned: one description per output, and the bytes from its first to its last element.

    Descriptions hold `problem` (it is no plain tensor) or `dtype`, `shape`, `stride` and `alias` (it lies in
    the inputs' block). Only captured functions of the base class touch the candidate's objects.
    """
    items = list(result) if type(result) in (tuple, list) else [] if result is None else [result]
    found: list[dict[str, Any]] = []
    raw: dict[str, Array] = {}
    block = state["block"]
    low = _pointer(block)
    for n, item in enumerate(items):
        if type(item) not in (torch.Tensor, torch.nn.Parameter):
            found.append({"problem": f"output {n} is a {type(item).__name__}, not a torch.Tensor"})
            continue
        odd = item.layout != torch.strided or _is_neg(item) or _is_conj(item) or item.is_meta
        if odd or item.device.type != block.device.type:
            found.append({"problem": f"output {n} is not a plain {block.device.type} tensor"})
            continue
        shape, stride = list(_size(item)), list(_stride(item))
        width = item.dtype.itemsize
        span = 0 if 0 in shape else 1 + sum((k - 1) * s for k, s in zip(shape, stride, strict=True))
        at = _pointer(item)
        if span * width > state["most"]:
            found.append({"problem": f"output {n} spans {span * width} bytes, far more than asked for"})
            continue
        alias = span > 0 and at < low + block.numel() and low < at + span * width
        kind = str(item.dtype).removeprefix("torch.")
        found.append({"dtype": kind, "shape": shape, "stride": stride, "alias": alias})
        raw[f"out{n}"] = Array("uint8", (span * width,), _bytes_at(at, span * width, item))
    return found, raw


def _bytes_at(address: int, size: int, owner: torch.Tensor) -> bytes:
    if size == 0:
        return b""
    if owner.device.type == "cpu":
        return _read(address, size)
    whole = torch.empty(0, dtype=torch.uint8, device=owner.device).set_(owner.untyped_storage())
    start = address - _pointer(whole)
    return bytes(whole[start : start + size].cpu().numpy().tobytes())


def _report(state: dict[str, Any]) -> dict[str, Any]:
    now, flags = _identities(), _flags()
    patched = [
        f"{place.__name__}.{name}"
        for (place, name), was, found in zip(WATCHED, state["identities"], now, strict=True)
        if was != found
    ]
    alive = [
        t.name for t in _threads() if t not in state["before"] and not isinstance(t, threading._DummyThread)
    ]
    return {
        "patched": patched,
        "flags": {n: v for n, v in flags.items() if v != state["flags"][n]},
        "threads": alive,
    }


def _place(array: Array, state: dict[str, Any]) -> torch.Tensor:
    """Copy the judge's bytes over our block: the same addresses and versions, other contents."""
    size = len(array.data)
    held = state.get("block")
    if held is None or held.numel() < size:
        held = torch.empty(max(size, 1 << 16) * 2, dtype=torch.uint8, device=state["device"])
        state["block"], state["views"] = held, {}
    if held.device.type == "cpu":
        _move(_pointer(held), array.data, size)
    else:
        fresh = torch.frombuffer(bytearray(array.data), dtype=torch.uint8)
        # Through another tensor on the same storage: the views' version counters must not tell.
        torch.empty(0, dtype=torch.uint8, device=held.device).set_(held.untyped_storage())[:size].copy_(fresh)
    return held


def _views(slots: list[Slot], block: torch.Tensor, state: dict[str, Any]) -> dict[str, torch.Tensor]:
    found = {}
    for slot in slots:
        key = (slot.dtype, slot.shape, slot.stride, slot.offset)
        if key not in state["views"]:
            state["views"][key] = slot.view(block)
        found[slot.name] = state["views"][key]
    return found
