"""The quick way to read: Llama-like models with about half the operations of their own code.

A small model's pass on a GPU is bound by the number of its operations, not by their size. Here the
projections of a layer are joined, a norm is one operation, and attention comes in two parts that no mask
is needed for: every suffix token attends to the whole prefix, and to its own suffix causally; the parts
are put together by their log-sum-exp (as in Hydragen, arXiv 2402.05099, and cascade inference). A tree
mask over prefix and all suffixes gives the same, at n times the work within the suffixes.

The weights stay those of the model, and its own code remains what `strategies.choose_strategy` compares with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from forecast_autotune.llm.tokenizer import Ids
from forecast_integrations.models.transformers.prefill import (
    Logits,
    PassShape,
    UnsupportedModel,
    has_full_attention,
    label_logits,
    pad_suffixes,
)
from forecast_integrations.models.transformers.prefix_cache import Prefix

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from transformers import PreTrainedModel

SUPPORTED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Values of `model_type` whose layers are the ones below."""
_SUPPORTED_ROPES = ("default", "linear", "llama3", "yarn")
"""Rotations that do not depend on the length of the prompt."""


@dataclass(frozen=True)
class _Linear:
    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        import torch

        return torch.nn.functional.linear(x, self.weight, self.bias)

    def add(self, x: Tensor, to: Tensor) -> None:
        """Add this of x to `to`, in its place: one operation where there is no bias."""
        if self.bias is None:
            to.flatten(0, -2).addmm_(x.flatten(0, -2), self.weight.t())
        else:
            to += self(x)


@dataclass(frozen=True)
class _Norm:
    weight: Tensor
    epsilon: float

    def __call__(self, x: Tensor) -> Tensor:
        import torch

        return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.epsilon)


@dataclass(frozen=True)
class _Layer:
    before: _Norm
    qkv: _Linear
    q_norm: _Norm | None
    k_norm: _Norm | None
    out: _Linear
    after: _Norm
    gate_up: _Linear
    act: Callable[[Tensor], Tensor]
    down: _Linear
    scale: float


class TreePrefill:
    """Suffixes after a shared prefix, without a mask. Raises `UnsupportedModel` for models it does not know."""

    name = "tree"

    def __init__(self, model: PreTrainedModel) -> None:
        import torch

        config = model.config.get_text_config()
        if config.model_type not in SUPPORTED_FAMILIES:
            raise UnsupportedModel(f"{config.model_type} is not one of {', '.join(SUPPORTED_FAMILIES)}")
        if not has_full_attention(model):
            raise UnsupportedModel("some layers see a window only")
        rope = (config.rope_parameters or {}).get("rope_type", "default")
        if rope not in _SUPPORTED_ROPES:
            raise UnsupportedModel(f"rotations of kind {rope!r} depend on the prompt's length")
        body = model.model
        with torch.no_grad():
            self._layers = [_layer(layer) for layer in body.layers]
        self._norm = _norm(body.norm)
        self._embedding, self._rotations = body.embed_tokens.weight, body.rotary_emb
        self._head = _linear(model.lm_head)
        self._q, self._kv = config.num_attention_heads, config.num_key_value_heads
        self._width = body.layers[0].self_attn.head_dim
        self._device = model.device
        # On a GPU a pass costs its launches first, on a CPU its tokens.
        self.max_padding = 2048.0 if self._device.type == "cuda" else 128.0
        inner = self._layers[0].down.weight.shape[1]
        per_token = 4 * config.hidden_size + 3 * inner + 4 * (self._q + self._kv) * self._width
        self._token: int = model.dtype.itemsize * per_token + 4 * config.hidden_size
        self._logits: int = 10 * config.vocab_size

    def extend(self, past: Prefix, ids: Ids) -> Prefix:
        """See `PrefillStrategy`."""
        import torch

        kept: list[tuple[Tensor, Tensor]] = []
        self._run(past, torch.as_tensor(ids, device=self._device)[None], kept)
        return Prefix(np.concatenate([past.ids, ids]), tuple(kept))

    def read(self, past: Prefix, suffixes: Sequence[Ids], labels: Tensor) -> Logits:
        """See `PrefillStrategy`. Logits of labels are computed in float32: in bfloat16 they would come in
        steps of a sixteenth, and candidates would tie."""
        import torch

        ids, last = (torch.as_tensor(x, device=self._device) for x in pad_suffixes(suffixes))
        hidden = self._run(past, ids)
        ends = hidden[torch.arange(len(ids), device=self._device), last]
        bias = None if self._head.bias is None else self._head.bias[labels].float()
        exact = torch.nn.functional.linear(ends.float(), self._head.weight[labels].float(), bias)
        return exact, label_logits(self._head(ends), labels)[1]

    def pass_bytes(self, past: int, shape: PassShape) -> float:
        """See `PrefillStrategy`."""
        return shape.rows * (shape.longest * self._token + self._logits)

    def _run(self, past: Prefix, ids: Tensor, kept: list[tuple[Tensor, Tensor]] | None = None) -> Tensor:
        """Hidden states [n, length, d] of tokens [n, length], each row after `past`; of a single row, keys
        and values of past and row together are added to `kept`."""
        import torch

        rows, length = ids.shape
        x = torch.nn.functional.embedding(ids, self._embedding)
        places = torch.arange(len(past), len(past) + length, device=self._device)
        cos, sin = (t[0, :, None] for t in self._rotations(x, places[None]))
        half = self._width // 2
        # x turned is x cos + (-second half, first half) sin: the sign goes to sin, and halves swap by a roll.
        sin = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
        q, kv = self._q, self._kv
        for number, layer in enumerate(self._layers):
            joined = layer.qkv(layer.before(x)).view(rows, length, q + 2 * kv, self._width)
            turned = joined[:, :, : q + kv]
            if layer.q_norm is not None and layer.k_norm is not None:
                turned = torch.cat([layer.q_norm(turned[:, :, :q]), layer.k_norm(turned[:, :, q:])], dim=2)
            turned = torch.addcmul(turned * cos, turned.roll(half, -1), sin)
            keys, values = turned[:, :, q:].transpose(1, 2), joined[:, :, q + kv :].transpose(1, 2)
            before = past.layers[number] if len(past) else None
            if kept is not None:
                kept.append(_concatenated(before, keys, values))
            seen = self._attend(turned[:, :, :q], keys, values, before, layer.scale)
            layer.out.add(seen, x)
            gate, up = layer.gate_up(layer.after(x)).chunk(2, dim=-1)
            layer.down.add(layer.act(gate) * up, x)
        return self._norm(x)

    def _attend(
        self, query: Tensor, keys: Tensor, values: Tensor, before: tuple[Tensor, Tensor] | None, scale: float
    ) -> Tensor:
        """Attention of queries [n, length, q, w] to their own row causally and to all that came before;
        [n, length, q * w]."""
        import torch

        rows, length, q, width = query.shape
        group = q // self._kv
        wide = (rows, self._kv, group, length, width)
        keys, values = (t[:, :, None].expand(wide).reshape(rows, q, length, width) for t in (keys, values))
        own, own_sum = attention(query.transpose(1, 2), keys, values, scale, causal=True)
        own = own.transpose(1, 2)
        if before is None:
            return own.reshape(rows, length, q * width)
        # No order among the queries: those of a group and of all rows are one long list per key head.
        tokens = rows * length
        listed = query.reshape(tokens, self._kv, group, width).transpose(0, 1)
        listed = listed.reshape(1, self._kv, tokens * group, width)
        far, far_sum = attention(listed, before[0], before[1], scale, causal=False)
        far = far.view(self._kv, rows, length, group, width).permute(1, 2, 0, 3, 4)
        far_sum = far_sum.view(self._kv, rows, length, group).permute(1, 2, 0, 3)
        own_sum = own_sum.transpose(1, 2).unflatten(2, (self._kv, group))
        share = torch.sigmoid(far_sum - own_sum)[..., None].to(own.dtype)
        return torch.lerp(own.unflatten(2, (self._kv, group)), far, share).reshape(rows, length, q * width)


