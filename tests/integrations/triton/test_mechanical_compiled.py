"""Rewrites that change what the compiler is asked for, compiled for sm_90 without a GPU."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from forecast_autotune.records import Argument
from forecast_autotune.variants.entry import KernelEntry
from forecast_harness.authors.triton import variants_of
from forecast_integrations.triton.null_device import null_device
from forecast_integrations.triton.problem.describe import call_arguments
from forecast_integrations.triton.variants.loading import import_text
from tests.harness.authors.mechanical_sources import EVERY
from tests.harness.authors.mechanical_worker import CALLS

_IN_LANES = (
    ("total = 0.0", "total = tl.zeros((BLOCK,), dtype=tl.float32)"),
    ("total += tl.sum(tl.exp(x - m), axis=0)\n", "total += tl.exp(x - m)\n    total = tl.sum(total, 0)\n"),
)
"""Edits of the softmax: a name changes its shape between two passes."""
ASKED = {
    "one-pass": ("softmax", "setp"),
    "peel": ("matmul", "wgmma"),
    "pipeline": ("softmax", "cp.async"),
    "evict": ("softmax", "evict_first"),
    "stream-stores": ("softmax", "st.global.cs"),
    "interior": ("flat", "setp"),
    "sigmoid": ("flat", "rsqrt.approx"),
    "exp2": ("flat", "ex2.approx.ftz"),
}
"""Rewrite -> kernel, and what its PTX must hold more of than the base's."""


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("rewrite", "edits"), [*((name, ()) for name in ASKED), ("one-pass", _IN_LANES)], ids=[*ASKED, "in-lanes"]
)
def test_the_compiler_does_what_the_rewrite_asks_for(
    rewrite: str, edits: tuple[tuple[str, str], ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    name, wanted = ASKED[rewrite]
    source = EVERY[name]
    for before, after in edits:
        assert before in source
        source = source.replace(before, after)
    given, grid, meta, _ = CALLS[name](random.Random(3))
    if name == "matmul":
        given, meta = _whole(given), {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64}
    base = KernelEntry.of(import_text(source), name)
    known: list[Argument] = call_arguments(base.kernel, given)
    (variant, *_) = variants_of(source, name, "0" * 64, only=[rewrite], arguments=known)
    entry = KernelEntry.of(import_text(variant.source), name)
    options = {"num_warps": 4}
    with null_device():
        compiled = entry.warmup(
            grid, given, {**meta, **options} if "num_warps" in entry.meta else meta, options
        )
        asked = base.warmup(grid, given, meta, options).asm["ptx"]
    assert "cubin" in compiled.asm
    assert compiled.asm["ptx"].count(wanted) > asked.count(wanted)


def _whole(given: dict[str, object]) -> dict[str, object]:
    """The matmul with full tiles."""
    a, b = (torch.zeros(256, 256, dtype=torch.float16) for _ in range(2))
    rows = dict.fromkeys(("M", "N", "K", "stride_am", "stride_bk", "stride_cm"), 256)
    columns = dict.fromkeys(("stride_ak", "stride_bn", "stride_cn"), 1)
    return {**given, "a_ptr": a, "b_ptr": b, "c_ptr": torch.zeros(256, 256), **rows, **columns}
