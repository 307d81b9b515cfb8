"""Reading of many suffixes after one prefix: the prefix once, then the suffixes as a batch behind its cache.

The keys and values of the prompt that was read last are kept, as prompts of a kernel begin alike. Their tensors are
never written to again: a cache of transformers grows by concatenation, into tensors of its own.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from forecast_autotune.llm.tokenizer import ForecastTokenizer, Ids
from forecast_integrations.models.transformers.loading import (
    PROBE_PREFIX,
    TOLERANCE,
    out_of_memory,
)

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

Layers: TypeAlias = "tuple[tuple[Tensor, Tensor], ...]"
"""Keys and values per layer, tensors [1, heads, tokens, width]; empty where a model's are not kept."""


@dataclass(frozen=True)
class Prefix:
    """Tokens that were read, and what the model's layers keep of them."""

    ids: Ids
    layers: Layers = ()

    def __len__(self) -> int:
        return len(self.ids)

    def cropped(self, tokens: int) -> Prefix:
        """The first `tokens` of it: a view, as attention is causal."""
        if tokens == 0:
            return EMPTY_PREFIX
        layers = tuple((k[:, :, :tokens], v[:, :, :tokens]) for k, v in self.layers)
        return Prefix(self.ids[:tokens], layers)


EMPTY_PREFIX = Prefix(np.zeros(0, np.int64))
"""Before the first token."""


