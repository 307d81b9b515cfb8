"""Figures of the advice benchmark, and advice that is spoilt on purpose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.forecasting.advice import advised_lists
from benchmarks.lib.recorded_advice import (
    FamilyModels,
    paired_figures,
)
from forecast_autotune.llm.advice.record import MATCH, SAME_SOURCE
from forecast_autotune.surrogates.learned import shipped_model


def _row(kernel: str, arm: str, regret: float, measured: float) -> dict[str, Any]:
    return {"kernel": kernel, "problem": kernel, "arm": arm, "regret": regret, "measured": measured}


def test_differences_are_taken_on_the_same_problems() -> None:
    rows = [_row(k, "learned", 0.02, 8) for k in "abc"]
    rows += [_row("a", "advice", 0.0, 6), _row("b", "advice", 0.0, 6)]
    result = paired_figures(rows)["advice"]
    assert result["kernels"] == 2
    assert result["measured_difference"] == {"value": -2.0, "low": -2.0, "high": -2.0}
    assert result["regret_learned"] == pytest.approx(0.02)
    assert result["regret"] == 0.0


def test_every_recorded_list_of_a_library_has_installed_advice() -> None:
    lists = advised_lists()
    assert len(lists) == 117
    assert {str(table.problem.extra["label"]).partition("/")[0] for table, _ in lists} == {
        "fla",
        "gems",
        "liger",
    }
    assert {advice.extra[MATCH] for _, advice in lists} == {SAME_SOURCE}


def test_a_model_that_may_know_the_family_is_refused(tmp_path: Path) -> None:
    model = shipped_model()
    assert model is not None
    for name in ("gemm", "norm"):
        replace(model, about={"without": "gemm"}).save(tmp_path / f"{name}.npz")
    models = FamilyModels(tmp_path, ["gemm", "norm"])
    assert models.without("gemm").version
    with pytest.raises(ValueError, match=r"norm\.npz was not fitted without norm"):
        models.without("norm")
