"""Sources and their differences, bounded and made safe to look at."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from forecast_harness.records import Node

MAX_CHARACTERS = 3_000_000
"""Of all sources in one page together."""
MAX_LINES = 1_500
"""Of one source; longer ones are cut, and say so."""
MAX_LINE_CHARACTERS = 4_000
"""Characters of one line."""


@dataclass(frozen=True)
class DisplayedSource:
    """A source as it is shown."""

    lines: tuple[str, ...]
    cut: bool
    """Whether lines, or ends of lines, are missing."""


def escape_invisible(text: str) -> str:
    """The text with every character that a reader cannot see, or that moves others, spelled out.

    Keeps tabs and line feeds. Among the rest are controls, bidirectional overrides (which make a source read
    differently from what runs), zero-width characters and lone surrogates.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c in "\t\n" or not _is_invisible(c) else f"\\u{{{ord(c):x}}}" for c in text)


def _is_invisible(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


@lru_cache(maxsize=4096)
def display_source(source: str) -> DisplayedSource:
    """Lines of a source, at most `MAX_LINES` of at most `MAX_LINE_CHARACTERS` characters."""
    lines = source.replace("\r\n", "\n").removesuffix("\n").split("\n")
    kept = [escape_invisible(line[:MAX_LINE_CHARACTERS]) for line in lines[:MAX_LINES]]
    return DisplayedSource(
        tuple(kept), len(kept) < len(lines) or any(len(line) > MAX_LINE_CHARACTERS for line in lines)
    )


@lru_cache(maxsize=4096)
def line_opcodes(before: str, after: str) -> tuple[tuple[str, int, int, int, int], ...]:
    """How the shown lines of one source become another's: difflib's opcodes, `equal` included."""
    a, b = display_source(before).lines, display_source(after).lines
    # Empty lines are everywhere alike: what is matched must not hang on them.
    matcher = difflib.SequenceMatcher(lambda line: not line.strip(), a, b, autojunk=len(b) > 400)
    return tuple(matcher.get_opcodes())


def sources_within(nodes: Iterable[Node], most: int = MAX_CHARACTERS) -> list[Node]:
    """The first of `nodes` whose sources fit together into `most` characters; at least one, if any."""
    found: list[Node] = []
    for node in nodes:
        most -= sum(len(line) + 1 for line in display_source(node.source).lines)
        if most < 0 and found:
            break
        found.append(node)
    return found
