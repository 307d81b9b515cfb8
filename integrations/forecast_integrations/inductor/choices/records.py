"""Inductor's words in ours: one `Problem` per operation, one `Candidate` per choice.

Inductor names a choice with a counter that changes from run to run; a candidate is named by its template
and the template's own parameters, which do not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from forecast_autotune.records import (
    LAUNCH_OPTIONS,
    Argument,
    Candidate,
    Config,
    Device,
    Kernel,
    Problem,
    Scalar,
    to_scalar,
)
from forecast_autotune.store.formats.inductor import LIBRARY
from forecast_integrations.device import cuda_device, host_device, toolchain
from forecast_integrations.inductor.choices.identity import (
    callable_digest,
    code_digest,
    compiler_options,
    graph_digest,
    request_digest,
)

if TYPE_CHECKING:
    import torch
    from torch._inductor.codegen.cpp_template_kernel import CppTemplateCaller
    from torch._inductor.codegen.subgraph import SubgraphChoiceCaller
    from torch._inductor.ir import ChoiceCaller, IRNode, Layout
    from torch._inductor.kernel_template_choice import KernelTemplateChoice
    from torch._inductor.select_algorithm import (
        ExternKernelCaller,
        ExternKernelChoice,
        TritonTemplateCaller,
    )

    Choice: TypeAlias = ChoiceCaller | KernelTemplateChoice
    """One of Inductor's choices, with its code or before that is generated."""

Size: TypeAlias = "int | torch.SymInt"
"""A size, stride or offset: a number, or a symbol (a sympy expression)."""
ChoiceReader: TypeAlias = "Callable[[ChoiceCaller], tuple[str, Mapping[str, object]]]"
"""The variant and the parameters of a choice of one class."""

_WITH_USER_CODE = ("flex", "b2b")
"""Templates with a user's graph inside, by how their names begin."""
_COUNTER = re.compile(r"_\d+$")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def problem_of(op_name: str, input_nodes: Sequence[IRNode], layout: Layout | None) -> Problem:
    """The problem of one operation: its name, operands and result, precision, device and versions.

    Sizes that are symbols count with the value Inductor tunes for, and put `dynamic` into the key. Needs
    an active graph (`V.graph`) only where there are symbols.
    """
    import torch

    shapes = [(node.get_size(), node.get_stride()) for node in input_nodes]
    operands = [
        _tensor(f"in{i}", node.get_dtype(), size, stride, _offset(node))
        for i, (node, (size, stride)) in enumerate(zip(input_nodes, shapes, strict=True))
    ]
    if layout is not None and hasattr(layout, "size"):
        shapes.append((layout.size, layout.stride))
        operands.append(
            _tensor("out", layout.dtype, layout.size, layout.stride, getattr(layout, "offset", 0))
        )
    key = [f"precision={torch.get_float32_matmul_precision()}"]
    if not all(isinstance(n, int) or n.is_number for size, stride in shapes for n in (*size, *stride)):
        key.append("dynamic")
    device = _device_of_operation(input_nodes, layout)
    return Problem.of(
        Kernel(op_name, "inductor"), operands, device_of(device), key=key, toolchain=tools(device)
    )


def _tensor(
    name: str, dtype: torch.dtype, size: Sequence[Size], stride: Sequence[Size], offset: Size
) -> Argument:
    (start,) = size_hints([offset])
    aligned = start * dtype.itemsize % 16 == 0
    return Argument(name, "tensor", _dtype(dtype), size_hints(size), size_hints(stride), aligned)


def _offset(node: IRNode) -> Size:
    try:
        return node.get_layout().offset
    except (AttributeError, NotImplementedError):
        return 0


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _device_of_operation(input_nodes: Sequence[IRNode], layout: Layout | None) -> torch.device:
    """The torch device of an operation."""
    device = getattr(layout, "device", None)
    return device if device is not None else input_nodes[0].get_device()


