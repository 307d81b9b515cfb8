"""A device that is not there: Triton compiles for it, and what is launched on it is written down."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from triton.backends.compiler import GPUTarget

_PARAMETER = re.compile(r"\.param\s+\.")
_SCRATCH_ARGUMENTS = 9
"""Of Triton's launcher, before the kernel's own arguments: grid, stream, function, metadata, hooks."""


class RecordedLaunch(NamedTuple):
    """One launch as Triton's launcher was asked for it."""

    compiled: Any
    """What Triton's compiler returned: `asm`, `metadata`."""
    parameters: tuple[str, ...]
    """Types of the kernel's own parameters, constants left out."""
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]
    """Values for `parameters`."""


class UnsupportedLaunch(Exception):
    """A launch that the runner cannot repeat; the text says why."""


class RecordingDevice:
    """Stands in for `triton.runtime.driver.active`; `launches` grows with every launch."""

    def __init__(self, arch: int, facts: Mapping[str, int]) -> None:
        """`facts`: what Triton asks of a device, such as `max_shared_mem` and `multiprocessor_count`."""
        self.target = GPUTarget("cuda", arch, 32)
        self.utils = _RecordingUtils(facts)
        self.launcher_cls = self._launcher
        self.launches: list[RecordedLaunch] = []

    def get_current_target(self) -> GPUTarget:
        """What kernels are compiled for."""
        return self.target

    def get_current_device(self) -> int:
        """Always the first."""
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        """The default stream."""
        return 0

    def get_active_torch_device(self) -> Any:
        """Where solutions are told to allocate."""
        import torch

        return torch.device("cuda", 0)

    def _launcher(self, source: Any, metadata: Any) -> Callable[..., None]:
        def launch(x: int, y: int, z: int, *rest: Any) -> None:
            values = rest[_SCRATCH_ARGUMENTS - 3 :]
            types, given = _flat_arguments(list(source.signature.values()), list(values))
            grid = (int(x), int(y), int(z))
            self.launches.append(RecordedLaunch((source, metadata), tuple(types), grid, tuple(given)))

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
    found: tuple[list[str], list[Any]] = ([], [])
    for kind, value in zip(types, values, strict=True):
        if isinstance(kind, tuple | list):
            inner = _flat_arguments(list(kind), list(value))
            found[0].extend(inner[0])
            found[1].extend(inner[1])
        elif kind != "constexpr":
            if not isinstance(kind, str) or kind.startswith(("tensordesc", "nvTmaDesc")):
                raise UnsupportedLaunch(f"an argument of type {kind!r:.60} is built by the host")
            found[0].append(kind.split("(")[0])
            found[1].append(value)
    return found


def ptx_parameters(text: str, kernel: str) -> int:
    """How many parameters a kernel has in PTX; -1 where the text has no such kernel."""
    _, found, rest = text.partition(f".entry {kernel}(")
    return len(_PARAMETER.findall(rest.partition(")")[0])) if found else -1
