"""The facts of one kernel config: numbers that mean the same for every kernel, by what they are about.

Counts are per program and include loop iterations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Traffic:
    """Bytes and operations of loads and stores."""

    load_bytes: float = 0.0
    """Elements times element size over all loads, masked lanes included."""
    store_bytes: float = 0.0
    inactive_bytes: float = 0.0
    """The part of both that belongs to lanes which masks are seen to switch off."""
    load_ops: float = 0.0
    store_ops: float = 0.0


@dataclass(frozen=True)
class Dots:
    """Products of tiles."""

    dot_flops: float = 0.0
    """2 M N K per dot, times its batch."""
    dot_ops: float = 0.0
    dot_input_bits: float = 0.0
    """Operand width of the dots with the most FLOPs; 0 without dots."""
    dot_shapes: tuple[tuple[int, int, int, float], ...] = ()
    """Distinct (M, N, K, share of `dot_flops`), largest share first; shares sum to 1."""
    chained_flops: float = 0.0
    """The part of `dot_flops` in dots whose result reaches another dot: see `shared_memory.chained`."""
    chained_rows: float = 0.0
    """M of the chained dot with the most FLOPs; 0 without one."""
    chained_columns: float = 0.0


@dataclass(frozen=True)
class Arithmetic:
    """Elements through everything else."""

    elementwise: float = 0.0
    """Elements through floating-point arithmetic, casts and selects on tensors."""
    integer_ops: float = 0.0
    """Elements through integer, boolean and pointer arithmetic on tensors."""
    special: float = 0.0
    """Elements through exp, log, sqrt, division, trigonometry and library functions."""
    reduce_elements: float = 0.0
    """Elements that go into reductions (and histograms)."""
    scan_elements: float = 0.0
    atomic_elements: float = 0.0
    atomic_repeats: float = 0.0
    """Atomic operations per element of the tensors that they go to, summed over those; 0 where one is not
    known."""
    conversions: float = 0.0
    """Elements through transposes, reshapes, joins, splits and gathers."""


@dataclass(frozen=True)
class Tiles:
    """Sizes of the tensors that are alive at once."""

    pipelined_bytes: float = 0.0
    """Bytes per iteration of all loads in the innermost loop that loads most."""
    pipelined_dot_bytes: float = 0.0
    """The part of such a loop that feeds a dot directly or through casts and transposes."""
    largest_tile: float = 0.0
    """Elements of the largest tensor."""
    live_bytes: float = 0.0
    """Most bytes of tensors alive at once; see `tensors.live_bytes`."""
    accumulator_bytes: float = 0.0
    """Floating-point tensors and sums of integer dots carried by one loop, the most over loops."""


@dataclass(frozen=True)
class Loops:
    """How often, and what waits for what within."""

    loop_trips: float = 1.0
    """Iterations of the loop that iterates most, outer loops multiplied in; 1 without loops."""
    iterations: float = 1.0
    """The same, summed over all innermost loops (which follow one another); 1 without loops."""
    loop_entries: float = 1.0
    """How often innermost loops are entered; 1 without loops."""
    loop_depth: int = 0
    serial_chain: float = 0.0
    """Loads, dots, reductions, ... that wait for each other in one iteration of the heaviest loop."""
    load_chain: float = 0.0
    """The same for loads alone."""


@dataclass(frozen=True)
class Neighbours:
    """How accesses walk through memory."""

    mean_contiguous: float = 1.0
    """Neighbouring elements per access along the fastest dimension, weighted by bytes."""
    masked_share: float = 0.0
    """Share of loaded and stored bytes under a mask."""


@dataclass(frozen=True)
class SharedMemoryUse:
    """Bytes by role; those of loops are of the loop that keeps most."""

    direct_bytes: float = 0.0
    """Loads of a loop that are dot operands as they are, possibly transposed."""
    indirect_bytes: float = 0.0
    """Loads of a loop that reach a dot through casts or arithmetic, or as addresses."""
    hoisted_bytes: float = 0.0
    """Those of them whose operand is computed from loads and constants alone, without indices."""
    direct_once_bytes: float = 0.0
    """Loaded dot operands of a loop that are alive at once when nothing is loaded ahead."""
    resident_bytes: float = 0.0
    """Dot operands of a loop that were loaded before it or computed, and pass through shared memory."""
    chained_bytes: float = 0.0
    """Left operands of a loop's dots that were computed in registers: free for warp-group products alone."""
    cast_bytes: float = 0.0
    """Right operands computed element by element from loads: warp-group products need a copy,
    which lives no longer than its product; the largest."""
    computed_bytes: float = 0.0
    """The largest right operand that a loop carries or computes from more than loads and constants."""
    crosswise_bytes: float = 0.0
    """Operands of a loop's dots, of 8 or 32 bits, that lie in memory along another dimension than the one
    that is summed over: warp-group products read those the other way only, so each iteration turns them."""
    load_levels: float = 0.0
    """Loads that wait for each other on the way to a dot: 2 when one gives the address of another."""
    loop_stages: float = 0.0
    """Stages that the source asks for at this loop; 0 when it leaves them to the config."""
    streamed_bytes: float = 0.0
    """Loads of a loop without dots whose source asks for stages."""
    streamed_load_bytes: float = 0.0
    """The largest of them."""
    straight_dot_bytes: float = 0.0
    """Operands of a dot outside of all loops, the most over such dots."""
    leading_dot_bytes: float = 0.0
    """The same of those whose result a loop goes on with."""
    turned_bytes: float = 0.0
    """The largest tile that is stored along another dimension than it was loaded along."""
    reduced_bytes: float = 0.0
    """Results of reductions, in 4-byte words at least: warps exchange this much each; the most over them."""
    reduced_inside: float = 0.0
    """1 when this reduction runs while the loop above keeps its buffers."""
    narrow_bytes: float = 0.0
    """The part of `direct_bytes` that a thread loads in less than 4 bytes at once: no hardware copies it ahead."""
    narrow_most_bytes: float = 0.0
    """The largest of these loads."""
    least_direct_bytes: float = 0.0
    """The smallest of the other direct loads, which many warps load in less than 4 bytes each."""
    across_bytes: float = 0.0
    """Direct loads that lie in memory along another dimension than the one that is summed over."""
    transposed_bytes: float = 0.0
    """Direct loads that the source turns on their way to a dot."""
    transposed_right_bytes: float = 0.0
    """Those of them that are right operands and lie in memory along the dimension that is summed over."""
    reused_bytes: float = 0.0
    """Direct loads that dots read in more than one way: as left and right operands, or turned and as they lie."""
    two_sided_bytes: float = 0.0
    """The part of those that are a left operand of one dot and a right one of another."""
    filled_bytes: float = 0.0
    """Direct loads whose masked elements are something else than 0."""
    once_most_bytes: float = 0.0
    """The largest operand of a dot, wherever it comes from."""
    chained_most_bytes: float = 0.0
    """The largest of what `chained_bytes` sums up."""
    loop_dots: float = 0.0
    """Dots in one iteration."""
    precise: float = 0.0
    """1 when a dot of the loop multiplies fp32 or fp64 as they are, which no tensor core of NVIDIA's does."""
    epilogue_rows: float = 0.0
    """The largest tile that is stored in the layout of memory and was computed in that of a dot; 0 without one."""
    epilogue_columns: float = 0.0
    epilogue_bits: float = 0.0
    epilogue_vector: float = 1.0
    """Neighbouring elements that a thread stores at once."""
    epilogue_inside: float = 0.0
    """1 when it is stored while the loop above keeps its buffers."""
    copied_out: float = 0.0
    """1 when it is stored through a descriptor, whole."""
    added_bytes: float = 0.0
    """The largest tile of fp32 at least that atomics add to memory."""
    passed_1: float = 0.0
    """Bytes of shared memory that the largest exchange outside of dots takes in a program of so many warps of 32 ..."""
    passed_2: float = 0.0
    passed_4: float = 0.0
    passed_8: float = 0.0
    passed_16: float = 0.0
    passed_32: float = 0.0
    passed_wide_1: float = 0.0
    """... and of 64 threads."""
    passed_wide_2: float = 0.0
    passed_wide_4: float = 0.0
    passed_wide_8: float = 0.0
    passed_wide_16: float = 0.0
    passed_wide_32: float = 0.0
    flattened: float = 0.0
    """1 when the source asks for nested loops as one."""
    described: float = 0.0
    """1 when the loop loads through descriptors."""
    scaled: float = 0.0
    """1 when a dot of the loop has scales."""
    opaque: float = 0.0
    """1 when the function has something that these rules do not explain: its bytes are a guess."""


