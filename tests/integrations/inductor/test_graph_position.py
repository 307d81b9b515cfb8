"""What follows an operation in its graph, and whether a kernel of its own would compute it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from torch._inductor.ir import FixedLayout
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx

from forecast_integrations.inductor.choices.graph_position import graph_position, has_own_pass
from tests.integrations.inductor.graphs import H200, graph

X, W = torch.randn(16, 32), torch.randn(32, 32)


def product_of(f: Callable[..., object], *more: torch.Tensor, which: int = 0) -> torch.fx.Node:
    traced = make_fx(f)(X, W, *more)
    traced.graph.eliminate_dead_code()
    return [n for n in traced.graph.nodes if n.target is torch.ops.aten.mm.default][which]


def test_an_activation_before_the_next_product_has_a_pass_of_its_own() -> None:
    assert has_own_pass(product_of(lambda x, w: torch.relu(x @ w).reshape(2, 8, 32).reshape(16, 32) @ w))
    assert has_own_pass(product_of(lambda x, w: (x @ w).clamp_min(0.0)))


def test_nothing_or_only_views_have_none() -> None:
    assert not has_own_pass(product_of(lambda x, w: x @ w))
    assert not has_own_pass(product_of(lambda x, w: (x @ w).reshape(2, 8, 32).transpose(1, 2)))
    assert not has_own_pass(product_of(lambda x, w: (x @ w).t() @ x))


@pytest.mark.parametrize(
    "reduce",
    [
        lambda y: y.mean(-1),
        lambda y: torch.softmax(y, -1),
        lambda y: torch.nn.functional.layer_norm(y, (32,)),
        lambda y: y.amax(-1),
    ],
)
def test_what_goes_into_a_reduction_has_none(reduce: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert not has_own_pass(product_of(lambda x, w: reduce((x @ w) * 2.0)))


def test_a_kernel_ends_where_something_later_is_needed() -> None:
    # The residual's sum comes before the second product, which it is added to; only then is it reduced.
    def blocks(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x @ w)
        return (y + y @ v).mean(-1)

    assert has_own_pass(product_of(blocks, W))
    assert not has_own_pass(product_of(blocks, W, which=1))


def test_a_pass_is_one_result_written_and_read() -> None:
    node = product_of(lambda x, w: torch.relu(x @ w))
    with graph():
        layout = FixedLayout(torch.device("cpu"), torch.bfloat16, [4096, 4096])
        nowhere = graph_position(layout, H200)
        assert (nowhere.epilogue_ms, nowhere.share(1e-3)) == (math.inf, 1.0), "nobody says where it stands"
        V.graph.current_node = node
        found = graph_position(layout, H200)
        assert found.epilogue_ms == pytest.approx(2 * 2 * 4096**2 / 4.8e9, rel=0.05)
        V.graph.current_node = product_of(lambda x, w: x @ w)
        assert graph_position(layout, H200).epilogue_ms == 0.0


def test_the_share_counts_operations_alike() -> None:
    def two_alike_and_a_large_one(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.addmm(v, (x @ w) @ w, w) @ torch.ones(32, 1024)

    node = product_of(two_alike_and_a_large_one, torch.randn(32))
    with graph():
        V.graph.current_node = node
        found = graph_position(FixedLayout(torch.device("cpu"), torch.float32, [16, 32]), H200)
    assert found.alike == 2
    bytes_moved = 2 * (2 * 16 * 32 + 32 * 32) + (2 * 16 * 32 + 32 * 32 + 32) + 16 * 32 + 32 * 1024 + 16 * 1024
    assert found.products_ms == pytest.approx(4 * bytes_moved / 4.8e9, rel=0.05)
    assert found.share(found.products_ms / 8) == pytest.approx(0.25)
    assert found.share(found.products_ms) == 1.0
