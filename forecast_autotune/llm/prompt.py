"""One prompt contract for configs, variants and whole kernels: a shared prefix, one suffix per candidate.

The prefix holds what all candidates of a problem share (source, device, sizes, reference, measured
neighbours, the table of bins), so a model reads it once; a suffix holds one candidate and what the features
know of it, and ends where the answer's letter follows. Texts are versioned: a forecast records the version,
an adapter is trained for one, and a changed template is a new version.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from forecast_autotune.features.devices import device_spec
from forecast_autotune.llm.bins import BINS, AnswerLabel
from forecast_autotune.records import Argument, Candidate, Problem

FORECAST_VERSION = "forecast-2"
"""Version of the prompt whose answer is a bin."""
MAX_SOURCE_CHARS = 6000
"""Most characters of a kernel's source in a prompt, about 1,500 tokens; the middle of longer ones is cut."""
MAX_DIFF_CHARS = 4000
"""Most characters of a variant's changes in a suffix."""
_LAST_LINE = "Bin:"


@dataclass(frozen=True)
class ReferenceTime:
    """The reference of times: a candidate that was measured, or an estimate and how it came about."""

    log2_ms: float
    shown: str
    """The candidate as text, or the source of the estimate."""
    measured: bool

    def __str__(self) -> str:
        how = "measured" if self.measured else "estimated, not measured"
        return f"{self.shown}: {2.0**self.log2_ms:.4g} ms ({how})"


@dataclass(frozen=True)
class Neighbour:
    """One known result that a model may go by."""

    shown: str
    """The candidate as text."""
    log2_ratio: float | None
    """log2(time / its reference's time); None: it failed."""
    where: str = ""
    """The other problem it comes from, whose own fastest is its reference; empty: this problem."""

    def __str__(self) -> str:
        place = f" at {self.where}, against the fastest there" if self.where else ""
        return f"{self.shown}{place}: {_letter_text(self.log2_ratio)}"


@dataclass(frozen=True)
class Prompt:
    """A question to a model about n candidates."""

    version: str
    prefix: str
    suffixes: tuple[str, ...]
    labels: tuple[AnswerLabel, ...]


@dataclass(frozen=True)
class ProblemDescription:
    """Description of a problem in the prefix."""

    problem: Problem
    source: str = ""
    """The base kernel with its helpers where they are known; by default the problem's own source."""
    work: str = ""
    """FLOPs and bytes of one launch as text, where they are known."""


def forecast_prompt(
    subject: ProblemDescription,
    candidates: Sequence[str],
    reference: ReferenceTime,
    neighbours: Sequence[Neighbour] = (),
) -> Prompt:
    """Ask for the bin of every candidate; texts from `shown` or `variant_text`, `guess_text` below them."""
    prefix = _prefix(subject, reference, neighbours)
    suffixes = tuple(f"{text}\n{_LAST_LINE}" for text in candidates)
    return Prompt(FORECAST_VERSION, prefix, suffixes, BINS.labels)


def shown(candidate: Candidate, features: Mapping[str, float] | None = None) -> str:
    """One candidate as text: its config, and its features in the order given."""
    facts = " ".join(f"{name}={value:.3g}" for name, value in (features or {}).items())
    return f"{candidate.config}{' | ' if facts else ''}{facts}"


def guess_text(log2_ratio: float | None) -> str:
    """Another surrogate's belief about a candidate's log2(time / reference time), None: that it fails.

    In the words of the answer, and next to it: a model that copies the letter is as good as that surrogate
    from its first step of training on, and has the rest of its training for where that is wrong.
    """
    return f"Guess: {_letter_text(log2_ratio)}"


def variant_text(base: str, source: str, text: str) -> str:
    """A candidate of another source: its changes against the base as a unified diff, then `text`.

    Where the diff is longer than the source itself, the whole source is shown.
    """
    lines = difflib.unified_diff(
        base.splitlines(), source.splitlines(), "kernel", "variant", lineterm="", n=1
    )
    change = "\n".join(list(lines)[2:])
    if len(change) < len(source):
        return f"Changed kernel:\n```diff\n{truncate_middle(change, MAX_DIFF_CHARS)}\n```\n{text}"
    return f"Other kernel:\n```\n{truncate_middle(source, MAX_DIFF_CHARS)}\n```\n{text}"


def _letter_text(log2_ratio: float | None) -> str:
    """The letter that a model answers with, and the ratio it stands for; None: it fails."""
    if log2_ratio is None:
        return f"{BINS.labels[BINS.failure_index].token} (fails)"
    return f"{BINS.labels[int(BINS.index(log2_ratio))].token} ({2.0**log2_ratio:.2f})"


def truncate_middle(text: str, most: int) -> str:
    """The text, or its first two thirds and its end with a mark between, `most` characters at the most."""
    if len(text) <= most:
        return text
    mark = f"\n... {len(text) - most} characters left out ...\n"
    head = (most - len(mark)) * 2 // 3
    return text[:head] + mark + text[len(text) - (most - len(mark) - head) :]


def _argument_text(argument: Argument) -> str:
    """An argument as a line of text."""
    if argument.kind == "tensor":
        note = "" if argument.aligned else ", not 16-byte aligned"
        shape = "x".join(map(str, argument.shape)) or "scalar"
        return f"{argument.name}: {argument.dtype} [{shape}], strides {list(argument.stride)}{note}"
    if argument.kind == "none":
        return f"{argument.name}: None"
    kind = "constexpr" if argument.kind == "constexpr" else argument.dtype or "scalar"
    return f"{argument.name}: {kind} = {argument.value}"


def sizes_text(problem: Problem) -> str:
    """The sizes of a problem in a few words: its key, or else its scalars."""
    scalars = [f"{a.name}={a.value}" for a in problem.arguments if a.kind == "scalar" and a.value is not None]
    return " ".join(scalars[:6]) or ",".join(problem.key) or problem.id


def work_text(flops: float, moved_bytes: float) -> str:
    """FLOPs and bytes of a launch as text; empty where nothing is known."""
    parts = []
    if flops > 0:
        parts.append(f"{flops / 1e9:.3g} GFLOP")
    if moved_bytes > 0:
        parts.append(f"{moved_bytes / 1e6:.3g} MB of tensors")
    return ", ".join(parts)


def _prefix(subject: ProblemDescription, reference: ReferenceTime, neighbours: Sequence[Neighbour]) -> str:
    problem = subject.problem
    if not math.isfinite(reference.log2_ms):
        raise ValueError(f"a reference needs a finite time, got 2^{reference.log2_ms} ms")
    return str(
        _template().render(
            device=problem.device,
            card=device_spec(problem.device),
            toolchain=", ".join(f"{k} {v}" for k, v in problem.toolchain) or "not known",
            kernel=problem.kernel,
            source=truncate_middle(
                subject.source or problem.kernel.source or "(source not known)", MAX_SOURCE_CHARS
            ),
            arguments=[_argument_text(a) for a in problem.arguments],
            work=subject.work,
            reference=str(reference),
            neighbours=[str(n) for n in neighbours],
            table=BINS.table(),
        )
    )


@cache
def _template() -> Any:
    try:
        import jinja2
    except ImportError as error:
        raise ImportError(
            "prompts need jinja2, which torch brings: pip install 'forecast-autotune[llm]'"
        ) from error
    # Plain text for a model: nothing to escape; an unknown name is a mistake, not an empty word.
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("forecast_autotune", "assets/prompts"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        autoescape=False,
    )
    return environment.get_template(f"{FORECAST_VERSION}.j2")
