"""An untrained cost formula: TTIR facts + launch geometry + device -> milliseconds and its parts.

It is a roofline per multiprocessor (memory, tensor cores, arithmetic) with corrections for the effects that
decide most tuning questions: programs that fit at once, the last wave, the latency that each loop iteration
exposes, partial accesses to memory and caches, work that warps repeat or exchange, and waits of atomic
operations. The resources of a multiprocessor are the device's (`devices`); the other constants
are machine facts of recent NVIDIA parts (latencies and issue rates: Luo et al., arXiv 2402.13499) or
effective values, one for all kernels, that rank the H200 corpus best; none is fitted to one kernel. On
devices without measurements they are guesses: forecasts are wider there.
All candidates of a problem are costed at once, as arrays of shape [n].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from forecast_autotune.features.devices import DeviceSpec, register_limits
from forecast_autotune.features.ttir.coalescing import COUNTED_WARPS
from forecast_autotune.features.ttir.extraction import TtirFacts
from forecast_autotune.records import Config

VERSION = "cost-6"

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class CostConstants:
    """Assumptions of the formula about a machine and its compiler."""

    load_latency: float = 1000.0
    """Cycles from a global load to its use (DRAM, loaded machine)."""
    stage_latency: float = 150.0
    """Cycles of one dependent dot, reduction or barrier within an iteration."""
    issue: float = 0.6
    """Cycles per counted arithmetic cycle: the compiler folds a good part of TTIR's operations."""
    launch_ms: float = 0.003
    program_ms: float = 6.1e-7
    """Time to start one program on the whole device (H200, to a percent)."""
    l2_over_dram: float = 3.0
    """Bandwidth of the L2 cache as a multiple of the memory's."""
    line: float = 0.5
    """Cycles that the first-level cache takes for a line that an access touches."""
    request: float = 1.0
    """Cycles that the first-level cache takes for an instruction of a warp, however little it moves."""
    exchange: float = 1.5
    """Cycles that shared memory takes for each element that warps exchange: all lanes meet in one bank."""
    alu_warps: float = 5.0
    """Warps that it takes to keep a multiprocessor's arithmetic units busy."""
    load_warps: float = 3.0
    """Warps that it takes to keep a multiprocessor's path to memory busy."""
    atomic: float = 8.0
    """Bytes of bandwidth that one atomic element takes."""
    again_ms: float = 3e-6
    """Time that each atomic operation on an element waits for the one before it, of any program."""
    parted: float = 1.5
    """How often memory moves a sector that is written in part: read and written, but for some that meet in
    the cache."""
    held: float = 0.5
    """Share of the live tensors besides accumulators that a pipelined product holds in registers."""
    sharpness: float = 2.0
    """Norm that joins overlapping units: near a limit everything else still shows a little."""
    turning: float = 6.0
    """Bytes a cycle at which dot operands of 8 or 32 bits are turned in shared memory (`crosswise_bytes`):
    all lanes of a warp meet in one bank, little more than a word at a time."""
    dram_share: float = 0.9
    """Share of the datasheet's bandwidth that can be had."""


_SPILL_BYTES_PER_CYCLE = 64.0
"""Bytes of local memory that a multiprocessor moves in a cycle."""
_SPILL_BYTES_PER_CYCLE_AND_WARP = 6.0
"""Bytes of local memory that one warp moves in a cycle, as it waits for its own writes (256 x 256 matmul, H200)."""

PARTS = ("memory", "dot", "alu", "latency", "occupancy", "tail", "registers")


@dataclass(frozen=True)
class CostBreakdown:
    """Milliseconds by part for each candidate's whole launch, and its limits; all of shape [n]."""

    total_ms: Array
    memory_ms: Array
    dot_ms: Array
    alu_ms: Array
    latency_ms: Array
    occupancy: Array
    """Programs per multiprocessor."""
    waves: Array
    registers: Array
    """Estimated registers per thread, before any limit."""
    shared_bytes: Array
    """Estimated shared memory per program."""
    spill_ms: Array
    """The part of `alu_ms` that is traffic of spilt registers."""
    dram_ms: Array
    """Time to move every tensor once."""
    lines_ms: Array
    """Time of the first-level cache's work on lines, at one in a cycle; see `ttir.coalescing`."""
    requests_ms: Array
    """Time of the first-level cache's work on instructions, at one in a cycle."""
    again_ms: Array
    """Time of atomic operations on the same elements, one after another."""
    repeated: Array
    """How often the rows of a chained dot are computed."""
    exchange_ms: Array
    """The part of `alu_ms` in which warps exchange elements of reductions."""

    def parts(self) -> Array:
        """log2 of the quantities that the surrogate may reweight, [n, len(PARTS)]."""
        tiny = 1e-6
        return np.stack(
            [
                np.log2(self.memory_ms + tiny),
                np.log2(self.dot_ms + tiny),
                np.log2(self.alu_ms + tiny),
                np.log2(self.latency_ms + tiny),
                np.log2(self.occupancy),
                np.log2(np.ceil(self.waves) / self.waves),
                np.log2(np.maximum(self.registers, 16.0)),
            ],
            axis=1,
        )


