"""The facts of one kernel config, as `ttir.facts` reads them: numbers that mean the same for every kernel."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class TtirFacts:
    """What the mean program of a launch does. Counts are per program and include loop iterations."""

    load_bytes: float = 0.0
    """Elements times element size over all loads, masked lanes included."""
    store_bytes: float = 0.0
    inactive_bytes: float = 0.0
    """The part of both that belongs to lanes which masks are seen to switch off."""
    load_ops: float = 0.0
    store_ops: float = 0.0
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
    mean_contiguous: float = 1.0
    """Neighbouring elements per access along the fastest dimension, weighted by bytes."""
    masked_share: float = 0.0
    """Share of loaded and stored bytes under a mask."""
    direct_bytes: float = 0.0
    """From here to `reduced_inside`: what shared memory will hold, see `SharedMemoryUse`."""
    indirect_bytes: float = 0.0
    direct_once_bytes: float = 0.0
    resident_bytes: float = 0.0
    chained_bytes: float = 0.0
    cast_bytes: float = 0.0
    crosswise_bytes: float = 0.0
    load_levels: float = 0.0
    loop_stages: float = 0.0
    streamed_bytes: float = 0.0
    streamed_load_bytes: float = 0.0
    straight_dot_bytes: float = 0.0
    turned_bytes: float = 0.0
    reduced_bytes: float = 0.0
    reduced_length: float = 1.0
    reduced_across: float = 0.0
    reduced_inside: float = 0.0
    accesses_1: float = 0.0
    """Instructions of all warps that load or store, in a program of so many warps ..."""
    accesses_2: float = 0.0
    accesses_4: float = 0.0
    accesses_8: float = 0.0
    accesses_16: float = 0.0
    accesses_32: float = 0.0
    lines_1: float = 0.0
    """Cache lines that the accesses touch; see `ttir.coalescing.access_counts`."""
    lines_2: float = 0.0
    lines_4: float = 0.0
    lines_8: float = 0.0
    lines_16: float = 0.0
    lines_32: float = 0.0
    exchanged_1: float = 0.0
    """Elements that the warps of such a program exchange, see `warp_exchange_counts`."""
    exchanged_2: float = 0.0
    exchanged_4: float = 0.0
    exchanged_8: float = 0.0
    exchanged_16: float = 0.0
    exchanged_32: float = 0.0
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
    """What `facts_from_json` reads: every fact that is not its default, by name."""
    return {name: value for name, value in vars(facts).items() if value != _DEFAULTS[name]}


def facts_from_json(told: Mapping[str, Any]) -> TtirFacts:
    """Raises `ValueError`, `TypeError` or `KeyError` for anything but numbers under known names."""
    given: dict[str, Any] = {}
    for name, value in told.items():
        if name == "dot_shapes":
            given[name] = tuple((int(m), int(n), int(k), _number(share)) for m, n, k, share in value)
        else:
            kind = type(_DEFAULTS[name])
            given[name] = kind(_number(value))
    return TtirFacts(**given)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"a fact is a finite number, got {value!r}")
    return value
