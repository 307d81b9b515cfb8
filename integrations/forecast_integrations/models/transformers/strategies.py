"""Which way of reading is right for a model, and the quickest of those."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from forecast_autotune.llm.backend import LLMError
from forecast_autotune.llm.tokenizer import ForecastTokenizer
from forecast_integrations.models.transformers.loading import out_of_memory, unless_out_of_memory
from forecast_integrations.models.transformers.prefill import (
    BatchedPrefill,
    FullPrefill,
    PackedPrefill,
    PrefillStrategy,
    rows_that_fit,
)
from forecast_integrations.models.transformers.prefix_cache import EMPTY_PREFIX
from forecast_integrations.models.transformers.tree_prefill import TreePrefill

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STRATEGIES: dict[str, Callable[[PreTrainedModel], PrefillStrategy]] = {
    "tree": TreePrefill,
    "packed": PackedPrefill,
    "batched": BatchedPrefill,
    "naive": FullPrefill,
}
"""Quickest first; the last one needs no check."""
_TOLERANCE = {"float32": 0.01, "float16": 0.05, "bfloat16": 0.1}
"""Most RMS difference of logits, relative to their own: some times what rounding makes (1e-6 and 0.02 with
SmolLM2-135M). Reading wrongly makes tenths of it and more."""
_PROBE_PREFIX = "def kernel(x, y, n, BLOCK):\n    i = program_id(0) * BLOCK + arange(0, BLOCK)\n"
_PROBE_SUFFIXES = (
    "BLOCK=64 num_warps=4\nBin:",
    "BLOCK=1024 num_warps=8 num_stages=3 | waves=2.5\nBin:",
    "num_warps=1\nBin:",
)


def choose_strategy(
    model: PreTrainedModel, tokens: ForecastTokenizer, wanted: str | None = None
) -> tuple[PrefillStrategy, dict[str, str]]:
    """The first of `STRATEGIES` (or the one that is wanted) that reads a short prompt as the model's own code
    reads it, and why those before it were refused. Call it in `torch.inference_mode`.

    Raises `LLMError` if the wanted way is not known or refused.
    """
    if wanted is not None and wanted not in STRATEGIES:
        raise LLMError(f"the way of reading must be one of {', '.join(STRATEGIES)}, got {wanted!r}")
    refused: dict[str, str] = {}
    for name in STRATEGIES if wanted is None else (wanted,):
        try:
            way = STRATEGIES[name](model)
            difference = 0.0 if name == "naive" else _relative_error(way, model, tokens)
        except Exception as error:  # a model may have any structure: what does not fit is not used
            if out_of_memory(error):
                raise
            refused[name] = f"{type(error).__name__}: {error}"[:300]
            continue
        if difference <= _TOLERANCE[str(model.dtype).removeprefix("torch.")]:
            return way, refused
        refused[name] = f"its logits differ by {difference:.2g} of their spread"
    raise LLMError(
        f"this model cannot be read in the way {wanted!r} ({'; '.join(refused.values())}): leave the way open"
    )


def warm_up(
    way: PrefillStrategy, model: PreTrainedModel, limit_bytes: float, *, prefix: int, rows: int, length: int
) -> None:
    """Read made-up tokens: the first pass of its size has kernels to load and workspaces to allocate.

    No more rows than the limit allows; where memory is missing for those, nothing is warm.
    """
    import torch

    ids = np.arange(prefix + length) % model.config.get_text_config().vocab_size
    count = rows_that_fit(way, prefix, [length] * rows, limit_bytes)
    some = torch.arange(2, device=model.device)

    def once() -> None:
        past = way.extend(EMPTY_PREFIX, ids[:prefix])
        way.read(past, [ids[prefix:]] * count, some)[0].cpu()

    unless_out_of_memory(once)


def _relative_error(way: PrefillStrategy, model: PreTrainedModel, tokens: ForecastTokenizer) -> float:
    """How far a way's logits lie from the model's own: RMS of the difference over RMS, both centred per
    suffix; NaN where either is not finite."""
    import torch

    some = torch.arange(64, device=model.device) * (model.config.get_text_config().vocab_size // 64)
    prefix, suffixes = tokens.prefix(_PROBE_PREFIX), tokens.suffixes(_PROBE_SUFFIXES)
    found, right = (
        w.read(w.extend(EMPTY_PREFIX, prefix), suffixes, some)[0] for w in (way, FullPrefill(model))
    )
    found, right = (x - x.mean(dim=-1, keepdim=True) for x in (found, right))
    return float((found - right).square().mean().sqrt() / right.square().mean().sqrt())