@dataclass(frozen=True)
class FactColumns:
    """Facts of n candidates as columns."""

    columns: dict[str, Array]
    """Every number of `TtirFacts` by name, [n]."""
    dots: Array
    """(M, N, K, share) of the distinct dots, [n, most, 4]; rows of zeros where there are fewer."""

    @classmethod
    def of(cls, every: Sequence[TtirFacts]) -> FactColumns:
        """The columns of these facts."""
        most = max([len(f.dot_shapes) for f in every], default=0)
        dots = np.zeros((len(every), most, 4))
        for i, f in enumerate(every):
            for j, shape in enumerate(f.dot_shapes):
                dots[i, j] = shape
        numbers = np.array(list(map(_NUMBERS, every)), dtype=float).reshape(len(every), len(NUMERIC_FACTS))
        return cls(dict(zip(NUMERIC_FACTS, np.ascontiguousarray(numbers.T), strict=True)), dots)

    def __getitem__(self, name: str) -> Array:
        return self.columns[name]

    def __len__(self) -> int:
        return len(self.dots)


NUMERIC_FACTS = tuple(f.name for f in fields(TtirFacts) if f.name != "dot_shapes")
"""The fields of `TtirFacts` that are plain numbers."""
_NUMBERS = attrgetter(*NUMERIC_FACTS)


def _uses_warp_groups(facts: FactColumns, warps: Array, device: DeviceSpec) -> npt.NDArray[np.bool_]:
    """Whether the dots are warp-group products, [n]: these need four warps, 64 rows, and no full fp32 precision."""
    there = facts.dots[:, :, 3] > 0
    rows = np.where(there, facts.dots[:, :, 0], np.inf).min(axis=1, initial=np.inf)
    count = (warps % 4 == 0) & ((warps <= 8) | (device.tensor_memory_bytes == 0))
    return np.asarray(count & (rows >= 64) & (facts["precise"] < 0.5) & device.warp_groups)


def _prefetch_depth(facts: FactColumns, stages: Array) -> tuple[Array, Array]:
    """(stages of the loop that loads most, iterations between a load and its use), [n] each; see `shared_bytes`."""
    depth = np.where(facts["loop_stages"] > 0, facts["loop_stages"], stages)
    return depth, np.maximum(1.0, np.floor((depth - 1.0) / np.maximum(1.0, facts["load_levels"])))


def shared_bytes(
    facts: FactColumns,
    warps: Array,
    stages: Array,
    device: DeviceSpec,
    groups: npt.NDArray[np.bool_] | None = None,
) -> Array:
    """Shared memory of one program in bytes, [n], by the rules of Triton's pipeliners and allocator, 3.4 to 3.9.

    A loop with dots keeps buffers of the loads that it prefetches (`_loop_buffers`) and the other operands of its dots;
    a tile that it stores in each iteration is held beside these. Outside of loops, operands, tiles that change their
    layout and exchanges of reductions live one after another. `warps` counts 32 threads each, on any device; `groups`
    says which dots are warp-group products, where blocks share a program.
    """
    groups = _uses_warp_groups(facts, warps, device) if groups is None else groups
    wide = device.warp_size == 64
    exchange = _fact_at_warps(facts, "passed_wide" if wide else "passed", warps / 2.0 if wide else warps)
    turned_bytes = np.where(facts["dot_flops"] > 0, facts["turned_bytes"], 0.0)
    added_bytes = facts["added_bytes"] * (device.backend == "hip" and wide)
    once = np.maximum.reduce([facts["straight_dot_bytes"], turned_bytes, added_bytes, exchange])
    if device.backend == "cuda":
        epilogue = _epilogue_bytes(facts, warps, groups, device)
        inside, once = facts["epilogue_inside"] * epilogue, np.maximum(once, epilogue)
        buffers = _loop_buffers(facts, warps, stages, device, groups, inside)
    else:
        buffers = _amd_loop_buffers(facts, warps, stages, device)
        straight = facts["straight_dot_bytes"] > 0
        once = np.where(straight, np.maximum(facts["once_most_bytes"], turned_bytes), once)
        if device.copies_ahead and not wide:  # by its hardware also out of shared memory, each row padded
            row = facts["epilogue_columns"] * facts["epilogue_bits"] / 8.0 + 16.0
            tile_bytes = facts["copied_out"] * facts["epilogue_rows"] * row
            buffers, once = buffers + facts["epilogue_inside"] * tile_bytes, np.maximum(once, tile_bytes)
    return np.asarray(np.maximum(buffers + facts["reduced_inside"] * exchange, once))


def _buffered_bytes(facts: FactColumns, warps: Array) -> tuple[Array, Array]:
    """(bytes of direct loads with buffers, and of those without), [n].

    A copy of less than 4 bytes per thread, because of alignment, masks, or many warps for one tile, is not prefetched
    (AssignLatencies, 3.4 on; AMD's StreamPipeline likewise).
    """
    least, narrow = facts["least_direct_bytes"], facts["narrow_bytes"]
    small = np.where(least < 4.0 * 32.0 * warps, least, 0.0)
    return facts["direct_bytes"] - narrow - small, narrow + small


