"""What a compile worker does for a config that somebody will time soon: it fills Triton's cache, and no more.

Workers import this module by its name, so it imports nothing of ours.
"""

from __future__ import annotations

import copy
import functools
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any


@dataclass(frozen=True)
class ConfigJob:
    """One config of one generated kernel."""

    path: str
    """Inductor's file with the kernel's source."""
    kernel: str
    """The function's name in there."""
    kwargs: tuple[tuple[str, int], ...]
    num_warps: int
    num_stages: int


def compile_config(job: ConfigJob, environment: Mapping[str, str]) -> float:
    """Compile it with the worker's assembler and these variables (where caches are); the seconds that it took.

    Zero where it does not compile: who times it will meet the failure.
    """
    from torch._inductor.runtime import compile_tasks

    begin = time.perf_counter()
    os.environ.update(environment)
    choose: Any = getattr(compile_tasks, "_set_triton_ptxas_path", None)
    if choose is not None:
        choose()
    kernel = _kernel_of(job.path, job.kernel)
    config = copy.deepcopy(kernel.configs[0])
    config.kwargs = dict(job.kwargs)
    config.num_warps, config.num_stages = job.num_warps, job.num_stages
    try:
        kernel._precompile_config(config)
    except Exception:
        return 0.0
    return time.perf_counter() - begin


@functools.lru_cache(maxsize=16)
def _kernel_of(path: str, name: str) -> Any:
    from torch._inductor.runtime.compile_tasks import _reload_python_module

    return getattr(_reload_python_module(PurePath(path).stem, path), name)
