"""Concise traces for training kernel writers: of all replies that led to a correct kernel, the shortest.

A writer that is trained on everything that worked learns to ramble; per problem the shortest trace of a
correct and fastest-enough kernel is kept (concise-trace curation).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forecast_autotune.errors import RecordError
from forecast_autotune.file_access import open_named_output
from forecast_autotune.records.codec import Record, json_option
from forecast_autotune.records.json_fields import tuple_of
from forecast_autotune.records.table import read_lines


def _read_message(value: Any) -> dict[str, str]:
    return {name: str(value[name]) for name in ("role", "content")}


@dataclass(frozen=True)
class WriterTrace(Record, tag="trace"):
    """One attempt of a writer: what it was asked, what it said, what became of it."""

    problem: str
    messages: tuple[Mapping[str, str], ...] = field(metadata=json_option(read=tuple_of(_read_message)))
    """The dialogue up to the reply: role and content each."""
    reply: str
    correct: bool
    ms: float | None = field(metadata=json_option(default=None))
    """Median time of its best config; None: not measured."""
    model: str = ""

    def __post_init__(self) -> None:
        if self.ms is not None and not (math.isfinite(self.ms) and self.ms > 0):
            raise RecordError(f"ms must be positive, got {self.ms}")


def load_traces(path: Path) -> list[WriterTrace]:
    """The `trace` lines of a JSON Lines file; other lines are passed over. Raises `RecordError`."""
    results = []
    for number, data in read_lines(path):
        if data.get("type") == "trace":
            try:
                results.append(WriterTrace.from_json(data))
            except RecordError as error:
                raise RecordError(f"{path}:{number}: {error}") from error
    return results


def shortest_correct(
    traces: Iterable[WriterTrace], *, slack: float = 0.05, keep: int = 1
) -> list[WriterTrace]:
    """Per problem the `keep` shortest correct replies whose kernel is within `slack` of the fastest known.

    Where none of a problem's kernels was measured, every correct one counts. Ties go to the earlier trace;
    problems come in order of appearance. Raises `ValueError` for `keep` below 1 or a negative `slack`.
    """
    if keep < 1 or slack < 0:
        raise ValueError(f"keep at least 1 trace with a slack of at least 0, got {keep} and {slack}")
    problems: dict[str, list[WriterTrace]] = {}
    for trace in traces:
        if trace.correct and trace.reply.strip():
            problems.setdefault(trace.problem, []).append(trace)
    chosen: list[WriterTrace] = []
    for good in problems.values():
        best = min((t.ms for t in good if t.ms is not None), default=None)
        fast = [t for t in good if best is None or (t.ms is not None and t.ms <= best * (1 + slack))]
        chosen += sorted(fast, key=lambda t: len(t.reply))[:keep]
    return chosen


def write_chats(path: Path, traces: Sequence[WriterTrace]) -> int:
    """Write dialogues as JSON Lines with `messages`, which TRL's SFTTrainer takes as they are, atomically."""
    with open_named_output(path) as stream:
        for t in traces:
            messages = [*map(dict, t.messages), {"role": "assistant", "content": t.reply}]
            line = json.dumps({"messages": messages, "problem": t.problem}, ensure_ascii=False)
            # A lone surrogate has no place in a file of text.
            stream.write(f"{line}\n".encode("utf-8", "replace"))
    return len(traces)