def _loop_buffers(
    facts: FactColumns,
    warps: Array,
    stages: Array,
    device: DeviceSpec,
    groups: npt.NDArray[np.bool_],
    inside: Array,
) -> Array:
    """Bytes that a loop keeps on NVIDIA, [n]; `inside` is the bytes of a tile that it stores.

    There are `stages - 1` buffers of the loads that it prefetches, one more of those that warp-group products read in
    place, and one of each operand that is no load of the loop. Loads that wait for other loads share the stages. On
    compute capability 9, warp-group products read 8-bit operands one way: others are transposed through one buffer.
    A left operand that another dot computed stays in registers, except where warps lie across its columns. Products
    with scales wait for each other on compute capability 10; elsewhere, and for less than 128 rows, operands are
    converted to bfloat16 first.
    """
    depth, ahead = _prefetch_depth(facts, stages)
    per_stage, once = _buffered_bytes(facts, warps)
    is_turned = groups & (facts["dot_input_bits"] == 8) & (device.tensor_memory_bytes == 0)
    across = np.where(is_turned, np.minimum(facts["crosswise_bytes"], per_stage), 0.0)
    per_stage, once = per_stage - across, once + across
    # Accumulators in tensor memory: one half of the loop stores the loads that no hardware copies for the other half.
    tensor = groups & (device.tensor_memory_bytes > 0)
    filled_bytes = np.where(groups & ~tensor, 0.0, facts["filled_bytes"])
    has_scales = facts["scaled"] > 0.5
    waiting = has_scales & tensor & (facts.dots[:, :, 0].max(axis=1, initial=0.0) >= 128)
    once = np.where(has_scales, facts["narrow_most_bytes"], (1.0 + tensor) * (once + filled_bytes))
    buffers = (ahead + (groups & ~has_scales)) * per_stage + once + ahead * facts["indirect_bytes"]
    buffers = np.where(
        depth > 1, buffers, np.where(groups & has_scales & ~waiting, 0.0, facts["direct_once_bytes"])
    )
    # Copies of less than 4 bytes per thread stay in registers.
    wide = (facts["streamed_load_bytes"] >= 4.0 * 32.0 * warps) & (depth > 1)
    buffers = buffers + np.where(wide, (depth - 1.0) * facts["streamed_bytes"], 0.0)
    columns = facts["chained_rows"] < _last_columns(facts)
    chained_bytes = np.where(groups | ~columns, 0.0, facts["chained_bytes"])
    # A copy lives no longer than its product; the tile that is stored takes its place.
    cast = np.where(groups & ~waiting, facts["cast_bytes"], 0.0)
    operand = np.minimum(facts["computed_bytes"], facts["resident_bytes"])
    resident = facts["resident_bytes"] - operand + np.where(groups, 0.0, chained_bytes)
    # Compute capability 9 waits in the loop for a product before it, and left operands that were loaded cross there.
    crossing = np.where(facts["chained_rows"] == 0, facts["chained_bytes"], 0.0) * np.minimum(
        1.0, warps / 8.0
    )
    leading_bytes = np.where(depth > 1, facts["leading_dot_bytes"], 0.0)
    resident = resident + np.where(groups & ~tensor, leading_bytes + crossing, 0.0)
    return np.asarray(buffers + device.operands_held * resident + np.maximum.reduce([cast, operand, inside]))


def _last_columns(facts: FactColumns) -> Array:
    """Columns of the dots that read other dots' results, [n]; without any, the fewest columns of all dots."""
    there = facts.dots[:, :, 3] > 0
    columns = np.where(there, facts.dots[:, :, 1], np.inf).min(axis=1, initial=np.inf)
    # A dot that sums over as many as another has columns reads that one's results.
    reads = there & (facts.dots[:, :, 2] == facts["chained_columns"][:, None])
    last = np.where(reads, facts.dots[:, :, 1], 0.0).max(axis=1, initial=0.0)
    return np.asarray(np.where(last > 0, last, columns))


