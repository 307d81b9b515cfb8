"""Code that runs next to the candidate, in the cell: places inputs, calls, copies bytes out.

The judge does not rely on anything that is said here: outputs are bytes that it compares, seconds must agree
with its own clock. All functions that a candidate could replace are captured on import, before
its code loads. Candidates see one entry for every purpose: checks and timings are the same call.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from forecast_harness.clocks.devices import DeviceTimer, LaunchTiming, ReplayBuffers
from forecast_harness.sandbox import wire
from forecast_harness.sandbox.cell_process import CHANNEL, NONCE, load, receive_descriptor
from forecast_harness.sandbox.jobs import CellAnswer, TensorBytes, tensor_from_bytes
from forecast_harness.sandbox.wire import map_shared
from forecast_harness.verify.blocks import BlockHasher, Slot, complement_spans, digest_values, output_spans
from forecast_harness.verify.inputs import INTEGER_DTYPES, decode_arguments

# Captured on import, before the candidate's code loads.
_clock, _wall_clock, _cpu_seconds = time.perf_counter_ns, time.perf_counter, time.process_time
_read_memory, _move = ctypes.string_at, ctypes.memmove
_empty, _full, _frombuffer, _uint8, _int64 = (
    torch.empty,
    torch.full,
    torch.frombuffer,
    torch.uint8,
    torch.int64,
)
_pointer, _size, _stride, _numel = (
    torch.Tensor.data_ptr,
    torch.Tensor.size,
    torch.Tensor.stride,
    torch.Tensor.numel,
)
_narrow, _view, _cpu, _to = torch.Tensor.narrow, torch.Tensor.view, torch.Tensor.cpu, torch.Tensor.to
_copy, _index_copy, _fill, _clone = (
    torch.Tensor.copy_,
    torch.Tensor.index_copy_,
    torch.Tensor.fill_,
    torch.Tensor.clone,
)
_set, _storage = torch.Tensor.set_, torch.Tensor.untyped_storage
_is_neg, _is_conj = torch.Tensor.is_neg, torch.Tensor.is_conj
_iterate_tuple, _iterate_list = tuple.__iter__, list.__iter__
_bases = type.__dict__["__mro__"].__get__
_synchronize = torch.cuda.synchronize
_plain = (torch.Tensor, torch.nn.Parameter)
_strided_layout = torch.strided
NO_ARRAYS: Mapping[str, TensorBytes] = MappingProxyType({})
_modes = torch.overrides._get_current_function_mode_stack
_dispatch_modes = _get_current_dispatch_mode_stack


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
    state["kernels"] = KernelCounter() if payload["language"] == "triton" else None
    if payload["file"]:
        module = load(payload["file"])
        state["entry"] = getattr(module, payload["entry"])
    return CellAnswer({"harness": process_report(state)})


def place(payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes], state: dict[str, Any]) -> CellAnswer:
    """Take the contents of the block called `name`: all of it (`block`), or changes of its contents.

    `patches` lists slots; arrays `at0` (numbers of elements) and `to0` (their new bits) belong to the first.
    """
    note_question(state, arrays)
    _change(payload["name"], payload["patches"], arrays, state)
    return CellAnswer({"harness": process_report(state)})


def launch(
    payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes], state: dict[str, Any]
) -> CellAnswer:
    """Place the block, call the candidate once, read its outputs.

    The block is in the question, or `place` has taken it under the name in `held`. The value has `seconds`,
    `whole` and `protocol` (see `LaunchTiming`), `outputs` (see `_described`), `operations`, `kernels` and `compiled`
    (see `KernelCounter`) and `harness` (see `process_report`); the arrays are `block`, as it is afterwards, and the
    bytes of every output. Where the question has a `seed`, there are no arrays, but `digests` instead (see `_digests`).
    """
    note_question(state, arrays)
    slots = _restored(payload, arrays, state)
    call = _bound(payload, arrays, state, slots)
    _poison(int(payload["output_bytes"]), state)
    kernels = state["kernels"]
    before = (0, 0) if kernels is None else (kernels.launches, kernels.compilations)
    with watch_launch(payload["watch"], kernels) as operations:
        timing = _timed(call, payload, slots, state)
    state["last"] = timing.result
    state["most"] = 4 * int(payload["output_bytes"]) + 4096
    answer = _answer_outputs(payload, slots, state)
    after = before if kernels is None else (kernels.launches, kernels.compilations)
    value = {
        "seconds": timing.seconds,
        "whole": timing.total_seconds,
        "protocol": timing.protocol,
        "operations": operations,
        "kernels": after[0] - before[0],
        "compiled": after[1] - before[1],
        "harness": process_report(state),
    }
    return CellAnswer({**answer.value, **value}, answer.arrays)


def share(payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes], state: dict[str, Any]) -> CellAnswer:
    """Map the memory in which all blocks of later windows lie: so many `bytes`, whose descriptor follows."""
    fd = receive_descriptor(state)
    state["shared"] = _frombuffer(map_shared(fd, int(payload["bytes"])), dtype=_uint8)
    os.close(fd)
    return CellAnswer({})


def build(payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes], state: dict[str, Any]) -> CellAnswer:
    """Build the module, and give it the parameters that are sent: `launch` without a launch."""
    note_question(state, arrays)
    _callable(payload, arrays, state)
    note_answer(state)
    return CellAnswer({})


def arm(payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes], state: dict[str, Any]) -> CellAnswer:
    """Keep the question of later windows of the same `form`, without contents; a window has shown it before."""
    state.setdefault("forms", {})[payload["form"]] = dict(payload)
    return CellAnswer({"harness": process_report(state)})


def report(
    payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes], state: dict[str, Any]
) -> CellAnswer:
    """Report on the process, for which windows that are timed have no time."""
    note_question(state)
    return CellAnswer({"harness": process_report(state)})


def window(
    payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes], state: dict[str, Any]
) -> CellAnswer:
    """Do all work between a question and its answer where the judge's clock decides.

    The block lies in the shared memory already. The value is that of `launch`, and `places`, the addresses of
    all outputs that were returned: the judge reads them there once it has stopped this process. `form` names
    an armed question. `act` is one of: `launch`; `again`: describe the last launch's outputs once more; `nothing`; or
    `null`: return tensors like those listed in `null`, as a launch that costs nothing does.
    """
    if "forms" in state and payload.get("form") in state["forms"]:
        payload = {**state["forms"][payload["form"]], **payload}
    note_question(state)
    blocks: BlockStore = state["held"]
    blocks.adopt(state["shared"], payload["size"])
    slots = slots_of(payload["slots"], state)
    state["most"] = 4 * payload["output_bytes"] + 4096
    kernels, act = state["kernels"], payload["act"]
    before = (0, 0) if kernels is None else (kernels.launches, kernels.compilations)
    value: dict[str, Any] = {"seconds": 0.0, "whole": 0.0, "protocol": "host", "operations": {}}
    if act in ("launch", "null"):
        if payload["poison"]:
            _poison(payload["output_bytes"], state)
        call = _bound(payload, arrays, state, slots) if act == "launch" else partial(_nothing, payload, state)
        with watch_launch(payload["watch"], kernels) as operations:
            timing = _timed(call, payload, slots, state)
        state["last"] = timing.result
        value |= {"seconds": timing.seconds, "whole": timing.total_seconds, "operations": operations}
    result, spans = _described(state.get("last") if act != "nothing" else None, state)
    after = before if kernels is None else (kernels.launches, kernels.compilations)
    value |= {"kernels": after[0] - before[0], "compiled": after[1] - before[1], "outputs": result}
    value["places"] = [address for address, _, _ in spans.values()]
    if payload["report"]:
        value["harness"] = process_report(state)
    else:
        note_answer(state)
    return CellAnswer(value)


def slots_of(requests: list[Any], state: dict[str, Any]) -> list[Slot]:
    """The slots of a question; those of an armed form are made once."""
    cache = state.setdefault("slots", {})
    if cache.get("of") is not requests:
        cache["of"], cache["made"] = requests, [Slot.from_json(s) for s in requests]
    results: list[Slot] = cache["made"]
    return results


def _nothing(payload: Mapping[str, Any], state: dict[str, Any]) -> list[torch.Tensor]:
    """Tensors of the forms in `null`, the same ones every time."""
    result: dict[str, list[torch.Tensor]] = state.setdefault("null", {})
    key = repr(payload["null"])
    if key not in result:
        result[key] = [
            torch.zeros(form["shape"], dtype=getattr(torch, form["dtype"])) for form in payload["null"]
        ]
    return result[key]


def again(payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes], state: dict[str, Any]) -> CellAnswer:
    """Read the last outputs once more, and the `block` if that is asked for: nothing may have changed."""
    note_question(state)
    answer = _answer_outputs(payload, [], state)
    return CellAnswer({**answer.value, "harness": process_report(state)}, answer.arrays)


def idle(payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes], state: dict[str, Any]) -> CellAnswer:
    """Do all that `launch` does around the kernels, without them: the cost of asking, see `DeviceTimer.idle`."""
    note_question(state, arrays)
    slots = _restored(payload, arrays, state)
    _poison(int(payload["output_bytes"]), state)
    if state["device"] != "cpu":
        timer: DeviceTimer = state["timer"]
        inputs = BlockReplayBuffers(state["held"], payload.get("held", ""), slots)
        call = _bound(payload, arrays, state, slots) if "last" in state else None
        timer.idle(inputs, payload["output_bytes"], payload["protocol"], call)
    answer = _answer_outputs(payload, slots, state) if "last" in state else CellAnswer({})
    return CellAnswer({**answer.value, "harness": process_report(state)}, answer.arrays)


def _change(name: str, patches: list[Any], arrays: Mapping[str, TensorBytes], state: dict[str, Any]) -> None:
    blocks: BlockStore = state["held"]
    if "block" in arrays:
        blocks.put(name, arrays["block"])
    for n, slot in enumerate(patches):
        blocks.patch(name, Slot.from_json(slot), arrays[f"at{n}"], arrays[f"to{n}"])


def _restored(
    payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes], state: dict[str, Any]
) -> list[Slot]:
    """Put the question's block in place; its slots."""
    blocks: BlockStore = state["held"]
    name = payload.get("held", "")
    if not name:
        blocks.put(name, arrays["block"])
    blocks.restore(name)
    return [Slot.from_json(s) for s in payload["slots"]]


