"""A solution is called in a cell on tensors without memory: machine code and launch plan are the answer.

`main` is the job of a compile worker: one cell without a device, asked to record one solution at some cases.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from forecast_autotune.variants.constants import decode_constants
from forecast_autotune.variants.entry import KernelEntry, nested_arguments
from forecast_harness.clocks.recording.device import (
    RecordedLaunch,
    RecordingDevice,
    UnsupportedLaunch,
    assembly_of,
    install_device,
    ptx_parameters,
)
from forecast_harness.clocks.records import (
    BufferRole,
    CompiledKernel,
    KernelArgument,
    LaunchPlan,
    PlanBuffer,
    PlanStep,
    ReturnedTensor,
)
from forecast_harness.sandbox.cell_process import load
from forecast_harness.sandbox.jobs import CellAnswer, TensorBytes
from forecast_harness.sandbox.judge_process import JobContext

_BASE, _STRIDE = 0x7F00_0000_0000, 1 << 36
"""The made-up address of the first buffer, and the distance between two."""
_UNSET = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}
_FILLED = {
    "zeros": 0,
    "zeros_like": 0,
    "new_zeros": 0,
    "zero_": 0,
    "ones": 1,
    "ones_like": 1,
    "new_ones": 1,
    "full": None,
    "full_like": None,
    "new_full": None,
    "fill_": None,
}
"""Operations that set every element to one value; None: to their argument."""
_READS = {
    "__bool__",
    "__complex__",
    "__float__",
    "__index__",
    "__int__",
    "__setitem__",
    "as_tensor",
    "cpu",
    "item",
    "numpy",
    "tensor",
    "tolist",
}
"""Functions that read or write single values, or bring them from the host."""
_VALUE_AT = {"full": 1, "full_like": 1, "new_full": 2, "fill_": 1}


class HostCode(Exception):
    """The solution computes with torch, outside of launches; the text names the operation."""


class TensorRecorder:
    """Makes tensors that lie in named buffers, and knows which buffer any tensor lies in."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        """Bytes by buffer, in the order in which they appeared."""
        self.refused = ""
        """The first operation that computed on data."""
        self._names: dict[int, str] = {}
        self._tensors: list[torch.Tensor] = []
        self._modes = (_DevicelessMode(), _Operations(self), _Addresses(self))
        self.on_fill: Callable[[str, int, int, int, int], None] = lambda *_: None
        """Called for every fill: buffer, offset, bytes, pattern, width."""

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """A context in which tensors have no memory."""
        with contextlib.ExitStack() as stack:
            for mode in self._modes:
                stack.enter_context(mode)
            yield

    def give(self, name: str, dtype: str, shape: Sequence[int], stride: Sequence[int], late: int) -> Any:
        """A tensor in a buffer of its own, `late` elements from its beginning; call within `active`."""
        last = sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if 0 not in shape else -1
        kind = getattr(torch, dtype)
        base = torch.empty((max(0, late + last + 1),), dtype=kind, device="cuda")
        self._rename(base, name)
        return base.as_strided(tuple(shape), tuple(stride), late)

    def place(self, tensor: torch.Tensor) -> tuple[str, int]:
        """(buffer, bytes from its beginning). Raises `HostCode` for a tensor made in no known way."""
        key = tensor.untyped_storage()._cdata
        if key not in self._names:
            raise HostCode("a tensor that was not allocated by torch.empty and the like")
        return self._names[key], tensor.storage_offset() * tensor.element_size()

    def address(self, tensor: torch.Tensor) -> int:
        """A made-up address, aligned as the tensor's real one will be."""
        name, offset = self.place(tensor)
        return _BASE + _STRIDE * list(self.sizes).index(name) + offset

    def refuse(self, name: str) -> NoReturn:
        """Raise `HostCode` for an operation of torch's, and remember it: the solution may catch it."""
        self.refused = self.refused or name
        raise HostCode(f"torch.{name} computes on data outside of a kernel")

    def note_allocation(self, tensor: torch.Tensor) -> None:
        """Take a new tensor's storage as a buffer."""
        if tensor.untyped_storage()._cdata not in self._names:
            self._rename(tensor, f"allocation-{len(self._tensors)}")

    def note_fill(self, tensor: torch.Tensor, value: Any) -> None:
        """Take note that a contiguous tensor was set to `value`. Raises `HostCode` for any other."""
        if not tensor.is_contiguous():
            raise HostCode("filling a tensor that is not contiguous")
        name, offset = self.place(tensor)
        width = tensor.element_size()
        with _no_modes():
            raw = torch.full((1,), value, dtype=tensor.dtype).view(torch.uint8).tolist()
        if width == 8 and raw[:4] == raw[4:]:
            raw, width = raw[:4], 4
        if width not in (1, 2, 4):
            raise HostCode(f"filling {tensor.dtype} with {value!r:.40}")
        if size := tensor.numel() * tensor.element_size():
            self.on_fill(name, offset, size, int.from_bytes(bytes(raw), "little"), width)

    def _rename(self, tensor: torch.Tensor, name: str) -> None:
        storage = tensor.untyped_storage()
        self.sizes.pop(self._names.get(storage._cdata, ""), None)
        self._names[storage._cdata] = name
        self.sizes[name] = int(storage.nbytes())
        self._tensors.append(tensor)  # a storage that is freed gives its address to the next


