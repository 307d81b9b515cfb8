"""What a device can do per second: datasheet figures by model, and a guess for an unknown one.

The cost formula only needs ratios between units, so a datasheet is close enough; the surrogate's
intercept and slope absorb the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

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


_KIB, _MIB = 1024, 1024 * 1024
_CARDS = {
    # name fragment -> vendor datasheet; the longest fragment that matches wins
    "b200": Card(8000, 2250, 1.85, 148, 227 * _KIB, 126 * _MIB),
    "gb200": Card(8000, 2500, 1.85, 148, 227 * _KIB, 126 * _MIB),
    "h200": Card(4800, 989, 1.755, 132, 227 * _KIB, 60 * _MIB),
    "h100": Card(3350, 989, 1.755, 132, 227 * _KIB, 50 * _MIB),
    "h100 pcie": Card(2000, 756, 1.755, 114, 227 * _KIB, 50 * _MIB),
    "h20": Card(4000, 148, 1.83, 78, 227 * _KIB, 60 * _MIB),
    "a100": Card(1555, 312, 1.41, 108, 163 * _KIB, 40 * _MIB, 64),
    "a100-sxm4-80gb": Card(2039, 312, 1.41, 108, 163 * _KIB, 40 * _MIB, 64),
    "a10": Card(600, 125, 1.695, 72, 99 * _KIB, 6 * _MIB),
    "a40": Card(696, 150, 1.74, 84, 99 * _KIB, 6 * _MIB),
    "l4": Card(300, 121, 2.04, 58, 99 * _KIB, 48 * _MIB),
    "l40": Card(864, 181, 2.49, 142, 99 * _KIB, 96 * _MIB),
    "rtx 3090": Card(936, 71, 1.695, 82, 99 * _KIB, 6 * _MIB),
    "rtx 4090": Card(1008, 165, 2.52, 128, 99 * _KIB, 72 * _MIB),
    "rtx 5090": Card(1792, 210, 2.41, 170, 99 * _KIB, 96 * _MIB),
    "v100": Card(900, 125, 1.53, 80, 96 * _KIB, 6 * _MIB, 64),
    "t4": Card(320, 65, 1.59, 40, 64 * _KIB, 4 * _MIB, 64),
    "mi250": Card(1600, 181, 1.7, 104, 64 * _KIB, 8 * _MIB),
    "mi300": Card(5300, 1307, 2.1, 304, 64 * _KIB, 256 * _MIB),
}
_UNKNOWN = Card(1500, 300, 1.7, 100, 99 * _KIB, 32 * _MIB)


def card(device: Device) -> Card:
    """The card of a device; facts that the running driver reported replace the datasheet's."""
    name = device.name.lower()
    matches = [fragment for fragment in _CARDS if fragment in name]
    base = _CARDS[max(matches, key=len)] if matches else _UNKNOWN
    return Card(
        base.memory_gb_s,
        base.tensor_tflops,
        base.clock_ghz,
        device.multiprocessors or base.multiprocessors,
        device.shared_memory_bytes or base.shared_memory_bytes,
        device.l2_bytes or base.l2_bytes,
        base.fp32_lanes,
    )


def known(device: Device) -> bool:
    """Whether the model is in the table; forecasts widen when it is not."""
    name = device.name.lower()
    return any(fragment in name for fragment in _CARDS)