def _amd_loop_buffers(facts: FactColumns, warps: Array, stages: Array, device: DeviceSpec) -> Array:
    """Bytes that a loop keeps on AMD (and others), [n]: one buffer less than stages, or as many with async copies.

    Operands without buffers pass through shared memory one by one, beside the buffers. With two dots, one of which
    reads the other's results, four stages keep the buffers of two (ScheduleLoops, chained dots).
    """
    depth, ahead = _prefetch_depth(facts, stages)
    waits = facts["load_levels"] > 1
    ahead = np.where(waits, np.maximum(1.0, depth - facts["load_levels"]), depth - 1.0)
    per_stage, once = _buffered_bytes(facts, warps)
    pair = (facts["chained_rows"] > 0) & (np.rint(facts["loop_dots"]) == 2) & (depth == 4)
    ahead = np.where(pair, 1.0, ahead)
    small = np.where(once > facts["narrow_bytes"], facts["least_direct_bytes"], 0.0)
    loose = np.maximum(facts["narrow_most_bytes"], small)
    # Loads of an operand that also depends on indices or other dots wait in registers.
    per_stage = per_stage + np.where(waits, 0.0, facts["hoisted_bytes"])
    both = facts["two_sided_bytes"]
    if not device.copies_ahead:  # no buffer has a layout for both sides
        per_stage, loose = per_stage - np.minimum(both, per_stage), np.maximum(loose, both)
    if device.warp_size == 64 and not device.copies_ahead:
        # A flattened loop does not know the alignment of columns.
        across = np.where(facts["flattened"] > 0.5, np.minimum(facts["across_bytes"], per_stage), 0.0)
        per_stage, loose = per_stage - across, np.maximum(loose, across)
    # A product has 32 rows for a wave of 64, 16 for one of 32; its results cross to other lanes where rows are fewer.
    own = (facts["chained_rows"] >= 16.0 * warps) | (facts["chained_rows"] <= 16)
    crossing = np.where(own, 0.0, facts["chained_most_bytes"])
    whole = (facts["described"] > 0.5) & device.copies_ahead & (device.warp_size == 32)
    reg_bytes, passing = _transposed_bytes(facts, warps, device, whole)
    most = np.where(reg_bytes > 0, facts["direct_bytes"] - reg_bytes, facts["once_most_bytes"])
    per_stage, loose = per_stage - np.minimum(reg_bytes + passing, per_stage), np.maximum(loose, passing)
    if device.copies_ahead:
        scales = facts["scaled"] * facts["narrow_bytes"] * (device.warp_size == 64)
        per_stage = per_stage + once - scales - facts["reused_bytes"]
        bits = facts["dot_input_bits"]
        wide = bits >= 32
        along, turn_share = np.where(wide, 0.0, 1.0 / 64.0), np.where(bits == 8, 1.0 / 32.0, 1.0 / 16.0)
        # Operands that the source transposes are swizzled, not padded, except where the hardware copies whole tensors.
        source = np.clip(facts["transposed_bytes"] - reg_bytes - facts["reused_bytes"], 0.0, per_stage)
        across = facts["across_bytes"] + facts["transposed_right_bytes"] - facts["transposed_bytes"]
        across = np.where(wide, 0.0, np.clip(across, 0.0, per_stage - source))
        right = np.minimum(facts["transposed_right_bytes"] - reg_bytes, source)
        swizzle_share = np.zeros(len(facts))
        if device.warp_size == 32:
            # The padding of a transposed row does not grow beyond 256 bytes of it.
            row = facts.dots[:, :, 1].max(axis=1, initial=1.0) * bits / 8.0
            turn_share = 2.0 * turn_share * np.minimum(1.0, 256.0 / np.maximum(row, 1.0))
            along = np.where(wide, 1.0 / 32.0, 1.0 / 16.0)
            swizzle_share = np.where(whole, along * np.where(bits == 8, 1.0, 2.0), 0.0)
            ahead = np.where(whole, np.maximum(ahead, 2.0), ahead)
            most = most * (1.0 + np.where(whole, np.where(right > 0, swizzle_share, turn_share), 0.0))
        turn_share = np.where((facts["flattened"] > 0.5) & ~whole, 0.0, turn_share)
        plain = per_stage - across - np.where(whole, right, source)
        padding = along * plain + turn_share * across + swizzle_share * right
        padding = np.where((facts["narrow_bytes"] > 0) & (facts["scaled"] < 0.5), 0.0, padding)
        buffers = (ahead + (facts["described"] < 0.5)) * (per_stage + padding)
        loose = facts["reused_bytes"]
        buffers, loose = np.where(both > 0, facts["direct_bytes"], buffers), np.where(both > 0, 0.0, loose)
    else:
        buffers = ahead * per_stage
    single = np.maximum(most, crossing)
    computed_bytes = np.where((both > 0) & device.copies_ahead, 0.0, facts["computed_bytes"])
    loose = np.maximum.reduce([loose, crossing, computed_bytes])
    total = np.maximum(buffers + loose, most * (facts["resident_bytes"] > 0))
    return np.asarray(np.where(depth > 1, total, single))


def _transposed_bytes(
    facts: FactColumns, warps: Array, device: DeviceSpec, whole: npt.NDArray[np.bool_]
) -> tuple[Array, Array]:
    """(bytes of right operands that stay in registers on AMD, and of those that pass unbuffered), [n] each.

    `whole`: where the hardware copies whole tensors, [n]. An operand that the source loads as [N, K] and transposes is
    loaded in the layout of its product, where all warps lie along the columns (RemoveLayoutConversions; warpsPerTile
    of AccelerateAMDMatmul), except on CDNA3, and with 8 bits on RDNA.
    """
    right, waves = facts["transposed_right_bytes"], warps * 32.0 / device.warp_size
    rows, columns = (facts.dots[:, :, place].max(axis=1, initial=1.0) for place in (0, 1))
    size = np.where((np.minimum(rows, columns) >= 32) & (device.warp_size == 64), 32.0, 16.0)
    along = (waves * size <= columns) & ((waves <= 1) | (rows <= size) | (rows * waves < 4.0 * columns))
    along &= (facts["chained_rows"] == 0) | (waves <= 1)
    bits, small = facts["dot_input_bits"], device.warp_size == 32 and not device.copies_ahead
    in_registers = (
        along
        & ~whole
        & ((bits == 16) | (bits == 8) & (device.warp_size == 64))
        & (small | device.copies_ahead)
    )
    # No product of RDNA takes fp32.
    return np.where(in_registers, right, 0.0), np.where((bits >= 32) & small, right, 0.0)


