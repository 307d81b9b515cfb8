"""A CUDA kernel with its declaration, as a user's folder holds them: y = 2 * x."""

from __future__ import annotations

from pathlib import Path

import pytest

from forecast_autotune.errors import SettingsError
from forecast_autotune.variants.records import Origin, Provenance
from forecast_harness.records import Node, SearchTarget, TargetKind
from forecast_harness.targets.cuda.declaration import CudaDeclaration, read_cuda_declaration
from forecast_harness.targets.cuda.toolkit import find_nvcc
from forecast_harness.targets.novelty import node_identity
from forecast_harness.targets.statement import cuda_statement

SOURCE = """\
/* launch
grid = ["(n + THREADS - 1) // THREADS"]
block = ["THREADS"]
[macros]
THREADS = [128, 256]
*/
extern "C" __global__ void twice(const float* x, float* y, int n) {
  int at = blockIdx.x * THREADS + threadIdx.x;
  if (at < n) y[at] = 2 * x[at];
}
"""
DECLARATION = """\
description = "Twice each element"
reference = "reference.py:doubled"
parameters = [
  { name = "x", dtype = "float32", shape = ["n"] },
  { name = "y", dtype = "float32", shape = ["n"], output = true },
  { name = "n", dtype = "int32", value = "n" },
]
[axes]
n = { low = 1, high = 3000 }
[[workloads]]
name = "plain"
axes = { n = 2000 }
"""
REFERENCE = "def doubled(x):\n    return 2 * x\n"


def write_kernel(folder: Path, source: str = SOURCE, declaration: str = DECLARATION) -> str:
    """The files of a kernel, and what names it on the command line."""
    folder.mkdir(exist_ok=True)
    (folder / "twice.cu").write_text(source)
    (folder / "twice.toml").write_text(declaration)
    (folder / "reference.py").write_text(REFERENCE)
    return f"{folder}/twice.cu:twice"


def declared(folder: Path) -> CudaDeclaration:
    """The kernel as it is declared."""
    return read_cuda_declaration(write_kernel(folder))


def cuda_target(made: CudaDeclaration) -> SearchTarget:
    """A search's target for a device of compute capability 9.0."""
    payload = {
        "pack": made.pack.to_json(),
        "signature": made.signature.to_json(),
        "device": {"name": "some", "arch": "90"},
        "nvcc": "",
    }
    words = cuda_statement(made.pack, made.signature, "cuda")
    return SearchTarget(TargetKind.PACK, "twice", "twice-1", "cuda", "twice", words, payload)


def cuda_node(target: SearchTarget, source: str) -> Node:
    """A source as a node."""
    return Node(node_identity(target.id, "cuda", source), source, "cuda", (), Provenance(Origin.HAND))


def has_nvcc() -> bool:
    """Whether CUDA C++ can be compiled here."""
    try:
        find_nvcc()
    except SettingsError:
        return False
    return True


needs_nvcc = pytest.mark.skipif(not has_nvcc(), reason="needs nvcc")