def common_prefix_length(a: Ids, b: Ids) -> int:
    """Return the number of first tokens that two sequences share."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


Logits: TypeAlias = "tuple[Tensor, Tensor]"
"""Logits of the labels after every suffix, float32 [n, labels], and log sum exp of all logits, [n]."""
_MAX_PADDING = 512
"""Most tokens of padding in a pass: beyond them, another pass costs less."""
_PROBE_SUFFIXES = (
    "BLOCK=64 num_warps=4\nBin:",
    "BLOCK=1024 num_warps=8 num_stages=3 | waves=2.5\nBin:",
    "num_warps=1\nBin:",
)


class Prefill:
    """Reading by the model's own forward; the caller is in `torch.inference_mode`.

    Without `keeps_prefix` every prompt is read in full: slow, and right for whatever transformers can run.
    """

    def __init__(self, model: PreTrainedModel, *, keeps_prefix: bool = True) -> None:
        self.model, self.keeps_prefix = model, keeps_prefix
        # The name until transformers 5.39, and the one after.
        self._cache = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        vocabulary, hidden = model.get_input_embeddings().weight.shape
        # Read off the weights: configs name widths otherwise in every family, and some give one per layer.
        shapes = [p.shape for p in model.parameters() if p.dim() > 1 and vocabulary not in p.shape]
        inner = max((max(shape[-2:]) for shape in shapes), default=4 * hidden)
        size = model.dtype.itemsize
        # Bytes: of a token's activations, of what is kept of it, of a row's logits, of a pair that attends.
        self._token: int = size * (16 * hidden + 4 * inner)
        self._cache_bytes = 0.0
        self._logits: int = 10 * vocabulary
        # Attention in plain torch writes every head's weights down, in float32 and in the model's type.
        heads = getattr(model.config.get_text_config(), "num_attention_heads", None) or 1
        eager = getattr(model.config, "_attn_implementation", "") == "eager"
        self._pair: int = 8 * heads if eager else 4

    def extend(self, past: Prefix, ids: Ids) -> Prefix:
        """Read on: `past` and `ids` as one prefix. `past` stays as it is."""
        layers: Layers = ()
        if self.keeps_prefix:
            cache = getattr(self._forward(self._tensor(ids)[None], 1, past), self._cache)
            layers = tuple((layer.keys, layer.values) for layer in cache.layers)
            self._cache_bytes = sum(t.nbytes for pair in layers for t in pair) / layers[0][0].shape[-2]
        return Prefix(np.concatenate([past.ids, ids]), layers)

    def read(self, past: Prefix, suffixes: Sequence[Ids], labels: Tensor) -> Logits:
        """Logits after `past` and each of the suffixes, in one pass; `labels` [labels] are tokens."""
        if not self.keeps_prefix:
            suffixes = [np.concatenate([past.ids, ids]) for ids in suffixes]
        # Padded on the right, where causal attention does not see the padding.
        last = np.array([len(ids) - 1 for ids in suffixes])
        rows = np.zeros((len(suffixes), int(last.max()) + 1), np.int64)
        for row, ids in zip(rows, suffixes, strict=True):
            row[: len(ids)] = ids
        places, which = (self._tensor(numbers) for numbers in np.unique(last, return_inverse=True))

        def answers(values: Tensor) -> Tensor:
            is_subset = values.shape[1] == len(places)  # some families give every position all the same
            return values[self._tensor(np.arange(len(rows))), which if is_subset else places[which]]

        with _exact_answers(self.model.get_output_embeddings(), answers, labels) as exact:
            logits = self._forward(self._tensor(rows), places, past).logits
        logits = (logits[:, 0] if exact else answers(logits)).float()
        return logits[:, labels], logits.logsumexp(dim=-1)

    def pass_bytes(self, past: int, sizes: Sequence[int]) -> float:
        """Return about the bytes that reading suffixes of these sizes, longest first, takes beside the weights."""
        longest = sizes[0] if self.keeps_prefix else past + sizes[0]
        tokens = past + sizes[0]
        # The cache's own copy, the one it grows into, and the one repeated for grouped heads.
        cache = 3 * tokens * self._cache_bytes if self.keeps_prefix else 0
        return len(sizes) * (cache + self._pair * longest * tokens + longest * self._token + self._logits)

    def rows_that_fit(self, past: int, sizes: Sequence[int], limit_bytes: float) -> int:
        """Return the number of suffixes of these sizes, longest first, to read in one pass; at least one."""
        tokens = 0
        for rows, size in enumerate(sizes, start=1):
            tokens += size
            padding = rows * sizes[0] - tokens
            if rows > 1 and (padding > _MAX_PADDING or self.pass_bytes(past, sizes[:rows]) > limit_bytes):
                return rows - 1
        return len(sizes)

    def _tensor(self, numbers: npt.NDArray[np.int64]) -> Tensor:
        import torch

        return torch.as_tensor(numbers, device=self.model.device)

    def _forward(self, ids: Tensor, keep: Tensor | int, past: Prefix) -> Any:
        from transformers import DynamicCache

        cache = None
        if self.keeps_prefix:
            # Without the model's config: a layer with a sliding window would drop what another prompt still needs.
            cache = DynamicCache()
            for number, (keys, values) in enumerate(past.layers):
                rows = len(ids)
                cache.update(keys.expand(rows, -1, -1, -1), values.expand(rows, -1, -1, -1), number)
        return self.model(
            input_ids=ids, **{self._cache: cache}, use_cache=self.keeps_prefix, logits_to_keep=keep
        )


@contextlib.contextmanager
def _exact_answers(head: Any, answers: Callable[[Tensor], Tensor], labels: Tensor) -> Iterator[bool]:
    """Let a model's head read the hidden states of `answers` alone, and give the labels' logits in float32.

    In bfloat16 logits have 8 bits, and labels tie. Yields whether it does; a head that is not a plain layer stays as
    it is.
    """
    import torch

    if type(head) is not torch.nn.Linear:
        yield False
        return

    def select_states(_: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (answers(inputs[0])[:, None], *inputs[1:])

    def exact_logits(_: Any, inputs: tuple[Any, ...], out: Tensor) -> Tensor:
        bias = None if head.bias is None else head.bias[labels].float()
        out = out.float()
        out[..., labels] = torch.nn.functional.linear(inputs[0].float(), head.weight[labels].float(), bias)
        return out

    hooks = [head.register_forward_pre_hook(select_states), head.register_forward_hook(exact_logits)]
    try:
        yield True
    finally:
        for hook in hooks:
            hook.remove()


def open_prefill(model: PreTrainedModel, tokens: ForecastTokenizer) -> Prefill:
    """Reading behind a kept prefix where that gives the answer of reading a short prompt in full, else in full.

    Call it in `torch.inference_mode`. Raises torch's own error where memory is missing.
    """
    quick, full = Prefill(model), Prefill(model, keeps_prefix=False)
    try:
        difference = _relative_error(quick, full, tokens)
    except Exception as error:  # a model may have any structure: what does not fit is not used
        if out_of_memory(error):
            raise
        return full
    return quick if difference <= TOLERANCE[str(model.dtype).removeprefix("torch.")] else full


def _relative_error(quick: Prefill, full: Prefill, tokens: ForecastTokenizer) -> float:
    """Return the distance of two ways' logits: RMS of the difference over RMS, both centred per suffix; NaN where
    either is not finite."""
    import torch

    vocabulary = full.model.config.get_text_config().vocab_size
    labels = torch.arange(64, device=full.model.device) * (vocabulary // 64)
    prefix, suffixes = tokens.prefix(PROBE_PREFIX), tokens.suffixes(_PROBE_SUFFIXES)
    a, b = (w.read(w.extend(EMPTY_PREFIX, prefix), suffixes, labels)[0] for w in (quick, full))
    a, b = (x - x.mean(dim=-1, keepdim=True) for x in (a, b))
    return float((a - b).square().mean().sqrt() / b.square().mean().sqrt())
