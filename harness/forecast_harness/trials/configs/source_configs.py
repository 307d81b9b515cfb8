"""Configs of a pack's source: its own `CONFIGS`, values for constants that the same source defines.

A source may say at its top level::

    CHUNK = 64
    CONFIGS = [{"CHUNK": 32}, {"CHUNK": 64}, {"CHUNK": 128}]

Every object names module constants in upper case. A config is the source with those constants replaced, so
what is verified and timed is a source like any other. Nothing here imports or runs a source.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from forecast_autotune import python_parser
from forecast_autotune.errors import ForecastAutotuneError, RecordError
from forecast_autotune.variants.contract import evaluate_literal

SourceConfig = Mapping[str, Any]
MAX_CONFIGS = 512
"""Configs that one source may list."""
_CONSTANT_TYPES = (bool, int, float, str)


def configs_of(source: str) -> tuple[SourceConfig, ...]:
    """The configs that a source lists, without repeats; none where it lists none, or is not Python.

    Raises `RecordError` for a list that is no list of objects of plain values, is longer than `MAX_CONFIGS`, or
    names a constant that the source does not define.
    """
    try:
        tree = python_parser.parse_module(source)
    except (SyntaxError, ValueError, RecursionError):
        return ()
    defined = _constants(tree)
    if "CONFIGS" not in defined:
        return ()
    try:
        listed = evaluate_literal(defined.pop("CONFIGS"), {})
    except ValueError as error:
        raise RecordError(
            f"CONFIGS must be written out, or a comprehension over literals: {error}"
        ) from error
    if not isinstance(listed, list | tuple) or not all(isinstance(c, dict) for c in listed):
        raise RecordError('CONFIGS must be a list of objects like {"CHUNK": 64}')
    if len(listed) > MAX_CONFIGS:
        raise RecordError(f"CONFIGS may hold {MAX_CONFIGS} configs, not {len(listed)}")
    found: dict[str, SourceConfig] = {}
    for config in listed:
        for name, value in config.items():
            if name not in defined:
                raise RecordError(
                    f"CONFIGS names {name!r}, which is no upper-case constant of the source; those are "
                    f"{', '.join(sorted(defined)) or 'none'}"
                )
            if not isinstance(value, _CONSTANT_TYPES):
                raise RecordError(f"CONFIGS gives {name} a {type(value).__name__}: give a number or a text")
        found[repr(sorted(config.items()))] = dict(config)
    return tuple(found.values())


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
    defined = _constants(tree)
    if missing := sorted(set(config) - set(defined)):
        raise RecordError(f"the source defines no constant {', '.join(missing)}")
    lines = source.encode().splitlines(keepends=True)  # columns of the tree count bytes
    edits = [(defined[name], value) for name, value in config.items()]
    edits.sort(key=lambda edit: (edit[0].lineno, edit[0].col_offset), reverse=True)
    for node, value in edits:
        first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        before, after = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
        lines[first : last + 1] = [before + repr(value).encode() + after]
    return b"".join(lines).decode()


def own_configs(source: str) -> tuple[list[SourceConfig], str]:
    """The configs that a source lists and that change it, and a remark where its list cannot be used."""
    try:
        # The source as it stands is one of them often enough.
        return [c for c in configs_of(source) if apply_config(source, c) != source], ""
    except RecordError as error:
        return [], f"CONFIGS were not used: {error}"


class ConfigForecaster(Protocol):
    """Forecasts configs of a source, as `PackTracer` does."""

    def best_configs(self, source: str, configs: Sequence[SourceConfig], n: int) -> tuple[SourceConfig, ...]:
        """Up to `n` of them, the most promising first. Raises `ForecastAutotuneError`."""


def configs_to_time(
    source: str,
    listed: Sequence[SourceConfig],
    n: int,
    against: SourceConfig,
    forecaster: ConfigForecaster | None,
) -> Sequence[SourceConfig]:
    """At most `n` configs of a source to time, the source as it stands first.

    With a forecaster the next is the one that suits the rival's config `against`, and the others are forecast;
    without one, all are as unlike each other as can be.
    """
    every = diverse_configs([{}, *listed], n)
    first = [] if forecaster is None else [c for c in listed if is_compatible(c, against)][:1]
    if forecaster is None or len(listed) < n or (n < 3 and not first):
        return every
    taken = [{}, *first][:n]
    if len(taken) == n:
        return taken
    rest = [c for c in listed if c not in first]
    try:
        return (*taken, *forecaster.best_configs(source, rest, n - len(taken)))
    except ForecastAutotuneError:  # odd IR, or no second sandbox: a choice all the same
        return every


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
    taken = [0]
    nearest = [_distance(configs[0], c) for c in configs]
    while len(taken) < n:
        best = max(range(len(configs)), key=lambda i: (nearest[i], -i))
        taken.append(best)
        nearest = [min(d, _distance(configs[best], c)) for d, c in zip(nearest, configs, strict=True)]
    return tuple(configs[i] for i in taken)


def _distance(a: SourceConfig, b: SourceConfig) -> float:
    return sum(_value_distance(a.get(name), b.get(name)) for name in {*a, *b})


def _value_distance(a: Any, b: Any) -> float:
    numbers = [v for v in (a, b) if isinstance(v, int | float) and not isinstance(v, bool) and v > 0]
    if len(numbers) == 2:
        return abs(math.log2(numbers[0] / numbers[1]))
    return float(a != b)


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    """Values of module constants in upper case, by name: each assigned once, alone on the left."""
    found: dict[str, list[ast.expr | None]] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id.isupper():
                    found.setdefault(target.id, []).append(node.value if len(node.targets) == 1 else None)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.setdefault(node.target.id, []).append(node.value)
    once = {name: one[0] for name, one in found.items() if len(one) == 1 and name.isupper()}
    return {name: value for name, value in once.items() if value is not None}
