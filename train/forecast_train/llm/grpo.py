"""Reinforcement learning with the paper's rewards, for models that speak (TRL's GRPOTrainer).

A chatting or reasoning model is asked for a bin and a distribution in JSON, and rewarded by what is recorded (arXiv
2605.31464, section on RL). The tokenizer's own chat template puts a dialogue into tokens.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from forecast_autotune.errors import SettingsError
from forecast_autotune.llm.backend import LLMError
from forecast_autotune.llm.bins import BINS
from forecast_autotune.llm.replies import MAX_TOTAL, MIN_TOTAL, InvalidResponse, extract_json, weights
from forecast_autotune.llm.tokenizer import ForecastTokenizer
from forecast_train.llm.data.examples import Example, ExampleCandidate, read_examples
from forecast_train.llm.runs import (
    WEIGHTS_FOLDER,
    LoraSettings,
    TrainingError,
    claim_run_folder,
    finished_run,
    load_toml,
    require_positions,
    run_trainer,
    write_json,
)

Array = npt.NDArray[np.float64]

REGRET_REWARD = "regret"
"""Reward of naming the fastest of several candidates: 2^-slowdown of the one that was named."""
_ANSWER_INSTRUCTION = """\
Name the most probable letter, and say how probable each is; leave out letters below 0.01. Reply with JSON:
{"label": "F", "distribution": {"E": 0.2, "F": 0.6, "G": 0.2}}
"""
_ORDER_INSTRUCTION = """\
Say which of the numbered candidates is the fastest. Reply with JSON:
{"fastest": 3}
"""
_CLOSING_QUESTION = re.compile(r"\n[^\n]{1,40}:\s*$")
_FINAL_CHANNEL = re.compile(r"<\|channel\|>final<\|message\|>(.*?)(?:<\|end\|>|<\|return\|>|$)", re.DOTALL)
"""The channel of gpt-oss's answer; a reply without this channel has none."""


@dataclass(frozen=True)
class StatedDistribution:
    """A model's answer about one candidate."""

    probabilities: tuple[float, ...]
    """Over the labels in their order, summing to 1."""
    predicted: int
    """The label it named; need not be the most probable one."""

    def __post_init__(self) -> None:
        total = sum(self.probabilities)
        if not (abs(total - 1.0) < 1e-6 and min(self.probabilities) >= 0.0):
            raise ValueError(f"a distribution is not negative and sums to 1, got {self.probabilities}")
        if not 0 <= self.predicted < len(self.probabilities):
            raise ValueError(f"label {self.predicted} of {len(self.probabilities)}")


def brier(probabilities: Array, truth: int) -> float:
    """Half the squared distance of `probabilities` [K] to the truth, in [0, 1]."""
    hit = np.arange(len(probabilities)) == truth
    return float(0.5 * ((probabilities - hit) ** 2).sum())


def crps(probabilities: Array, truth: int) -> float:
    """Ranked probability score over K - 1, in [0, 1]: labels are ordered, "fails" slowest of all."""
    happened = np.arange(len(probabilities) - 1) >= truth
    return float(((probabilities.cumsum()[:-1] - happened) ** 2).mean())


def correctness(stated: StatedDistribution | None, truth: int) -> float:
    """1 if the named bin is the true one, else 0; 0 for what could not be parsed."""
    return 0.0 if stated is None else float(stated.predicted == truth)


def correctness_brier(stated: StatedDistribution | None, truth: int) -> float:
    """`correctness` + 1 - Brier."""
    if stated is None:
        return 0.0
    return correctness(stated, truth) + 1.0 - brier(np.array(stated.probabilities), truth)


def correctness_crps(stated: StatedDistribution | None, truth: int) -> float:
    """`correctness` + 1 - CRPS."""
    if stated is None:
        return 0.0
    return correctness(stated, truth) + 1.0 - crps(np.array(stated.probabilities), truth)


REWARDS: Mapping[str, Callable[[StatedDistribution | None, int], float]] = {
    "correctness": correctness,
    "correctness_brier": correctness_brier,
    "correctness_crps": correctness_crps,
}
"""The paper's three, by its names: they lie in [0, 2], and a text that cannot be parsed earns 0."""


def forecast_messages(example: Example, candidate: ExampleCandidate) -> list[dict[str, str]]:
    """Messages that ask for one candidate."""
    question = f"Candidate: {_CLOSING_QUESTION.sub('', candidate.suffix)}"
    return _messages(example, question, _ANSWER_INSTRUCTION)


def order_messages(example: Example, candidates: Sequence[ExampleCandidate]) -> list[dict[str, str]]:
    """Messages that ask which of several candidates is the fastest."""
    lines = [f"{n}. {_CLOSING_QUESTION.sub('', a.suffix)}" for n, a in enumerate(candidates, start=1)]
    return _messages(example, "\n".join(lines), _ORDER_INSTRUCTION)


