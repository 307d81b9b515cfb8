"""`Advice`: a cost function of one kernel source with who wrote it and when, as it is stored and exchanged."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from forecast_autotune.llm.advice.language import CostFunction, parse_cost_function
from forecast_autotune.llm.advice.question import ADVICE_VERSION
from forecast_autotune.llm.advice.subject import AdviceError
from forecast_autotune.printable import printable
from forecast_autotune.records.codec import Record, json_option
from forecast_autotune.records.json_fields import SCHEMA, Extra, read_text

MATCH, SAME_SOURCE, SAME_FORM, SAME_PLACE = (
    "match",
    "same source",
    "same normal form",
    "same name and parameters",
)
"""Key of `Advice.extra` that says how installed advice was matched with a kernel, and its values."""
MAX_FUNCTIONS = 8
"""Cost functions of one record: each is evaluated in every decision."""


@dataclass(frozen=True)
class Advice(Record, tag="advice", schema=SCHEMA, lenient=True):
    """Advice of a language model on one kernel source; whether it is followed is up to the measurements."""

    kernel: str = field(metadata=json_option(read=read_text))
    source_sha256: str = field(metadata=json_option(read=read_text))
    """Digest of the source and everything it calls: advice is kept under it."""
    text: str = field(repr=False, metadata=json_option(read=read_text))
    """The cost function, a module of the restricted language."""
    model: str = ""
    """The author's name."""
    version: str = ADVICE_VERSION
    """Version of the question."""
    at: str = ""
    provenance: str = ""
    """How it came about, in a sentence."""
    others: tuple[str, ...] = field(default=(), repr=False)
    """Further cost functions, written independently: several are followed together, as none is sure."""
    extra: Extra = field(default_factory=dict, compare=False, repr=False)

    @property
    def origin(self) -> str:
        """Where installed advice comes from and how it was matched; empty for advice of the user's own store."""
        if MATCH not in self.extra:
            return ""
        release = f"{self.extra.get('package', 'unknown package')} {self.extra.get('package_version', '')}"
        return printable(f"installed, written for {release.strip()}, {self.extra[MATCH]}")[:200]

    @property
    def function(self) -> CostFunction:
        """The cost function. Raises `AdviceError` for a text that is not within the language."""
        return _parsed(self.text)

    @property
    def functions(self) -> tuple[CostFunction, ...]:
        """All of them, the first one first. Raises as `function` does, and for more than `MAX_FUNCTIONS`."""
        if len(self.others) >= MAX_FUNCTIONS:
            raise AdviceError(
                f"advice holds {MAX_FUNCTIONS} cost functions at most, this has {1 + len(self.others)}"
            )
        return tuple(map(_parsed, (self.text, *self.others)))


@lru_cache(maxsize=256)
def _parsed(text: str) -> CostFunction:
    return parse_cost_function(text)
