"""Kernels of libraries in the benchmark of searches: their table, and what a run of a library leaves for a search."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from benchmarks.lib.libraries.workloads import workloads
from benchmarks.lib.search.library_kernels import (
    LIBRARY_KERNELS,
    LibraryKernel,
    record_calls,
    search_environment,
)
from benchmarks.machine_code.searches import search_library
from forecast_harness.authors.triton_rewrites import kernel_rewrites
from forecast_harness.targets.kernels.user_kernel import KERNEL_PLACE
from forecast_harness.targets.search_target import configs_for, open_target, subjects_of

OPS = """import triton
import triton.language as tl


@triton.autotune([triton.Config({"BLOCK": b}) for b in (128, 256)], key=["n"])
@triton.jit
def double(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)
"""
PROGRAM = """import torch
from forecast_integrations.triton.null_device import null_device
from small_library.ops import double

with null_device():
    x = torch.empty(1 << 16, device="meta")
    double[lambda meta: (-(-x.numel() // meta["BLOCK"]),)](x, torch.empty_like(x), x.numel())
"""


@dataclass(frozen=True)
class _KernelOfProgram(LibraryKernel):
    """Whose workload is the path of a program."""

    def program(self) -> list[str]:
        return [self.workload]


@pytest.fixture
def small_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LibraryKernel:
    """A library of one kernel on the path of this process and its children, and what calls it."""
    package = tmp_path / "site" / "small_library"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "ops.py").write_text(OPS)
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    inherited = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path / "site"), inherited])))
    monkeypatch.setenv("FORECAST_AUTOTUNE_CACHE_DIR", str(tmp_path / "mine"))
    return _KernelOfProgram("small_library.ops:double", str(tmp_path / "program.py"), "pytest")


def test_every_kernel_of_the_table_has_a_workload_that_calls_it() -> None:
    known = workloads()
    assert all(KERNEL_PLACE.match(kernel.place) for kernel in LIBRARY_KERNELS.values())
    assert all(kernel.workload in known for kernel in LIBRARY_KERNELS.values())
    assert {k.distribution: k.place.partition(".")[0] for k in LIBRARY_KERNELS.values()} == {
        "liger-kernel": "liger_kernel",
        "fla-core": "fla",
    }


@pytest.mark.slow
def test_what_a_run_of_a_library_records_can_be_searched(
    small_library: LibraryKernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = search_environment(tmp_path / "own")
    calls = record_calls(small_library.place, small_library.program(), environment)
    assert (calls["status"], calls["problems"], calls["configs"]) == (0, 1, 2), calls["told"]
    assert not (tmp_path / "mine").exists(), "the user's store is left alone"
    monkeypatch.setenv("FORECAST_AUTOTUNE_CACHE_DIR", environment["FORECAST_AUTOTUNE_CACHE_DIR"])
    target, seeds = open_target(small_library.place, device="cuda")
    assert [a.value for a in subjects_of(target)[0].calls[0] if a.name == "n"] == [1 << 16]
    assert len(configs_for(target, seeds[0].source)) == 2
    assert kernel_rewrites(seeds[0].source, target.entry, target.payload)


def test_a_search_of_a_kernel_says_of_which_library_and_what_its_run_recorded(
    small_library: LibraryKernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "program.py").write_text("raise SystemExit('no device')\n")
    monkeypatch.setitem(LIBRARY_KERNELS, "double", small_library)
    options = argparse.Namespace(device="cuda", seconds=1.0, trials=2, surrogate="none", seed=0, lanes=1)
    options.warm, options.paths, options.keep = True, ["auto"], None
    (result,) = search_library("double", options)
    assert (result["target"], result["kernel"]) == ("double", "small_library.ops:double")
    assert result["library"] == f"pytest {pytest.__version__}"
    assert (result["calls"]["problems"], result["calls"]["status"]) == (0, 1)
    assert "no device" in result["calls"]["told"]
    assert result["status"] != 0, "a search that does not know how the kernel is called is refused"
    assert (result["judged"], result["cold_first_verdict_s"]) == (0, None)
