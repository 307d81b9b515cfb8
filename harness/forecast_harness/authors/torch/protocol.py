"""What a rewrite of a torch source is: a function from one source to edited ones, each with a note."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forecast_harness.authors.torch.source_code import ParsedSource


@dataclass(frozen=True)
class InputFacts:
    """What is known besides the source; nothing has to be."""

    rows: tuple[str, ...] = ()
    """Inputs and destinations whose first axis is the first axis of every output, and of no other use."""
    outputs: int = 0
    """Number of outputs that the entry returns; 0 if it writes into destinations, or if not known."""


@dataclass(frozen=True)
class TorchEdit:
    """One edited source."""

    text: str = field(repr=False)
    note: str
    """What was changed and why, in a sentence."""


@dataclass(frozen=True)
class TorchRewrite:
    """A named rewrite; see `registry`."""

    name: str
    apply: Callable[[ParsedSource, InputFacts], Iterable[TorchEdit]]
    """Yields nothing where it does not apply. Never changes its argument."""
