"""A unified diff of the user's own files: what holds in the program, with the original for every other call."""

from __future__ import annotations

import ast
import difflib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from forecast_autotune import python_parser
from forecast_autotune.records.named_lines import read_document
from forecast_autotune.records.program import FunctionReplacement, TorchFunction
from forecast_harness.targets.program_functions import ENTRY, replacement_of


def patch_text(faster: Mapping[str, tuple[TorchFunction, str]], root: Path) -> str:
    """The diff, with paths relative to `root`; `faster` has the function and its verified source by name."""
    changed: dict[Path, str] = {}
    for function, source in faster.values():
        path, name = Path(function.file), function.name.partition(":")[2]
        module = f"{name}_faster"
        text = changed.get(path) or read_document(path)
        changed[path] = _dispatched(text, name, module, path)
        tree = python_parser.parse_module(text)
        node = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name)
        file = path.with_name(f"{module}.py")
        changed[file] = _faster_module(source, name, node, replacement_of(function, source))
    return "".join(_diff(path, text, root) for path, text in sorted(changed.items()))


def _diff(path: Path, text: str, root: Path) -> str:
    shown = os.path.relpath(path, root)
    before = read_document(path).splitlines(keepends=True) if path.exists() else []
    lines: Iterator[str] = difflib.unified_diff(
        before,
        text.splitlines(keepends=True),
        f"a/{shown}" if before else "/dev/null",
        f"b/{shown}",
    )
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )


def _dispatched(text: str, name: str, module: str, path: Path) -> str:
    """The file with the function renamed, and one of its name behind it that chooses."""
    tree = python_parser.parse_module(text)
    node = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name)
    lines = text.splitlines(keepends=True)
    end = node.end_lineno or node.lineno
    words = ", ".join(_parameters(node, named=True))
    returns = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
    if not lines[end - 1].endswith("\n"):
        lines[end - 1] += "\n"
    lines.insert(
        end,
        f"\n\ndef {name}({ast.unparse(node.args)}){returns}:\n"
        f"    if {module}.covers({words}):\n"
        f"        return {module}.{name}({words})\n"
        f"    return _{name}_original({words})\n",
    )
    lines[node.lineno - 1] = lines[node.lineno - 1].replace(f"def {name}(", f"def _{name}_original(", 1)
    is_package = path.with_name("__init__.py").exists()
    heads = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom) or n is tree.body[0]]
    heads = [n for n in heads if not isinstance(n, ast.FunctionDef | ast.ClassDef)]
    last = max([0, *(n.end_lineno or n.lineno for n in heads)])
    lines.insert(last, f"{'from . ' if is_package else ''}import {module}\n")
    return "".join(lines)


def _parameters(node: ast.FunctionDef, *, named: bool) -> list[str]:
    given = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
    return [*given, *(f"{a.arg}={a.arg}" if named else a.arg for a in node.args.kwonlyargs)]


def _faster_module(source: str, name: str, node: ast.FunctionDef, replacement: FunctionReplacement) -> str:
    """The verified source, the function with the program's parameters, and the test for what it was verified for."""
    parameters = ", ".join(_parameters(node, named=False))
    tensors = list(replacement.tensors)
    tests = []
    for tensor, (dtype, sizes) in replacement.tensors.items():
        tests.append(f"{tensor}.dtype == torch.{dtype} and {tensor}.is_contiguous()")
        if all(low == high for low, high in sizes):
            tests.append(f"tuple({tensor}.shape) == {tuple(low for low, _ in sizes)}")
        else:
            tests.append(f"{tensor}.dim() == {len(sizes)}")
            tests += [f"{low} <= {tensor}.shape[{n}] <= {high}" for n, (low, high) in enumerate(sizes)]
    tests += [f"{c.name} == {c.value!r}" for c in replacement.constants]
    needing = " or ".join(f"{t}.requires_grad" for t in tensors)
    tests.append(f"not (torch.is_grad_enabled() and ({needing}))" if len(tensors) > 1 else f"not {needing}")
    given = ", ".join(f"{t}={t}" for t in tensors)
    condition = "\n        and ".join(tests)
    imported = "" if "import torch\n" in source else "import torch\n\n"
    return (
        f'"""A faster {name}, verified against the original for the calls that `covers` accepts."""\n\n'
        f"{imported}{source.strip()}\n\n\n"
        f"def {name}({parameters}):\n    return {ENTRY}({given})\n\n\n"
        f"def covers({parameters}):\n    return (\n        {condition}\n    )\n"
    )
