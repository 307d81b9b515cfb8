"""The files of the page on CUDA kernels, and of docs/examples/cuda, which a device searches."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("torch")

from forecast_harness.clocks.compilation.nvcc import COMPILE_LIMITS, compile_source, launched_programs
from forecast_harness.clocks.records import BufferRole, PlanBuffer
from forecast_harness.sandbox.api import SandboxLane
from forecast_harness.targets.cuda.declaration import read_cuda_declaration
from forecast_harness.targets.statement import cuda_statement
from tests.harness.cuda_kernels.declared_kernel import needs_nvcc

DOCS = Path(__file__).parents[3] / "docs"
EXAMPLE = DOCS / "examples" / "cuda"
FENCE = re.compile(r'^```\w+ title="([\w.]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def test_the_page_shows_the_files_of_the_example() -> None:
    shown = dict(FENCE.findall((DOCS / "how_to" / "cuda_kernels.md").read_text()))
    assert shown == {
        name: (EXAMPLE / name).read_text() for name in ("softmax.cu", "softmax.toml", "reference.py")
    }


@needs_nvcc
@pytest.mark.parametrize("file", ["softmax.cu", "faster/block_per_row.cu"])
def test_its_sources_compile_and_launch_at_every_size(file: str) -> None:
    declared = read_cuda_declaration(f"{EXAMPLE}/softmax.cu:row_softmax")
    signature, source = declared.signature, (EXAMPLE / file).read_text()
    with SandboxLane() as lane:
        made = compile_source(source, signature, {}, 90, lambda job: lane.run(job, COMPILE_LIMITS))
    axes = [dict(w.axes) for w in declared.pack.workloads] + [{"rows": 1, "columns": 1}]
    cases = [
        (
            one,
            [
                PlanBuffer("x", BufferRole.INPUT, 4 * one["rows"] * one["columns"]),
                PlanBuffer("y", BufferRole.OUTPUT, 4 * one["rows"] * one["columns"]),
            ],
        )
        for one in axes
    ]
    for config in [{}, *made.launch.configs]:
        assert len(launched_programs("it", made, signature, 90, cases, config)) == 3


def test_the_statement_has_an_example_that_is_read() -> None:
    declared = read_cuda_declaration(f"{EXAMPLE}/softmax.cu:row_softmax")
    text = cuda_statement(declared.pack, declared.signature, "cuda")
    assert "rows=8192, columns=1024" in text
    assert "terms explains" in text
