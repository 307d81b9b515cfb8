"""Stand-ins: for the engine around a package's kernels, and for CUDA on a machine that has none.

`import_without` keeps vLLM's and SGLang's engines out: their kernel modules are imported by themselves.
`cuda_on_cpu` makes what asks torch for CUDA get tensors of the CPU, which the null device takes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
import unittest
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _Nothing:
    """A value of a module that is not there: false, callable, with every attribute; as a decorator it does nothing."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not options else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _KNOWN.get(name, self)

    def __bool__(self) -> bool:
        return False

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (object,)

    def __iter__(self) -> Iterator[Any]:
        return iter(())


_KNOWN: dict[str, Any] = {
    "DEVICE_TYPE": "cuda",
    "CustomTestCase": unittest.TestCase,
    "PAD_SLOT_ID": -1,
    "get_device": lambda *_: "cuda",
    "is_cuda": lambda *_: True,
    "is_cuda_alike": lambda *_: True,
    "register_custom_op": lambda *args, **_: args[0] if args else (lambda function: function),
    "seed_everything": torch.manual_seed,
    "torch_release": tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]),
}
"""Values that the kernel modules and their tests need, by name."""


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, bare: Sequence[str], absent: Sequence[str]) -> None:
        self._bare, self._absent = frozenset(bare), tuple(absent)

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name in self._bare:
            places = [Path(p) / name.rpartition(".")[2] for p in (path or sys.path)]
            spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [str(p) for p in places if p.is_dir()]
            return spec
        if any(name == one or name.startswith(f"{one}.") for one in self._absent):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        vars(module)["__getattr__"] = functools.partial(getattr, _Nothing())
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is in it."""


def import_without(bare: Sequence[str], absent: Sequence[str]) -> None:
    """Import the packages `bare` without their `__init__`, and stand-ins for the modules `absent` and all below."""
    if bare or absent:
        sys.meta_path.insert(0, _Finder(bare, absent))


_DEVICE = torch.device("cuda", 0)
_ZEROS: dict[Any, Callable[..., Any]] = {
    torch.empty: torch.zeros,
    torch.empty_like: torch.zeros_like,
    torch.Tensor.new_empty: torch.Tensor.new_zeros,
}
"""Launches write nothing: memory that nobody wrote would make results differ from run to run."""


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return "cpu"
    return type(value)(map(_on_cpu, value)) if type(value) in (list, tuple) else value


class _CudaOnCpu(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == torch.Tensor.device.__get__ and type(args[0]) is not torch._subclasses.FakeTensor:
            found = func(*args)
            return _DEVICE if found.type == "cpu" else found
        if func == torch.Tensor.is_cuda.__get__:
            return True
        if func is torch.Tensor.get_device:
            return 0
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        named = {key: _on_cpu(value) for key, value in (kwargs or {}).items()}
        named.pop("pin_memory", None)
        if func is torch.histc and not args[0].is_floating_point():
            return func(args[0].float(), *args[1:], **named).to(args[0].dtype)  # integers only on a GPU
        return _ZEROS.get(func, func)(*map(_on_cpu, args), **named)


class _Event:
    def __init__(self, *_: Any, **options: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: 1.0 if name == "elapsed_time" else self

    def __enter__(self) -> _Event:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _patch_torch() -> None:
    properties = types.SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=141 << 30, warp_size=32,
        shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
        regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, L2_cache_size=60 << 20,
        gcnArchName="", is_integrated=False,
    )  # fmt: skip
    answers = {
        "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0,
        "get_device_properties": properties, "get_device_capability": (9, 0), "get_device_name": properties.name,
        "is_bf16_supported": True, "memory_allocated": 0, "max_memory_allocated": 0, "memory_reserved": 0,
        "mem_get_info": (140 << 30, 141 << 30), "is_current_stream_capturing": False,
    }  # fmt: skip
    nothing = (
        "synchronize", "empty_cache", "set_device", "manual_seed", "manual_seed_all", "init", "_lazy_init",
        "reset_peak_memory_stats", "reset_max_memory_allocated", "set_stream", "ipc_collect",
    )  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    for name in nothing:
        setattr(torch.cuda, name, lambda *_, **__: None)
    for name in ("Event", "Stream", "stream", "device", "device_of"):
        setattr(torch.cuda, name, _Event)
    for name in ("current_stream", "default_stream"):
        setattr(torch.cuda, name, lambda *_, **__: _Event())
    torch.version.cuda = "13.0"


@contextlib.contextmanager
def cuda_on_cpu() -> Iterator[None]:
    """Torch on the CPU says that it has an H200, and the null device stands in for it under Triton."""
    import triton.testing

    from forecast_integrations.triton.null_device import null_device

    _patch_torch()
    torch.testing.assert_close = triton.testing.assert_close = lambda *_, **__: None
    triton.testing.nvsmi = lambda names: [1980 for _ in names]
    triton.testing.get_dram_gbps = lambda *_, **__: 4800.0
    triton.testing.get_max_tensorcore_tflops = lambda *_, **__: 990.0
    triton.testing.get_max_simd_tflops = lambda *_, **__: 67.0
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills memory that is made below torch.empty
    # Code that is compiled for a GPU needs one.
    torch.compile = lambda function=None, **_: function or (lambda named: named)
    with null_device() as device, _CudaOnCpu():
        device.get_active_torch_device = lambda: _DEVICE  # type: ignore[attr-defined]
        yield