def size_hints(sizes: Sequence[Size]) -> tuple[int, ...]:
    """Sizes as integers; symbols take the value that Inductor tunes for."""
    if all(isinstance(n, int) for n in sizes):
        return tuple(sizes)
    if all(isinstance(n, int) or n.is_number for n in sizes):
        return tuple(int(n) for n in sizes)
    from torch._inductor.virtualized import V

    sizevars = V.graph.sizevars
    # `size_hints` became `optimization_hints` between torch 2.11 and 2.13.
    ask = getattr(sizevars, "optimization_hints", None) or sizevars.size_hints
    return tuple(int(n) for n in ask(list(sizes)))


def device_of(device: torch.device) -> Device:
    """The record of a torch device. Two hosts with the same model of CPU are the same device."""
    if device.type == "cuda":
        return cuda_device(_index(device))
    if device.type == "cpu":
        return host_device()
    return Device(name=str(device.type), backend=str(device.type))


def _index(device: torch.device) -> int:
    import torch

    return int(device.index if device.index is not None else torch.cuda.current_device())


def tools(device: torch.device) -> dict[str, str]:
    """Versions, and for a CPU threads, instruction set and compiler settings: they change a choice's code."""
    import torch

    if device.type == "cpu":
        threads = str(torch.get_num_threads())
        return {"torch": torch.__version__.split("+")[0], "threads": threads, **compiler_options()}
    return toolchain()


def unwrap_choice(choice: Choice) -> Choice:
    """The choice itself, out of the wrapper that C++ templates put around it."""
    return vars(choice).get("_wrapped", choice)


def template_choice(choice: Choice) -> KernelTemplateChoice | None:
    """The `KernelTemplateChoice` a choice was made from, or which it is; None where there is none."""
    inner = unwrap_choice(choice)
    if hasattr(inner, "template") and hasattr(inner, "params"):
        return inner
    return (getattr(inner, "annotations", None) or {}).get("ktc")


def is_extern(choice: Choice) -> bool:
    """Whether this is a vendor library's kernel (ATen, cuBLAS, MKL), which needs no compilation."""
    ktc = template_choice(choice)
    if ktc is not None:
        return type(ktc.template).__name__ == "ExternKernelChoice"
    return type(unwrap_choice(choice)).__name__ == "ExternKernelCaller"


def is_library_kernel(candidate: Candidate) -> bool:
    """Whether a candidate is a vendor library's kernel: it needs no compilation."""
    return candidate.variant.startswith(LIBRARY)


def candidate_of(choice: Choice) -> Candidate:
    """The candidate of a `ChoiceCaller` or, before its code is generated, of a `KernelTemplateChoice`.

    The variant is the template's own name (`triton::mm`, `aten::mm`, `cpp::...`), the config holds its
    parameters. Choices that Inductor itself does not tell apart by these share one candidate.
    """
    ktc, inner = template_choice(choice), unwrap_choice(choice)
    if ktc is not None:
        return _candidate(str(ktc.template.uid), {**ktc.params.to_kwargs(), **_extra_parameters(ktc)})
    kind = type(inner).__name__
    variant, parameters = _CHOICE_READERS.get(kind, _any_choice)(inner)
    override = getattr(inner, "hint_override", None)
    if override is not None:
        parameters = {**parameters, "hint_override": override}
    return _candidate(variant, parameters)


def _extra_parameters(ktc: KernelTemplateChoice) -> dict[str, object]:
    """Return parameters of a template's code besides its own: a fused epilogue, or a program's own function."""
    own = _own_code(ktc.template) if is_extern(ktc) else {}
    # The rest are functions, which `epilogue_fn_hash` names, and workspaces, which follow from the parameters.
    extra = getattr(ktc, "extra_kwargs", {})
    parameters = {n: v for n, v in extra.items() if isinstance(v, str | bool | int | float)}
    return {**parameters, **own}


def _own_code(extern: ExternKernelChoice) -> dict[str, object]:
    """The source of a program's own operator or function among the library's."""
    text = callable_digest(extern.op_overload or extern.to_callable())
    return {"source": text} if text else {}


