"""What a device can do per second: datasheet figures by model, and a guess for an unknown one.

The cost formula only needs ratios between units, so a datasheet is close enough; the surrogate's
intercept and slope absorb the rest. Figures are dense (no structured sparsity), of the vendors' datasheets:
NVIDIA's of each model ("H200 Tensor Core GPU", "HGX B200", "RTX Blackwell architecture", ...), AMD's product
pages and data sheets ("Instinct MI300X accelerator", "Instinct MI355X GPU", "Radeon RX 7900 XTX", ...; caches
and compute units by the hardware specifications of the ROCm documentation), and Intel's ("Data Center GPU
Max 1550", "Arc B580"). What one multiprocessor holds is in `architectures`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from forecast_autotune.features.devices.architectures import Architecture, architecture_of
from forecast_autotune.records import Device


@dataclass(frozen=True, kw_only=True)
class DeviceSpec(Architecture):
    """Dense datasheet rates of one model, beside what one of its multiprocessors holds."""

    memory_gb_s: float
    tensor_tflops: float
    """fp16/bf16 with fp32 accumulation."""
    clock_ghz: float
    multiprocessors: int
    l2_bytes: int
    backend: str = "cuda"


class _Sheet(NamedTuple):
    """One model's datasheet."""

    backend: str
    arch: str
    memory_gb_s: float
    tensor_tflops: float
    clock_ghz: float
    multiprocessors: int
    l2_mib: int
    memory_gb: int


_SHEETS = {
    # words of a name -> vendor datasheet; of several models that match, the one with most words wins
    "b200": _Sheet("cuda", "100", 8000, 2250, 1.85, 148, 126, 180),
    "gb200": _Sheet("cuda", "100", 8000, 2500, 1.85, 148, 126, 186),
    "gh200": _Sheet("cuda", "90", 4000, 989, 1.755, 132, 50, 96),
    "h200": _Sheet("cuda", "90", 4800, 989, 1.755, 132, 60, 141),
    "h100": _Sheet("cuda", "90", 3350, 989, 1.755, 132, 50, 80),
    "h100 pcie": _Sheet("cuda", "90", 2000, 756, 1.755, 114, 50, 80),
    "h20": _Sheet("cuda", "90", 4000, 148, 1.83, 78, 60, 96),
    "a100": _Sheet("cuda", "80", 1555, 312, 1.41, 108, 40, 40),
    "a100-sxm4-80gb": _Sheet("cuda", "80", 2039, 312, 1.41, 108, 40, 80),
    "a10": _Sheet("cuda", "86", 600, 125, 1.695, 72, 6, 24),
    "a40": _Sheet("cuda", "86", 696, 150, 1.74, 84, 6, 48),
    "rtx a4000": _Sheet("cuda", "86", 448, 77, 1.56, 48, 4, 16),
    "rtx a6000": _Sheet("cuda", "86", 768, 155, 1.8, 84, 6, 48),
    "l4": _Sheet("cuda", "89", 300, 121, 2.04, 58, 48, 24),
    "l40": _Sheet("cuda", "89", 864, 181, 2.49, 142, 96, 48),
    "l40s": _Sheet("cuda", "89", 864, 362, 2.52, 142, 96, 48),
    "rtx 3090": _Sheet("cuda", "86", 936, 71, 1.695, 82, 6, 24),
    "rtx 4090": _Sheet("cuda", "89", 1008, 165, 2.52, 128, 72, 24),
    "rtx 5080": _Sheet("cuda", "120", 960, 113, 2.62, 84, 64, 16),
    "rtx 5090": _Sheet("cuda", "120", 1792, 210, 2.41, 170, 96, 32),
    "v100": _Sheet("cuda", "70", 900, 125, 1.53, 80, 6, 16),
    "t4": _Sheet("cuda", "75", 320, 65, 1.59, 40, 4, 16),
    "mi250": _Sheet("hip", "gfx90a", 1600, 181, 1.7, 104, 8, 64),
    "mi250x": _Sheet("hip", "gfx90a", 1638, 191, 1.7, 110, 8, 64),
    # The cache that programs of all chiplets share: the last one, beyond 4 MiB of L2 on each.
    "mi300a": _Sheet("hip", "gfx942", 5300, 981, 2.1, 228, 256, 128),
    "mi300x": _Sheet("hip", "gfx942", 5300, 1307, 2.1, 304, 256, 192),
    "mi325x": _Sheet("hip", "gfx942", 6000, 1307, 2.1, 304, 256, 256),
    "mi350x": _Sheet("hip", "gfx950", 8000, 2310, 2.2, 256, 256, 288),
    "mi355x": _Sheet("hip", "gfx950", 8000, 2516, 2.4, 256, 256, 288),
    # Radeons count in workgroup processors of two compute units, as HIP's runtime does.
    "rx 7900 xtx": _Sheet("hip", "gfx1100", 960, 123, 2.5, 48, 96, 24),
    "pro w7900": _Sheet("hip", "gfx1100", 864, 123, 2.495, 48, 96, 48),
    "rx 9070 xt": _Sheet("hip", "gfx1201", 645, 195, 2.97, 32, 64, 16),
    "gpu max 1550": _Sheet("xpu", "pvc", 3277, 839, 1.6, 128, 408, 128),
    "arc b580": _Sheet("xpu", "bmg", 456, 117, 2.67, 20, 18, 12),
}
_MODEL_SUFFIXES = frozenset(("ti", "super", "laptop", "max", "d"))
"""Words that make another model of the one they stand with."""
_MEASURED_TARGETS = frozenset((("cuda", "90"),))
"""Targets that the shipped surrogates and their calibration have measurements of; see `is_measured_device`."""
_LARGEST_PARTITION = 0.6
"""Share of the multiprocessors up to which a device counts as a part of its model."""
_UNKNOWN_SHEET = _Sheet("", "", 1500, 300, 1.7, 100, 32, 0)


