"""What a compile worker does for the configs of a generated kernel, and for which kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.hints import DeviceProperties, HeuristicType, ReductionHint

from forecast_integrations.inductor.config_worker import (
    OTHER_CONFIGS,
    compile_config,
    is_descended,
    keep_first_config,
)
from tests.integrations.inductor.generated_kernels import (
    generated_kernel,
    job,
)


@pytest.mark.parametrize(
    "change",
    [
        {"heuristic_type": HeuristicType.TEMPLATE},
        {"inductor_meta": {}},
        {"inductor_meta": {"coordinate_descent_tuning": True, "combo_grid_meta": {"num_kernels": 2}}},
        {"filename": None},
        {"deterministic_mode": True},
        {"device_props": DeviceProperties(type="cpu", index=0, multi_processor_count=8, cc=0)},
    ],
)
def test_kernels_that_are_not_descended_are_left_alone(change: dict[str, Any]) -> None:
    kernel = generated_kernel()
    assert is_descended(kernel)
    vars(kernel).update(change)
    assert not is_descended(kernel)


SOURCE = """
import triton
import triton.language as tl
from torch._inductor.runtime import triton_heuristics
from torch._inductor.runtime.hints import DeviceProperties

@triton_heuristics.pointwise(
    size_hints={"x": 1024},
    filename=__file__,
    triton_meta={
        "signature": {"out_ptr0": "*fp32", "xnumel": "i32", "XBLOCK": "constexpr"},
        "device": DeviceProperties(
            type="cuda", index=0, multi_processor_count=132, cc=90, major=9, warp_size=32,
            regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048,
        ),
        "constants": {},
        "configs": [{}],
    },
    inductor_meta={"grid_type": "Grid1D", "kernel_name": "triton_poi_one", "mutated_arg_names": []},
    min_elem_per_thread=0,
)
@triton.jit
def triton_(out_ptr0, xnumel, XBLOCK: tl.constexpr):
    x = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    tl.store(out_ptr0 + x, x * 2.0, x < xnumel)
"""


def test_a_worker_fills_tritons_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No device is needed to compile for one, but Inductor asks for its driver."""
    monkeypatch.setattr(triton_helpers, "set_driver_to_gpu", lambda: None)
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    path, cache = tmp_path / "c1.py", tmp_path / "cache"
    path.write_text(SOURCE, encoding="utf-8")
    environment = {"TRITON_CACHE_DIR": str(cache)}
    compile_config(job(256, 2, str(path)), environment)
    assert len(list(cache.rglob("*.cubin"))) == 1
    compile_config(job(256, 2, str(path)), environment)
    assert len(list(cache.rglob("*.cubin"))) == 1
    compile_config(job(100, 2, str(path)), environment)  # no power of two: it does not compile


@pytest.mark.parametrize(
    ("kind", "hint", "first"),
    [
        ("POINTWISE", None, 0),
        ("REDUCTION", "INNER", 0),
        ("REDUCTION", "OUTER", 1),
        ("REDUCTION", "OUTER_TINY", 2),
        ("PERSISTENT_REDUCTION", "OUTER", 3),
    ],
)
def test_a_worker_compiles_the_config_that_inductor_would_take_alone(
    kind: str, hint: str | None, first: int
) -> None:
    kernel = generated_kernel()
    kernel.heuristic_type = HeuristicType[kind]
    kernel.inductor_meta["reduction_hint"] = None if hint is None else ReductionHint[hint]
    kernel.configs = [triton.Config({"XBLOCK": 1 << place}) for place in range(4)]
    keep_first_config(kernel)
    assert [c.kwargs["XBLOCK"] for c in kernel.configs] == [1 << first]
    assert len(getattr(kernel, OTHER_CONFIGS)) == 3


POOL = """
import sys, time
from torch._inductor.async_compile import AsyncCompile
from forecast_integrations.inductor.config_worker import ConfigJob
from forecast_integrations.inductor.descent import inductor_workers

AsyncCompile.warm_pool()
end = time.perf_counter() + 120.0
while (ahead := inductor_workers()) is None and time.perf_counter() < end:
    time.sleep(0.05)
jobs = [ConfigJob(sys.argv[1], "triton_", (("XBLOCK", 64 << i),), 4, 1) for i in range(4)]
ahead.add(jobs)
while any(job not in ahead._begun for job in jobs) and time.perf_counter() < end:
    time.sleep(0.01)
print([ahead.has_ended(job, end) for job in jobs])
"""
"""All jobs through Inductor's own pool of workers, one after the other."""


@pytest.mark.slow
def test_inductors_own_workers_compile_ahead(tmp_path: Path) -> None:
    path, cache = tmp_path / "c1.py", tmp_path / "cache"
    stub = "from torch._inductor.runtime import triton_helpers\ntriton_helpers.set_driver_to_gpu = lambda: None\n"
    path.write_text(stub + SOURCE, encoding="utf-8")
    env = {k: v for k, v in os.environ.items() if not k.startswith("TORCH")}
    env |= {"TORCHINDUCTOR_COMPILE_THREADS": "2", "TRITON_CACHE_DIR": str(cache)}
    env |= {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", POOL, str(path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip() == "[True, True, True, True]", done.stderr
    assert len(list(cache.rglob("*.cubin"))) == 4
