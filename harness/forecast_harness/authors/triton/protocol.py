"""The protocol of rewrites: functions from one source to edited sources, each with a note."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from forecast_autotune.records import Argument, Config
from forecast_harness.authors.triton.analysis.function_facts import FunctionFacts
from forecast_harness.authors.triton.analysis.source_unit import Function, SourceUnit


@dataclass(frozen=True)
class RewriteContext:
    """Facts besides the source. All of them may be missing: a rewrite then does without."""

    configs: tuple[Config, ...] = ()
    """The base's configs; a rewrite that adds a meta-parameter, or wants larger tiles, extends them."""
    arguments: tuple[Argument, ...] = ()
    """One call's arguments: types and sizes make some rewrites promising and others impossible."""

    def dtype(self, name: str) -> str:
        """Data type of a tensor argument as torch names it; empty if not known."""
        return next((a.dtype or "" for a in self.arguments if a.name == name and a.kind == "tensor"), "")

    def facts(self, unit: SourceUnit, function: Function) -> FunctionFacts:
        """Facts about a function; those about the entry include the types of its arguments."""
        float32 = [a.name for a in self.arguments if a.kind == "tensor" and a.dtype == "float32"]
        return FunctionFacts(unit, function, frozenset(float32) if function is unit.entry else frozenset())

    def value(self, name: str) -> int | None:
        """Value of a scalar argument; None if not known."""
        value = next((a.value for a in self.arguments if a.name == name), None)
        return value if isinstance(value, int) and not isinstance(value, bool) else None


@dataclass(frozen=True)
class SourceEdit:
    """One edited source."""

    unit: SourceUnit
    note: str
    """The change and its reason, in a sentence."""
    expected_gain: float
    """The gain to hope for, in percent: it orders variants, and claims nothing."""
    configs: tuple[Config, ...] = ()
    """Configs in place of the base's; empty: the base's."""


@dataclass(frozen=True)
class TritonRewrite:
    """A named rewrite; see `registry`."""

    name: str
    apply: Callable[[SourceUnit, RewriteContext], Iterable[SourceEdit]]
    """Yields nothing where its preconditions do not show in the text. Never changes its argument."""
    approximate: bool = False
    """Whether results may differ by rounding, as sums in another order do."""
    incompatible: frozenset[str] = frozenset()
    """Rewrites that gain nothing on top of this one."""
    version: int = 1
