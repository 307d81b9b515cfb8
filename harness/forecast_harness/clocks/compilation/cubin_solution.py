"""A compiled CUDA kernel as a solution of its pack: a module of ours around machine code.

Verification and confirmation launch solutions in sandboxed cells, on torch's tensors and its current stream. They
get this module of a CUDA source, whose only code that runs there is on the device.
"""

from __future__ import annotations

import base64
import ctypes
import json
import struct
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from forecast_harness.clocks.compilation.nvcc import CompiledSource
from forecast_harness.clocks.records import SCALAR_FORMATS
from forecast_harness.targets.cuda.source import KernelSignature, LaunchSizes, SourceLaunch
from forecast_harness.targets.packs.schema import Language, Solution

if TYPE_CHECKING:
    import torch

_LIBRARY = "libcuda.so.1"
_MOST_DYNAMIC_SHARED = 8
_PLAIN_SHARED_BYTES = 48 << 10
_TEMPLATE = '''"""Launches machine code that nvcc has made of a CUDA source."""

from forecast_harness.clocks.compilation.cubin_solution import CubinLauncher

_LAUNCHER = CubinLauncher({facts!r}, {image!r})


def run(**arguments):
    _LAUNCHER.launch(arguments)
'''


def host_solution(
    name: str, compiled: CompiledSource, signature: KernelSignature, config: Mapping[str, int]
) -> Solution:
    """The solution that launches a source in one config. Raises `RecordError` for machine code too large to be sent."""
    launch = compiled.launch
    facts = {
        "signature": signature.to_json(),
        "grid": list(launch.grid),
        "block": list(launch.block),
        "shared_bytes": launch.shared_bytes,
        "macros": launch.with_defaults(config),
    }
    image = base64.b85encode(zlib.compress(compiled.image, 9)).decode()
    text = _TEMPLATE.format(facts=json.dumps(facts), image=image)
    return Solution(name, Language.CUDA, text)


class LaunchFailed(RuntimeError):
    """The driver refused the code or a launch."""


class CubinLauncher:
    """One kernel, loaded at once, as nothing may be loaded while launches are recorded or timed."""

    def __init__(self, facts: str, image: str) -> None:
        """`facts`: JSON, as `host_solution` writes it; `image`: the cubin, packed. Raises `LaunchFailed`, `OSError`."""
        data = json.loads(facts)
        self._signature = KernelSignature.from_json(data["signature"])
        self._macros: dict[str, int] = data["macros"]
        macros = {name: (value,) for name, value in self._macros.items()}
        self._launch = SourceLaunch(tuple(data["grid"]), tuple(data["block"]), data["shared_bytes"], macros)
        self._most_shared_bytes = _PLAIN_SHARED_BYTES
        self._calls: dict[tuple[Any, ...], tuple[LaunchSizes, list[Any]]] = {}
        self._driver: Any = ctypes.CDLL(_LIBRARY)
        import torch  # the host of lanes does without it

        self._current_stream = torch.cuda.current_stream
        self._current_stream().synchronize()  # torch's context is this thread's from here on
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        code = zlib.decompress(base64.b85decode(image))
        self._ask("cuModuleLoadData", ctypes.byref(module), code)
        name = self._signature.entry.encode()
        self._ask("cuModuleGetFunction", ctypes.byref(self._function), module, name)

    def launch(self, arguments: Mapping[str, torch.Tensor]) -> None:
        """Queue one launch on these tensors, by name. Raises `LaunchFailed`."""
        sizes, parameters = self._call({n: arguments[n].shape for n in self._signature.tensors})
        for number, parameter in enumerate(self._signature.parameters):
            if not parameter.is_number:
                parameters[number].value = arguments[parameter.name].data_ptr()
        pointers = (ctypes.c_void_p * len(parameters))(*(ctypes.addressof(g) for g in parameters))
        stream = ctypes.c_void_p(self._current_stream().cuda_stream)
        numbers = (ctypes.c_uint(n) for n in (*sizes.grid, *sizes.block, sizes.shared_bytes))
        self._ask("cuLaunchKernel", self._function, *numbers, stream, pointers, None)

    def _call(self, shapes: Mapping[str, Any]) -> tuple[LaunchSizes, list[Any]]:
        """Sizes of the launch and its parameters' memory, computed once for each set of shapes."""
        key = tuple(tuple(s) for s in shapes.values())
        if key not in self._calls:
            axes = self._signature.axes_of(shapes)
            sizes = self._launch.sizes(axes, self._macros)
            if sizes.shared_bytes > self._most_shared_bytes:
                limit = ctypes.c_int(sizes.shared_bytes)
                self._ask("cuFuncSetAttribute", self._function, ctypes.c_int(_MOST_DYNAMIC_SHARED), limit)
                self._most_shared_bytes = sizes.shared_bytes
            self._calls[key] = sizes, [self._memory(p.kind, p, axes) for p in self._signature.parameters]
        return self._calls[key]

    def _memory(self, kind: str, parameter: Any, axes: Mapping[str, int]) -> Any:
        if not parameter.is_number:
            return ctypes.c_uint64()
        data = struct.pack(f"<{SCALAR_FORMATS[kind]}", parameter.number(axes))
        return (ctypes.c_char * 8).from_buffer_copy(data.ljust(8, b"\0"))

    def _ask(self, name: str, *arguments: Any) -> None:
        if code := int(getattr(self._driver, name)(*arguments)):
            raise LaunchFailed(f"{name} failed with error {code} of the driver")
