"""A GPU that is not there: kernels are compiled for real, launches only move a made-up clock."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No variable of the developer decides a test, and no cache outlives one."""
    for name in os.environ:
        if name.startswith("FORECAST_AUTOTUNE") or name.endswith("_AUTOTUNING"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("FORECAST_AUTOTUNE_CACHE_DIR", str(tmp_path / "measurements"))
    monkeypatch.setenv("FORECAST_AUTOTUNE_WORKERS", "2")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "binaries"))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")


@pytest.fixture(scope="session")
def _binaries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("binaries")


@pytest.fixture
def shared_cache(clean_environment: None, monkeypatch: pytest.MonkeyPatch, _binaries: Path) -> None:
    """For tests whose decisions hang on no seconds of a compilation: what one of them has compiled, others find."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(_binaries))


@pytest.fixture
def device(clean_environment: None) -> Iterator[Any]:
    """The active null device; the tests' kernels are fastest with 4 warps and 3 stages."""
    from forecast_integrations.triton.null_device import null_device
    from tests.integrations.null import by_launch_options

    with null_device(by_launch_options) as made:
        yield made


@pytest.fixture(params=["fork", "threads"])
def compiler(request: pytest.FixtureRequest, device: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """A compiler of candidates on the null device."""
    monkeypatch.setenv("FORECAST_AUTOTUNE_COMPILER", request.param)
    return str(request.param)


@pytest.fixture
def triton_patch(device: Any) -> Iterator[Any]:
    """The null device; tuners of Triton's own are served."""
    from forecast_autotune import patch_triton, unpatch_triton

    patch_triton()
    yield device
    unpatch_triton()


@pytest.fixture
def torch_has_triton(device: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The null device; torch finds a backend of Triton's for a processor, which it asks for where there is no GPU."""
    from torch.utils._triton import has_triton
    from triton.backends import backends

    compiler, driver = (
        SimpleNamespace(supports_target=lambda _: False),
        SimpleNamespace(is_active=lambda: False),
    )
    with monkeypatch.context() as patched:
        patched.setitem(backends, "cpu", SimpleNamespace(compiler=compiler, driver=driver))
        has_triton.cache_clear()
        assert has_triton()
        yield device
    has_triton.cache_clear()
