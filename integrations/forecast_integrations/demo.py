"""One live comparison: a matrix multiplication tuned by us and by `triton.autotune`, both from nothing."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.runtime.autotuner import Autotuner

from forecast_autotune.records.codec import Record
from forecast_autotune.settings import Mode
from forecast_autotune.store import Store
from forecast_integrations.device import current_device
from forecast_integrations.triton import upstream
from forecast_integrations.triton.decorator import autotune
from forecast_integrations.triton.patch import patch_triton, unpatch_triton
from forecast_integrations.triton.problem.describe import to_config
from forecast_integrations.triton.protocols import LaunchConfig, Tuner
from forecast_integrations.triton.timer.timers import times_in_turns

if TYPE_CHECKING:
    from triton.runtime.jit import JITFunction


def _matmul(  # type: ignore[no-untyped-def]
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    stride_am,
    stride_bk,
    stride_cm,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """c = a @ b for row-major matrices, fp32 accumulation, programs grouped so that b stays in L2."""
    pid = tl.program_id(0)
    rows_of_programs = tl.cdiv(M, BLOCK_M)
    per_group = GROUP_M * tl.cdiv(N, BLOCK_N)
    first = (pid // per_group) * GROUP_M
    size = min(rows_of_programs - first, GROUP_M)
    pid_m = first + (pid % per_group) % size
    pid_n = (pid % per_group) // size
    rows = (pid_m * BLOCK_M + tl.arange(0, BLOCK_M)) % M
    columns = (pid_n * BLOCK_N + tl.arange(0, BLOCK_N)) % N
    inner = tl.arange(0, BLOCK_K)
    a = a_ptr + rows[:, None] * stride_am + inner[None, :]
    b = b_ptr + inner[:, None] * stride_bk + columns[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, tl.cdiv(K, BLOCK_K)):
        left = tl.load(a, mask=inner[None, :] < K - k * BLOCK_K, other=0.0)
        right = tl.load(b, mask=inner[:, None] < K - k * BLOCK_K, other=0.0)
        total = tl.dot(left, right, total)
        a += BLOCK_K
        b += BLOCK_K * stride_bk
    rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (rows[:, None] < M) & (columns[None, :] < N)
    tl.store(c_ptr + rows[:, None] * stride_cm + columns[None, :], total.to(tl.float16), mask=inside)


def configs() -> list[triton.Config]:
    """The 72 configs of the demo."""
    return [
        triton.Config(
            {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": 8}, num_warps=warps, num_stages=stages
        )
        for m in (64, 128, 256)
        for n in (64, 128, 256)
        for k in (32, 64)
        for warps in (4, 8)
        for stages in (3, 4)
    ]


@dataclass(frozen=True)
class TunerResult:
    """One tuner's search and choice."""

    seconds: float
    """Wall seconds of its first call."""
    measured: int
    config: str
    ms: float
    """Its chosen config, timed again in turns with the other's."""


@dataclass(frozen=True)
class Comparison(Record, derived={"speedup": attrgetter("speedup"), "regret": attrgetter("regret")}):
    """Both tuners on one problem."""

    size: int
    device: str
    candidates: int
    forecast: TunerResult
    exhaustive: TunerResult
    reason: str
    """Our decision's own words."""
    stated_risk: float
    tolerance: float

    @property
    def speedup(self) -> float:
        """Ratio of Triton's tuning time to ours."""
        return self.exhaustive.seconds / self.forecast.seconds

    @property
    def regret(self) -> float:
        """Slowdown of our config against `triton.autotune`'s; negative when it is faster."""
        return self.forecast.ms / self.exhaustive.ms - 1


def compare(
    chosen: Sequence[triton.Config] | None = None,
    size: int = 4096,
    say: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Tune `size`^3 fp16 matmul with both tuners and time both choices in turns.

    Each starts with an empty compile cache, we with an empty store, too. `say` is told what begins.
    Needs a device that can launch kernels.
    """
    import torch

    candidates = list(chosen or configs())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device=device).manual_seed(0)
    a, b = (torch.randn((size, size), device=device, generator=generator).half() for _ in range(2))
    c = torch.empty((size, size), device=device, dtype=torch.float16)

    def call(kernel: JITFunction | Autotuner, **extra: object) -> object:
        def grid(meta: Mapping[str, int]) -> tuple[int]:
            return (triton.cdiv(size, meta["BLOCK_M"]) * triton.cdiv(size, meta["BLOCK_N"]),)

        return kernel[grid](a, b, c, size, size, size, a.stride(0), b.stride(0), c.stride(0), **extra)

    # The driver's start belongs to neither: a small kernel is compiled and launched first.
    with _fresh_cache():
        call(triton.jit(_matmul), BLOCK_M=16, BLOCK_N=16, BLOCK_K=16, GROUP_M=1)
    names = ["M", "N", "K"]
    with _fresh_cache(), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        say(f"forecast_autotune: {len(candidates)} configs")
        own_tuner = autotune(configs=candidates, key=names, store=Store(Path(folder)), mode=Mode.TUNE)(
            triton.jit(_matmul)
        )
        our_seconds = _seconds_of(lambda: call(own_tuner))
        decision = own_tuner.decision
        assert decision is not None  # there was more than one config to choose from
    with _fresh_cache(), _without_patch():
        say(f"triton.autotune: {len(candidates)} configs, one by one")
        triton_tuner = triton.autotune(configs=candidates, key=names)(triton.jit(_matmul))
        their_seconds = _seconds_of(lambda: call(triton_tuner))
    say("timing both choices in turns")
    runs = [_bind_call(call, tuner) for tuner in (own_tuner, triton_tuner)]
    times = [statistics.median(sample) for sample in times_in_turns(runs)]
    return Comparison(
        size=size,
        device=current_device().name,
        candidates=len(candidates),
        forecast=TunerResult(our_seconds, decision.measured, _config_text(own_tuner.best_config), times[0]),
        exhaustive=TunerResult(
            their_seconds, len(candidates), _config_text(triton_tuner.best_config), times[1]
        ),
        reason=decision.reason,
        stated_risk=decision.stated_risk,
        tolerance=decision.tolerance,
    )


def _seconds_of(call: Callable[[], object]) -> float:
    synchronize = triton.runtime.driver.active.get_device_interface().synchronize
    synchronize()
    begin = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - begin


def _bind_call(call: Callable[..., object], tuner: Tuner) -> Callable[[], object]:
    # Straight to the compiled kernel: neither tuner's own dispatch is part of the comparison.
    config = tuner.best_config
    return lambda: call(tuner.fn, **config.all_kwargs())


def _config_text(config: LaunchConfig) -> str:
    return str(to_config(config))


@contextmanager
def _fresh_cache() -> Iterator[None]:
    """An empty Triton compile cache for the length of the block."""
    before = os.environ.get("TRITON_CACHE_DIR")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ["TRITON_CACHE_DIR"]
            else:
                os.environ["TRITON_CACHE_DIR"] = before


@contextmanager
def _without_patch() -> Iterator[None]:
    """Triton's own tuner, also under FORECAST_AUTOTUNE=1."""
    was_patched = upstream.is_served(Autotuner)
    unpatch_triton()
    try:
        yield
    finally:
        if was_patched:
            patch_triton()
