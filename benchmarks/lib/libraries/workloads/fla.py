"""Operations of fla-core that tune themselves: sequence mixers, and what models put around them.

Unless a name says otherwise, mixers take 2 sequences of 4,096 tokens with 16 heads of 128 numbers, in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.lib.libraries.workloads.tensors import (
    DEVICE,
    log_decay,
    random_floats,
    random_tensor,
    run_backward,
    strengths,
    unit_vectors,
)

BATCH, TOKENS, HEADS, WIDTH = 2, 4096, 16, 128

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _queries_keys_values(heads: int = HEADS, width: int = WIDTH, tokens: int = TOKENS) -> Triple:
    shape = BATCH, tokens, heads, width
    return random_tensor(*shape), random_tensor(*shape), random_tensor(*shape)


# --- sequence mixers ---


def gated_linear_attention() -> None:
    """Linear attention whose state decays by a gate per key dimension."""
    from fla.ops.gla import chunk_gla

    gate = log_decay(BATCH, TOKENS, HEADS, WIDTH, dtype=torch.bfloat16)
    run_backward(chunk_gla(*_queries_keys_values(), gate))


def linear_attention() -> None:
    """Linear attention without a gate, in chunks."""
    from fla.ops.linear_attn import chunk_linear_attn

    run_backward(chunk_linear_attn(*_queries_keys_values()))


def simple_gated_attention() -> None:
    """Linear attention with one gate per head, in parallel over all tokens."""
    from fla.ops.simple_gla import parallel_simple_gla

    run_backward(parallel_simple_gla(*_queries_keys_values(), log_decay(BATCH, TOKENS, HEADS)))


def gated_delta_rule(tokens: int, heads: int) -> None:
    """The delta rule with one gate per head, forward: fla refuses the backward on Hopper below Triton 3.7.1."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    shape = BATCH, tokens, heads, WIDTH
    q, k, v = unit_vectors(*shape), unit_vectors(*shape), random_tensor(*shape)
    gate, beta = log_decay(BATCH, tokens, heads), strengths(BATCH, tokens, heads)
    chunk_gated_delta_rule(q, k, v, gate, beta)


def delta_rule() -> None:
    """The delta rule without a gate."""
    from fla.ops.delta_rule import chunk_delta_rule

    shape = BATCH, TOKENS, HEADS, WIDTH
    q, k, v = unit_vectors(*shape), unit_vectors(*shape), random_tensor(*shape)
    run_backward(chunk_delta_rule(q, k, v, strengths(BATCH, TOKENS, HEADS)))


def kimi_delta_attention() -> None:
    """The delta rule with a gate per key dimension."""
    from fla.ops.kda import chunk_kda

    shape = BATCH, TOKENS, HEADS, WIDTH
    q, k, v = unit_vectors(*shape), unit_vectors(*shape), random_tensor(*shape)
    run_backward(chunk_kda(q, k, v, log_decay(*shape), strengths(BATCH, TOKENS, HEADS)))


def comba() -> None:
    """A delta rule whose state is corrected by a vector of its own; forward, as for the gated delta rule."""
    from fla.ops.comba import chunk_comba

    shape = BATCH, TOKENS, HEADS, WIDTH
    q, k, v = unit_vectors(*shape), unit_vectors(*shape), random_tensor(*shape)
    gate, beta = log_decay(BATCH, TOKENS, HEADS), strengths(BATCH, TOKENS, HEADS)
    chunk_comba(q, k, v, unit_vectors(*shape), gate, beta)


def gated_recurrence(tokens: int, width: int, chunked: bool) -> None:
    """The elementwise gated recurrence of HGRN, of [2, tokens, width]."""
    from fla.ops.hgrn import chunk_hgrn, fused_recurrent_hgrn

    mix = chunk_hgrn if chunked else fused_recurrent_hgrn
    run_backward(
        mix(random_tensor(BATCH, tokens, width), log_decay(BATCH, tokens, width, dtype=torch.bfloat16))
    )


