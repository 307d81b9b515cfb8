"""Kernels of libraries in the benchmark of searches."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from benchmarks.lib.libraries.workloads import workloads
from benchmarks.lib.search.library_kernels import LIBRARY_KERNELS
from forecast_harness.targets.kernels.user_kernel import KERNEL_PLACE


def test_every_kernel_of_the_table_has_a_workload_that_calls_it() -> None:
    known = workloads()
    assert all(KERNEL_PLACE.match(kernel.place) for kernel in LIBRARY_KERNELS.values())
    assert all(kernel.workload in known for kernel in LIBRARY_KERNELS.values())
    assert {k.distribution: k.place.partition(".")[0] for k in LIBRARY_KERNELS.values()} == {
        "liger-kernel": "liger_kernel",
        "fla-core": "fla",
    }
