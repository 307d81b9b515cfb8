"""Which configs of a variant a verification launches: all share one source, and each costs a compilation."""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Sequence
from typing import Any

from forecast_autotune.records import Config

MOST_CONFIGS, FEWEST_CONFIGS = 14, 8
"""Configs that are launched in a verification: at most, and at least where there are as many."""


def configs_to_launch(listed: Sequence[Config], most: int = MOST_CONFIGS) -> list[Config]:
    """At most so many of the configs, the first one first, each as unlike those before it as can be found.

    Every value that occurs of a parameter (warps, stages, a block's size), and every number of warps with every
    number of stages, is taken before any pair of values that was seen apart, so that what breaks at one value is
    launched; of both the one with the most for its price, see `_prices`, then the cheaper, then the earlier.
    Once they are all among `FEWEST_CONFIGS` or more, no other is taken: each has to be compiled.
    """
    unique = list(dict.fromkeys(listed))
    if len(unique) <= most:
        return unique
    prices = _prices(unique)
    chosen, left = unique[:1], unique[1:]
    seen_values, seen_pairs = _values(chosen[0]), _pairs(chosen[0])
    values = {value for c in unique for value in _values(c)}
    while len(chosen) < most:
        if len(chosen) >= FEWEST_CONFIGS and seen_values == values:
            break
        gains = [
            (len(_values(c) - seen_values) / prices[c], len(_pairs(c) - seen_pairs) / prices[c], -prices[c])
            for c in left
        ]
        chosen.append(left.pop(gains.index(max(gains))))
        seen_values |= _values(chosen[-1])
        seen_pairs |= _pairs(chosen[-1])
    return chosen


def _prices(configs: Sequence[Config]) -> dict[Config, float]:
    """About what it costs to compile each: 1 for any, and twice as much again for the median of their work.

    An assembler takes half a minute for tiles that spill, and sizes of blocks are seen together with few warps and
    with small other blocks as well.
    """
    usual = statistics.median(map(work_of_a_warp, configs))
    return {c: 1.0 + 2.0 * work_of_a_warp(c) / usual for c in configs}


def _values(config: Config) -> set[Hashable]:
    schedule = ("warps and stages", (config.num_warps, config.num_stages))
    return {schedule, *((name, _key(value)) for name, value in config.parameters().items())}


def _pairs(config: Config) -> set[Hashable]:
    values = sorted(_values(config), key=repr)
    return {(a, b) for n, a in enumerate(values) for b in values[n + 1 :]}


def work_of_a_warp(config: Config) -> float:
    """About how many elements of its tiles a warp has to work on."""
    numbers = [v for _, v in config.kwargs if isinstance(v, int) and not isinstance(v, bool) and v > 0]
    return math.prod(numbers) / max(1, config.num_warps)


def _key(value: Any) -> Hashable:
    return value if isinstance(value, Hashable) else repr(value)
