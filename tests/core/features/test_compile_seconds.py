"""The formula of compile seconds: its asset, its level, and what remains of a compilation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from forecast_autotune.features.compile_seconds import (
    FEATURES,
    remaining_seconds,
    shipped_compile_seconds,
)


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


def test_the_asset_says_how_uncertain_it_is() -> None:
    formula = shipped_compile_seconds()
    assert len(formula.weights) == len(FEATURES)
    assert 0.0 < formula.config_sd < 2.0
    assert 0.0 < formula.kernel_sd < 3.0
