"""Closed-form facts against the code that torch itself renders from its templates, fact by fact.

There is no GPU here: the null device stands in for Triton's driver, and the two questions that rendering
asks of a real one (its properties, its generation) are answered for an H200.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
if tuple(int(n) for n in torch.__version__.split(".")[:2]) < (2, 13):
    pytest.skip("rendering without a device is put together for torch 2.13", allow_module_level=True)

from torch._inductor import config, ir
from torch._inductor.codecache import PyCodeCache
from torch._inductor.kernel.bmm import bmm_template
from torch._inductor.kernel.conv import conv2d_template
from torch._inductor.kernel.mm import mm_template, persistent_tma_mm_template
from torch._inductor.kernel.mm_common import addmm_epilogue
from torch._inductor.kernel.mm_plus_mm import mm_plus_mm_template
from torch._inductor.select_algorithm import AlgorithmSelectorCache, TritonTemplate
from torch._inductor.utils import fresh_cache

from forecast_autotune.features.trace import trace
from forecast_autotune.features.ttir.coalescing import coalesced_access_counts
from forecast_autotune.features.ttir.extraction import extract_facts
from forecast_autotune.records import Argument, Device, Kernel, Problem
from forecast_autotune.store import Store
from forecast_integrations.inductor.choices import records
from forecast_integrations.inductor.choices.geometry import operation_geometry
from forecast_integrations.inductor.choices.pool import late_choice
from forecast_integrations.inductor.choices.records import candidate_of
from forecast_integrations.inductor.choices.templates import closed_form
from forecast_integrations.inductor.hooks import selection
from forecast_integrations.inductor.hooks.context import HookContext
from tests.inductor_rendering import compile_nothing, graph_to_render, inductor_output, template_inputs
from tests.integrations.inductor import graphs
from tests.integrations.null import by_launch_options

M, N, K = 4096, 2048, 1024
DEVICE = torch.device("cuda:0")
TILES = [(64, 128, 32), (128, 64, 64), (128, 128, 128), (256, 16, 256)]
TILE = {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 32, "num_stages": 3, "num_warps": 4}
GEMM = {**TILE, "GROUP_M": 8, "EVEN_K": True, "ALLOW_TF32": False, "ACC_TYPE": "tl.float32"}
TMA = {"A_ROW_MAJOR": True, "B_ROW_MAJOR": True, "NUM_SMS": 132, "TMA_SIZE": 128}
TMA |= {"TMA_EXPERIMENTAL_API": False, "workspace_arg": None, "USE_FAST_ACCUM": False}
WINDOW = {"KERNEL_H": 3, "KERNEL_W": 3, "STRIDE_H": 1, "STRIDE_W": 1, "PADDING_H": 1, "PADDING_W": 1}
CONV = {**TILE, **WINDOW, "GROUPS": 1, "UNROLL": False, "ALLOW_TF32": True}
A, B, C = (M, K), (K, N), (M, N)

Sizes = tuple[tuple[int, ...], tuple[int, ...]]


def tiled(tile: tuple[int, int, int]) -> dict[str, int]:
    return dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), tile, strict=True))


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A graph in which templates can be rendered."""
    with graph_to_render(monkeypatch, by_launch_options) as lowering:
        yield lowering


def rendered(
    graph: Any, template: Any, operands: list[Sizes], dtype: Any, out: Sizes, given: dict[str, Any], last: Any
) -> Any:
    """The choice that a template gives for these operands (size, stride); `last`: the dtype of the last one."""
    nodes = template_inputs(graph, operands, dtype)
    nodes[-1].data.layout.dtype = last
    layout = ir.FixedLayout(DEVICE, dtype, list(out[0]), list(out[1]))
    choice = template.generate(nodes, layout, **given)
    assert hasattr(choice, "bmreq"), f"the template gave no choice: {choice}"
    return choice


