"""What is said of real choices, made without a GPU."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._inductor import ir
from torch._inductor.codegen.subgraph import SubgraphChoiceCaller
from torch._inductor.kernel.mm import aten_addmm, aten_mm, mm_template, persistent_tma_mm_template
from torch._inductor.kernel_inputs import MMKernelInputs
from torch._inductor.kernel_template_choice import KernelTemplateChoice
from torch._inductor.template_heuristics.params import DictKernelTemplateParams

from forecast_integrations.inductor.choices.features import describe_choice

DEVICE = torch.device("cuda:0")
TILE = {"BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_K": 32, "GROUP_M": 8, "EVEN_K": True, "ALLOW_TF32": False}
LAUNCH = {"num_warps": 8, "num_stages": 3}


def node(name: str, *size: int) -> Any:
    return ir.InputBuffer(name=name, layout=ir.FixedLayout(DEVICE, torch.float16, list(size)))


def choice(template: Any, parameters: dict[str, Any], *operands: Any) -> Any:
    m, n = operands[-2].get_size()[0], operands[-1].get_size()[1]
    layout = ir.FixedLayout(DEVICE, torch.float16, [m, n])
    inputs = MMKernelInputs(list(operands), mat1_idx=len(operands) - 2, mat2_idx=len(operands) - 1)
    return KernelTemplateChoice(template, DictKernelTemplateParams(parameters), {}, layout, inputs)


def test_a_template_gives_its_parameters_its_op_and_its_facts() -> None:
    made = choice(mm_template, {**TILE, **LAUNCH}, node("a", 4096, 1024), node("b", 1024, 2048))
    found = describe_choice(made, facts=True)
    assert found["variant"] == "triton::mm"
    assert {name: found[name] for name in (*TILE, *LAUNCH)} == {**TILE, **LAUNCH}
    assert (found["op.m"], found["op.n"], found["op.k"], found["op.batch"]) == (4096, 2048, 1024, 1)
    assert found["programs"] == 4096 // 128 * 2048 // 64
    assert found["fact.dot_flops"] == 2 * 128 * 64 * 1024
    assert found["fact.load_bytes"] == 2 * (128 + 64) * 1024
    assert all(isinstance(value, int | float | str) for value in found.values())
    assert describe_choice(made) == {
        name: value for name, value in found.items() if not name.startswith("fact.")
    }


def test_the_bias_of_addmm_is_read_with_the_tile() -> None:
    bias, a, b = node("bias", 4096, 2048), node("a", 4096, 1024), node("b", 1024, 2048)
    plain = describe_choice(choice(mm_template, {**TILE, **LAUNCH}, a, b), facts=True)
    found = describe_choice(choice(mm_template, {**TILE, **LAUNCH}, bias, a, b), facts=True)
    assert (found["op.m"], found["op.n"], found["op.k"]) == (4096, 2048, 1024)
    assert float(found["fact.load_bytes"]) - float(plain["fact.load_bytes"]) == 2 * 128 * 64


def test_persistent_templates_launch_their_own_number_of_programs() -> None:
    given = {**TILE, **LAUNCH, "NUM_SMS": 132}
    operands = node("a", 4096, 1024), node("b", 1024, 2048)
    assert describe_choice(choice(persistent_tma_mm_template, given, *operands))["programs"] == 132


@pytest.mark.parametrize(("extern", "biased"), [(aten_mm, False), (aten_addmm, True)])
def test_vendor_kernels_have_an_op_and_no_launch(extern: Any, biased: bool) -> None:
    operands = [node("a", 64, 32), node("b", 32, 16)]
    found = describe_choice(choice(extern, {}, *([node("bias", 64, 16)] if biased else []), *operands))
    assert found["backend"] == "aten"
    assert found["op.k"] == 32
    assert not {"num_warps", "num_stages", "programs"} & set(found)


def test_a_subgraph_is_described_although_it_refuses_its_benchmark_request() -> None:
    """Its `bmreq` is a property that asserts, unless tuning is pipelined; every timing asks for features."""
    made = SubgraphChoiceCaller.__new__(SubgraphChoiceCaller)
    nodes = [node("a", 64, 32), node("b", 32, 16)]
    vars(made).update(name="split_0", layout=node("o", 64, 16).layout, input_nodes=nodes, annotations={})
    vars(made).update(decomposition=None, decomposition_kwargs={"s": 2}, gm=None, _bmreq=None)
    with pytest.raises(AssertionError, match="bmreq"):
        _ = made.bmreq
    assert describe_choice(made)["s"] == 2
    assert describe_choice(made)["backend"] == "subgraph"


def test_nothing_is_said_of_what_is_no_choice() -> None:
    assert describe_choice(object()) == {}
