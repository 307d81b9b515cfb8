"""A null device whose launches do something to their tensors, and tuners over such a kernel."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from forecast_autotune import autotune
from forecast_autotune.policy import Exhaustive
from forecast_integrations.triton.null_device import NullDevice
from tests.integrations.null import configs, fresh
from tests.waiting import under_way


@triton.jit
def increment(x, n, BLOCK: tl.constexpr):
    """x += 1, in place: every launch more or less shows."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)


class IncrementingDevice(NullDevice):
    """Adds one to the tensors of every launch, as `increment` does."""

    def _launcher(self, src: object, metadata: Any) -> Callable[..., None]:
        counted = super()._launcher(src, metadata)

        def launch(*args: object) -> None:
            counted()
            for value in args:
                if isinstance(value, torch.Tensor):
                    value.add_(1)

        return launch


def tuned(**options: Any) -> Any:
    """A tuner over `increment` that knows nothing yet, and times all configs: 4 warps and 3 stages are fastest.

    What is not timed, for want of time, depends on how busy the machine is.
    """
    listed = options.pop("listed", None) or configs((2, 4, 8), (2, 3))
    given = {"store": False, "policy": Exhaustive(), **options}
    return autotune(configs=listed, key=["n"], **given)(fresh(increment))


def launch(tuner: Any, x: torch.Tensor) -> None:
    """Add one to a tensor."""
    n = x.numel()
    tuner[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, n)


def launch_until(done: Callable[[], object], tuner: Any, x: torch.Tensor) -> int:
    """Launch until something holds, looked at after each launch; returns how many launches that took."""
    until = time.monotonic() + 120
    for count in itertools.count(1):
        launch(tuner, x)
        if done():
            return count
        assert time.monotonic() < until, under_way()
        time.sleep(0.001)
    raise AssertionError


def launch_until_settled(tuner: Any, x: torch.Tensor) -> int:
    """Launch until a choice is final; returns how many launches that took."""
    return launch_until(lambda: tuner.cache, tuner, x)
