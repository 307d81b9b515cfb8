"""Each field of torch's classes of choices that can change code is a part of a candidate, or of its problem.

The fields are read from torch's own classes, so that a field of a new release fails the first test: it is code, and
gets a pair of choices that differ in it alone, or it is not, and says why.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._inductor import config, ir

from torch._inductor.select_algorithm import ExternKernelCaller, ExternKernelChoice, TritonTemplateCaller  # isort: skip
from torch._inductor.autotune_process import BenchmarkRequest, CppBenchmarkRequest, CuteDSLBenchmarkRequest
from torch._inductor.codegen.cpp_template import CppTemplate
from torch._inductor.codegen.cpp_template_kernel import CppTemplateCaller
from torch._inductor.codegen.cutedsl.cutedsl_template import CuteDSLTemplateCaller
from torch._inductor.codegen.cutlass.kernel import CUTLASSTemplateCaller
from torch._inductor.codegen.nv_universal_gemm.nv_universal_gemm import NVUniversalGemmCaller
from torch._inductor.codegen.rocm.rocm_benchmark_request import ROCmBenchmarkRequest
from torch._inductor.codegen.rocm.rocm_kernel import ROCmTemplateCaller
from torch._inductor.codegen.subgraph import SubgraphChoiceCaller
from torch._inductor.kernel_template_choice import KernelTemplateChoice

from forecast_autotune.records import Candidate
from forecast_integrations.inductor.choices import identity
from forecast_integrations.inductor.choices.records import candidate_of, tools

INPUTS = "name input_nodes layout description failed annotations _benchmark_with_cudagraphs"
"""Operands and result are the problem's; a name is a counter, and how a choice is timed is no code."""
NOT_CODE = {
    # The last four are set for graphs, which have them in their own class, too.
    ir.ChoiceCaller: f"{INPUTS} gm decomposition decomposition_kwargs config_patches",
    ExternKernelCaller: "bmreq has_out_variant input_tensor_meta output_tensor_meta gm",
    ExternKernelChoice: "cpp_kernel_name has_out_variant use_fallback_kernel kernel_creator src_hash gm",
    TritonTemplateCaller: "make_kernel_render log_info mutated_inputs workspace_arg allowed_prologue_inps "
    "hint_override n_regs",
    CppTemplateCaller: "make_kernel_render info_kwargs",
    # What a C++ template holds is in its source.
    CppTemplate: "name input_nodes index output_node layout num_threads epilogue_creator",
    CppBenchmarkRequest: "hash_key DLL",
    SubgraphChoiceCaller: "benchmark_inputs example_inputs sym_inputs sym_input_values _compiled_module _bmreq",
    KernelTemplateChoice: "layout inputs annotations",
    BenchmarkRequest: "kernel_name input_tensor_meta output_tensor_meta benchmark_with_cudagraphs",
    ROCmTemplateCaller: "category make_kernel_render template info_kwargs",
    ROCmBenchmarkRequest: "workspace_size workspace DLL _workspace_size_updated hash_key source_file",
    CuteDSLTemplateCaller: "make_kernel_render template mutated_inputs",
    CuteDSLBenchmarkRequest: "module_cache_key",
    # Its name is the hash of its code, and its description the rest.
    CUTLASSTemplateCaller: "category make_kernel_render supports_epilogue_fusion template info_kwargs",
    # The types of sums and scales follow from the operands.
    NVUniversalGemmCaller: "accumulator_type workspace_size scale_type_a scale_type_b swizzle_type_a "
    "swizzle_type_b bmreq",
}


def a_function(a: Any) -> Any:
    return a + 1


def another_function(a: Any) -> Any:
    return a + 2


def graph(function: Any) -> Any:
    return torch.fx.symbolic_trace(function)


def bare(kind: type, **fields: Any) -> Any:
    """A choice with these fields alone."""
    choice = object.__new__(kind)
    given = {"name": "choice_1", "description": "", "annotations": {}, "input_nodes": [], "layout": None}
    for name, value in (given | fields).items():
        setattr(choice, name, value)
    return choice


def extern(name: str = "mine", function: Any = a_function, **given: str) -> Any:
    kernel = SimpleNamespace(name=name, op_overload=None, to_callable=lambda: function)
    return bare(ExternKernelCaller, choice=kernel, kwargs=given)


def subgraph(**fields: Any) -> Any:
    given = {
        "gm": graph(a_function),
        "decomposition": a_function,
        "decomposition_kwargs": {},
        "config_patches": {},
    }
    return bare(SubgraphChoiceCaller, **given | fields)


def templated(uid: str = "triton::mm", rows: int = 16, **extra: str) -> Any:
    parameters = SimpleNamespace(to_kwargs=lambda: {"BLOCK_M": rows})
    template = SimpleNamespace(uid=uid)
    return bare(KernelTemplateChoice, template=template, params=parameters, extra_kwargs=extra)


def triton(description: str = "BLOCK_M=16", name: str = "triton_mm_1", key: str = "a") -> Any:
    request = SimpleNamespace(module_cache_key=key)
    return bare(TritonTemplateCaller, name=name, description=description, bmreq=request)


def cpp(source: str = "a", category: str = "CppMicroGemm", threads: int = 1) -> Any:
    request = SimpleNamespace(source_code=source)
    template = SimpleNamespace(num_threads=threads, register_blocking=None)
    return bare(CppTemplateCaller, category=category, template=template, bmreq=request)


