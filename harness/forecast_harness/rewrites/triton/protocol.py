"""What a rewrite is: a function from one source to edited sources, each with a note."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from forecast_autotune.records import Argument, Config
from forecast_harness.rewrites.triton.facts import Facts
from forecast_harness.rewrites.triton.unit import Function, Unit


@dataclass(frozen=True)
class Context:
    """What is known besides the source. Nothing has to be: a rewrite then does without."""

    arch: int = 90
    """Compute capability times ten of the device the variants are for."""
    configs: tuple[Config, ...] = ()
    """The base's configs; a rewrite that adds a meta-parameter, or wants larger tiles, extends them."""
    arguments: tuple[Argument, ...] = ()
    """One call's arguments: types and sizes make some rewrites promising and others impossible."""
    multiprocessors: int = 132
    """Of the device the variants are for; a persistent kernel starts a multiple of it."""

    def dtype(self, name: str) -> str:
        """Data type of a tensor argument as torch names it; empty if not known."""
        return next((a.dtype or "" for a in self.arguments if a.name == name and a.kind == "tensor"), "")

    def facts(self, unit: Unit, function: Function) -> Facts:
        """Facts about a function; those about the entry include the types of its arguments."""
        known = [a.name for a in self.arguments if a.kind == "tensor" and a.dtype == "float32"]
        return Facts(unit, function, frozenset(known) if function is unit.entry else frozenset())

    def value(self, name: str) -> int | None:
        """Value of a scalar argument; None if not known."""
        given = next((a.value for a in self.arguments if a.name == name), None)
        return given if isinstance(given, int) and not isinstance(given, bool) else None


@dataclass(frozen=True)
class Edit:
    """One edited source."""

    unit: Unit
    note: str
    """What was changed and why, in a sentence."""
    promise: float
    """How much faster one may hope it is, in percent: orders variants, and claims nothing."""
    configs: tuple[Config, ...] = ()
    """In place of the base's; empty: the base's."""


@dataclass(frozen=True)
class Rewrite:
    """A named rewrite; see `registry`."""

    name: str
    summary: str
    """What it does, in a clause."""
    apply: Callable[[Unit, Context], Iterable[Edit]]
    """Yields nothing where its preconditions do not show in the text. Never changes its argument."""
    approximate: bool = False
    """Whether results may differ by rounding, as sums in another order do."""
    apart: frozenset[str] = frozenset()
    """Rewrites that gain nothing on top of this one."""
    version: int = 1
