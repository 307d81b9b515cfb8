"""Claim: a small language model, fine-tuned on the advice of a strong one, writes no advice of its own that pays.

    python -m benchmarks.forecasting.advice_author --model FOLDER --pairs PAIRS.jsonl --out RESULT.json

A pair is a question (`llm ask --export FILE --kind advice`, without the part that all have in common) and the shipped
answer, with the kernel's package and source hash; they hold texts of libraries, so they are not in this repository.
The model (a folder in Hugging Face's form) learns the answers on kernels of fla-core, SGLang, bitsandbytes and Triton's
tutorials for `--seconds`, and writes advice on kernels of flag_gems and liger-kernel that have recorded lists. What is
a cost function by the product's own checks is followed in replays, beside the shipped advice and beside none. A kernel
whose answer is refused is decided without advice. On a CPU; intervals are 95 %, over kernels, and paired.
"""

from __future__ import annotations

import json
import random
import sys
import time
import warnings
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.forecasting.advice import advised_lists
from benchmarks.lib import result_files
from benchmarks.lib.recorded_advice import decision_figures, paired_figures
from benchmarks.lib.result_files import say
from forecast_autotune.errors import RecordError
from forecast_autotune.llm.advice.asking import check_function
from forecast_autotune.llm.advice.language import parse_cost_function
from forecast_autotune.llm.advice.question import cost_function_texts
from forecast_autotune.settings import Settings
from forecast_autotune.store.files import ADVICE
from forecast_autotune.surrogates.default import default_surrogate
from forecast_autotune.tuning.advice_samples import stored_samples

LEFT_OUT = ("flag_gems", "liger-kernel")
HEAD, TAIL, ANSWER = 900, 600, 750
"""Characters of a kernel and of its calls that are shown; tokens of an answer, at most."""
LAYERS, RATE = 10, 1e-3
"""Last layers that learn, and how fast."""


def prompt_of(question: str) -> str:
    """The question, shortened: a small model on a CPU reads some hundred tokens a second."""
    kernel, sizes, calls = question.partition("Sizes it is called with:")
    return f"{kernel[:HEAD]}\n{sizes}{calls[:TAIL]}\n\nCost function:\n"


def fine_tune(model: Any, tokens: Any, pairs: list[dict[str, str]], seconds: float, seed: int) -> list[float]:
    """Learn answers in random order, one a step, for so many seconds; the losses by step."""
    import torch

    model.requires_grad_(False)
    learning = model.model.layers[-LAYERS:].requires_grad_(True).parameters()
    optimizer = torch.optim.AdamW(learning, lr=RATE, weight_decay=0.0)
    losses, begin, order = list[float](), time.monotonic(), _endless(pairs, random.Random(seed))
    while (passed := time.monotonic() - begin) < seconds:
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (len(losses) + 1) / 5) * max(0.1, 1.0 - passed / seconds)
        pair = next(order)
        asked = tokens(prompt_of(pair["question"]))["input_ids"]
        answer = [*tokens(pair["answer"])["input_ids"], tokens.eos_token_id]
        ids, labels = torch.tensor([asked + answer]), torch.tensor([[-100] * len(asked) + answer])
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(round(float(loss.detach()), 4))
        if len(losses) % 5 == 1:
            say(f"step {len(losses)}: loss {losses[-1]:.3f}")
    return losses


def _endless(pairs: list[dict[str, str]], generator: random.Random) -> Iterator[dict[str, str]]:
    while True:
        yield from generator.sample(pairs, len(pairs))


def written(model: Any, tokens: Any, questions: list[str], seconds: float) -> list[str]:
    """Answers to questions, all at once and greedily, cut after so many seconds."""
    import torch

    tokens.padding_side, tokens.pad_token = "left", tokens.eos_token
    given = tokens([prompt_of(q) for q in questions], return_tensors="pt", padding=True)
    with torch.inference_mode():
        ids = model.generate(
            **given,
            max_time=seconds,
            max_new_tokens=ANSWER,
            do_sample=False,
            pad_token_id=tokens.eos_token_id,
        )
    return tokens.batch_decode(ids[:, given["input_ids"].shape[1] :], skip_special_tokens=True)


