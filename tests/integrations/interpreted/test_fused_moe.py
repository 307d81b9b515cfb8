"""A layer of experts in Triton's interpreter: every config computes both products of every token."""

from __future__ import annotations

import pytest
import torch
import triton

from forecast_integrations.fused_moe.layer import MoeLayer, drawn_weights, products
from forecast_integrations.fused_moe.tuning import MoeCall
from tests.integrations.moe_kernel import fused_moe_kernel

BLOCKS = ((16, 64, 1), (32, 32, 4), (64, 16, 16))
CONFIGS = [
    triton.Config({"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": k, "GROUP_SIZE_M": group})
    for m, k, group in BLOCKS
]


@pytest.mark.parametrize(("tokens", "experts"), [(1, 64), (5, 8), (70, 8)])
def test_every_config_computes_the_layer(tokens: int, experts: int) -> None:
    layer = MoeLayer(experts, 40, 56, 2, torch.float16)
    for product in products(layer, tokens, drawn_weights(layer, "cpu")):
        call = MoeCall(fused_moe_kernel, product, layer, tokens, CONFIGS, "cpu", seed=3)
        assert call.arguments["naive_block_assignment"] == (tokens == 1), (
            "where pairs are few for the experts"
        )
        wanted = call.arguments["topk_weights_ptr"].reshape(-1)
        exact = torch.stack(
            [
                product.weights[expert].float() @ product.rows[pair // product.top_k].float()
                for pair, expert in enumerate(call.chosen.reshape(-1).tolist())
            ]
        )
        exact = exact * wanted[:, None] if product.is_weighted else exact
        for config in CONFIGS:
            product.out.fill_(float("nan"))
            call.launch(config)
            torch.testing.assert_close(product.out.float(), exact, atol=5e-3, rtol=5e-3)
