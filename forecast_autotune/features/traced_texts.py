"""TTIR texts by assignment, with the facts that another process has extracted from them.

Parsing a long text takes as long as a whole forecast. Child processes that trace a kernel parse its text as well, and
return both; here a text stays compressed until it is read, which a forecast does not do.

Facts are also stored beside measurements, as JSON, for refits without the texts. A text has tens of kilobytes, its
facts a few hundred bytes. Facts of another version are ignored.
"""

from __future__ import annotations

import time
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from forecast_autotune.features.candidate_list import CandidateList, Grid
from forecast_autotune.features.ttir.extraction import extract_facts
from forecast_autotune.features.ttir.facts import TtirFacts, facts_from_json, facts_to_json
from forecast_autotune.features.ttir.parser import FeatureError
from forecast_autotune.records import Argument, Candidate, Problem, digest
from forecast_autotune.records.problem import FACTS


@lru_cache(maxsize=4096)
def cached_facts(text: str, arguments: tuple[Argument, ...], grid: Grid) -> TtirFacts | None:
    """`ttir.extraction.extract_facts`, cached; None for text that cannot be read."""
    try:
        return extract_facts(text, arguments, grid)
    except FeatureError:
        return None


@dataclass(frozen=True, slots=True)
class CompressedText:
    """A text in a tenth of its size, as JSON can hold it."""

    data: str
    """Base64 of zlib."""
    characters: int
    """Length of the text."""

    @classmethod
    def of(cls, text: str) -> CompressedText:
        """Compress; a text of 100 kB takes about 2 ms."""
        return cls(b64encode(zlib.compress(text.encode(), 1)).decode("ascii"), len(text))

    def expand(self) -> str:
        """The text; 100 kB take about 0.3 ms."""
        return zlib.decompress(b64decode(self.data)).decode()


class TracedTexts(MutableMapping[str, str]):
    """TTIR text by assignment (`ttir.extraction.assignment_key`), with facts for one call's arguments."""

    def __init__(self, arguments: tuple[Argument, ...] = ()) -> None:
        """`arguments` are those of the facts that `add` takes."""
        self.arguments = arguments
        self._texts: dict[str, str | CompressedText] = {}
        self._facts: dict[tuple[str, Grid], TtirFacts | None] = {}

    def __getitem__(self, name: str) -> str:
        text = self._texts[name]
        return text if isinstance(text, str) else text.expand()

    def __setitem__(self, name: str, text: str) -> None:
        self.add(name, text)

    def __delitem__(self, name: str) -> None:
        del self._texts[name]
        self._facts = {key: facts for key, facts in self._facts.items() if key[0] != name}

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)

    def __contains__(self, name: object) -> bool:
        return name in self._texts

    @property
    def characters(self) -> int:
        """Length of all texts together."""
        return sum(t.characters if isinstance(t, CompressedText) else len(t) for t in self._texts.values())

    def stored(self, name: str) -> str | CompressedText:
        """A text as it is stored, compressed or not. Raises `KeyError` where there is none."""
        return self._texts[name]

    def add(
        self, name: str, text: str | CompressedText, facts: Mapping[Grid, TtirFacts | None] | None = None
    ) -> None:
        """Add a text and, by launch grid, its facts at `arguments`; None for a text that cannot be read."""
        self._texts[name] = text
        self._facts.update({(name, grid): each for grid, each in (facts or {}).items()})

    def merge(self, other: Mapping[str, str]) -> None:
        """Add all of another mapping, with its facts where these are for the same arguments."""
        if not isinstance(other, TracedTexts):
            self._texts.update(other)
            return
        self._texts.update(other._texts)
        if other._facts and other.arguments == self.arguments:
            self._facts.update(other._facts)

    def facts(self, name: str, arguments: tuple[Argument, ...], grid: Grid) -> TtirFacts | None:
        """The facts of a text at these arguments and this grid, extracted at the first call.

        None for a text that cannot be read. Raises `KeyError` where there is none.
        """
        if arguments is not self.arguments and arguments != self.arguments:
            return cached_facts(self[name], arguments, grid)
        if (name, grid) not in self._facts:
            self._facts[name, grid] = cached_facts(self[name], arguments, grid)
        return self._facts[name, grid]


def facts_of_text(
    texts: Mapping[str, str], name: str, arguments: tuple[Argument, ...], grid: Grid
) -> TtirFacts | None:
    """The facts of one text of a mapping, like `TracedTexts.facts` of any mapping."""
    if isinstance(texts, TracedTexts):
        return texts.facts(name, arguments, grid)
    return cached_facts(texts[name], arguments, grid)


