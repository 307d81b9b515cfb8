"""Claim: a model of 135 M parameters knows a kernel's cost function by its names only, and none of its constants.

    python -m benchmarks.llm.advice_skeletons --out benchmarks/results/llm_advice_skeletons_smollm2_135m.json \
        --model FOLDER --name SmolLM2-135M-Instruct [--adapter FOLDER] [--kernels 42] [--each 3]

A skeleton is the cost function that a strong model wrote for a kernel (`benchmarks/data/advice.jsonl.gz`), its
named constants left open. The small model states likelihoods only; of each kernel the question (source and
arguments, cut to `--prompt` tokens) is read once.

Skeletons: the kernel's own one and three of other families, of similar length and drawn by lot, by the mean
log-likelihood of their first `--tokens` tokens after the question, from `cost` on and without labels of constants;
once as they were written, and once with the names of the kernel's own arguments and meta-parameters, so that names
do not give the answer away and all can be evaluated. Constants: of the own skeleton, the three that change the costs
most, each among 1/4 to 4 times the value that the strong model stated, by the log-likelihood of the number's text in
its place, after its label. Choices by: `likelihood`; `without the kernel`, the same after a question that names no
kernel; `difference` of the two (pointwise mutual information); `shared names`, no model.

What a choice is worth: rank correlation of its costs with the recorded H200 times, and how far the best of the five
configs that it puts first is above the best of all; means over up to `--each` problems of a kernel, then over
kernels. `random choice` is the mean over all choices, `own` and `stated` the strong model's, `best` the choice by the
recorded times. Runs on a CPU; intervals are 95 %: exact binomial ones, and by bootstrap over kernels.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib import result_files
from benchmarks.lib.advice.choices import constant_summary, skeleton_summary
from benchmarks.lib.advice.cost_orders import (
    FACTORS,
    RecordedTimes,
    choices_of_constants,
    cost_figures,
    deciding_constants,
    value_text,
)
from benchmarks.lib.advice.skeletons import Skeleton, in_names_of, open_skeleton, shared_names
from benchmarks.lib.advice.surrogates import ADVICE_TABLE, advice_by_source
from benchmarks.lib.continuation_scores import ContinuationScorer
from benchmarks.lib.environment import ROOT
from benchmarks.lib.result_files import say
from benchmarks.lib.surrogates_without import table_paths
from benchmarks.lib.training.source_questions import arguments_text
from benchmarks.lib.variants.variant_forecasts import file_digest
from forecast_autotune.llm.advice.language import CostFunction, parse_cost_function
from forecast_autotune.llm.advice.subject import AdviceError
from forecast_autotune.records.table import Table
from forecast_autotune.tuning.replays.replay import load
from forecast_integrations.models.transformers.prefix_cache import Prefix
from forecast_train.evaluation.splits import family_of

NEAR_TABLE = ROOT / "benchmarks" / "data" / "corpus_h200_near.jsonl.gz"
RIVALS = 3
NEAREST = 32
"""Skeletons of other families, those of the most similar length, from which rivals are drawn."""
CONSTANTS = 3
_LEAST_CANDIDATES = 6
_UNKNOWN_KERNEL = "A Triton kernel for an NVIDIA H200.\n"
_ASKED = (
    "\nThe time of one launch as a cost function of config, arguments and device; `?` is a constant that "
    "measurements will correct:\n```python\n"
)


@dataclass(frozen=True)
class AdvisedKernel:
    """A kernel of the corpus, its advice, and some of its problems."""

    name: str
    family: str
    advice: str
    """Text of the strong model's cost function."""
    tables: tuple[Table, ...]

    @property
    def parameters(self) -> list[str]:
        """Names of its meta-parameters."""
        return list(dict.fromkeys(n for c in self.tables[0].by_candidate() for n, _ in c.config.kwargs))


@dataclass(frozen=True)
class SkeletonChoice:
    """What one kernel's choice is among: the own skeleton first, then the rivals."""

    kernels: tuple[str, ...]
    as_written: tuple[Skeleton, ...]
    own_names: tuple[Skeleton, ...]
    functions: tuple[CostFunction, ...]
    """In the kernel's own names."""


def advised_kernels(each: int, seed: int) -> list[AdvisedKernel]:
    """Every kernel with advice and recorded times, `each` problems of it by lot."""
    advice = advice_by_source()
    tables: dict[str, list[Table]] = {}
    for table in load([*table_paths(), NEAR_TABLE]):
        if table.problem.kernel.source_sha256 in advice and len(table.by_candidate()) >= _LEAST_CANDIDATES:
            tables.setdefault(table.problem.kernel.source_sha256, []).append(table)
    found = []
    for source, some in tables.items():
        name = str(some[0].problem.extra["label"]).partition("/")[0]
        drawn = random.Random(f"{seed} {name}").sample(some, min(each, len(some)))
        found.append(AdvisedKernel(name, family_of(some[0].problem), advice[source].text, tuple(drawn)))
    return sorted(found, key=lambda k: k.name)


