"""What torch.compile writes for a GPU, rendered on a machine without one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

H200 = {"multi_processor_count": 132, "cc": 90, "major": 9, "regs_per_multiprocessor": 65536}
LIMITS = {"max_threads_per_multi_processor": 2048, "max_threads_per_block": 1024, "warp_size": 32}


def answer_for_h200(patch: pytest.MonkeyPatch) -> None:
    """Answer what Inductor asks of a device that is not there."""
    import torch
    from torch._inductor import scheduler
    from torch._inductor.runtime.hints import DeviceProperties

    properties = DeviceProperties(type="cuda", index=0, **H200, **LIMITS)
    told = SimpleNamespace(name="NVIDIA H200", minor=0, gcnArchName="", **H200, **LIMITS)
    patch.setattr(DeviceProperties, "create", staticmethod(lambda device: properties))
    patch.setattr(torch.cuda, "get_device_properties", lambda *device: told)
    patch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    patch.setattr(scheduler, "has_triton", lambda *device: True)


def compile_nothing(patch: pytest.MonkeyPatch) -> None:
    """Leave choices and fused kernels uncompiled; a fused one takes half as long as what it is fused of."""
    from torch._inductor.scheduler import Scheduler
    from torch._inductor.select_algorithm import AlgorithmSelectorCache

    patch.setattr(AlgorithmSelectorCache, "make_precompile_fn", lambda *_, **__: lambda: {})
    for name, found in {
        "compile_kernel": (None, None),
        "benchmark_fused_nodes": (1.0, ""),
        "benchmark_codegened_module": (0.5, ""),
    }.items():
        patch.setattr(Scheduler, name, lambda *_, found=found, **__: found)


def inductor_output(
    function: Callable[..., Any], inputs: Sequence[tuple[tuple[int, ...], Any]], patch: pytest.MonkeyPatch
) -> str:
    """The file that Inductor would write for this function of CUDA tensors of these sizes and dtypes.

    The function is traced on the CPU, and lowered for tensors that have no memory on a device that is not there.
    The questions that are asked of the device are answered for an H200. Put together for torch 2.13.
    """
    import torch
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    from forecast_integrations.triton.null_device import null_device

    answer_for_h200(patch)
    with null_device():
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            given = [torch.zeros(size, dtype=dtype) for size, dtype in inputs]
            graph = make_fx(function, decomposition_table=select_decomp_table())(*given)
        device = torch.device("cuda:0")
        lowered = [FakeTensor(mode, torch.empty(s, dtype=d, device="meta"), device) for s, d in inputs]
        lowering = GraphLowering(graph, example_inputs=lowered)
        with V.set_graph_handler(lowering), V.set_fake_mode(mode), DebugContext():
            lowering.run(*lowered)
            return str(lowering.codegen()[0].value)


def template_inputs(
    graph: Any, operands: Sequence[tuple[Sequence[Any], Sequence[Any]]], dtype: Any = None
) -> list[Any]:
    """Inputs of a graph (size, stride) as templates take them; of half precision if nothing else is said."""
    import torch
    from torch._inductor import ir

    nodes = []
    for i, (size, stride) in enumerate(operands):
        layout = ir.FixedLayout(torch.device("cuda:0"), dtype or torch.float16, list(size), list(stride))
        buffer = ir.InputBuffer(name=f"arg{i}", layout=layout)
        graph.graph_inputs[buffer.name] = buffer
        nodes.append(ir.StorageBox(buffer))
    return nodes


@contextlib.contextmanager
def graph_to_render(patch: pytest.MonkeyPatch, clock: Callable[[Any], float]) -> Iterator[Any]:
    """A graph in which templates can be rendered for an H200; `clock` is the null device's."""
    import torch
    from torch._inductor.graph import GraphLowering
    from torch._inductor.utils import fresh_cache
    from torch._inductor.virtualized import V
    from torch.fx.experimental.proxy_tensor import make_fx

    from forecast_integrations.triton.null_device import null_device

    patch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    answer_for_h200(patch)
    lowering = GraphLowering(make_fx(lambda: torch.zeros(1))())
    with null_device(clock), fresh_cache(), V.set_graph_handler(lowering):
        yield lowering
