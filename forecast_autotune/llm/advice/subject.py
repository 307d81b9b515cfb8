"""The view of n candidates that a cost function has: config, arguments, launch and device, as numbers and texts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from forecast_autotune.errors import RecordError
from forecast_autotune.features.argument_sizes import element_bytes
from forecast_autotune.features.devices import DeviceSpec, device_spec
from forecast_autotune.llm.advice.functions import Value
from forecast_autotune.records import LAUNCH_OPTIONS, Argument, Candidate, Config, Problem

DEVICE_ATTRIBUTES = (
    "sms",
    "clock_ghz",
    "memory_gb_s",
    "l2_bytes",
    "tensor_tflops",
    "shared_memory_bytes",
    "fp32_lanes",
)
TENSOR_ATTRIBUTES = ("shape", "stride", "numel", "bytes", "itemsize", "dtype", "aligned", "ndim")


class AdviceError(RecordError):
    """A cost function that cannot be read, or not evaluated here; the message names the rule."""


@dataclass(frozen=True)
class AdviceSubject:
    """See the module. Columns are arrays [n]; a common value of all candidates is a number or a text."""

    config: Mapping[str, Value]
    arguments: Mapping[str, Argument]
    grid: tuple[Value, ...]
    """Extents of the launch grid, three; empty where some candidate's is not known."""
    device: DeviceSpec
    size: int

    @classmethod
    def of(
        cls,
        problem: Problem,
        candidates: Sequence[Candidate],
        grids: Mapping[Candidate, tuple[int, ...]],
    ) -> AdviceSubject:
        """The subject of a problem's candidates."""
        configs = [c.config for c in candidates]
        launch_grids = [grids.get(c) or problem.grid for c in candidates]
        grid: tuple[Value, ...] = ()
        if launch_grids and all(launch_grids):
            whole = [(*(g or ()), 1, 1, 1)[:3] for g in launch_grids]
            grid = tuple(np.array([g[axis] for g in whole], dtype=float) for axis in range(3))
        arguments = {a.name: a for a in problem.arguments}
        return cls(_columns(configs), arguments, grid, device_spec(problem.device), len(configs))

    def repeated(self, times: int) -> AdviceSubject:
        """The same candidates, so many times over."""

        def tile(value: Value) -> Value:
            return np.tile(value, times) if isinstance(value, np.ndarray) else value

        config = {name: tile(value) for name, value in self.config.items()}
        return AdviceSubject(
            config, self.arguments, tuple(map(tile, self.grid)), self.device, self.size * times
        )

    def lookup(self, path: tuple[str | int, ...]) -> Value:
        """The value at a path such as ("args", "x", "shape", 0). Raises `AdviceError` if there is none."""
        root, *parts = path
        if root == "config" and len(parts) == 1:
            return self._config(str(parts[0]))
        if root == "args" and parts:
            return self._argument(str(parts[0]), parts[1:])
        if root == "device" and len(parts) == 1:
            return self._device(str(parts[0]))
        if root == "launch":
            return self._launch(parts)
        raise AdviceError(f"advice cannot read {_shown(path)}: it may read config, args, device and launch")

    def _config(self, name: str) -> Value:
        if name in self.config:
            return self.config[name]
        argument = self.arguments.get(name)
        if argument is not None and argument.kind != "tensor":
            return _scalar(argument)
        raise AdviceError(f"no candidate has config.{name}; there are {', '.join(self.config)}")

    def _argument(self, name: str, rest: Sequence[str | int]) -> Value:
        argument = self.arguments.get(name)
        if argument is None:
            if name in self.config and not rest:
                return self.config[name]
            raise AdviceError(f"the call has no argument {name}; it has {', '.join(self.arguments)}")
        if argument.kind != "tensor":
            if rest == ["dtype"] or rest == ["itemsize"]:
                return argument.dtype if rest == ["dtype"] else element_bytes(argument.dtype)
            if rest:
                raise AdviceError(f"args.{name} is no tensor: it has no {rest[0]}")
            return _scalar(argument)
        return _of_tensor(argument, rest)

    def _device(self, name: str) -> float:
        names = {"sms": "multiprocessors"}
        if name not in DEVICE_ATTRIBUTES:
            raise AdviceError(f"there is no device.{name}; there are {', '.join(DEVICE_ATTRIBUTES)}")
        return float(getattr(self.device, names.get(name, name)))

    def _launch(self, rest: Sequence[str | int]) -> Value:
        if not self.grid:
            raise AdviceError("the launch grid is not known here")
        if rest == ["programs"]:
            return self.grid[0] * self.grid[1] * self.grid[2]
        if len(rest) == 2 and rest[0] == "grid" and rest[1] in (0, 1, 2):
            return self.grid[int(rest[1])]
        raise AdviceError("launch has `programs` and `grid[0]` to `grid[2]`")


def _columns(configs: Sequence[Config]) -> dict[str, Value]:
    names = dict.fromkeys(name for c in configs for name, _ in c.kwargs)
    rows = [dict(c.kwargs) for c in configs]
    results: dict[str, Value] = {}
    for name in names:
        values = [row.get(name) for row in rows]
        if any(isinstance(v, str) for v in values):
            results[name] = np.array([str(v) for v in values], dtype=object)
        elif all(name in row for row in rows):
            results[name] = np.array([float(v or 0) for v in values])
    for option in LAUNCH_OPTIONS:
        results[option] = np.array([float(getattr(c, option) or 0) for c in configs])
    return results


def _scalar(argument: Argument) -> Value:
    value = argument.value
    if isinstance(value, str):
        return value
    return float(value or 0)


def _of_tensor(argument: Argument, rest: Sequence[str | int]) -> Value:
    shape, name = argument.shape, argument.name
    if len(rest) == 2 and rest[0] in ("shape", "stride") and isinstance(rest[1], int):
        extents = shape if rest[0] == "shape" else argument.stride
        if not -len(extents) <= rest[1] < len(extents):
            raise AdviceError(f"args.{name} has {len(extents)} dimensions, not {rest[0]}[{rest[1]}]")
        return float(extents[rest[1]])
    size = element_bytes(argument.dtype)
    attributes: dict[str, Value] = {
        "numel": float(math.prod(shape)),
        "bytes": float(math.prod(shape)) * size,
        "itemsize": size,
        "dtype": argument.dtype,
        "aligned": float(argument.aligned),
        "ndim": float(len(shape)),
    }
    if len(rest) == 1 and rest[0] in attributes:
        return attributes[str(rest[0])]
    raise AdviceError(f"args.{name} is a tensor: it has {', '.join(TENSOR_ATTRIBUTES)}")


def _shown(path: Sequence[str | int]) -> str:
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).lstrip(".")
