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
class Card:
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
_CARDS = {
    # words of a name -> vendor datasheet; of several models that match, the one with most words wins
    "b200": Card(8000, 2250, 1.85, 148, 227 * _KIB, 126 * _MIB),
    "gb200": Card(8000, 2500, 1.85, 148, 227 * _KIB, 126 * _MIB),
    "gh200": Card(4000, 989, 1.755, 132, 227 * _KIB, 50 * _MIB),
    "h200": Card(4800, 989, 1.755, 132, 227 * _KIB, 60 * _MIB),
    "h100": Card(3350, 989, 1.755, 132, 227 * _KIB, 50 * _MIB),
    "h100 pcie": Card(2000, 756, 1.755, 114, 227 * _KIB, 50 * _MIB),
    "h20": Card(4000, 148, 1.83, 78, 227 * _KIB, 60 * _MIB),
    "a100": Card(1555, 312, 1.41, 108, 163 * _KIB, 40 * _MIB, 64),
    "a100-sxm4-80gb": Card(2039, 312, 1.41, 108, 163 * _KIB, 40 * _MIB, 64),
    "a10": Card(600, 125, 1.695, 72, 99 * _KIB, 6 * _MIB),
    "a40": Card(696, 150, 1.74, 84, 99 * _KIB, 6 * _MIB),
    "rtx a4000": Card(448, 77, 1.56, 48, 99 * _KIB, 4 * _MIB),
    "rtx a6000": Card(768, 155, 1.8, 84, 99 * _KIB, 6 * _MIB),
    "l4": Card(300, 121, 2.04, 58, 99 * _KIB, 48 * _MIB),
    "l40": Card(864, 181, 2.49, 142, 99 * _KIB, 96 * _MIB),
    "l40s": Card(864, 362, 2.52, 142, 99 * _KIB, 96 * _MIB),
    "rtx 3090": Card(936, 71, 1.695, 82, 99 * _KIB, 6 * _MIB),
    "rtx 4090": Card(1008, 165, 2.52, 128, 99 * _KIB, 72 * _MIB),
    "rtx 5090": Card(1792, 210, 2.41, 170, 99 * _KIB, 96 * _MIB),
    "v100": Card(900, 125, 1.53, 80, 96 * _KIB, 6 * _MIB, 64),
    "t4": Card(320, 65, 1.59, 40, 64 * _KIB, 4 * _MIB, 64),
    "mi250": Card(1600, 181, 1.7, 104, 64 * _KIB, 8 * _MIB),
    "mi250x": Card(1638, 191, 1.7, 110, 64 * _KIB, 8 * _MIB),
    "mi300x": Card(5300, 1307, 2.1, 304, 64 * _KIB, 256 * _MIB),
}
_MARKED = frozenset(("ti", "super", "laptop", "max", "d"))
"""Words that make another model of the one they stand with."""
_GROUPED = frozenset(("90", "100", "103"))
_UNKNOWN = Card(1500, 300, 1.7, 100, 99 * _KIB, 32 * _MIB)


def card(device: Device) -> Card:
    """The card of a device; facts that the running driver reported replace the datasheet's."""
    model = _model(device.name)
    base = _UNKNOWN if model is None else _CARDS[model]
    return Card(
        base.memory_gb_s,
        base.tensor_tflops,
        base.clock_ghz,
        device.multiprocessors or base.multiprocessors,
        device.shared_memory_bytes or base.shared_memory_bytes,
        device.l2_bytes or base.l2_bytes,
        base.fp32_lanes,
        device.backend == "cuda" and device.arch in _GROUPED,
    )


def known(device: Device) -> bool:
    """Whether the model is in the table; forecasts widen when it is not."""
    return _model(device.name) is not None


@cache
def _model(name: str) -> str | None:
    """The model in the table whose words a device's name holds, whole and in a row: an A4000 is no A40."""
    words = _words(name)
    if _MARKED & set(words):
        return None  # an RTX 3090 Ti, or a laptop's, shares no more than the name
    shown = f" {' '.join(words)} "
    matches = [model for model in _CARDS if f" {' '.join(_words(model))} " in shown]
    return max(matches, key=lambda model: len(_words(model)), default=None)


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower())
