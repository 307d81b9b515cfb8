"""The curve from stated risk to observed frequency."""

from __future__ import annotations

import pytest

from forecast_autotune.errors import RecordError
from forecast_autotune.surrogates.analytic import Analytic
from forecast_autotune.surrogates.calibration import Calibration, identity, shipped
from forecast_autotune.testing import example_table, query_of


def test_linear_between_knots() -> None:
    curve = Calibration((0.0, 0.5, 1.0), (0.0, 0.2, 0.6))
    assert curve(0.25) == pytest.approx(0.1)
    assert curve(0.75) == pytest.approx(0.4)
    assert curve(2.0) == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("stated", "observed"),
    [((0.0,), (0.0,)), ((0.0, 1.0), (0.5, 0.1)), ((1.0, 0.0), (0.0, 1.0)), ((0.0, 1.0), (0.0, 1.5))],
)
def test_a_curve_must_rise_within_zero_and_one(
    stated: tuple[float, ...], observed: tuple[float, ...]
) -> None:
    with pytest.raises(RecordError, match="rising knots"):
        Calibration(stated, observed)


def test_the_shipped_surrogate_has_a_curve_and_uses_it() -> None:
    name = f"{Analytic.name}/{Analytic.version}"
    assert shipped(name) != identity()
    assert shipped("somebody/else") == identity()
    forecasts = Analytic().forecast(query_of(example_table(), 3))
    assert forecasts.calibrate(0.9) == shipped(name)(0.9)