def rocm(code: str = "a", number: int = 1, blocks: int = 1) -> Any:
    request = SimpleNamespace(
        source_code=f"{code} rocm_{number}", kernel_name=f"rocm_{number}", extra_args=[blocks]
    )
    return bare(ROCmTemplateCaller, name=f"rocm_{number}", bmreq=request)


def cutedsl(path: str = __file__, number: int = 1) -> Any:
    name = f"cutedsl_flash_{number}"
    request = SimpleNamespace(module_path=path, kernel_name=name, extra_args=())
    return bare(
        CuteDSLTemplateCaller, name=name, description=f"CuteDSL template {name} (TILE=64)", bmreq=request
    )


def universal(description: str) -> Any:
    return bare(NVUniversalGemmCaller, description=description)


PAIRS = {
    (ExternKernelCaller, "choice"): (extern(), extern("other")),
    (ExternKernelCaller, "kwargs"): (extern(), extern(attr="relu")),
    (ExternKernelChoice, "name"): (extern(), extern("other")),
    (ExternKernelChoice, "op_overload"): (extern(), extern(function=another_function)),
    (TritonTemplateCaller, "bmreq"): (triton(name="triton_flex_1"), triton(name="triton_flex_1", key="b")),
    (CppTemplateCaller, "category"): (cpp(), cpp(category="CppMicroGemmAMX")),
    (CppTemplateCaller, "template"): (cpp(), cpp(threads=2)),
    (CppTemplateCaller, "bmreq"): (cpp(), cpp("b")),
    (CppBenchmarkRequest, "source_code"): (cpp(), cpp("b")),
    (SubgraphChoiceCaller, "gm"): (subgraph(), subgraph(gm=graph(another_function))),
    (SubgraphChoiceCaller, "decomposition"): (subgraph(), subgraph(decomposition=another_function)),
    (SubgraphChoiceCaller, "decomposition_kwargs"): (subgraph(), subgraph(decomposition_kwargs={"s": 2})),
    (SubgraphChoiceCaller, "config_patches"): (subgraph(), subgraph(config_patches={"max_fusion_size": 7})),
    (KernelTemplateChoice, "template"): (templated(), templated("triton::mm_persistent")),
    (KernelTemplateChoice, "params"): (templated(), templated(rows=32)),
    (KernelTemplateChoice, "extra_kwargs"): (templated(), templated(epilogue_fn_hash="addmm 2 1")),
    (ROCmTemplateCaller, "bmreq"): (rocm(), rocm("b"), rocm(number=2)),
    (ROCmBenchmarkRequest, "source_code"): (rocm(), rocm("b")),
    (BenchmarkRequest, "extra_args"): (rocm(), rocm(blocks=2)),
    (CuteDSLTemplateCaller, "bmreq"): (cutedsl(), cutedsl(torch.__file__), cutedsl(number=2)),
    (CuteDSLBenchmarkRequest, "module_path"): (cutedsl(), cutedsl(torch.__file__)),
    (CUTLASSTemplateCaller, "bmreq"): tuple(
        bare(CUTLASSTemplateCaller, name=f"cutlass_{n}f") for n in (1, 2)
    ),
    (NVUniversalGemmCaller, "kernel"): (universal("mm tile_64"), universal("mm tile_128")),
    (NVUniversalGemmCaller, "variant"): (universal("mm tile_64"), universal("grouped tile_64")),
}
"""Choices that differ in one field alone, and one that differs from the first in its counter alone."""


def fields(kind: type) -> set[str]:
    """Attributes that the constructor of a class sets by itself."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind.__init__)))
    names = (
        node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    )
    return {node.attr for node in names if isinstance(node.value, ast.Name) and node.value.id == "self"}


@pytest.mark.parametrize("kind", NOT_CODE, ids=lambda kind: kind.__name__)
def test_every_field_of_a_choice_is_code_or_known_to_be_none(kind: type) -> None:
    code = {name for owner, name in PAIRS if owner is kind}
    new = fields(kind) - set(NOT_CODE[kind].split()) - code
    assert not new, (
        "a field of this release: does it change a choice's code? Then give it a pair, else name it above"
    )


def test_every_class_of_choices_is_named_above() -> None:
    files = Path(inspect.getfile(config)).parent.rglob("*.py")
    bases = r"^class (\w+)\([^)]*ChoiceCaller\)"
    classes = {name for file in files for name in re.findall(bases, file.read_text(encoding="utf-8"), re.M)}
    assert classes - {"TritonTemplateCallerBase"} <= {kind.__name__ for kind in NOT_CODE}


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0].__name__}.{pair[1]}")
def test_choices_that_differ_in_a_field_are_two_candidates(pair: tuple[type, str]) -> None:
    one, other, *equal = PAIRS[pair]
    named: list[Candidate] = [candidate_of(one), candidate_of(other)]
    assert named[0] != named[1]
    assert {named[0]} == {candidate_of(choice) for choice in (one, *equal)}


def other_value(value: object) -> object:
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else f"{value or ''}x"


@pytest.mark.parametrize("name", [name for name in config._config if name.startswith("cpp.")])
def test_a_setting_of_the_compiler_makes_another_problem(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpu_vec_isa

    monkeypatch.setattr(cpu_vec_isa, "pick_vec_isa", lambda: "one")
    before = tools(torch.device("cpu"))
    with config.patch({name: other_value(identity._setting(name))}):
        assert tools(torch.device("cpu")) != before
    monkeypatch.setattr(cpu_vec_isa, "pick_vec_isa", lambda: "another")
    assert tools(torch.device("cpu")) != before
