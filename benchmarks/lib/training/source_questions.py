"""Questions about recorded sources for a small model, and what it is taught: measured ratios and blind answers.

A question shows one source of a kernel as a diff against another, in full and in canonical form (the text of its
syntax tree, so that comments and layout say nothing), the arguments of the first recorded shape, and the product's
bins. Its answer is the bin of best time / the other's best time.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.lib.search.source_pool import BASE
from benchmarks.lib.variants.corpus_packing import source_texts
from benchmarks.lib.variants.source_answers import SourceAnswer
from forecast_autotune.llm.bins import BINS
from forecast_autotune.records import Outcome
from forecast_autotune.records.table import Table, read_tables

FloatArray = npt.NDArray[np.float64]

MEASURED_SD = 0.05
"""log2: noise of a recorded ratio, and how far a bin's neighbours are answers, too."""
LEAST_ANSWER_SD = 0.03
"""log2, of an answer: what is said of a change that does nothing must not be surer than a clock."""
_ARGUMENTS = 24


@dataclass(frozen=True)
class SourceExample:
    """One recorded source beside its kernel's base."""

    kernel: str
    family: str
    name: str
    text: str
    sha256: str
    """Of the text as it was recorded."""
    base: str
    """Text of the base."""
    arguments: str
    """Arguments of the first recorded shape, in words."""
    log2_ratio: float | None
    """log2(best time / the base's best), mean over shapes; None where it is wrong or never ran."""
    wrong: bool
    answer: SourceAnswer | None
    """What a strong model said, blind."""

    @property
    def known(self) -> bool:
        """Whether the recording says what became of it."""
        return self.wrong or self.log2_ratio is not None


@lru_cache(maxsize=8192)
def canonical_text(source: str) -> str:
    """The text of a source's syntax tree."""
    return ast.unparse(ast.parse(source))


def measured_ratios(tables: Sequence[Table]) -> dict[str, float]:
    """log2(best time / the base's best time) by variant, mean over the shapes at which both ran."""
    found: dict[str, list[float]] = {}
    for table in tables:
        best: dict[str, float] = {}
        for candidate, row in table.by_candidate().items():
            if row.ok:
                log2_ms = math.log2(row.ms)
                best[candidate.variant] = min(log2_ms, best.get(candidate.variant, math.inf))
        if BASE in best:
            for variant, log2_ms in best.items():
                found.setdefault(variant, []).append(log2_ms - best[BASE])
    return {variant: float(np.mean(values)) for variant, values in found.items()}


def arguments_text(table: Table) -> str:
    """Arguments of a problem in words: tensors with dtype and shape, numbers with value, then the tuner's key."""
    shown = []
    for one in table.problem.arguments[:_ARGUMENTS]:
        if one.shape:
            shown.append(f"{one.name} {one.dtype}[{', '.join(map(str, one.shape))}]")
        elif one.value is not None:
            shown.append(f"{one.name}={one.value}")
    return "; ".join([*shown, f"key ({', '.join(table.problem.key)})"])


def read_examples(path: Path, answers: Mapping[str, SourceAnswer]) -> list[SourceExample]:
    """All recorded sources that are not the base, kernel by kernel."""
    by_kernel: dict[str, list[Table]] = {}
    for table in read_tables(path):
        by_kernel.setdefault(table.problem.extra["label"].partition("/")[0], []).append(table)
    found = []
    for kernel, tables in by_kernel.items():
        texts, ratios = source_texts(tables)[kernel], measured_ratios(tables)
        extra = tables[0].problem.extra
        for variant, told in extra["sources"].items():
            if variant == BASE:
                continue
            outcome = told.get("outcome", "")
            found.append(
                SourceExample(
                    kernel,
                    extra["family"],
                    told["name"],
                    texts[variant],
                    hashlib.sha256(texts[variant].encode()).hexdigest(),
                    texts[BASE],
                    arguments_text(tables[0]),
                    ratios.get(variant) if outcome == Outcome.OK else None,
                    outcome != Outcome.OK,
                    answers.get(told["name"]),
                )
            )
    return found


@lru_cache(maxsize=16384)
def question_text(old: str, new: str, arguments: str) -> str:
    """What a model reads: how long does `new` take, over the time of `old`? Ends with "Answer:"."""
    before, after = canonical_text(old).splitlines(), canonical_text(new).splitlines()
    lines = list(difflib.unified_diff(before, after, lineterm="", n=len(before) + len(after)))[3:]
    shown = "\n".join(lines or [f" {line}" for line in before])
    return (
        "A Triton kernel for an NVIDIA H200 is rewritten. Lines with - are in the old source alone, lines with + "
        f"in the new one.\nArguments: {arguments}\n```\n{shown}\n```\n"
        "Letter of the new source's best time / the old source's best time:\n"
        f"{BINS.table()}\nAnswer:"
    )


