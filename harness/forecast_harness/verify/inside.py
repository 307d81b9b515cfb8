"""What runs next to the candidate, in the cell: places inputs, calls, copies bytes out.

Nothing said here is believed for its own sake: outputs are bytes that the judge compares, seconds must
agree with the judge's clock. All functions that a candidate could replace are captured on import, before
its code loads. Candidates see one entry for every purpose: checks and timings are the same call.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from forecast_harness.clocks.devices import DeviceTimer, LaunchTiming
from forecast_harness.sandbox.cell_process import load, receive_descriptor
from forecast_harness.sandbox.jobs import CellAnswer, TensorBytes, tensor_from_bytes
from forecast_harness.sandbox.wire import map_shared
from forecast_harness.verify.launches import tracing
from forecast_harness.verify.launches.arena import Slot, output_spans
from forecast_harness.verify.launches.block_store import BlockStore, address_range, bytes_at
from forecast_harness.verify.launches.digest import BlockHasher, complement_spans, digest_values
from forecast_harness.verify.launches.host_memory import MAPPED_BYTES, keep_freed_memory
from forecast_harness.verify.launches.process_watch import (
    note_answer,
    note_question,
    process_report,
    remember_process,
)
from forecast_harness.verify.launches.replay_buffers import BlockReplayBuffers
from forecast_harness.verify.problems.argument_codec import decode_arguments

_clock = time.perf_counter_ns
_read = ctypes.string_at
_frombuffer, _uint8 = torch.frombuffer, torch.uint8
_pointer = torch.Tensor.data_ptr
_size, _stride = torch.Tensor.size, torch.Tensor.stride
_is_neg, _is_conj = torch.Tensor.is_neg, torch.Tensor.is_conj
_iterate_tuple, _iterate_list = tuple.__iter__, list.__iter__
_bases = type.__dict__["__mro__"].__get__
_full, _narrow, _cpu = torch.full, torch.Tensor.narrow, torch.Tensor.cpu
_synchronize = torch.cuda.synchronize


def prepare(
    payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes], state: dict[str, Any]
) -> CellAnswer:
    """Import the candidate, unless `file` is empty. Raises whatever its code raises.

    Where it is not `timed`, launches are not told apart from what they wait for, and caches stay warm.
    """
    tempfile.tempdir = None  # the server's folder, remembered by the fork, is not ours
    torch.set_num_threads(max(1, int(payload.get("threads", 1))))
    state["device"] = payload.get("device", "cpu")
    state["format"] = payload["format"]
    remember_process(state)
    on_device = state["device"] != "cpu"
    if not on_device:
        keep_freed_memory()
    state["timer"] = DeviceTimer(torch) if on_device and payload.get("timed", True) else None
    state["held"] = BlockStore(state["device"])
    state["pages"] = int(payload.get("pages", 0))
    state["digest"] = BlockHasher(state["pages"], state["device"])
    state["kernels"] = tracing.KernelCounter() if payload["language"] == "triton" else None
    if payload["file"]:
        module = load(payload["file"])
        state["entry"] = getattr(module, payload["entry"])
    return CellAnswer({"harness": process_report(state)})


def place(payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes], state: dict[str, Any]) -> CellAnswer:
    """Take the contents of the block called `name`: all of it (`block`), or changes of what it was.

    `patches` lists slots; arrays `at0` (numbers of elements) and `to0` (their new bits) belong to the first.
    """
    note_question(state)
    _change(payload["name"], payload["patches"], arrays, state)
    return CellAnswer({"harness": process_report(state)})


def launch(
    payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes], state: dict[str, Any]
) -> CellAnswer:
    """Place the block, call the candidate once, read what it returned.

    The block is in the question, or it is what `place` was given under the name `held`. The value has
    `seconds`, `whole` and `protocol` (see `LaunchTiming`), `outputs` (see `_described`), `operations`, `kernels` and
    `compiled` (see `tracing`) and `harness` (see `_report`); the arrays are `block`, as it is afterwards, and
    the bytes of every output. Where the question has a `seed`, there are no arrays, but `digests` instead
    (see `_digests`).
    """
    note_question(state)
    slots = _restored(payload, arrays, state)
    call = _bound(payload, arrays, state, slots)
    _poison(int(payload["output_bytes"]), state)
    kernels = state["kernels"]
    before = (0, 0) if kernels is None else (kernels.launches, kernels.compilations)
    with tracing.watch_launch(payload["watch"], kernels) as seen:
        taken = _timed(call, payload, slots, state)
    state["last"] = taken.result
    state["most"] = 4 * int(payload["output_bytes"]) + 4096
    answer = _answered(payload, slots, state)
    after = before if kernels is None else (kernels.launches, kernels.compilations)
    said = {
        "seconds": taken.seconds,
        "whole": taken.total_seconds,
        "protocol": taken.protocol,
        "operations": seen,
        "kernels": after[0] - before[0],
        "compiled": after[1] - before[1],
        "harness": process_report(state),
    }
    return CellAnswer({**answer.value, **said}, answer.arrays)


def share(payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes], state: dict[str, Any]) -> CellAnswer:
    """Map the memory in which all blocks of later windows lie: so many `bytes`, whose descriptor follows."""
    fd = receive_descriptor(state)
    state["shared"] = _frombuffer(map_shared(fd, int(payload["bytes"])), dtype=_uint8)
    os.close(fd)
    return CellAnswer({})


def build(payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes], state: dict[str, Any]) -> CellAnswer:
    """Build the module, and give it the parameters that are sent: `launch` without a launch."""
    note_question(state)
    _callable(payload, arrays, state)
    note_answer(state)
    return CellAnswer({})


def arm(payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes], state: dict[str, Any]) -> CellAnswer:
    """Keep what later windows of the same `form` ask for: all but contents, and seen in a window before."""
    state.setdefault("forms", {})[payload["form"]] = dict(payload)
    return CellAnswer({"harness": process_report(state)})


def report(
    payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes], state: dict[str, Any]
) -> CellAnswer:
    """What the cell notices about its process, which windows that are timed have no time for."""
    note_question(state)
    return CellAnswer({"harness": process_report(state)})


def window(
    payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes], state: dict[str, Any]
) -> CellAnswer:
    """All that happens between a question and its answer where the judge's clock decides.

    The block lies in the shared memory already. The value is that of `launch`, and `places`, the addresses of
    all outputs that were returned: whoever has stopped this process reads them there. `form` names an armed
    one. `act` says what to do: `launch`; `again`: describe the last launch's outputs once more; `nothing`; or
    `null`: return tensors like those listed in `null`, as a launch that costs nothing does.
    """
    if "forms" in state and payload.get("form") in state["forms"]:
        payload = {**state["forms"][payload["form"]], **payload}
    note_question(state)
    held: BlockStore = state["held"]
    held.adopt(state["shared"], payload["size"])
    slots = slots_of(payload["slots"], state)
    state["most"] = 4 * payload["output_bytes"] + 4096
    kernels, act = state["kernels"], payload["act"]
    before = (0, 0) if kernels is None else (kernels.launches, kernels.compilations)
    said: dict[str, Any] = {"seconds": 0.0, "whole": 0.0, "protocol": "host", "operations": {}}
    if act in ("launch", "null"):
        if payload["poison"]:
            _poison(payload["output_bytes"], state)
        call = _bound(payload, arrays, state, slots) if act == "launch" else partial(_nothing, payload, state)
        with tracing.watch_launch(payload["watch"], kernels) as seen:
            taken = _timed(call, payload, slots, state)
        state["last"] = taken.result
        said |= {"seconds": taken.seconds, "whole": taken.total_seconds, "operations": seen}
    found, spans = _described(state.get("last") if act != "nothing" else None, state)
    after = before if kernels is None else (kernels.launches, kernels.compilations)
    said |= {"kernels": after[0] - before[0], "compiled": after[1] - before[1], "outputs": found}
    said["places"] = [address for address, _, _ in spans.values()]
    if payload["report"]:
        said["harness"] = process_report(state)
    else:
        note_answer(state)
    return CellAnswer(said)


def slots_of(listed: list[Any], state: dict[str, Any]) -> list[Slot]:
    """The slots of a question; those of an armed form are made once."""
    known = state.setdefault("slots", {})
    if known.get("of") is not listed:
        known["of"], known["made"] = listed, [Slot.from_json(s) for s in listed]
    made: list[Slot] = known["made"]
    return made


def _nothing(payload: Mapping[str, Any], state: dict[str, Any]) -> list[torch.Tensor]:
    """Tensors of these forms, the same ones every time."""
    made: dict[str, list[torch.Tensor]] = state.setdefault("null", {})
    key = repr(payload["null"])
    if key not in made:
        made[key] = [torch.zeros(one["shape"], dtype=getattr(torch, one["dtype"])) for one in payload["null"]]
    return made[key]


def again(payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes], state: dict[str, Any]) -> CellAnswer:
    """Read the last outputs once more, and the `block` if that is asked for: nothing may have changed."""
    note_question(state)
    answer = _answered(payload, [], state)
    return CellAnswer({**answer.value, "harness": process_report(state)}, answer.arrays)


def idle(payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes], state: dict[str, Any]) -> CellAnswer:
    """All that `launch` does around the kernels, without them: the cost of asking, see `DeviceTimer.idle`."""
    note_question(state)
    slots = _restored(payload, arrays, state)
    _poison(int(payload["output_bytes"]), state)
    if state["device"] != "cpu":
        timer: DeviceTimer = state["timer"]
        inputs = BlockReplayBuffers(state["held"], payload.get("held", ""), slots)
        call = _bound(payload, arrays, state, slots) if "last" in state else None
        timer.idle(inputs, payload["output_bytes"], payload["protocol"], call)
    answer = _answered(payload, slots, state) if "last" in state else CellAnswer({})
    return CellAnswer({**answer.value, "harness": process_report(state)}, answer.arrays)


def _change(name: str, patches: list[Any], arrays: Mapping[str, TensorBytes], state: dict[str, Any]) -> None:
    held: BlockStore = state["held"]
    if "block" in arrays:
        held.put(name, arrays["block"])
    for n, slot in enumerate(patches):
        held.patch(name, Slot.from_json(slot), arrays[f"at{n}"], arrays[f"to{n}"])


def _restored(
    payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes], state: dict[str, Any]
) -> list[Slot]:
    """Put the question's block in place; its slots."""
    held: BlockStore = state["held"]
    name = payload.get("held", "")
    if not name:
        held.put(name, arrays["block"])
    elif "patches" in payload:
        _change(name, payload["patches"], arrays, state)
    held.restore(name)
    return [Slot.from_json(s) for s in payload["slots"]]


