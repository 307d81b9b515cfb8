"""Whatever fails of ours, a tuned kernel launches a config that works, as under `triton.autotune`."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

import forecast_autotune.tuning.loop as loop
from forecast_autotune import autotune
from forecast_autotune.errors import FrozenMissError
from forecast_autotune.store import Store
from forecast_autotune.tuning.compilations import FirstCompilations
from forecast_integrations.triton import engine, publication
from forecast_integrations.triton.problem import describe
from forecast_integrations.triton.problem.key import KeyMaker
from tests.integrations.null import configs, double, fresh, launch

pytestmark = pytest.mark.usefixtures("shared_cache")

FEW = configs((1, 4), (3,))
NO_RISK = 1e-9
"""Accepted: so small that both are timed, however slow a busy host makes a compilation."""


@pytest.fixture(autouse=True)
def _nothing_is_timed_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is timed before the first traces are there needs no forecast, and so not all of what is to fail here."""
    monkeypatch.setattr(FirstCompilations, "compiled_early", lambda *_: iter(()))


def fail(*_: Any, **__: Any) -> Any:
    raise LookupError("a bug")


def launched(root: Path, **options: Any) -> tuple[Any, set[str]]:
    """A tuner that has launched, and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tuner = autotune(configs=FEW, key=["n"], store=Store(root), risk=NO_RISK, **options)(fresh(double))
        launch(tuner)
        launch(tuner)  # and again, now that the key is known
    return tuner, {str(w.message) for w in caught}


PARTS = {
    "the store's decision": (Store, "decision"),
    "the store's rows": (Store, "add"),
    "the store's watch": (Store, "watch"),
    "the policy": (loop.WallTime, "plan"),
    "the surrogate's name": (loop.TaskForecaster, "label"),
    "the surrogate's making": (engine, "default_surrogate"),
    "the store's opening": (engine.DecoratorOptions, "open_store"),
    "the kernel's record": (describe, "kernel_record"),
    "the problem's features": (describe, "describe"),
    "the candidates": (describe, "configs_by_candidate"),
    "the risk": (loop.RiskTracker, "claim_previous"),
    "the tuner": (engine, "tune_together"),
    "what others see": (publication, "_timings"),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_fails(device: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, part: str) -> None:
    home, name = PARTS[part]
    monkeypatch.setattr(home, name, property(fail) if name == "label" else fail)
    if part == "what others see":
        with pytest.raises(LookupError):  # somebody else's listener may have raised
            launched(tmp_path / "store")
        return
    tuner, said = launched(tmp_path / "store")
    assert tuner.best_config.num_warps == 4
    (text,) = said
    what = "the store failed" if home is Store else "failed"
    assert f"{what} (LookupError('a bug'))" in text


UNTIMED_PARTS = {
    name: part for name, part in PARTS.items() if part[1] not in ("add", "watch", "plan", "_timings")
}


@pytest.mark.parametrize("mode", ["frozen", "skip", "deterministic"])
@pytest.mark.parametrize("part", UNTIMED_PARTS)
def test_a_mode_without_a_clock_times_nothing_whatever_fails(
    device: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, part: str, mode: str
) -> None:
    home, name = PARTS[part]
    monkeypatch.setattr(home, name, property(fail) if name == "label" else fail)
    try:
        _, said = launched(tmp_path / "store", mode=mode)
    except FrozenMissError:
        assert mode == "frozen"
        assert part in ("the surrogate's name", "the risk"), "it had no part in the miss"
        return
    assert device.launches == 2
    store_is_asked = mode != "deterministic" or home is not Store
    assert len(said) == (1 if store_is_asked and part != "the risk" else 0) or mode == "frozen"


@pytest.mark.parametrize("place", ["store", "store/v1", "store/v1/*/*/decisions/*", "store/v1/*/*/*.jsonl"])
def test_frozen_mode_serves_the_first_config_where_a_store_cannot_be_read(
    device: Any, tmp_path: Path, place: str
) -> None:
    """A miss that nobody can be sure of is none; one that is sure raises."""
    launched(tmp_path / "store")
    shutil.copytree(tmp_path / "store", tmp_path / "whole")
    for path in list(tmp_path.glob("store/v1/*/*/decisions/*")) if "jsonl" in place else []:
        path.unlink()
    for path in list(tmp_path.glob("store/v1/*/*/*.jsonl")) if "decisions" in place else []:
        path.unlink()
    for path in tmp_path.glob(place):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        path.mkdir() if "*" in place else path.write_text("no folder")
    before = device.launches
    tuner, said = launched(tmp_path / "store", mode="frozen")
    assert device.launches == before + 2
    assert tuner.best_config == FEW[0]
    assert any("using the first config" in text for text in said)
    with pytest.raises(FrozenMissError):
        launched(tmp_path / "empty", mode="frozen")
    assert launched(tmp_path / "whole", mode="frozen")[0].best_config.num_warps == 4


def test_a_key_that_cannot_be_made(device: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(KeyMaker, "__call__", fail)
    tuner, said = launched(tmp_path / "store")
    assert tuner.best_config.num_warps == 4
    (text,) = said
    assert "the key of a call failed" in text
    theirs = triton.autotune(configs=FEW, key=["n"])(fresh(double))
    monkeypatch.undo()
    launch(theirs)
    assert list(tuner.cache) == list(theirs.cache)


def test_a_function_of_the_users_fails_aloud(device: Any, tmp_path: Path) -> None:
    with pytest.raises(LookupError):
        launched(tmp_path / "store", bucket=fail)
    asked: list[object] = []
    prune = {"early_config_prune": lambda *given, **named: (asked.append(given), fail())}
    with pytest.raises(LookupError):
        launched(tmp_path / "store", prune_configs_by=prune)
    assert len(asked) == 1


def test_a_fault_of_ours_does_not_prune_again(
    device: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []

    def prune(given: Any, nargs: Any, **kwargs: Any) -> Any:
        asked.append(nargs)
        return given

    monkeypatch.setattr(describe, "kernel_record", fail)
    tuner, said = launched(tmp_path / "store", prune_configs_by={"early_config_prune": prune})
    assert tuner.best_config.num_warps == 4
    assert len(said) == 1
    assert len(asked) == 1


@pytest.mark.parametrize("wrong", [{}, {"out": torch.zeros(64), "n": 64, "unknown": 3}])
def test_a_call_that_is_wrong_in_itself_blames_nobody_else(
    device: Any, tmp_path: Path, wrong: dict[str, Any]
) -> None:
    tuner = autotune(configs=FEW, key=["n"], store=Store(tmp_path))(fresh(double))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises((TypeError, KeyError), match=r"missing \d required|wrong|unknown"):
            tuner[(1,)](torch.zeros(64), **wrong)
