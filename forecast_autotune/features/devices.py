"""What a device can do per second: datasheet figures by model, and a guess for an unknown one.

The cost formula only needs ratios between units, so a datasheet is close enough; the surrogate's
intercept and slope absorb the rest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from forecast_autotune.records import Device


@dataclass(frozen=True)
class DeviceSpec:
    """Dense datasheet rates of one model."""

    memory_gb_s: float
    tensor_tflops: float
    """fp16/bf16 with fp32 accumulation."""
    clock_ghz: float
    multiprocessors: int
    shared_memory_bytes: int
    l2_bytes: int
    fp32_lanes: int = 128
    """fp32 multiply-adds per multiprocessor and cycle."""
    warp_groups: bool = False
    """Four warps together issue a product that reads shared memory (NVIDIA, compute capability 9, 10)."""


_KIB, _MIB = 1024, 1024 * 1024
_SPECS = {
    # words of a name -> vendor datasheet; of several models that match, the one with most words wins
    "b200": DeviceSpec(8000, 2250, 1.85, 148, 227 * _KIB, 126 * _MIB),
    "gb200": DeviceSpec(8000, 2500, 1.85, 148, 227 * _KIB, 126 * _MIB),
    "gh200": DeviceSpec(4000, 989, 1.755, 132, 227 * _KIB, 50 * _MIB),
    "h200": DeviceSpec(4800, 989, 1.755, 132, 227 * _KIB, 60 * _MIB),
    "h100": DeviceSpec(3350, 989, 1.755, 132, 227 * _KIB, 50 * _MIB),
    "h100 pcie": DeviceSpec(2000, 756, 1.755, 114, 227 * _KIB, 50 * _MIB),
    "h20": DeviceSpec(4000, 148, 1.83, 78, 227 * _KIB, 60 * _MIB),
    "a100": DeviceSpec(1555, 312, 1.41, 108, 163 * _KIB, 40 * _MIB, 64),
    "a100-sxm4-80gb": DeviceSpec(2039, 312, 1.41, 108, 163 * _KIB, 40 * _MIB, 64),
    "a10": DeviceSpec(600, 125, 1.695, 72, 99 * _KIB, 6 * _MIB),
    "a40": DeviceSpec(696, 150, 1.74, 84, 99 * _KIB, 6 * _MIB),
    "rtx a4000": DeviceSpec(448, 77, 1.56, 48, 99 * _KIB, 4 * _MIB),
    "rtx a6000": DeviceSpec(768, 155, 1.8, 84, 99 * _KIB, 6 * _MIB),
    "l4": DeviceSpec(300, 121, 2.04, 58, 99 * _KIB, 48 * _MIB),
    "l40": DeviceSpec(864, 181, 2.49, 142, 99 * _KIB, 96 * _MIB),
    "l40s": DeviceSpec(864, 362, 2.52, 142, 99 * _KIB, 96 * _MIB),
    "rtx 3090": DeviceSpec(936, 71, 1.695, 82, 99 * _KIB, 6 * _MIB),
    "rtx 4090": DeviceSpec(1008, 165, 2.52, 128, 99 * _KIB, 72 * _MIB),
    "rtx 5090": DeviceSpec(1792, 210, 2.41, 170, 99 * _KIB, 96 * _MIB),
    "v100": DeviceSpec(900, 125, 1.53, 80, 96 * _KIB, 6 * _MIB, 64),
    "t4": DeviceSpec(320, 65, 1.59, 40, 64 * _KIB, 4 * _MIB, 64),
    "mi250": DeviceSpec(1600, 181, 1.7, 104, 64 * _KIB, 8 * _MIB),
    "mi250x": DeviceSpec(1638, 191, 1.7, 110, 64 * _KIB, 8 * _MIB),
    "mi300x": DeviceSpec(5300, 1307, 2.1, 304, 64 * _KIB, 256 * _MIB),
}
_MODEL_SUFFIXES = frozenset(("ti", "super", "laptop", "max", "d"))
"""Words that make another model of the one they stand with."""
_WARP_GROUP_ARCHS = frozenset(("90", "100", "103"))
_UNKNOWN_DEVICE_SPEC = DeviceSpec(1500, 300, 1.7, 100, 99 * _KIB, 32 * _MIB)


def device_spec(device: Device) -> DeviceSpec:
    """The card of a device; facts that the running driver reported replace the datasheet's."""
    model = _matching_model(device.name)
    base = _UNKNOWN_DEVICE_SPEC if model is None else _SPECS[model]
    return DeviceSpec(
        base.memory_gb_s,
        base.tensor_tflops,
        base.clock_ghz,
        device.multiprocessors or base.multiprocessors,
        device.shared_memory_bytes or base.shared_memory_bytes,
        device.l2_bytes or base.l2_bytes,
        base.fp32_lanes,
        device.backend == "cuda" and device.arch in _WARP_GROUP_ARCHS,
    )


def is_known_device(device: Device) -> bool:
    """Whether the model is in the table; forecasts widen when it is not."""
    return _matching_model(device.name) is not None


@cache
def _matching_model(name: str) -> str | None:
    """The model in the table whose words a device's name holds, whole and in a row: an A4000 is no A40."""
    words = _words(name)
    if _MODEL_SUFFIXES & set(words):
        return None  # an RTX 3090 Ti, or a laptop's, shares no more than the name
    shown = f" {' '.join(words)} "
    matches = [model for model in _SPECS if f" {' '.join(_words(model))} " in shown]
    return max(matches, key=lambda model: len(_words(model)), default=None)


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower())
