"""What follows an operation in its graph, and whether a kernel of its own would compute it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

torch = pytest.importorskip("torch")

from torch._inductor.ir import FixedLayout
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx

from forecast_autotune.features.devices import device_spec
from forecast_autotune.records import Device
from forecast_integrations.inductor.choices.graph_position import (
    GraphPosition,
    GraphProducts,
    graph_position,
    has_own_pass,
)
from tests.integrations.inductor.graphs import H200, graph

X, W = torch.randn(16, 32), torch.randn(32, 32)


def product_of(f: Callable[..., object], *more: torch.Tensor, which: int = 0) -> torch.fx.Node:
    traced = make_fx(f)(X, W, *more)
    traced.graph.eliminate_dead_code()
    return [n for n in traced.graph.nodes if n.target is torch.ops.aten.mm.default][which]


POOLED = torch.ops.aten.max_pool2d_with_indices.default


@pytest.mark.parametrize(
    "f",
    [
        # An activation before the next product, or at the end.
        lambda x, w: torch.relu(x @ w).reshape(2, 8, 32).reshape(16, 32) @ w,
        lambda x, w: (x @ w).clamp_min(0.0),
        # What is pooled or sent to others is computed before.
        lambda x, w: POOLED(torch.relu(x @ w).reshape(1, 1, 16, 32), [2, 2])[0],
        lambda x, w: torch.relu(x @ w).cumsum(0),
        # Behind a view.
        lambda x, w: torch.relu((x @ w).reshape(2, 8, 32)),
        lambda x, w: torch.split(x @ w, 16, 1)[0] * 2.0,
        lambda x, w: (x @ w).to(torch.float16),
    ],
)
def test_what_follows_has_a_pass_of_its_own(f: Callable[..., object]) -> None:
    assert has_own_pass(product_of(f))


@pytest.mark.parametrize(
    "f",
    [
        # Nothing, or only views.
        lambda x, w: x @ w,
        lambda x, w: (x @ w).reshape(2, 8, 32).transpose(1, 2),
        lambda x, w: (x @ w).t() @ x,
        # What goes into a reduction.
        lambda x, w: ((x @ w) * 2.0).mean(-1),
        lambda x, w: torch.softmax((x @ w) * 2.0, -1),
        lambda x, w: torch.nn.functional.layer_norm((x @ w) * 2.0, (32,)),
        lambda x, w: ((x @ w) * 2.0).amax(-1),
        lambda x, w: (x @ w).reshape(2, 8, 32).sum(1),
    ],
)
def test_what_follows_has_none(f: Callable[..., object]) -> None:
    assert not has_own_pass(product_of(f))


def position_of(node: torch.fx.Node, *size: int, device: Device = H200) -> GraphPosition:
    with graph():
        V.graph.current_node = node
        return graph_position(FixedLayout(torch.device("cpu"), torch.bfloat16, list(size)), device)


def test_an_operand_that_is_made_of_fewer_bytes_may_be_made_in_the_kernel() -> None:
    def weights_in_whole_numbers(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return x @ v.to(torch.float32).t()

    node = product_of(weights_in_whole_numbers, torch.ones(64, 32, dtype=torch.int8))
    assert position_of(node, 16, 64).fusion_ms == pytest.approx(2 * 4 * 64 * 32 / 4.8e9, rel=0.05)
    assert position_of(product_of(lambda x, w: (2.0 * x) @ w), 16, 32).fusion_ms == 0.0, "of as many bytes"


def test_many_small_ones_are_not_small() -> None:
    products = GraphProducts({(number,): (1, 0.009) for number in range(100)} | {("large",): (1, 0.1)})
    found = [GraphPosition(0.0, (number,), products).is_small(0.009) for number in range(100)]
    assert found == [True] * 5 + [False] * 95
    assert GraphPosition(0.0, (0,), products).is_small(0.009), "it has been counted"


def test_a_convolutions_bias_and_its_transposition() -> None:
    def convolve(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, transposed: bool) -> torch.Tensor:
        size = (8, 3, 3) if transposed else (8, 8, 3, 3)
        weights = torch.ones(8, *size) if transposed else torch.ones(*size)
        picture = torch.ones(1, 8, 32, 32)
        return torch.ops.aten.convolution(picture, weights, b, [2, 2], [1, 1], [1, 1], transposed, [0, 0], 1)

    def node_of(*bias: torch.Tensor | None, transposed: bool = False) -> torch.fx.Node:
        traced = make_fx(partial(convolve, transposed=transposed))(X, W, *bias)
        return next(n for n in traced.graph.nodes if n.target is torch.ops.aten.convolution.default)

    assert has_own_pass(node_of(torch.ones(8)))
    assert not has_own_pass(node_of(None))
    spec = device_spec(replace(H200, name="NVIDIA H200"))
    products = position_of(node_of(None, transposed=True), 1, 8, 63, 63).products
    assert products.ms >= 2.0 * 8 * 32 * 32 * 8 * 9 / (spec.tensor_tflops * 1e9)
