"""Choices of templates without code: what is told of them before it is generated, and who has it generated."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
if tuple(int(n) for n in torch.__version__.split(".")[:2]) < (2, 13):
    pytest.skip("rendering without a device is put together for torch 2.13", allow_module_level=True)

from torch._inductor import config, ir
from torch._inductor.kernel.conv import conv2d_template
from torch._inductor.kernel.mm import mm_template
from torch._inductor.select_algorithm import (
    AlgorithmSelectorCache,
    TritonTemplate,
    TritonTemplateCaller,
    get_algorithm_selector_cache,
)
from torch._inductor.utils import fresh_cache

from forecast_autotune.settings import Mode
from forecast_integrations.inductor.choices import pool, records
from forecast_integrations.inductor.choices.pool import ChoicePool, DeferredChoice, with_code
from forecast_integrations.inductor.choices.records import candidate_of, template_choice
from forecast_integrations.inductor.hooks import generation, selection
from forecast_integrations.inductor.hooks.context import HookContext
from forecast_integrations.inductor.pruning import SelectionCall
from tests.inductor_rendering import compile_nothing, graph_to_render, inductor_output, template_inputs
from tests.integrations.inductor.graphs import H200, serving
from tests.integrations.null import by_launch_options

DEVICE = torch.device("cuda:0")
TILE = {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 32, "num_stages": 3}
WINDOW = {"KERNEL_H": 3, "KERNEL_W": 3, "STRIDE_H": 1, "STRIDE_W": 1, "PADDING_H": 1, "PADDING_W": 1}
CONVOLUTION = {**TILE, **WINDOW, "GROUPS": 1, "UNROLL": False, "ALLOW_TF32": True}
PRODUCT = {**TILE, "GROUP_M": 8, "EVEN_K": True, "USE_FAST_ACCUM": False, "ACC_TYPE": "tl.float32"}
PRODUCT |= {"ALLOW_TF32": False}
WARPS = (1, 2, 4, 8, 16)
Install = Callable[..., HookContext]
Lister = Callable[..., list[Any]]


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(records, "cuda_device", lambda *_: H200)
    with graph_to_render(monkeypatch, by_launch_options) as lowering:
        yield lowering


@pytest.fixture
def hooked(tmp_path: Path) -> Iterator[Install]:
    """Put the hooks of templates and of selection in place, or only some, and take them back."""
    patches = []

    def install(*which: Any, **settings: Any) -> HookContext:
        context = HookContext(serving(store=tmp_path, **settings))
        patches.extend(module.install(context) for module in which or (generation, selection))
        return context

    yield install
    for one in reversed(patches):
        one.restore()


@pytest.fixture
def code_of(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The warps of every choice whose code is generated."""
    found: list[Any] = []
    original = TritonTemplate.generate_and_load

    def noted(self: Any, input_nodes: Any, num_stages: int, num_warps: int, *more: Any, **other: Any) -> Any:
        found.append(num_warps)
        return original(self, input_nodes, num_stages, num_warps, *more, **other)

    monkeypatch.setattr(TritonTemplate, "generate_and_load", noted)
    return found


def nodes(graph: Any, *sizes: tuple[int, ...]) -> list[Any]:
    return template_inputs(graph, [(size, torch.empty(size, device="meta").stride()) for size in sizes])


@pytest.fixture
def convolutions(graph: Any) -> Lister:
    """Inductor's list of templates of one convolution, one for each number of warps."""
    inputs = nodes(graph, (8, 64, 56, 56), (64, 64, 3, 3))
    layout = ir.FixedLayout(DEVICE, torch.float16, [8, 64, 56, 56], [200704, 3136, 56, 1])

    def listed(warps: tuple[int, ...] = WARPS, **more: Any) -> list[Any]:
        choices: list[Any] = []
        for number in warps:
            given = {**CONVOLUTION, **more, "num_warps": number}
            assert (
                conv2d_template.maybe_append_choice(choices, input_nodes=inputs, layout=layout, **given)
                is None
            )
        return choices

    return listed


@pytest.fixture
def products(graph: Any) -> Lister:
    """The same of one matrix product."""
    inputs = nodes(graph, (512, 256), (256, 1024))
    layout = ir.FixedLayout(DEVICE, torch.float16, [512, 1024], [1024, 1])

    def listed(warps: tuple[int, ...] = WARPS) -> list[Any]:
        choices: list[Any] = []
        for number in warps:
            mm_template.maybe_append_choice(
                choices, input_nodes=inputs, layout=layout, **PRODUCT, num_warps=number
            )
        return choices

    return listed


