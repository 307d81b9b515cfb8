"""Launch options of every backend as ordinary parameters of a config: coordinates, traces, registers, cost."""

from __future__ import annotations

import numpy as np
import pytest

from forecast_autotune.features.candidate_list import CandidateList
from forecast_autotune.features.config_encoder import ConfigEncoder
from forecast_autotune.features.cost import CostBreakdown, FactColumns, costs
from forecast_autotune.features.devices import (
    datasheet_device,
    device_spec,
    register_limits,
)
from forecast_autotune.features.ttir.extraction import assignment_of
from forecast_autotune.features.ttir.facts import TtirFacts
from forecast_autotune.records import Candidate, Config, Scalar

FACTS = TtirFacts(
    load_bytes=65536.0,
    store_bytes=32768.0,
    dot_flops=2.0 * 128 * 128 * 64 * 64,
    dot_shapes=((128, 128, 64, 1.0),),
    dot_ops=64.0,
    iterations=64.0,
    loop_entries=1.0,
    live_bytes=131072.0,
    accumulator_bytes=65536.0,
    direct_bytes=32768.0,
    load_levels=1.0,
)
"""A product of 128 x 128 tiles."""


def candidate(
    num_warps: int = 4, maxnreg: int | None = None, num_ctas: int = 1, **kwargs: Scalar
) -> Candidate:
    return Candidate(
        Config.of({"BLOCK": 128, **kwargs}, num_warps=num_warps, maxnreg=maxnreg, num_ctas=num_ctas)
    )


def priced(model: str, *candidates: Candidate) -> CostBreakdown:
    """The costs of the product's candidates on a model."""
    every = FactColumns.of([FACTS] * len(candidates))
    configs = [c.config for c in candidates]
    return costs(every, [(1024,)] * len(configs), configs, device_spec(datasheet_device(model)))


def limits(model: str, *candidates: Candidate) -> list[float]:
    configs = [c.config for c in candidates]
    return register_limits(configs, device_spec(datasheet_device(model))).tolist()


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("num_ctas", (1, 2, 4)),
        ("maxnreg", (None, 128, 168, 255)),
        ("ptx_options", ("", "--opt-level=1", "--def-load-cache=cg")),
        ("waves_per_eu", (0, 1, 2, 3, 4)),
        ("matrix_instr_nonkdim", (0, 16, 32)),
        ("kpack", (1, 2)),
        ("schedule_hint", ("", "attention")),
        ("grf_mode", ("default", "128", "256")),
    ],
)
def test_every_option_moves_a_candidate_apart(name: str, values: tuple[Scalar, ...]) -> None:
    listed = [candidate(**{name: value}) for value in values]  # type: ignore[arg-type]
    points = ConfigEncoder.of(listed)(listed)
    away = np.abs(points[:, None] - points[None, :]).sum(axis=2)
    assert (away[~np.eye(len(listed), dtype=bool)] > 0).all()


def test_candidates_that_differ_in_the_compilers_options_share_a_trace() -> None:
    listed = [candidate(waves_per_eu=w, kpack=k) for w in (0, 2) for k in (1, 2)]
    assert {assignment_of(c) for c in listed} == {"BLOCK=128"}
    names, codes = CandidateList.of(listed).assignments
    assert names == ("BLOCK=128",)
    assert codes.tolist() == [0, 0, 0, 0]


def test_each_backend_caps_registers_by_its_own_option() -> None:
    assert limits("h200", candidate(), candidate(maxnreg=128)) == [255.0, 128.0]
    asked = [candidate(waves_per_eu=n) for n in (0, 1, 2, 4)]
    assert limits("mi300x", *asked) == [512.0, 512.0, 256.0, 128.0]
    assert limits("mi300x", candidate(8), candidate(16)) == [256.0, 128.0], "a program's own waves must fit"
    modes = [candidate(grf_mode=mode) for mode in ("default", "128", "256")]
    assert limits("gpu max 1550", *modes) == [128.0, 128.0, 256.0]
    assert limits("h200", candidate(waves_per_eu=4)) == [255.0], "an option of another backend"


def test_fewer_registers_than_the_accumulator_needs_cost_time() -> None:
    free, tight = priced("mi300x", candidate(), candidate(waves_per_eu=8)).total_ms
    assert tight > 1.5 * free
    free, tight = priced("h200", candidate(), candidate(maxnreg=64)).total_ms
    assert tight > 1.5 * free


def test_blocks_that_share_a_program_share_its_work_and_its_memory() -> None:
    alone, four = candidate(4), candidate(4, num_ctas=4)
    result = priced("b200", alone, four)
    assert result.shared_bytes[1] == pytest.approx(result.shared_bytes[0] / 2), (
        "2 x 2 blocks read half of each side"
    )
    assert result.memory_ms[1] == pytest.approx(result.memory_ms[0])
    assert result.registers[1] < result.registers[0]
