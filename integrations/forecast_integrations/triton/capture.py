"""Capture of calls: the first few launches of every kernel, with a tuner or without, kept for verification.

`JITFunction.run`, where Triton's launch path begins, is patched to copy the tensors before a launch, as kernels write
in place. The tuner, where there is one, is found among the callers. Nothing is patched unless
FORECAST_AUTOTUNE_CAPTURE asks for it.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import triton
from triton.runtime.autotuner import Autotuner
from triton.runtime.interpreter import InterpretedFunction

from forecast_autotune.errors import RecordError
from forecast_autotune.printable import count_text, utc_now
from forecast_autotune.records import LAUNCH_OPTIONS, Argument, Config, Kernel, digest
from forecast_autotune.records.captured_call import CapturedCall, CapturedLaunch, TensorContents
from forecast_autotune.settings import Settings
from forecast_autotune.store import Store
from forecast_autotune.store.captures import CaptureFiles
from forecast_autotune.variants.constants import encode_constant
from forecast_autotune.variants.entry import flat_arguments, heuristic_layers, signature
from forecast_autotune.variants.signature import ADDRESSES, call_form, pointees, span_of
from forecast_integrations.device import current_device
from forecast_integrations.triton.device_access import capturing_graph
from forecast_integrations.triton.problem.describe import (
    FUNCTION,
    call_arguments,
    describe_argument,
    heuristic_values,
    kernel_record,
    launch_grid,
    pruned_configs,
    to_config,
    with_address,
)
from forecast_integrations.triton.problem.source import innermost, standalone_source
from forecast_integrations.triton.protocols import is_descriptor, is_tensor

if TYPE_CHECKING:
    import torch

_CALLS_OF_A_FORM = 3
"""Calls of a kernel that differ by sizes alone: so many show which sizes vary together."""
_CALLS_OF_A_KERNEL = 8
_KERNEL_BYTES = 512 << 20
"""Bytes of contents after which no more calls of a kernel are kept."""
_MOST_SIGNATURES, _MOST_FAILURES = 4096, 16
_MOST_CALL_BYTES = 2 << 30
"""Bytes of a call's tensors; one with more is kept without their contents."""
_FEW_ELEMENTS = 4096
"""Most elements of a tensor that is kept by value even without `values`: tables, offsets and flags are small."""
_MOST_ADDRESSES = 1024
_LEAST_ADDRESS, _END_OF_ADDRESSES = 1 << 32, 1 << 48
"""Addresses of a process on the systems that Triton runs on, rarely another number of 64 bits."""
_TORCH_NAMES = {
    **{"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64", "int1": "bool"},
    **{"fp8e5": "float8_e5m2", "fp8e4nv": "float8_e4m3fn"},
    **{"fp8e4b8": "float8_e4m3fnuz", "fp8e5b16": "float8_e5m2fnuz"},
}
"""torch's names of Triton's types, where they differ."""


