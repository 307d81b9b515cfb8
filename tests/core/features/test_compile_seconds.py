"""The formula of compile seconds: its asset, its level, and what remains of a compilation."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from typing import Any

import numpy as np
import pytest

from forecast_autotune.errors import RecordError
from forecast_autotune.features.compile_seconds import (
    ASSET,
    FEATURES,
    CompileSeconds,
    compile_features,
    parse_compile_seconds,
    remaining_seconds,
    shipped_compile_seconds,
)
from forecast_autotune.features.ttir.facts import TtirFacts


@pytest.mark.parametrize(
    ("sd", "elapsed"),
    [
        (0.2, 0.0),
        (0.2, 0.6),
        (0.2, 0.9),
        (0.7, 0.0),
        (0.7, 0.1),
        (0.7, 2.0),
        (1.2, 0.6),
        (1.2, 2.0),
        (1.2, 5.0),
    ],
)
def test_what_remains_is_the_mean_beyond_what_has_passed_or_a_share_of_that_where_it_is_late(
    sd: float, elapsed: float
) -> None:
    """Against the integral of the survival function of seconds whose log2 is normal around log2(0.6)."""
    median = math.log2(0.6)
    log = np.linspace(median - 10 * sd, median + 10 * sd, 400_001)
    density = np.exp(-(((log - median) / sd) ** 2) / 2)
    seconds, beyond = np.exp2(log), np.exp2(log) > elapsed
    expected = float((density * seconds)[beyond].sum() / density[beyond].sum()) - elapsed
    late = math.log2(elapsed) - median if elapsed else 0.0
    least = 0.55 * elapsed * min(1.0, max(0.0, late / 1.5))
    assert remaining_seconds(median, sd, elapsed) == pytest.approx(max(expected, least), rel=1e-3, abs=1e-4)


def test_the_level_is_shrunk_towards_what_all_kernels_have() -> None:
    formula = CompileSeconds((0.0,) * len(FEATURES), 0.0, kernel_sd=1.0, config_sd=1.0)
    assert formula.level([]) == 0.0
    assert formula.level([2.0]) == pytest.approx(1.0), "one observation weighs as much as the prior"
    assert formula.level([2.0] * 99) == pytest.approx(1.98)
    assert replace(formula, kernel_sd=1e6).level([2.0]) == pytest.approx(2.0)


def test_every_feature_has_a_number_whatever_the_ir_says() -> None:
    formula = shipped_compile_seconds()
    bare = TtirFacts()
    huge = replace(bare, ops=10**6, largest_tile=2**30, live_bytes=2**40, loop_depth=9, dot_ops=1)
    for facts, warps, stages in ((bare, 4, 3), (bare, 0, 0), (huge, 1, 9)):
        row = compile_features(facts, warps, stages)
        assert len(row) == len(FEATURES)
        assert all(map(math.isfinite, row))
        assert -5.0 < formula.log2_seconds([row])[0] < 7.0, "a twentieth of a second to two minutes"
    assert len(formula.log2_seconds([])) == 0


def test_the_asset_says_how_uncertain_it_is() -> None:
    formula = shipped_compile_seconds()
    assert len(formula.weights) == len(FEATURES)
    assert 0.0 < formula.config_sd < 2.0
    assert 0.0 < formula.kernel_sd < 3.0


def without_weight(data: dict[str, Any]) -> object:
    del data["weights"]["stages"]
    return data


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without_weight, "stages"),
        (lambda data: {**data, "intercept": "none"}, "none"),
        (lambda data: {**data, "config_sd": None}, "no formula"),
        (lambda data: {**data, "intercept": math.nan}, "finite"),
        (lambda data: [], "no formula"),
    ],
)
def test_an_asset_that_is_no_formula_is_refused(spoil: Callable[[Any], object], message: str) -> None:
    data = json.loads((files("forecast_autotune") / "assets" / ASSET).read_text(encoding="utf-8"))
    assert parse_compile_seconds(json.dumps(data)) == shipped_compile_seconds()
    with pytest.raises(RecordError, match=message):
        parse_compile_seconds(json.dumps(spoil(data)))
    with pytest.raises(RecordError, match="no formula"):
        parse_compile_seconds("{")


def test_a_formula_of_other_features_is_refused() -> None:
    with pytest.raises(RecordError, match=f"needs {len(FEATURES)} weights, got 2"):
        CompileSeconds((1.0, 2.0), 0.0, 1.0, 1.0)
