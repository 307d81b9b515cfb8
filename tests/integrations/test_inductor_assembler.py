"""One assembler for all processes of a compilation, the workers', while we are in force."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from torch._inductor import compile_fx
from torch._inductor.runtime import compile_tasks
from triton.backends.nvidia import compiler

from forecast_autotune import autoload_torch_compile, disable_torch_compile, enable_torch_compile
from forecast_autotune.store import Store
from forecast_integrations.inductor.hooks.assembler import VARIABLE, SharedAssembler


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A torch that brings an assembler, as those with CUDA do: the workers' own function looks for it."""
    monkeypatch.delenv(VARIABLE, raising=False)
    inner = tmp_path / "torch" / "_inductor"
    # Up to torch 2.11 it is looked for in torch/bin, in 2.13 one folder further down.
    for folder in (tmp_path / "torch", inner):
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "ptxas").write_text("#!/bin/sh\necho 'Cuda compilation tools, release 99.1, V99'\n")
        (folder / "bin" / "ptxas").chmod(0o755)
    monkeypatch.setattr(compile_tasks, "__file__", str(inner / "runtime" / "compile_tasks.py"))
    compiler.get_ptxas_version.cache_clear()
    yield tmp_path
    os.environ.pop(VARIABLE, None)
    compiler.get_ptxas_version.cache_clear()


def release() -> str:
    """Of the assembler that Triton's cache keys name."""
    return str(compiler.get_ptxas_version(80))


def test_while_enabled_kernels_are_named_by_the_workers_assembler(wheel: Path) -> None:
    """Without us each choice is compiled twice where the releases differ."""
    before = release()
    assert "99.1" not in before
    with enable_torch_compile(store=Store(None)):
        assert os.environ[VARIABLE].startswith(str(wheel))
        assert "99.1" in release()
        with enable_torch_compile(store=Store(None)):
            assert os.environ[VARIABLE].startswith(str(wheel))
        assert "99.1" in release()
    assert VARIABLE not in os.environ
    assert release() == before


def test_a_program_that_compiles_no_graph_keeps_the_assembler_of_its_cache(
    wheel: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FORECAST_AUTOTUNE_CACHE_DIR", str(tmp_path / "store"))
    monkeypatch.setattr(compile_fx, "compile_fx", lambda graph: graph)
    autoload_torch_compile()
    assert VARIABLE not in os.environ
    assert compile_fx.compile_fx("graph") == "graph"
    assert os.environ[VARIABLE].startswith(str(wheel))
    os.environ.pop(VARIABLE)
    compile_fx.compile_fx("graph")
    assert VARIABLE not in os.environ, "once"
    disable_torch_compile()


def test_to_listen_changes_no_assembler(wheel: Path) -> None:
    with enable_torch_compile(store=Store(None), mode="listen"):
        assert VARIABLE not in os.environ


def test_what_the_user_has_named_stays(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "/opt/mine/ptxas")
    with enable_torch_compile(store=Store(None)):
        assert os.environ[VARIABLE] == "/opt/mine/ptxas"
    assert os.environ[VARIABLE] == "/opt/mine/ptxas"
    monkeypatch.delenv(VARIABLE)
    enable_torch_compile(store=Store(None))
    os.environ[VARIABLE] = "/opt/later/ptxas"
    disable_torch_compile()
    assert os.environ[VARIABLE] == "/opt/later/ptxas", "so does what was named since"


def test_a_release_that_was_told_before_torch_named_its_own_is_asked_for_anew(wheel: Path) -> None:
    before = release()
    compile_tasks._set_triton_ptxas_path.__wrapped__()  # as when it compiles in this process
    assert release() == before
    with enable_torch_compile(store=Store(None)):
        assert "99.1" in release()


def test_a_torch_without_an_assembler_is_left_alone_and_one_that_looks_elsewhere_is_told_apart(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for ptxas in wheel.rglob("ptxas"):
        ptxas.unlink()
    assembler = SharedAssembler()
    assembler.share()
    assert VARIABLE not in os.environ
    assembler.restore()
    assert assembler.missing == []
    monkeypatch.delattr(compile_tasks, "_set_triton_ptxas_path")
    assembler = SharedAssembler()
    assembler.share()
    assert assembler.missing == ["compile_tasks._set_triton_ptxas_path"]