def stickbreaking_attention() -> None:
    """Stick-breaking attention, 2,048 tokens."""
    from fla.ops.stickbreaking_attn import parallel_stickbreaking_attn

    run_backward(parallel_stickbreaking_attn(*_queries_keys_values(tokens=2048)))


def decoding_attention() -> None:
    """One token of each of 32 sequences attends to 2,048 earlier ones."""
    from fla.ops.attn.decoding import attn_decoding_one_step

    sequences, earlier, groups = 32, 2048, 8
    k, v = (random_tensor(1, sequences * earlier, groups, WIDTH, grad=False) for _ in range(2))
    q = random_tensor(1, sequences, 32, WIDTH, grad=False)
    starts = torch.arange(0, (sequences + 1) * earlier, earlier, device=DEVICE, dtype=torch.long)
    attn_decoding_one_step(q, k, v, cu_seqlens=starts)


# --- around them ---


def short_convolution(tokens: int, width: int) -> None:
    """A causal convolution over 4 tokens, of [2, tokens, width]."""
    from fla.modules import ShortConvolution

    module = ShortConvolution(width, 4, activation="silu").to(DEVICE, torch.bfloat16)
    run_backward(module(random_tensor(BATCH, tokens, width)))


def gated_norm(rows: int, width: int) -> None:
    """RMS normalisation times a gate, of [rows, width]."""
    from fla.modules import FusedRMSNormGated

    module = FusedRMSNormGated(width).to(DEVICE, torch.bfloat16)
    run_backward(module(random_tensor(rows, width), random_tensor(rows, width)))


def rms_norm(rows: int, width: int) -> None:
    """RMS normalisation of [rows, width]."""
    from fla.modules import RMSNorm

    run_backward(RMSNorm(width).to(DEVICE, torch.bfloat16)(random_tensor(rows, width)))


def layer_norm(rows: int, width: int) -> None:
    """Layer normalisation of [rows, width]."""
    from fla.modules import LayerNorm

    run_backward(LayerNorm(width, bias=True).to(DEVICE, torch.bfloat16)(random_tensor(rows, width)))


def unit_norm(tokens: int, heads: int, width: int) -> None:
    """Division by the L2 norm."""
    from fla.modules.norm.l2norm import l2norm

    run_backward(l2norm(random_tensor(BATCH, tokens, heads, width)))


