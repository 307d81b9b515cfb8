"""A kernel repository of the Hub, loaded by the package `kernels` itself, brings the bundle that ships inside."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

kernels: Any = pytest.importorskip("kernels", reason="needs the package kernels")
from kernels import importer

from forecast_autotune import Decision, Evidence
from forecast_autotune.store import Store
from forecast_autotune.store.bundles import write_bundle
from forecast_autotune.store.layers import BESIDE
from forecast_autotune.store.merging import StoreFolder
from forecast_integrations.triton import publication

MODULE = """
import torch
import triton
import triton.language as tl

CONFIGS = [triton.Config({"BLOCK": b}, num_warps=w) for b in (128, 256, 512) for w in (1, 2, 4, 8)]


@triton.autotune(CONFIGS, key=["n"])
@triton.jit
def shift_kernel(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)


def shift(x):
    out = torch.empty_like(x)
    shift_kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, out, x.numel())
    return out
"""


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch, triton_patch: Any, tmp_path: Path) -> Any:
    """Nothing is asked of the Hub: a connection would fail the test."""
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a connection to the network"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    yield
    forget_loaded()


def forget_loaded() -> None:
    """As in a new process: nothing was loaded."""
    for loaded in kernels.get_loaded_kernels():
        sys.modules.pop(loaded.metadata.id, None)
    importer._loaded_kernels.clear()


def repository(folder: Path, name: str) -> Path:
    """A repository as `kernel-builder` lays it out, for any architecture, on the backend that torch has here."""
    backend = "cpu" if torch.version.cuda is None else "cuda"
    variant = folder / "build" / f"torch-{backend}"
    variant.mkdir(parents=True)
    (variant / "__init__.py").write_text(MODULE)
    about = {
        "id": name,
        "name": "shift",
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend},
    }
    (variant / "metadata.json").write_text(json.dumps(about))
    return variant


def launch(folder: Path, n: int = 4096) -> Decision:
    """Load a repository, call its kernel, and say how that was decided."""
    heard: list[Decision] = []
    hear = lambda name, decision: heard.append(decision)  # noqa: E731
    publication.LISTENERS.append(hear)
    try:
        kernels.get_local_kernel(folder).shift(torch.empty(n))
    finally:
        publication.LISTENERS.remove(hear)
    (decision,) = heard
    return decision


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Decision]:
    """A repository with the bundle of what was tuned on the machine of whoever published it."""
    variant = repository(tmp_path / "publisher", "_shift_publisher")
    decision = launch(tmp_path / "publisher")
    write_bundle(StoreFolder(Store.default().root), variant / BESIDE / "h200")
    # A user's machine: another place, another build, an empty store, no compiled kernels.
    forget_loaded()
    (tmp_path / "publisher").rename(tmp_path / "user")
    about = tmp_path / "user" / "build" / variant.name / "metadata.json"
    about.write_text(about.read_text().replace("_shift_publisher", "_shift_user"))
    monkeypatch.setenv("FORECAST_AUTOTUNE_CACHE_DIR", str(tmp_path / "user_store"))
    return tmp_path / "user", decision


@pytest.mark.parametrize("opened_before", [False, True])
def test_the_bundle_inside_decides_and_nothing_is_measured(
    shipped: tuple[Path, Decision], device: Any, opened_before: bool
) -> None:
    """Also in a store that was opened before the kernel was loaded."""
    folder, published = shipped
    assert published.evidence is Evidence.MEASURED
    assert published.measured > 0
    if opened_before:
        assert list(Store.default().decisions()) == []
    before = device.launches
    found = launch(folder)
    assert (found.evidence, found.measured) == (Evidence.STORED, 0)
    assert found.chosen == published.chosen
    assert device.launches == before + 1, "the call's own launch"


def test_a_key_that_the_bundle_does_not_hold_is_tuned(shipped: tuple[Path, Decision]) -> None:
    found = launch(shipped[0], 8192)
    assert found.evidence is Evidence.MEASURED
    assert found.measured > 0