def _answer_outputs(payload: Mapping[str, Any], slots: list[Slot], state: dict[str, Any]) -> CellAnswer:
    """The last outputs' description and bytes, or their digests where `payload` has a `seed`."""
    result, spans = _described(state["last"], state)
    if "seed" in payload:
        return CellAnswer({"outputs": result, "digests": _digests(int(payload["seed"]), slots, spans, state)})
    raw = {f"out{n}": _bytes_at(*span) for n, span in spans.items()}
    if payload.get("block", True):
        raw["block"] = _bytes_at(_pointer(state["held"].block), state["held"].size, state["held"].block)
    state["answered"] = _bytes_of(raw)
    return CellAnswer({"outputs": result}, raw)


def _digests(
    seed: int, slots: list[Slot], spans: Mapping[int, tuple[int, int, torch.Tensor]], state: dict[str, Any]
) -> list[int]:
    """The digests of the block but for its outputs, of every output in it, and of every output that was returned.

    They are computed at once after the call, before the judge has said whether it will read the bytes: if it
    does, the bytes have to have these digests. So a change after the call shows, and nothing else: a candidate
    that replaces this very code, which lies in its own process, is caught by those launches alone that are read.
    """
    digest: BlockHasher = state["digest"]
    block = state["held"].bytes()
    places = output_spans(slots)
    results = [digest.of(block, state["pages"], complement_spans(places, block.numel()))]
    results += [digest.of(_narrow(block, 0, start, stop - start), seed) for start, stop in places]
    results += [digest.of(bytes_at(owner, at, size), seed) for at, size, owner in spans.values()]
    return digest_values(results)


