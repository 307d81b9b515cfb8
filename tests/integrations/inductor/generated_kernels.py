"""Stand-ins for Inductor's generated kernels and its compile workers."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from torch._inductor.runtime.coordinate_descent_tuner import CoordescTuner
from torch._inductor.runtime.hints import DeviceProperties, HeuristicType

from forecast_integrations.inductor.config_worker import ConfigJob
from forecast_integrations.inductor.descent import job_of

DEVICE = DeviceProperties(type="cuda", index=0, multi_processor_count=132, cc=90)
SIGNATURE = {"in_ptr0": "*fp32", "out_ptr0": "*fp32", "xnumel": "i32"}
HINTS = {"x": 1 << 20}


def job(block: int, warps: int = 4, path: str = "/x/c1.py") -> ConfigJob:
    return ConfigJob(path, "triton_", (("XBLOCK", block),), warps, 1)


class Workers:
    """Takes jobs; what it has taken ends when it is told to, or at once."""

    def __init__(self, *, at_once: bool = True) -> None:
        self.taken: list[ConfigJob] = []
        self.futures: dict[ConfigJob, Future[None]] = {}
        self._at_once = at_once

    def __call__(self, given: ConfigJob, environment: Mapping[str, str]) -> Future[None]:
        self.taken.append(given)
        future: Future[None] = Future()
        self.futures[given] = future
        if self._at_once:
            future.set_result(None)
        return future


def milliseconds(config: Any) -> float:
    """A kernel of which blocks of 128 and one warp are best; blocks of 8192 cannot run."""
    block = config.kwargs["XBLOCK"]
    return 1.0 + abs(block - 128) / 128 + config.num_warps / 8


class Kernel(SimpleNamespace):
    """A generated kernel as `CachingAutotuner` has it, whose launches take as long as `milliseconds` says."""

    def _precompile_config(self, config: Any) -> Any:
        if config.kwargs["XBLOCK"] >= 8192:
            raise RuntimeError("out of resources")
        return SimpleNamespace(make_launcher=lambda: SimpleNamespace(config=config))

    def bench(self, launcher: Any) -> float:
        self.timed.append(job_of(self.coordesc_tuner, self.filename, launcher.config))
        return milliseconds(launcher.config)


def generated_kernel(
    block: int = 1024, *, others: tuple[int, ...] = (), name: str = "c1", later_launches: bool = True
) -> Any:
    meta = {"coordinate_descent_tuning": True, "warp_size": 32, "max_threads_per_block": 1024}

    def config(block: int) -> Any:
        return triton.Config({"XBLOCK": block}, num_warps=4, num_stages=1)

    return Kernel(
        heuristic_type=HeuristicType.POINTWISE,
        inductor_meta=meta,
        device_props=DEVICE,
        triton_meta={"signature": SIGNATURE, "device": 0},
        size_hints=HINTS,
        filename=f"/x/{name}.py",
        coordesc_tuner=CoordescTuner(name="triton_", size_hints=HINTS, inductor_meta=meta),
        launchers=[SimpleNamespace(config=config(block))],
        configs=None,
        fn=SimpleNamespace(fn="there"),
        lock=threading.Lock(),
        save_cache_hook=None,
        timed=[],
        forecast_other_configs=[config(other) for other in others],
        forecast_later_launches=later_launches,
    )