def _answered(payload: Mapping[str, Any], slots: list[Slot], state: dict[str, Any]) -> CellAnswer:
    """The last outputs' description and bytes, or their digests where `payload` has a `seed`."""
    found, spans = _described(state["last"], state)
    if "seed" in payload:
        return CellAnswer({"outputs": found, "digests": _digests(int(payload["seed"]), slots, spans, state)})
    raw = {f"out{n}": _bytes_at(*span) for n, span in spans.items()}
    if payload.get("block", True):
        raw["block"] = _bytes_at(_pointer(state["held"].block), state["held"].size, state["held"].block)
    return CellAnswer({"outputs": found}, raw)


def _digests(
    seed: int, slots: list[Slot], spans: Mapping[int, tuple[int, int, torch.Tensor]], state: dict[str, Any]
) -> list[int]:
    """Of the block but for its outputs, of every output in it, and of every output that was returned.

    Computed at once after the call, before the judge has said whether it will read the bytes themselves: if
    it does, what comes then has to have these digests. That finds whatever changes after the call, and
    bounds nothing else: a candidate that replaces this very code, which lies in its own process, is held by
    nothing but those launches that are read.
    """
    digest: BlockHasher = state["digest"]
    block = state["held"].bytes()
    places = output_spans(slots)
    found = [digest.of(block, state["pages"], complement_spans(places, block.numel()))]
    found += [digest.of(_narrow(block, 0, start, stop - start), seed) for start, stop in places]
    found += [digest.of(bytes_at(owner, at, size), seed) for at, size, owner in spans.values()]
    return digest_values(found)