@pytest.mark.parametrize("kind", ["convolutions", "products"])
def test_what_is_said_before_is_so_afterwards(
    kind: str, request: pytest.FixtureRequest, hooked: Install, code_of: list[Any]
) -> None:
    hooked()
    first, *others = request.getfixturevalue(kind)()
    assert type(first) is TritonTemplateCaller, "the first of a template is looked at"
    assert {type(choice) for choice in others} == {DeferredChoice}
    assert code_of == [WARPS[0]]
    said = [(candidate_of(c), c.description, list(c.input_nodes), c.layout) for c in others]
    assert template_choice(others[0]) is None
    assert code_of == [WARPS[0]], "none of it took code"
    made = with_code([first, *others])
    assert code_of == list(WARPS)
    assert {type(choice) for choice in made} == {TritonTemplateCaller}
    assert [(candidate_of(c), c.description, list(c.input_nodes), c.layout) for c in made[1:]] == said
    assert with_code(others) == made[1:], "code is generated once"


def test_who_asks_for_more_has_the_code_generated(
    convolutions: Lister, hooked: Install, code_of: list[Any]
) -> None:
    hooked()
    _, one, other = convolutions((1, 2, 4))
    one.annotations["mark"] = 1
    one._benchmark_with_cudagraphs = True
    assert not hasattr(one, "template"), "which a template's choice does not have"
    assert code_of == [1]
    assert one.bmreq.num_warps == 2
    assert one.hash_key() == one.made().hash_key()
    assert code_of == [1, 2]
    assert one.made()._benchmark_with_cudagraphs
    assert one.made().annotations == {"mark": 1}
    assert not other.made()._benchmark_with_cudagraphs


def test_selection_hands_on_choices_with_code_alone(
    convolutions: Lister, hooked: Install, code_of: list[Any]
) -> None:
    context = hooked()
    choices = convolutions()
    first = choices[0]
    context.thread.selections.append(SelectionCall("convolution", first.input_nodes, first.layout))
    kept = choices
    for function in get_algorithm_selector_cache().preprocessing_fns:
        kept = function(kept)
    assert 1 < len(kept) < len(WARPS)
    assert {type(choice) for choice in kept} == {TritonTemplateCaller}
    assert set(code_of) == {WARPS[0], *(choice.bmreq.num_warps for choice in kept)}
    assert context.session.warn_once.messages == []


