"""Digests of code that a choice runs and does not name: sources of operators, graphs, and compiler settings."""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forecast_autotune.records import digest
from forecast_integrations.triton.problem.source import is_foreign, source_hash

_REGISTRATION = re.compile(r"registered at (.+?):\d+")


def code_digest(*parts: object) -> str:
    """A short digest of texts that hold no address."""
    return digest(*map(str, parts))[:12]


def request_digest(request: Any) -> str:
    """A digest of a choice's code and of the numbers that it is called with; empty where Inductor has no code of it.

    The name of the kernel, which holds a counter, is left out.
    """
    code, path = getattr(request, "source_code", None), getattr(request, "module_path", None)
    if code is None and path:
        code = Path(path).read_text(encoding="utf-8")
    return code_digest(code.replace(request.kernel_name, ""), *request.extra_args) if code else ""


def callable_digest(function: object) -> str:
    """A digest of the user's code behind an operator or a function of a program; empty for a library's own."""
    if hasattr(function, "_schema") or hasattr(function, "overloads"):
        return _operator_digest(function)
    return "" if is_foreign(function) else code_digest(source_hash(function))


def _operator_digest(operator: Any) -> str:
    """A digest of the implementations of an operator; empty for those of torch itself, which its version names."""
    name = str(operator.name() if callable(getattr(operator, "name", None)) else operator)
    namespace, _, rest = name.partition("::")
    if namespace in (
        "aten",
        "prims",
        "prim",
        "mkldnn",
        "mkl",
        "onednn",
        "quantized",
        "_quantized",
        "inductor",
    ):
        return ""
    import torch
    from torch._library import custom_ops, triton

    full_name = f"{namespace}::{rest.partition('.')[0]}"
    definition = custom_ops.OPDEFS.get(full_name)
    functions = [] if definition is None else [definition._init_fn, *definition._backend_fns.values()]
    texts = [source_hash(f) for wrapper in functions for f in _inner_functions(wrapper)]
    texts += [source_hash(k) for k in getattr(triton, "triton_ops_to_kernels", {}).get(full_name, ())]
    try:
        files = set(_REGISTRATION.findall(torch._C._dispatch_dump(name)))
    except RuntimeError:
        files = set()
    own_files = {f for f in files if not Path(f).is_relative_to(Path(torch.__file__).parent)}
    if own_files:
        texts += [_file_digest(f) for f in sorted(own_files)]
    elif definition is None and files:  # by a function of torch, which keeps no trace of the implementation
        texts += [_file_digest(f) for f in _program_files()]
    texts += [_file_digest(f) for f in sorted(torch.ops.loaded_libraries)]
    return code_digest(*texts)


def _inner_functions(function: Any) -> list[Any]:
    """A function of the program, or those in the closures that torch puts around them."""
    if not is_foreign(function):
        return [function]
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return [f for inner in cells if inspect.isfunction(inner) for f in _inner_functions(inner)]


def _program_files() -> list[str]:
    """Sources of modules that are neither Python's nor of an installed package."""
    prefixes = (sys.prefix, sys.base_prefix)
    files = {str(getattr(module, "__file__", None) or "") for module in list(sys.modules.values())}
    return sorted(f for f in files if f.endswith(".py") and not f.startswith(prefixes))


def _file_digest(path: str) -> str:
    try:
        status = Path(path).stat()
        return _content_digest(path, status.st_mtime_ns, status.st_size)
    except OSError:
        return Path(path).name


@functools.lru_cache(maxsize=4096)
def _content_digest(path: str, _modified: int, _size: int) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def graph_digest(graph: Any) -> str:
    """A digest of a graph module: its operations, those of its parts, and the user's code that these call."""
    parts = [module for module in graph.modules() if hasattr(module, "graph")] if graph is not None else []
    texts = [str(getattr(part, "code", "")) for part in parts]
    targets = {node.target for part in parts for node in part.graph.nodes if node.op == "call_function"}
    texts += sorted(filter(None, map(callable_digest, targets)))
    return code_digest(*texts, *_kernel_digests(parts))


def _kernel_digests(parts: list[Any]) -> Iterator[str]:
    """Sources of Triton kernels that graphs launch: a graph names them by numbers of this process."""
    for node in (n for part in parts for n in part.graph.nodes if "kernel_idx" in n.kwargs):
        from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

        kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
        constants = kernel_side_table.get_constant_args(node.kwargs["constant_args_idx"])
        configs = [str(config) for config in getattr(kernel, "configs", ())]
        yield code_digest(source_hash(kernel), constants, *configs)


def compiler_options() -> dict[str, str]:
    """Return the options of C++ compilation that are not torch's defaults: instruction set and settings."""
    import torch
    from torch._inductor import config, cpu_vec_isa

    names = [name for name in config._config if name.startswith("cpp.")]
    values = {name: repr(_setting(name)) for name in names}
    isa = f"{cpu_vec_isa.pick_vec_isa()} {torch.backends.cpu.get_cpu_capability()}"
    changes = {n: v for n, v in values.items() if v != _defaults().get(n)}
    return {"isa": isa, **({"cpp": code_digest(sorted(changes.items()))} if changes else {})}


def _setting(name: str) -> object:
    from torch._inductor import config

    value: Any = functools.reduce(getattr, name.split("."), config)
    return value


@functools.cache
def _defaults() -> dict[str, str]:
    from torch._inductor import config

    entries: dict[str, Any] = config._config
    return {name: repr(entry.default) for name, entry in entries.items() if name.startswith("cpp.")}
