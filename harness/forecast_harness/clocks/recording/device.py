"""A device that is not there: Triton compiles for it, and launches on it are recorded."""

from __future__ import annotations

import os
import re
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from triton.backends.compiler import GPUTarget

_PARAMETER = re.compile(r"\.param\s+\.")
_SCRATCH_ARGUMENTS = 9
"""Arguments of Triton's launcher before the kernel's own: grid, stream, function, metadata, hooks."""


class RecordedLaunch(NamedTuple):
    """One launch as Triton asks its launcher for it."""

    compiled: Any
    """The result of Triton's compiler: `asm`, `metadata`."""
    parameters: tuple[str, ...]
    """Types of the kernel's own parameters, constants left out."""
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]
    """Values for `parameters`."""


class UnsupportedLaunch(Exception):
    """A launch that the runner cannot repeat; the text says why."""


class AbsentDevice:
    """Stands in for `triton.runtime.driver.active`, as far as compiling asks for it."""

    launcher_cls: Callable[..., Any]

    def __init__(self, arch: int) -> None:
        self.target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        """The target that kernels are compiled for."""
        return self.target

    def get_current_device(self) -> int:
        """The first device, always."""
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        """The default stream."""
        return 0


class RecordingDevice(AbsentDevice):
    """A device that records every launch in `launches`."""

    def __init__(self) -> None:
        self.launcher_cls = self._launcher
        self.launches: list[RecordedLaunch] = []
        self.options: dict[str, int] = {}
        """Triton's options of every launch, over those that it is given."""
        self.configure(90, {})

    def configure(self, arch: int, data: Mapping[str, Any]) -> None:
        """Become another device: `data` has `name` and `properties` as Triton asks for them, all optional."""
        self.target = GPUTarget("cuda", arch, 32)
        self.utils = _RecordingUtils(data.get("properties", {}))
        properties = self.utils.get_device_properties(0)
        self.torch_properties = types.SimpleNamespace(
            multi_processor_count=properties["multiprocessor_count"],
            name=data.get("name", ""),
            major=arch // 10,
            minor=arch % 10,
            total_memory=int(data.get("memory_bytes", 80 << 30)),
            L2_cache_size=int(data.get("l2_bytes", 50 << 20)),
            shared_memory_per_block_optin=properties["max_shared_mem"],
            warp_size=32,
        )

    def get_active_torch_device(self) -> Any:
        """The device on which solutions allocate."""
        import torch

        return torch.device("cuda", 0)

    def _launcher(self, source: Any, metadata: Any) -> Callable[..., None]:
        def launch(x: int, y: int, z: int, *rest: Any) -> None:
            values = rest[_SCRATCH_ARGUMENTS - 3 :]
            types, arguments = _flat_arguments(list(source.signature.values()), list(values))
            grid = (int(x), int(y), int(z))
            self.launches.append(RecordedLaunch((source, metadata), tuple(types), grid, tuple(arguments)))

        return launch


class _RecordingUtils:
    def __init__(self, facts: Mapping[str, int]) -> None:
        self._facts = {
            "max_shared_mem": 232448,
            "multiprocessor_count": 132,
            "max_num_regs": 65536,
            "warpSize": 32,
            "sm_clock_rate": 1980000,
            "mem_clock_rate": 3201000,
            "mem_bus_width": 6144,
            **facts,
        }

    def get_device_properties(self, device: int) -> dict[str, int]:
        return self._facts

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        return None, 1, 64, 0, 1024

    def unload_module(self, module: Any) -> None:
        return None


def _flat_arguments(types: list[Any], values: list[Any]) -> tuple[list[str], list[Any]]:
    """Types and values in the order of the machine code's parameters. Raises `UnsupportedLaunch`."""
    if len(types) != len(values):
        raise UnsupportedLaunch(f"{len(values)} arguments for {len(types)} parameters")
    result: tuple[list[str], list[Any]] = ([], [])
    for kind, value in zip(types, values, strict=True):
        if isinstance(kind, tuple | list):
            inner = _flat_arguments(list(kind), list(value))
            result[0].extend(inner[0])
            result[1].extend(inner[1])
        elif kind != "constexpr":
            if not isinstance(kind, str) or kind.startswith(("tensordesc", "nvTmaDesc")):
                raise UnsupportedLaunch(f"an argument of type {kind!r:.60} is built by the host")
            result[0].append(kind.split("(")[0])
            result[1].append(value)
    return result


def ptx_parameters(text: str, kernel: str) -> int:
    """The number of a kernel's parameters in PTX; -1 where the text has no such kernel."""
    _, result, rest = text.partition(f".entry {kernel}(")
    return len(_PARAMETER.findall(rest.partition(")")[0])) if result else -1


_ASSEMBLY: dict[str, tuple[bytes, str]] = {}
"""Machine code and PTX by the compiler's hash of a kernel."""
_INSTALLED: list[RecordingDevice] = []


def assembly_of(metadata: Any) -> tuple[bytes, str]:
    """Machine code and PTX of a kernel that was compiled in this process."""
    return _ASSEMBLY[metadata.hash]


def install_device(arch: int, data: Mapping[str, Any]) -> RecordingDevice:
    """Make a recording device the one that Triton and torch see, once in a process; see `configure`."""
    if not _INSTALLED:
        _INSTALLED.append(RecordingDevice())
        _replace_driver(_INSTALLED[0])
    _INSTALLED[0].configure(arch, data)
    return _INSTALLED[0]


def _replace_driver(device: RecordingDevice) -> None:
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    import torch
    from torch._subclasses import fake_tensor
    from triton.compiler.compiler import CompiledKernel as TritonKernel
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(device)
    first_init, run = TritonKernel.__init__, JITFunction.run

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        first_init(self, *args, **kwargs)
        _ASSEMBLY[self.metadata.hash] = (self.asm["cubin"], self.asm["ptx"])

    def run_with_options(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=warmup, **{**kwargs, **device.options})

    def run_first(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = self.configs[0]
        arguments = {**dict(zip(self.arg_names, args, strict=False)), **kwargs, **config.all_kwargs()}
        if config.pre_hook is not None:
            config.pre_hook(arguments)
        return self.fn.run(*args, **kwargs, **config.all_kwargs())

    TritonKernel.__init__ = init
    JITFunction.run = run_with_options
    Autotuner.run = run_first
    fakes: Any = fake_tensor
    fakes.init_gpu_context = lambda *_: None
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.current_device = lambda: 0
    cuda.device_count = lambda: 1
    cuda.get_device_properties = lambda *_: device.torch_properties
    cuda.get_device_capability = lambda *_: (device.torch_properties.major, device.torch_properties.minor)
    cuda.get_device_name = lambda *_: device.torch_properties.name
