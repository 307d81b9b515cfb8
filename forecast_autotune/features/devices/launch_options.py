"""What compilers take besides warps and stages: the options of each backend, and what they cap.

`num_ctas` and `maxnreg` are fields of a config. The others are given among a config's meta-parameters, as
in `triton.Config({"BLOCK_M": 128, "waves_per_eu": 2})`, although the kernel has no such argument: they are
tuned, encoded and measured like any other parameter. They change what is compiled and not the TTIR, so that
candidates that differ in them alone share a trace. Asynchronous loops of warp specialisation are asked for
in the source, usually by a boolean meta-parameter, and do change the TTIR.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forecast_autotune.features.devices.datasheets import DeviceSpec
from forecast_autotune.records import Config, Scalar


@dataclass(frozen=True)
class LaunchOption:
    """One option of a backend's compiler."""

    name: str
    default: Scalar
    values: tuple[Scalar, ...]
    """What is worth trying."""
    meaning: str


BACKEND_OPTIONS = {
    "cuda": (
        LaunchOption(
            "num_ctas", 1, (1, 2, 4), "thread blocks of a cluster that share one program (from cc 9.0)"
        ),
        LaunchOption(
            "maxnreg", None, (None, 128, 168, 255), "registers that a thread may have; the rest spills"
        ),
        LaunchOption(
            "ptx_options",
            "",
            (
                "",
                "--register-usage-level=10",
                "--register-usage-level=0",
                "--opt-level=1",
                "--def-load-cache=cg",
                "--def-load-cache=cs",
                "--def-store-cache=cs",
            ),
            "what the assembler is told besides: how freely it uses registers, how far it moves instructions, and "
            "what of loads and stores the caches keep",
        ),
    ),
    "hip": (
        LaunchOption(
            "waves_per_eu", 0, (0, 1, 2, 3, 4), "waves that must fit on a SIMD: caps registers; 0 is free"
        ),
        LaunchOption(
            "matrix_instr_nonkdim", 0, (0, 16, 32), "rows and columns of one MFMA; 0 leaves it open"
        ),
        LaunchOption(
            "kpack", 1, (1, 2), "elements of K that are read from LDS together, in vectors (to CDNA3)"
        ),
        LaunchOption(
            "schedule_hint", "", ("", "attention"), "how the compiler interleaves a dot's instructions"
        ),
    ),
    "xpu": (
        LaunchOption(
            "grf_mode",
            "default",
            ("default", "128", "256"),
            "registers of a hardware thread; 256 halve the threads",
        ),
    ),
}
"""By backend; values are Triton's own."""

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
            asked = dict(config.kwargs).get("waves_per_eu")
            own = -(-max(1, config.num_warps) // device.vector_units)  # a program's waves must fit themselves
            waves = max(own, asked if isinstance(asked, int | float) else 0)
            limits[row] = min(most, max(16.0, of_unit // waves))
    elif device.backend == "xpu":
        for row, config in enumerate(configs):
            limits[row] = most * _LARGE_REGISTER_FILE.get(str(dict(config.kwargs).get("grf_mode")), 1.0)
    return limits