def test_where_selection_fails_all_are_handed_on(
    convolutions: Lister, hooked: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = hooked()
    choices = convolutions()
    context.thread.selections.append(SelectionCall("convolution", choices[0].input_nodes, choices[0].layout))

    def fails(*_: Any) -> Any:
        raise RuntimeError("no plan")

    monkeypatch.setattr(selection.pruning, "prune_before_compilation", fails)
    assert context.preprocessing is not None
    with pytest.warns(RuntimeWarning, match="no plan"):
        kept = context.preprocessing(choices)
    assert [choice.bmreq.num_warps for choice in kept] == list(WARPS)


def test_a_later_round_has_its_code_generated_in_the_lists_order(
    convolutions: Lister, hooked: Install, code_of: list[Any]
) -> None:
    hooked()
    choices = convolutions()
    pool = ChoicePool(choices)
    assert pool.kinds == {TritonTemplateCaller}
    wanted = [candidate_of(choices[3]), candidate_of(choices[1])]
    found = pool.choices(wanted, lambda candidate: pytest.fail("it has code"))
    assert [choice.bmreq.num_warps for choice in found] == [WARPS[1], WARPS[3]]
    assert code_of == [WARPS[0], WARPS[3], WARPS[1]]


def test_what_inductor_can_make_no_code_for_is_dropped(
    convolutions: Lister, hooked: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooked()
    choices = convolutions()
    monkeypatch.setattr(conv2d_template, "generate", lambda **_: None)
    pool, dropped = ChoicePool(choices), []
    named = [candidate_of(choice) for choice in choices]
    found = pool.choices(named, dropped.append)
    assert found == choices[:1]
    assert dropped == named[1:]
    assert with_code(choices) == choices[:1]
    with pytest.raises(AttributeError, match=r"no code .* bmreq"):
        choices[1].bmreq  # noqa: B018


@pytest.mark.parametrize("mode", [Mode.LISTEN, Mode.EXHAUSTIVE])
def test_who_keeps_all_puts_nothing_off(
    mode: Mode, convolutions: Lister, hooked: Install, code_of: list[Any]
) -> None:
    hooked(mode=mode)
    convolutions()
    assert code_of == list(WARPS)


def test_without_selection_nothing_is_put_off(
    convolutions: Lister, hooked: Install, code_of: list[Any]
) -> None:
    hooked(generation)
    convolutions((1, 2))
    assert code_of == [1, 2]


def test_what_somebody_looks_at_before_selection_has_its_code(
    convolutions: Lister, hooked: Install, code_of: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = hooked()
    convolutions((1, 2))
    assert code_of == [1]

    def generated() -> list[int]:
        code_of.clear()
        convolutions((4, 8))
        return list(code_of)

    cache = get_algorithm_selector_cache()
    for others in ([lambda choices: choices, *cache.preprocessing_fns], []):
        with monkeypatch.context() as patch:
            patch.setattr(cache, "preprocessing_fns", others)
            assert generated() == [4, 8]
    with monkeypatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_AUTOHEURISTIC_COLLECT", "mm")
        assert generated() == [4, 8]
    for option in ({"test_configs.autotune_choice_name_regex": "mm"}, {"deterministic": True}):
        with config.patch(option):
            assert generated() == [4, 8], option
    context.session = None
    assert generated() == [4, 8]


def test_a_list_without_selection_in_its_way_gets_its_code_all_the_same(
    convolutions: Lister, hooked: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody may have emptied Inductor's list of functions since the choices were listed."""
    hooked()
    choices = convolutions()
    cache, seen = get_algorithm_selector_cache(), []
    monkeypatch.setattr(cache, "preprocessing_fns", [lambda given: seen.extend(given) or given[:1]])
    cache("convolution", choices, choices[0].input_nodes, choices[0].layout)
    assert [type(choice) for choice in seen] == [TritonTemplateCaller] * len(WARPS)


def test_an_inputs_strides_are_settled_before_the_operation_is_named(
    graph: Any, hooked: Install, code_of: list[Any]
) -> None:
    """What is computed may be padded, once a template's code asks how it lies: its first code is not put off."""
    hooked()
    weights = nodes(graph, (1500, 1024))[0]
    out = ir.FixedLayout(DEVICE, torch.float16, [512, 1024], [1024, 1])
    strides = []
    for name in ("first", "second"):
        data = ir.Pointwise(
            device=DEVICE, dtype=torch.float16, inner_fn=lambda index: 1.0, ranges=[512, 1500]
        )
        layout = ir.FlexibleLayout(DEVICE, torch.float16, [512, 1500])
        computed = ir.ComputedBuffer(name=None, layout=layout, data=data)
        computed.name = graph.register_buffer(computed)
        choices: list[Any] = []
        code_of.clear()
        for number in (2, 4, 8):
            given = {**PRODUCT, "EVEN_K": False, "num_warps": number}
            mm_template.maybe_append_choice(
                choices, input_nodes=[ir.StorageBox(computed), weights], layout=out, **given
            )
        assert code_of == [2], name
        strides.append(list(computed.get_stride()))
    assert strides[0] == strides[1] != [1500, 1]


def test_a_template_that_is_described_otherwise_is_never_put_off(
    convolutions: Lister, hooked: Install, code_of: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "describe", lambda arguments: "BLOCK_M=1")
    hooked()
    choices = convolutions()
    assert code_of == list(WARPS)
    assert {type(choice) for choice in choices} == {TritonTemplateCaller}


def test_what_is_written_is_what_it_would_be_with_all_code_at_once(
    code_of: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two convolutions and a product, lowered and scheduled as for a GPU; times are invented."""

    def times(cls: type, choices: Any, *_: Any, **__: Any) -> dict[Any, float]:
        return {choice: 1.0 + len(str(candidate_of(choice))) / 100 for choice in choices}

    monkeypatch.setattr(records, "cuda_device", lambda *_: H200)
    monkeypatch.setattr(AlgorithmSelectorCache, "benchmark_in_current_process", classmethod(times))
    compile_nothing(monkeypatch)

    def function(x: Any, one: Any, other: Any, weights: Any) -> Any:
        once = torch.nn.functional.conv2d(x, one, padding=1).relu()
        again = torch.nn.functional.conv2d(once, other, padding=1)
        return again.mean((2, 3)) @ weights

    half = torch.float16
    inputs = [((8, 64, 28, 28), half), ((64, 64, 3, 3), half), ((64, 64, 3, 3), half), ((64, 512), half)]
    options = {"max_autotune": True, "max_autotune_gemm_backends": "ATEN,TRITON"}
    written, generated = [], []
    for all_at_once in (False, True):
        with monkeypatch.context() as patch, config.patch(autotune_num_choices_displayed=0, **options):
            if all_at_once:
                patch.setattr(generation, "_comes_to_us", lambda *_: False)
            code_of.clear()
            session = serving(store=tmp_path / str(all_at_once))
            context = HookContext(session)
            for name, module in (("selection", selection), ("generation", generation)):
                context.install(name, module.install)
            try:
                with fresh_cache():
                    written.append(inductor_output(function, inputs, patch))
            finally:
                context.close()
            assert session.warn_once.messages == []
            generated.append(len(code_of))
    assert without_paths(written[0]) == without_paths(written[1])
    assert generated[0] < generated[1]


def without_paths(code: str) -> str:
    """Without the names of temporary files, which Inductor makes of their contents."""
    return re.sub(r"/\S+|\bc[0-9a-z]{50,}", "PATH", code)
