"""Whatever fails of ours, a tuned kernel launches a config that works, as under `triton.autotune`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import triton

import forecast_autotune.tuning.loop as loop
from forecast_autotune import autotune
from forecast_autotune.store import Store
from forecast_autotune.tuning.compilations import FirstCompilations
from forecast_integrations.triton import engine, publication
from forecast_integrations.triton.problem import describe
from forecast_integrations.triton.problem.key import KeyMaker
from tests.integrations.null import configs, double, fresh, launch

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
    with pytest.raises(LookupError):
        launched(tmp_path / "store", prune_configs_by={"early_config_prune": fail})


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
