"""Which configs are launched: few, the first among them, and every value that a parameter has."""

from __future__ import annotations

import itertools
import statistics

from forecast_autotune.records import Config
from forecast_harness.trials.configs.source_configs import (
    FEWEST_CONFIGS,
    MOST_CONFIGS,
    configs_to_launch,
    work_of_a_warp,
)

GRID = [
    Config(kwargs=(("BLOCK", block), ("ROWS", rows)), num_warps=warps, num_stages=stages)
    for block, rows, warps, stages in itertools.product(
        (64, 128, 256, 512), (1, 2, 4), (1, 2, 4, 8), (1, 2, 5)
    )
]


def test_every_value_of_a_parameter_is_launched() -> None:
    chosen = configs_to_launch(GRID)
    assert FEWEST_CONFIGS < len(chosen) == len(set(chosen)) <= MOST_CONFIGS
    assert chosen[0] == GRID[0]
    for name in GRID[0].parameters():
        assert {c.parameters()[name] for c in chosen} == {c.parameters()[name] for c in GRID}


def test_every_pair_of_warps_and_stages_is_launched() -> None:
    chosen = configs_to_launch(GRID)
    assert {(c.num_warps, c.num_stages) for c in chosen} == set(itertools.product((1, 2, 4, 8), (1, 2, 5)))


def test_short_lists_are_launched_whole_and_each_once() -> None:
    assert configs_to_launch([GRID[3], GRID[1], GRID[3]]) == [GRID[3], GRID[1]]
    assert configs_to_launch([]) == []


def test_no_more_are_launched_than_show_every_value_and_every_schedule() -> None:
    alike = [c for c in GRID if c.num_stages == 1 and dict(c.kwargs)["ROWS"] == 1]
    chosen = configs_to_launch(alike)
    assert len(chosen) == FEWEST_CONFIGS
    assert {c.num_warps for c in chosen} == {1, 2, 4, 8}
    assert {dict(c.kwargs)["BLOCK"] for c in chosen} == {64, 128, 256, 512}
    assert len(configs_to_launch(alike[:FEWEST_CONFIGS])) == FEWEST_CONFIGS


def test_large_blocks_are_launched_where_they_are_cheap_to_compile() -> None:
    tiles = [
        Config(kwargs=(("M", m), ("N", n)), num_warps=warps, num_stages=stages)
        for m, n, warps, stages in itertools.product((16, 64, 256), (16, 64, 256), (2, 4, 8), (3, 4))
    ]
    chosen = configs_to_launch(tiles)
    assert {dict(c.kwargs)["M"] for c in chosen} == {dict(c.kwargs)["N"] for c in chosen} == {16, 64, 256}
    assert {c.num_warps for c in chosen} == {2, 4, 8}
    usual = statistics.median(map(work_of_a_warp, tiles))
    assert max(map(work_of_a_warp, chosen)) <= 2 * usual < max(map(work_of_a_warp, tiles)) / 4
