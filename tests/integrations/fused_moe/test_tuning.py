"""The MoE kernel of the servers: which rows are whose, and a layer tuned on a null device and written for a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from forecast_autotune.features.devices import datasheet_device
from forecast_autotune.store import Store
from forecast_autotune.store.exports import write_export
from forecast_integrations.fused_moe.layer import (
    MoeLayer,
    assignment,
    chosen_experts,
    drawn_weights,
    products,
)
from forecast_integrations.fused_moe.tuning import MoeCall, TunedMoe, moe_configs, tune_moe, usual_config
from forecast_integrations.triton.null_device import null_device
from tests.integrations.moe_kernel import fused_moe_kernel
from tests.integrations.null import double

LAYER = MoeLayer(experts=8, width=32, hidden=64, top_k=2)
CONFIGS = [
    triton.Config(
        {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 1}, num_warps=warps
    )
    for m in (16, 32)
    for n in (16, 32)
    for warps in (4, 8)
]


@pytest.fixture(autouse=True)
def _clean(clean_environment: None) -> None:
    """No variable of the developer's decides a test."""


def tuned(store: Store, tokens: list[int], shortlist: int, *more: triton.Config) -> dict[int, TunedMoe]:
    """The layer at these numbers of tokens, on a null H200."""
    with null_device(device=datasheet_device("h200")):
        return tune_moe(
            fused_moe_kernel,
            LAYER,
            tokens,
            configs=[*CONFIGS, *more],
            store=store,
            shortlist=shortlist,
            device="cpu",
        )


@pytest.mark.parametrize("block", [1, 16, 64])
@pytest.mark.parametrize("tokens", [1, 7, 200])
def test_every_pair_is_once_in_a_block_of_its_expert(tokens: int, block: int) -> None:
    chosen = chosen_experts(LAYER, tokens, "cpu", seed=1)
    assert all(len(set(row)) == LAYER.top_k for row in chosen.tolist()), "a token's experts differ"
    found = assignment(chosen, LAYER.experts, block)
    assert found.sorted_tokens is not None
    used = int(found.padded)
    assert used % block == 0
    assert used <= found.sorted_tokens.numel()
    pairs = found.sorted_tokens[:used].reshape(-1, block).tolist()
    of_pair = {
        pair: int(found.experts[n]) for n, row in enumerate(pairs) for pair in row if pair < 2 * tokens
    }
    assert of_pair == dict(enumerate(chosen.reshape(-1).tolist()))
    assert sum(pair < 2 * tokens for row in pairs for pair in row) == 2 * tokens
    assert set(found.sorted_tokens[used:].tolist()) <= {2 * tokens}
    assert found.rows >= used, "or programs would be missing"


def test_few_pairs_have_a_block_each() -> None:
    chosen = chosen_experts(LAYER, 1, "cpu", seed=1)
    found = assignment(chosen, LAYER.experts, 16, unsorted=True)
    assert found.sorted_tokens is None
    assert found.experts.tolist() == chosen.reshape(-1).tolist()
    assert int(found.padded) == found.rows == 2 * 16


def test_a_layer_is_tuned_and_its_file_says_what_was_chosen(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    found = tuned(store, [3, 40], 3)
    assert found.keys() == {3, 40}
    (path,) = write_export("vllm-moe", tmp_path, [*store.tables()], [*store.decisions()]).files
    assert path.name == "E=8,N=32,device_name=NVIDIA_H200.json"
    written = json.loads(path.read_text())
    for tokens, one in found.items():
        assert one.candidates == len(CONFIGS)
        assert one.config in CONFIGS
        launch = {"num_warps": one.config.num_warps, "num_stages": one.config.num_stages}
        assert written[str(tokens)] == {**one.config.kwargs, **launch}


def test_both_products_have_a_say(tmp_path: Path) -> None:
    """The config is the best of both together, of those that were measured for both."""
    store = Store(tmp_path / "store")
    (found,) = tuned(store, [40], 8).values()
    tables = list(store.tables())
    assert len(tables) == 2
    times = [
        {str(m.candidate.config): m.ms for m in table.measurements if m.ok and m.ms is not None}
        for table in tables
    ]
    sums = [a + times[1][name] for name, a in times[0].items() if name in times[1]]
    assert found.ms == pytest.approx(min(sums), rel=1e-6)


@pytest.mark.slow
def test_what_the_server_takes_by_itself_is_measured_for_both_products(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    usual = usual_config(LAYER, 40)
    tuned(store, [40], 1, usual)
    launch = {"num_warps": usual.num_warps, "num_stages": usual.num_stages}
    for table in store.tables():
        told = [m.candidate.config.parameters() for m in table.measurements if m.ok]
        assert any({**usual.kwargs, **launch}.items() <= {**one}.items() for one in told)


def test_the_list_is_the_one_of_the_servers_own_tuner() -> None:
    listed = moe_configs()
    assert len(listed) == len({str(config) for config in listed}) == 1920
    for layer in (LAYER, MoeLayer(128, 768, 2048, 8)):
        assert all(usual_config(layer, tokens) in listed for tokens in (1, 33, 65, 129, 513, 4096, 100_000))


@pytest.mark.parametrize(
    ("sizes", "said"), [((8, 32, 64, 9), "no more experts"), ((0, 32, 64, 1), "1 or more")]
)
def test_sizes_that_no_layer_has_are_refused(sizes: tuple[int, int, int, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        MoeLayer(*sizes)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokens": [0]}, "1 token or more, not 0"),
        ({"configs": [triton.Config({"BLOCK_SIZE_M": 16})]}, "must have BLOCK_SIZE_M, .*GROUP_SIZE_M"),
        ({"kernel": double}, "double asks for x, out, n"),
        ({"layer": MoeLayer(8, 32, 64, 2, torch.float32)}, "bfloat16 or float16"),
    ],
    ids=["tokens", "configs", "another kernel", "data type"],
)
def test_what_cannot_be_tuned_is_refused(change: dict[str, Any], said: str) -> None:
    given = {"kernel": fused_moe_kernel, "layer": LAYER, "tokens": [4], "configs": CONFIGS, **change}
    with pytest.raises(ValueError, match=said):
        tune_moe(**given, store=Store(None), device="cpu")


def test_the_grid_has_a_program_for_every_block(tmp_path: Path) -> None:
    first, _ = products(LAYER, 40, drawn_weights(LAYER, "cpu"))
    call = MoeCall(fused_moe_kernel, first, LAYER, 40, CONFIGS, "cpu")
    for config in CONFIGS:
        block, columns = config.kwargs["BLOCK_SIZE_M"], triton.cdiv(64, config.kwargs["BLOCK_SIZE_N"])
        assert call.grid(config.kwargs) == (triton.cdiv(call.assignments[block].rows, block) * columns,)
