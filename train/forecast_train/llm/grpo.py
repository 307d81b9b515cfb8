"""Reinforcement learning with the paper's rewards, for models that speak (TRL's GRPOTrainer).

Stage 2, if at all: with finitely many bins the expectation of these rewards has an exact gradient
(`losses.expected_reward`, `loss.reward` of a supervised run), which needs no sampling. This is for models
that reason before they answer, and for replicating the paper (arXiv 2605.31464, section on RL).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from forecast_autotune.errors import SettingsError
from forecast_train.llm.data.dialogue import (
    forecast_messages,
    order_messages,
    parse_distribution,
    parse_fastest,
)
from forecast_train.llm.data.examples import Example, read_examples
from forecast_train.llm.rewards import REWARDS
from forecast_train.llm.run_folder import (
    WEIGHTS_FOLDER,
    TrainingError,
    claim_run_folder,
    run_trainer,
    write_json,
)
from forecast_train.llm.settings import LoraSettings, load_toml

REGRET_REWARD = "regret"
"""Reward of naming the fastest of several candidates: 2^-slowdown of the one that was named."""


@dataclass(frozen=True)
class RolloutSettings:
    """How replies are sampled and how many."""

    generations: int = 8
    """Replies per prompt: the group whose mean is the baseline."""
    prompts: int = 8
    """Prompts per step."""
    tokens: int = 512
    """Tokens of a reply at the most; reasoning needs thousands."""
    temperature: float = 1.0
    think: bool = False
    """Ask for thoughts before the answer."""
    candidates: int = 4
    """Candidates that one prompt of the `regret` reward compares."""
    vllm: str = ""
    """Empty: transformers; `colocate`: vLLM beside the trainer; else the URL of a `trl vllm-serve`."""


@dataclass(frozen=True)
class GrpoRun:
    """A whole run; a TOML file holds it."""

    model: str
    data: str
    out: str
    reward: str = "correctness_crps"
    """One of the paper's three, or `regret`."""
    steps: int = 100
    rate: float = 4e-5
    kl: float = 0.0
    save: int = 20
    seed: int = 0
    lora: LoraSettings = field(default_factory=LoraSettings)
    rollouts: RolloutSettings = field(default_factory=RolloutSettings)

    def __post_init__(self) -> None:
        known = (*REWARDS, REGRET_REWARD)
        if self.reward not in known:
            raise SettingsError(f"reward must be one of {', '.join(known)}, got {self.reward!r}")
        r = self.rollouts
        if min(self.steps, self.save, r.prompts, r.tokens) < 1 or min(r.generations, r.candidates) < 2:
            raise SettingsError(f"steps, prompts, tokens >= 1 and generations, candidates >= 2; got {self}")
        if not (self.rate > 0 and r.temperature > 0 and self.kl >= 0):
            raise SettingsError(f"rate and temperature are positive, kl not negative; got {self}")

    @classmethod
    def load(cls, path: Path) -> GrpoRun:
        """Read a TOML file; relative folders count from where it lies. Raises `SettingsError`."""
        return load_toml(cls, path, {"lora": LoraSettings, "rollouts": RolloutSettings})


def rollout_prompts(examples: Sequence[Example], run: GrpoRun) -> list[dict[str, Any]]:
    """Rows for the trainer: `prompt` (messages) and what its replies are judged by; shuffled by the seed.

    The reference implementation reads its pool in stored order, so that a short run sees one kernel only.
    """
    generator = np.random.default_rng(run.seed)
    found: list[dict[str, Any]] = []
    for e in examples:
        if run.reward != REGRET_REWARD:
            found += [
                {"prompt": forecast_messages(e, a, think=run.rollouts.think), "truth": a.label, "times": []}
                for a in e.candidates
            ]
            continue
        order = generator.permutation(len(e.candidates))
        count = run.rollouts.candidates
        for begin in range(0, len(order) - count + 1, count):
            some = [e.candidates[i] for i in order[begin : begin + count]]
            if all(math.isnan(a.log2_ratio) for a in some):
                continue
            times = [None if math.isnan(a.log2_ratio) else a.log2_ratio for a in some]
            message = order_messages(e, some, think=run.rollouts.think)
            found.append({"prompt": message, "truth": -1, "times": times})
    return [found[i] for i in generator.permutation(len(found))]


