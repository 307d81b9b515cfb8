"""Runs in a cell, next to verified variants of a kernel: makes tensors, launches, times, traces.

All variants of one comparison share this process. They were verified before, and their contract lets them
hold nothing but Triton functions and constants: there is no code of theirs that could tell on which launch it
is, or touch the clock.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import triton

from forecast_autotune.variants.constants import decode_constants
from forecast_autotune.variants.entry import KernelEntry, nested_arguments
from forecast_autotune.variants.signature import ADDRESSES
from forecast_harness.clocks.devices import DeviceTimer, ReplayBuffers
from forecast_harness.sandbox.cell_process import load
from forecast_harness.sandbox.jobs import CellAnswer, TensorBytes, tensor_from_bytes
from forecast_harness.trials.variants.compilation import compile_side_by_side
from forecast_harness.trials.variants.files import viewed

_TRACED_ELEMENTS = 16
"""Elements of a tensor that is only traced: it needs an address, as alignment is compiled in."""


def prepare(payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes], state: dict[str, Any]) -> None:
    """Import the sources in `files` (the entry is `kernel`) and make the tensors of `calls`.

    `device` is torch's name; tensors of `empty` calls are small, for tracing alone.
    """
    where = state["device"] = payload["device"]
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=where))
    state["entries"] = [
        KernelEntry.of(vars(load(file, f"source_{n}")), payload["kernel"])
        for n, file in enumerate(payload["files"])
    ]
    generator = torch.Generator(device=where).manual_seed(int(payload["seed"]))
    state["calls"] = [
        _CallTensors(number, answer, arrays, where, generator, bool(payload.get("empty")))
        for number, answer in enumerate(payload["calls"])
    ]
    state["timer"] = None if where == "cpu" else DeviceTimer(torch)


def launch(
    payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes], state: dict[str, Any]
) -> CellAnswer:
    """Launch source `which` as `launches` say, one per call; the value is the seconds of each."""
    return CellAnswer(
        {
            "seconds": [
                _launch_seconds(state, payload["which"], n, x) for n, x in enumerate(payload["launches"])
            ]
        }
    )


def compile_launches(
    payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes], state: dict[str, Any]
) -> CellAnswer:
    """Compile later launches side by side: `sides` has of every source a list of launches, one per call.

    It saves time and decides nothing: a launch that cannot be compiled fails later.
    """
    compilations = [
        partial(_compile_one, state, which, number, spec)
        for which, configs in enumerate(payload["sides"])
        for launches in configs
        for number, spec in enumerate(launches)
    ]
    compile_side_by_side(compilations)
    return CellAnswer({})


def _compile_one(state: dict[str, Any], which: int, number: int, spec: Mapping[str, Any]) -> Any:
    entry: KernelEntry = state["entries"][which]
    views = nested_arguments({**state["calls"][number].views, **decode_constants(spec["scalars"])})
    return entry.warmup(spec["grid"], views, spec["meta"], spec["options"])


def compare(
    payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes], state: dict[str, Any]
) -> CellAnswer:
    """Launch two sources on the same values; the value is the largest error of any written tensor, over its limit.

    Limits, by tensor in `writes` of every call, are relative to the largest finite value that the first one wrote. The
    error is infinite where one of them is finite and the other is not.
    """
    worst = 0.0
    for number, (first, second) in enumerate(payload["pairs"]):
        call = state["calls"][number]
        results = []
        for which, spec in enumerate((first, second)):
            _launch_seconds(state, which, number, spec)
            results.append({n: call.memory[n].clone() for n in payload["writes"][number]})
        for name, expected in results[0].items():
            worst = max(worst, relative_error(results[1][name], expected) / payload["writes"][number][name])
    return CellAnswer({"error": min(worst, 1e30)})


def trace(payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes], state: dict[str, Any]) -> CellAnswer:
    """The TTIR of source 0 under the launches of each call in `calls`, on its tensors, without launching.

    The value has, of every call, `ttir` (each text once), `which` (the number of a launch's text, or None) and `grids`.
    """
    from triton.backends.compiler import GPUTarget

    from forecast_autotune.features.trace import KernelTracer
    from forecast_autotune.features.ttir.parser import FeatureError

    entry: KernelEntry = state["entries"][0]
    target = GPUTarget("cuda", int(payload["arch"]), 32)
    results = []
    for call, launches in zip(state["calls"], payload["calls"], strict=True):
        numbers: dict[str, int | None] = {}
        texts: list[str] = []
        which: list[int | None] = []
        grids: list[list[int] | None] = []
        for spec in launches:
            views = nested_arguments({**call.views, **decode_constants(spec["scalars"])})
            key = json.dumps([spec["scalars"], spec["meta"], spec["grid"]], sort_keys=True)
            if key not in numbers:  # warps and stages are no part of it
                numbers[key] = None
                with contextlib.suppress(FeatureError, ValueError):
                    arguments = entry.arguments(spec["grid"], views, spec["meta"], {})
                    tracer: KernelTracer = state.get("tracer") or KernelTracer.of(entry.kernel, target)
                    state["tracer"] = tracer
                    text = tracer.text((), {**arguments, **spec["meta"]})
                    numbers[key] = len(texts)
                    texts.append(text)
            which.append(numbers[key])
            try:
                grids.append(list(entry.launch_grid(spec["grid"], views, spec["meta"], spec["options"])))
            except Exception:  # whatever the variant's own grid function raises
                grids.append(None)
        results.append({"ttir": texts, "which": which, "grids": grids})
    return CellAnswer(results)


class _CallTensors:
    def __init__(
        self,
        number: int,
        call: Mapping[str, Any],
        arrays: Mapping[str, TensorBytes],
        where: str,
        generator: torch.Generator,
        empty: bool,
    ) -> None:
        self.memory: dict[str, torch.Tensor] = {}
        self._zeroed = [t["name"] for t in call["tensors"] if t["zeroed"]]
        for tensor in call["tensors"]:
            name, count = tensor["name"], _TRACED_ELEMENTS if empty else int(tensor["span"])
            flat = torch.empty(count + tensor["late"], dtype=getattr(torch, tensor["dtype"]), device=where)
            flat = flat[tensor["late"] :]
            if call["given"] and not empty:
                flat.copy_(tensor_from_bytes(arrays[f"{number}.{name}"]).reshape(-1))
            else:
                fill_tensor(flat, call["least"], generator)
            self.memory[name] = flat
        views = {t["name"]: [t["shape"], t["stride"], t["extra"]] for t in call["tensors"]}
        if empty:  # nothing is read of them but types
            for name, (*_, extra) in views.items():
                types = {key: value for key, value in extra.items() if key != ADDRESSES}
                views[name] = [list(self.memory[name].shape), [1], types]
        self.views = viewed(views, self.memory)
        self._initial_values = {
            t["name"]: self.memory[t["name"]].clone() for t in call["tensors"] if t["kept"]
        }

    def reset(self) -> None:
        """Restore the tensors as before the first launch, but for those that are only written."""
        for name in self._zeroed:
            self.memory[name].zero_()
        for name, value in self._initial_values.items():
            self.memory[name].copy_(value)


class _CallReset(ReplayBuffers):
    """These sources were verified, and can do nothing ahead of a replay: there is nothing to take away."""

    def __init__(self, call: _CallTensors) -> None:
        self._call = call

    def restore(self, result: Any) -> None:
        """Restore the tensors, as before every launch."""
        self._call.reset()


def _launch_seconds(state: dict[str, Any], which: int, number: int, spec: Mapping[str, Any]) -> float:
    entry: KernelEntry = state["entries"][which]
    call: _CallTensors = state["calls"][number]
    call.reset()
    views = nested_arguments({**call.views, **decode_constants(spec["scalars"])})
    if state["timer"] is None:
        begin = time.perf_counter()
        entry.run(spec["grid"], views, spec["meta"], spec["options"])
        return time.perf_counter() - begin
    timer: DeviceTimer = state["timer"]
    launch_once = partial(entry.run, spec["grid"], views, spec["meta"], spec["options"])
    return timer.time(launch_once, _CallReset(call), key=(which, number, str(spec))).seconds


HOST_PERIOD = (1 << 22) - 3
"""Elements that a host draws; longer tensors repeat them. A prime, so that no two rows of a matrix are alike."""
_COMPARED_ELEMENTS = 1 << 24
"""At a time: in double precision they take much more memory than the tensors."""


def fill_tensor(flat: torch.Tensor, least: int, generator: torch.Generator) -> None:
    """Normal numbers; small integers over their range, wide ones as indices into the smallest dimension.

    `least` is the extent of that dimension; `generator` lives where the tensor does.
    """
    if flat.device.type == "cpu" and flat.numel() > HOST_PERIOD:  # which takes a second for each GB
        fill_tensor(flat[:HOST_PERIOD], least, generator)
        filled = HOST_PERIOD
        while filled < flat.numel():
            count = min(filled, flat.numel() - filled)
            flat[filled : filled + count].copy_(flat[:count])
            filled += count
    elif flat.dtype == torch.bool:
        flat.copy_(torch.rand(flat.shape, generator=generator, device=flat.device) < 0.5)
    elif flat.dtype.is_floating_point:
        flat.copy_(torch.randn(flat.shape, generator=generator, device=flat.device))
    else:
        info = torch.iinfo(flat.dtype)
        low, high = (info.min, info.max) if info.bits <= 16 else (0, least)
        flat.random_(low, high, generator=generator)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error relative to the largest finite value wanted; infinite where only one of them is finite."""
    if actual.dtype == expected.dtype and torch.equal(actual, expected):
        return 0.0
    scale = error = 0.0
    for first in range(0, expected.numel(), _COMPARED_ELEMENTS):
        a, b = (t.reshape(-1)[first : first + _COMPARED_ELEMENTS].double() for t in (actual, expected))
        finite = b.isfinite()
        if not torch.equal(a.isfinite(), finite):
            return float("inf")
        if bool(finite.any()):
            scale = max(scale, float(b[finite].abs().max()))
            error = max(error, float((a - b)[finite].abs().max()))
    return error / max(scale, 1e-30)