def traced(choice: Any, operands: list[Sizes], dtype: Any, out: Sizes, last: Any) -> str:
    """The TTIR of a choice's code. Another last operand is cast, as in a kernel that it was fused into."""
    key, path = choice.bmreq.module_cache_key, Path(choice.bmreq.module_path)
    if last != dtype:
        text = path.read_text().replace("tl.dot(a, b,", "tl.dot(a, b.to(a.dtype),")
        key, path = f"{key}_cast", path.with_name(f"cast_{path.name}")
        path.write_text(text)
    module = PyCodeCache.load_by_key_path(key, str(path))
    fn = getattr(module, choice.bmreq.kernel_name).fn
    dtypes = [*[dtype] * (len(operands) - 1), last, dtype]
    tensors = [
        torch.empty_strided(size, stride, dtype=each, device="meta")
        for each, (size, stride) in zip(dtypes, [*operands, out], strict=True)
    ]
    assert len(fn.arg_names) == len(tensors)
    return trace(fn, tensors, {}, {})


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(
    ("name", "template", "operands", "out", "given"),
    [
        ("mm", mm_template, [(A, (K, 1)), (B, (1, K))], C, {**GEMM, "USE_FAST_ACCUM": True}),
        (
            "mm",
            mm_template,
            [((M, 1000), (1000, 1)), ((1000, N), (1, 1000))],
            C,
            {**GEMM, "EVEN_K": False, "USE_FAST_ACCUM": False, "BLOCK_M": 128, "BLOCK_K": 64},
        ),
        (
            "bmm",
            bmm_template,
            [((24, *A), (M * K, K, 1)), ((24, *B), (K * N, N, 1))],
            (24, *C),
            GEMM,
        ),
        ("mm_plus_mm", mm_plus_mm_template, [(A, (K, 1)), (B, (N, 1))] * 2, C, GEMM),
        ("mm", persistent_tma_mm_template, [(A, (K, 1)), (B, (N, 1))], C, {**GEMM, **TMA}),
    ],
)
def test_products(
    graph: Any, tile: tuple[int, int, int], name: str, template: Any, operands: Any, out: Any, given: Any
) -> None:
    result = (out, (M * N, N, 1)[-len(out) :])
    compare(graph, name, template, operands, result, given | tiled(tile), set())


@pytest.mark.parametrize("tile", [*TILES, (32, 256, 16), (16, 32, 128)])
@pytest.mark.parametrize(
    ("left", "right", "bias", "k", "dtype"),
    [
        (True, True, False, 1024, torch.float16),
        (True, False, False, 1024, torch.bfloat16),
        (False, True, False, 1024, torch.float16),
        (True, False, True, 1024, torch.bfloat16),
        (True, True, False, 1000, torch.float16),
        (True, False, True, 1000, torch.float16),
        (True, True, False, 512, torch.float32),
    ],
)
def test_dtypes_strides_and_a_bias(
    graph: Any, tile: tuple[int, int, int], left: bool, right: bool, bias: bool, k: int, dtype: Any
) -> None:
    """`left`, `right`: rows are contiguous."""
    operands = [((M, k), (k, 1) if left else (1, M)), ((k, N), (N, 1) if right else (1, k))]
    given = {**GEMM, "USE_FAST_ACCUM": False, "EVEN_K": k % tile[2] == 0} | tiled(tile)
    if bias:
        operands.insert(0, ((M, N), (0, 1)))
        given |= {"prefix_args": 1, "epilogue_fn": addmm_epilogue(dtype, 1, 1)}
    compare(graph, "addmm" if bias else "mm", mm_template, operands, (C, (N, 1)), given, set(), dtype)


@pytest.mark.parametrize("tile", TILES[:2])
def test_a_right_operand_of_8_bits_that_is_cast_on_its_way(graph: Any, tile: tuple[int, int, int]) -> None:
    operands, given = [(A, (K, 1)), (B, (N, 1))], {**GEMM, "USE_FAST_ACCUM": False} | tiled(tile)
    compare(graph, "mm", mm_template, operands, (C, (N, 1)), given, set(), last=torch.int8)


@pytest.mark.parametrize("tile", TILES)
def test_convolution(graph: Any, tile: tuple[int, int, int]) -> None:
    side, channels, filters = 56, 64, 128
    image = ((8, channels, side, side), (channels * side**2, 1, channels * side, channels))
    weight = ((filters, channels, 3, 3), (9 * channels, 1, 3 * channels, channels))
    out = ((8, filters, side, side), (filters * side**2, 1, filters * side, filters))
    # Runs over the edges of pixels are not in the closed form (the cost asks for 16 neighbours at most), nor
    # are lanes beyond the edge. The text does not tell along which axis a pixel's address runs.
    left_out = {"mean_contiguous", "inactive_bytes", "across_bytes"}
    compare(graph, "convolution", conv2d_template, [image, weight], out, CONV | tiled(tile), left_out)


