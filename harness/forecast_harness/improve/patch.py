"""A unified diff of the user's own files: sources that hold in the program, and the original for all other calls."""

from __future__ import annotations

import ast
import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from forecast_autotune import python_parser
from forecast_autotune.records.named_lines import read_document
from forecast_autotune.records.program import TorchFunction
from forecast_harness.targets.program_functions import ENTRY


def patch_text(
    faster: Mapping[str, tuple[TorchFunction, str]], kernels: Mapping[str, str], root: Path
) -> str:
    """The diff, with paths relative to `root`.

    `faster` has the function and the module that takes its place by name. `kernels` has the file of a Triton kernel by
    name: where it has a tuner, that one takes the verified variants of the store besides.
    """
    texts: dict[Path, str] = {}
    for kernel, own in kernels.items():
        text = texts.get(Path(own)) or read_document(Path(own))
        if (tuned_text := _serve_tuner(text, kernel)) is not None:
            texts[Path(own)] = tuned_text
    for function, faster_text in faster.values():
        path, name = Path(function.file), function.name.partition(":")[2]
        module = f"{name}_faster"
        while path.with_name(f"{module}.py") in texts:  # for a function of that name in another file
            module += "_2"
        text = texts.get(path) or read_document(path)
        tree = python_parser.parse_module(text)
        node = _function(tree, name)
        assert node is not None  # it was recorded
        tensors = [a.name for a in function.forms[0].arguments if a.kind == "tensor"]
        texts[path] = _dispatch(text, tree, node, module, path, tensors)
        texts[path.with_name(f"{module}.py")] = faster_text
    return "".join(_diff(path, text, root) for path, text in sorted(texts.items()))


def _diff(path: Path, text: str, root: Path) -> str:
    name = os.path.relpath(path, root)
    before = read_document(path).splitlines(keepends=True) if path.exists() else []
    lines: Iterator[str] = difflib.unified_diff(
        before,
        text.splitlines(keepends=True),
        f"a/{name}" if before else "/dev/null",
        f"b/{name}",
    )
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )


def _function(tree: ast.Module, name: str) -> ast.FunctionDef | None:
    return next((n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name), None)


def _serve_tuner(text: str, name: str) -> str | None:
    """The file with the kernel's `triton.autotune` replaced by ours, and variants asked for; None without a tuner."""
    tree = python_parser.parse_module(text)
    kernel = _function(tree, name)
    calls = [d for d in kernel.decorator_list if isinstance(d, ast.Call)] if kernel is not None else []
    tuner = next((c for c in calls if ast.unparse(c.func).rpartition(".")[2] == "autotune"), None)
    arguments = [*tuner.args, *(k.value for k in tuner.keywords)] if tuner is not None else []
    if tuner is None or not arguments:
        return None
    lines = text.splitlines(keepends=True)
    last = max(arguments, key=lambda n: (n.end_lineno or 0, n.end_col_offset or 0))
    for node, word, inserts in ((last, ', variants="store"', True), (tuner.func, "forecast_autotune", False)):
        number = (node.end_lineno or node.lineno) - 1
        line, end = lines[number].encode(), node.end_col_offset or 0
        begin = end if inserts else node.col_offset
        lines[number] = (line[:begin] + word.encode() + line[end:]).decode()
    lines.insert(_last_import(tree, kernel), "from forecast_autotune import forecast_autotune\n")
    return "".join(lines)


def _last_import(tree: ast.Module, before: ast.FunctionDef | None) -> int:
    """The line behind the imports, or the docstring, above a function."""
    heads = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom) or n is tree.body[0]]
    heads = [n for n in heads if not isinstance(n, ast.FunctionDef | ast.ClassDef)]
    return max([0, *(n.end_lineno or n.lineno for n in heads if before is None or n.lineno < before.lineno)])


def _dispatch(
    text: str, tree: ast.Module, node: ast.FunctionDef, module: str, path: Path, tensors: Sequence[str]
) -> str:
    """The file, parsed as `tree`, with the function renamed, and one of its name behind it that chooses."""
    name, lines = node.name, text.splitlines(keepends=True)
    end = node.end_lineno or node.lineno
    words = ", ".join(a.arg for a in (*node.args.posonlyargs, *node.args.args))
    words = ", ".join([*filter(None, [words]), *(f"{a.arg}={a.arg}" for a in node.args.kwonlyargs)])
    returns = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
    if not lines[end - 1].endswith("\n"):
        lines[end - 1] += "\n"
    lines.insert(
        end,
        f"\n\ndef {name}({ast.unparse(node.args)}){returns}:\n"
        f"    if {module}.covers({words}):\n"
        f"        return {module}.{ENTRY}({', '.join(f'{t}={t}' for t in tensors)})\n"
        f"    return _{name}_original({words})\n",
    )
    lines[node.lineno - 1] = lines[node.lineno - 1].replace(f"def {name}(", f"def _{name}_original(", 1)
    is_package = path.with_name("__init__.py").exists()
    lines.insert(_last_import(tree, node), f"{'from . ' if is_package else ''}import {module}\n")
    return "".join(lines)