def _epilogue_bytes(
    facts: FactColumns, warps: Array, groups: npt.NDArray[np.bool_], device: DeviceSpec
) -> Array:
    """Bytes of a tile's conversion from a dot's layout to that of its store, [n].

    Both layouts give the bits of an element's row and column to registers, lanes and warps (GenericSwizzling, 3.5
    on). Elements that differ in bits of registers alone, in both layouts, are converted one after another in the same
    memory, but for those of one access.
    """
    rows, columns, bits = (facts[f"epilogue_{name}"] for name in ("rows", "columns", "bits"))
    log_warps = np.log2(np.maximum(warps, 1.0))
    m, n = np.log2(np.maximum(rows, 1.0)), np.log2(np.maximum(columns, 1.0))
    down, along = _dot_warps(rows, columns, log_warps, groups)
    vector = np.minimum(facts["epilogue_vector"], 128.0 / np.maximum(bits, 1.0))
    vector = np.log2(np.clip(vector, 1.0, np.maximum(1.0, rows * columns / 32.0 / warps)))
    lanes = np.clip(n - vector, 0.0, 5.0)
    beside = np.clip(n - vector - lanes, 0.0, log_warps)
    above = 5.0 - lanes + log_warps - beside
    common = (vector >= 1) + np.maximum(0.0, vector - 3.0 - along) + ((above <= 3) & (m > 3))
    common = common + np.maximum(0.0, n - np.maximum(3.0 + along, vector + lanes + beside))
    common = common + np.maximum(0.0, m - np.maximum(4.0 + down, above))
    thin = (n > 4) & ((along == 0) | ((n >= 8) & (along <= 2)))
    thin |= device.clusters & (
        vector >= 1
    )  # from compute capability 9 on, matrices are stored by an instruction of their own
    per_access = np.where(bits == 16, np.where(thin, 1.0, 3.0), 2.0)
    tile = rows * columns * bits / 8.0
    pass_bytes = tile / 2.0 ** np.maximum(0.0, common - per_access)
    # A thread has a row of tensor memory, or half of one: it writes that as it is.
    tensor = groups & (device.tensor_memory_bytes > 0) & (facts["epilogue_vector"] > 1)
    pass_bytes = np.where(tensor, np.where((bits == 32) & (warps > 4), tile / 4.0, 0.0), pass_bytes)
    return np.asarray(np.where(facts["copied_out"] > 0.5, tile, pass_bytes))


def _dot_warps(
    rows: Array, columns: Array, log_warps: Array, groups: npt.NDArray[np.bool_]
) -> tuple[Array, Array]:
    """log2 of a dot's warps (down its rows, along its columns), [n] each (AccelerateMatmul)."""
    down, along = np.where(groups, 2.0, 0.0), np.zeros(len(rows))
    for _ in range(int(log_warps.max(initial=0.0))):
        has_warps = down + along < log_warps
        tall = rows / 2.0**down > columns / 2.0**along
        more = has_warps & np.where(groups, rows > 16.0 * 2.0**down, tall & (rows >= 32.0 * 2.0**down))
        down, along = down + more, along + (has_warps & ~more)
    return down, along


def tensor_columns(facts: FactColumns, warps: Array, device: DeviceSpec) -> Array:
    """Columns of tensor memory that accumulators take, [n], a power of two; at most 512 can be had."""
    columns = np.where(
        _uses_warp_groups(facts, warps, device) & (device.tensor_memory_bytes > 0),
        facts["accumulator_bytes"] / 512.0,
        0.0,
    )
    return np.asarray(np.where(columns > 0, 2.0 ** np.ceil(np.log2(np.maximum(columns, 1.0))), 0.0))


@dataclass(frozen=True)
class _Launch:
    """The launches of n candidates; all of shape [n]."""

    warps: Array
    """Warps of one block."""
    stages: Array
    ctas: Array
    """Blocks that share one program."""
    threads: Array
    """Threads of one block."""
    programs: Array
    limits: Array
    """Registers that a thread may have."""
    groups: npt.NDArray[np.bool_]
    """Whether the dots are warp-group products."""

    @property
    def halves(self) -> Array:
        """Warps of a program if each had 32 threads, as in the facts on accesses."""
        return self.threads * self.ctas / 32.0