def rotary_embedding(tokens: int, heads: int) -> None:
    """Rotation of queries by their place."""
    from fla.modules.rotary.ops import rotary_embedding as rotate

    angles = [random_tensor(tokens, WIDTH // 2, grad=False) for _ in range(2)]
    run_backward(rotate(random_tensor(BATCH, tokens, heads, WIDTH), *angles))


def activation(name: str, rows: int, width: int, inputs: int) -> None:
    """An activation of [rows, width] by its name in `fla.modules.activations`."""
    from fla.modules import activations

    call: Callable[..., Any] = getattr(activations, name)
    run_backward(call(*[random_tensor(rows, width) for _ in range(inputs)]))


def token_shift(tokens: int) -> None:
    """The difference to the token before, of [2, tokens, 2048]."""
    from fla.modules.token_shift import token_shift as shift

    run_backward(shift(random_tensor(BATCH, tokens, 2048)))


def rwkv7_key_update() -> None:
    """The update of keys by their learning rates."""
    from fla.ops.rwkv7.fused_k_update import fused_k_rwkv7

    k, a = random_tensor(BATCH, TOKENS, 2048), strengths(BATCH, TOKENS, 2048)
    run_backward(fused_k_rwkv7(k, a, random_tensor(2048)))


def rwkv7_output_gate() -> None:
    """The correction and the gate behind RWKV-7's mixer."""
    from fla.ops.rwkv7.gate_output_correction import gate_output_correction

    r, k, v = _queries_keys_values(32, 64)
    o, gate = random_tensor(BATCH, TOKENS, 2048), random_tensor(BATCH, TOKENS, 2048)
    run_backward(gate_output_correction(o, r, k, random_tensor(32, 64), v, gate))


def delta_attention_gate() -> None:
    """The gate of Kimi delta attention from its logits."""
    from fla.ops.kda.gate import fused_kda_gate

    logits = random_tensor(BATCH, TOKENS, HEADS, WIDTH)
    run_backward(fused_kda_gate(logits, random_floats(HEADS), random_floats(HEADS * WIDTH)))


def cumulative_sums(tokens: int) -> None:
    """Sums over all tokens before, of one number and of a vector per head."""
    from fla.ops.utils.cumsum import chunk_global_cumsum

    chunk_global_cumsum(random_floats(BATCH, tokens, HEADS, grad=False))
    chunk_global_cumsum(random_floats(BATCH, tokens, HEADS, WIDTH, grad=False))


def mean_pooling() -> None:
    """Means over chunks of 64 tokens."""
    from fla.ops.utils.pooling import mean_pooling as pool

    run_backward(pool(random_tensor(BATCH, TOKENS, HEADS, WIDTH), 64))


def softmax(rows: int, width: int) -> None:
    """Softmax over rows, and its gradient."""
    from fla.ops.utils.softmax import softmax_bwd, softmax_fwd

    shares = softmax_fwd(random_tensor(rows, width, grad=False))
    softmax_bwd(shares, torch.randn_like(shares))


def policy_loss() -> None:
    """The GRPO loss over 32,000 words."""
    from fla.modules.grpo import fused_grpo_loss

    sequences, tokens, words = 4, 512, 32000
    logits = random_tensor(sequences, tokens + 1, words)
    reference = random_floats(sequences, tokens, grad=False)
    ids = torch.randint(0, words, (sequences, tokens), device=DEVICE)
    mask = torch.ones(sequences, tokens, device=DEVICE, dtype=torch.int32)
    advantages = random_floats(sequences, grad=False)
    loss = fused_grpo_loss(logits, reference, ids, advantages, 0.1, mask)
    (loss[0] if isinstance(loss, tuple) else loss).mean().backward()


WORKLOADS = {
    "unit_norm_4096x16x128": partial(unit_norm, 4096, 16, 128),
    "gated_linear_attention": gated_linear_attention,
    "swiglu_8192x11008": partial(activation, "swiglu", 8192, 11008, 2),
    "rms_norm_8192x4096": partial(rms_norm, 8192, 4096),
    "gated_delta_rule_4096": partial(gated_delta_rule, 4096, 16),
    "cumulative_sums_4096": partial(cumulative_sums, 4096),
    "linear_attention": linear_attention,
    "rotary_embedding_4096": partial(rotary_embedding, 4096, 16),
    "policy_loss": policy_loss,
    "short_convolution_4096": partial(short_convolution, 4096, 2048),
    "simple_gated_attention": simple_gated_attention,
    "gated_norm_8192x2048": partial(gated_norm, 8192, 2048),
    "gated_recurrence_chunked": partial(gated_recurrence, 4096, 2048, True),
    "kimi_delta_attention": kimi_delta_attention,
    "mean_pooling": mean_pooling,
    "token_shift_4096": partial(token_shift, 4096),
    "decoding_attention": decoding_attention,
    "layer_norm_8192x1024": partial(layer_norm, 8192, 1024),
    "delta_rule": delta_rule,
    "logsigmoid_8192x2048": partial(activation, "logsigmoid", 8192, 2048, 1),
    "softmax_8192x1024": partial(softmax, 8192, 1024),
    "gated_norm_65536x128": partial(gated_norm, 65536, 128),
    "rwkv7_key_update": rwkv7_key_update,
    "rms_norm_131072x128": partial(rms_norm, 131072, 128),
    "stickbreaking_attention": stickbreaking_attention,
    "rwkv7_output_gate": rwkv7_output_gate,
    "unit_norm_512x8x64": partial(unit_norm, 512, 8, 64),
    "delta_attention_gate": delta_attention_gate,
    "gated_recurrence_fused": partial(gated_recurrence, 1024, 1024, False),
    "comba": comba,
    "short_convolution_1024": partial(short_convolution, 1024, 1024),
    "swish_1024x1024": partial(activation, "swish", 1024, 1024, 1),
    "gated_delta_rule_1024": partial(gated_delta_rule, 1024, 4),
}
