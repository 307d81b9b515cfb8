"""A dynamic size is tuned at the size that was met: Inductor's own selection, hooked; kernels sleep for their times."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._dynamo.source import ConstantSource
from torch._inductor import config
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.select_algorithm import ExternKernelChoice, get_algorithm_selector_cache
from torch._inductor.utils import fresh_cache
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from forecast_autotune.store import Store
from forecast_integrations.inductor import choice_timing
from tests.integrations.inductor.graphs import (
    Template,
    lowered_product,
    number,
    product_inputs,
    selection_hooked,
    serving,
)

FEW, MANY, COUNT = 8, 256, 2


def run(a: Any, b: Any, *, out: Any, i: int = -1) -> None:
    """The first template is fastest for few rows, the second for many, the library (-1) never."""
    best = 0 if a.shape[0] <= FEW else 1
    time.sleep(0.004 if i == best else 0.04)


def library(a: Any, b: Any, *, out: Any) -> None:
    run(a, b, out=out)


TEMPLATE = Template(run, name="forecast_test_dynamic")
LIBRARY = ExternKernelChoice(library, name="forecast_test_dynamic_library")


def test_a_dynamic_size_is_tuned_at_each_size_that_was_met_and_nothing_is_guarded_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Kernels that sleep are not judged by what the processor does meanwhile.
    monkeypatch.setattr(choice_timing, "times_on_host", lambda *_: False)
    for met, chosen in ((FEW, 0), (MANY, 1), (FEW, 0)):
        environment, source = ShapeEnv(tracked_fakes=[]), ConstantSource("rows")
        mode, context = FakeTensorMode(shape_env=environment), StatelessSymbolicContext([DimDynamic.DYNAMIC])
        fake = mode.from_tensor(torch.zeros(met), source=source, symbolic_context=context)
        rows = fake.shape[0].node.expr
        graph = GraphLowering(make_fx(lambda a: a + 1)(torch.zeros(2)), shape_env=environment)
        ours = serving(lambda candidate: 0.0, tmp_path)
        options = {"max_autotune": True, "autotune_num_choices_displayed": 0}
        handlers = V.set_graph_handler(graph), V.set_debug_handler(DebugContext())
        with fresh_cache(), config.patch(options), handlers[0], handlers[1], selection_hooked(ours):
            before = list(environment.guards), dict(environment.var_to_range)
            lowered = lowered_product(product_inputs(rows, 16, 16, device="cpu"), LIBRARY, TEMPLATE, COUNT)
            _, taken = get_algorithm_selector_cache()("mm", *lowered)
            assert (list(environment.guards), dict(environment.var_to_range)) == before
        assert number(taken) == chosen
        assert ours.warn_once.messages == []
    assert sorted(t.problem.arguments[0].shape[0] for t in Store(tmp_path).tables()) == [FEW, MANY]
