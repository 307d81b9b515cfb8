"""Authors of new sources: mechanical rewrites, language models, files and records."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forecast_autotune.errors import SettingsError
from forecast_harness.authors.author import Author
from forecast_harness.records import SearchTarget

if TYPE_CHECKING:
    from forecast_harness.authors.mechanical import Rewriter

SPEC_FORMS = "mechanical, recorded:FOLDER, files:FOLDER or llm:SPEC"


def open_author(spec: str, target: SearchTarget, *, rewriter: Rewriter | None = None) -> Author:
    """The author that `spec` names, for `target`; `rewriter`: see `mechanical.Rewriter`.

    `spec`: `mechanical`; `llm:` and what FORECAST_AUTOTUNE_LLM accepts; `files:` or `recorded:` and a folder, see
    `external`. Raises `SettingsError` for another, or where what follows the colon cannot
    be used.
    """
    kind, _, rest = spec.strip().partition(":")
    if kind == "mechanical" and not rest:
        from forecast_harness.authors.mechanical import RewriteAuthor

        return RewriteAuthor(target, rewriter=rewriter)
    if kind == "llm" and rest:
        from forecast_harness.authors.llm import open_llm_author

        return open_llm_author(rest, target)
    if kind in ("files", "recorded") and rest:
        from forecast_harness.authors.external import AnswerFolder, RecordedSources

        return RecordedSources(rest, target) if kind == "recorded" else AnswerFolder(rest)
    raise SettingsError(f"a proposer is given as {SPEC_FORMS}, not as {spec!r:.80}")
