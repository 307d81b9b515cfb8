"""What some benchmark kernels load, store and multiply in a whole launch, worked out from their source.

Each formula takes the launch (arguments, config, grid) and says what all programs together do, masked
lanes included: programs x iterations x tile. They are written from the kernels' Python, not from their
IR, so that `operation_counts.py` compares two independent counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

TrafficCounts: TypeAlias = dict[str, float]
"""`load_bytes`, `store_bytes` and, where they apply, `dot_flops` and `atomic_elements`."""


@dataclass(frozen=True)
class CountedLaunch:
    """One launch: arguments and config by name, and its grid."""

    named: Mapping[str, Any]
    grid: tuple[int, ...]

    def __getitem__(self, name: str) -> int:
        return int(self.named[name])

    def size(self, *names: str) -> int:
        """Bytes of one element of each of these tensors, summed."""
        return sum(self.named[name].element_size() for name in names)

    @property
    def programs(self) -> int:
        """Programs of the launch."""
        return math.prod(self.grid)


def _tiles(total: int, block: int) -> int:
    return -(-total // block)


def _product(
    launch: CountedLaunch, tensors: tuple[str, str, str], blocks: tuple[str, str, str], scales: int = 0
) -> TrafficCounts:
    """A matrix product: every program walks K once; `scales` are bytes per column of its epilogue."""
    m, n, k = (launch[name] for name in blocks)
    a, b, c = (launch.size(name) for name in tensors)
    steps = _tiles(launch["K"], k)
    return {
        "load_bytes": launch.programs * (steps * k * (m * a + n * b) + scales * n),
        "store_bytes": launch.programs * m * n * c,
        "dot_flops": launch.programs * steps * 2.0 * m * n * k,
    }


def _matmul(launch: CountedLaunch) -> TrafficCounts:
    return _product(launch, ("a_ptr", "b_ptr", "c_ptr"), ("BLOCK_M", "BLOCK_N", "BLOCK_K"))


def _bmm(launch: CountedLaunch) -> TrafficCounts:
    return _product(launch, ("a_ptr", "b_ptr", "c_ptr"), ("TILE_M", "TILE_N", "TILE_K"))


def _w8a16(launch: CountedLaunch) -> TrafficCounts:
    return _product(launch, ("x_ptr", "w_ptr", "y_ptr"), ("BM", "BN", "BK"), launch.size("scale_ptr"))


def _cdist(launch: CountedLaunch) -> TrafficCounts:
    return _product(launch, ("a_ptr", "b_ptr", "d_ptr"), ("TILE_A", "TILE_B", "TILE_K"))


def _streamk(launch: CountedLaunch) -> TrafficCounts:
    """The iterations of all tiles are dealt out evenly, so that the programs cancel out."""
    m, n, k = launch["BLOCK_M"], launch["BLOCK_N"], launch["BLOCK_K"]
    steps = _tiles(launch["M"], m) * _tiles(launch["N"], n) * _tiles(launch["K"], k)
    size = launch.size("a_ptr")
    return {"load_bytes": steps * (m + n) * k * size, "store_bytes": 0, "dot_flops": steps * 2.0 * m * n * k}


def _attention(launch: CountedLaunch) -> TrafficCounts:
    m, n, d, length = launch["BLOCK_M"], launch["BLOCK_N"], launch["HEAD_DIM"], launch["N_CTX"]
    blocks = 0
    for first in range(0, launch.grid[0] * m, m):
        end = min(first + m, length) if launch["CAUSAL"] else length
        whole = (first if launch["CAUSAL"] else length) // n
        blocks += whole + _tiles(max(0, end - whole * n), n)
    blocks *= launch.grid[1]
    return {
        "load_bytes": launch.programs * m * d * launch.size("Q") + blocks * n * d * launch.size("K", "V"),
        "store_bytes": launch.programs * m * (d * launch.size("Out") + launch.size("Lse")),
        "dot_flops": blocks * 4.0 * m * n * d,
    }


def _layer_norm(launch: CountedLaunch) -> TrafficCounts:
    """Mean, variance and output each read the row."""
    columns = launch.programs * _tiles(launch["N"], launch["BLOCK_SIZE"]) * launch["BLOCK_SIZE"]
    return {
        "load_bytes": columns * (3 * launch.size("X") + launch.size("W", "B")),
        "store_bytes": columns * launch.size("Y") + launch.programs * launch.size("Mean", "Rstd"),
    }


def _rms_norm(launch: CountedLaunch) -> TrafficCounts:
    """Both passes read both inputs; the second one reads the weight as well, once for all rows."""
    columns = launch.programs * _tiles(launch["rnumel"], launch["RBLOCK"]) * launch["RBLOCK"]
    rows = launch["XBLOCK"]
    return {
        "load_bytes": columns * (2 * rows * launch.size("in_ptr0", "in_ptr1") + launch.size("in_ptr2")),
        "store_bytes": columns * rows * launch.size("out_ptr0", "out_ptr1"),
    }


def _softmax(launch: CountedLaunch) -> TrafficCounts:
    columns = _tiles(launch["n_cols"], launch["BLOCK_N"]) * launch["BLOCK_N"]
    tile = launch.programs * launch["ROWS"] * columns
    return {
        "load_bytes": 2 * tile * launch.size("input_ptr"),
        "store_bytes": tile * launch.size("output_ptr"),
    }


def _log_softmax(launch: CountedLaunch) -> TrafficCounts:
    steps = _tiles(launch["N"], launch["TILE_N"])
    tile = launch.programs * launch["TILE_M"] * launch["TILE_N"] * steps
    passes = 1 if steps == 1 else 2
    return {"load_bytes": passes * tile * launch.size("x_ptr"), "store_bytes": tile * launch.size("y_ptr")}


def _cross_entropy(launch: CountedLaunch) -> TrafficCounts:
    columns = _tiles(launch["n_cols"], launch["BLOCK_SIZE"]) * launch["BLOCK_SIZE"]
    return {
        "load_bytes": launch.programs * (launch.size("Y_ptr") + (columns + 1) * launch.size("X_ptr")),
        "store_bytes": launch.programs * launch.size("loss_ptr", "lse_ptr"),
    }


def _cumsum(launch: CountedLaunch) -> TrafficCounts:
    columns = _tiles(launch["cols"], launch["CHUNK"]) * launch["CHUNK"]
    tile = launch.programs * launch["ROW_BLOCK"] * columns
    return {"load_bytes": tile * launch.size("x_ptr"), "store_bytes": tile * launch.size("y_ptr")}


def _splitk_gemv(launch: CountedLaunch) -> TrafficCounts:
    """The splits share the columns, whatever their number."""
    n, columns = launch["BLOCK_N"], _tiles(launch["K"], launch["BLOCK_K"]) * launch["BLOCK_K"]
    return {
        "load_bytes": launch.grid[0] * columns * (launch.size("x_ptr") + n * launch.size("w_ptr")),
        "store_bytes": 0,
        "atomic_elements": launch.programs * n,
    }


def _mv(launch: CountedLaunch) -> TrafficCounts:
    m, n = launch["TILE_M"], launch["TILE_N"]
    columns = _tiles(launch["N"], n * launch["UNROLL"]) * launch["UNROLL"] * n
    return {
        "load_bytes": launch.programs * columns * (m * launch.size("a_ptr") + launch.size("x_ptr")),
        "store_bytes": launch.programs * m * launch.size("y_ptr"),
    }


def _swiglu(launch: CountedLaunch) -> TrafficCounts:
    tile = launch.programs * launch["BM"] * launch["BN"]
    return {"load_bytes": 2 * tile * launch.size("gate_up"), "store_bytes": tile * launch.size("out")}


def _gelu_mul(launch: CountedLaunch) -> TrafficCounts:
    tile = launch.programs * launch["XBLOCK"]
    return {
        "load_bytes": tile * launch.size("in_ptr0", "in_ptr1", "in_ptr2", "in_ptr3"),
        "store_bytes": tile * launch.size("out_ptr0"),
    }


def _transpose(launch: CountedLaunch) -> TrafficCounts:
    tile = launch.programs * launch["XBLOCK"] * launch["YBLOCK"]
    return {"load_bytes": tile * launch.size("src"), "store_bytes": tile * launch.size("dst")}


def _bp_transpose(launch: CountedLaunch) -> TrafficCounts:
    tile = launch.programs * launch["STRIP"] * launch["BLOCK_M"] * launch["BLOCK_N"]
    return {"load_bytes": tile * launch.size("x_ptr"), "store_bytes": tile * launch.size("y_ptr")}


def _column_moments(launch: CountedLaunch) -> TrafficCounts:
    """The bands share the rows, whatever their number."""
    rows = _tiles(launch["M"], launch["BLOCK_M"]) * launch["BLOCK_M"]
    return {
        "load_bytes": launch.grid[0] * rows * launch["BLOCK_N"] * launch.size("x_ptr"),
        "store_bytes": 0,
        "atomic_elements": launch.programs * 2 * launch["BLOCK_N"],
    }


def _threshold_backward(launch: CountedLaunch) -> TrafficCounts:
    steps = _tiles(launch["rnumel"], launch["RBLOCK"])
    tile = launch.programs * steps * launch["XBLOCK"] * launch["RBLOCK"]
    return {
        "load_bytes": tile * launch.size("in_ptr0", "in_ptr1"),
        "store_bytes": launch.programs * launch["XBLOCK"] * launch.size("out_ptr0"),
    }


def _token_shift(launch: CountedLaunch) -> TrafficCounts:
    """Each row is read twice, as itself and as the one before."""
    d, rows = launch["BD"], launch["NT"] * launch["BT"]
    return {
        "load_bytes": launch.programs
        * d
        * (launch.size("mu_r", "mu_k", "mu_v", "state") + 2 * rows * launch.size("x")),
        "store_bytes": launch.programs * rows * d * launch.size("r", "k", "v"),
    }


def _adamw(launch: CountedLaunch) -> TrafficCounts:
    tile = launch.programs * launch["BLOCKS_PER_PROGRAM"] * launch["BLOCK_SIZE"]
    return {
        "load_bytes": tile * launch.size("p_ptr", "g_ptr", "m_ptr", "v_ptr"),
        "store_bytes": tile * launch.size("p_out_ptr", "m_out_ptr", "v_out_ptr", "half_out_ptr"),
    }


def _heat(launch: CountedLaunch) -> TrafficCounts:
    """Two planes to begin with, then five loads and one store per plane."""
    tile = launch["TILE_X"] * launch["TILE_Y"]
    planes = launch.grid[0] * launch.grid[1] * launch["D"]
    return {
        "load_bytes": (2 * launch.programs + 5 * planes) * tile * launch.size("u_ptr"),
        "store_bytes": planes * tile * launch.size("out_ptr"),
    }


def _max_pool(launch: CountedLaunch) -> TrafficCounts:
    tile = launch.programs * launch["PER_THREAD"] * launch["BLOCK"]
    return {"load_bytes": 9 * tile * launch.size("x_ptr"), "store_bytes": tile * launch.size("y_ptr")}


HAND_COUNTS: dict[str, Callable[[CountedLaunch], TrafficCounts]] = {
    "attention": _attention,
    "bp_column_moments": _column_moments,
    "bp_streamk_matmul": _streamk,
    "bp_tf32_matmul": _matmul,
    "bp_transpose": _bp_transpose,
    "cross_entropy": _cross_entropy,
    "cumsum": _cumsum,
    "fn_bmm": _bmm,
    "fn_log_softmax": _log_softmax,
    "fn_mv": _mv,
    "layer_norm": _layer_norm,
    "matmul": _matmul,
    "poi_fused_add_gelu_mul": _gelu_mul,
    "red_fused_sum_threshold_backward": _threshold_backward,
    "rms_norm": _rms_norm,
    "rows_adamw": _adamw,
    "softmax": _softmax,
    "splitk_gemv": _splitk_gemv,
    "swiglu": _swiglu,
    "token_shift_lerp": _token_shift,
    "transpose": _transpose,
    "vis_cdist2": _cdist,
    "vis_heat3d": _heat,
    "vis_max_pool": _max_pool,
    "w8a16_matmul": _w8a16,
}
"""By kernel name, as `Case.name` has it before its slash."""
