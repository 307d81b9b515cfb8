"""Triton's behaviour with real kernels, a real clock and a real driver; the rest is in `interpreted/`."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.runtime.autotuner import Autotuner

from benchmarks import kernels
from benchmarks.tuning.unseen_kernels import unseen_cases
from forecast_autotune.store import Store
from tests.integrations.gpu.kernels import accumulate, add, matmul
from tests.integrations.warmed_kernels import LISTED, Pair, add_all

pytestmark = pytest.mark.gpu

Decorator = Callable[..., Callable[[Any], Autotuner]]
N = 100_000


def ours(**extra: Any) -> Decorator:
    """Our decorator, keeping what it learns in memory unless a store is given."""
    from forecast_autotune import autotune

    options = {"store": False, **extra}
    return lambda *args, **kwargs: autotune(*args, **kwargs, **options)


@pytest.fixture(params=["triton", "forecast"])
def autotune(request: pytest.FixtureRequest) -> Decorator:
    """Triton's decorator, then ours as users get it."""
    return triton.autotune if request.param == "triton" else ours()


@pytest.fixture
def forecast() -> Decorator:
    """Only our decorator."""
    return ours()


def capture(launch: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of what is launched."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph


def blocks(*sizes: int, **options: Any) -> list[triton.Config]:
    """One config per BLOCK size."""
    return [triton.Config({"BLOCK": size}, **options) for size in sizes]


def grid(meta: Any) -> tuple[int]:
    """As many programs as cover `n`."""
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


def pair(n: int = N, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two random vectors and an empty one."""
    x, y = (torch.randn(n, device="cuda").to(dtype) for _ in range(2))
    return x, y, torch.full_like(x, math.nan)


def multiply(tuner: Any, m: int, n: int, k: int) -> None:
    """Launch a matrix product and compare it with torch's."""
    a = torch.randn(m, k, device="cuda", dtype=torch.float16)
    b = torch.randn(k, n, device="cuda", dtype=torch.float16)
    c = torch.full((m, n), math.nan, device="cuda", dtype=torch.float16)
    tuner[lambda meta: (m // meta["BM"], n // meta["BN"])](a, b, c, m, n, k)
    torch.testing.assert_close(c, a @ b, rtol=2e-2, atol=2e-1)


def tuned_matmul(decorator: Decorator, configs: list[triton.Config]) -> Any:
    """The matrix product with EVEN_K computed below the tuner from each candidate's BK."""
    even = triton.heuristics({"EVEN_K": lambda args: args["K"] % args["BK"] == 0})(matmul)
    return decorator(configs=configs, key=["M", "N", "K"])(even)


@pytest.mark.parametrize(("option", "before"), [("restore_value", 5.0), ("reset_to_zero", 0.0)])
def test_an_argument_in_place_is_as_promised_when_the_chosen_config_runs(
    autotune: Decorator, option: str, before: float
) -> None:
    tuner = autotune(configs=blocks(128, 512, 1024), key=["n"], **{option: ["acc"]})(accumulate)
    x = torch.randn(N, device="cuda")
    acc = torch.full_like(x, 5.0)
    for count in (1, 2):
        tuner[grid](acc, x, N)
        torch.testing.assert_close(acc, before + count * x)


def test_matmul_with_heuristics(autotune: Decorator) -> None:
    """EVEN_K follows the candidate's BK: K = 96 is even for 32, uneven for 64."""
    configs = [triton.Config({"BM": 64, "BN": 64, "BK": bk}, num_stages=2) for bk in (32, 64)]
    tuner = tuned_matmul(autotune, configs)
    multiply(tuner, 256, 128, 96)
    multiply(tuner, 128, 256, 256)
    multiply(tuner, 256, 128, 96)
    assert len(tuner.cache) == 2


def test_kernel_used_eagerly_and_compiled(autotune: Decorator) -> None:
    """A tuner that has tuned eagerly still works inside a compiled graph, and the other way round."""
    tuner = autotune(configs=blocks(128, 512), key=["n"])(add)

    def total(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        tuner[grid](x, y, out, x.numel())
        return out

    torch._dynamo.reset()
    x, y, _ = pair()
    for function in (total, torch.compile(total, fullgraph=True), total):
        torch.testing.assert_close(function(x, y), x + y)


def test_tuned_kernel_in_a_cuda_graph(autotune: Decorator) -> None:
    """A kernel tuned beforehand is captured and replayed with new data."""
    tuner = autotune(configs=blocks(128, 512), key=["n"])(add)
    x, y, out = pair()
    tuner[grid](x, y, out, N)
    graph = capture(lambda: tuner[grid](x, y, out, N))
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.testing.assert_close(out, x + y)


def test_untuned_kernel_in_a_cuda_graph(forecast: Decorator) -> None:
    """Nothing can be timed during capture: ours says so, and works once it was called outside."""
    from forecast_autotune.errors import CaptureError

    tuner = forecast(configs=blocks(128, 512), key=["n"])(add)
    x, y, out = pair()
    with pytest.raises(CaptureError):
        capture(lambda: tuner[grid](x, y, out, N))
    assert tuner.cache == {}
    tuner[grid](x, y, out, N)
    torch.testing.assert_close(out, x + y)


def test_stored_decision_in_a_cuda_graph(tmp_path: Path) -> None:
    """A decision that another tuner stored is used during capture."""
    options: dict[str, Any] = {"configs": blocks(128, 512), "key": ["n"]}
    first, second = (ours(store=tmp_path)(**options)(add) for _ in range(2))
    x, y, out = pair()
    first[grid](x, y, out, N)
    out.fill_(math.nan)
    capture(lambda: second[grid](x, y, out, N)).replay()
    torch.testing.assert_close(out, x + y)
    assert second.best_config == first.best_config


def test_a_miss_in_a_cuda_graph_that_is_allowed(forecast: Decorator) -> None:
    """Inside the block an undecided key is launched with a forecast, compiled if need be; afterwards it is tuned."""
    from forecast_autotune import allow_capture_misses
    from forecast_autotune.records import Evidence

    tuner: Any = forecast(configs=blocks(128, 512), key=["n"])(add)
    x, y, out = pair()
    with allow_capture_misses() as misses:
        graph = capture(lambda: tuner[grid](x, y, out, N))
    assert [miss.decision.evidence for miss in misses] == [Evidence.FORECAST]
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.testing.assert_close(out, x + y)
    tuner[grid](x, y, out, N)
    assert tuner.decision.evidence is Evidence.MEASURED


def test_prepared_keys_in_a_cuda_graph(forecast: Decorator) -> None:
    """Keys are decided on copies: the tensors that are given stay as they are."""
    from forecast_autotune import prepare

    tuner: Any = forecast(configs=blocks(128, 512), key=["n"])(accumulate)
    x = torch.randn(N, device="cuda")
    out = torch.zeros(N, device="cuda")
    done = prepare(tuner, [dict(zip(tuner.arg_names, (out, x, N), strict=False), grid=grid)])
    assert (done.count("decided"), float(out.abs().max())) == (1, 0.0)
    capture(lambda: tuner[grid](out, x, N)).replay()
    torch.testing.assert_close(out, x)


def test_a_kernel_of_tuples_is_tuned_once_for_each_dtype(tmp_path: Path) -> None:
    for dtype, evidence in (
        (torch.float16, "measured"),
        (torch.float16, "stored"),
        (torch.bfloat16, "measured"),
    ):
        tuner = ours(store=Store(tmp_path), mode="exhaustive")(LISTED, key=["n"])(add_all.fn)
        x, y, out = pair(1000)
        tuner[grid](Pair(x, (y.to(dtype), x)), out, 1000)
        torch.testing.assert_close(out, 2 * x + y.to(dtype).float())
        assert tuner.decision.evidence == evidence


@pytest.mark.parametrize("number", range(20))
def test_a_longer_list_changes_no_bit_where_bits_are_preferred(number: int, tmp_path: Path) -> None:
    """Kernels of the corpus: every second config first, then all. `-s` shows the cost."""
    case = unseen_cases(20, None)[number]
    listed, data = kernels.configs(case), case.make("cuda")
    outputs: list[list[torch.Tensor]] = []
    for configs in (listed[::2], listed):
        decorate = ours(store=tmp_path, prefer="bits")
        tuner: Any = decorate(configs, list(case.key), reset_to_zero=list(case.reset_to_zero))(case.kernel)
        kernels.reset(case, data)
        tuner[data["grid"]](*data["args"], **data["kwargs"])
        outputs.append([x.clone() for x in data["outputs"]])
    print(f"\n{case.name}: {tuner.decision.reason}")
    same = all(map(torch.equal, *(map(lambda x: x.view(torch.uint8), run) for run in outputs)))
    assert same or "differs from itself" in tuner.decision.reason
