"""What decides for what in compiled graphs on a device: epilogues, thresholds, hooks, a user's kernel for each key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import fresh_cache

from forecast_autotune import autotune, enable_torch_compile
from forecast_autotune.records import Decision
from forecast_autotune.settings import Budget
from forecast_integrations.inductor import summary

pytestmark = pytest.mark.gpu
TUNED: dict[str, Any] = {"max_autotune": True, "max_autotune_gemm_backends": "ATEN,TRITON"}
LONG = 4096
"""Depth of products: LLVM unrolls a template's loop of 40 steps or fewer, and then compiles for seconds."""


@pytest.fixture
def decided() -> Iterator[list[Decision]]:
    decisions: list[Decision] = []

    def listen(label: str, decision: Decision) -> None:
        decisions.append(decision)

    summary.LISTENERS.append(listen)
    yield decisions
    summary.LISTENERS.remove(listen)


def half(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.float16) / 32


def compiled(function: Callable[..., Any], inputs: tuple[Any, ...], store: Path, **options: Any) -> list[str]:
    """Compile and run with empty caches; failures of ours.

    Every call compiles anew, what is fused one after the other in this process: so two choices at most, in one round.
    """
    torch._dynamo.reset()
    counters.clear()
    few = enable_torch_compile(store=store, budget=Budget(measurements=2), rounds=1)
    with torch.no_grad(), fresh_cache(), few as handle:
        result = torch.compile(function, options={**TUNED, **options})(*inputs)
        torch.testing.assert_close(result, function(*inputs), atol=3e-2, rtol=3e-2)
    return handle.session.warn_once.messages


def test_scalars_that_a_template_fuses_make_another_candidate(
    tmp_path: Path, decided: list[Decision]
) -> None:
    inputs = half(256), half(256, LONG), half(LONG, 256)
    variants = [{"alpha": 1.0, "beta": 1.0}, {"alpha": 0.5, "beta": 1.0}, {"alpha": 1.0, "beta": 1.0}]
    for scalars in variants:
        assert compiled(lambda c, a, b, s=scalars: torch.addmm(c, a, b, **s), inputs, tmp_path) == []
    assert [decision.measured > 0 for decision in decided] == [True, True, False]


@pytest.mark.parametrize(
    "option",
    [{}, {"benchmark_epilogue_fusion": False}, {"coordinate_descent_tuning": True}, {"combo_kernels": True}],
    ids=str,
)
def test_a_product_with_and_without_what_follows_is_right_in_both_processes(
    tmp_path: Path, decided: list[Decision], option: dict[str, Any]
) -> None:
    a, b = half(256, LONG), half(LONG, 256)
    for follows in (torch.relu, torch.tanh, lambda y: y):
        for _ in range(2):
            assert compiled(lambda a, b, f=follows: f(a @ b), (a, b), tmp_path, **option) == []
    assert [decision.measured for decision in decided][1::2] == [0, 0, 0]


@triton.jit
def _scaled(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, 2.0 * tl.load(x + at, mask=at < n), mask=at < n)


CONFIGS = [triton.Config({"BLOCK": b}, num_warps=w) for b in (128, 512, 1024, 4096) for w in (1, 4, 8)]
SIZES = (1 << 12, 1 << 18, 1 << 24)


def launched(kernel: Any, x: torch.Tensor) -> torch.Tensor:
    out, n = torch.empty_like(x), x.numel()
    kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, out, n)
    return out


@pytest.mark.parametrize("threads", [1, 4])
def test_each_key_of_a_users_kernel_is_decided_in_one_dynamic_graph(tmp_path: Path, threads: int) -> None:
    """A kernel comes without its function from Inductor's processes, which serve once they have started."""
    tuner = autotune(configs=CONFIGS, key=["n"], store=tmp_path)(_scaled)
    torch._dynamo.reset()
    counters.clear()
    options = config.patch(compile_threads=threads)
    with options, fresh_cache(), enable_torch_compile(store=tmp_path) as handle:
        AsyncCompile.wait_pool_ready()
        graph = torch.compile(lambda x: launched(tuner, x), dynamic=True, fullgraph=True)
        for n in (*SIZES, *SIZES):
            x = torch.randn(n, device="cuda")
            torch._dynamo.mark_dynamic(x, 0)
            torch.testing.assert_close(graph(x), 2.0 * x)
    assert handle.session.warn_once.messages == []
    assert counters["stats"]["unique_graphs"] == 1
    assert len(tuner.cache) == len(SIZES), "a decision for each value of the key"
    # Outside, the same store has them: nothing is decided anew.
    outside = autotune(configs=CONFIGS, key=["n"], store=tmp_path)(_scaled)
    for n in SIZES:
        launched(outside, torch.randn(n, device="cuda"))
    named = [{key: str(config) for key, config in one.cache.items()} for one in (tuner, outside)]
    assert named[0] == named[1]
