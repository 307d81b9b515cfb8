"""Facts of accelerators that are known before any measurement on them, in one place.

An `Architecture` has the resources of one multiprocessor, and a `DeviceSpec` also the rates of a model.

Limits are by backend and Triton's name for the target:

- `cuda`: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" and "Throughput of
  Native Arithmetic Instructions"; tensor memory: PTX ISA, "Tensor Memory" (512 columns of 128 lanes of 4 bytes).
- `hip`: AMD GPU hardware specifications (ROCm documentation: register file, LDS, wavefront size), and the ISA
  guides of CDNA3, CDNA4, RDNA3 and RDNA4 (512 registers of a lane on CDNA, accumulation registers included;
  256 addressable ones on RDNA; 8 waves a SIMD on CDNA3, 16 on RDNA3).
- `xpu`: Intel oneAPI GPU Optimization Guide, "Small register mode vs. large register mode" and the table of
  Xe core properties (8 vector engines of 8 threads of 128 registers of 64 bytes; with 256 registers half as
  many threads).

Rates are by model. The cost formula needs ratios between units alone, so a datasheet is close enough; the
surrogate absorbs the rest. Figures are dense (no structured sparsity), of the vendors' datasheets: NVIDIA's of
each model ("H200 Tensor Core GPU", "HGX B200", "RTX Blackwell architecture", ...), AMD's product pages and data
sheets ("Instinct MI300X accelerator", "Instinct MI355X GPU", "Radeon RX 7900 XTX", ...; caches and compute units
by the hardware specifications of the ROCm documentation), and Intel's ("Data Center GPU Max 1550", "Arc B580").

`num_ctas` and `maxnreg` are fields of a config. Other options are given among a config's meta-parameters, as in
`triton.Config({"BLOCK_M": 128, "waves_per_eu": 2})`, although the kernel has no such argument: they are tuned,
encoded and measured like any other parameter. They change what is compiled and not the TTIR, so that candidates
that differ in them alone share a trace. Asynchronous loops of warp specialisation are asked for in the source,
usually by a boolean meta-parameter, and do change the TTIR.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forecast_autotune.records import Config, Device

_KIB = 1024


@dataclass(frozen=True)
class Architecture:
    """Limits of one multiprocessor (SM, compute unit, Xe core); registers are of 32 bits, sizes bytes."""

    warp_size: int = 32
    """Threads that one instruction is issued for: a warp, a wave, a subgroup."""
    registers: int = 65536
    registers_per_thread: int = 255
    """The most that code can name."""
    threads: int = 2048
    """Resident at once."""
    programs: int = 32
    """Resident at once."""
    shared_memory_bytes: int = 99 * _KIB
    """The most that one program may have."""
    fp32_lanes: int = 128
    """fp32 multiply-adds per cycle."""
    vector_units: int = 4
    """Parts that share its registers: `waves_per_eu` counts within one of them."""
    warp_groups: bool = False
    """Four warps together issue a product that reads shared memory (NVIDIA, compute capability 9, 10)."""
    tensor_memory_bytes: int = 0
    """Memory beside the registers that holds the accumulators of such products."""
    matrix_rows: int = 64
    """Rows of a product below which units of the matrix cores stay idle."""
    operands_held: bool = True
    """Operands that a loop does not load also lie in shared memory while it runs."""
    clusters: bool = False
    """Several blocks may share one program: `num_ctas` above 1."""
    copies_ahead: bool = False
    """AMD's hardware copies into shared memory by itself: one buffer more, in a padded layout (Triton 3.8 on)."""


_VOLTA = Architecture(shared_memory_bytes=96 * _KIB, fp32_lanes=64)
_AMPERE = Architecture(threads=1536, programs=16)
_ADA = replace(_AMPERE, programs=24)
_HOPPER = Architecture(shared_memory_bytes=227 * _KIB, warp_groups=True, clusters=True)
_BLACKWELL = replace(_HOPPER, tensor_memory_bytes=256 * _KIB)
_CDNA2 = Architecture(
    warp_size=64,
    registers=131072,
    registers_per_thread=512,
    programs=16,
    shared_memory_bytes=64 * _KIB,
    matrix_rows=16,
    operands_held=False,
)
_RDNA3 = Architecture(  # a workgroup processor of two compute units
    registers=196608,
    registers_per_thread=256,
    shared_memory_bytes=64 * _KIB,
    fp32_lanes=256,
    matrix_rows=16,
    operands_held=False,
)
_XE = Architecture(
    warp_size=16,
    registers=131072,
    registers_per_thread=128,
    threads=1024,
    programs=64,
    shared_memory_bytes=128 * _KIB,
    vector_units=8,
    matrix_rows=8,
    operands_held=False,
)

