"""Ways to have a model read many suffixes after one prefix, for any causal model of transformers.

`PackedPrefill` puts all suffixes into one sequence under a tree mask: a token sees the prefix and the earlier
tokens of its own suffix. `BatchedPrefill` repeats the prefix's keys and values for a batch; it needs no mask of
its own, so that sliding windows and the like stay as the model has them. `FullPrefill` reads every prompt in
full: the definition of a right answer. The fastest way, for models it knows, is in `tree_prefill`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from forecast_autotune.llm.tokenizer import Ids
from forecast_integrations.models.transformers.prefix_cache import Layers, Prefix

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import DynamicCache, PreTrainedModel
    from transformers.modeling_outputs import CausalLMOutputWithPast

Logits: TypeAlias = "tuple[Tensor, Tensor]"
"""Logits of the labels after every suffix, float32 [n, labels], and log sum exp of all logits, [n]."""


@dataclass(frozen=True)
class PassShape:
    """How much a way would read at once."""

    rows: int
    longest: int
    shortest: int
    tokens: int
    """Of all suffixes together, without padding."""


class PrefillStrategy(Protocol):
    """One way to read; `model` is on its device, and the caller in `torch.inference_mode`."""

    name: str
    max_padding: float
    """Most tokens of padding in a pass: beyond them, another pass costs less."""

    def extend(self, past: Prefix, ids: Ids) -> Prefix:
        """Read on: `past` and `ids` as one prefix. `past` stays as it is."""
        ...

    def read(self, past: Prefix, suffixes: Sequence[Ids], labels: Tensor) -> Logits:
        """Logits after `past` and each of the suffixes, in one pass; `labels` [labels] are tokens."""
        ...

    def pass_bytes(self, past: int, shape: PassShape) -> float:
        """About how many bytes such a pass takes beside the weights."""
        ...


def rows_that_fit(way: PrefillStrategy, past: int, sizes: Sequence[int], limit_bytes: float) -> int:
    """How many suffixes of these sizes, longest first, to read in one pass; at least one."""
    tokens = 0
    for rows, size in enumerate(sizes, start=1):
        tokens += size
        wasted = rows * sizes[0] - tokens
        shape = PassShape(rows, sizes[0], size, tokens)
        if rows > 1 and (wasted > way.max_padding or way.pass_bytes(past, shape) > limit_bytes):
            return rows - 1
    return len(sizes)


class UnsupportedModel(ValueError):
    """A model that a way cannot read; the message says why."""


class _ModelPrefill:
    """What ways share that run the model's own forward."""

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config()
        self._model, self._device = model, model.device
        heads = getattr(config, "num_attention_heads", None) or 1
        groups = getattr(config, "num_key_value_heads", None) or heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        size = model.dtype.itemsize
        # Bytes: of a token's activations, of what is kept of it, of a row's logits, of a pair that attends.
        self._token: int = size * (16 * config.hidden_size + 4 * inner)
        self._kept: int = 2 * size * config.num_hidden_layers * groups * width
        self._logits: int = 10 * config.vocab_size
        # Attention in plain torch writes every head's weights down, in float32 and in the model's type.
        eager = getattr(model.config, "_attn_implementation", "") == "eager"
        self._pair: int = 8 * heads if eager else 4

    def _tensor(self, numbers: npt.NDArray[np.int64]) -> Tensor:
        import torch

        return torch.as_tensor(numbers, device=self._device)

    def _ask(
        self, ids: Tensor, keep: Tensor | int, layers: Layers | None, **more: Tensor
    ) -> CausalLMOutputWithPast:
        cache = None if layers is None else cache_from_layers(layers, rows=len(ids))
        return self._model(
            input_ids=ids, past_key_values=cache, use_cache=cache is not None, logits_to_keep=keep, **more
        )

    def _padded(self, suffixes: Sequence[Ids]) -> tuple[Tensor, Ids, Tensor, Tensor]:
        """Tokens [n, longest] padded on the right, where causal attention does not see the padding; the
        distinct last places, and every row's place among them."""
        ids, last = pad_suffixes(suffixes)
        places, which = np.unique(last, return_inverse=True)
        rows = np.arange(len(suffixes))
        return self._tensor(ids), places, self._tensor(rows), self._tensor(which)

    def extend(self, past: Prefix, ids: Ids) -> Prefix:
        cache = self._ask(self._tensor(ids)[None], 1, past.layers).past_key_values
        layers = tuple((layer.keys, layer.values) for layer in cache.layers)
        return Prefix(np.concatenate([past.ids, ids]), layers)