def main() -> int:
    parser = result_files.parser(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a folder in Hugging Face's form")
    parser.add_argument("--pairs", type=Path, required=True, help="questions with the shipped answers")
    parser.add_argument("--seconds", type=float, default=360, help="of fine-tuning")
    parser.add_argument("--kernels", type=int, default=16, help="kernels of left-out libraries, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(stub_only=True)
    options: Namespace = result_files.parse_arguments(parser)
    import torch
    import transformers

    warnings.simplefilter("ignore")
    torch.manual_seed(options.seed)
    report = result_files.ResultFile(options, "advice-author", seed=options.seed)
    tokens = transformers.AutoTokenizer.from_pretrained(options.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    pairs = [json.loads(line) for line in options.pairs.read_text(encoding="utf-8").splitlines()]
    asked = {p["source_sha256"]: p["question"] for p in pairs if p["package"] in LEFT_OUT}
    learnt = [p for p in pairs if p["package"] not in LEFT_OUT]
    learnt = [p for p in learnt if len(tokens(p["answer"])["input_ids"]) < ANSWER]
    lists: dict[str, list[Any]] = {}
    for table, advice in advised_lists():
        if table.problem.kernel.source_sha256 in asked:
            lists.setdefault(table.problem.kernel.source_sha256, []).append((table, advice))
    kernels = random.Random(options.seed).sample(sorted(lists), min(options.kernels, len(lists)))
    begin = time.monotonic()
    losses = fine_tune(model, tokens, learnt, options.seconds, options.seed)
    report.put("losses", losses)
    trained_s = time.monotonic() - begin
    say(f"{len(losses)} steps in {trained_s:.0f} s; {len(learnt)} pairs")
    begin, answers = time.monotonic(), list[str]()
    for first in range(0, len(kernels), 8):
        answers += written(model, tokens, [asked[k] for k in kernels[first : first + 8]], options.seconds)
        say(f"{len(answers)} of {len(kernels)} written")
    wrote_s = time.monotonic() - begin
    settings, rows = Settings.from_environment(), list[dict[str, Any]]()
    for kernel, answer in zip(kernels, answers, strict=True):
        (text,), refused = cost_function_texts(answer), ""
        try:
            parse_cost_function(text)
            check_function(parse_cost_function(text), stored_samples([t for t, _ in lists[kernel]]))
        except RecordError as error:
            refused = str(error)[:200]
        report.add(
            "answers", {"kernel": kernel[:8], "refused": refused, "characters": len(answer), "text": text}
        )
        for table, advice in lists[kernel]:
            own = replace(advice, text=text, others=(), extra={}).to_json()
            arms = {
                "learned": (table, "off"),
                "strong": (table, "stored"),
                "small": (
                    table if refused else table.with_extra(ADVICE, own),
                    "off" if refused else "stored",
                ),
            }
            for arm, (given, follow) in arms.items():
                figures = decision_figures(given, default_surrogate(), settings.with_(advice=follow), 4)
                about = {"kernel": kernel[:8], "problem": table.problem.id[:8], "refused": bool(refused)}
                rows.append({"arm": arm, **about, **{n: round(v, 5) for n, v in figures.items()}})
    report.put("rows", rows)
    parsed = [r for r in report.data["raw"]["answers"] if not r["refused"]]
    summary: dict[str, Any] = {
        "model": options.model.parent.name,
        "pairs": len(learnt),
        "steps": len(losses),
        "train_s": round(trained_s, 1),
        "write_s": round(wrote_s, 1),
        "loss_first": losses[0],
        "loss_last": losses[-1],
        "asked": len(kernels),
        "taken": len(parsed),
        **paired_figures(rows),
    }
    if parsed:
        summary["taken_only"] = paired_figures([r for r in rows if not r["refused"]])
    report.finish(summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
