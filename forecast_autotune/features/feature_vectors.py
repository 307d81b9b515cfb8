"""Candidates as feature vectors that mean the same for every kernel: the inputs of a learned model.

Names of meta-parameters mean nothing across authors, so none appears here: the numbers come from the
IR, the launch geometry and the cost formula. Each appears twice, as it is and relative to the mean
of the problem's own candidates; the relative copies transfer to unseen kernels (they halved the regret in
the study the project started from).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from forecast_autotune.features.cost import Array, CostBreakdown, FactColumns
from forecast_autotune.features.devices import DeviceSpec
from forecast_autotune.records import Config

VERSION = "vector-5"
_LINE, _LANES = 128.0, 32.0
"""Bytes of a cache line, threads of a warp."""


def _log(values: Array) -> Array:
    return np.asarray(np.log2(1.0 + np.maximum(values, 0.0)))


def _columns(
    facts: FactColumns, cost: CostBreakdown, warps: Array, stages: Array, device: DeviceSpec
) -> dict[str, Array]:
    threads = 32.0 * warps
    load_bytes, store_bytes = facts["load_bytes"], facts["store_bytes"]
    traffic = np.maximum(load_bytes + store_bytes, 1.0)
    work = facts["dot_flops"] + facts["elementwise"] + facts["reduce_elements"]
    dots = facts.dots[:, 0, :] if facts.dots.shape[1] else np.zeros((len(facts), 4))
    trips = np.maximum(facts["iterations"], 1.0)
    per_trip: Callable[[str], Array] = lambda name: facts[name] / trips / threads  # noqa: E731
    total = np.log2(cost.total_ms)
    programs = np.maximum(cost.waves * cost.occupancy * device.multiprocessors, 1.0)
    # Milliseconds of one unit's work per cycle, in all programs: the unit of `cost.lines_ms`.
    once, tiny = programs / device.multiprocessors / (device.clock_ghz * 1e6), 1e-9
    return {
        "total": total,
        "memory": np.log2(cost.memory_ms + 1e-6) - total,
        "dot": np.log2(cost.dot_ms + 1e-6) - total,
        "alu": np.log2(cost.alu_ms + 1e-6) - total,
        "latency": np.log2(cost.latency_ms + 1e-6) - total,
        "spill": np.log2(cost.spill_ms + 1e-6) - total,
        "dram": np.log2(cost.dram_ms + 1e-6) - total,
        "lines": np.log2(cost.lines_ms + 1e-6) - total,
        "requests": np.log2(cost.requests_ms + 1e-6) - total,
        "line_use": np.log2(np.maximum(_LINE * cost.lines_ms, tiny) / (traffic * once)),
        "request_bytes": np.log2(traffic * once / np.maximum(_LANES * cost.requests_ms, tiny)),
        "request_lines": np.log2(np.maximum(cost.lines_ms, tiny) / np.maximum(cost.requests_ms, tiny)),
        "again": np.log2(cost.again_ms + 1e-6) - total,
        "partial": _log(facts["partial_bytes"] / traffic),
        "repeated": np.log2(cost.repeated),
        "resident": np.log2(cost.occupancy),
        "resident_threads": np.log2(cost.occupancy * threads),
        "waves": np.log2(cost.waves),
        "tail": np.ceil(cost.waves) / cost.waves,
        "registers": np.log2(cost.registers),
        "over_registers": np.maximum(0.0, np.log2(cost.registers / 255.0)),
        "shared": cost.shared_bytes / device.shared_memory_bytes,
        "warps": np.log2(warps),
        "stages": stages,
        "programs": np.log2(programs),
        "per_thread": np.log2(np.maximum(facts["largest_tile"], 1.0) / threads),
        "vector": np.log2(np.maximum(facts["mean_contiguous"], 1.0)),
        "vector_per_thread": np.log2(np.maximum(facts["mean_contiguous"], 1.0) / threads),
        "load_per_thread": _log(load_bytes / trips / threads),
        "store_per_thread": _log(store_bytes / threads),
        "intensity": np.log2(np.maximum(work, 1.0) / traffic),
        "iterations": np.log2(trips),
        "entries": _log(facts["loop_entries"]),
        "loads_per_trip": facts["load_ops"] / trips,
        "chain": facts["serial_chain"],
        "load_chain": facts["load_chain"],
        "depth": facts["loop_depth"],
        "live": _log(facts["live_bytes"] / 4.0 / threads),
        "accumulator": _log(facts["accumulator_bytes"] / 4.0 / threads),
        "buffers": _log(facts["pipelined_dot_bytes"] / 1024.0),
        "held": _log((facts["resident_bytes"] + facts["chained_bytes"] + facts["cast_bytes"]) / 1024.0),
        "indirect": _log(facts["indirect_bytes"] / 1024.0),
        "levels": facts["load_levels"],
        "crosswise": _log(facts["crosswise_bytes"] / 1024.0),
        "turned": _log(facts["turned_bytes"] / 1024.0),
        "exchanged": _log(facts["reduced_bytes"]),
        "exchange": np.log2(cost.exchange_ms + 1e-6) - total,
        "pipelined": _log(facts["pipelined_bytes"] / 1024.0),
        "masked": facts["masked_share"],
        "inactive": facts["inactive_bytes"] / traffic,
        "elementwise": _log(per_trip("elementwise")),
        "integer": _log(per_trip("integer_ops")),
        "special": _log(per_trip("special")),
        "reduce": _log(per_trip("reduce_elements")),
        "scan": _log(per_trip("scan_elements")),
        "atomic": _log(facts["atomic_elements"] / threads),
        "convert": _log(per_trip("conversions")),
        "dot_m": _log(dots[:, 0]),
        "dot_n": _log(dots[:, 1]),
        "dot_k": _log(dots[:, 2]),
        "dot_rows_per_warp": _log(dots[:, 0] / warps),
        "dot_per_thread": _log(dots[:, 0] * dots[:, 1] / threads),
        "dot_bits": facts["dot_input_bits"] / 8.0,
        "dots_per_trip": facts["dot_ops"] / trips,
    }


def feature_matrix(
    facts: FactColumns, cost: CostBreakdown, configs: Sequence[Config], device: DeviceSpec
) -> tuple[Array, list[str]]:
    """Features [n, 2 k] of a problem's candidates, and their names; finite.

    The second half repeats the first relative to the mean over the candidates (names end in `~`).
    """
    warps = np.maximum(1.0, np.array([float(c.num_warps) for c in configs]))
    stages = np.array([float(c.num_stages) for c in configs])
    columns = _columns(facts, cost, warps, stages, device)
    plain = np.nan_to_num(np.stack(list(columns.values()), axis=1), posinf=1e3, neginf=-1e3)
    names = [*columns, *(f"{name}~" for name in columns)]
    return np.concatenate([plain, plain - plain.mean(axis=0)], axis=1), names