def _candidate(variant: str, parameters: Mapping[str, object]) -> Candidate:
    values = {str(name): parameter_scalar(value) for name, value in parameters.items()}
    launch = {k: v for k in LAUNCH_OPTIONS if type(v := values.get(k)) is int}
    kwargs = {name: value for name, value in values.items() if name not in launch and value is not None}
    if not variant.startswith("triton::"):
        # Triton's defaults would be an invention for code that has neither warps nor stages.
        launch = {"num_warps": 1, "num_stages": 1, **launch}
    return Candidate(Config.of(kwargs, **launch), variant)  # type: ignore[arg-type]


def parameter_scalar(value: object) -> Scalar:
    """A parameter as JSON has it: symbolic numbers as numbers, anything else as text without addresses."""
    if getattr(value, "is_Boolean", False):
        return bool(value)
    if getattr(value, "is_Integer", False):
        return int(value)  # type: ignore[call-overload]
    scalar = to_scalar(value)
    return _ADDRESS.sub("", scalar) if isinstance(scalar, str) else scalar


def is_user_code(template: str) -> bool:
    """Whether a template of this name holds a graph of the user's: its code alone tells what it computes."""
    return template.startswith(_WITH_USER_CODE)


def _name_without_counter(name: str) -> str:
    return _COUNTER.sub("", name)


def _extern(choice: ExternKernelCaller) -> tuple[str, Mapping[str, object]]:
    return f"{LIBRARY}{choice.choice.name}", {**choice.kwargs, **_own_code(choice.choice)}


def _triton(choice: TritonTemplateCaller) -> tuple[str, Mapping[str, object]]:
    name, parameters = (
        _name_without_counter(choice.name).removeprefix("triton_"),
        parse_description(choice.description),
    )
    if is_user_code(name):
        # Shapes do not say what a score_mod does; the hash of the generated source does.
        parameters["source"] = code_digest(getattr(choice.bmreq, "module_cache_key", ""))
    return f"triton::{name}", parameters


def _cpp(choice: CppTemplateCaller) -> tuple[str, Mapping[str, object]]:
    template = choice.template
    parameters: dict[str, object] = {"num_threads": getattr(template, "num_threads", None)}
    blocking = getattr(template, "register_blocking", None)
    for name in ("block_m", "block_n", "block_k"):
        parameters[name.upper()] = getattr(blocking, name, None)
    # The template's names say nothing of what is fused into it: an activation, its scalars, another operand.
    parameters["source"] = code_digest(choice.bmreq.source_code)
    return f"cpp::{choice.category}", parameters


def _subgraph(choice: SubgraphChoiceCaller) -> tuple[str, Mapping[str, object]]:
    rule = choice.decomposition
    # A decomposition is user code: when its graph changes, old timings are of something else.
    parameters = {**(choice.decomposition_kwargs or {}), "graph": graph_digest(choice.gm)}
    if patches := getattr(choice, "config_patches", None):
        parameters["patches"] = code_digest(sorted(patches.items()))
    name = _name_without_counter(choice.name) if rule is None else rule.__name__
    return f"subgraph::{name}", parameters


def _any_choice(choice: ChoiceCaller) -> tuple[str, Mapping[str, object]]:
    backend = re.sub(r"(Template)?Caller$", "", type(choice).__name__).lower()
    name = _name_without_counter(choice.name)
    parameters = parse_description(choice.description.replace(choice.name, name))
    # The description of a ROCm choice is empty, and that of a CuteDSL one says nothing of a user's graph in it.
    if source := request_digest(getattr(choice, "bmreq", None)):
        parameters["source"] = source
    return f"{backend}::{name}", parameters


_CHOICE_READERS: dict[str, ChoiceReader] = {
    "ExternKernelCaller": _extern,
    "TritonTemplateCaller": _triton,
    "CppTemplateCaller": _cpp,
    "SubgraphChoiceCaller": _subgraph,
}


def parse_description(description: str) -> dict[str, Scalar]:
    """The parameters in a choice's description, `BLOCK_M=64, ALLOW_TF32=True`; other texts as a whole."""
    parts = [part.partition("=") for part in description.split(", ") if part]
    if not all(name.strip().isidentifier() and sign for name, sign, _ in parts):
        return {"description": description}
    return {name.strip(): _parse_value(text.strip()) for name, _, text in parts}


def _parse_value(text: str) -> Scalar:
    if text in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[text]
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    return text.strip("'\"")