def _timed(
    call: Callable[[], Any], payload: Mapping[str, Any], slots: list[Slot], state: dict[str, Any]
) -> LaunchTiming:
    """Time a launch. What is watched is not recorded."""
    timer: DeviceTimer | None = state["timer"]
    if timer is None:
        begin = _clock()
        result = call()
        if state["device"] != "cpu":
            _synchronize()
        seconds = (_clock() - begin) * 1e-9
        return LaunchTiming(seconds, seconds, "host", result)
    inputs = None if payload["watch"] else BlockReplayBuffers(state["held"], payload.get("held", ""), slots)
    return timer.time(call, inputs, payload["output_bytes"], payload["protocol"])


def _bound(
    payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes], state: dict[str, Any], slots: list[Slot]
) -> Callable[[], Any]:
    """The candidate's call with the question's arguments."""
    held: BlockStore = state["held"]
    views, shape = held.views(slots), payload["call"]
    positional = [decode_arguments(s, views) for s in shape["args"]]
    named = {n: decode_arguments(s, views) for n, s in shape["kwargs"].items()}
    return partial(_callable(payload, arrays, state), *positional, **named)


def _callable(
    payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes], state: dict[str, Any]
) -> Callable[..., Any]:
    """The entry itself, or a module built from it with the judge's parameters in it."""
    entry: Callable[..., Any] = state["entry"]
    if state["format"] != "kernelbench":
        return entry
    if "init" in payload:
        state["model"] = entry(*(decode_arguments(s, {}) for s in payload["init"])).to(state["device"])
        state["model"].eval()
    fresh = {
        n.removeprefix("state."): tensor_from_bytes(a) for n, a in arrays.items() if n.startswith("state.")
    }
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
    if state["device"] == "cpu" and count >= MAPPED_BYTES:
        return
    held = [_full((count,), 255, dtype=torch.uint8, device=state["device"]) for _ in range(3)]
    del held


