"""Load once, in a lane's server, what a first compilation loads: its cells, which are forks, begin with it.

To import this module is to do it. A first compilation takes ten times as long as the next one, most of it for
modules of torch and Triton that are imported late.
"""

from __future__ import annotations

import contextlib
import tempfile

import torch
import triton
import triton.language as tl

from forecast_harness.clocks.recording.device import install_device
from forecast_harness.clocks.recording.solution import TensorRecorder
from forecast_harness.sandbox.toolchain import environment_variable

_ARCH = 90


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _double_product(a, b, c, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    where = at[:, None] * BLOCK + at[None, :]
    tl.store(c + where, 2 * tl.dot(tl.load(a + where), tl.load(b + where)))


def compile_once() -> None:
    """Record one launch, as a cell does for a solution."""
    with tempfile.TemporaryDirectory() as folder, environment_variable("TRITON_CACHE_DIR", folder):
        device, recorder = install_device(_ARCH, {}), TensorRecorder()
        with recorder.active():
            a, b = (recorder.give(n, "float16", (32, 32), (32, 1), 0) for n in "ab")
            c = torch.zeros((32, 32), dtype=torch.float32, device=a.device)
            _double_product[(1,)](a[:], b.view(-1), c, BLOCK=32)
        device.launches.clear()


with contextlib.suppress(Exception):  # no ptxas, say: cells find that out, and say so
    compile_once()