@dataclass(frozen=True)
class WarpCounts:
    """Counts that depend on how many warps a program has, by that number."""

    accesses_1: float = 0.0
    """Instructions of all warps that load or store, in a program of so many warps ..."""
    accesses_2: float = 0.0
    accesses_4: float = 0.0
    accesses_8: float = 0.0
    accesses_16: float = 0.0
    accesses_32: float = 0.0
    lines_1: float = 0.0
    """Cache lines that the accesses touch; see `coalescing.access_counts`."""
    lines_2: float = 0.0
    lines_4: float = 0.0
    lines_8: float = 0.0
    lines_16: float = 0.0
    lines_32: float = 0.0
    exchanged_1: float = 0.0
    """Elements that the warps of such a program exchange, see `coalescing.warp_exchange_counts`."""
    exchanged_2: float = 0.0
    exchanged_4: float = 0.0
    exchanged_8: float = 0.0
    exchanged_16: float = 0.0
    exchanged_32: float = 0.0


@dataclass(frozen=True)
class TtirFacts(WarpCounts, SharedMemoryUse, Neighbours, Loops, Tiles, Arithmetic, Dots, Traffic):
    """Facts of the mean program of a launch: all groups in one (dataclasses put the last base's fields first)."""

    partial_bytes: float = 0.0
    """Bytes of sectors that stores write in parts; see `coalescing.partial_bytes`."""
    staged_loops: int = 0
    """Loops that the number of pipeline stages may change."""
    unknown_trips: int = 0
    """Loops whose trip count was assumed."""
    ops: int = 0
    """Operations in the module's text."""


_DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(TtirFacts)}


def facts_to_json(facts: TtirFacts) -> dict[str, Any]:
    """The JSON that `facts_from_json` reads: every fact that is not its default, by name."""
    return {name: value for name, value in vars(facts).items() if value != _DEFAULTS[name]}


def facts_from_json(data: Mapping[str, Any]) -> TtirFacts:
    """Raises `ValueError`, `TypeError` or `KeyError` for anything but numbers under known names."""
    values: dict[str, Any] = {}
    for name, value in data.items():
        if name == "dot_shapes":
            values[name] = tuple((int(m), int(n), int(k), _number(share)) for m, n, k, share in value)
        else:
            kind = type(_DEFAULTS[name])
            values[name] = kind(_number(value))
    return TtirFacts(**values)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"a fact is a finite number, got {value!r}")
    return value
