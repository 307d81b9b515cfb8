"""Every word of the glossary stands once; the code that it and the design decisions name is there."""

from __future__ import annotations

import importlib.util
import pkgutil
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_ROW = re.compile(r"^- \*\*(?P<word>[^*]+)\*\*: (?P<meaning>.+): `(?P<code>[\w.]+)`$")


def _rows() -> list[tuple[str, str]]:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("- ")]
    matches = [_ROW.match(line) for line in lines]
    assert all(matches), [line for line, match in zip(lines, matches, strict=True) if not match]
    return [(match["word"], match["code"]) for match in matches if match]


def test_a_word_stands_for_one_thing() -> None:
    words = [word for word, _ in _rows()]
    assert len(words) > 35
    assert len(set(words)) == len(words), sorted({w for w in words if words.count(w) > 1})


@pytest.mark.parametrize(("word", "code"), _rows(), ids=lambda value: value.replace(" ", "_"))
def test_the_code_of_a_word_is_there(word: str, code: str) -> None:
    if ".triton." in code and importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton")
    pkgutil.resolve_name(code)


def _own_code() -> list[str]:
    text = (ROOT / "docs" / "design" / "decisions.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| own code")]
    return [match[1] for row in rows if (match := re.search(r"`(forecast_[\w.]+)`", row))]


@pytest.mark.parametrize("module", _own_code())
def test_own_code_that_a_decision_names_is_there(module: str) -> None:
    assert importlib.util.find_spec(module) is not None
