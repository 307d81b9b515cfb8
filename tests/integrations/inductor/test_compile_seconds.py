"""Choices that compile long are known before they are compiled, and have to promise more than others."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from forecast_autotune.records import Candidate, Config

pytest.importorskip("torch")

from torch._inductor import config

from forecast_autotune.policy import TuningState
from forecast_autotune.records import Argument, Kernel, Measurement, Outcome, Problem
from forecast_autotune.surrogates.protocol import Forecasts
from forecast_integrations.inductor.choices.templates import compile_seconds
from forecast_integrations.inductor.policy import FewRoundsPolicy
from tests.integrations.inductor.graphs import H200

LIBRARY = Candidate(Config(), "aten::mm")


WINDOW = tuple(
    Argument(n, "tensor", "float16", shape, (), aligned=True)
    for n, shape in (("in0", (32, 256, 14, 14)), ("in1", (512, 256, 3, 3)), ("out", (32, 512, 7, 7)))
)


def product(k: int, dtype: str = "bfloat16", name: str = "mm") -> Problem:
    shapes = {"in0": (4096, k), "in1": (k, 4096), "out": (4096, 4096)}
    tensors = [
        Argument(n, "tensor", dtype, shape, (shape[1], 1), aligned=True) for n, shape in shapes.items()
    ]
    return Problem.of(Kernel(name, "inductor"), tensors, H200, key=["precision=highest"])


def template(m: int, n: int, k: int, warps: int) -> Candidate:
    tile = (("BLOCK_K", k), ("BLOCK_M", m), ("BLOCK_N", n))
    return Candidate(Config(kwargs=tile, num_warps=warps, num_stages=3), "triton::mm")


def seconds(problem: Problem, *tile: int) -> float:
    return float(compile_seconds(problem, [template(*tile)])[0])


# Medians of what workers of an H200's host took, by operands' dtype, k, and block and warps: torch 2.11, Triton 3.6. A
# convolution of 256 channels with 512 filters, 3 x 3: two cores, torch 2.13, Triton 3.9.
@pytest.mark.parametrize(
    ("dtype", "k", "tile", "took"),
    [
        ("bfloat16", 1024, (128, 128, 32, 4), 4.96),
        ("bfloat16", 1024, (128, 128, 64, 4), 2.88),
        ("bfloat16", 1024, (64, 128, 64, 4), 1.2),
        ("bfloat16", 1024, (32, 32, 32, 4), 0.55),
        ("bfloat16", 4096, (128, 128, 32, 4), 0.54),
        ("bfloat16", 4096, (64, 128, 32, 4), 0.37),
        ("float32", 64, (128, 128, 64, 4), 5.05),
        ("float32", 64, (64, 128, 32, 4), 1.05),
        ("float16", 0, (256, 128, 128, 4), 2.42),
        ("float16", 0, (256, 128, 64, 4), 1.74),
        ("float16", 0, (64, 64, 32, 4), 0.42),
    ],
)
def test_seconds_are_about_those_that_were_measured(
    dtype: str, k: int, tile: tuple[int, int, int, int], took: float
) -> None:
    problem = product(k, dtype) if k else replace(product(9, dtype, "convolution"), arguments=WINDOW)
    assert took / 2 <= seconds(problem, *tile) <= took * 2


CANDIDATES = [LIBRARY, *(template(16 << i, 64, 32, 4) for i in range(4)), template(64, 64, 64, 4)]


def state(
    best_ms: float | None = None, compile_s: list[float] | None = None, better: dict[int, float] | None = None
) -> TuningState:
    """All templates are forecast to take about a millisecond; the library's time is known, or nothing is.

    `better`: log2 of how far some are forecast to be off that.
    """
    mean = np.zeros(len(CANDIDATES))
    for number, log2 in (better or {}).items():
        mean[number] = log2
    forecasts = Forecasts(CANDIDATES, mean, np.full(len(mean), 0.2), mean)
    ahead = {} if best_ms is None else {LIBRARY: Measurement("p", LIBRARY, Outcome.OK, best_ms)}
    return TuningState(forecasts, ahead, compile_s=None if compile_s is None else np.array(compile_s))


@pytest.fixture(autouse=True)
def few_workers() -> Iterator[None]:
    """A list of six does not fit them."""
    with config.patch(compile_threads=2):
        yield


def test_a_short_list_that_fits_the_workers_has_one_round() -> None:
    policy = FewRoundsPolicy(least=2)
    for workers, expected in ((16, 6), (6, 6), (5, 3)):
        with config.patch(compile_threads=workers):
            assert len(policy.plan(state()).measure) == expected
            assert len(policy.plan(state(0.5)).measure) == 2, "hardly anything can be faster"
    with config.patch(compile_threads=16):
        assert set(policy.plan(state(1.1)).measure) == set(CANDIDATES[1:])


def test_a_first_round_is_small_where_hardly_anything_can_be_faster() -> None:
    policy = FewRoundsPolicy(least=2)
    unknown, far, near = (len(policy.plan(state(ms)).measure) for ms in (None, 0.5, 1.1))
    assert (unknown, far, near) == (3, 2, 3)


def test_a_round_does_not_last_for_the_one_that_compiles_far_longer() -> None:
    long = [0.3, 0.3, 0.3, 1.05, 0.3, 0.3]
    late, asked = CANDIDATES[3], state(1.0, long, {1: -0.3, 3: -0.28, 2: 0.3, 4: 0.3, 5: 0.3})
    everything = FewRoundsPolicy(least=2, longest=math.inf).plan(asked).measure
    assert late in everything[1:]
    assert FewRoundsPolicy(least=2).plan(asked).measure == tuple(c for c in everything if c != late)
    # What promises most is worth its wait.
    assert FewRoundsPolicy(least=2).plan(state(1.0, long, {3: -3.0})).measure[0] == late