def encode_facts(text: str, arguments: tuple[Argument, ...], grids: Iterable[Grid]) -> list[Any]:
    """The facts of a text at each of these grids as JSON, for `decode_facts` in another process."""
    pairs = ((grid, cached_facts(text, arguments, grid)) for grid in grids)
    return [[grid and list(grid), facts and facts_to_json(facts)] for grid, facts in pairs]


def decode_facts(encoded: Iterable[Any]) -> dict[Grid, TtirFacts | None]:
    """Read the output of `encode_facts`. Raises `ValueError`, `TypeError` or `KeyError` for anything else."""
    return {
        None if grid is None else tuple(map(int, grid)): None if data is None else facts_from_json(data)
        for grid, data in encoded
    }


_SEMANTICS_VERSION = 2
"""Counts up when the meaning of a fact changes; new and renamed facts change the version by themselves."""
_NAMES = [f.name for f in fields(TtirFacts)]
VERSION = f"{_SEMANTICS_VERSION}-{digest(_NAMES)[:8]}"
_EARLIER: Mapping[str, Mapping[str, float]] = {
    **{v: {"opaque": 1.0} for v in ("2-d3e997e4", "2-18cc0fa7")},
    "2-12390690": {},
}
"""Earlier versions whose facts have the same meaning, with values for the facts that they lack (bytes are a guess)."""


def collect_facts(
    problem: Problem,
    candidates: Sequence[Candidate],
    grids: Mapping[Candidate, tuple[int, ...]],
    ttir: Mapping[str, str],
    *,
    within_s: float,
) -> dict[str, Any]:
    """The facts of these candidates as `FACTS` holds them; without units where there is no TTIR.

    Texts that a surrogate has read in this process cost nothing. Other texts are left out after `within_s` seconds.
    """
    end = time.perf_counter() + within_s
    candidates = CandidateList.of(candidates)
    names, keys = candidates.assignments
    units = candidates.units(grids, problem.grid)
    results: dict[tuple[str, Grid], TtirFacts] = {}
    for row in units.first.tolist():
        name, grid = names[keys[row]], units.grids[row]
        if name not in ttir or (name, grid) in results:
            continue
        if time.perf_counter() > end:
            break
        if (facts := facts_of_text(ttir, name, problem.arguments, grid)) is not None:
            results[name, grid] = facts
    return {"version": VERSION, "units": [_encode_unit(*unit, facts) for unit, facts in results.items()]}


def merge_facts(old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> dict[str, Any]:
    """Both, as far as `old` has this version; `new` replaces units of `old`."""
    units = {**_decode_units(old), **_decode_units(new)}
    return {"version": VERSION, "units": [_encode_unit(*unit, facts) for unit, facts in units.items()]}


def facts_by_unit(problem: Problem) -> dict[tuple[str, Grid], TtirFacts]:
    """The facts in a problem's record by (assignment, grid); empty without any, or for another version."""
    return _decode_units(problem.extra.get(FACTS))


def fact_count(problem: Problem) -> int:
    """The number of units in a record, readable or not, without reading them."""
    record = problem.extra.get(FACTS)
    units = record.get("units") if isinstance(record, Mapping) else None
    return len(units) if isinstance(units, list) else 0


def _encode_unit(assignment: str, grid: Grid, facts: TtirFacts) -> list[Any]:
    return [assignment, None if grid is None else list(grid), facts_to_json(facts)]


def _decode_units(data: Any) -> dict[tuple[str, Grid], TtirFacts]:
    """The units of a record, without malformed ones: people edit and merge stores."""
    version = data.get("version") if isinstance(data, Mapping) else None
    if not isinstance(data, Mapping) or (version != VERSION and version not in _EARLIER):
        return {}
    defaults = _EARLIER.get(str(version), {})
    results: dict[tuple[str, Grid], TtirFacts] = {}
    units = data.get("units")
    for unit in units if isinstance(units, list) else []:
        try:
            assignment, grid, payload = unit
            where = None if grid is None else tuple(int(n) for n in grid)
            values = payload if version == VERSION else {n: v for n, v in payload.items() if n in _NAMES}
            results[str(assignment), where] = facts_from_json({**defaults, **values})
        except (TypeError, ValueError, KeyError, OverflowError, AttributeError):
            continue
    return results
