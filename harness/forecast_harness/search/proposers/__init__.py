"""Who writes new sources: recorded ones, mechanical rewrites, language models, other programs."""

from __future__ import annotations

from forecast_autotune.errors import SettingsError
from forecast_harness.search.interfaces import Proposer
from forecast_harness.search.records import Target

FORMS = "mechanical, recorded:PATH, llm:SPEC or external:COMMAND"


def open_proposer(spec: str, target: Target) -> Proposer:
    """The proposer that `spec` names, for `target`.

    `spec`: `mechanical`; `recorded:` and a folder or a `.jsonl[.gz]` file; `llm:` and what
    FORECAST_AUTOTUNE_LLM accepts; `external:` and a command line. Raises `SettingsError` for another, or
    where what follows the colon cannot be used.
    """
    kind, _, rest = spec.strip().partition(":")
    if kind == "mechanical" and not rest:
        from forecast_harness.search.proposers.mechanical import Mechanical

        return Mechanical(target)
    if kind == "recorded" and rest:
        from forecast_harness.search.proposers.recorded import Recorded

        return Recorded(rest, target)
    if kind == "llm" and rest:
        from forecast_harness.search.proposers.llm import open_llm

        return open_llm(rest, target)
    if kind == "external" and rest:
        from forecast_harness.search.proposers.external import External

        return External(rest, target)
    raise SettingsError(f"a proposer is given as {FORMS}, not as {spec!r:.80}")