def costs(
    facts: FactColumns,
    grids: Sequence[tuple[int, ...] | None],
    configs: Sequence[Config],
    device: DeviceSpec,
    unique_bytes: float = 0.0,
    constants: CostConstants | None = None,
) -> CostBreakdown:
    """Cost of every candidate. `unique_bytes` is the size of all tensors: the least that DRAM must move."""
    k = constants or CostConstants()
    launch = _launch(facts, grids, configs, device)
    ctas, clock = launch.ctas, device.clock_ghz * 1e6  # cycles per millisecond
    tensor = np.where(launch.groups & (device.tensor_memory_bytes > 0), facts["accumulator_bytes"], 0.0)
    registers = _registers(facts, launch.threads * ctas, tensor, k)
    shared = _shared_bytes_per_block(facts, launch, device)
    blocks = launch.programs * ctas
    resident = _resident_programs(launch, device, registers, shared, tensor)
    resident = np.minimum(resident, np.maximum(1.0, np.ceil(blocks / device.multiprocessors)))
    waves = blocks / (device.multiprocessors * resident)

    # Cycles one program keeps each unit of its multiprocessor busy.
    lines, requests = (_fact_at_warps(facts, name, launch.halves) for name in ("lines", "accesses"))
    near = np.maximum(k.line * lines, k.request * requests)
    memory = _soft_max(k, _l2_cycles(facts, device, k), near)
    repeats = _recompute_factor(facts, launch.warps * ctas, launch.groups)
    dot = _product_cycles(facts, launch, device, repeats, k)
    exchange = k.exchange * _fact_at_warps(facts, "exchanged", launch.halves)
    alu = _arithmetic_cycles(facts, launch.warps, device, repeats, k) + exchange
    spilt = _spilled_bytes(facts, registers, launch.threads * ctas, launch.limits)
    spill = spilt / _SPILL_BYTES_PER_CYCLE
    # Each of the blocks that share a program does an equal part of it.
    memory, dot, alu, spill, spilt = memory / ctas, dot / ctas, alu / ctas, spill / ctas, spilt / ctas
    latency = _exposed_latency(facts, launch.stages, k)

    busy = _soft_max(k, memory, dot, alu) + spill
    waiting = np.where(facts["dot_flops"] > 0, spilt / (_SPILL_BYTES_PER_CYCLE_AND_WARP * launch.warps), 0.0)
    slow_alu, slow_mem = (np.maximum(1.0, n / launch.warps) for n in (k.alu_warps, k.load_warps))
    by_itself = _soft_max(k, slow_mem * memory, dot, slow_alu * alu) + spill
    alone = _soft_max(k, by_itself, latency, waiting) + k.load_latency
    cycles = _cycles_of_waves(waves, resident, busy, alone, k)
    unique = _touched_bytes(facts, launch.programs, unique_bytes)
    dram = np.full(len(busy), unique / (device.memory_gb_s * 1e6 * k.dram_share))
    again = k.again_ms * launch.programs * facts["atomic_repeats"]
    total = (
        np.maximum(_soft_max(k, cycles / clock, dram, again), k.program_ms * launch.programs) + k.launch_ms
    )
    scale = blocks / device.multiprocessors / clock
    return CostBreakdown(
        total_ms=total,
        memory_ms=np.maximum(memory * scale, dram),
        dot_ms=dot * scale,
        alu_ms=(alu + spill) * scale,
        latency_ms=latency * np.ceil(waves) / clock,
        occupancy=resident,
        waves=np.maximum(waves, 1e-3),
        registers=registers,
        shared_bytes=shared,
        spill_ms=spill * scale,
        dram_ms=dram,
        lines_ms=lines * scale,
        requests_ms=requests * scale,
        again_ms=again,
        repeated=repeats,
        exchange_ms=exchange * scale,
    )


def _launch(
    facts: FactColumns, grids: Sequence[tuple[int, ...] | None], configs: Sequence[Config], device: DeviceSpec
) -> _Launch:
    # A config without warps will not compile, but must not end the forecast of the others.
    warps = np.maximum(1.0, np.array([float(c.num_warps) for c in configs]))
    unknown = 4.0 * device.multiprocessors
    sizes = {g: float(math.prod(g)) if g else unknown for g in set(grids)}
    return _Launch(
        warps=warps,
        stages=np.array([float(c.num_stages) for c in configs]),
        ctas=np.maximum(1.0, np.array([float(c.num_ctas) for c in configs])),
        threads=device.warp_size * warps,
        programs=np.maximum(1.0, np.array([sizes[g] for g in grids])),
        limits=register_limits(configs, device),
        groups=_uses_warp_groups(facts, warps, device),
    )


def _shared_bytes_per_block(facts: FactColumns, launch: _Launch, device: DeviceSpec) -> Array:
    shared = shared_bytes(facts, launch.halves, launch.stages, device, launch.groups)
    # Blocks that share a program divide its tiles; each has whole rows, or columns, of a product's operands.
    return shared / np.where(facts["dot_flops"] > 0, np.sqrt(launch.ctas), launch.ctas)


