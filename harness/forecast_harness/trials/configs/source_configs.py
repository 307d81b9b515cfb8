"""Configs of a pack's source: its own `CONFIGS`, values for constants that the same source defines.

A source may say at its top level::

    CHUNK = 64
    CONFIGS = [{"CHUNK": 32}, {"CHUNK": 64}, {"CHUNK": 128}]

Every object names module constants in upper case; `num_warps` and the other launch options stand for `NUM_WARPS` and
so on. The parts of a config may stand under `kwargs`, as in a kernel's source. A config is the source with those
constants replaced, so what is verified and timed is a source like any other. Nothing here imports or runs a source.
"""

from __future__ import annotations

import ast
import contextlib
import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from forecast_autotune import python_parser
from forecast_autotune.errors import RecordError
from forecast_autotune.records import LAUNCH_OPTIONS, Config
from forecast_autotune.variants.contract import evaluate_literal, read_configs

SourceConfig = Mapping[str, Any]
MAX_CONFIGS = 512
"""Configs that one source may list."""


def configs_of(source: str) -> tuple[SourceConfig, ...]:
    """The configs that a source lists, without repeats; none where it lists none, or is not Python.

    Raises `RecordError` for a list that is no list of objects of plain values, is longer than `MAX_CONFIGS`, or
    names a constant that the source does not define.
    """
    try:
        tree = python_parser.parse_module(source)
    except (SyntaxError, ValueError, RecursionError):
        return ()
    constants = _constants(tree)
    if (node := constants.pop("CONFIGS", None)) is None:
        return ()
    values = {}
    for name, value in constants.items():
        with contextlib.suppress(ValueError):
            values[name] = evaluate_literal(value)
    entries = read_configs(node, values)
    if len(entries) > MAX_CONFIGS:
        raise RecordError(f"CONFIGS may hold {MAX_CONFIGS} configs, not {len(entries)}")
    results: dict[str, SourceConfig] = {}
    for line, entry in entries:
        # A launch option is a constant of the source, too, which passes it on.
        upper = {name: name.upper() for name in entry if name in LAUNCH_OPTIONS}
        config = {upper.get(name, name): value for name, value in entry.items()}
        if strange := [name for name in config if name not in constants]:
            raise RecordError(
                f"line {line}: CONFIGS names {strange[0]!r}, which is no upper-case constant of the source; those are "
                f"{', '.join(sorted(constants)) or 'none'}: define it at the top level and use it, "
                "as in NUM_WARPS = 4 and num_warps=NUM_WARPS at the launch"
            )
        results[repr(sorted(config.items()))] = config
    return tuple(results.values())