def reward_function(reward: str) -> Callable[..., list[float]]:
    """The reward function in TRL's form: replies and the rows' columns -> one number per reply."""

    def judged(
        completions: Sequence[Any], truth: Sequence[int], times: Sequence[Any], **_: Any
    ) -> list[float]:
        texts = [_completion_text(completion) for completion in completions]
        if reward == REGRET_REWARD:
            return [_named_candidate(text, seen) for text, seen in zip(texts, times, strict=True)]
        return [REWARDS[reward](parse_distribution(text), t) for text, t in zip(texts, truth, strict=True)]

    judged.__name__ = reward
    return judged


def parse_reward(completions: Sequence[Any], times: Sequence[Any], **_: Any) -> list[float]:
    """1 for a reply that can be read: shown beside the reward, with no weight in it."""
    texts = [_completion_text(completion) for completion in completions]
    read_ = [
        parse_fastest(text, len(seen)) if seen else parse_distribution(text)
        for text, seen in zip(texts, times, strict=True)
    ]
    return [float(found is not None) for found in read_]


parse_reward.__name__ = "parsed"  # the name under which the trainer logs it


def _named_candidate(text: str, times: Sequence[float | None]) -> float:
    chosen = parse_fastest(text, len(times))
    best = min(t for t in times if t is not None)
    taken = None if chosen is None else times[chosen]
    return 0.0 if taken is None else float(2.0 ** (best - taken))


def _completion_text(completion: Any) -> str:
    """The text of a reply, whether TRL gives it as text or as messages."""
    return completion if isinstance(completion, str) else str(completion[-1].get("content") or "")


def train(run: GrpoRun, *, resume: bool = False) -> dict[str, Any]:
    """Run it; writes checkpoints, `trained/` and `run.json` below `run.out`, and returns the latter.

    Raises `TrainingError` when `run.out` holds another run or trl is missing.
    """
    try:
        import datasets
        import torch
        import transformers
        import trl

        from forecast_train.llm.training_clock import StopOnNonFinite
    except ImportError as error:
        raise TrainingError(f"GRPO needs trl ({error}): pip install 'forecast-autotune[train]'") from error
    out = Path(run.out)
    claim_run_folder(out, asdict(run), resume)
    transformers.set_seed(run.seed)
    rows = rollout_prompts(read_examples(Path(run.data) / "train.parquet"), run)
    if not rows:
        raise TrainingError(f"{run.data}: no prompt for the reward {run.reward!r}: build it from more tables")
    trainer = trl.GRPOTrainer(
        model=run.model,
        reward_funcs=[reward_function(run.reward), parse_reward],
        args=trainer_arguments(run, out),
        train_dataset=datasets.Dataset.from_list(rows),
        peft_config=_lora(run.lora),
        callbacks=[StopOnNonFinite("lower rate")],
    )
    newest, _ = run_trainer(trainer, out, resume=resume)
    trainer.save_model(str(out / WEIGHTS_FOLDER))
    done = {
        "settings": asdict(run),
        "steps": trainer.state.global_step,
        "resumed_from": newest,
        "prompts": len(rows),
        "log": trainer.state.log_history,
        "versions": {m.__name__: m.__version__ for m in (torch, transformers, trl)},
    }
    if trainer.is_world_process_zero():
        write_json(out / "run.json", done)
    return done


def trainer_arguments(run: GrpoRun, out: Path) -> Any:
    """TRL's settings. Rewards are not divided by the group's spread: that teaches overconfidence
    (Bereket & Leskovec 2025), and calibration is what these rewards are for."""
    import torch
    import trl

    r, cuda = run.rollouts, torch.cuda.is_available()
    serving: dict[str, Any] = {}
    if r.vllm:
        serving = {"use_vllm": True, "vllm_mode": "colocate" if r.vllm == "colocate" else "server"}
        if r.vllm != "colocate":
            serving["vllm_server_base_url"] = r.vllm
    return trl.GRPOConfig(
        output_dir=str(out),
        max_steps=run.steps,
        learning_rate=run.rate,
        beta=run.kl,
        loss_type="dr_grpo",
        scale_rewards="none",
        reward_weights=[1.0, 0.0],
        num_generations=r.generations,
        per_device_train_batch_size=r.generations,
        gradient_accumulation_steps=r.prompts,
        max_completion_length=r.tokens,
        temperature=r.temperature,
        save_steps=run.save,
        save_total_limit=2,
        logging_steps=1,
        seed=run.seed,
        data_seed=run.seed,
        bf16=cuda,
        use_cpu=not cuda,
        report_to=[],
        disable_tqdm=not os.isatty(2),
        **serving,
    )


def _lora(lora: LoraSettings) -> Any:
    if not lora.rank:
        return None
    import peft

    return peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
