"""Who writes new sources: recorded ones, mechanical rewrites, language models, other programs."""

from __future__ import annotations

from forecast_autotune.errors import SettingsError
from forecast_harness.records import SearchTarget
from forecast_harness.search.interfaces import Proposer

SPEC_FORMS = "mechanical, recorded:PATH, llm:SPEC or external:COMMAND"


def open_proposer(spec: str, target: SearchTarget, *, apart: bool = False) -> Proposer:
    """The proposer that `spec` names, for `target`; `apart`: what takes long is done in other processes.

    `spec`: `mechanical`; `recorded:` and a folder or a `.jsonl[.gz]` file; `llm:` and what
    FORECAST_AUTOTUNE_LLM accepts; `external:` and a command line. Raises `SettingsError` for another, or
    where what follows the colon cannot be used.
    """
    kind, _, rest = spec.strip().partition(":")
    if kind == "mechanical" and not rest:
        from forecast_harness.authors.mechanical import RewriteProposer

        return RewriteProposer(target, apart=apart)
    if kind == "recorded" and rest:
        from forecast_harness.authors.recorded import RecordedProposer

        return RecordedProposer(rest, target)
    if kind == "llm" and rest:
        from forecast_harness.authors.llm import open_llm_proposer

        return open_llm_proposer(rest, target)
    if kind == "external" and rest:
        from forecast_harness.authors.external import ExternalProposer

        return ExternalProposer(rest, target)
    raise SettingsError(f"a proposer is given as {SPEC_FORMS}, not as {spec!r:.80}")
