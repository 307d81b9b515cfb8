"""A device at its working clock before anything on it is timed.

While kernels compile, a device idles, and its clock falls: an H200's from 1980 to 345 MHz. What is timed
first then looks slower than it is. Inductor times the vendor's kernel first.
"""

from __future__ import annotations

import time
from collections.abc import Callable

WARM_UP_S = 0.03
"""Seconds of load after which clocks are up."""
IDLE_S = 0.5
"""Seconds without load after which they may have fallen."""
_BYTES = 64 << 20


def keep_busy(step: Callable[[], object], wait: Callable[[], object], seconds: float = WARM_UP_S) -> int:
    """Keep a device busy with `step`s for a moment; `wait` waits for all of them. Returns how many it took."""
    limit = time.perf_counter() + seconds
    steps = 0
    while time.perf_counter() < limit:
        for _ in range(50):
            step()
        steps += 50
        wait()
    return steps


def warm_up_cuda() -> None:
    """The same for the current CUDA device, in the middle of a compilation; nothing where none is in use."""
    import torch
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    if torch.cuda.is_initialized():
        with unset_fake_temporarily():
            buffer = torch.empty(_BYTES, dtype=torch.uint8, device="cuda")
            keep_busy(buffer.zero_, torch.cuda.synchronize)