def _timed(
    call: Callable[[], Any], payload: Mapping[str, Any], slots: list[Slot], state: dict[str, Any]
) -> LaunchTiming:
    """Time a launch; a launch that is watched is not recorded."""
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
    blocks: BlockStore = state["held"]
    views, shape = blocks.views(slots), payload["call"]
    positional = [decode_arguments(s, views) for s in shape["args"]]
    keywords = {n: decode_arguments(s, views) for n, s in shape["kwargs"].items()}
    return partial(_callable(payload, arrays, state), *positional, **keywords)


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

    def call(*positional: Any, **keywords: Any) -> Any:
        with torch.no_grad():
            return model(*positional, **keywords)

    return call


class StateDictError(Exception):
    """The solution's module has other parameters than the task's."""


def _poison(size: int, state: dict[str, Any]) -> None:
    """Leave NaN in the memory that the allocator will hand out next."""
    count = max(size, 64)
    if state["device"] == "cpu" and count >= MAPPED_BYTES:
        return
    buffers = [_full((count,), 255, dtype=torch.uint8, device=state["device"]) for _ in range(3)]
    del buffers


def _described(
    result: Any, state: dict[str, Any]
) -> tuple[list[dict[str, Any]], dict[int, tuple[int, int, torch.Tensor]]]:
    """Describe a result: one description per output, and where it lies, by the output's number.

    Descriptions hold `problem` (it is no plain tensor) or `dtype`, `shape`, `stride` and `alias` (it lies in
    the inputs' block). Places are address, bytes from its first to its last element, and the tensor. Only
    captured functions of the base class touch the candidate's objects.
    """
    items = _items_of(result)
    results: list[dict[str, Any]] = []
    spans: dict[int, tuple[int, int, torch.Tensor]] = {}
    block = state["held"].block
    low = _pointer(block)
    for n, item in enumerate(items):
        if type(item) not in (torch.Tensor, torch.nn.Parameter):
            results.append({"problem": f"output {n} is a {type(item).__name__}, not a torch.Tensor"})
            continue
        odd = item.layout != torch.strided or _is_neg(item) or _is_conj(item) or item.is_meta
        if odd or item.device.type != block.device.type:
            results.append({"problem": f"output {n} is not a plain {block.device.type} tensor"})
            continue
        shape, stride = list(_size(item)), list(_stride(item))
        at, span = address_range(item)
        if span > state["most"]:
            results.append({"problem": f"output {n} spans {span} bytes, far more than asked for"})
            continue
        alias_ = span > 0 and at < low + block.numel() and low < at + span
        kind = str(item.dtype).removeprefix("torch.")
        results.append({"dtype": kind, "shape": shape, "stride": stride, "alias": alias_})
        spans[n] = at, span, item
    return results, spans


