"""Which configs of a variant a verification launches: all share one source, and each costs a compilation."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from forecast_autotune.records import Config

MOST_CONFIGS = 14
"""Configs that are launched in a verification."""


def configs_to_launch(listed: Sequence[Config], most: int = MOST_CONFIGS) -> list[Config]:
    """At most so many of the configs, the first one first, each as unlike those before it as can be found.

    Every value that occurs of a parameter (warps, stages, a block's size) is taken before any pair of values
    that was seen apart, so that what breaks at one value is launched. Of equally unlike ones the earlier counts.
    """
    unique = list(dict.fromkeys(listed))
    if len(unique) <= most:
        return unique
    chosen, left = unique[:1], unique[1:]
    seen_values, seen_pairs = _values(chosen[0]), _pairs(chosen[0])
    while len(chosen) < most:
        news = [(len(_values(c) - seen_values), len(_pairs(c) - seen_pairs)) for c in left]
        chosen.append(left.pop(news.index(max(news))))
        seen_values |= _values(chosen[-1])
        seen_pairs |= _pairs(chosen[-1])
    return chosen


def _values(config: Config) -> set[Hashable]:
    return {(name, _key(value)) for name, value in config.parameters().items()}


def _pairs(config: Config) -> set[Hashable]:
    values = sorted(_values(config), key=repr)
    return {(a, b) for n, a in enumerate(values) for b in values[n + 1 :]}


def _key(value: Any) -> Hashable:
    return value if isinstance(value, Hashable) else repr(value)