def device_spec(device: Device) -> DeviceSpec:
    """The card of a device; facts that the running driver reported replace the datasheet's.

    A partition of a device (MIG, or AMD's CPX and DPX modes) has its share of the whole device's rates.
    """
    model = _matching_model(device.name)
    sheet = _UNKNOWN_SHEET if model is None else _SHEETS[model]
    limits = _limits(device, sheet)
    share = _share(device.multiprocessors, sheet) if model is not None else 1.0
    # HIP's runtime counts registers that one program may have, not those that there are.
    registers = device.registers_per_multiprocessor if device.backend == "cuda" else 0
    reported = replace(
        limits,
        shared_memory_bytes=device.shared_memory_bytes or limits.shared_memory_bytes,
        registers=registers or limits.registers,
        threads=device.threads_per_multiprocessor or limits.threads,
    )
    return DeviceSpec(
        **vars(reported),
        memory_gb_s=sheet.memory_gb_s * share,
        tensor_tflops=sheet.tensor_tflops * share,
        clock_ghz=sheet.clock_ghz,
        multiprocessors=device.multiprocessors or sheet.multiprocessors,
        l2_bytes=device.l2_bytes or sheet.l2_mib * 2**20,
        backend=sheet.backend or device.backend,
    )


def partition_name(name: str, multiprocessors: int) -> str:
    """What a device is called whose driver shows a part of it under the whole one's name: AMD's partitions.

    Times of a part must never pass for the whole's, nor the other way round.
    """
    model = _matching_model(name)
    if model is None or _share(multiprocessors, _SHEETS[model]) == 1.0:
        return name
    return f"{name} ({multiprocessors} units)"


def _share(multiprocessors: int, sheet: _Sheet) -> float:
    """The share of a model that so many multiprocessors are, where they are too few for a variant of it."""
    whole = not multiprocessors or multiprocessors > _LARGEST_PARTITION * sheet.multiprocessors
    return 1.0 if whole else multiprocessors / sheet.multiprocessors


def _limits(device: Device, sheet: _Sheet) -> Architecture:
    if device.arch or not sheet.arch:
        return architecture_of(device.backend, device.arch)
    return architecture_of(sheet.backend, sheet.arch)


def is_known_device(device: Device) -> bool:
    """Whether the model is in the table; forecasts widen when it is not."""
    return _matching_model(device.name) is not None


def is_measured_device(device: Device) -> bool:
    """Whether what is shipped was fitted to, and checked against, measurements of such a device.

    A datasheet alone makes a formula, not a forecast whose risk was ever seen to come true: on other devices
    all that the formula says is taken for less sure, so that more candidates are measured first.
    """
    model = _matching_model(device.name)
    if device.arch:
        return (device.backend, device.arch) in _MEASURED_TARGETS
    return model is not None and _SHEETS[model][:2] in _MEASURED_TARGETS


def datasheet_device(model: str) -> Device:
    """The record of a device that is not there, by the words of its model's name (`mi300x`, `rtx 5090`).

    Raises `KeyError`, naming those that there are, for a model without a datasheet here.
    """
    found = _matching_model(model)
    if found is None:
        raise KeyError(f"no datasheet of {model!r}: there are {', '.join(sorted(_SHEETS))}")
    sheet = _SHEETS[found]
    limits = architecture_of(sheet.backend, sheet.arch)
    return Device(
        found.upper(),
        sheet.backend,
        sheet.arch,
        sheet.multiprocessors,
        limits.shared_memory_bytes,
        limits.registers,
        limits.threads,
        sheet.l2_mib * 2**20,
        sheet.memory_gb * 10**9,
        limits.warp_size,
    )


@cache
def _matching_model(name: str) -> str | None:
    """The model in the table whose words a device's name holds, whole and in a row: an A4000 is no A40."""
    words = _words(name)
    shown = f" {' '.join(words)} "
    matches = [model for model in _SHEETS if f" {' '.join(_words(model))} " in shown]
    found = max(matches, key=lambda model: len(_words(model)), default=None)
    if found is not None and _MODEL_SUFFIXES & (set(words) - set(_words(found))):
        return None  # an RTX 3090 Ti, or a laptop's, shares no more than the name
    return found


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower())
