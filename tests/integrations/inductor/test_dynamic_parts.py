"""Ranges, size hints and resized choices by themselves; Triton templates are rendered for a GPU that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import sympy
from torch._inductor import ir
from torch._inductor.kernel import mm
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.utils import fresh_cache

from forecast_autotune.errors import SettingsError
from forecast_autotune.settings import Settings
from forecast_integrations.inductor.hooks import selection
from forecast_integrations.inductor.hooks.context import HookContext
from forecast_integrations.inductor.size_range import (
    NoRangeError,
    NotResizableError,
    SizeRange,
    dynamic_sizes_text,
    replaced_hints,
    resized_choice,
    size_range,
)
from forecast_integrations.triton.null_device import null_device
from tests.inductor_rendering import H200, LIMITS, template_inputs
from tests.integrations.inductor.graphs import serving
from tests.integrations.inductor.symbolic import symbolic_graph

N, K = 2048, 1024
DEVICE = torch.device("cuda:0")
TILE = {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 32, "num_stages": 3, "num_warps": 4, "GROUP_M": 8}
MM = {**TILE, "EVEN_K": True, "ALLOW_TF32": False, "ACC_TYPE": "tl.float32", "USE_FAST_ACCUM": False}
TMA = {"A_ROW_MAJOR": True, "B_ROW_MAJOR": True, "NUM_SMS": 132, "TMA_SIZE": 128}
TMA |= {"TMA_EXPERIMENTAL_API": False, "workspace_arg": None}
rendering = pytest.mark.skipif(
    tuple(int(n) for n in torch.__version__.split(".")[:2]) < (2, 13),
    reason="rendering without a device is put together for torch 2.13",
)


def operands(graph: Any, rows: Any) -> tuple[list[Any], Any]:
    """The operands of a product of `rows` rows, and its layout."""
    nodes = template_inputs(graph, [((rows, K), (K, 1)), ((K, N), (N, 1))])
    return nodes, ir.FixedLayout(DEVICE, torch.float16, [rows, N], [N, 1])


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU to render for."""
    properties = DeviceProperties(type="cuda", index=0, **H200, **LIMITS)
    monkeypatch.setattr(DeviceProperties, "create", staticmethod(lambda device: properties))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    with null_device(), fresh_cache():
        yield


@rendering
@pytest.mark.parametrize(("template", "given", "programs"), [("mm", MM, 256), ("tma", {**MM, **TMA}, 132)])
def test_a_template_is_launched_for_another_size_with_the_same_code(
    device: None, template: str, given: dict[str, Any], programs: int
) -> None:
    chosen = {"mm": mm.mm_template, "tma": mm.persistent_tma_mm_template}[template]
    with symbolic_graph(64, 1, 4096) as (graph, rows):
        nodes, layout = operands(graph, rows)
        patches = selection.install(HookContext(serving()))
        try:
            choice = chosen.generate(nodes, layout, **given)
        finally:
            patches.restore()
        with replaced_hints({rows: 1024}):
            other = resized_choice(choice)
    assert choice.bmreq.extra_args == [64, 16, 1, 1]
    assert other.bmreq.extra_args == [1024, programs, 1, 1]
    assert [meta.sizes for meta in other.bmreq.input_tensor_meta] == [(1024, K), (K, N)]
    assert other.bmreq.output_tensor_meta.sizes == (1024, N)
    assert other.bmreq.module_cache_key == choice.bmreq.module_cache_key
    assert other.bmreq.module_path == choice.bmreq.module_path


@rendering
def test_a_choice_that_would_have_other_code_is_refused(device: None) -> None:
    with symbolic_graph(64, 1, 4096) as (graph, rows):
        nodes, layout = operands(graph, rows)
        choice = mm.mm_template.generate(nodes, layout, **MM)
        with replaced_hints({rows: 1024}), pytest.raises(NotResizableError, match="class TritonTemplate"):
            resized_choice(choice)
        wider = {**MM, "BLOCK_M": 128}
        choice.forecast_autotune_regenerate = lambda: mm.mm_template.generate(nodes, layout, **wider)
        with replaced_hints({rows: 1024}), pytest.raises(NotResizableError, match="other code"):
            resized_choice(choice)


@pytest.mark.parametrize(
    ("met", "low", "high", "measured"),
    [
        (64, 1, 4096, (2, 64, 256, 4096)),
        (1024, 8, 4096, (8, 64, 1024, 4096)),
        (3, 2, 4, (2, 3, 4)),
    ],
)
def test_the_ends_and_the_met_size_are_measured(met: int, low: int, high: int, measured: Any) -> None:
    with symbolic_graph(met, low, high) as (graph, rows):
        found = size_range(*operands(graph, rows), "declared")
        assert found == SizeRange(rows, max(2, low), high, met, measured)
        assert found.robust().measured == measured


def test_sizes_that_the_programs_guards_rule_out_are_not_measured() -> None:
    """Such a size is compiled for by itself, once it is met."""
    with symbolic_graph(100, 2, 4096) as (graph, rows):
        environment = graph.sizevars.shape_env
        assert environment.evaluate_expr(sympy.Ne(rows % 256, 0))
        assert environment.evaluate_expr(rows <= 4000)
        found = size_range(*operands(graph, rows), "declared")
        assert found.measured == (2, 32, 100, 255, 4000)
        assert environment.evaluate_expr(sympy.Ne(rows % 4, 2))
        found = size_range(*operands(graph, rows), "declared")
        assert found.measured == (3, 32, 100, 255, 4000)


def test_two_sizes_with_ranges_are_one_too_many() -> None:
    with symbolic_graph(64, 2, 4096) as (graph, rows):
        nodes, _ = operands(graph, rows)
        environment = graph.sizevars.shape_env
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        other = environment.create_symbol(32, ConstantSource("columns"), DimDynamic.DYNAMIC)
        layout = ir.FixedLayout(DEVICE, torch.float16, [rows, other], [other, 1])
        found = size_range(nodes, layout, "declared")
        assert found.symbol == rows
        with pytest.raises(NoRangeError, match="2 of its sizes have ranges"):
            size_range(nodes, layout, "2..64")


def test_the_option_names_a_range_or_a_word() -> None:
    assert dynamic_sizes_text((1, 8192)) == "1..8192"
    assert dynamic_sizes_text("hint") == "hint"
    assert dynamic_sizes_text(None) is None
    for wrong in ((1, 2, 3), ("1", 2), 5, (0, 8)):
        with pytest.raises(SettingsError, match="dynamic_sizes is declared, hint or"):
            dynamic_sizes_text(wrong)  # type: ignore[arg-type]
    for text in ("8192..1", "0..5", "4..4", "all", "1..", "..5"):
        with pytest.raises(SettingsError, match="must be declared, hint or a range"):
            Settings.from_environment({"FORECAST_AUTOTUNE_INDUCTOR_DYNAMIC": text})
    assert Settings.from_environment({}).inductor_dynamic == "declared"
