"""Inductor's own objects, built without a compilation and without a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._inductor import config, ir
from torch._inductor.choices import InductorChoices
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.kernel import mm
from torch._inductor.kernel_inputs import MMKernelInputs
from torch._inductor.kernel_template_choice import KernelTemplateChoice
from torch._inductor.select_algorithm import ExternKernelChoice
from torch._inductor.template_heuristics.params import DictKernelTemplateParams
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx

from forecast_autotune.policy import Policy
from forecast_autotune.records import Candidate, Device
from forecast_autotune.settings import Settings
from forecast_autotune.store import Store
from forecast_autotune.surrogates.protocol import Forecasts, Query
from forecast_integrations.inductor.choices.records import candidate_of
from forecast_integrations.inductor.hooks import selection
from forecast_integrations.inductor.hooks.context import HookContext
from forecast_integrations.inductor.session import TuningSession

H200 = Device("NVIDIA H200", "cuda", "90", 132, 232448, 65536, 2048, 62914560, 150000000000)
LATER = "9999"
"""A view that sees everything."""


class FunctionSurrogate:
    """A surrogate that says what a function of the candidate says, in log2(milliseconds)."""

    name, version = "function", "1"

    def __init__(self, log2_ms: Callable[[Candidate], float]) -> None:
        self.log2_ms = log2_ms
        self.queries: list[Query] = []

    def forecast(self, query: Query) -> Forecasts:
        self.queries.append(query)
        mean = np.array([self.log2_ms(c) for c in query.candidates])
        return Forecasts(query.candidates, mean, np.full(len(mean), 0.01), np.zeros(len(mean)))


def serving(
    log2_ms: Callable[[Candidate], float] = lambda c: 0.0,
    store: Store | Path | None = None,
    *,
    policy: Policy | None = None,
    until: str = LATER,
    **settings: Any,
) -> TuningSession:
    kept = store if isinstance(store, Store) else Store(store)
    return TuningSession.of(Settings(**settings), FunctionSurrogate(log2_ms), kept, until, policy=policy)


@contextlib.contextmanager
def graph() -> Iterator[GraphLowering]:
    """An empty graph in the making: whoever asks Inductor for sizes needs one."""
    lowering = GraphLowering(make_fx(lambda a: a + 1)(torch.zeros(2)))
    with V.set_graph_handler(lowering), V.set_debug_handler(DebugContext()):
        yield lowering


def node(name: str, *size: int, device: str = "cuda:0", dtype: torch.dtype = torch.float16) -> ir.InputBuffer:
    return ir.InputBuffer(name=name, layout=ir.FixedLayout(torch.device(device), dtype, list(size)))


def product_inputs(m: int = 1024, n: int = 768, k: int = 512, device: str = "cuda:0") -> MMKernelInputs:
    return MMKernelInputs([node("a", m, k, device=device), node("b", k, n, device=device)])


def product_choices(inputs: MMKernelInputs, space: str = "DEFAULT") -> list[Any]:
    """What Inductor would consider on CUDA: the library's product and the templates, no code generated."""
    choices, templates = InductorChoices(), [mm.aten_mm, mm.mm_template]
    with config.patch(max_autotune=True, max_autotune_gemm_search_space=space):
        listed = {t.uid: choices.get_ktc(inputs, t, "mm") for t in templates}
        return choices._finalize_template_configs(listed, inputs, templates, "mm", {})


class Template(ExternKernelChoice):
    """Something tunable whose choices can be made on a CPU."""


def number_of(candidate: Candidate) -> int:
    """The parameter `i` of a candidate; -1 for the library's."""
    return int(dict(candidate.config.kwargs).get("i", -1))  # type: ignore[arg-type]


def number(choice: Any) -> int:
    """The same of a choice."""
    return number_of(candidate_of(choice))


def listed_choices(inputs: MMKernelInputs, library: Any, template: Any, count: int) -> dict[str, list[Any]]:
    """The library's choice, and `count` of the template, before code is generated."""
    layout = inputs.output_layout(flexible=False)

    def choice(template: Any, **parameters: int) -> KernelTemplateChoice:
        return KernelTemplateChoice(template, DictKernelTemplateParams(parameters), {}, layout, inputs)

    return {"library": [choice(library)], "template": [choice(template, i=i) for i in range(count)]}


def lowered_product(
    inputs: MMKernelInputs, library: Any, template: Any, count: int
) -> tuple[list[Any], Any, Any]:
    """Choices of a product as a lowering makes them, with their inputs and layout."""
    lists = {
        name: iter(choices) for name, choices in listed_choices(inputs, library, template, count).items()
    }
    kept = InductorChoices()._finalize_template_configs(lists, inputs, [library, template], "mm", {})
    return [c.choice for c in kept], inputs.nodes(), inputs.output_layout(flexible=False)


@contextlib.contextmanager
def selection_hooked(ours: TuningSession | None) -> Iterator[None]:
    patches = selection.install(HookContext(ours))
    try:
        yield
    finally:
        patches.restore()
