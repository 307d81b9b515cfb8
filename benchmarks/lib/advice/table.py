"""What language models wrote of the benchmark kernels, as `benchmarks/data/advice.jsonl.gz` has it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from forecast_autotune.llm.advice.record import Advice


def recorded_advice(path: Path, versions: Sequence[str] = ()) -> dict[str, Advice]:
    """Advice by the benchmark kernel's name: its latest answer first, the other one beside it.

    `versions`: only answers to these versions of the question.
    """
    answers: dict[str, list[Advice]] = {}
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            if row["type"] == "advice" and (not versions or row["version"] in versions):
                answers.setdefault(row["label"], []).append(Advice.from_json(row))
    found = {}
    for kernel, given in answers.items():
        first, *others = sorted(given, key=lambda a: a.version, reverse=True)
        found[kernel] = replace(first, others=tuple(a.text for a in others))
    return found
