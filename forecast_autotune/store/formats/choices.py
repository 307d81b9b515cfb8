"""Files that hold no measurement: the winners of other tuners, without their times, and what lies beside logs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from forecast_autotune.store.formats.protocol import Format, Reading, Row, head_text

_HEADS = (
    (r'"flashinfer_version"\s*:|\A\s*\{\s*"\(\'[\w:.]+\', ', "FlashInfer's cache"),
    (r'"autotune_entries"\s*:', "fla's configs"),
    (r'\A\s*\{\s*"GEM[MV]\w*"\s*:\s*\{', "GemLite's configs"),
    (
        r'\A\s*\{\s*("triton_version"\s*:[^,]*,\s*)?"\d+"\s*:\s*\{\s*"BLOCK_SIZE_M"',
        "vLLM's or SGLang's configs",
    ),
    (r'\A\s*\{\s*"latency"\s*:[^{}]*"ref_latency"', "TileLang's winner, without its config"),
    (r'"configs_hash"\s*:|"LooseAutotuneCacheKey"|"flat_config"\s*:', "the winner of a cache"),
)
_NAMES = {".best_config": "the winner of a cache", "best_config.json": "TileLang's winner"}
_BESIDE = (
    (
        re.compile(r'\A\s*\{[^\n]*"kernel_source"\s*:'),
        ".meta.jsonl",
        "is read with Helion's log, whose runs it describes",
    ),
    (re.compile(r'\A\s*\["-?\d+",\s*"'), "", "is read with MetaSchedule's records, whose workloads it holds"),
)


def _text(path: Path, head: str) -> str:
    """The words on a file that is known to hold no measurement; empty for any other."""
    for pattern, end, words in _BESIDE:
        if path.name.endswith(end) and pattern.match(head):
            return words
    name_text = next(
        (text for end, text in _NAMES.items() if path.name.endswith(end) and head.lstrip()[:1] == "{"), ""
    )
    tool = name_text or next((text for pattern, text in _HEADS if re.search(pattern, head)), "")
    return f"holds choices, no times ({tool})" if tool else ""


def _read(reading: Reading) -> Iterator[Row]:
    reading.left_out[_text(reading.path, head_text(reading.path))] += 1
    return iter(())


FORMAT = Format(
    "choices", "TileLang, FlashInfer, GemLite, vLLM, SGLang, fla, Helion's and Inductor's `.best_config`",
    "winners, named and left out",
    lambda path, head: bool(_text(path, head)), _read,
    "", None, "everything: a choice without times teaches nothing",
)  # fmt: skip
