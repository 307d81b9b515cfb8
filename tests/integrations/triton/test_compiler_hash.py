"""Triton's hash of its own files is computed once, by a thread of this process, and children are told."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forecast_autotune import autotune
from forecast_integrations.triton.compile import first_launch
from forecast_integrations.triton.compile.first_launch import CompilerHash
from tests.integrations.null import binaries, blocks, child, double, fresh, launch
from tests.integrations.parallel_children import run_in_children

module = first_launch._module()
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
    first_launch.COMPILER_HASH.stop()


def adopted(shared: CompilerHash, count: int) -> list[str]:
    """What so many children use, as they compile."""

    def adopt() -> str:
        shared.adopt()
        return str(module.triton_key())

    return list(run_in_children([adopt] * count, 20.0))


def test_children_take_it_from_this_process(computed_by: Path) -> None:
    shared = CompilerHash()
    shared.start()
    assert adopted(shared, 3) == [module.triton_key()] * 3
    assert computed_by.read_text().split() == [str(HERE)]
    shared.settle()
    shared.start()
    assert shared._shared is None, "it is known"


def test_a_hash_that_never_comes_is_computed(computed_by: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_launch, "_WAIT_S", 0.05)
    shared = CompilerHash()
    monkeypatch.setattr(shared, "_compute", lambda: None)
    shared.start()
    assert adopted(shared, 1) == [module.triton_key()]
    shared.stop()


def test_a_text_too_long_to_share_is_not_shared(computed_by: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_launch, "_BYTES", 16)
    shared = CompilerHash()
    shared.start()
    assert adopted(shared, 1) == [module.triton_key()]
    shared.stop()


def test_a_forked_process_computes_its_own(computed_by: Path) -> None:
    """What its parent has begun is not the fork's to wait for, nor to end."""
    shared = CompilerHash()
    shared.start()

    def restart() -> None:
        shared.start()
        shared.settle()

    assert os.waitpid(child(restart), 0)[1] == 0
    assert adopted(shared, 1) == [module.triton_key()]
    shared.stop()


@pytest.fixture
def hashing(monkeypatch: pytest.MonkeyPatch, computed_by: Path) -> Iterator[threading.Event]:
    """A machine with a GPU's driver, where the hash takes until this is set."""
    compute, may_end = module.triton_key, threading.Event()

    @functools.lru_cache
    def slow() -> str:
        if os.getpid() == HERE:
            may_end.wait(60)
        return str(compute())

    monkeypatch.setattr(module, "triton_key", slow)
    monkeypatch.setattr(first_launch, "_DEVICE_FILES", (__file__,))
    yield may_end
    may_end.set()


@pytest.mark.parametrize("begun_first", [True, False])
def test_children_take_it_from_the_thread_that_began_early(
    hashing: threading.Event, computed_by: Path, begun_first: bool
) -> None:
    shared = CompilerHash()
    shared.start_early()
    shared.start_early()
    if begun_first:
        shared.start()
        threading.Timer(0.1, hashing.set).start()
    else:
        hashing.set()
        shared.settle()
        shared.start()
    answers = adopted(shared, 2)
    shared.settle()
    assert answers == [module.triton_key()] * 2
    assert computed_by.read_text().split() == [str(HERE)], "once, in this process"
    shared.stop()


def test_without_a_driver_nothing_begins_early(computed_by: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_launch, "_DEVICE_FILES", ("/nowhere/driver",))
    shared = CompilerHash()
    shared.start_early()
    assert shared._thread is None
    assert computed_by.read_text() == ""


def test_a_hash_that_cannot_be_computed_early_is_computed_later(
    computed_by: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, tries = module.triton_key, iter([OSError("the disk"), None])

    @functools.lru_cache
    def fails_once() -> str:
        if (error := next(tries)) is not None:
            raise error
        return str(compute())

    monkeypatch.setattr(module, "triton_key", fails_once)
    monkeypatch.setattr(first_launch, "_DEVICE_FILES", (__file__,))
    shared = CompilerHash()
    shared.start_early()
    shared.settle()
    assert computed_by.read_text().split() == [str(HERE)]


def test_a_decision_computes_it_once(device: Any, computed_by: Path) -> None:
    tuner = autotune(configs=blocks(128, 256, 512, 1024), key=["n"], store=False, mode="exhaustive")(
        fresh(double)
    )
    launch(tuner)
    assert tuner.decision.measured == 4
    assert computed_by.read_text().split() == [str(HERE)]
    assert binaries() == 4, "what children compiled is what this process looked for"
