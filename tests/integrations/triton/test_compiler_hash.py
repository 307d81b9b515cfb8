"""Triton's hash of its own files is computed by one child for all, and by this process while it waits."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forecast_autotune import autotune
from forecast_integrations.triton.compile import compiler_hash
from forecast_integrations.triton.compile.compiler_hash import CompilerHash
from tests.integrations.null import binaries, blocks, child, double, fresh, launch
from tests.integrations.parallel_children import run_in_children

module = compiler_hash._module()
HERE = os.getpid()


@pytest.fixture
def computed_by(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A process that knows no hash; every computation leaves its pid in this file, on a line of its own."""
    text, record = module.triton_key(), tmp_path / "computed"
    record.touch()

    @functools.lru_cache
    def triton_key() -> str:
        with record.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return str(text)

    monkeypatch.setattr(module, "triton_key", triton_key)
    yield record
    compiler_hash.COMPILER_HASH.stop()


def test_children_take_it_from_one_of_them(computed_by: Path) -> None:
    shared = CompilerHash()
    shared.start()

    def digest() -> str:
        shared.adopt()
        return hashlib.sha256(module.triton_key().encode()).hexdigest()

    answers = list(run_in_children([digest] * 3, 20.0))
    (computer,) = computed_by.read_text().split()
    assert int(computer) != HERE
    shared.settle()
    assert answers == [hashlib.sha256(module.triton_key().encode()).hexdigest()] * 3
    assert computed_by.read_text().split() == [computer, str(HERE)], "this process asks Triton itself"
    shared.start()
    assert shared._children is None, "it is known"


def test_a_hash_that_never_comes_is_computed(computed_by: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_hash, "_WAIT_S", 0.05)
    shared = CompilerHash()
    monkeypatch.setattr(shared, "compute", lambda: None)
    shared.start()

    def adopt() -> str:
        shared.adopt()
        return str(module.triton_key())

    assert list(run_in_children([adopt], 20.0)) == [module.triton_key()]
    shared.stop()


def test_a_text_too_long_to_share_is_not_shared(computed_by: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_hash, "_BYTES", 16)
    shared = CompilerHash()
    shared.start()

    def adopt() -> str:
        shared.adopt()
        return str(module.triton_key())

    assert list(run_in_children([adopt], 20.0)) == [module.triton_key()]
    shared.stop()


def test_a_forked_process_computes_its_own(computed_by: Path) -> None:
    """What its parent has begun is not the fork's to wait for, nor to end."""
    shared = CompilerHash()
    shared.start()

    def restart() -> None:
        shared.start()
        shared.settle()

    assert os.waitpid(child(restart), 0)[1] == 0

    def adopt() -> str:
        shared.adopt()
        return str(module.triton_key())

    assert list(run_in_children([adopt], 20.0)) == [module.triton_key()]
    shared.stop()


def test_a_decision_computes_it_once_here_and_once_in_a_child(device: Any, computed_by: Path) -> None:
    tuner = autotune(configs=blocks(128, 256, 512, 1024), key=["n"], store=False, mode="exhaustive")(
        fresh(double)
    )
    launch(tuner)
    assert tuner.decision.measured == 4
    where = [int(pid) for pid in computed_by.read_text().split()]
    assert where.count(HERE) == 1
    assert len(where) <= 2
    assert binaries() == 4, "what children compiled is what this process looked for"
