"""Text that others wrote, made fit for a terminal, a page or a picture: no control characters, of bounded length.

Names of kernels, messages of compilers and reasons come out of files and processes. Raw, they could move the
cursor, write to the clipboard, reverse the direction of reading or fill the screen. JSON needs none of this:
`json.dumps` escapes what it writes.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

LONGEST_TEXT = 2000
"""Characters of a message or a reason that are shown; the rest is counted."""
LONGEST_NAME = 160
"""Characters of a name that are shown."""
REPLACEMENT = "\ufffd"
"""Stands for each character that is not shown."""


def printable(text: object, limit: int = LONGEST_TEXT, *, lines: bool = False) -> str:
    """The text of `str(text)` without anything that a terminal acts upon, at most `limit` characters of it.

    Line breaks and tabs become spaces. Control characters (escape, C0, C1), directional and other format
    characters, lone surrogates and what Unicode does not define become `REPLACEMENT`. Characters cut off are counted
    behind the text. With `lines`, the text keeps its lines, and `limit` holds for each of them.
    """
    whole = str(text)
    if lines:
        return "\n".join(printable(line, limit) for line in whole.splitlines())
    head = whole[:limit]
    if not head.isprintable():
        head = "".join(map(_shown_character, head))
    return head if len(whole) <= limit else f"{head}... ({len(whole):,} characters)"


def meant_text(word: str, words: Iterable[str]) -> str:
    """`; did you mean WORD?` for the nearest of the words, or nothing where none is near."""
    import difflib

    bare = {name.lstrip("-"): name for name in words}  # dashes alone make no two words alike
    near = difflib.get_close_matches(word[:LONGEST_NAME].lstrip("-"), bare, n=1, cutoff=0.65)
    return f"; did you mean {bare[near[0]]}?" if near else ""


def count_text(count: int, noun: str) -> str:
    """A number and a noun, in the plural where that is due."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def printable_line(text: str, limit: int) -> str:
    """At most `limit` characters of a text as one line: unprintable characters and runs of spaces are one space."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:limit]


def without_controls(text: str) -> str:
    """The same without control characters, and with its line breaks: as long as it was, character for character."""
    if text.isprintable():
        return text
    return "".join(c if c == "\n" else _shown_character(c) for c in text)


def _shown_character(character: str) -> str:
    if character.isprintable():
        return character
    return " " if character in "\t\n\r\v\f\x85\u2028\u2029" or character.isspace() else REPLACEMENT


def utc_now() -> str:
    """UTC time to the second, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")
