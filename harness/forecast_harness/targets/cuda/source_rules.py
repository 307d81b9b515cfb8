"""What a CUDA source may not say to the preprocessor: nothing outside of the toolkit's headers is read.

The cell in which a source is compiled has no files of the user's. These rules come before that, and hold where
a system has no such cells: what a compiler reads may end up in its messages, which language models are shown.
"""

from __future__ import annotations

import re

from forecast_autotune.errors import RecordError
from forecast_harness.targets.packs.schema import source_problem

_TRIGRAPH = re.compile(r"\?\?[=/'()!<>-]")
_LINE_SPLICE = re.compile(r"\\[ \t\f\v]*\r?\n")
_MARK = r"(?:\#|%:)\s*"
_HIDDEN_DIRECTIVE = re.compile(rf"{_MARK}/[*/]")
_DIRECTIVE = re.compile(rf"{_MARK}(?P<name>include_next|include|import|embed|line)\b(?P<rest>[^\r\n]*)")
_PRAGMA = re.compile(r"\b(?:pragma|_Pragma)[\s(\"]+GCC\b")
_QUESTION = re.compile(r"\b__has_(?:include|include_next|embed)\b")
_PLAIN_NAME = r"[A-Za-z0-9_][\w./+-]*"
_HEADER = re.compile(rf"\s*(?:<(?P<system>{_PLAIN_NAME})>|\"(?P<plain>{_PLAIN_NAME})\")\s*(?://.*|/\*.*)?")


def check_source_rules(source: str) -> None:
    """Raises `RecordError` for a source that asks the preprocessor for more than headers of the toolkit.

    Directives in comments and texts count, too: what a compiler takes for a comment is not decided here.
    """
    if said := source_problem(source):
        raise RecordError(said)
    if "\0" in source:
        raise RecordError("the source holds a NUL character, which no program needs: leave it out")
    if found := _TRIGRAPH.search(source):
        raise RecordError(f"{found[0]!r} is a trigraph: write the character that it stands for")
    text = _LINE_SPLICE.sub("", source)
    if found := _QUESTION.search(text):
        raise RecordError(f"{found[0]} asks which files there are: leave it out")
    if _PRAGMA.search(text):
        raise RecordError("#pragma GCC is for the host's compiler: leave it out")
    if found := _HIDDEN_DIRECTIVE.search(text):
        raise RecordError(
            f"a comment follows {found[0]!r}: write directives without comments before their names"
        )
    for found in _DIRECTIVE.finditer(text):
        header = _HEADER.fullmatch(found["rest"]) if found["name"] == "include" else None
        name = "" if header is None else header["system"] or header["plain"]
        if not name or ".." in name.split("/"):
            raise RecordError(
                f"#{found['name']}{found['rest']!s:.80} is refused: include headers of the toolkit and of C++ by their "
                "plain names, such as <cuda_fp16.h>"
            )
