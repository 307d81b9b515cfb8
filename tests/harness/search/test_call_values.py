"""Values that a timed call is drawn, and how far results are apart."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from forecast_harness.trials.judging.kernels import call_values
from forecast_harness.trials.judging.kernels.call_values import fill_tensor, relative_error


def test_long_tensors_are_filled_to_the_end_and_no_two_rows_are_alike() -> None:
    flat = torch.full((3, 1 << 22), math.nan)
    fill_tensor(flat.reshape(-1), 2, torch.Generator().manual_seed(0))
    assert bool(flat.isfinite().all())
    assert abs(float(flat.mean())) < 0.01
    assert float(flat.std()) == pytest.approx(1.0, abs=0.01)
    assert not any(torch.equal(flat[a], flat[b]) for a, b in ((0, 1), (0, 2), (1, 2)))


def test_errors_are_told_beyond_what_is_compared_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_values, "_COMPARED_ELEMENTS", 8)
    right = torch.linspace(-4.0, 4.0, 31)
    assert relative_error(right.clone(), right) == 0.0
    late = right.clone()
    late[-1] += 1.0
    assert relative_error(late, right) == pytest.approx(0.25)
    late[20] = math.inf
    assert relative_error(late, right) == math.inf
    both = right.clone()
    both[20] = math.inf
    assert relative_error(both.double(), both) == 0.0
    assert relative_error(right[:0], right[:0]) == 0.0
