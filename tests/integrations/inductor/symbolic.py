"""A graph in the making whose products have a dynamic number of rows, as torch.compile makes it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._dynamo.source import ConstantSource
from torch._dynamo.variables.builder import TrackedFake
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
    StrictMinMaxConstraint,
)
from torch.utils._sympy.value_ranges import ValueRanges


def symbolic_size(met: int, low: int | None, high: int | None) -> tuple[ShapeEnv, Any]:
    """An environment with one dynamic size, and its symbol; `low..high` as `mark_dynamic` would declare it."""
    environment = ShapeEnv(tracked_fakes=[])
    declared = low is not None and high is not None
    constraint = StrictMinMaxConstraint(warn_only=False, vr=ValueRanges(low, high)) if declared else None
    context: Any = StatelessSymbolicContext([DimDynamic.DYNAMIC], constraint_sizes=[constraint])
    mode, source = FakeTensorMode(shape_env=environment), ConstantSource("rows")
    fake = mode.from_tensor(torch.zeros(met), source=source, symbolic_context=context)
    environment.tracked_fakes.append(TrackedFake(fake, source, context))
    return environment, fake.shape[0].node.expr


@contextlib.contextmanager
def symbolic_graph(met: int, low: int | None = None, high: int | None = None) -> Iterator[tuple[Any, Any]]:
    """The graph, and the symbol of its dynamic size."""
    environment, symbol = symbolic_size(met, low, high)
    lowering = GraphLowering(make_fx(lambda a: a + 1)(torch.zeros(2)), shape_env=environment)
    with V.set_graph_handler(lowering), V.set_debug_handler(DebugContext()):
        yield lowering, symbol