def _items_of(result: Any) -> list[Any]:
    """The items of a result: a tuple's or a list's, whatever subclass of them it is (named tuples, say).

    Nothing of the candidate's runs, be it called `__iter__` or `__class__`.
    """
    kind = type(result)
    if result is None:
        return []
    for base, iterate in ((tuple, _iterate_tuple), (list, _iterate_list)):
        if any(b is base for b in _bases(kind)):  # no `==`, which a metaclass may define
            return list(iterate(result))
    return [result]


def _bytes_at(address: int, size: int, owner: torch.Tensor) -> TensorBytes:
    if size == 0:
        return TensorBytes("uint8", (0,), b"")
    if owner.device.type == "cpu":
        return TensorBytes("uint8", (size,), _read_memory(address, size))
    result = _cpu(bytes_at(owner, address, size))
    return TensorBytes("uint8", (size,), memoryview(result.numpy()))


_DOUBLING_LIMIT = 1 << 26
"""A block of up to so many bytes is made twice as large as needed, so that it grows, and moves, less often."""


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor's storage, through another tensor, which leaves its own version counter alone."""
    return _set(_empty(0, dtype=_uint8, device=tensor.device), _storage(tensor))


def address_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Address of a tensor's first element, and bytes from there to the end of its last one."""
    shape = list(_size(tensor))
    count = 0 if 0 in shape else 1 + sum((k - 1) * s for k, s in zip(shape, _stride(tensor), strict=True))
    return _pointer(tensor), count * tensor.dtype.itemsize


def bytes_at(owner: torch.Tensor, address: int, size: int) -> torch.Tensor:
    """So many bytes of a tensor's storage from an address on; a tensor without elements may have no address."""
    storage = storage_bytes(owner)
    return _narrow(storage, 0, address - _pointer(storage) if size else 0, size)


