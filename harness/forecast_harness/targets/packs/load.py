"""Read packs from disk: our own folders and KernelBench tasks. Runs none of their code."""

from __future__ import annotations

import ast
import re
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from forecast_autotune import python_parser
from forecast_autotune.errors import RecordError
from forecast_autotune.printable import meant_text
from forecast_autotune.python_parser import MAX_SOURCE_CHARACTERS
from forecast_autotune.records.named_lines import read_document
from forecast_harness.targets.packs.schema import (
    Definition,
    Language,
    Pack,
    PackFormat,
    Solution,
    ToleranceSpec,
    Workload,
    parse_json,
)


def builtin_names() -> list[str]:
    """The packs that ship with this release."""
    folder = resources.files("forecast_harness.targets.packs") / "builtin"
    return sorted(f.name for f in folder.iterdir() if f.joinpath("definition.json").is_file())


def load_pack(name: str | Path) -> Pack:
    """The pack of this name, folder or file.

    A name means a shipped pack; a folder with `definition.json` is one of our own; a Python file is a KernelBench
    task. Raises `RecordError` when it is none of these.
    """
    if isinstance(name, str) and name in builtin_names():
        return _load_native(resources.files("forecast_harness.targets.packs") / "builtin" / name)
    path = Path(name)
    if path.joinpath("definition.json").is_file():
        return _load_native(path)
    if path.suffix == ".py" and path.is_file():
        return _load_kernelbench(path)
    raise RecordError(
        f"{name} is neither a shipped pack ({', '.join(builtin_names())}), nor a folder with definition.json, "
        f"nor a KernelBench file{meant_text(str(name), builtin_names())}"
    )


def load_solution(path: str | Path, pack: Pack) -> Solution:
    """A solution of `pack`: one it ships, by name, or a file.

    The language is told by a `# language: triton` line, else by what the file imports. Raises
    `RecordError` for a name that is neither, and for a file that holds no text or does not define what is called.
    """
    if str(path) in {s.name for s in pack.solutions}:
        return pack.solution(str(path))
    file = Path(path)
    if not file.is_file():
        names = [s.name for s in pack.solutions]
        raise RecordError(
            f"{path} is neither a file nor a solution of {pack.definition.name} ({', '.join(names) or 'none'})"
            f"{meant_text(str(path), names)}"
        )
    try:
        with file.open("rb") as stream:
            # One character takes at most four bytes: what is longer is not read to its end.
            text = stream.read(4 * MAX_SOURCE_CHARACTERS + 1).decode().replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path} is no source: {error}") from error
    solution = make_solution(file.stem, text, pack.definition.format)
    if not _may_bind(text, solution.entry):
        raise RecordError(
            f"{path} defines no {solution.entry}, which is what {pack.definition.name} calls: name its function (or "
            "class) so"
        )
    return solution


def _may_bind(source: str, name: str) -> bool:
    """Whether Python of this text can bind the name in its module; other texts fail where they are imported."""
    try:
        nodes = list(ast.walk(python_parser.parse_module(source)))
    except (SyntaxError, ValueError, RecursionError):
        return True
    bound: set[str | None] = {getattr(n, "name", None) for n in nodes}
    bound |= {n.asname or n.name for n in nodes if isinstance(n, ast.alias)}
    bound |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    dynamic_names = {n.id for n in nodes if isinstance(n, ast.Name)} & {"globals", "setattr", "exec", "vars"}
    return name in bound or "*" in bound or bool(dynamic_names) or "__dict__" in source


def make_solution(name: str, source: str, format: PackFormat = PackFormat.OWN) -> Solution:
    """A solution from its text, with the entry point that the pack's format asks for."""
    entry = "ModelNew" if format is PackFormat.KERNELBENCH else "run"
    match = re.search(r"^# language: (\w+)$", source, re.MULTILINE)
    if match and match[1] in list(Language):
        language = Language(match[1])
    elif re.search(r"\bload_inline\b|__global__", source):
        language = Language.CUDA
    else:
        language = Language.TRITON if re.search(r"^[ \t]*@triton\.jit", source, re.M) else Language.TORCH
    return Solution(name, language, source, entry)


def _text_of(file: Any) -> str:
    """The text of a file on disk or inside a wheel. Raises `RecordError` for what is none, and `OSError`."""
    if isinstance(file, Path):
        return read_document(file).replace("\r\n", "\n")
    return str(file.read_text(encoding="utf-8"))


def _load_native(folder: Traversable) -> Pack:
    where = folder.joinpath("definition.json")
    definition = Definition.from_json(parse_json(_text_of(where), str(where)))
    where = folder.joinpath("workloads.json")
    data = parse_json(_text_of(where), str(where))
    if not isinstance(data, list) or not data:
        raise RecordError(f"{where} must be a list of at least one workload")
    works = tuple(Workload.from_json(w) for w in data)
    solutions = []
    place = folder.joinpath("solutions")
    if place.is_dir():
        for file in sorted(place.iterdir(), key=lambda f: f.name):
            if file.name.endswith(".py"):
                solutions.append(make_solution(file.name[:-3], _text_of(file), definition.format))
    return Pack(definition, _text_of(folder.joinpath("reference.py")), works, tuple(solutions))


def _defined_names(source: str, place: str) -> set[str]:
    try:
        tree = python_parser.parse_module(source)
    except SyntaxError as error:
        raise RecordError(f"{place} is not Python: {error}") from error
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {t.id for t in node.targets if isinstance(t, ast.Name)}
        elif isinstance(node, ast.ImportFrom):
            names |= {a.asname or a.name for a in node.names}
    return names


def _load_kernelbench(path: Path) -> Pack:
    source = _text_of(path)
    if missing := {"Model", "get_inputs", "get_init_inputs"} - _defined_names(source, str(path)):
        raise RecordError(f"{path} is no KernelBench task: it lacks {sorted(missing)}")
    definition = Definition(
        path.stem,
        ast.get_docstring(python_parser.parse_module(source)) or "",
        "KernelBench task",
        PackFormat.KERNELBENCH,
        # The task does not say how long its sums are: a generous length, still far from half precision.
        tolerance=ToleranceSpec("float32", "4096", 8.0),
    )
    return Pack(definition, source, (Workload("task", {}),))
