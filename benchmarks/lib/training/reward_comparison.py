"""Rewards compared from one initial model: correctness alone, with Brier, with CRPS, and CRPS exactly.

The rewards are those of arXiv 2605.31464. The model answers with one letter, so a sampled reply is a handful
of letters: their shares are what it states, the first what it names (`losses.sampled_reward`); the exact
variant differentiates the same reward's expectation. Neither needs trl.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import statistics
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.result_files import say
from benchmarks.lib.training.training_stages import (
    TrainingWorkspace,
    collect_model_answers,
    settings_of,
    side_of,
)
from forecast_train.llm.calibration.bin_scores import (
    LESS_IS_BETTER,
    STATISTICS,
    BinScoresOfProblem,
    model_bin_scores,
    paired_differences,
    statistics_table,
)
from forecast_train.llm.data.examples import JSON_LINES_SUFFIX, read_examples, side_path, write_examples
from forecast_train.llm.run_folder import WEIGHTS_FOLDER
from forecast_train.llm.settings import LossSettings, SftRun

REPLIES = 16
"""Sampled replies per candidate; candidates of an example share its forward pass."""
REWARD_ARMS: Mapping[str, tuple[str, int]] = {
    "correctness": ("correctness", REPLIES),
    "correctness + brier": ("correctness_brier", REPLIES),
    "correctness + crps": ("correctness_crps", REPLIES),
    "correctness + crps, exact": ("correctness_crps", 0),
}
"""Reward and sampled replies (0: its exact expectation), by name."""
BASE_ARM = "correctness"
DATA = "rewards/data"
RATE = 0.1
"""Of the supervised rate: these gradients are noisier, and the start is already good."""


def compare_rewards(work: TrainingWorkspace, start: Path) -> dict[str, Any]:
    """Train every arm from `start` with every seed, and score its own words on the held-out families.

    Arms that are done are taken up; on several GPUs as many are trained at a time. Per arm: every statistic
    with its interval over kernels, all seeds' words together, its values by seed, and the difference to
    correctness alone on the same problems.
    """
    o = work.options
    seeds = range(o.grpo_seeds)
    _write_examples(work)
    with _run_in_parallel(work, start, [(arm, s) for s in seeds for arm in REWARD_ARMS]) as ahead:
        return _compare_arms(work, start, ahead)


def _compare_arms(
    work: TrainingWorkspace, start: Path, ahead: Mapping[str, Future[dict[str, Any]]]
) -> dict[str, Any]:
    o = work.options
    initial = _model_scores(work, "trained", start)
    found: dict[str, Any] = {"steps": o.grpo, "initial": statistics_table(initial, draws=o.draws), "arms": {}}
    said: dict[str, list[list[BinScoresOfProblem]]] = {}
    for arm in REWARD_ARMS:
        for seed in range(o.grpo_seeds):
            name = _stage(arm, seed)
            begun = ahead.get(name)
            make = partial(_train_reward_arm, work, start, arm, seed) if begun is None else begun.result
            trained = work.stage(name, make)
            words = _arm_scores(work, arm, seed)
            said.setdefault(arm, []).append(words)
            row = statistics_table(words, draws=1)
            shown = ", ".join(f"{name} {row[name][0]}" for name in ("accuracy", "ece", "crps", "spearman"))
            say(f"{arm}, seed {seed}: {trained['steps']} steps, {shown}")
        found["arms"][arm] = _summary(said[arm], said[BASE_ARM], o.draws)
    return found


@contextmanager
def _run_in_parallel(
    work: TrainingWorkspace, start: Path, wanted: Sequence[tuple[str, int]]
) -> Iterator[dict[str, Future[dict[str, Any]]]]:
    """Runs that are not done yet, by stage, under way in a process per GPU; none with fewer than two GPUs."""
    told = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    gpus = told.split(",") if told else [str(n) for n in range(torch.cuda.device_count())]
    left = [pair for pair in wanted if _stage(*pair) not in work.results["stages"]]
    found: dict[str, Future[dict[str, Any]]] = {}
    with ExitStack() as opened:
        if len(gpus) > 1 and left:
            say(f"{len(left)} runs, {len(gpus)} at a time")
            context = get_context("spawn")
            free = context.SimpleQueue()
            for gpu in gpus:
                free.put(gpu)
            given = (free, work.options, work.results["split"])
            pool = opened.enter_context(ProcessPoolExecutor(len(gpus), context, _begin, given))
            # An interrupt ends what runs, and begins nothing more.
            opened.callback(pool.shutdown, wait=False, cancel_futures=True)
            found = {_stage(*pair): pool.submit(_run_arm, start, *pair) for pair in left}
        yield found


_mine: TrainingWorkspace
"""Of a process that `_run_in_parallel` began."""


def _begin(free: SimpleQueue[str], options: Namespace, split: dict[str, Any]) -> None:
    global _mine
    os.environ["CUDA_VISIBLE_DEVICES"] = free.get()  # before anything here opens a device
    _mine = TrainingWorkspace(options, options.out, {"stages": {}, "split": split})
    _mine.split()


def _run_arm(start: Path, arm: str, seed: int) -> dict[str, Any]:
    """Train, and have the answers on file that are asked for next."""
    trained = _train_reward_arm(_mine, start, arm, seed)
    _arm_scores(_mine, arm, seed)
    return trained


def _write_examples(work: TrainingWorkspace) -> None:
    """Write twice as many training examples, drawn evenly, as one run sees.

    Every run reads all of its data first, which would take longer than its steps.
    """
    folder, run = work.out / DATA, settings_of(work)
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {"train": 2 * work.options.grpo * run.steps.examples, "validation": run.steps.checked}
    for side, count in wanted.items():
        every = read_examples(side_path(Path(run.data), side))
        kept = random.Random(0).sample(every, min(count, len(every)))
        write_examples(folder / f"{side}{JSON_LINES_SUFFIX}", kept)


def _stage(arm: str, seed: int) -> str:
    return f"reward {arm}, seed {seed}"


def _folder(work: TrainingWorkspace, arm: str, seed: int) -> Path:
    return work.out / "rewards" / f"{_file(arm)}-{seed}"


def _arm_scores(work: TrainingWorkspace, arm: str, seed: int) -> list[BinScoresOfProblem]:
    folder = _folder(work, arm, seed)
    return _model_scores(work, folder.name, folder / WEIGHTS_FOLDER)


def _train_reward_arm(work: TrainingWorkspace, start: Path, arm: str, seed: int) -> dict[str, Any]:
    from forecast_train.llm.sft import train

    (reward, replies), folder = REWARD_ARMS[arm], _folder(work, arm, seed)
    run: SftRun = settings_of(work)
    steps = replace(run.steps, most=work.options.grpo, seconds=0.0, rate=run.steps.rate * RATE, warmup=0.1)
    steps = replace(steps, save=max(1, work.options.grpo), validate=max(1, work.options.grpo))
    loss = LossSettings(sigma=run.loss.sigma, reward=reward, replies=replies)
    data = str(work.out / DATA)
    run = replace(run, data=data, adapter=str(start), out=str(folder), loss=loss, steps=steps)
    done = train(replace(run, seed=1000 + seed), resume=True, say=say)
    for checkpoint in folder.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    rewards = [-row["loss"] for row in done["log"] if "loss" in row]
    return {"steps": done["steps"], "reward_first": rewards[0], "reward_last": rewards[-1]}


def _model_scores(work: TrainingWorkspace, name: str, adapter: Path) -> list[BinScoresOfProblem]:
    """The model's own words, as it states them: a reward has to calibrate by itself."""
    heard = side_of(work, collect_model_answers(work, name, adapter, work.sides["test"]), "test")
    return [w for h in heard if (w := model_bin_scores(h)) is not None]


def _summary(
    mine: Sequence[Sequence[BinScoresOfProblem]], base: Sequence[Sequence[BinScoresOfProblem]], draws: int
) -> dict[str, Any]:
    by_seed = [
        {k: v[0] for k, v in statistics_table(words, draws=1).items() if k in STATISTICS} for words in mine
    ]
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
    against = [paired_differences(one, other, draws=draws) for one, other in zip(mine, base, strict=True)]
    found["minus_correctness_by_seed"] = against
    return found


def _file(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name)
