"""Training of a small model on questions about sources, and its forecasts: one GPU, bf16, LoRA in float32.

Sequences of like lengths share a batch, padded behind: under a causal mask nothing reads the padding, so that no
mask is needed and the fastest attention is taken. The head is computed for the labels' tokens at the last position
alone. Rewards are differentiated as expectations over the eight bins of the paper's table, without sampling.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.lib.training.source_questions import (
    SourceExample,
    TaughtPair,
    canonical_text,
    epoch_pairs,
    length_batches,
    question_text,
)
from benchmarks.lib.variants.source_comparisons import EIGHT_BINS
from forecast_autotune.llm.bins import BINS
from forecast_autotune.llm.tokenizer import ForecastTokenizer
from forecast_train.llm.losses import RewardName, bin_loss, expected_reward

FloatArray = npt.NDArray[np.float64]

QUESTION_END = "Answer:"


@dataclass(frozen=True)
class SourceTrainingSettings:
    """How one adapter is trained."""

    epochs: float = 3.0
    rate: float = 4e-4
    rank: int = 16
    tokens: int = 16384
    """Of a step, with padding."""
    longest: int = 4096
    """Longer questions lose tokens from their middle."""
    base_share: float = 0.6
    """Share of questions against the base; the others are about two sources of a kernel."""
    answer_share: float = 0.0
    """Share of a target that comes from the strong model's answer."""
    rps: float = 0.5
    reward: RewardName | None = None
    """Train on this reward in expectation, not on the targets."""
    warmup: float = 0.05
    seed: int = 0


KEPT_TEXTS = 16384
"""Texts whose tokens a model keeps: every epoch asks about most of them again."""


class TimeOver(Exception):
    """The time that was given is over before a run has learned anything."""


class SourceModel:
    """A language model with its tokenizer on one device. Raises `LLMError` where a label is no single token."""

    def __init__(self, folder: Path, device: str, rank: int) -> None:
        import peft
        import transformers

        self.device = torch.device(device)
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
        self.tokens = ForecastTokenizer(tokenizer)
        self._ids: dict[str, npt.NDArray[np.int64]] = {}
        self.labels = torch.tensor(self.tokens.labels([QUESTION_END], BINS.labels), device=self.device)
        base = transformers.AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=torch.bfloat16, attn_implementation="sdpa"
        ).to(self.device)
        base.config.use_cache = False
        chosen = peft.LoraConfig(
            r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        self.adapted: Any = peft.get_peft_model(base, chosen)
        self.base: Any = self.adapted.get_base_model()
        self.trained = {n: p for n, p in self.adapted.named_parameters() if p.requires_grad}
        for parameter in self.trained.values():
            # Small steps vanish in bfloat16.
            parameter.data = parameter.data.float()

    def reset(self, seed: int) -> None:
        """Weights as a new adapter has them: it changes nothing yet."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.trained.items():
                if "lora_B" in name:
                    parameter.zero_()
                else:
                    bound = 1.0 / math.sqrt(parameter.shape[1])
                    fresh = torch.rand(parameter.shape, generator=generator)
                    parameter.copy_((2.0 * fresh - 1.0) * bound)

    def load(self, state: dict[str, Any]) -> None:
        """Take up an adapter's weights."""
        with torch.no_grad():
            for name, parameter in self.trained.items():
                parameter.copy_(state[name])

    def state(self) -> dict[str, Any]:
        """The adapter's weights, on the host."""
        return {name: p.detach().cpu().clone() for name, p in self.trained.items()}

    def token_ids(self, texts: Sequence[str], longest: int) -> list[npt.NDArray[np.int64]]:
        """Tokens of texts; of longer ones as many of the beginning as of the end."""
        found = []
        for text in texts:
            ids = self._ids.get(text)
            if ids is None:
                ids = self.tokens.prefix(text)
                if len(self._ids) < KEPT_TEXTS:
                    self._ids[text] = ids
            half = longest // 2
            found.append(ids if len(ids) <= longest else np.concatenate([ids[:half], ids[half - longest :]]))
        return found

    def on_device(self, tensor: Any) -> Any:
        """A tensor of the host on the model's device, without waiting for what runs there."""
        if self.device.type != "cuda":
            return tensor.to(self.device)
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def hidden(self, ids: Sequence[npt.NDArray[np.int64]]) -> tuple[Any, Any]:
        """Last hidden states [n, longest, width] of sequences, padded behind, and their lengths [n]."""
        size = self.on_device(torch.tensor([len(one) for one in ids]))
        rows = [torch.as_tensor(one) for one in ids]
        padded = self.on_device(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True))
        with torch.autocast(self.device.type, torch.bfloat16):
            return self.base.model(input_ids=padded, use_cache=False).last_hidden_state, size

    def logits(self, ids: Sequence[npt.NDArray[np.int64]]) -> Any:
        """Logits of the labels at the end of each sequence, [n, labels], float32."""
        states, size = self.hidden(ids)
        last = states[torch.arange(len(ids), device=self.device), size - 1]
        return last.float() @ self.base.get_output_embeddings().weight[self.labels].float().T


def bin_groups() -> FloatArray:
    """Which of the eight bins and "fails" each of the product's labels belongs to, [labels, 9], of 0 and 1."""
    centres = BINS.bounds.mean(axis=1)
    place = [*EIGHT_BINS.index(centres), EIGHT_BINS.failure_index]
    return np.asarray(np.eye(len(EIGHT_BINS) + 1)[place])


