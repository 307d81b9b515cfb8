"""The base kernel that variants are verified against: plain data for the judge. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forecast_autotune.errors import RecordError
from forecast_autotune.records import Argument, Config
from forecast_autotune.records.codec import Record, json_option
from forecast_autotune.records.json_fields import LARGEST_INTEGER, read_integer
from forecast_autotune.variants.contract import Contract, read_contract
from forecast_harness.targets.kernels.grids import GridSample
from forecast_harness.targets.kernels.sizes import CallSizes


def _read_launches(data: Sequence[Any]) -> tuple[GridSample, ...]:
    return tuple(GridSample(sizes, meta, tuple(grid)) for sizes, meta, grid in data)


def _read_words(words: Mapping[str, Any]) -> dict[str, str | int]:
    # A size that keeps its recorded value has that as its word, and it may be negative: an index to ignore, say.
    return {place: _read_word(place, word) for place, word in words.items()}


def _read_word(place: str, word: Any) -> str | int:
    if isinstance(word, str):
        return word
    try:
        return read_integer(word, f".{place}", -LARGEST_INTEGER)
    except RecordError as error:
        raise RecordError(f"{error}, or a text") from error


def _write_launches(launches: Sequence[GridSample]) -> list[Any]:
    return [[dict(launch.sizes), dict(launch.meta), list(launch.grid)] for launch in launches]


@dataclass(frozen=True)
class BaseKernel(Record, label="base kernel", complete=True):
    """A base kernel, and how it is called. All of it is the user's own, and trusted."""

    kernel: str
    source: str = field(repr=False)
    """Its self-contained module."""
    configs: tuple[Config, ...]
    """The base's, of which the first one that works serves as the reference."""
    calls: tuple[tuple[Argument, ...], ...] = ()
    """Recorded calls: the first is to be covered, others tell its sizes apart."""
    launches: tuple[GridSample, ...] = field(
        default=(), metadata=json_option(read=_read_launches, write=_write_launches)
    )
    """Recorded launch grids of any of the calls."""
    zeroed: tuple[str, ...] = ()
    """Tensors that a caller hands over as zeros."""
    file: str = ""
    """The user's file, where heuristics or `inputs` are needed of it; empty: it is not imported."""
    name: str = ""
    """The kernel's name in that file."""
    inputs: bool = False
    """Whether the file's `inputs(random)` draws the calls."""
    captured: str = field(default="", metadata=json_option(default=""))
    """The file of the first call's record, if it was captured; its tensors' contents lie beside it."""

    def require_fit(self, contract: Contract) -> None:
        """Raise `RecordError` unless a source can be launched as this kernel is; see `Contract.require_fit`."""
        contract.require_fit(read_contract(self.source, self.kernel), self.configs, self.calls)


@dataclass(frozen=True)
class KernelSurvey(Record, label="survey"):
    """Facts of a base kernel that running it alone shows."""

    writes: tuple[str, ...]
    """Tensors that it writes."""
    updates: tuple[str, ...]
    """Tensors of `writes` whose contents before the launch matter."""
    config: Config
    """The config that it serves as the reference with."""
    deterministic: bool
    """Whether equal inputs give equal bits."""
    words: Mapping[str, str | int] = field(default_factory=dict, metadata=json_option(read=_read_words))
    """Class of every size, by its first place."""
    evidence: int = 0
    """Cases required before sizes counted as multiples of others; see `CallSizes.of`."""
    untied: tuple[str, ...] = ()
    """Scalars that were equal to some size by chance, and keep their value."""
    most: int = 0
    """Elements of a tensor beyond which launches take too long."""
    signature: str = ""
    """The signature that a variant that passes is verified for."""
    grid: str = ""
    """The formula of launch grids at other sizes, for a person."""
    values: tuple[str, ...] = ()
    """The contents that a captured call's tensors get at its recorded sizes, see `CapturedCalls`."""
    rows_of: str = ""
    """The written tensor whose rows indices share out, see `RecordedCalls`."""
    unvaried: tuple[str, ...] = ()
    """Parts of a captured call that no verification varies, for a person."""

    def sizes(self, calls: Sequence[Sequence[Argument]]) -> CallSizes:
        """The sizes of recorded calls, with the classes that were found to work."""
        sizes = CallSizes.of(calls, evidence=self.evidence)
        for place in self.untied:
            sizes = sizes.untied(place)
        return sizes.with_classes({s: self.words.get(s.places[0], s.recorded) for s in sizes.sizes})