def _messages(example: Example, question: str, instruction: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{example.prefix}{question}\n\n{instruction}"}]


def parse_distribution(text: str) -> StatedDistribution | None:
    """The distribution in a reply; None where it cannot be read: no JSON, no letters, or sums far from 1."""
    answer = _answer(text) or {}
    distribution, label = answer.get("distribution"), answer.get("label")
    if not isinstance(distribution, Mapping) or not isinstance(label, str):
        return None
    try:
        distribution = weights(distribution, labels=BINS.labels)
    except (InvalidResponse, TypeError, ValueError):
        return None
    total = sum(distribution)
    tokens = [bin_label.token for bin_label in BINS.labels]
    letter = label.strip().upper()
    if not MIN_TOTAL <= total <= MAX_TOTAL or letter not in tokens:
        return None
    return StatedDistribution(tuple(p / total for p in distribution), tokens.index(letter))


def parse_fastest(text: str, count: int) -> int | None:
    """The candidate that a reply names, from 0; None where it names none of the `count`."""
    number = (_answer(text) or {}).get("fastest")
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= count:
        return None
    return number - 1


def _answer(text: str) -> dict[str, Any] | None:
    if "<|channel|>" in text:
        final = _FINAL_CHANNEL.findall(text)
        text = final[-1] if final else ""
    try:
        answer = extract_json(text)
    except InvalidResponse:
        return None
    return answer if isinstance(answer, dict) else None


@dataclass(frozen=True)
class RolloutSettings:
    """Number and sampling of replies."""

    generations: int = 8
    """Replies per prompt: the group whose mean is the baseline."""
    prompts: int = 8
    """Prompts per step."""
    tokens: int = 512
    """Tokens of a reply at the most; reasoning needs thousands."""
    temperature: float = 1.0
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
        rewards = (*REWARDS, REGRET_REWARD)
        if self.reward not in rewards:
            raise SettingsError(f"reward must be one of {', '.join(rewards)}, got {self.reward!r}")
        r = self.rollouts
        if min(self.steps, self.save, r.prompts, r.tokens) < 1 or min(r.generations, r.candidates) < 2:
            raise SettingsError(f"steps, prompts, tokens >= 1 and generations, candidates >= 2; got {self}")
        if not (self.rate > 0 and r.temperature > 0 and self.kl >= 0):
            raise SettingsError(f"rate and temperature are positive, kl not negative; got {self}")
        if self.lora.dropout:
            # TRL draws replies with the model as it trains.
            raise SettingsError(
                f"lora.dropout must be 0 where replies are drawn, got {self.lora.dropout}: they would be drawn of "
                "a network that nobody is served"
            )

    @classmethod
    def load(cls, path: Path) -> GrpoRun:
        """Read a TOML file; relative folders count from where it lies. Raises `SettingsError`."""
        return load_toml(cls, path, {"lora": LoraSettings, "rollouts": RolloutSettings})


def rollout_prompts(examples: Sequence[Example], run: GrpoRun) -> list[dict[str, Any]]:
    """Rows for the trainer: `prompt` (messages) and what its replies are judged by; shuffled by the seed.

    The reference implementation reads its pool in stored order, so that a short run sees one kernel only.
    """
    generator = np.random.default_rng(run.seed)
    rows: list[dict[str, Any]] = []
    for e in examples:
        if run.reward != REGRET_REWARD:
            rows += [{"prompt": forecast_messages(e, a), "truth": a.label, "times": []} for a in e.candidates]
            continue
        order = generator.permutation(len(e.candidates))
        count = run.rollouts.candidates
        for begin in range(0, len(order) - count + 1, count):
            group = [e.candidates[i] for i in order[begin : begin + count]]
            if all(math.isnan(a.log2_ratio) for a in group):
                continue
            times = [None if math.isnan(a.log2_ratio) else a.log2_ratio for a in group]
            message = order_messages(e, group)
            rows.append({"prompt": message, "truth": -1, "times": times})
    return [rows[i] for i in generator.permutation(len(rows))]


def reward_function(reward: str) -> Callable[..., list[float]]:
    """The reward function in TRL's form: replies and the rows' columns -> one number per reply."""

    def rewards(
        completions: Sequence[Any], truth: Sequence[int], times: Sequence[Any], **_: Any
    ) -> list[float]:
        texts = [_completion_text(completion) for completion in completions]
        if reward == REGRET_REWARD:
            return [_regret_reward(text, row_times) for text, row_times in zip(texts, times, strict=True)]
        return [REWARDS[reward](parse_distribution(text), t) for text, t in zip(texts, truth, strict=True)]

    rewards.__name__ = reward
    return rewards


def parse_reward(completions: Sequence[Any], times: Sequence[Any], **_: Any) -> list[float]:
    """1 for a reply that can be read: shown beside the reward, with no weight in it."""
    texts = [_completion_text(completion) for completion in completions]
    replies = [
        parse_fastest(text, len(row_times)) if row_times else parse_distribution(text)
        for text, row_times in zip(texts, times, strict=True)
    ]
    return [float(reply is not None) for reply in replies]


parse_reward.__name__ = "parsed"  # the name under which the trainer logs it


def _regret_reward(text: str, times: Sequence[float | None]) -> float:
    choice = parse_fastest(text, len(times))
    best = min(t for t in times if t is not None)
    time = None if choice is None else times[choice]
    return 0.0 if time is None else float(2.0 ** (best - time))


def _completion_text(completion: Any) -> str:
    """The text of a reply, whether TRL gives it as text or as messages."""
    last = completion if isinstance(completion, str) else (completion or [{}])[-1].get("content")
    return last if isinstance(last, str) else str(last or "")


def train(run: GrpoRun, *, resume: bool = False) -> dict[str, Any]:
    """Run it; writes checkpoints, `trained/` and `run.json` below `run.out`, and returns the latter.

    Raises `TrainingError` when `run.out` holds another run or trl is missing.
    """
    try:
        import datasets
        import torch
        import transformers
        import trl

        from forecast_train.llm.sft import record_probe, serve
    except ImportError as error:
        raise TrainingError(f"GRPO needs trl ({error}): pip install 'forecast-autotune[train]'") from error
    out = Path(run.out)
    name = claim_run_folder(out, asdict(run), resume)
    if summary := finished_run(out, name, resume):
        return summary
    transformers.set_seed(run.seed)
    examples = read_examples(Path(run.data) / "train.parquet")
    rows = rollout_prompts(examples, run)
    tokenizer = transformers.AutoTokenizer.from_pretrained(run.model, padding_side="left")
    if not tokenizer.chat_template:
        raise TrainingError(
            f"replies are drawn by the tokenizer's chat template, and {run.model} has none: name a chatting model"
        )
    arguments = _trainer_arguments(run, out)
    step_prompts = run.rollouts.prompts * arguments.world_size
    if len(rows) < step_prompts:
        raise TrainingError(
            f"a step needs {step_prompts} prompts and {run.data} has {len(rows)} for the reward {run.reward!r}: lower "
            "rollouts.prompts, or build it from more tables"
        )
    longest = sorted((row["prompt"] for row in rows), key=lambda m: -len(m[0]["content"]))[:8]
    sizes = [
        len(tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=True)["input_ids"])
        for m in longest
    ]
    config = transformers.AutoConfig.from_pretrained(run.model)
    require_positions(config, max(sizes) + run.rollouts.tokens, "lower rollouts.tokens")
    # Every pass in an order of its own, written down at once: TRL resumes a later pass in the first one's order.
    passes = -(-run.steps * step_prompts // (len(rows) - len(rows) % step_prompts))
    order = [int(i) for n in range(passes) for i in _pass_order(len(rows), step_prompts, run.seed, n)]
    trainer = trl.GRPOTrainer(
        model=run.model,
        reward_funcs=[reward_function(run.reward), parse_reward],
        args=arguments,
        train_dataset=datasets.Dataset.from_list(rows).select(order),
        processing_class=tokenizer,
        peft_config=run.lora.config(),
    )
    newest, _ = run_trainer(trainer, out, resume=resume, remedy="lower rate")
    trainer.save_model(str(out / WEIGHTS_FOLDER))
    summary = {
        "run": name,
        "settings": asdict(run),
        "steps": trainer.state.global_step,
        "resumed_from": newest,
        "prompts": len(rows),
        "log": trainer.state.log_history,
        "versions": {m.__name__: m.__version__ for m in (torch, transformers, trl)},
    }
    if trainer.is_world_process_zero():
        model, tokens = trainer.accelerator.unwrap_model(trainer.model), ForecastTokenizer(tokenizer)
        with contextlib.suppress(LLMError):  # its letters are several tokens: it can only be talked to
            serve(run.model, out / WEIGHTS_FOLDER, record_probe(model, examples, tokens))
        write_json(out / "run.json", summary)
    return summary


def _pass_order(rows: int, together: int, seed: int, number: int) -> npt.NDArray[np.int64]:
    """Rows of a pass, whole steps of `together` rows only; the first is in the order of `rollout_prompts`."""
    whole = rows - rows % together
    return np.random.default_rng([seed, number]).permutation(rows)[:whole] if number else np.arange(whole)


def _trainer_arguments(run: GrpoRun, out: Path) -> Any:
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
        shuffle_dataset=False,
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