@pytest.mark.parametrize(("copies", "ms"), [(1, 1.0), (2, 1.0), (2, 0.1)])
def test_a_convolutions_code_is_made_of_the_choices_that_are_planned(
    copies: int, ms: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An equal one's code is made of the best alone, unless no time counts, being of Inductor's clock."""
    made: list[Any] = []
    timed: list[Any] = []
    generate = TritonTemplate.generate

    def code(self: Any, **given: Any) -> Any:
        made.append(
            candidate_of(late_choice(self, {n: v for n, v in given.items() if n != "generate_with_caching"}))
        )
        return generate(self, **given)

    def times(cls: type, choices: Any, *_: Any, **__: Any) -> dict[Any, float]:
        timed.extend(map(candidate_of, choices))
        # The library's is slowest, and the one that is forecast to be best not the fastest.
        return {choice: ms * (2.0 - place / len(choices)) for place, choice in enumerate(choices)}

    compile_nothing(monkeypatch)
    monkeypatch.setattr(TritonTemplate, "generate", code)
    monkeypatch.setattr(AlgorithmSelectorCache, "benchmark_in_current_process", classmethod(times))
    monkeypatch.setattr(records, "cuda_device", lambda *_: graphs.H200)
    inputs = [((8, 64, 56, 56), torch.float16), ((128, 64, 3, 3), torch.float16)] * copies

    def convolutions(*tensors: Any) -> list[Any]:
        return [torch.conv2d(x, w) for x, w in zip(tensors[::2], tensors[1::2], strict=True)]

    def convolve() -> int:
        """Choices that were listed."""
        made.clear(), timed.clear()
        session = graphs.serving(lambda c: 0.0, tmp_path)
        hooks = selection.install(HookContext(session))
        options = {
            "max_autotune": True,
            "max_autotune_gemm_backends": "ATEN,TRITON",
            "layout_optimization": False,
        }
        try:
            with fresh_cache(), config.patch(autotune_num_choices_displayed=0, **options):
                inductor_output(convolutions, inputs, monkeypatch)
        finally:
            hooks.restore()
        assert session.warn_once.messages == []
        ((_, decision),) = Store(tmp_path).decisions()
        return decision.candidates

    listed = convolve()
    assert len(timed) < listed
    first = len(timed) - 1  # the library's has none
    equal = 0 if copies == 1 else 2 if ms == 1.0 else first
    assert 1 < first == len(set(made)) == len(made) - equal
    assert set(made) < set(timed), "a choice is one candidate before its code and with it"
    convolve()
    if ms == 1.0:
        assert (len(made), len(timed)) == (copies, 0), "one that is decided needs no other's"


def compare(
    graph: Any,
    name: str,
    template: Any,
    operands: list[Sizes],
    out: Sizes,
    given: dict[str, Any],
    left_out: set[str],
    dtype: Any = torch.float16,
    last: Any = None,
) -> None:
    last = last or dtype
    choice = rendered(graph, template, operands, dtype, out, given, last)
    candidate = candidate_of(choice)
    assert candidate.config.num_warps == 4
    assert dict(candidate.config.kwargs)["BLOCK_N"] == given["BLOCK_N"]
    named = [*((f"in{i}", sizes) for i, sizes in enumerate(operands)), ("out", out)]
    dtypes = {f"in{len(operands) - 1}": last}
    arguments = [
        Argument(n, "tensor", str(dtypes.get(n, dtype)), tuple(size), tuple(stride))
        for n, (size, stride) in named
    ]
    shape = operation_geometry(Problem.of(Kernel(name, "inductor"), arguments, Device("NVIDIA H200")))
    assert shape is not None
    found = closed_form(shape, candidate.variant, candidate.config.parameters(), 132)
    want = extract_facts(traced(choice, operands, dtype, out, last), (), found.grid)
    for field in dataclasses.fields(want):
        # Rules of allocation that closed forms leave out: they keep one tile, the one that leaves the loop.
        if field.name.startswith("epilogue_") or field.name in ("described", "precise"):
            continue
        if field.name not in {"ops", "dot_shapes", *coalesced_access_counts(0.0)} | left_out:
            mine, theirs = getattr(found.facts, field.name), getattr(want, field.name)
            assert mine == pytest.approx(theirs, rel=0.01), field.name
    assert found.facts.dot_shapes == want.dot_shapes