def _resident_programs(
    launch: _Launch, device: DeviceSpec, registers: Array, shared: Array, tensor: Array
) -> Array:
    """Programs that fit on a multiprocessor at once, by their resources; `tensor` is bytes of tensor memory."""
    by_registers = device.registers / (np.minimum(registers, launch.limits) * launch.threads)
    by_shared = device.shared_memory_bytes / np.maximum(shared, 1024.0)
    by_tensor = launch.ctas * device.tensor_memory_bytes / np.maximum(tensor, 1.0)
    by_tensor = np.where(tensor > 0, by_tensor, np.inf)
    most = np.full(len(launch.threads), float(device.programs))
    fits = np.minimum.reduce([by_registers, by_shared, by_tensor, device.threads / launch.threads, most])
    return np.asarray(np.maximum(1.0, np.floor(fits)))


def _l2_cycles(facts: FactColumns, device: DeviceSpec, k: CostConstants) -> Array:
    """Cycles of the second-level cache for the traffic of one program."""
    line = np.minimum(1.0, np.maximum(facts["mean_contiguous"], 1.0) * 2.0 / 32.0)
    traffic = (facts["load_bytes"] + facts["store_bytes"]) / np.maximum(line, 0.06)
    partial = k.parted * k.l2_over_dram * facts["partial_bytes"]  # not the cache's bytes, but memory's
    atomic = k.atomic * facts["atomic_elements"]
    # Bytes per cycle and multiprocessor.
    rate = k.l2_over_dram * device.memory_gb_s * 1e6 / device.multiprocessors / (device.clock_ghz * 1e6)
    return np.asarray((traffic + partial + atomic) / rate)


def _product_cycles(
    facts: FactColumns, launch: _Launch, device: DeviceSpec, repeats: Array, k: CostConstants
) -> Array:
    """Cycles of the tensor cores, or of transposing their operands if that takes longer."""
    turn_cycles = facts["iterations"] * facts["crosswise_bytes"] / k.turning
    chain_share = facts["chained_flops"] / np.maximum(facts["dot_flops"], 1.0)
    share = np.where(launch.groups, chain_share, 1.0)
    cycles = _dot_cycles(facts, launch.warps * launch.ctas, device) * (1.0 + share * (repeats - 1.0))
    return np.asarray(np.maximum(cycles, np.where(launch.groups, turn_cycles, 0.0)))


def _arithmetic_cycles(
    facts: FactColumns, warps: Array, device: DeviceSpec, repeats: Array, k: CostConstants
) -> Array:
    alu = (facts["elementwise"] + 0.5 * facts["conversions"]) / device.fp32_lanes
    alu = alu + facts["integer_ops"] / 64.0 + facts["special"] / 16.0
    alu = k.issue * repeats * (alu + (facts["reduce_elements"] + 2.0 * facts["scan_elements"]) / 64.0)
    across = (facts["reduce_elements"] + facts["elementwise"]) / 64.0
    return np.asarray(alu + np.where(_rows_cross_warp_groups(facts, warps), across, 0.0))


def _exposed_latency(facts: FactColumns, stages: Array, k: CostConstants) -> Array:
    """Latency of the iterations that pipelining does not hide; other resident programs may."""
    is_pipelined = facts["direct_bytes"] + facts["indirect_bytes"] + facts["streamed_bytes"] > 0
    ahead = np.where(is_pipelined, _prefetch_depth(facts, stages)[1], 1.0)
    loads = np.maximum(1.0, np.where(is_pipelined, 1.0, facts["load_chain"]))
    chain = np.maximum(loads, facts["serial_chain"])
    first = np.minimum(facts["iterations"], facts["loop_entries"])
    latency = k.load_latency * loads * (first + (facts["iterations"] - first) / ahead)
    return np.asarray(latency + facts["iterations"] * k.stage_latency * (chain - loads))


def _cycles_of_waves(waves: Array, resident: Array, busy: Array, alone: Array, k: CostConstants) -> Array:
    """Cycles of full waves, and of the rest in a last one; a program takes `alone` at least."""
    full = np.floor(waves)
    tail = waves - full
    last = _soft_max(k, np.maximum(1.0, np.ceil(tail * resident)) * busy, alone)
    return np.asarray(full * _soft_max(k, resident * busy, alone) + np.where(tail > 0, last, 0.0))


def _fact_at_warps(facts: FactColumns, name: str, warps: Array) -> Array:
    """A fact that is counted for some numbers of warps, at the nearest of these to `warps`, [n]."""
    counts = np.array([facts[f"{name}_{n}"] for n in COUNTED_WARPS])
    nearest = np.rint(np.log2(warps)).astype(np.intp).clip(0, len(COUNTED_WARPS) - 1)
    return np.asarray(counts[nearest, np.arange(len(warps))])


def _touched_bytes(facts: FactColumns, programs: Array, unique_bytes: float) -> float:
    """Bytes of all tensors, or the least traffic of a candidate: a lookup reads little of its table."""
    if not len(programs) or facts["unknown_trips"].any():
        return unique_bytes
    traffic = facts["load_bytes"] + facts["store_bytes"] + 4.0 * facts["atomic_elements"]
    return min(unique_bytes, float((traffic * programs).min()))