class BlockStore:
    """Blocks on one device.

    A block of hundreds of megabytes is sent once. A pristine copy of it stays on the device; the judge changes a few
    values in it from launch to launch, and before each launch the whole of it is copied over the block that the
    candidate sees, at the same addresses and behind the same version counters.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._pristine: dict[str, torch.Tensor] = {}
        self._views: dict[tuple[object, ...], torch.Tensor] = {}
        self.block = _empty(0, dtype=_uint8, device=device)
        self.size = 0
        """Bytes of the block that are in use."""

    def put(self, name: str, array: TensorBytes) -> None:
        """Take new contents for `name`."""
        source = _frombuffer(array.data, dtype=_uint8)
        pristine = self._pristine.get(name)
        if pristine is None or _numel(pristine) != _numel(source):
            self._pristine.pop(name, None)
            pristine = self._pristine[name] = _empty(_numel(source), dtype=_uint8, device=self._device)
        _copy(pristine, source)

    def patch(self, name: str, slot: Slot, where: TensorBytes, values: TensorBytes) -> None:
        """Change elements of one tensor of `name`, numbered as they lie in memory, to other bytes."""
        width = getattr(torch, slot.dtype).itemsize
        flat = _narrow(self._pristine[name], 0, slot.offset, slot.span * width)
        index = _to(_frombuffer(where.data, dtype=_int64), self._device)
        fresh = _to(_frombuffer(values.data, dtype=INTEGER_DTYPES[width]), self._device)
        _index_copy(_view(flat, INTEGER_DTYPES[width]), 0, index, fresh)

    def restore(self, name: str) -> None:
        """Copy all of `name` over the block."""
        pristine = self._pristine[name]
        size = self.size = int(_numel(pristine))
        if _numel(self.block) < size:
            room = max(size, 1 << 16) * 2 if size <= _DOUBLING_LIMIT else size
            self._views.clear()
            self.block = _empty(0, dtype=_uint8, device=self._device)  # frees the old one first
            self.block = _empty(room, dtype=_uint8, device=self._device)
        if self._device == "cpu":
            _move(_pointer(self.block), _pointer(pristine), size)
        else:
            _copy(_narrow(storage_bytes(self.block), 0, 0, size), pristine)

    def adopt(self, memory: torch.Tensor, size: int) -> None:
        """Use the first `size` bytes of memory that somebody else fills."""
        if self.block is not memory:
            self._views.clear()
            self.block = memory
        self.size = size

    def bytes(self) -> torch.Tensor:
        """The block's bytes in use, now."""
        return _narrow(storage_bytes(self.block), 0, 0, self.size)

    def views(self, slots: Sequence[Slot]) -> Mapping[str, torch.Tensor]:
        """The tensors in the block, the same objects in every launch."""
        results = {}
        for slot in slots:
            key = (slot.dtype, slot.shape, slot.stride, slot.offset)
            if key not in self._views:
                self._views[key] = slot.view(self.block)
            results[slot.name] = self._views[key]
        return results


class BlockReplayBuffers(ReplayBuffers):
    """The block as `BlockStore` restores it under a name, and its slots."""

    def __init__(self, blocks: BlockStore, name: str, slots: Sequence[Slot]) -> None:
        self._blocks, self._name, self._slots = blocks, name, slots

    def clear(self) -> None:
        """Zeros: a valid index, and nothing to compute from."""
        _fill(self._blocks.bytes(), 0)

    def restore(self, result: Any) -> None:
        """The block as the judge wants it; NaN in all outputs, which may lie in the block."""
        for output in _returned_bytes(result):
            _fill(output, 255)
        self._blocks.restore(self._name)

    def output_copies(self, result: Any) -> list[Any]:
        """The outputs in the block, and those returned."""
        block = self._blocks.bytes()
        inside = [_narrow(block, 0, start, stop - start) for start, stop in output_spans(self._slots)]
        return [_clone(t) for t in (*inside, *_returned_bytes(result))]


def _returned_bytes(result: Any) -> list[torch.Tensor]:
    """The bytes of all plain tensors on a device that were returned."""
    items = list(result) if type(result) in (tuple, list) else [result]
    plain = [i for i in items if type(i) in _plain and i.layout == _strided_layout and i.is_cuda]
    return [bytes_at(item, *address_range(item)) for item in plain]


