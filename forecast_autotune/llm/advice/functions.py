"""Functions that a cost function may call: arithmetic, and three facts of hardware that every author needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from forecast_autotune.features.devices import DeviceSpec

Value = Any
"""A number, an array [n], a text, or an array [n] of texts."""
_REGISTERS_PER_MULTIPROCESSOR = 65536.0
_THREADS_PER_MULTIPROCESSOR = 2048.0
_PROGRAMS_PER_MULTIPROCESSOR = 32.0
_REGISTERS_PER_THREAD = 255.0


def ceil_div(a: Value, b: Value) -> Value:
    """The quotient, rounded up."""
    return np.ceil(np.asarray(a, float) / b)


def next_power_of_2(a: Value) -> Value:
    """The least power of two that is not smaller; 1 for anything below."""
    return np.exp2(np.ceil(np.log2(np.maximum(a, 1.0))))


def smooth_max(*values: Value) -> Value:
    """Little more than the largest: times of units that mostly overlap. The norm of order 4."""
    top = np.maximum.reduce(np.broadcast_arrays(*values))
    safe = np.where(top > 0, top, 1.0)
    total = sum((np.maximum(v, 0.0) / safe) ** 4 for v in values)
    return np.where(top > 0, top * total**0.25, top)


def select(condition: Value, then: Value, otherwise: Value) -> Value:
    """`then` where the condition holds, else `otherwise`."""
    return np.where(truth(condition), then, otherwise)


def truth(value: Value) -> npt.NDArray[np.bool_]:
    """Whether a value counts as true, element by element."""
    return np.asarray(np.asarray(value) != 0)


def _fold(operation: Any) -> Callable[..., Value]:
    def call(*values: Value) -> Value:
        if not values:
            raise ValueError("min and max need an argument")
        result = values[0]
        for value in values[1:]:
            result = operation(result, value)
        return result

    return call


PURE: dict[str, Callable[..., Value]] = {
    "min": _fold(np.minimum),
    "max": _fold(np.maximum),
    "abs": np.abs,
    "ceil": np.ceil,
    "floor": np.floor,
    "round": np.round,
    "int": np.trunc,
    "float": lambda value: np.asarray(value, float),
    "log2": lambda value: np.log2(np.maximum(value, 1e-300)),
    "log": lambda value: np.log(np.maximum(value, 1e-300)),
    "exp2": lambda value: np.exp2(np.minimum(value, 1000.0)),
    "exp": lambda value: np.exp(np.minimum(value, 700.0)),
    "sqrt": lambda value: np.sqrt(np.maximum(value, 0.0)),
    "ceil_div": ceil_div,
    "cdiv": ceil_div,
    "next_power_of_2": next_power_of_2,
    "smooth_max": smooth_max,
    "where": select,
}
"""Functions of their arguments alone, by name. `math.log2` and the like are the same."""


def resident_programs(device: DeviceSpec, threads: Value, registers: Value, shared_bytes: Value) -> Value:
    """Programs that fit on one multiprocessor at once, at least 1.

    `threads` of a program, `registers` of a thread (as if it had as many as it needs: more than 255 spill),
    `shared_bytes` of a program.
    """
    threads = np.maximum(threads, 32.0)
    per_thread = np.ceil(np.clip(registers, 16.0, _REGISTERS_PER_THREAD) / 8.0) * 8.0
    by_registers = np.floor(_REGISTERS_PER_MULTIPROCESSOR / (per_thread * threads))
    by_threads = np.floor(_THREADS_PER_MULTIPROCESSOR / threads)
    by_memory = np.floor((device.shared_memory_bytes + 1024.0) / (np.maximum(shared_bytes, 0.0) + 1024.0))
    fits = np.minimum(np.minimum(by_registers, by_threads), by_memory)
    return np.clip(fits, 1.0, _PROGRAMS_PER_MULTIPROCESSOR)


def waves(device: DeviceSpec, programs: Value, resident: Value) -> Value:
    """Rounds that the device needs for so many programs, `resident` of them per multiprocessor: a whole number."""
    return np.maximum(np.ceil(programs / (device.multiprocessors * np.maximum(resident, 1.0))), 1.0)


def spilled_registers(registers: Value) -> Value:
    """Registers of a thread that lie in local memory: those beyond 255."""
    return np.maximum(registers - _REGISTERS_PER_THREAD, 0.0)


OF_DEVICE: dict[str, Callable[..., Value]] = {"resident_programs": resident_programs, "waves": waves}
"""Functions that also depend on the device; a cost function calls them without it."""
PURE["spilled_registers"] = spilled_registers
