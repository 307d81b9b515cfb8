"""An untrained cost formula: TTIR facts + launch geometry + device -> milliseconds and its parts.

It is a roofline per multiprocessor (memory, tensor cores, arithmetic) with three corrections that
decide most tuning questions: how many programs fit at once, how the last wave is filled, and how
much latency each loop iteration exposes. Nothing is fitted to a kernel; the constants are machine
facts of recent NVIDIA parts (latencies and issue rates: Luo et al., arXiv 2402.13499).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from forecast_autotune.features.devices import Card
from forecast_autotune.features.ttir import Facts
from forecast_autotune.records import Config

VERSION = "cost-1"

_LOAD_LATENCY = 700.0
"""Cycles from a global load to its use (DRAM, loaded machine)."""
_STAGE_LATENCY = 150.0
"""Cycles of one dependent dot, reduction or barrier within an iteration."""
_ISSUE = 0.6
"""Cycles per counted arithmetic cycle: the compiler folds a good part of what TTIR spells out."""
_LAUNCH_MS = 0.003
_REGISTERS = 65536.0
_THREADS = 2048.0
_PROGRAMS = 32.0


@dataclass(frozen=True)
class Cost:
    """Milliseconds by part for the whole launch, and what limits it."""

    total_ms: float
    memory_ms: float
    dot_ms: float
    alu_ms: float
    latency_ms: float
    occupancy: float
    """Programs per multiprocessor."""
    waves: float
    registers: float
    """Estimated registers per thread, before the 255 limit."""
    shared_bytes: float
    """Estimated shared memory per program."""

    def parts(self) -> tuple[float, ...]:
        """log2 of what the surrogate may reweight, in the order of `PARTS`."""
        return (
            math.log2(self.memory_ms + 1e-6),
            math.log2(self.dot_ms + 1e-6),
            math.log2(self.alu_ms + 1e-6),
            math.log2(self.latency_ms + 1e-6),
            math.log2(self.occupancy),
            math.log2(math.ceil(self.waves) / self.waves),
            math.log2(max(self.registers, 16.0)),
        )


PARTS = ("memory", "dot", "alu", "latency", "occupancy", "tail", "registers")


def shared_bytes(facts: Facts, config: Config) -> float:
    """Shared memory of one program: pipelined dot operands times stages (exact for plain GEMMs).

    On Hopper `metadata.shared == num_stages * (BM*BK + BK*BN) * element_size` held for every
    pipelined GEMM with four or more warps.
    """
    buffers = max(1, config.num_stages) * facts.pipelined_dot_bytes
    scratch = 4.0 * min(facts.reduce_elements + facts.scan_elements, 1.0) * config.num_warps * 32
    return float(buffers + scratch)


def cost(
    facts: Facts, grid: tuple[int, ...] | None, config: Config, device: Card, unique_bytes: float = 0.0
) -> Cost:
    """Cost of one candidate. `unique_bytes` is the size of all tensors: what DRAM must move at least."""
    if config.num_warps < 1:  # will not compile, but must not end the forecast of the others
        config = replace(config, num_warps=1)
    threads = 32.0 * config.num_warps
    programs = float(math.prod(grid)) if grid else 4.0 * device.multiprocessors
    programs = max(1.0, programs)
    clock = device.clock_ghz * 1e6  # cycles per millisecond

    registers = _registers(facts, threads)
    shared = shared_bytes(facts, config)
    by_registers = _REGISTERS / (min(registers, 255.0) * threads)
    by_shared = device.shared_memory_bytes / max(shared, 1024.0)
    resident = max(1.0, math.floor(min(by_registers, by_shared, _THREADS / threads, _PROGRAMS)))
    resident = min(resident, max(1.0, math.ceil(programs / device.multiprocessors)))
    waves = programs / (device.multiprocessors * resident)

    # Cycles one program keeps each unit of its multiprocessor busy.
    line = min(1.0, max(facts.mean_contiguous, 1.0) * 2.0 / 32.0)  # share of each 32-byte sector used
    moved = (facts.load_bytes + facts.store_bytes) / max(line, 0.06)
    l2_rate = 2.2 * device.memory_gb_s * 1e6 / device.multiprocessors / clock  # bytes per cycle and SM
    memory = moved / l2_rate + 8.0 * facts.atomic_elements
    dot = _dot_cycles(facts, config, device)
    alu = (facts.elementwise + 0.5 * facts.conversions) / device.fp32_lanes
    alu += facts.integer_ops / 64.0 + facts.special / 16.0
    alu += (facts.reduce_elements + 2.0 * facts.scan_elements) / 64.0
    alu *= _ISSUE
    if _rows_split(facts, config):
        alu += (facts.reduce_elements + facts.elementwise) / 64.0
    spill = _spill_cycles(facts, registers, threads)

    # Latency of the iterations that pipelining does not hide; other resident programs may.
    ahead = max(1.0, config.num_stages - 1.0) if facts.pipelined_dot_bytes else 1.0
    chain = max(1.0, facts.serial_chain)
    latency = facts.iterations * (_LOAD_LATENCY / ahead + _STAGE_LATENCY * (chain - 1.0))

    busy = _soft_max(memory, dot, alu) + spill
    alone = _soft_max(busy, latency) + _LOAD_LATENCY
    per_wave = _soft_max(resident * busy, alone)
    full = math.floor(waves)
    tail = waves - full
    cycles = full * per_wave
    if tail > 0:
        cycles += _soft_max(max(1.0, math.ceil(tail * resident)) * busy, alone)
    dram = unique_bytes / (device.memory_gb_s * 1e6 * 0.9)
    # Near the bandwidth limit everything else still shows a little, hence no hard maximum.
    total = _soft_max(cycles / clock, dram) + _LAUNCH_MS
    scale = programs / device.multiprocessors / clock
    return Cost(
        total,
        max(memory * scale, dram),
        dot * scale,
        (alu + spill) * scale,
        latency * math.ceil(waves) / clock,
        resident,
        max(waves, 1e-3),
        registers,
        shared,
    )


def _rows_split(facts: Facts, config: Config) -> bool:
    """Whether a row of a product lies in several warp groups: reductions then go through shared memory."""
    rows = max((m for m, *_ in facts.dot_shapes), default=0)
    return bool(rows and facts.reduce_elements and config.num_warps / 4.0 > max(1.0, rows / 64.0))


def _registers(facts: Facts, threads: float) -> float:
    """Registers per thread before the limit: accumulators whole, the rest as far as it must be held.

    Pipelined dot operands stay in shared memory, and of a tile of pointers only one per vector is held.
    """
    if not facts.dot_flops or facts.dot_ops >= 1.5 * facts.iterations:
        # No dots, or several per iteration (attention): the products in between are held as well.
        return 24.0 + facts.live_bytes / 4.0 / threads
    rest = max(0.0, facts.live_bytes - facts.accumulator_bytes - facts.pipelined_dot_bytes)
    return 24.0 + (facts.accumulator_bytes + 0.35 * rest) / 4.0 / threads


def _spill_cycles(facts: Facts, registers: float, threads: float) -> float:
    """Local-memory traffic of one program: a spilt accumulator is read and written every iteration."""
    excess = registers - 255.0
    if excess <= 0:
        return 0.0
    # ptxas gives up whole tiles rather than single registers, up to the entire accumulator.
    spilt = 4.0 * excess * threads
    if facts.dot_flops:
        spilt = max(spilt, min(4.0 * spilt, facts.accumulator_bytes))
    return 2.0 * spilt / 64.0 * max(1.0, facts.iterations)


def _dot_cycles(facts: Facts, config: Config, device: Card) -> float:
    """Tensor-core cycles of one program, with the inefficiency of small tiles."""
    if not facts.dot_flops:
        return 0.0
    rate = device.tensor_tflops * 1e12 / device.multiprocessors / (device.clock_ghz * 1e9)
    rate *= {8: 2.0, 16: 1.0, 32: 0.5, 64: 0.07}.get(int(facts.dot_input_bits), 1.0)
    weight = sum(share for *_, share in facts.dot_shapes) or 1.0
    cycles = 0.0
    for m, n, k, share in facts.dot_shapes:
        flops = facts.dot_flops * share / weight
        # Operands stream from shared memory at 128 bytes a cycle; a warp group owns 64 rows.
        groups = max(1.0, min(config.num_warps / 4.0, m / 64.0))
        per_tile = 2.0 * m * n * k
        operand = (m * k + n * k * groups) * facts.dot_input_bits / 8.0 / 128.0
        fill = min(1.0, m / 64.0) * min(1.0, config.num_warps / 4.0)
        cycles += flops / per_tile * max(per_tile / (rate * fill), operand)
    return cycles


def _soft_max(*values: float) -> float:
    return float(sum(v**3 for v in values) ** (1 / 3))