def spread_over_families(kernels: Sequence[AdvisedKernel], count: int, seed: int) -> list[AdvisedKernel]:
    """`count` kernels by lot, in turn from each family."""
    by: dict[str, list[AdvisedKernel]] = {}
    for kernel in kernels:
        by.setdefault(kernel.family, []).append(kernel)
    for family, some in by.items():
        random.Random(f"{seed} {family}").shuffle(some)
    turns = (some[turn] for turn in range(len(kernels)) for some in by.values() if turn < len(some))
    return sorted(list(turns)[:count], key=lambda k: k.name)


def draw_choice(
    kernel: AdvisedKernel, others: Sequence[AdvisedKernel], problems: Sequence[RecordedTimes], seed: int
) -> SkeletonChoice | None:
    """The own skeleton and rivals that can be evaluated on the kernel's problems; None where there are too few."""
    strangers = [k for k in others if k.family != kernel.family]
    size = len(kernel.advice)
    near = sorted(strangers, key=lambda k: (abs(len(k.advice) - size), k.name))[:NEAREST]
    random.Random(f"{seed} {kernel.name}").shuffle(near)
    found = [(kernel.name, kernel.advice, kernel.advice)]
    for rival in near:
        if len(found) > RIVALS:
            break
        try:
            text = in_names_of(rival.advice, kernel.tables[0].problem, kernel.parameters)
            cost_figures(parse_cost_function(text), problems)
        except AdviceError:
            continue
        found.append((rival.name, rival.advice, text))
    if len(found) <= RIVALS:
        return None
    return SkeletonChoice(
        tuple(name for name, _, _ in found),
        tuple(open_skeleton(text) for _, text, _ in found),
        tuple(open_skeleton(text) for _, _, text in found),
        tuple(parse_cost_function(text) for _, _, text in found),
    )


def shortened(source: str, scorer: ContinuationScorer, tokens: int) -> str:
    """A source of at most about so many tokens: lines in its middle are left out, as ends say most."""
    lines = source.strip().splitlines()
    sizes = [scorer.length(f"{line}\n") for line in lines]
    if sum(sizes) <= tokens:
        return "\n".join(lines)
    head = int(np.searchsorted(np.cumsum(sizes), 0.6 * tokens, side="right"))
    tail = int(np.searchsorted(np.cumsum(sizes[::-1]), 0.4 * tokens, side="right"))
    kept = [*lines[:head], "    # ...", *(lines[-tail:] if tail else [])]
    return "\n".join(kept)


def question(kernel: AdvisedKernel, scorer: ContinuationScorer, tokens: int) -> str:
    """What is asked of a kernel: its source and arguments, at most about `tokens` tokens, up to the cost function."""
    table = kernel.tables[0]
    values: dict[str, dict[str, None]] = {}
    for candidate in table.by_candidate():
        config = candidate.config
        for name, value in (
            *config.kwargs,
            ("num_warps", config.num_warps),
            ("num_stages", config.num_stages),
        ):
            values.setdefault(name, {})[str(value)] = None
    configs = "; ".join(f"{name} in {', '.join(found)}" for name, found in values.items())
    about = f"Arguments: {arguments_text(table)}\nConfigs: {configs}\n{_ASKED}"
    known = table.problem.kernel
    opening = f"The Triton kernel `{known.name}` for an NVIDIA H200:\n```python\n"
    left = tokens - scorer.length(opening) - scorer.length(about)
    return f"{opening}{shortened(known.source, scorer, max(left, tokens // 4))}\n```\n{about}"


class Asking:
    """Asks one model about one kernel after another."""

    def __init__(self, scorer: ContinuationScorer, prompt: int, tokens: int) -> None:
        self.scorer, self.prompt, self.tokens = scorer, prompt, tokens
        self._unknown = scorer.begin(_UNKNOWN_KERNEL + _ASKED)
        self._without: dict[str, float] = {}
        """Scores after the question that names no kernel: a skeleton may be a rival several times."""

    def skeletons(self, past: Prefix, texts: Sequence[str]) -> list[float]:
        """Mean log-likelihood of the first tokens of each."""
        if past is not self._unknown:
            return self._means(past, texts)
        if new := [text for text in dict.fromkeys(texts) if text not in self._without]:
            self._without |= dict(zip(new, self._means(past, new), strict=True))
        return [self._without[text] for text in texts]

    def _means(self, past: Prefix, texts: Sequence[str]) -> list[float]:
        return [float(told.mean()) for told in self.scorer.log_likelihoods(past, texts, self.tokens)]

    def constants(
        self, past: Prefix, skeleton: Skeleton, function: CostFunction, numbers: Sequence[int]
    ) -> list[list[float]]:
        """Log-likelihood of the text of each value, [constants, FACTORS]; what stands before is read on once."""
        found, read = [], ""
        for number in numbers:
            before = skeleton.before(number)
            past = self.scorer.go_on(past, before[len(read) :])
            read = before
            stated = function.constants[number].value
            texts = [f"{value_text(stated * factor)})\n" for factor in FACTORS]
            found.append([float(told.sum()) for told in self.scorer.log_likelihoods(past, texts)])
        return found

    def answers(self, asked: str, choice: SkeletonChoice, constants: Sequence[int]) -> dict[str, Any]:
        """All scores of one kernel: after its question, and after one that names no kernel."""
        own, function = choice.as_written[0], choice.functions[0]
        texts = [s.outline for s in (*choice.as_written, *choice.own_names[1:])]
        found: dict[str, Any] = {}
        for name, past in (("likelihood", self.scorer.begin(asked)), ("without the kernel", self._unknown)):
            scores = self.skeletons(past, texts)
            count = len(choice.kernels)
            found[name] = {
                "as written": scores[:count],
                "own names": [scores[0], *scores[count:]],
                "constants": self.constants(past, own, function, constants),
            }
        return found


