"""Models and prompts of stated sizes, for benchmarks of language models: random weights, made-up texts.

Weights do not change how long a pass takes; a benchmark of answers needs a real model (`--model PATH`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from forecast_autotune.llm.bins import BINS
from forecast_autotune.llm.tokenizer import ForecastTokenizer

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "qwen2.5-0.5b": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "qwen2.5-1.5b": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
}
"""Sizes as in the configs of SmolLM2-135M and Qwen2.5-Coder-0.5B and -1.5B."""

_KERNEL = [
    f"    acc{i} = tl.dot(tl.load(a_ptr + {i} * BLOCK_K), tl.load(b_ptr + {i} * BLOCK_K), acc{i})"
    for i in range(400)
]
_FEATURES = [f"f{i}" for i in range(40)]


def random_model(name: str, folder: Path) -> str:
    """Write a model of an architecture with random weights and a small tokenizer; returns its folder."""
    import torch
    import transformers

    sizes = dict(ARCHITECTURES[name])
    config = transformers.AutoConfig.for_model(sizes.pop("model_type"), **sizes, dtype="bfloat16")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return str(folder)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=4000, show_progress=False, initial_alphabet=alphabet, special_tokens=["<end>"]
    )
    texts = [f" {label.token}" for label in BINS.labels]
    texts += [*_KERNEL, *(candidate_text(i, 0, 16) for i in range(200))]
    made.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


def prefix_text(tokens: ForecastTokenizer, size: int, number: int = 0, shape: int = 4096) -> str:
    """A prompt's beginning of about `size` tokens. Another `number` changes its first word, another `shape`
    only what comes after the source, as with problems of one kernel."""
    opening = f"{number} You forecast how long a GPU kernel runs.\nKernel matmul:\n```\n"
    ending = f"```\nM=N=K={shape}\nAnswer with the letter of time / reference time:\n{BINS.table()}\n\n"
    taken = len(tokens.prefix(opening + ending))
    lines: list[str] = []
    for line in _KERNEL:
        taken += len(tokens.suffixes([f"{line}\n"])[0])
        if taken > size:
            break
        lines.append(line)
    return opening + "\n".join(lines) + "\n" + ending


def candidate_text(number: int, run: int, features: int) -> str:
    """The text of a candidate, another one for every number and run; lengths differ a little."""
    blocks = " ".join(f"BLOCK_{x}={16 << (number // 4**i % 4)}" for i, x in enumerate("MNK"))
    values = np.random.default_rng([number, run]).integers(1, 999, features)
    known = " ".join(f"{name}={value}" for name, value in zip(_FEATURES, values, strict=False))
    return f"{blocks} num_warps={1 << (number % 4)} num_stages={number % 5 + 1} | {known}\nBin:"


def candidate_texts(tokens: ForecastTokenizer, count: int, size: int, run: int = 0) -> list[str]:
    """Candidates with about `size` tokens each, on average."""

    def mean(features: int) -> float:
        return float(
            np.mean(
                [len(ids) for ids in tokens.suffixes([candidate_text(i, 0, features) for i in range(32)])]
            )
        )

    features = min(range(len(_FEATURES)), key=lambda n: abs(mean(n) - size))
    return [candidate_text(i, run, features) for i in range(count)]