def run_loss(logits: Any, pairs: Sequence[TaughtPair], settings: SourceTrainingSettings, groups: Any) -> Any:
    """The loss of a batch: against the targets, or the reward over the paper's bins, negated."""
    device = logits.device
    if settings.reward is None:
        target = torch.tensor(np.stack([p.target for p in pairs]), dtype=torch.float32, device=device)
        return bin_loss(logits, target, settings.rps)
    eight = (torch.softmax(logits, dim=-1) @ groups).clamp_min(1e-9).log()
    truth = groups.argmax(dim=1)[torch.tensor([p.label for p in pairs], device=device)]
    return -expected_reward(eight, truth, settings.reward)


def rate_share(progress: float, warmup: float) -> float:
    """Share of the highest rate: rises over `warmup`, then falls along a cosine; `progress` in [0, 1]."""
    if progress < warmup:
        return max(0.02, progress / warmup)
    return 0.5 * (1.0 + math.cos(math.pi * (progress - warmup) / (1.0 - warmup)))


def train_sources(
    model: SourceModel,
    examples: Sequence[SourceExample],
    settings: SourceTrainingSettings,
    deadline: float = math.inf,
) -> dict[str, Any]:
    """Train the model's adapter from where it is; losses and pace.

    When `deadline` (of `time.monotonic`) passes, training ends with what it has learned: `epochs` says how many
    were done, and `cut` that they are fewer than asked. The rate falls with the time as well as with the epochs,
    so that a run which is cut ends at a low rate, too. Raises `TimeOver` where the deadline leaves no step, and
    `ValueError` where nothing is to be learned.
    """
    known = [one for one in examples if one.known]
    if not known:
        raise ValueError("no source with a measured outcome is left to train on: give more families")
    generator = np.random.default_rng([settings.seed, 7])
    groups = torch.tensor(bin_groups(), dtype=torch.float32, device=model.device)
    parameters = list(model.trained.values())
    optimizer = torch.optim.AdamW(
        parameters, lr=settings.rate, weight_decay=0.01, fused=model.device.type == "cuda"
    )
    model.base.train()
    begin = time.monotonic()
    losses: list[Any] = []
    done, tokens, cut = 0.0, 0, False
    while done < settings.epochs - 1e-9 and not cut:
        pairs = epoch_pairs(known, settings.answer_share, settings.base_share, generator)
        ids = model.token_ids([p.text for p in pairs], settings.longest)
        for batch in length_batches([len(one) for one in ids], settings.tokens, generator):
            if done >= settings.epochs - 1e-9:
                break
            now = time.monotonic()
            if now > deadline:
                cut = True
                break
            gone = max(done / settings.epochs, (now - begin) / (deadline - begin))
            for group in optimizer.param_groups:
                group["lr"] = settings.rate * rate_share(gone, settings.warmup)
            loss = run_loss(
                model.logits([ids[i] for i in batch]), [pairs[i] for i in batch], settings, groups
            )
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            losses.append(loss.detach())
            tokens += sum(len(ids[i]) for i in batch)
            done += len(batch) / len(pairs)
    if not losses:
        raise TimeOver(f"the time was over before a step of {settings.epochs} epochs: give more seconds")
    heard = torch.stack(losses).float().cpu().numpy()
    if not np.isfinite(heard).all():
        raise ValueError("the loss is no number any more: lower rate")
    seconds = time.monotonic() - begin
    tenth = max(1, len(heard) // 10)
    return {
        "steps": len(heard),
        "epochs": round(done, 3),
        "cut": cut,
        "seconds": round(seconds, 2),
        "tokens_per_s": round(tokens / seconds),
        "loss_first": round(float(heard[:tenth].mean()), 4),
        "loss_last": round(float(heard[-tenth:].mean()), 4),
    }


def forecast_sources(
    model: SourceModel, examples: Sequence[SourceExample], settings: SourceTrainingSettings
) -> FloatArray:
    """P of the product's bins and "fails" of each source against its base, [n, labels]."""
    texts = [question_text(one.base, one.text, one.arguments) for one in examples]
    found = np.zeros((len(texts), len(BINS) + 1))
    ids = model.token_ids(texts, settings.longest)
    model.base.eval()
    with torch.inference_mode():
        for batch in length_batches([len(one) for one in ids], 2 * settings.tokens, None):
            p = torch.softmax(model.logits([ids[i] for i in batch]).double(), dim=-1)
            found[batch] = p.cpu().numpy()
    return found


def pooled_states(
    model: SourceModel, examples: Sequence[SourceExample], settings: SourceTrainingSettings
) -> npt.NDArray[np.float16]:
    """Mean of the last hidden states over each source's own text, less that of its base's text, [n, width]."""
    texts = sorted({canonical_text(t) for one in examples for t in (one.text, one.base)})
    place = {text: i for i, text in enumerate(texts)}
    ids = model.token_ids(texts, settings.longest)
    rows: list[Any] = [None] * len(texts)
    model.base.eval()
    with torch.inference_mode():
        for batch in length_batches([len(one) for one in ids], 2 * settings.tokens, None):
            states, size = model.hidden([ids[i] for i in batch])
            for row, i in enumerate(batch):
                rows[i] = states[row, : size[row]].float().mean(dim=0).cpu().numpy()
    found = [
        rows[place[canonical_text(one.text)]] - rows[place[canonical_text(one.base)]] for one in examples
    ]
    return np.stack(found).astype(np.float16)