def attention(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attention [n, heads, length, w] and the log-sum-exp of its scores, float32 [n, heads, length].

    The functions behind `scaled_dot_product_attention`, which keeps the second result to itself.
    """
    import torch

    known = torch.ops.aten
    if query.device.type == "cpu":
        found = known._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, 0.0, causal, scale=scale
        )
    elif query.dtype == torch.float32:
        found = known._scaled_dot_product_efficient_attention(
            query, keys, values, None, True, 0.0, causal, scale=scale
        )
    else:
        found = known._scaled_dot_product_flash_attention(
            query, keys, values, 0.0, causal, False, scale=scale
        )
    return found[0], found[1][..., : query.shape[2]]


def _concatenated(
    before: tuple[Tensor, Tensor] | None, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys and values of what came before and after, in tensors of their own: those of a pass are views
    that would keep its queries, too."""
    import torch

    if before is None:
        return keys.contiguous(), values.contiguous()
    return torch.cat([before[0], keys], dim=2), torch.cat([before[1], values], dim=2)


def _layer(layer: Module) -> _Layer:
    heads, mlp = layer.self_attn, layer.mlp
    q_norm, k_norm = (getattr(heads, name, None) for name in ("q_norm", "k_norm"))
    return _Layer(
        before=_norm(layer.input_layernorm),
        qkv=_fused_linear(heads.q_proj, heads.k_proj, heads.v_proj),
        q_norm=None if q_norm is None else _norm(q_norm),
        k_norm=None if k_norm is None else _norm(k_norm),
        out=_linear(heads.o_proj),
        after=_norm(layer.post_attention_layernorm),
        gate_up=_fused_linear(mlp.gate_proj, mlp.up_proj),
        act=mlp.act_fn,
        down=_linear(mlp.down_proj),
        scale=heads.scaling,
    )


def _norm(module: Module) -> _Norm:
    return _Norm(module.weight, module.variance_epsilon)


def _linear(module: Module) -> _Linear:
    import torch

    if type(module) is not torch.nn.Linear:
        raise UnsupportedModel(f"a projection is a {type(module).__name__}, no plain torch.nn.Linear")
    return _Linear(module.weight, module.bias)


def _fused_linear(*modules: Module) -> _Linear:
    """Several projections of the same input as one. The modules become views of it: no weight is there
    twice, and the model's own code still works."""
    import torch

    parts = [_linear(module) for module in modules]
    if len({part.bias is None for part in parts}) > 1:
        raise UnsupportedModel("some projections of a layer have a bias, others none")
    weight = torch.cat([part.weight for part in parts])
    bias = None if parts[0].bias is None else torch.cat([part.bias for part in parts])
    begin = 0
    for module in modules:
        end = begin + module.weight.shape[0]
        module.weight.data = weight[begin:end]
        if bias is not None:
            module.bias.data = bias[begin:end]
        begin = end
    return _Linear(weight, bias)