@dataclass(frozen=True)
class AskedKernel:
    """A kernel with what there is to choose, and what every choice is worth."""

    kernel: AdvisedKernel
    choice: SkeletonChoice
    constants: tuple[int, ...]
    worth: dict[str, Any]
    """What is known without any model, as it goes to the result file."""


def prepared(kernel: AdvisedKernel, others: Sequence[AdvisedKernel], seed: int) -> AskedKernel | None:
    """Draw and evaluate the choices of a kernel; None where too few skeletons can be evaluated."""
    problems = [RecordedTimes.of(t) for t in kernel.tables]
    choice = draw_choice(kernel, others, problems, seed)
    if choice is None:
        return None
    function = choice.functions[0]
    constants = deciding_constants(function, problems[0].subject, CONSTANTS)
    ways = choices_of_constants(function, constants, problems)
    worth = {
        "kernel": kernel.name,
        "family": kernel.family,
        "problems": [t.problem.extra["label"] for t in kernel.tables],
        "skeletons": choice.kernels,
        "figures": [asdict(cost_figures(f, problems)) for f in choice.functions],
        "constants": [function.constants[i].name for i in constants],
        "ways": [[list(way), f.spearman, f.log_regret] for way, f in ways.items()],
    }
    return AskedKernel(kernel, choice, tuple(constants), worth)


def ask_kernel(asking: Asking, work: AskedKernel) -> dict[str, Any]:
    """What the model said of one kernel."""
    begin = time.perf_counter()
    asked = question(work.kernel, asking.scorer, asking.prompt)
    answers = asking.answers(asked, work.choice, work.constants)
    return {
        "kernel": work.kernel.name,
        "answers": answers,
        "shared names": {
            "as written": [shared_names(s.outline, asked) for s in work.choice.as_written],
            "own names": [shared_names(s.outline, asked) for s in work.choice.own_names],
        },
        "tokens": asking.scorer.length(asked),
        "seconds": round(time.perf_counter() - begin, 2),
    }


def summarised(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Figures of one model."""
    return {
        "kernels": len(rows),
        "families": len({r["family"] for r in rows}),
        "problems": sum(len(r["problems"]) for r in rows),
        "seconds": round(sum(r["seconds"] for r in rows), 1),
        "prompt_tokens": round(float(np.mean([r["tokens"] for r in rows])), 1),
        "skeletons": {form: skeleton_summary(rows, form) for form in ("as written", "own names")},
        "constants": constant_summary(rows),
    }


def options() -> argparse.Namespace:
    made = result_files.parser(__doc__)
    made.add_argument("--model", type=Path, required=True, help="a folder")
    made.add_argument("--name", required=True, help="of the model, for the result")
    made.add_argument("--adapter", type=Path, help="a LoRA adapter, asked after the model itself")
    made.add_argument("--kernels", type=int, default=42)
    made.add_argument("--each", type=int, default=3, help="problems of a kernel")
    made.add_argument("--prompt", type=int, default=768, help="most tokens of a question")
    made.add_argument("--tokens", type=int, default=208, help="of a skeleton")
    made.add_argument("--seed", type=int, default=0)
    return result_files.parse_arguments(made, on_host=True)


def main() -> int:
    given = options()
    warnings.simplefilter("ignore")
    named = argparse.Namespace(**{**vars(given), "model": given.name})
    report = result_files.ResultFile(named, "llm_advice_skeletons", seed=given.seed)
    kernels = advised_kernels(given.each, given.seed)
    drawn = spread_over_families(kernels, given.kernels, given.seed)
    work = [w for w in (prepared(k, kernels, given.seed) for k in drawn) if w is not None]
    report.data["raw"]["kernels"] = [w.worth for w in work]
    say(f"{len(work)} of {len(drawn)} kernels have enough skeletons of other families")
    summary: dict[str, Any] = {"advice": file_digest(ADVICE_TABLE)}
    for way, adapter in (("as it comes", None), ("with the adapter", given.adapter)):
        if way != "as it comes" and adapter is None:
            continue
        scorer = ContinuationScorer(str(given.model), None if adapter is None else str(adapter))
        asking = Asking(scorer, given.prompt, given.tokens)
        rows = []
        for one in work:
            answer = ask_kernel(asking, one)
            report.add(way, answer)
            rows.append({**one.worth, **answer})
            say(f"{way}: {len(rows)} of {len(work)}: {one.kernel.name}, {answer['seconds']:.1f} s")
        summary[way] = {"dtype": scorer.dtype, **summarised(rows)}
        report.finish(summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
