"""What candidates do to a device: a source that is sent to a cell, and not imported by the tests."""

# mypy: ignore-errors
import contextlib
import os

import torch
import triton
import triton.language as tl


@triton.jit
def stray(p):
    tl.store(p + (1 << 40), 1.0)


def honest():
    a = torch.ones(64, 64, device="cuda")
    return float((a @ a)[0, 0])


def illegal_address():
    stray[(1,)](torch.zeros(16, device="cuda"))
    torch.cuda.synchronize()


def device_assert():
    torch.zeros(4, device="cuda")[torch.tensor([1 << 20], device="cuda")]
    torch.cuda.synchronize()


def poisons_in_silence():
    with contextlib.suppress(Exception):
        illegal_address()
    return "fine"


def hangs():
    torch.cuda._sleep(1 << 42)
    torch.cuda.synchronize()


def hangs_and_leaves():
    import os

    torch.cuda._sleep(1 << 42)
    os._exit(3)


def devices():
    return torch.cuda.device_count()


def toolchain():
    """What Triton's cache holds before this process launches anything."""
    cache = os.environ["TRITON_CACHE_DIR"]
    return sorted(name for _, _, names in os.walk(cache) for name in names)
