"""`SourceJudgement`: what a language model expects of another source of a kernel, before anything is measured."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path

from forecast_autotune.errors import RecordError, SettingsError
from forecast_autotune.records.codec import Record
from forecast_autotune.records.named_lines import read_document


@dataclass(frozen=True)
class SourceJudgement(Record, label="judgement of a source", lenient=True):
    """What is expected of a source under its best config."""

    log2_ratio: float
    """log2(its best time / the best time of the source that it is held against); negative is faster."""
    sd: float
    """Standard deviation of that, as stated."""
    p_wrong: float = 0.0
    """Probability that it is wrong or never runs."""
    model: str = ""
    """Who said so; empty where that is not known."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.log2_ratio) and 0 < self.sd < math.inf and 0 <= self.p_wrong <= 1):
            raise RecordError(
                "a judgement of a source needs a finite log2_ratio, sd > 0 and p_wrong in [0, 1], got "
                f"{self.log2_ratio}, {self.sd} and {self.p_wrong}: leave the source out instead"
            )


def source_digest(text: str) -> str:
    """What a judgement is filed under: sha256 of the source's text."""
    return hashlib.sha256(text.encode()).hexdigest()


def read_judgements(path: Path) -> dict[str, SourceJudgement]:
    """Judgements by `source_digest`: JSON Lines with `source_sha256`, `log2_ratio`, `sd`, `p_wrong` and, if known,
    `model`.

    Raises `SettingsError` for a file that cannot be read, and for a line that is anything else.
    """
    found = {}
    try:
        for number, line in enumerate(read_document(path).splitlines(), 1):
            if not line.strip():
                continue
            try:
                one = json.loads(line)
                said = (float(one["log2_ratio"]), float(one["sd"]), float(one["p_wrong"]))
                found[str(one["source_sha256"])] = SourceJudgement(*said, str(one.get("model", "")))
            except (ValueError, KeyError, TypeError, RecursionError, RecordError) as error:
                raise SettingsError(
                    f"{path}, line {number}: a judgement has source_sha256, log2_ratio, sd > 0 and p_wrong in "
                    f"[0, 1] ({error!r})"
                ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(
            f"{path}: no judgements can be read ({error}); give a file of JSON Lines"
        ) from error
    return found
