"""Kernels of public libraries that `search` is measured on, and the store that tells it how they are called.

    python -m forecast_autotune run -m benchmarks.lib.search.library_kernels fla/softmax_8192x1024

runs a workload of `benchmarks.lib.libraries.workloads` once. Nobody on this project wrote these kernels. A kernel is
in the table only if it has a `triton.autotune`, as `forecast-autotune run` notes the calls of tuners alone.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.lib.libraries.installation import REQUIREMENTS
from benchmarks.lib.processes.child_processes import child_environment
from forecast_autotune.store import Store

_LONGEST_S = 300.0
"""For a workload, with all compilations of its kernels."""
_LINES_TOLD = 5


@dataclass(frozen=True)
class LibraryKernel:
    """A kernel as `search` names it, and what calls it."""

    place: str
    """`package.module:fn`."""
    workload: str
    """A workload of `benchmarks.lib.libraries.workloads`; it may call other kernels, too."""
    distribution: str
    """The library's name for pip."""

    def version(self) -> str:
        """The distribution and its version. Raises `ValueError` where it is not installed."""
        try:
            return f"{self.distribution} {version(self.distribution)}"
        except PackageNotFoundError as error:
            wanted = [one for one in REQUIREMENTS if one.partition("==")[0] in (self.distribution, "einops")]
            raise ValueError(
                f"{self.place} needs {self.distribution}: pip install --no-deps --target FOLDER {' '.join(wanted)}, "
                "and name FOLDER in PYTHONPATH"
            ) from error

    def program(self) -> list[str]:
        """Return what `forecast-autotune run` is to run."""
        return ["-m", "benchmarks.lib.search.library_kernels", self.workload]


def _fla(place: str, workload: str) -> LibraryKernel:
    return LibraryKernel(f"fla.{place}", f"fla/{workload}", "fla-core")


def _liger(place: str, workload: str) -> LibraryKernel:
    return LibraryKernel(f"liger_kernel.ops.{place}", f"liger/{workload}", "liger-kernel")


LIBRARY_KERNELS = {
    "liger_dynamic_tanh": _liger("dyt:_dyt_fwd_kernel", "dynamic_tanh_8192x4096"),
    "fla_swiglu": _fla("modules.activations.ops:swiglu_fwd_kernel", "swiglu_8192x11008"),
    "fla_logsigmoid": _fla("modules.activations.ops:logsigmoid_fwd_kernel", "logsigmoid_8192x2048"),
    "fla_softmax": _fla("ops.utils.softmax:softmax_fwd_kernel", "softmax_8192x1024"),
    "fla_unit_norm": _fla("modules.norm.l2norm:l2norm_fwd_kernel", "unit_norm_4096x16x128"),
    "fla_rms_norm": _fla("modules.norm.layernorm:layer_norm_fwd_kernel_row", "rms_norm_8192x4096"),
    "fla_rms_norm_backward": _fla("modules.norm.layernorm:layer_norm_bwd_kernel_row", "rms_norm_8192x4096"),
    "fla_gated_norm": _fla(
        "modules.norm.fused_norm_gate:layer_norm_gated_fwd_kernel_row", "gated_norm_8192x2048"
    ),
    "fla_short_convolution": _fla(
        "modules.causal_conv1d.ops:causal_conv1d_fwd_kernel", "short_convolution_4096"
    ),
}
"""By the name that the command line has for them."""


def search_environment(folder: Path) -> dict[str, str]:
    """The environment of a search, and of the workload before it: our store and all caches lie below `folder`."""
    return child_environment(folder, FLA_CACHE_MODE="disabled", PYTHONWARNINGS="ignore")


def record_calls(place: str, program: Sequence[str], environment: dict[str, str]) -> dict[str, Any]:
    """Run a program once under `forecast-autotune run`; what came of it, and the `problems` of the kernel in the store.

    All configs are measured: what the search compares with is the kernel's best config, not a forecast's.
    """
    command = [sys.executable, "-m", "forecast_autotune", "run", *program]
    begin = time.perf_counter()
    try:
        done = subprocess.run(
            command,
            env={**environment, "FORECAST_AUTOTUNE_MODE": "exhaustive"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_LONGEST_S,
            check=False,
        )
        status, result = done.returncode, done.stdout.splitlines()[-_LINES_TOLD:]
    except subprocess.TimeoutExpired:
        status, result = -1, [f"it was ended after {_LONGEST_S:.0f} s"]
    store = Store(Path(environment["FORECAST_AUTOTUNE_CACHE_DIR"]))
    tables = list(store.tables(place.rpartition(":")[2], None))
    return {
        "status": status,
        "seconds": time.perf_counter() - begin,
        "problems": len(tables),
        "configs": max((len(table.by_candidate()) for table in tables), default=0),
        "told": result,
    }


def main() -> None:
    """Run the workload of this name."""
    import torch

    from benchmarks.lib.libraries.workloads import workloads

    torch.manual_seed(0)
    workloads(sys.argv[1:2])[sys.argv[1]]()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
