"""Relatives pooled into a mean function, and how far they may be trusted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from forecast_autotune.records import (
    Argument,
    Candidate,
    Config,
    Device,
    Kernel,
    Measurement,
    Outcome,
    Problem,
)
from forecast_autotune.surrogates.protocol import Relative
from forecast_autotune.surrogates.relatives import (
    MIN_TUNED,
    device_distance,
    kinship,
    pool_relatives,
)

TARGET = Device("GPU 0", "cuda")
NAMES = [Candidate(Config.of({"BLOCK": 2**i})) for i in range(6)]
CURVE = (0.0, 0.5, 1.0, 1.2, 0.3, 0.8)
"""log2 slowdowns of one pattern."""


def problem(device: Device = TARGET) -> Problem:
    return Problem.of(Kernel("conv", "cuda"), (), device)


def relative(slowdowns: Sequence[float], device: str, *, backend: str = "cuda") -> Relative:
    """A table over the candidates."""
    p = problem(Device(device, backend))
    return Relative(p, [Measurement(p.id, NAMES[i], Outcome.OK, 2.0**x) for i, x in enumerate(slowdowns)])


def test_the_mean_is_weighted_by_the_likeness_of_the_devices() -> None:
    other = tuple(reversed(CURVE))
    result = pool_relatives(
        problem(), NAMES, [relative(CURVE, "GPU 1"), relative(other, "GPU 2", backend="hip")]
    )
    near, far = result.weights
    assert near > 0.8
    assert near + far == pytest.approx(1.0)
    shifted = np.array(other) - min(other)
    np.testing.assert_allclose(result.mean, near * np.array(CURVE) + far * shifted)
    assert result.columns.shape == (6, 2)


def test_relatives_that_agree_are_trusted() -> None:
    alike = pool_relatives(problem(), NAMES, [relative(CURVE, f"GPU {i}") for i in range(1, 6)])
    assert alike.error == pytest.approx(0.0, abs=1e-9)
    np.testing.assert_array_equal(alike.tries, [1] * 5)
    # Five that never failed do not promise certainty.
    assert 0.0 < alike.miss_probability(1) < 0.1


def test_relatives_that_contradict_each_other_are_not() -> None:
    rising, falling = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9), (0.9, 0.8, 0.6, 0.4, 0.2, 0.0)
    result = pool_relatives(problem(), NAMES, [relative(rising, "GPU 1"), relative(falling, "GPU 2")])
    assert result.error > 0.4
    np.testing.assert_array_equal(result.tries, [6, 6])
    risks = [result.miss_probability(count) for count in (1, 5, 6)]
    assert risks[0] == risks[1] > 0.8
    assert risks[2] < 0.2


def test_device_distance_orders_models_architectures_and_backends() -> None:
    base = Device("A", "cuda", "80")
    same, model = Device("A", "cuda", "80"), Device("B", "cuda", "80")
    arch, backend = Device("C", "cuda", "90"), Device("D", "hip", "gfx90a")
    steps = [device_distance(base, other) for other in (same, model, arch, backend)]
    assert steps[0] == 0.0
    assert steps == sorted(set(steps))


def sized(rows: int, device: Device = TARGET) -> Problem:
    return Problem.of(Kernel("conv", "cuda"), (Argument("x", "tensor", "fp16", (rows, 64), (64, 1)),), device)


def tuned(there: Problem, ran: int, failed: int = 0) -> Relative:
    good = [Measurement(there.id, c, Outcome.OK, 1.0) for c in NAMES[:ran]]
    bad = [Measurement(there.id, c, Outcome.RUNTIME_ERROR) for c in NAMES[ran : ran + failed]]
    return Relative(there, [*good, *bad])


def test_what_was_tuned_on_this_device_is_near_or_far() -> None:
    here, near, far = sized(1024), sized(2048), sized(2**20)
    assert kinship(here, [tuned(near, MIN_TUNED)]) == "near"
    assert kinship(here, [tuned(far, 6), tuned(near, 6)]) == "near"
    assert kinship(here, []) == "none"
    assert kinship(here, [tuned(far, 6)]) == "far"
    assert kinship(here, [tuned(near, MIN_TUNED - 1, 3)]) == "none", "hardly anything ran there"
    few = tuned(near, 2)
    assert kinship(here, [Relative(near, [*few.measurements] * 2)]) == "none", "finalists are timed twice"
    assert kinship(here, [tuned(sized(2048, Device("GPU 1", "cuda")), 6)]) == "none", "another device"
