"""`Space`: named lists of meta-parameters and launch options with constraints, expanded lazily."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forecast_autotune.errors import SettingsError
from forecast_autotune.records import LAUNCH_OPTIONS, Config


@dataclass(frozen=True)
class Space:
    """A product of named value lists, thinned by constraints.

    Each constraint is called with all parameters by name (launch options included) and must return
    true to keep the candidate. Nothing is expanded before it is iterated.

    Examples:
        >>> wide_enough = lambda p: p["BLOCK"] >= 16 * p["num_warps"]
        >>> space = Space({"BLOCK": [64, 128]}, num_warps=[4, 8], where=[wide_enough])
        >>> [str(c) for c in space]
        ['BLOCK=64 warps=4 stages=3', 'BLOCK=128 warps=4 stages=3', 'BLOCK=128 warps=8 stages=3']
    """

    kwargs: Mapping[str, Sequence[Any]]
    num_warps: Sequence[int] = (4,)
    num_stages: Sequence[int] = (3,)
    num_ctas: Sequence[int] = (1,)
    maxnreg: Sequence[int | None] = (None,)
    where: Sequence[Callable[[dict[str, Any]], bool]] = ()
    pre_hook: Callable[..., Any] | None = field(default=None, compare=False)
    """Given to every `triton.Config` made from this space."""

    def __post_init__(self) -> None:
        for name, values in self._axes().items():
            if isinstance(values, str | bytes) or not isinstance(values, Sequence) or not values:
                raise SettingsError(f"Space: {name} needs a non-empty list of values, got {values!r}")
        clash = set(self.kwargs) & set(LAUNCH_OPTIONS)
        if clash:
            raise SettingsError(
                f"Space: give {', '.join(sorted(clash))} as an argument of Space, not inside kwargs"
            )

    def _axes(self) -> dict[str, Sequence[Any]]:
        return {**self.kwargs, **{name: getattr(self, name) for name in LAUNCH_OPTIONS}}

    def __iter__(self) -> Iterator[Config]:
        for assignment in self.assignments():
            launch = {name: assignment[name] for name in LAUNCH_OPTIONS}
            meta = {name: value for name, value in assignment.items() if name not in launch}
            yield Config.of(meta, **launch)

    def assignments(self) -> Iterator[dict[str, Any]]:
        """Every allowed assignment by name, values as the user wrote them."""
        axes = self._axes()
        for values in itertools.product(*axes.values()):
            assignment = dict(zip(axes, values, strict=True))
            if all(rule(assignment) for rule in self.where):
                yield assignment

    def upper_bound(self) -> int:
        """Size of the product before constraints."""
        return math.prod(len(values) for values in self._axes().values())
