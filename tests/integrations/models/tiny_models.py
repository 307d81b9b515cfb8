"""Models of real architectures with random weights, small enough to be made within a test."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forecast_autotune.llm.backend import BackendResponse
from forecast_autotune.llm.bins import BINS

PREFIX = (
    "You forecast how long a kernel runs.\n```\ndef add(x, y, BLOCK):\n    i = arange(0, BLOCK)\n```\n"
    f"Answer with a letter:\n{BINS.table()}\n\n"
)
_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    # Wide enough that answers differ between candidates.
    "initializer_range": 0.3,
}


def suffixes(count: int) -> list[str]:
    """Texts of candidates, of many different lengths."""
    return [
        f"BLOCK={16 << (i % 7)} num_warps={1 << (i % 5)}" + f" | waves={1.5 + i:.3g}" * (i % 6) + "\nBin:"
        for i in range(count)
    ]


def tokenizer() -> Any:
    """A byte-level tokenizer in which capital letters with a space before them are single tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, show_progress=False, initial_alphabet=alphabet, special_tokens=["<end>"]
    )
    letters = "".join(f" {label.token}" for label in BINS.labels)
    made.train_from_iterator([letters, " num_warps=4 BLOCK=64 kernel", *suffixes(8)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<end>")


def config(family: str, **changes: Any) -> Any:
    """The config of a small model: `llama`, `qwen2`, `gemma3`, ..., with changes to it."""
    import transformers

    given = _SIZES | {"vocab_size": len(tokenizer()), "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    if family == "mistral":
        given["sliding_window"] = None
    if family == "qwen3":
        given["head_dim"] = 16
    if family == "gemma3_text":
        given |= {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]}
    return transformers.AutoConfig.for_model(family, **given | changes)


def saved(folder: Path, family: str, **changes: Any) -> str:
    """A model and its tokenizer in a folder; the same weights for the same arguments."""
    import torch
    import transformers

    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = transformers.AutoModelForCausalLM.from_config(config(family, **changes))
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # zero at first: a forgotten bias would go unnoticed
                torch.nn.init.normal_(parameter)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def adapter(folder: Path, model: str, scale: float = 1.0) -> str:
    """A LoRA adapter for a saved model, with random weights in both of its factors."""
    import peft
    import torch
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(model)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        wrapped = peft.get_peft_model(
            base, peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
        )
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.1 * scale)
    wrapped.save_pretrained(folder)
    return str(folder)


def plain_forward(
    folder: str, texts: Sequence[str], prefix: str = PREFIX, adapter: str = "", dtype: str = "float32"
) -> BackendResponse:
    """The answer by transformers alone: each prompt by itself, without a cache; prefix and text tokenized apart."""
    model, tokens = _loaded(folder, adapter, dtype)
    start, more = tokens(prefix)["input_ids"], {"add_special_tokens": False}
    prompts = [start + tokens(text, **more)["input_ids"] for text in texts]
    return _label_shares(model, tokens, prompts, [f" {label.token}" for label in BINS.labels])


def _loaded(folder: str, adapter: str = "", dtype: str = "float32") -> tuple[Any, Any]:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    if adapter:
        import peft

        model = peft.PeftModel.from_pretrained(model, adapter).eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def _label_shares(
    model: Any, tokens: Any, prompts: Sequence[list[int]], words: Sequence[str]
) -> BackendResponse:
    import torch

    ids = [tokens(word, add_special_tokens=False)["input_ids"] for word in words]
    assert all(len(one) == 1 for one in ids), "labels are single tokens"
    shares = []
    with torch.inference_mode():
        for prompt in prompts:
            logits = model(input_ids=torch.tensor([prompt])).logits[0, -1]
            shares.append(logits.double().softmax(0)[[one[0] for one in ids]].numpy())
    mass = np.sum(shares, axis=1)
    return BackendResponse(np.array(shares) / mass[:, None], mass)
