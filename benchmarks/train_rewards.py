"""Rewards compared from one initial model: correctness alone, with Brier, with CRPS, and CRPS exactly.

The rewards are those of arXiv 2605.31464. The model answers with one letter, so a sampled reply is a handful
of letters: their shares are what it states, the first what it names (`losses.sampled_reward`); the exact
variant differentiates the same reward's expectation. Neither needs trl.
"""

from __future__ import annotations

import math
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import say
from benchmarks.train_stages import Work, listen, settings_of, side_of
from forecast_train.llm.runs import WEIGHTS
from forecast_train.llm.settings import Loss, Run
from forecast_train.llm.words import LESS_IS_BETTER, STATISTICS, Words, compared, own_words, table

REPLIES = 16
"""Sampled replies per candidate; candidates of an example share its forward pass."""
ARMS: Mapping[str, tuple[str, int]] = {
    "correctness": ("correctness", REPLIES),
    "correctness + brier": ("correctness_brier", REPLIES),
    "correctness + crps": ("correctness_crps", REPLIES),
    "correctness + crps, exact": ("correctness_crps", 0),
}
"""Reward and sampled replies (0: its exact expectation), by name."""
BASE = "correctness"
RATE = 0.1
"""Of the supervised rate: these gradients are noisier, and the start is already good."""


def compare_rewards(work: Work, start: Path) -> dict[str, Any]:
    """Train every arm from `start` with every seed, and score its own words on the held-out families.

    Arms that are done are taken up. Per arm: every statistic with its interval over kernels, all seeds'
    words together, its values by seed, and the difference to correctness alone on the same problems.
    """
    o = work.options
    initial = _words(work, "trained", start)
    found: dict[str, Any] = {"steps": o.grpo, "initial": table(initial, draws=o.draws), "arms": {}}
    said: dict[str, list[list[Words]]] = {}
    for arm, (reward, replies) in ARMS.items():
        for seed in range(o.grpo_seeds):
            folder = work.out / "rewards" / f"{_file(arm)}-{seed}"
            make = partial(_arm, work, start, folder, reward, replies, seed)
            trained = work.stage(f"reward {arm}, seed {seed}", make)
            words = _words(work, folder.name, folder / WEIGHTS)
            said.setdefault(arm, []).append(words)
            row = table(words, draws=1)
            shown = ", ".join(f"{name} {row[name][0]}" for name in ("accuracy", "ece", "crps", "spearman"))
            say(f"{arm}, seed {seed}: {trained['steps']} steps, {shown}")
        found["arms"][arm] = _summary(said[arm], said[BASE], o.draws)
    return found


def _arm(work: Work, start: Path, folder: Path, reward: str, replies: int, seed: int) -> dict[str, Any]:
    from forecast_train.llm.sft import train

    run: Run = settings_of(work)
    steps = replace(run.steps, most=work.options.grpo, seconds=0.0, rate=run.steps.rate * RATE, warmup=0.1)
    steps = replace(steps, save=max(1, work.options.grpo), validate=max(1, work.options.grpo))
    loss = Loss(sigma=run.loss.sigma, reward=reward, replies=replies)
    done = train(
        replace(run, adapter=str(start), out=str(folder), loss=loss, steps=steps, seed=1000 + seed),
        resume=True,
        say=say,
    )
    for checkpoint in folder.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    rewards = [-row["loss"] for row in done["log"] if "loss" in row]
    return {"steps": done["steps"], "reward_first": rewards[0], "reward_last": rewards[-1]}


def _words(work: Work, name: str, adapter: Path) -> list[Words]:
    """The model's own words, as it states them: a reward has to calibrate by itself."""
    heard = side_of(work, listen(work, name, adapter, work.judged), "test")
    return [w for h in heard if (w := own_words(h)) is not None]


def _summary(mine: Sequence[Sequence[Words]], base: Sequence[Sequence[Words]], draws: int) -> dict[str, Any]:
    by_seed = [{k: v[0] for k, v in table(words, draws=1).items() if k in STATISTICS} for words in mine]
    found: dict[str, Any] = {}
    for name in STATISTICS:
        values = [float(row[name]) for row in by_seed if row[name] is not None]
        spread = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        found[name] = {
            "mean": round(statistics.fmean(values), 4) if values else None,
            "standard_error": round(spread, 4) if math.isfinite(spread) else None,
            "by_seed": values,
            "less_is_better": name in LESS_IS_BETTER,
        }
    against = [compared(one, other, draws=draws) for one, other in zip(mine, base, strict=True)]
    found["minus_correctness_by_seed"] = against
    return found


def _file(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name)