class KernelCounter:
    """Counts launches and compilations of Triton kernels in this process.

    They are counted always, so that the counting tells a candidate nothing.
    """

    def __init__(self) -> None:
        self.launches = 0
        self.compilations = 0
        self.suppressed = False
        """Launches do nothing, so that a result which does not need them shows."""
        from triton import knobs
        from triton.runtime.jit import JITFunction

        knobs.compilation.listener = self._note_compilation
        self._count(JITFunction, "run")
        if knobs.runtime.interpret:
            interpreter = importlib.import_module("triton.runtime.interpreter")
            self._count(interpreter.GridExecutor, "__call__")

    def _note_compilation(self, *args: Any, cache_hit: bool = False, **facts: Any) -> None:
        self.compilations += not cache_hit

    def _count(self, place: Any, name: str) -> None:
        original = getattr(place, name)

        def call(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            self.launches += 1
            return None if self.suppressed else original(kernel, *args, **kwargs)

        setattr(place, name, call)


class _OperationRecorder(TorchDispatchMode):  # type: ignore[misc]
    def __init__(self, operations: dict[str, int]) -> None:
        super().__init__()
        self._operations = operations

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch's own way imports the whole of Dynamo at the first operation: 900 modules in every cell, so as not to
        compile what the mode does, which Dynamo does not do anyway."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [a for a in (*args, result) if hasattr(a, "numel") and hasattr(a, "is_floating_point")]
        most = max((t.numel() for t in tensors if t.is_floating_point()), default=0)
        name = func.name() if hasattr(func, "name") else str(func)
        self._operations[name] = max(self._operations.get(name, 0), most)
        return result


class _MemoryRecorder(_OperationRecorder):
    """Records the most bytes at a time of tensors that operations made, under `PEAK`."""

    def __init__(self, operations: dict[str, int]) -> None:
        super().__init__(operations)
        self._tensors: Counter[int] = Counter()
        self._bytes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        arguments = (*args, *(kwargs or {}).values())
        addresses = {_pointer(a) for a in arguments if isinstance(a, torch.Tensor)}
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and (
                _pointer(tensor) not in addresses or self._tensors[_pointer(tensor)]
            ):
                at = _pointer(tensor)
                self._tensors[at] += 1
                self._bytes[at] = max(self._bytes.get(at, 0), tensor.untyped_storage().nbytes())
                weakref.finalize(tensor, self._release, at)
        self._operations[PEAK] = max(self._operations.get(PEAK, 0), sum(self._bytes.values()))
        return result

    def _release(self, at: int) -> None:
        self._tensors[at] -= 1
        if not self._tensors[at]:
            del self._tensors[at], self._bytes[at]


PEAK = "peak bytes"
"""The operation under which a launch whose memory is watched has the most bytes at a time, beside its arguments."""


@contextmanager
def watch_launch(mode: str, kernels: KernelCounter | None) -> Iterator[dict[str, int]]:
    """Yield framework operations as they are called: name -> most elements that one call of it touched.

    mode "": nothing is watched; "operations": framework operations are; "memory": `PEAK` is; "off": Triton kernels do
    nothing.
    """
    operations: dict[str, int] = {}
    if mode in ("operations", "memory"):
        with (_OperationRecorder if mode == "operations" else _MemoryRecorder)(operations):
            yield operations
        return
    if kernels is not None:
        kernels.suppressed = mode == "off"
    try:
        yield operations
    finally:
        if kernels is not None:
            kernels.suppressed = False


_MOST_IDLE_SECONDS, _MOST_IDLE_SHARE = 0.2, 0.2
"""CPU seconds between questions, and their share of that time, up to which threads that wait actively, as those
of parallel loops do for a moment, are taken for idle."""
_SERVING_SECONDS = 0.003
"""CPU seconds that reading a question and writing an answer may take, on a machine whose caches others fill."""
_SECONDS_PER_BYTE = 1e-9
"""CPU seconds that each byte of a question or an answer may take, too: it is copied a few times."""

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
"""Functions that the harness relies on; a candidate has no reason to replace any of them."""


def _identities() -> list[int]:
    return [id(getattr(place, name, None)) for place, name in WATCHED]


def arithmetic_settings() -> dict[str, str]:
    """Settings that change the results of other code: the same for all candidates, as none may change them."""
    return {name: _setting(getter) for name, getter in _SETTINGS.items()}


_SETTINGS: dict[str, Callable[[], Any]] = {
    "default dtype": torch.get_default_dtype,
    "float32 matmul precision": torch.get_float32_matmul_precision,
    "cuda tf32": lambda: torch.backends.cuda.matmul.allow_tf32,
    "cudnn tf32": lambda: torch.backends.cudnn.allow_tf32,
    "cudnn benchmark": lambda: torch.backends.cudnn.benchmark,
    "fp16 reduced reduction": lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
    "deterministic": torch.are_deterministic_algorithms_enabled,
    "grad mode": torch.is_grad_enabled,
    "autocast": lambda: torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"),
    "denormals": lambda: bool((torch.tensor([1e-40]) * 1.0 != 0).item()),
    "threads": torch.get_num_threads,
    # Modes see every operation of this process, also the harness' own.
    "modes": lambda: [
        type(m).__name__ for m in (*_modes(), *_dispatch_modes()) if not isinstance(m, DeviceContext)
    ],
}


def _setting(getter: Callable[[], Any]) -> str:
    try:
        return str(getter())
    except RuntimeError:  # torch refuses to tell when old and new ways of setting it were mixed
        return "inconsistent"


def remember_process(state: dict[str, Any]) -> None:
    """Record functions and settings before the candidate's code is imported."""
    state["identities"], state["flags"] = _identities(), arithmetic_settings()


def note_question(state: dict[str, Any], arrays: Mapping[str, TensorBytes] = NO_ARRAYS) -> None:
    """Add up CPU seconds of the process since the last answer: nothing was asked of it meanwhile.

    Copies of the question's `arrays`, and of the last answer's, are not counted.
    """
    if "rested" in state:
        cpu, wall = state["rested"]
        seconds, before = state.get("outside", (0.0, 0.0))
        size = state.pop("answered", 0) + _bytes_of(arrays)
        seconds_of_work = max(0.0, _cpu_seconds() - cpu - _SERVING_SECONDS - size * _SECONDS_PER_BYTE)
        state["outside"] = seconds + seconds_of_work, before + _wall_clock() - wall


def _bytes_of(arrays: Mapping[str, TensorBytes]) -> int:
    return sum(memoryview(a.data).nbytes for a in arrays.values())


def note_answer(state: dict[str, Any]) -> None:
    """Note the end of an answer: the process has nothing to compute from here on."""
    state["rested"] = _cpu_seconds(), _wall_clock()


def process_report(state: dict[str, Any]) -> dict[str, Any]:
    """Report changes in the process: `patched` functions, its `flags`, and work of its `threads`.

    Threads may live on, as those of libraries do, but none may compute while nothing is asked. This runs next
    to the candidate, so it finds honest mistakes, and cheats that do not look for it.
    """
    now, flags = _identities(), arithmetic_settings()
    replacements = [
        f"{place.__name__}.{name}"
        for (place, name), before, identity in zip(WATCHED, state["identities"], now, strict=True)
        if before != identity
    ]
    seconds, wall = state.get("outside", (0.0, 0.0))
    is_busy = seconds > _MOST_IDLE_SECONDS and seconds > _MOST_IDLE_SHARE * wall
    note_answer(state)
    return {
        "patched": replacements,
        "flags": {n: v for n, v in flags.items() if v != state["flags"][n]},
        "threads": [f"{seconds:.2f} s of CPU time in {wall:.2f} s between questions"] if is_busy else [],
    }


MAPPED_BYTES = 32 << 20
"""An allocation of so many bytes or more always comes from the system, as zeros."""


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt`."""


def keep_freed_memory() -> None:
    """Have the allocator keep freed memory, up to the size from which on it cannot.

    Else it decides by earlier frees whether an output of megabytes lies in warm memory or has to be
    asked for page by page, which takes longer than to compute it: two equal solutions would differ by chance.
    """
    with suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


_NONCE_CHARACTERS = 32
_MESSAGE_BYTES = 1 << 20


def _no_work() -> None:
    pass


def _least_work() -> None:
    torch.cuda._sleep(1)
    torch.cuda.synchronize()


def serve(payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes], state: dict[str, Any]) -> NoReturn:
    """Answer this question and all that come, with nothing, until the judge hangs up.

    Where `device` is none of the host's, the shortest kernel runs there before each answer: nobody
    computes there without one.
    """
    channel: socket.socket = state[CHANNEL]
    work = _least_work if payload.get("device", "cpu") != "cpu" else _no_work
    work()
    unknown = "?" * _NONCE_CHARACTERS
    before, _, behind = wire.encode({"nonce": unknown, "value": {}}, {}).partition(unknown.encode())
    mark = b'"nonce": "'
    channel.sendall(before + state[NONCE].encode() + behind)
    while question := channel.recv(_MESSAGE_BYTES):
        work()
        at = question.find(mark) + len(mark)
        channel.sendall(before + question[at : at + _NONCE_CHARACTERS] + behind)
    os._exit(0)
