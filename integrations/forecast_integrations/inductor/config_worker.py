"""The work of a compile worker for the configs of a generated kernel.

Workers import this module by its name, so it imports nothing of ours.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

KINDS = ("POINTWISE", "REDUCTION", "PERSISTENT_REDUCTION")
"""Inductor's heuristics of the kernels whose configs are descended."""
OTHER_CONFIGS = "forecast_other_configs"
"""Attribute of a kernel: configs of its list that no worker has compiled with it."""


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


def compile_config(job: ConfigJob, environment: Mapping[str, str]) -> None:
    """Compile it with the worker's assembler and these variables (where caches are).

    It fills Triton's cache, and no more. Where it does not compile, the timing will meet the failure.
    """
    from torch._inductor.runtime import compile_tasks

    os.environ.update(environment)
    choose: Any = getattr(compile_tasks, "_set_triton_ptxas_path", None)
    if choose is not None:
        choose()
    kernel = _kernel_of(job.path, job.kernel)
    config = copy.deepcopy(kernel.configs[0])
    config.kwargs = dict(job.kwargs)
    config.num_warps, config.num_stages = job.num_warps, job.num_stages
    with contextlib.suppress(Exception):
        kernel._precompile_config(config)


@functools.lru_cache(maxsize=16)
def _kernel_of(path: str, name: str) -> Any:
    from torch._inductor.runtime.compile_tasks import _reload_python_module

    return getattr(_reload_python_module(PurePath(path).stem, path), name)


def compile_first_config(
    load_kernel: Callable[[], Any], environment: dict[str, str], settings: dict[str, Any]
) -> Any:
    """Inductor's `_worker_compile_triton`, which compiles a kernel's configs one after the other, for one of them.

    The others compile side by side, as `ConfigJob`s. A config that does not compile alone compiles with its whole list.
    """
    from torch._inductor.runtime import compile_tasks

    def load_one() -> Any:
        kernel = load_kernel()
        keep_first_config(kernel)
        return kernel

    try:
        return compile_tasks._worker_compile_triton(load_one, environment, settings)
    except Exception:
        return compile_tasks._worker_compile_triton(load_kernel, environment, settings)


class CompileTask:
    """A job for Inductor's workers in place of `_worker_compile_triton`, which pickles as the original.

    `first_only` says, when a kernel is submitted, whether one of its configs compiles with it, or all.
    """

    def __init__(self, first_only: Callable[[], bool]) -> None:
        self._first_only = first_only

    def __call__(self, *args: Any) -> Any:
        """Compile a kernel in this process."""
        return self._function()(*args)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any]]:
        return _itself, (self._function(),)

    def _function(self) -> Callable[..., Any]:
        from torch._inductor.runtime import compile_tasks

        return compile_first_config if self._first_only() else compile_tasks._worker_compile_triton


def _itself(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def is_descended(kernel: Any) -> bool:
    """Whether coordinate descent is for this kernel, and configs compiled ahead would be used.

    A combination of kernels has the configs of its parts, which Inductor tunes one after the other.
    """
    return bool(
        kind_of(kernel) in KINDS
        and kernel.inductor_meta.get("coordinate_descent_tuning")
        and kernel.device_props.type == "cuda"
        and kernel.filename
        and not kernel.inductor_meta.get("combo_grid_meta")
        and not getattr(kernel, "deterministic_mode", False)
    )


def kind_of(kernel: Any) -> str:
    """The name of the heuristic that made the kernel's configs."""
    return str(getattr(kernel.heuristic_type, "name", kernel.heuristic_type))


def keep_first_config(kernel: Any) -> None:
    """Leave one config in the list of a kernel that is descended; the others go to `OTHER_CONFIGS`."""
    if not is_descended(kernel) or not kernel.configs or len(kernel.configs) < 2:
        return
    configs = list(kernel.configs)
    first = configs[min(_place_of_first(kernel), len(configs) - 1)]
    kernel.configs = [first]
    setattr(kernel, OTHER_CONFIGS, [config for config in configs if config is not first])


def _place_of_first(kernel: Any) -> int:
    """Which of the configs Inductor itself would take without max-autotune: by the order of a reduction's axes.

    The lists are those of reductions in `torch/_inductor/runtime/triton_heuristics.py`.
    """
    hint = getattr(kernel.inductor_meta.get("reduction_hint"), "name", "")
    if kind_of(kernel) == "PERSISTENT_REDUCTION":
        return len(kernel.configs) - 1 if hint == "OUTER" else 0
    return {"OUTER": 1, "OUTER_TINY": 2}.get(hint, 0) if kind_of(kernel) == "REDUCTION" else 0