_ARCHITECTURES = {
    ("cuda", "70"): _VOLTA,
    ("cuda", "75"): replace(_VOLTA, threads=1024, programs=16, shared_memory_bytes=64 * _KIB),
    ("cuda", "80"): Architecture(shared_memory_bytes=163 * _KIB, fp32_lanes=64),
    ("cuda", "86"): _AMPERE,
    ("cuda", "87"): replace(_AMPERE, shared_memory_bytes=163 * _KIB),
    ("cuda", "89"): _ADA,
    ("cuda", "90"): _HOPPER,
    ("cuda", "100"): _BLACKWELL,
    ("cuda", "103"): _BLACKWELL,
    ("cuda", "120"): replace(_ADA, clusters=True),
    ("cuda", "121"): replace(_ADA, clusters=True),
    ("hip", "gfx90a"): _CDNA2,
    ("hip", "gfx942"): _CDNA2,
    ("hip", "gfx950"): replace(_CDNA2, shared_memory_bytes=160 * _KIB, copies_ahead=True),
    ("hip", "gfx1100"): _RDNA3,
    ("hip", "gfx1101"): _RDNA3,
    ("hip", "gfx1150"): _RDNA3,
    ("hip", "gfx1151"): _RDNA3,
    ("hip", "gfx1200"): _RDNA3,
    ("hip", "gfx1201"): _RDNA3,
    ("hip", "gfx1250"): replace(_RDNA3, shared_memory_bytes=320 * _KIB, clusters=True, copies_ahead=True),
    ("xpu", "pvc"): _XE,
    ("xpu", "bmg"): _XE,
}
_UNKNOWN = {
    "hip": _CDNA2,
    "xpu": _XE,
}


def architecture_of(backend: str, arch: str) -> Architecture:
    """The limits of a target; for one that is not listed, those that most of its backend's have in common."""
    return _ARCHITECTURES.get((backend, arch), _UNKNOWN.get(backend, Architecture()))


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
"""Words in a device's name that make it another model."""
_MEASURED_TARGETS = frozenset((("cuda", "90"),))
"""Targets that the shipped surrogates and their calibration have measurements of; see `is_measured_device`."""
_LARGEST_PARTITION = 0.6
"""Share of the multiprocessors up to which a device counts as a part of its model."""
_UNKNOWN_SHEET = _Sheet("", "", 1500, 300, 1.7, 100, 32, 0)


EARLIER_AMD = ("3.4", "3.5", "3.6", "3.7")
"""Releases of Triton that do not let AMD's hardware copy into shared memory by itself."""


def device_spec(device: Device, release: str = "") -> DeviceSpec:
    """The specification of a device; facts from the running driver replace the datasheet's.

    A partition of a device (MIG, or AMD's CPX and DPX modes) has its share of the whole device's rates. `release` is
    Triton's, the latest by default.
    """
    model = _matching_model(device.name)
    sheet = _UNKNOWN_SHEET if model is None else _SHEETS[model]
    limits = _limits(device, sheet)
    share = _share(device.multiprocessors, sheet) if model is not None else 1.0
    # HIP's runtime counts the registers that one program may have, not all of a multiprocessor.
    registers = device.registers_per_multiprocessor if device.backend == "cuda" else 0
    actual = replace(
        limits,
        shared_memory_bytes=device.shared_memory_bytes or limits.shared_memory_bytes,
        registers=registers or limits.registers,
        copies_ahead=limits.copies_ahead and not release.startswith(EARLIER_AMD),
        threads=device.threads_per_multiprocessor or limits.threads,
    )
    return DeviceSpec(
        **vars(actual),
        memory_gb_s=sheet.memory_gb_s * share,
        tensor_tflops=sheet.tensor_tflops * share,
        clock_ghz=sheet.clock_ghz,
        multiprocessors=device.multiprocessors or sheet.multiprocessors,
        l2_bytes=device.l2_bytes or sheet.l2_mib * 2**20,
        backend=sheet.backend or device.backend,
    )


def partition_name(name: str, multiprocessors: int) -> str:
    """The name of a device, with its size if its driver gives a part the name of the whole: AMD's partitions.

    Times of a part must never pass for the whole's, nor the other way round.
    """
    model = _matching_model(name)
    if model is None or _share(multiprocessors, _SHEETS[model]) == 1.0:
        return name
    return f"{name} ({multiprocessors} units)"


