"""One hook for the whole suite: GPU tests need a GPU."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# The first text that Hypothesis draws in a fresh clone takes a second, while it builds its table of
# characters, and more on a busy machine: no reason to fail.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# Before any test loads torch, LightGBM or scikit-learn: on arrays as small as the tests' a second thread only
# gets in the way, of this process and, where the machine is busy, of others. Children inherit it.
for _name in ("OMP_NUM_THREADS", "LOKY_MAX_CPU_COUNT"):
    os.environ.setdefault(_name, "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # So it is behind `nohup ... &`, and children would inherit it: tests of Ctrl-C need it to work.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` on a machine without CUDA; torch loads only if there are such tests."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """`forecast-autotune run` sets variables for the program it runs; no later test may see them."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
