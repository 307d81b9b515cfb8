"""What is timed on a real device: outputs that are compared, addresses, states of the L2.

python -m pytest -q -m gpu tests/integrations/gpu/test_true_clock_gpu.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from forecast_autotune import autotune
from forecast_autotune.records import Evidence, Outcome
from forecast_integrations.triton.timer.timers import l2_flush
from tests.integrations.null import double, fresh, tables
from tests.integrations.triton.test_addresses import arguments, scaled_product

pytestmark = pytest.mark.gpu


def test_the_flush_reads_its_memory_in_tens_of_microseconds() -> None:
    flush = l2_flush(triton.runtime.driver.active)
    flush()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(20):
        flush()
    end.record()
    end.synchronize()
    assert 0.02 < start.elapsed_time(end) / 20 < 0.5


@pytest.mark.parametrize("l2", ["cold", "warm", "both"])
def test_a_config_that_computes_something_else_is_refused(tmp_path: Path, l2: str) -> None:
    """Blocks of 32 elements leave three quarters out, as the grid is made for blocks of 128."""
    options = [triton.Config({"BLOCK": 128}, num_warps=w, num_stages=s) for w in (1, 2, 4) for s in (1, 2)]
    options.insert(2, triton.Config({"BLOCK": 32}, num_warps=1))
    tuner = autotune(options, key=["n"], store=tmp_path, mode="exhaustive", l2=l2)(fresh(double))
    x = torch.randn(1 << 20, device="cuda")
    out = torch.empty_like(x)
    tuner[(x.numel() // 128,)](x, out, x.numel())  # the grid of the other ones
    rows = [m for t in tables(tmp_path) for m in t.by_candidate().values()]
    assert [dict(m.candidate.config.kwargs)["BLOCK"] for m in rows if m.outcome is Outcome.INCORRECT] == [32]
    assert torch.equal(out, 2 * x)


def test_an_address_within_a_line_is_another_problem(tmp_path: Path) -> None:
    options = [triton.Config({"BM": 64, "BN": 64, "BK": k}, num_warps=4) for k in (16, 32)]
    tuner = autotune(options, key=["K"], store=tmp_path, mode="exhaustive")(fresh(scaled_product))

    def launch(**at: int) -> Any:
        named = {n: v.cuda() if isinstance(v, torch.Tensor) else v for n, v in arguments().items()}
        for name, offset in at.items():
            size = named[name].element_size()
            flat = torch.zeros(named[name].numel() + 256, dtype=named[name].dtype, device="cuda")
            named[name] = flat[offset // size :][: named[name].numel()].view(named[name].shape)
        tuner[(1,)](**named)
        return tuner.decision.evidence

    assert launch() is Evidence.MEASURED
    assert launch(b=16) is Evidence.MEASURED
    assert len(tables(tmp_path)) == 2
    launch(c=64)
    assert len(tables(tmp_path)) == 2