def _described(
    result: Any, state: dict[str, Any]
) -> tuple[list[dict[str, Any]], dict[int, tuple[int, int, torch.Tensor]]]:
    """What was returned: one description per output, and where it lies, by the output's number.

    Descriptions hold `problem` (it is no plain tensor) or `dtype`, `shape`, `stride` and `alias` (it lies in
    the inputs' block). Places are address, bytes from its first to its last element, and the tensor. Only
    captured functions of the base class touch the candidate's objects.
    """
    items = _items_of(result)
    found: list[dict[str, Any]] = []
    spans: dict[int, tuple[int, int, torch.Tensor]] = {}
    block = state["held"].block
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
        at, span = address_range(item)
        if span > state["most"]:
            found.append({"problem": f"output {n} spans {span} bytes, far more than asked for"})
            continue
        alias_ = span > 0 and at < low + block.numel() and low < at + span
        kind = str(item.dtype).removeprefix("torch.")
        found.append({"dtype": kind, "shape": shape, "stride": stride, "alias": alias_})
        spans[n] = at, span, item
    return found, spans


def _items_of(result: Any) -> list[Any]:
    """What a result holds: a tuple's or a list's items, whatever subclass of them it is (named tuples, say).

    Nothing of the candidate's runs, be it called `__iter__` or `__class__`.
    """
    kind = type(result)
    if result is None:
        return []
    for base, iterate in ((tuple, _iterate_tuple), (list, _iterate_list)):
        if any(one is base for one in _bases(kind)):  # no `==`, which a metaclass may define
            return list(iterate(result))
    return [result]


def _bytes_at(address: int, size: int, owner: torch.Tensor) -> TensorBytes:
    if size == 0:
        return TensorBytes("uint8", (0,), b"")
    if owner.device.type == "cpu":
        return TensorBytes("uint8", (size,), _read(address, size))
    found = _cpu(bytes_at(owner, address, size))
    return TensorBytes("uint8", (size,), memoryview(found.numpy()))
