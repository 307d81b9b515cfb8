"""What one multiprocessor of an architecture holds, by backend and Triton's name for the target.

Sources, by backend:

- `cuda`: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" and "Throughput of
  Native Arithmetic Instructions"; tensor memory: PTX ISA, "Tensor Memory" (512 columns of 128 lanes of 4 bytes).
- `hip`: AMD GPU hardware specifications (ROCm documentation: register file, LDS, wavefront size), and the ISA
  guides of CDNA3, CDNA4, RDNA3 and RDNA4 (512 registers of a lane on CDNA, accumulation registers included;
  256 addressable ones on RDNA; 8 waves a SIMD on CDNA3, 16 on RDNA3).
- `xpu`: Intel oneAPI GPU Optimization Guide, "Small register mode vs. large register mode" and the table of
  Xe core properties (8 vector engines of 8 threads of 128 registers of 64 bytes; with 256 registers half as
  many threads).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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
    spare_buffers: int = 0
    """Buffers that a pipelined loop keeps beyond one for each stage that it loads ahead."""
    operands_held: bool = True
    """Operands that a loop does not load also lie in shared memory while it runs."""


_VOLTA = Architecture(shared_memory_bytes=96 * _KIB, fp32_lanes=64)
_AMPERE = Architecture(threads=1536, programs=16)
_ADA = replace(_AMPERE, programs=24)
_HOPPER = Architecture(shared_memory_bytes=227 * _KIB, warp_groups=True)
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
    ("cuda", "120"): _ADA,
    ("cuda", "121"): _ADA,
    ("hip", "gfx90a"): _CDNA2,
    ("hip", "gfx942"): _CDNA2,
    ("hip", "gfx950"): replace(_CDNA2, shared_memory_bytes=160 * _KIB, spare_buffers=1),
    ("hip", "gfx1100"): _RDNA3,
    ("hip", "gfx1101"): _RDNA3,
    ("hip", "gfx1200"): _RDNA3,
    ("hip", "gfx1201"): _RDNA3,
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
