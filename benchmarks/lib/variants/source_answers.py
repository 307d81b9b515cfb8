"""A language model's blind answers on recorded sources: what it forecast before it could know any time.

`data/source_answers.jsonl.gz` holds a line that says who answered, how and when, then one per kernel: digest of
the question as it was put, the sources in the question's order, and for each the forecast log2(best time / best
time of the base), geometric mean over shapes, its standard deviation, P(wrong or never runs) and why in words.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ANSWERS = Path(__file__).parents[2] / "data" / "source_answers.jsonl.gz"
_FIGURES = ("log2_ratio", "sd", "p_wrong")


@dataclass(frozen=True)
class SourceAnswer:
    """What was said of one source."""

    log2_ratio: float
    """log2(its best time / the base's best time); negative is faster."""
    sd: float
    p_wrong: float
    why: str = ""


def pack_answers(folder: Path, index: Mapping[str, list[str]], about: Mapping[str, Any], to: Path) -> int:
    """Write what lies in `folder`: `q/<kernel>.md`, `answers/<kernel>.json`; returns the number of answers.

    `index` has the sources of each kernel in the order of its question. Kernels without an answer are left
    out. Raises `ValueError` for an answer that is not one number per source.
    """
    lines = [dict(about)]
    count = 0
    for kernel, names in sorted(index.items()):
        path = folder / "answers" / f"{kernel}.json"
        if not path.is_file():
            continue
        said = json.loads(path.read_text(encoding="utf-8"))
        if any(len(said[key]) != len(names) for key in (*_FIGURES, "why")):
            raise ValueError(f"{path.name}: {len(names)} sources were asked about")
        asked = (folder / "q" / f"{kernel}.md").read_bytes()
        figures = {key: [float(v) for v in said[key]] for key in _FIGURES}
        lines.append(
            {
                "kernel": kernel,
                "question_sha256": hashlib.sha256(asked).hexdigest(),
                "sources": names,
                **figures,
                "why": said["why"],
            }
        )
        count += len(names)
    # mtime=0: the same answers give the same bytes.
    with to.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as packed:
        packed.writelines(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)
    return count


def read_answers(path: Path = ANSWERS) -> tuple[dict[str, Any], dict[str, SourceAnswer]]:
    """Who answered, and what was said by name of the source."""
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        about, *lines = map(json.loads, stream)
    found = {}
    for line in lines:
        columns = (*(line[key] for key in _FIGURES), line["why"])
        for name, *said in zip(line["sources"], *columns, strict=True):
            found[name] = SourceAnswer(*said)
    return about, found
