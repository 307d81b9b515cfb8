"""A solution is called in a cell on tensors without memory: machine code and launch plan are the answer.

`main` is the job of a compile worker: one cell without a device, asked to record one solution at some cases.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

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
from forecast_harness.clocks.recording.tensors import HostCode, TensorRecorder, flat_tensors
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


def record(
    payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes], state: dict[str, Any]
) -> CellAnswer:
    """Call `entry` of `file` once, with what `case` says, under `options`; nothing is launched.

    `launch`, where it is not None, has `grid`, `scalars`, `meta` and `options`: `entry` is then a kernel, which
    is launched so.

    `case` has `tensors` (name -> dtype, shape, stride, late, role) and `scalars`. `options` are Triton's for
    every launch (`num_warps` ...); a decorated kernel takes the first of its configs. The value has `plan` and
    `kernels`, and the arrays their machine code; or `host_code`, why the solution is none of kernels alone.
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
            given = {
                name: recorder.give(name, t["dtype"], t["shape"], t["stride"], t["late"])
                for name, t in payload["case"]["tensors"].items()
            }
            launch = payload.get("launch")
            if launch is None:
                returned = state["solution"](**given, **payload["case"]["scalars"])
            else:
                named = nested_arguments({**given, **decode_constants(launch["scalars"])})
                state["solution"].run(launch["grid"], named, launch["meta"], launch["options"])
                returned = None
            plan.take_launches()
            outputs = plan.returned(flat_tensors(returned))
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
        given = []
        for kind, value in zip(launch.parameters, launch.arguments, strict=True):
            if kind.startswith("*"):
                if not isinstance(value, torch.Tensor):
                    raise UnsupportedLaunch(f"a pointer that is no tensor: {type(value).__name__}")
                given.append(KernelArgument(*self._recorder.place(value)))
            else:
                number = float(value) if "f" in kind else int(value)
                given.append(KernelArgument(value=number))
        return PlanStep(self._numbers[key], launch.grid, tuple(given))

    def returned(self, tensors: list[torch.Tensor]) -> tuple[ReturnedTensor, ...]:
        """Where the outputs lie. Raises `HostCode` for one that is not contiguous."""
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
    given: dict[str, Any] = {
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
        **given,
    )


def main(work: JobContext) -> CellAnswer:
    """The payload: what `record` takes, with `cases` instead of `case` and `launches` instead of `launch`.

    `launches` has one for each case, or none. The value is a list, of each case what the cell said; arrays are named
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
            images |= {f"{number}/{name}": one for name, one in answer.arrays.items()}
    return CellAnswer(values, images)