def _share(multiprocessors: int, sheet: _Sheet) -> float:
    """The share of a model's multiprocessors, where they are too few for a variant of the model; else 1."""
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
    """Whether the shipped surrogates were fitted to, and checked against, measurements of such a device.

    A datasheet alone makes a formula, not a forecast with a calibrated risk: on other devices the formula counts as
    less sure, so that more candidates are measured first.
    """
    model = _matching_model(device.name)
    if device.arch:
        return (device.backend, device.arch) in _MEASURED_TARGETS
    return model is not None and _SHEETS[model][:2] in _MEASURED_TARGETS


def datasheet_device(model: str) -> Device:
    """The record of an absent device, by the words of its model's name (`mi300x`, `rtx 5090`).

    Raises `KeyError`, naming the models, for one without a datasheet here.
    """
    result = _matching_model(model)
    if result is None:
        raise KeyError(f"no datasheet of {model!r}: there are {', '.join(sorted(_SHEETS))}")
    sheet = _SHEETS[result]
    counts = sheet.multiprocessors, sheet.l2_mib * 2**20, sheet.memory_gb * 10**9
    return _device_of(result.upper(), sheet.backend, sheet.arch, *counts)


def _device_of(name: str, backend: str, arch: str, units: int = 0, l2: int = 0, memory: int = 0) -> Device:
    """The record of a device with the limits of its target."""
    x = architecture_of(backend, arch)
    limits = x.shared_memory_bytes, x.registers, x.threads
    return Device(name, backend, arch, units, *limits, l2, memory, x.warp_size)


def target_device(name: str) -> Device:
    """The record of any device of a target, by Triton's name for it (`gfx942`, `sm_120`), or by a model's words.

    Raises `KeyError` for a name that is neither.
    """
    arch = name.lower().removeprefix("sm_")
    for backend, entry in _ARCHITECTURES:
        if entry == arch:
            return _device_of(f"any {name}", backend, arch)
    return datasheet_device(name)


@cache
def _matching_model(name: str) -> str | None:
    """The model in the table whose words a device's name holds, whole and in a row: an A4000 is no A40."""
    words = _words(name)
    text = f" {' '.join(words)} "
    matches = [model for model in _SHEETS if f" {' '.join(_words(model))} " in text]
    result = max(matches, key=lambda model: len(_words(model)), default=None)
    if result is not None and _MODEL_SUFFIXES & (set(words) - set(_words(result))):
        return None  # an RTX 3090 Ti, or a laptop's, shares no more than the name
    return result


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower())


COMPILE_OPTIONS = frozenset(
    (
        *("waves_per_eu", "matrix_instr_nonkdim", "kpack", "schedule_hint", "llvm_fn_attrs", "wgp_cu_mode"),
        *("grf_mode", "generate_native_code", "one_matrix_per_load_for_bt"),
        *("enable_fp_fusion", "launch_cooperative_grid", "launch_pdl", "ptx_options"),
    )
)
"""Options that are given among the meta-parameters, of any backend: TTIR does not depend on them."""

_LARGE_REGISTER_FILE = {"large": 2.0, "256": 2.0, "512": 4.0}
"""`grf_mode` -> registers of a thread as a multiple of the least; `small` and `large` up to Triton 3.5."""


def register_limits(configs: Sequence[Config], device: DeviceSpec) -> npt.NDArray[np.float64]:
    """Registers that a thread of each candidate may have before it spills, [n].

    `maxnreg` counts on NVIDIA, `waves_per_eu` on AMD (a SIMD's registers are shared by that many waves), and
    `grf_mode` on Intel, where the larger file is taken from the threads that could run beside.
    """
    most = float(device.registers_per_thread)
    limits = np.full(len(configs), most)
    if device.backend == "cuda":
        for row, config in enumerate(configs):
            if config.maxnreg:
                limits[row] = min(most, max(16.0, float(config.maxnreg)))
    elif device.backend == "hip":
        of_unit = device.registers / device.vector_units / device.warp_size
        for row, config in enumerate(configs):
            request = dict(config.kwargs).get("waves_per_eu")
            own = -(-max(1, config.num_warps) // device.vector_units)  # a program's waves must fit themselves
            waves = max(own, request if isinstance(request, int | float) else 0)
            limits[row] = min(most, max(16.0, of_unit // waves))
    elif device.backend == "xpu":
        for row, config in enumerate(configs):
            limits[row] = most * _LARGE_REGISTER_FILE.get(str(dict(config.kwargs).get("grf_mode")), 1.0)
    return limits