class PackedPrefill(_ModelPrefill):
    """All suffixes in one sequence, under a tree mask. Raises `UnsupportedModel` where layers see a window only."""

    name = "packed"
    max_padding = math.inf

    def __init__(self, model: PreTrainedModel) -> None:
        if not has_full_attention(model):
            raise UnsupportedModel("some layers see a window only, or have no attention")
        super().__init__(model)

    def read(self, past: Prefix, suffixes: Sequence[Ids], labels: Tensor) -> Logits:
        """See `PrefillStrategy`."""
        import torch

        sizes = np.array([len(ids) for ids in suffixes])
        owner = self._tensor(np.repeat(np.arange(len(sizes)), sizes))
        places = self._tensor(np.concatenate([np.arange(n) for n in sizes]) + len(past))
        own = (owner[:, None] == owner[None, :]) & (places[:, None] >= places[None, :])
        mask = torch.cat([own.new_ones(len(owner), len(past)), own], dim=1)[None, None]
        out = self._ask(
            self._tensor(np.concatenate(suffixes))[None],
            self._tensor(np.cumsum(sizes) - 1),
            past.layers,
            position_ids=places[None],
            attention_mask=mask,
        )
        return label_logits(out.logits[0], labels)

    def pass_bytes(self, past: int, shape: PassShape) -> float:
        """See `PrefillStrategy`."""
        seen = self._pair * shape.tokens * (past + shape.tokens)
        return seen + shape.tokens * self._token + 3 * past * self._kept + shape.rows * self._logits


class BatchedPrefill(_ModelPrefill):
    """The prefix's keys and values repeated for every suffix of a batch."""

    name = "batched"
    max_padding = 512.0

    def read(self, past: Prefix, suffixes: Sequence[Ids], labels: Tensor) -> Logits:
        """See `PrefillStrategy`."""
        ids, places, rows, which = self._padded(suffixes)
        out = self._ask(ids, self._tensor(places), past.layers)
        return label_logits(out.logits[rows, which], labels)

    def pass_bytes(self, past: int, shape: PassShape) -> float:
        """See `PrefillStrategy`."""
        # The cache's own copy, the one it grows into, and the one repeated for grouped heads.
        kept = 3 * (past + shape.longest) * self._kept
        pairs = self._pair * shape.longest * (past + shape.longest)
        each = kept + pairs + shape.longest * self._token
        return shape.rows * (each + self._logits * _distinct_last_places(shape))


class FullPrefill(_ModelPrefill):
    """Every prompt in full: slow, and right for whatever transformers can run."""

    name = "naive"
    max_padding = 512.0

    def extend(self, past: Prefix, ids: Ids) -> Prefix:
        """Nothing is read before its suffix."""
        return Prefix(np.concatenate([past.ids, ids]))

    def read(self, past: Prefix, suffixes: Sequence[Ids], labels: Tensor) -> Logits:
        """See `PrefillStrategy`."""
        ids, places, rows, which = self._padded([np.concatenate([past.ids, ids]) for ids in suffixes])
        out = self._ask(ids, self._tensor(places), None)
        return label_logits(out.logits[rows, which], labels)

    def pass_bytes(self, past: int, shape: PassShape) -> float:
        """See `PrefillStrategy`."""
        length = past + shape.longest
        each = (
            length * self._token + self._pair * length * length + self._logits * _distinct_last_places(shape)
        )
        return shape.rows * each


def _distinct_last_places(shape: PassShape) -> int:
    """Most distinct last places of a padded batch: the model's head gives logits at all, for all rows."""
    return min(shape.rows, shape.longest - shape.shortest + 1)


def pad_suffixes(suffixes: Sequence[Ids]) -> tuple[Ids, Ids]:
    """Tokens [n, longest] with zeros on the right, and the place of every row's last token, [n]."""
    last = np.array([len(ids) - 1 for ids in suffixes])
    ids = np.zeros((len(suffixes), int(last.max()) + 1), np.int64)
    for row, tokens in zip(ids, suffixes, strict=True):
        row[: len(tokens)] = tokens
    return ids, last


def label_logits(logits: Tensor, labels: Tensor) -> Logits:
    """Of logits [n, vocabulary], what a forecast needs."""
    wide = logits.float()
    return wide[:, labels], wide.logsumexp(dim=-1)


def cache_from_layers(layers: Layers, rows: int) -> DynamicCache:
    """A cache of transformers that begins with these keys and values, for a batch of `rows`.

    A cache grows by concatenation, into tensors of its own: what is kept of a prefix is never written to.
    """
    from transformers import DynamicCache

    # Without the model's config: a layer with a sliding window would drop what another prompt still needs.
    cache = DynamicCache()
    for number, (keys, values) in enumerate(layers):
        cache.update(keys.expand(rows, -1, -1, -1), values.expand(rows, -1, -1, -1), number)
    return cache


def has_full_attention(model: PreTrainedModel) -> bool:
    """Whether every layer attends to all earlier tokens, as its config says: `PackedPrefill` needs that."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return set(kinds) == {"full_attention"}
    window = getattr(config, "sliding_window", None)
    return window is None or getattr(config, "use_sliding_window", True) is False
