"""The device that scripts run on: a GPU, or the null device."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import triton
import triton.language as tl


@contextlib.contextmanager
def device(null: bool) -> Iterator[str]:
    """The name under which torch makes inputs: `cuda`, or `meta` (shapes, no memory) on the null device."""
    if not null:
        yield "cuda"
        return
    from forecast_integrations.triton.null_device import null_device

    with null_device():
        yield "meta"


def synchronize() -> None:
    """Wait for the device, real or not."""
    triton.runtime.driver.active.get_device_interface().synchronize()


@triton.jit
def _touch_kernel(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), 1.0)


def warm_up_device(where: str) -> None:
    """Return what every contender may have done before its clock starts: a context and one trivial launch."""
    _touch_kernel[(1,)](torch.empty(32, device=where), BLOCK=32)
    synchronize()