@contextlib.contextmanager
def _no_modes() -> Iterator[None]:
    from torch._C import _DisableTorchDispatch  # type: ignore[attr-defined,unused-ignore]

    with torch._C.DisableTorchFunction(), _DisableTorchDispatch():
        yield


class _DevicelessMode(FakeTensorMode):  # type: ignore[misc]
    """A mode of tensors without memory that do not initialise the device, which torch takes for present."""

    @property
    def avoid_device_init(self) -> bool:
        return True


class _Addresses(TorchFunctionMode):  # type: ignore[misc]
    def __init__(self, recorder: TensorRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if function is torch.Tensor.data_ptr:
            return self._recorder.address(args[0])
        if function is torch.Tensor.__getitem__:  # torch's own asks the device that is not there
            return self._item(args[0], args[1])
        copies = name == "contiguous" and not args[0].is_contiguous()
        if copies or name in _READS:
            self._recorder.refuse(name)
        return function(*args, **(kwargs or {}))

    def _item(self, tensor: torch.Tensor, index: Any) -> torch.Tensor:
        """A view by integers, slices, `None` and `...`; any other index would copy."""
        parts = list(index) if isinstance(index, tuple) else [index]
        if any(
            not isinstance(p, int | slice | type(None) | type(...)) or p is True or p is False for p in parts
        ):
            self._recorder.refuse("__getitem__")
        axes = sum(p is not None and p is not ... for p in parts)
        if ... not in parts:
            parts.append(...)
        at = parts.index(...)
        parts[at : at + 1] = [slice(None)] * (tensor.dim() - axes)
        dim, result = 0, tensor
        for part in parts:
            if part is None:
                result = result.unsqueeze(dim)
            elif isinstance(part, int):
                result = result.select(dim, part)
                continue
            elif part != slice(None):
                start, stop, step = part.indices(result.shape[dim])
                result = torch.ops.aten.slice.Tensor(result, dim, start, stop, step)
            dim += 1
        return result


class _Operations(TorchDispatchMode):  # type: ignore[misc]
    def __init__(self, recorder: TensorRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        space, _, name = str(function._schema.name).rpartition("::")
        if space == "prim" or name.startswith("sym_"):  # where a tensor is, how large: no data
            return function(*args, **kwargs)
        if name in _UNSET or name in _FILLED:
            result = function(*args, **kwargs)
            if result.device.type == "cuda":
                self._recorder.note_allocation(result)
                if name in _FILLED:
                    value = _FILLED[name]
                    if value is None:
                        value = kwargs.get("fill_value", kwargs.get("value"))
                        value = args[_VALUE_AT[name]] if value is None else value
                    if isinstance(value, torch.Tensor):
                        self._recorder.refuse(name)
                    self._recorder.note_fill(result, value)
            return result
        schema = function._schema
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
        view = any(r.alias_info is not None for r in schema.returns)
        if view and not writes:
            return function(*args, **kwargs)
        return self._recorder.refuse(name)


def flat_tensors(result: Any) -> list[torch.Tensor]:
    """The tensors in a solution's result: one, or a tuple, list or dict of them."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, Mapping):
        result = list(result.values())
    if isinstance(result, tuple | list):
        return [t for item in result for t in flat_tensors(item)]
    return []


# --- solutions ---


def record(
    payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes], state: dict[str, Any]
) -> CellAnswer:
    """Call `entry` of `file` once, with the arguments of `case`, under `options`; nothing is launched.

    `launch`, where it is not None, has `grid`, `scalars`, `meta` and `options`: `entry` is then a kernel, which
    is launched so.

    `case` has `tensors` (name -> dtype, shape, stride, late, role) and `scalars`. `options` are Triton's for
    every launch (`num_warps` ...); a decorated kernel takes the first of its configs. The value has `plan` and
    `kernels`, and the arrays their machine code; or `host_code`, why the solution is not made of kernels alone.
    Raises what the solution or Triton's compiler raises.
    """
    device = install_device(int(payload["device"]["arch"]), payload["device"])
    device.launches.clear()
    device.options = dict(payload.get("options", {}))
    recorder = TensorRecorder()
    plan = _PlanWriter(recorder, device)
    try:
        if "solution" not in state:
            state["solution"] = _solution(payload)
        with recorder.active():
            tensors = {
                name: recorder.give(name, t["dtype"], t["shape"], t["stride"], t["late"])
                for name, t in payload["case"]["tensors"].items()
            }
            launch = payload.get("launch")
            if launch is None:
                value = state["solution"](**tensors, **payload["case"]["scalars"])
            else:
                arguments = nested_arguments({**tensors, **decode_constants(launch["scalars"])})
                state["solution"].run(launch["grid"], arguments, launch["meta"], launch["options"])
                value = None
            plan.take_launches()
            outputs = plan.outputs(flat_tensors(value))
    except (HostCode, UnsupportedLaunch) as error:
        return CellAnswer({"host_code": str(error)[:500]})
    except Exception:
        if recorder.refused:  # the solution caught the refusal, or torch wrapped it
            return CellAnswer({"host_code": f"torch.{recorder.refused} computes on data"})
        raise
    if recorder.refused:
        return CellAnswer({"host_code": f"torch.{recorder.refused} computes on data"})
    roles = {name: t["role"] for name, t in payload["case"]["tensors"].items()}
    buffers = tuple(
        PlanBuffer(name, BufferRole(roles.get(name, BufferRole.SCRATCH)), size)
        for name, size in recorder.sizes.items()
    )
    result = LaunchPlan(buffers, tuple(plan.steps), outputs)
    code = {f"code-{n}": TensorBytes("uint8", (len(k.image),), k.image) for n, k in enumerate(plan.kernels)}
    return CellAnswer({"plan": result.to_json(), "kernels": [k.to_json() for k in plan.kernels]}, code)


def _solution(payload: Mapping[str, Any]) -> Any:
    """The function that launches kernels; or, where `launch` says how, the kernel itself."""
    module = load(payload["file"])
    if payload.get("launch") is None:
        return getattr(module, payload["entry"])
    return KernelEntry.of(vars(module), payload["entry"])


class _PlanWriter:
    def __init__(self, recorder: TensorRecorder, device: RecordingDevice) -> None:
        self._recorder, self._device = recorder, device
        self.kernels: list[CompiledKernel] = []
        self.steps: list[PlanStep] = []
        self._numbers: dict[str, int] = {}
        recorder.on_fill = self._fill

    def _fill(self, buffer: str, offset: int, size: int, pattern: int, width: int) -> None:
        self.take_launches()
        if size:
            self.steps.append(PlanStep(fill=buffer, offset=offset, size=size, pattern=pattern, width=width))

    def take_launches(self) -> None:
        """Turn launches since the last call into steps."""
        for launch in self._device.launches:
            if 0 not in launch.grid:
                self.steps.append(self._step(launch))
        self._device.launches.clear()

    def _step(self, launch: RecordedLaunch) -> PlanStep:
        source, metadata = launch.compiled
        key = str(metadata.hash)
        if key not in self._numbers:
            self._numbers[key] = len(self.kernels)
            self.kernels.append(_compiled_kernel(source, metadata, launch.parameters))
        arguments = []
        for kind, value in zip(launch.parameters, launch.arguments, strict=True):
            if kind.startswith("*"):
                if not isinstance(value, torch.Tensor):
                    raise UnsupportedLaunch(f"a pointer that is no tensor: {type(value).__name__}")
                arguments.append(KernelArgument(*self._recorder.place(value)))
            else:
                number = float(value) if "f" in kind else int(value)
                arguments.append(KernelArgument(value=number))
        return PlanStep(self._numbers[key], launch.grid, tuple(arguments))

    def outputs(self, tensors: list[torch.Tensor]) -> tuple[ReturnedTensor, ...]:
        """The places of the outputs. Raises `HostCode` for one that is not contiguous."""
        result = []
        for tensor in tensors:
            if not tensor.is_contiguous():
                raise HostCode("an output that is not contiguous")
            dtype = str(tensor.dtype).removeprefix("torch.")
            result.append(ReturnedTensor(*self._recorder.place(tensor), dtype, tuple(tensor.shape)))
        return tuple(result)


def _compiled_kernel(source: Any, metadata: Any, parameters: tuple[str, ...]) -> CompiledKernel:
    image, text = assembly_of(metadata)
    count = ptx_parameters(text, metadata.name)
    facts = {
        "global_scratch_bytes": "global_scratch_size",
        "global_scratch_align": "global_scratch_align",
        "profile_scratch_bytes": "profile_scratch_size",
        "profile_scratch_align": "profile_scratch_align",
        "num_ctas": "num_ctas",
    }
    optional: dict[str, Any] = {
        ours: int(getattr(metadata, theirs)) for ours, theirs in facts.items() if hasattr(metadata, theirs)
    }
    return CompiledKernel(
        metadata.name,
        int(metadata.target.arch),
        parameters,
        scratch_parameters=max(0, count - len(parameters)),
        shared_bytes=int(metadata.shared),
        num_warps=int(metadata.num_warps),
        cooperative=bool(getattr(metadata, "launch_cooperative_grid", False)),
        image=image,
        **optional,
    )


def main(work: JobContext) -> CellAnswer:
    """Record a solution. The payload is that of `record`, with lists `cases` and `launches`.

    `launches` has one for each case, or none. The value is a list of the cell's answers by case; arrays are named
    `CASE/ARRAY`. Raises `CandidateFault`.
    """
    request = dict(work.payload)
    cases, launches = request.pop("cases"), request.pop("launches")
    values: list[Any] = []
    images: dict[str, TensorBytes] = {}
    with work.cell() as cell:
        for number, case in enumerate(cases):
            launch = launches[number] if launches else None
            answer = cell.ask(f"{__name__}:record", {**request, "case": case, "launch": launch})
            values.append(answer.value)
            images |= {f"{number}/{name}": array for name, array in answer.arrays.items()}
    return CellAnswer(values, images)