@dataclass
class _KernelCalls:
    """The calls that were kept of one kernel."""

    kernel: Kernel
    source: str
    sizes: dict[str, set[str]] = field(default_factory=dict)
    """Digests of exact arguments, by the digest of their form."""
    calls: int = 0
    failures: int = 0
    bytes: int = 0
    signatures: set[Any] = field(default_factory=set)
    """Quick signatures of the launches so far."""

    def is_new(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether a launch may differ from those that are kept."""
        if self.calls >= _CALLS_OF_A_KERNEL or self.bytes >= _KERNEL_BYTES:
            return False
        if (key := tuple(map(_quick_signature, (*args, *kwargs.values())))) in self.signatures:
            return False
        if len(self.signatures) < _MOST_SIGNATURES:
            self.signatures.add(key)
        return True


class CallCapture:
    """Keeps calls of this process in a store."""

    def __init__(self, files: CaptureFiles, values: bool) -> None:
        self.files, self._values = files, values
        self._kernels: dict[str, _KernelCalls] = {}
        """Calls by source hash: a program may make a kernel again and again."""
        self._calls_by_id: dict[int, tuple[weakref.ref[Any], _KernelCalls]] = {}
        """A reference to a kernel, and its calls, by the kernel's `id` while it lives."""
        self._mutex = threading.RLock()
        self._busy = threading.local()
        self.bytes = 0
        self._failures: dict[str, str] = {}

    def note(
        self, jit: Any, args: tuple[Any, ...], grid: Any, kwargs: Mapping[str, Any]
    ) -> Callable[[], None]:
        """Keep a launch that differs from earlier ones; returns a function that removes it, for one that fails.

        Never raises: the launch goes on.
        """
        entry = self._calls_by_id.get(id(jit))
        if (entry is not None and not entry[1].is_new(args, kwargs)) or getattr(self._busy, "on", False):
            return _nothing
        if capturing_graph():
            return _nothing
        self._busy.on = True  # a grid function or a copy may launch kernels
        try:
            with self._mutex:
                return self._note(jit, args, grid, kwargs)
        except Exception as error:
            self._failures.setdefault(getattr(jit, "__name__", "a kernel"), f"{error!r:.200}")
            return _nothing
        finally:
            self._busy.on = False

    def _note(
        self, jit: Any, args: tuple[Any, ...], grid: Any, kwargs: Mapping[str, Any]
    ) -> Callable[[], None]:
        tuner, configs = _tuner_above(jit)
        if (number := id(jit)) not in self._calls_by_id:
            kernel, source = kernel_record(jit), ""
            with suppress(RecordError):
                source = standalone_source(jit)
            calls = self._kernels.setdefault(kernel.source_sha256, _KernelCalls(kernel, source))
            self._calls_by_id[number] = weakref.ref(jit, lambda _: self._calls_by_id.pop(number, None)), calls
        calls = self._calls_by_id[number][1]
        names = list(jit.arg_names)
        bound = {**dict(zip(names, args, strict=False)), **kwargs}
        meta = {n for c in getattr(tuner, "configs", ()) for n in c.kwargs}
        heuristic_names = {n for layer in heuristic_layers(getattr(tuner, "fn", None)) for n in layer}
        arguments = {n: bound[n] for n in names if n in bound and n not in meta and n not in heuristic_names}
        tensor_arguments = {n: _as_tensor(v, n) for n, v in arguments.items()}
        records = [_with_function(a, arguments.get(a.name)) for a in call_arguments(jit, tensor_arguments)]
        flat = dict(flat_arguments(tensor_arguments, signature(jit)[1]))
        tensors = {
            a.name: flat[a.name].base if is_descriptor(flat[a.name]) else flat[a.name]
            for a in records
            if a.kind == "tensor"
        }
        records = [with_address(a, tensors.get(a.name)) for a in records]
        all_records = _with_pointees(records, tensors)
        form = digest(call_form(all_records))
        exact = digest([a.to_json() for a in all_records])
        sizes = calls.sizes.setdefault(form, set())
        if exact in sizes or len(sizes) >= _CALLS_OF_A_FORM:
            return _nothing
        extent = launch_grid(grid, bound, {})
        if extent is None:
            raise ValueError("its launch grid cannot be evaluated")
        if 0 in extent:  # no program runs, and nothing could be verified
            return _nothing
        sizes.add(exact)
        options = {n: kwargs[n] for n in LAUNCH_OPTIONS if kwargs.get(n) is not None}
        config = Config.of({n: _plain(bound[n]) for n in names if n in meta and n in bound}, **options)
        call = CapturedCall(
            digest(calls.kernel.source_sha256, form, exact),
            calls.kernel,
            all_records,
            extent,
            config,
            current_device(),
            tuple(dict.fromkeys(map(to_config, configs))),
            tuple(_launches(tuner, configs, arguments, grid))
            or (CapturedLaunch(dict(config.kwargs), extent),),
            zeroed=tuple(n for n in getattr(tuner, "reset_to_zero", ()) or () if isinstance(n, str)),
            shared=_overlapping(tensors),
            source=calls.source,
            at=utc_now(),
        )
        before = self.bytes
        self.files.put(replace(call, contents=self._contents(call, tensors)))
        calls.calls, calls.bytes = calls.calls + 1, calls.bytes + self.bytes - before

        def take_back() -> None:
            with self._mutex:
                self.files.remove(call)
                calls.calls, calls.failures = calls.calls - 1, calls.failures + 1
                if calls.failures <= _MOST_FAILURES:  # each copies the tensors once more
                    sizes.discard(exact)
                    calls.signatures.clear()

        return take_back

    def _contents(self, call: CapturedCall, tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorContents]:
        import torch

        total = sum(t.numel() * t.element_size() for t in tensors.values())
        results, pointers = {}, set(pointees(call.arguments).values())
        for number, (name, tensor) in enumerate(tensors.items()):
            if name in pointers:  # addresses of this process mean nothing elsewhere
                continue
            span = span_of(tensor.shape, tensor.stride())
            flat = tensor.detach().as_strided((span,), (1,), tensor.storage_offset())
            is_value = self._values or not flat.is_floating_point() or span <= _FEW_ELEMENTS
            if is_value and total <= _MOST_CALL_BYTES and span:
                data = memoryview(flat.cpu().view(torch.uint8).numpy())
                if file := self.files.put_contents(call, data):
                    results[name] = TensorContents(file)
                    self.bytes += data.nbytes
                    continue
            results[name] = _moments(flat, number)
        return results

    def line(self) -> str:
        """One line for a person."""
        calls = [record.calls for record in self._kernels.values() if record.calls]
        text = f"captured {count_text(sum(calls), 'call')} of {count_text(len(calls), 'kernel')}"
        failures = "".join(f"; none of {name}: {why}" for name, why in list(self._failures.items())[:3])
        place = f"in {self.files.path} (`forecast-autotune clear --captures` removes them)"
        return f"{text}, {self.bytes / 2**20:.1f} MiB of their tensors, {place}{failures}"


def _quick_signature(value: Any) -> Any:
    """Return a quick signature of an argument, which does not keep it alive."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return tuple(value.shape), value.dtype
    if isinstance(value, tuple):
        return tuple(map(_quick_signature, value))
    return value if isinstance(value, bool | int | float | str) else type(value)


def _tuner_above(jit: Any) -> tuple[Any, list[Any]]:
    """Return the tuner that launches this kernel now, of any class, and its configs after pruning.

    The tuner is `self` of one of the callers.
    """
    launch, frame = None, sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Autotuner) and innermost(owner) is jit:
            launch = frame
        frame = frame.f_back  # type: ignore[assignment]
    if launch is None:
        return None, []
    tuner, args = launch.f_locals["self"], launch.f_locals.get("args", ())
    # Before its first own run a tuner of Triton 3.6 has no such attribute.
    before, tuner.nargs = getattr(tuner, "nargs", None), dict(zip(tuner.arg_names, args, strict=False))
    try:
        return tuner, list(pruned_configs(tuner, dict(launch.f_locals.get("kwargs", {}))))
    except Exception:  # the user's pruning may not expect this call
        return tuner, list(tuner.configs)
    finally:
        tuner.nargs = before


def _with_function(argument: Argument, value: Any) -> Argument:
    """Return an argument; one that is a JIT function with its module, which only a sandbox runs."""
    if argument.dtype != FUNCTION:
        return argument
    inner = getattr(value, "value", value)
    return replace(argument, extra=encode_constant(inner, standalone_source))


def _as_tensor(value: Any, name: str) -> Any:
    """Return an argument with tensors in place of other objects with an address, as Triton accepts them.

    Raises `ValueError` for an object whose memory is unknown.
    """
    if isinstance(value, tuple | list):
        members = [_as_tensor(v, f"{name}.{n}") for n, v in enumerate(value)]
        return type(value)(*members) if hasattr(value, "_fields") else type(value)(members)
    import torch

    if isinstance(value, torch.Tensor) or not hasattr(value, "data_ptr"):
        return value
    text, address = str(value.dtype).removeprefix("torch."), value.data_ptr()
    dtype = getattr(torch, _TORCH_NAMES.get(text, text), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is of {text}, a type that torch has not")
    spans = [span for span in _live_tensors() if span[0] <= address < span[1]]
    devices = [t.device for _, _, t in spans] or [getattr(value, "device", "cpu")]
    device = torch.device(devices[0])
    if is_tensor(value):
        shape, stride = tuple(value.shape), tuple(value.stride())
    else:  # it extends to the end of the tensor that it points into
        size = max((end for _, end, _ in spans), default=address) - address
        shape, stride = (size // dtype.itemsize,), (1,)
    if min(stride, default=0) < 0 or not address or not (spans or hasattr(value, "device")):
        raise ValueError(f"{name}, of strides {stride}, lies in no memory that can be told")
    if not (size := span_of(shape, stride) * dtype.itemsize):
        return torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cpu":
        flat = torch.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype=torch.uint8)
    else:
        interface = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}
        flat = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device=device)
    return flat.view(dtype).as_strided(shape, stride)


def _live_tensors() -> list[tuple[int, int, torch.Tensor]]:
    """Return (address, address behind the last element, tensor) of all tensors of this process."""
    import torch

    results = []
    for value in gc.get_objects():
        if issubclass(type(value), torch.Tensor):
            with suppress(Exception):  # a subclass without memory of its own
                if value.layout == torch.strided and value.numel():
                    size = span_of(value.shape, value.stride()) * value.element_size()
                    results.append((value.data_ptr(), value.data_ptr() + size, value.detach()))
    return results


def _with_pointees(arguments: Sequence[Argument], tensors: dict[str, torch.Tensor]) -> tuple[Argument, ...]:
    """Return the arguments, and the tensors that addresses in them point into, which are added to `tensors`.

    Raises `ValueError` for addresses of memory that no tensor of the program keeps, and for a scalar address.
    """
    results, live = [], None
    for argument in arguments:
        number = argument.value if argument.kind == "scalar" and isinstance(argument.value, int) else 0
        is_address = _LEAST_ADDRESS <= number < _END_OF_ADDRESSES
        addresses = _addresses(argument.name, tensors[argument.name]) if argument.name in tensors else []
        live = live or (_live_tensors() if is_address or any(addresses) else None)
        spans = {n: [span for span in live or () if span[0] <= n < span[1]] for n in {number, *addresses}}
        if spans.pop(number) and is_address:
            raise ValueError(f"{argument.name} is a tensor's address, which means nothing elsewhere")
        if not any(spans.values()):
            results.append(argument)
            continue
        if unknown := [hex(n) for n, matches in spans.items() if n and not matches]:
            raise ValueError(
                f"{argument.name} holds addresses, and no tensor of the program keeps the memory at {unknown[0]}"
            )
        places: list[list[int] | None] = []
        owners: dict[tuple[int, int], torch.Tensor] = {}
        for n in addresses:
            if n:  # prefer a tensor that begins at the address, then the largest one
                start, end, tensor = max(spans[n], key=lambda span: (span[0] == n, span[1] - span[0]))
                owners.setdefault((start, end), tensor)
            places.append([list(owners).index((start, end)), n - start] if n else None)
        results.append(replace(argument, extra={**argument.extra, ADDRESSES: places}))
        for number, tensor in enumerate(owners.values()):
            name = f"{argument.name}.{number}"
            tensors[name] = tensor
            results.append(describe_argument(name, tensor))
    return tuple(results)


def _addresses(name: str, tensor: torch.Tensor) -> list[int]:
    """Return the numbers of a tensor if all of them look like addresses, or are 0; else none.

    Raises `ValueError` for too many.
    """
    import torch

    if tensor.dtype not in (torch.int64, torch.uint64) or not tensor.numel():
        return []
    span = span_of(tensor.shape, tensor.stride())
    numbers = tensor.detach().as_strided((span,), (1,), tensor.storage_offset()).view(torch.int64)
    able = (numbers == 0) | ((numbers >= _LEAST_ADDRESS) & (numbers < _END_OF_ADDRESSES))
    if not able.all() or not numbers.any():
        return []
    if span > _MOST_ADDRESSES:
        raise ValueError(f"{name} holds {span} addresses, and at most {_MOST_ADDRESSES} are followed")
    return [int(n) for n in numbers.tolist()]


def _launches(
    tuner: Any, configs: Sequence[Any], arguments: Mapping[str, Any], grid: Any
) -> Iterator[CapturedLaunch]:
    """Yield the launch of each config whose grid is known."""
    if tuner is None:
        return
    heuristics = heuristic_values(tuner.fn)
    names = {n for layer in heuristic_layers(tuner.fn) for n in layer}
    keys = set()
    for config in configs:
        values = heuristics({**arguments, **config.all_kwargs()})
        extent = launch_grid(grid, values, {})
        meta = {n: _plain(v) for n, v in config.kwargs.items()}
        if extent is None or (key := digest(meta)) in keys:
            continue
        keys.add(key)
        yield CapturedLaunch(meta, extent, {n: _plain(values[n]) for n in names if n in values})


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)


def _overlapping(tensors: Mapping[str, torch.Tensor]) -> tuple[tuple[str, ...], ...]:
    """Groups of tensors that share memory."""
    spans = sorted(
        (t.data_ptr(), t.data_ptr() + span_of(t.shape, t.stride()) * t.element_size(), n)
        for n, t in tensors.items()
        if t.numel()
    )
    groups: list[list[str]] = []
    end = 0
    for low, high, name in spans:
        if groups and low < end:
            groups[-1].append(name)
        else:
            groups.append([name])
        end = max(end, high)
    return tuple(tuple(g) for g in groups if len(g) > 1)


def _moments(flat: torch.Tensor, number: int) -> TensorContents:
    """Return the distribution of a tensor's finite numbers, from a sample of a large one."""
    step = max(1, flat.numel() // (1 << 22))
    sample = flat[::step].cpu().float()
    sample = sample[sample.isfinite()].double()
    if not sample.numel():
        return TensorContents(seed=number)
    deviation = float(sample.std()) if sample.numel() > 1 else 0.0
    return TensorContents(
        "", number, float(sample.mean()), deviation, float(sample.min()), float(sample.max())
    )


def _nothing() -> None:
    pass


_capture: CallCapture | None = None


def start_capture() -> None:
    """Keep calls of this process from now on, where the default store is a directory."""
    global _capture
    files = Store.default().captures
    if _capture is not None or files is None:
        return
    _capture = CallCapture(files, Settings.from_environment().capture == "values")
    for kind in (triton.JITFunction, InterpretedFunction):
        kind.run = _capturing_run(_capture, kind.run)
    atexit.register(_print_line, _capture, os.getpid())


def _capturing_run(capture: CallCapture, run: Callable[..., Any]) -> Callable[..., Any]:
    def run_noted(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        take_back = _nothing if warmup else capture.note(self, args, grid, kwargs)
        try:
            return run(self, *args, grid=grid, warmup=warmup, **kwargs)
        except Exception:
            take_back()
            raise

    return run_noted


def _print_line(capture: CallCapture, owner: int) -> None:
    if os.getpid() == owner:
        print(f"forecast-autotune: {capture.line()}", file=sys.stderr, flush=True)