def answer_bins(mean: float, sd: float, p_wrong: float) -> FloatArray:
    """An answer's distribution over the product's bins and "fails", [labels]."""
    found = BINS.soft_targets([mean], max(LEAST_ANSWER_SD, sd))[0] * (1.0 - p_wrong)
    found[BINS.failure_index] += p_wrong
    return np.asarray(found)


@dataclass(frozen=True)
class TaughtPair:
    """A question with its target."""

    example: SourceExample
    text: str
    target: FloatArray
    """Over the bins and "fails", [labels]."""
    label: int
    """The measured one."""


def taught_pair(new: SourceExample, old: SourceExample | None, answer_share: float) -> TaughtPair:
    """The question of `new` against `old` (None: the base), with `answer_share` of the target from the answers.

    Raises `ValueError` where `old` is wrong or nothing is known of `new`.
    """
    if not new.known or (old is not None and old.log2_ratio is None):
        raise ValueError(f"{new.name} against {old.name if old else 'the base'}: no measured ratio to teach")
    reference = 0.0 if old is None or old.log2_ratio is None else old.log2_ratio
    ratio = math.nan if new.log2_ratio is None else new.log2_ratio - reference
    target = BINS.soft_targets([ratio], MEASURED_SD)[0]
    label = BINS.failure_index if math.isnan(ratio) else int(BINS.index(ratio))
    said, other = new.answer, None if old is None else old.answer
    if answer_share and said is not None and (old is None or other is not None):
        shift, spread = (other.log2_ratio, other.sd) if other is not None else (0.0, 0.0)
        theirs = answer_bins(said.log2_ratio - shift, math.hypot(said.sd, spread), said.p_wrong)
        target = (1.0 - answer_share) * target + answer_share * theirs
    text = question_text(new.base if old is None else old.text, new.text, new.arguments)
    return TaughtPair(new, text, target, label)


def epoch_pairs(
    examples: Sequence[SourceExample],
    answer_share: float,
    base_share: float,
    generator: np.random.Generator,
) -> list[TaughtPair]:
    """Every example once, against the base or, with 1 - `base_share`, another right source of its kernel."""
    by_kernel: dict[str, list[SourceExample]] = {}
    for one in examples:
        if one.log2_ratio is not None:
            by_kernel.setdefault(one.kernel, []).append(one)
    found = []
    for one in examples:
        others = [other for other in by_kernel.get(one.kernel, []) if other is not one]
        old = None
        if others and generator.random() >= base_share:
            old = others[int(generator.integers(len(others)))]
        found.append(taught_pair(one, old, answer_share))
    return found


def family_folds(examples: Sequence[SourceExample], count: int) -> list[frozenset[str]]:
    """Families in `count` groups of about as many sources each; the same examples give the same groups.

    Raises `ValueError` for fewer families than groups.
    """
    sizes: dict[str, int] = {}
    for one in examples:
        sizes[one.family] = sizes.get(one.family, 0) + 1
    if len(sizes) < count or count < 2:
        raise ValueError(
            f"{len(sizes)} families cannot be held out in {count} groups: take 2 or more, and fewer"
        )
    groups: list[set[str]] = [set() for _ in range(count)]
    held = [0] * count
    for family, size in sorted(sizes.items(), key=lambda pair: (-pair[1], pair[0])):
        least = held.index(min(held))
        groups[least].add(family)
        held[least] += size
    return [frozenset(group) for group in groups]


def length_batches(
    lengths: Sequence[int], most_tokens: int, generator: np.random.Generator | None
) -> Iterator[list[int]]:
    """Indices in batches of at most `most_tokens` with padding, of like lengths; shuffled if there is a generator."""
    size = np.asarray(lengths, float)
    jitter = 1.0 if generator is None else np.exp(generator.normal(0.0, 0.05, len(size)))
    batches: list[list[int]] = []
    own: list[int] = []
    longest = 0
    for i in np.argsort(size * jitter, kind="stable"):
        grown = max(longest, int(size[i]))
        if own and grown * (len(own) + 1) > most_tokens:
            batches.append(own)
            own, grown = [], int(size[i])
        own.append(int(i))
        longest = grown
    if own:
        batches.append(own)
    order = range(len(batches)) if generator is None else generator.permutation(len(batches))
    yield from (batches[int(k)] for k in order)
