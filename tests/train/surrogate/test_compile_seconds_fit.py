"""The fit of compile seconds finds the weights that made the seconds, and says how far it is off."""

from __future__ import annotations

from importlib.resources import as_file, files

import numpy as np
import pytest

from forecast_autotune.features.compile_seconds import FEATURES, parse_compile_seconds
from forecast_autotune.tuning.replays.replay import load
from forecast_train.surrogate.compile_seconds import (
    RecordedCompilation,
    compile_seconds_text,
    fit_compile_seconds,
    recorded_compilations,
)

KERNELS, EACH = 40, 30
WEIGHTS = np.linspace(-0.3, 0.3, len(FEATURES))


def compilations(kernel_sd: float, config_sd: float) -> list[RecordedCompilation]:
    """Seconds made by `WEIGHTS`, with errors of kernels and of configs."""
    generator = np.random.default_rng(0)
    results = []
    for kernel in range(KERNELS):
        level = generator.normal(0.0, kernel_sd)
        for _ in range(EACH):
            features = generator.normal(size=len(FEATURES))
            log2 = features @ WEIGHTS - 1.0 + level + generator.normal(0.0, config_sd)
            name = f"kernel{kernel}"
            results.append(
                RecordedCompilation(name, f"family{kernel % 10}", name, tuple(features), float(2**log2))
            )
    return results


def test_weights_and_errors_are_found() -> None:
    rows = compilations(0.5, 0.2)
    formula, unseen = fit_compile_seconds(rows)
    np.testing.assert_allclose(formula.weights, WEIGHTS, atol=0.08)
    assert formula.intercept == pytest.approx(-1.0, abs=0.3)
    assert formula.kernel_sd == pytest.approx(0.5, rel=0.35)
    assert formula.config_sd == pytest.approx(0.2, rel=0.2)
    assert np.corrcoef(unseen, np.log2([r.seconds for r in rows]))[0, 1] > 0.8


def test_a_family_is_forecast_without_its_own_rows() -> None:
    rows = compilations(0.0, 0.0)
    last = [r.family == "family9" for r in rows]
    liars = [
        RecordedCompilation(r.kernel, r.family, r.source, r.features, 1e6 * r.seconds if odd else r.seconds)
        for r, odd in zip(rows, last, strict=True)
    ]
    _, honest = fit_compile_seconds(rows)
    _, answer = fit_compile_seconds(liars)
    np.testing.assert_allclose(answer[last], honest[last], atol=1.0)


def test_what_is_written_is_what_is_read() -> None:
    rows = compilations(0.3, 0.1)
    formula, _ = fit_compile_seconds(rows)
    assert parse_compile_seconds(compile_seconds_text(formula, rows)) == formula


def test_compilations_of_recorded_tables_are_read_once() -> None:
    with as_file(files("forecast_autotune") / "assets" / "tables" / "h200.jsonl.gz") as path:
        tables = load([path])[:3]
    rows = recorded_compilations(tables)
    assert rows
    assert recorded_compilations([*tables, *tables]) == rows
    assert len({(r.source, r.features) for r in rows}) == len(rows)
    assert all(r.seconds >= 0.03 for r in rows)