def _rows_cross_warp_groups(facts: FactColumns, warps: Array) -> npt.NDArray[np.bool_]:
    """Whether a row of a product lies in several warp groups: reductions then go through shared memory."""
    rows = facts.dots[:, :, 0].max(axis=1, initial=0.0)
    is_split = warps / 4.0 > np.maximum(1.0, rows / 64.0)
    return np.asarray((rows > 0) & (facts["reduce_elements"] > 0) & is_split)


def _registers(facts: FactColumns, threads: Array, tensor: Array, k: CostConstants) -> Array:
    """Registers per thread before the limit: those of whole accumulators, and of other live tensors.

    Pipelined dot operands stay in shared memory, and a tile of pointers needs one register per vector only.
    Without dots, or with several per iteration (attention), the products in between are held as well.
    The `tensor` bytes, [n], need no registers: accumulators in tensor memory.
    A loop with dots also keeps the address (two registers) of each 16 bytes that it prefetches; the compiler
    recomputes these rather than spilling them.
    """
    live = facts["live_bytes"]
    several = (facts["dot_flops"] == 0) | (facts["dot_ops"] >= 1.5 * facts["iterations"])
    several |= (facts["straight_dot_bytes"] > 0) & (facts["pipelined_bytes"] == 0)
    intermediates = np.maximum(0.0, live - facts["accumulator_bytes"] - facts["pipelined_dot_bytes"])
    register_bytes = np.where(several, live, facts["accumulator_bytes"] + k.held * intermediates)
    tensors = 24.0 + np.maximum(0.0, register_bytes - tensor) / 4.0 / threads
    addresses = np.where(facts["dot_flops"] > 0, facts["pipelined_bytes"] / 8.0 / threads, 0.0)
    return np.asarray(np.maximum(tensors, np.minimum(255.0, tensors + addresses)))


def _spilled_bytes(facts: FactColumns, registers: Array, threads: Array, limits: Array) -> Array:
    """Local memory that one program writes and reads again, over all iterations.

    ptxas spills whole tiles rather than single registers. An accumulator that alone takes all registers of a thread
    is stored and loaded around every product.
    """
    spilt = 4.0 * np.maximum(0.0, registers - limits) * threads
    accumulator = facts["accumulator_bytes"]
    whole = np.maximum(spilt, np.minimum(4.0 * spilt, accumulator))
    whole = np.where(accumulator / 4.0 / threads >= limits, np.maximum(whole, accumulator), whole)
    spilt = np.where(facts["dot_flops"] > 0, whole, spilt)
    return np.asarray(2.0 * spilt * np.maximum(1.0, facts["iterations"]))


def _dot_cycles(facts: FactColumns, warps: Array, device: DeviceSpec) -> Array:
    """Tensor-core cycles of one program, with the inefficiency of small tiles."""
    cycles = np.zeros(len(facts))
    if not facts.dots.shape[1]:
        return cycles
    rate = device.tensor_tflops * 1e12 / device.multiprocessors / (device.clock_ghz * 1e9)
    bits = facts["dot_input_bits"]
    rates = rate * np.select([bits == 8, bits == 32, bits == 64], [2.0, 0.5, 0.07], 1.0)
    weight = facts.dots[:, :, 3].sum(axis=1)
    for m, n, depth, share in np.moveaxis(facts.dots, 1, 0).transpose(0, 2, 1):
        there = share > 0
        flops = facts["dot_flops"] * share / np.where(weight > 0, weight, 1.0)
        # Operands stream from shared memory at 128 bytes a cycle; a warp group owns 64 rows.
        groups = np.maximum(1.0, np.minimum(warps / 4.0, m / 64.0))
        per_tile = np.where(there, 2.0 * m * n * depth, 1.0)
        operand = (m * depth + n * depth * groups) * bits / 8.0 / 128.0
        fill = np.where(there, np.minimum(1.0, m / device.matrix_rows) * np.minimum(1.0, warps / 4.0), 1.0)
        cycles += flops / per_tile * np.maximum(per_tile / (rates * fill), operand)
    return cycles


def _recompute_factor(facts: FactColumns, warps: Array, groups: npt.NDArray[np.bool_]) -> Array:
    """The number of warps that compute the same rows of a chained dot, [n]: 1 where each warp has its own.

    Triton lays all warps of a dot that another one follows along its rows, 16 for each, so that reductions in
    between stay within a warp; without warp groups along the columns instead, 8 for each, if these are more.
    """
    rows, columns = facts["chained_rows"], facts["chained_columns"]
    across = ~groups & (columns > rows)
    factor = np.where(across, 8.0 * warps / np.maximum(columns, 1.0), 16.0 * warps / np.maximum(rows, 1.0))
    return np.where(rows > 0, np.maximum(1.0, factor), 1.0)


def _soft_max(k: CostConstants, *values: Array) -> Array:
    power = k.sharpness
    return np.asarray(np.sum([v**power for v in values], axis=0) ** (1.0 / power))