def apply_config(source: str, config: SourceConfig) -> str:
    """The source with the constants of `config` replaced. Raises `RecordError` for one it does not define.

    All else stays as it is, to the character.
    """
    if not config:
        return source
    try:
        tree = python_parser.parse_module(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise RecordError(f"the source is not Python: {error}") from error
    constants = _constants(tree)
    if missing := sorted(set(config) - set(constants)):
        raise RecordError(f"the source defines no constant {', '.join(missing)}")
    lines = source.encode().splitlines(keepends=True)  # columns of the tree count bytes
    edits = [(constants[name], value) for name, value in config.items()]
    edits.sort(key=lambda edit: (edit[0].lineno, edit[0].col_offset), reverse=True)
    for node, value in edits:
        first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        before, after = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
        lines[first : last + 1] = [before + repr(value).encode() + after]
    return b"".join(lines).decode()


def own_configs(source: str) -> list[SourceConfig]:
    """The configs that a source lists and that change it. Raises `RecordError` as `configs_of` does."""
    # The source as it stands is one of them often enough.
    return [c for c in configs_of(source) if apply_config(source, c) != source]


def configs_to_time(configs: Sequence[SourceConfig], n: int, against: SourceConfig) -> Sequence[SourceConfig]:
    """At most `n` configs of a source to time: the source as it stands, the one that suits the rival's config
    `against`, and others as unlike each other as can be."""
    compatible = [c for c in configs if is_compatible(c, against)][:1]
    first, *rest = [c for c in diverse_configs([{}, *configs], n) if c not in compatible]
    return [first, *compatible, *rest][:n]


def is_compatible(own: SourceConfig, other: SourceConfig) -> bool:
    """Whether a source can run another's config: equal in the constants that both name, if any are."""
    common = own.keys() & other.keys()
    return bool(common) and all(own[name] == other[name] for name in common)


def diverse_configs(configs: Sequence[SourceConfig], n: int) -> tuple[SourceConfig, ...]:
    """At most `n` of them, as unlike each other as can be: the first, then the farthest from all taken.

    The distance counts doublings of positive numbers; other values are equal or one apart. Greedy k-centre
    (Gonzalez 1985). The order is the order in which they were taken.
    """
    if len(configs) <= n:
        return tuple(configs)
    numbers = [0]
    nearest = [_distance(configs[0], c) for c in configs]
    while len(numbers) < n:
        best = max(range(len(configs)), key=lambda i: (nearest[i], -i))
        numbers.append(best)
        nearest = [min(d, _distance(configs[best], c)) for d, c in zip(nearest, configs, strict=True)]
    return tuple(configs[i] for i in numbers)


def _distance(a: SourceConfig, b: SourceConfig) -> float:
    return sum(_value_distance(a.get(name), b.get(name)) for name in {*a, *b})


def _value_distance(a: Any, b: Any) -> float:
    numbers = [v for v in (a, b) if isinstance(v, int | float) and not isinstance(v, bool) and v > 0]
    if len(numbers) == 2:
        return abs(math.log2(numbers[0] / numbers[1]))
    return float(a != b)


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    """Values of module constants in upper case, by name: each assigned once, alone on the left."""
    results: dict[str, list[ast.expr | None]] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id.isupper():
                    results.setdefault(target.id, []).append(node.value if len(node.targets) == 1 else None)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            results.setdefault(node.target.id, []).append(node.value)
    once = {name: e[0] for name, e in results.items() if len(e) == 1 and name.isupper()}
    return {name: value for name, value in once.items() if value is not None}


MOST_CONFIGS, FEWEST_CONFIGS = 14, 8
"""Configs that are launched in a verification: at most, and at least where there are as many."""


def configs_to_launch(configs: Sequence[Config], most: int = MOST_CONFIGS) -> list[Config]:
    """At most so many of the configs, the first one first, each as unlike those before it as can be found.

    Every value that occurs of a parameter (warps, stages, a block's size), and every number of warps with every
    number of stages, is taken before any pair of values that was seen apart, so that what breaks at one value is
    launched; of both the one with the most for its price, see `_prices`, then the cheaper, then the earlier.
    Once they are all among `FEWEST_CONFIGS` or more, no other is taken: each has to be compiled.
    """
    unique = list(dict.fromkeys(configs))
    if len(unique) <= most:
        return unique
    prices = _prices(unique)
    results, rest = unique[:1], unique[1:]
    seen_values, seen_pairs = _values(results[0]), _pairs(results[0])
    values = {value for c in unique for value in _values(c)}
    while len(results) < most:
        if len(results) >= FEWEST_CONFIGS and seen_values == values:
            break
        gains = [
            (len(_values(c) - seen_values) / prices[c], len(_pairs(c) - seen_pairs) / prices[c], -prices[c])
            for c in rest
        ]
        results.append(rest.pop(gains.index(max(gains))))
        seen_values |= _values(results[-1])
        seen_pairs |= _pairs(results[-1])
    return results


def _prices(configs: Sequence[Config]) -> dict[Config, float]:
    """About what it costs to compile each: 1 for any, and twice as much again for the median of their work.

    An assembler takes half a minute for tiles that spill, and sizes of blocks are seen together with few warps and
    with small other blocks as well.
    """
    usual = statistics.median(map(work_of_a_warp, configs))
    return {c: 1.0 + 2.0 * work_of_a_warp(c) / usual for c in configs}


def _values(config: Config) -> set[Hashable]:
    schedule = ("warps and stages", (config.num_warps, config.num_stages))
    parameters = config.parameters().items()
    return {
        schedule,
        *((name, value if isinstance(value, Hashable) else repr(value)) for name, value in parameters),
    }


def _pairs(config: Config) -> set[Hashable]:
    values = sorted(_values(config), key=repr)
    return {(a, b) for n, a in enumerate(values) for b in values[n + 1 :]}


def work_of_a_warp(config: Config) -> float:
    """About how many elements of its tiles a warp has to work on."""
    numbers = [v for _, v in config.kwargs if isinstance(v, int) and not isinstance(v, bool) and v > 0]
    return math.prod(numbers) / max(1, config.num_warps)
