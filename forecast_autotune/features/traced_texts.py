"""TTIR texts by assignment, together with the facts that another process has read of them.

Parsing a long text takes as long as a whole forecast. Children that trace a kernel read it as well and answer
with both; here a text stays compressed until somebody asks for it, which a forecast does not.
"""

from __future__ import annotations

import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from forecast_autotune.features.candidate_list import Grid
from forecast_autotune.features.ttir.extraction import extract_facts
from forecast_autotune.features.ttir.facts import TtirFacts, facts_from_json, facts_to_json
from forecast_autotune.features.ttir.parser import FeatureError
from forecast_autotune.records import Argument


@lru_cache(maxsize=4096)
def cached_facts(text: str, arguments: tuple[Argument, ...], grid: Grid) -> TtirFacts | None:
    """`ttir.extraction.extract_facts`, remembered; None for text that cannot be read."""
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
        """`arguments` are those that added facts were read with."""
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
        self._facts = {key: one for key, one in self._facts.items() if key[0] != name}

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)

    def __contains__(self, name: object) -> bool:
        return name in self._texts

    @property
    def characters(self) -> int:
        """Of all texts together."""
        return sum(t.characters if isinstance(t, CompressedText) else len(t) for t in self._texts.values())

    def stored(self, name: str) -> str | CompressedText:
        """A text as it is kept. Raises `KeyError` where there is none."""
        return self._texts[name]

    def add(
        self, name: str, text: str | CompressedText, facts: Mapping[Grid, TtirFacts | None] | None = None
    ) -> None:
        """Add a text and, by launch grid, what was read of it with `arguments`; None: it cannot be read."""
        self._texts[name] = text
        self._facts.update({(name, grid): one for grid, one in (facts or {}).items()})

    def merge(self, other: Mapping[str, str]) -> None:
        """Add all of another mapping, with its facts where they are of the same arguments."""
        if not isinstance(other, TracedTexts):
            self._texts.update(other)
            return
        self._texts.update(other._texts)
        if other._facts and other.arguments == self.arguments:
            self._facts.update(other._facts)

    def facts(self, name: str, arguments: tuple[Argument, ...], grid: Grid) -> TtirFacts | None:
        """The facts of a text at these arguments and this grid; read here if nobody has.

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
    found = []
    for grid in grids:
        one = cached_facts(text, arguments, grid)
        found.append([None if grid is None else list(grid), None if one is None else facts_to_json(one)])
    return found


def decode_facts(encoded: Iterable[Any]) -> dict[Grid, TtirFacts | None]:
    """What `encode_facts` gave. Raises `ValueError`, `TypeError` or `KeyError` for anything else."""
    return {
        None if grid is None else tuple(map(int, grid)): None if told is None else facts_from_json(told)
        for grid, told in encoded
    }
