"""The file that is launched in a cell: a variant, or the base kernel, behind one function `run`."""

from __future__ import annotations

VARIANT_FILE = "solution.py"
BASE_FILE = "base_solution.py"

_LAUNCHER_TEMPLATE = """import torch
import triton

import {module} as source
from forecast_autotune.variants.entry import KernelEntry

ENTRY = KernelEntry.of(vars(source), {kernel!r})
triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda"))


def run(_views, _grid, _meta, _options, **named):
    ENTRY.run(_grid, viewed(_views, named), _meta, _options)


def compile_only(_views, _grid, _meta, _options, **named):
    return ENTRY.warmup(_grid, viewed(_views, named), _meta, _options)


def viewed(views, named):
    for name, (shape, stride) in views.items():
        named[name] = named[name].as_strided(shape, stride)
    return named
"""


def launcher_files(kernel: str, base: str, variant: str) -> dict[str, str]:
    """Files of a job, by name. A variant may read the base's: being equal to it is no cheating."""
    return {
        "base_kernel.py": base,
        BASE_FILE: _LAUNCHER_TEMPLATE.format(module="base_kernel", kernel=kernel),
        "variant_kernel.py": variant,
        VARIANT_FILE: _LAUNCHER_TEMPLATE.format(module="variant_kernel", kernel=kernel),
    }
