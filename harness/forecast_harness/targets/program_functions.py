"""A function of a program's torch code as a problem pack: its source by itself, and the calls that were recorded."""

from __future__ import annotations

import ast
import builtins
import importlib.util
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from forecast_autotune import python_parser
from forecast_autotune.errors import RecordError
from forecast_autotune.records import Argument
from forecast_autotune.records.named_lines import read_document
from forecast_autotune.records.program import FunctionCall, TorchFunction
from forecast_harness.targets.packs.schema import (
    DTYPES,
    AxisSpec,
    Definition,
    Language,
    Pack,
    Solution,
    TensorSpec,
    ToleranceSpec,
    Workload,
)

ENTRY = "run"
_SAFE_NAMES = {*dir(builtins), "__name__", "__file__"}


@dataclass(frozen=True)
class IsolatedFunction:
    """A function with the parts of its module that it needs."""

    name: str
    parameters: tuple[str, ...]
    needed: str
    """Imports, constants and functions of its module, in their order."""
    text: str
    """The function itself, without decorators."""


def isolate(path: Path, name: str) -> IsolatedFunction:
    """The function `name` at the top level of a file.

    Raises `RecordError` where it needs what is computed when the module is run, or a module of the program's own.
    """
    text = read_document(path)
    tree = python_parser.parse_module(text)
    places: dict[str, ast.stmt] = {}
    for node in tree.body:
        for bound in _bound_names(node):
            if bound in places and bound != name and not isinstance(node, ast.Import | ast.ImportFrom):
                places[bound] = ast.Pass()  # bound twice: nobody can tell which of them a call meets
            else:
                places[bound] = node
    function = places.get(name)
    if not isinstance(function, ast.FunctionDef):
        raise RecordError(f"{path.name} defines no function {name} at its top level")
    if function.decorator_list:
        raise RecordError(f"{name} has decorators: {ast.unparse(function.decorator_list[0])}")
    dependencies: dict[int, ast.stmt] = {}
    waiting: list[ast.stmt] = [function]
    while waiting:
        for identifier in _free_names(waiting.pop()) - {name}:
            if (dependency := places.get(identifier)) is None:
                if identifier not in _SAFE_NAMES:
                    raise RecordError(
                        f"{name} needs {identifier}, which {path.name} does not define at its top level"
                    )
                continue
            _check_dependency(name, identifier, dependency, path)
            if id(dependency) not in dependencies:
                dependencies[id(dependency)] = dependency
                waiting.append(dependency)
    own = [n for n in tree.body if id(n) in dependencies]
    arguments = function.args
    return IsolatedFunction(
        name,
        tuple(a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)),
        "\n".join(ast.get_source_segment(text, n) or ast.unparse(n) for n in own),
        ast.get_source_segment(text, function) or ast.unparse(function),
    )


def function_pack(function: TorchFunction) -> Pack:
    """The pack of a recorded function. Raises `RecordError` with the reason why there can be none."""
    if function.problem:
        raise RecordError(function.problem)
    own = isolate(Path(function.file), function.name.partition(":")[2])
    calls = _like_calls(function.forms)
    axes, shapes = _axes(calls)
    tensors = [a for a in calls[0].arguments if a.kind == "tensor"]
    for tensor in (*tensors, *calls[0].results):
        if tensor.dtype not in DTYPES:
            raise RecordError(f"{tensor.name} is of {tensor.dtype}, which no source is verified for")
    names = [a.name for a in tensors]
    definition = Definition(
        own.name,
        f"as {own.name} of {Path(function.file).name} computes it",
        axes=axes,
        inputs={a.name: TensorSpec(shapes[a.name], a.dtype) for a in tensors},
        outputs={a.name: TensorSpec(shapes[a.name], a.dtype) for a in calls[0].results},
        tolerance=ToleranceSpec(reduction=str(max([1, *(n for a in tensors for n in a.shape)]))),
    )
    constants = {a.name: a.value for a in calls[0].arguments if a.kind != "tensor"}
    reference = _module(own, names, constants, "reference", wrapped=True)
    workloads = [Workload(f"call-{n}", _sizes(axes, shapes, call)) for n, call in enumerate(calls, 1)]
    start = _module(own, names, constants, ENTRY, wrapped=bool(constants) or _calls_itself(own))
    return Pack(
        definition,
        f"{reference}\n\n{_make(calls)}",
        tuple(workloads),
        (Solution("program", Language.TORCH, start),),
    )


def write_pack(pack: Pack, folder: Path) -> None:
    """Write a pack as a folder that `load_pack` reads. Raises `OSError`."""
    (folder / "solutions").mkdir(parents=True, exist_ok=True)
    (folder / "definition.json").write_text(json.dumps(pack.definition.to_json(), indent=1), encoding="utf-8")
    works = [w.to_json() for w in pack.workloads]
    (folder / "workloads.json").write_text(json.dumps(works, indent=1), encoding="utf-8")
    (folder / "reference.py").write_text(pack.reference, encoding="utf-8")
    for solution in pack.solutions:
        (folder / "solutions" / f"{solution.name}.py").write_text(solution.source, encoding="utf-8")


def faster_module(function: TorchFunction, source: str, faster_at: Sequence[str] | None = None) -> str:
    """A verified source, and `covers`: whether a call's arguments are of the sizes and numbers that its pack is about.

    `faster_at`: the workloads at which it is faster, where it is not at all of them: it takes no other sizes.
    """
    calls = _like_calls(function.forms)
    source = source.replace(
        "torch.inference_mode()", "torch.no_grad()"
    )  # autograd takes no tensors made in the former
    tests, tensors = [], []
    for number, argument in enumerate(calls[0].arguments):
        name = argument.name
        if argument.kind != "tensor":
            kind = type(argument.value).__name__
            test = f"type({name}) is {kind} and {name} == {argument.value!r}"
            tests.append(f"{name} is None" if argument.value is None else test)
            continue
        tensors.append(name)
        tests.append(f"type({name}) is torch.Tensor")
        tests.append(f"{name}.dtype == torch.{argument.dtype} and {name}.is_contiguous()")
        shapes = [c.arguments[number].shape for c in calls]
        if len({*shapes}) == 1:
            tests.append(f"tuple({name}.shape) == {shapes[0]}")
        else:
            tests.append(f"{name}.dim() == {len(shapes[0])}")
            sizes = enumerate(zip(*shapes, strict=True))
            tests += [f"{min(n)} <= {name}.shape[{axis}] <= {max(n)}" for axis, n in sizes]
    if faster_at:
        faster_calls = [c for n, c in enumerate(calls, 1) if f"call-{n}" in faster_at]
        call_shapes = [tuple(a.shape for a in c.arguments if a.kind == "tensor") for c in faster_calls]
        tests.append(f"({', '.join(f'tuple({t}.shape)' for t in tensors)},) in {call_shapes}")
    gradients = " or ".join(f"{t}.requires_grad" for t in tensors)
    tests.append(f"not (torch.is_grad_enabled() and ({gradients}))")
    parameters = ", ".join(a.name for a in calls[0].arguments)
    condition = "\n        and ".join(tests)
    return (
        f'"""A faster {function.name.partition(":")[2]}: `run`, verified for the calls that `covers` accepts."""\n\n'
        f"{'' if 'import torch' in source.splitlines() else 'import torch' + 2 * chr(10)}{source.strip()}\n\n\n"
        f"def covers({parameters}):\n    return (\n        {condition}\n    )\n"
    )


def _like_calls(forms: Sequence[FunctionCall]) -> list[FunctionCall]:
    """The calls that differ from the first by sizes alone."""

    def form(call: FunctionCall) -> object:
        values = (*call.arguments, *call.results)
        return [(a.name, a.kind, a.dtype, len(a.shape), a.value) for a in values]

    return [c for c in forms if form(c) == form(forms[0])]


def _axes(calls: Sequence[FunctionCall]) -> tuple[dict[str, AxisSpec], dict[str, tuple[str, ...]]]:
    """The axes that vary between calls, and every tensor's shape in terms of them.

    Raises `RecordError` for a result whose size varies otherwise than any argument's.
    """
    axes: dict[str, AxisSpec] = {}
    by_sizes: dict[tuple[int, ...], str] = {}
    shapes: dict[str, tuple[str, ...]] = {}
    for kind in ("arguments", "results"):
        each: list[tuple[Argument, ...]] = [getattr(c, kind) for c in calls]
        for values in zip(*each, strict=True):
            if values[0].kind != "tensor":
                continue
            shape = []
            for sizes in zip(*(a.shape for a in values), strict=True):
                if len(set(sizes)) == 1:
                    shape.append(str(sizes[0]))
                    continue
                if sizes not in by_sizes:
                    if kind == "results":
                        raise RecordError(
                            f"sizes {list(sizes)} of result {values[0].name} are no argument's: nobody can tell others"
                        )
                    name = by_sizes[sizes] = f"N{len(by_sizes)}"
                    axes[name] = AxisSpec(None, min(sizes), max(sizes), math.gcd(*sizes))
                shape.append(by_sizes[sizes])
            shapes[values[0].name] = tuple(shape)
    return axes, shapes


def _sizes(
    axes: Mapping[str, AxisSpec], shapes: Mapping[str, tuple[str, ...]], call: FunctionCall
) -> dict[str, int]:
    tensors = [a for a in call.arguments if a.kind == "tensor"]
    sizes = {e: n for a in tensors for e, n in zip(shapes[a.name], a.shape, strict=True)}
    return {name: sizes[name] for name in axes}


def _module(
    own: IsolatedFunction, names: Sequence[str], constants: Mapping[str, object], entry: str, *, wrapped: bool
) -> str:
    """A module in which `entry(tensors by name)` is the function with its constants, `wrapped` or under that name."""
    head = f"{own.needed}\n\n\n" if own.needed else ""
    if not wrapped:
        return f"{head}{own.text.replace(f'def {own.name}(', f'def {entry}(', 1)}\n"
    arguments = ", ".join([*(f"{n}={n}" for n in names), *(f"{n}={v!r}" for n, v in constants.items())])
    call = f"def {entry}({', '.join(names)}):\n    return {own.name}({arguments})\n"
    return f"{head}{own.text}\n\n\n{call}"


def _calls_itself(own: IsolatedFunction) -> bool:
    tree = python_parser.parse_module(own.text)
    return any(isinstance(n, ast.Name) and n.id == own.name for n in ast.walk(tree))


def _make(calls: Sequence[FunctionCall]) -> str:
    """A `make` that keeps drawn values within the bounds that the recorded ones had, where these say something."""
    lines = []
    for number, argument in enumerate(calls[0].arguments):
        bounds = [c.arguments[number].extra for c in calls if "least" in c.arguments[number].extra]
        if argument.kind != "tensor" or not bounds:
            continue
        least, most = min(b["least"] for b in bounds), max(b["most"] for b in bounds)
        tensor = f'inputs["{argument.name}"]'
        if argument.dtype == "bool":
            change = f"torch.rand({tensor}.shape, generator=generator) < 0.5"
        elif "int" in argument.dtype:
            change = (
                f"torch.randint({int(least)}, {int(most) + 1}, {tensor}.shape, generator=generator)"
                f".to({tensor}.dtype)"
            )
        elif least >= 0.0:
            change = f"{tensor}.abs().clamp(min={least!r})"
        else:
            continue
        lines.append(f'    made["{argument.name}"] = {change}\n')
    if not lines:
        return ""
    head = "import torch\n\n\ndef make(axes, inputs, generator):\n    made = dict(inputs)\n"
    return f"{head}{''.join(lines)}    return made\n"


def _bound_names(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from ((a.asname or a.name).partition(".")[0] for a in node.names)
    else:
        yield from (n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))


def _free_names(node: ast.stmt) -> set[str]:
    """The names that a statement reads from its module, and some that it binds itself."""
    read = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    bindings = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    bindings |= {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}
    inner = {
        n.name for n in ast.walk(node) if isinstance(n, ast.FunctionDef | ast.ClassDef) and n is not node
    }
    return read - bindings - inner if isinstance(node, ast.FunctionDef) else read


def _check_dependency(name: str, identifier: str, node: ast.stmt, path: Path) -> None:
    """Raises `RecordError` for a dependency that another process would not get by the text alone."""
    if isinstance(node, ast.FunctionDef):
        return
    if isinstance(node, ast.ImportFrom) and node.level:
        raise RecordError(f"{name} needs {identifier}, which is imported from the program's own package")
    if isinstance(node, ast.Import | ast.ImportFrom):
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
        for module in (m.partition(".")[0] for m in modules):
            local = path.parent / module
            if (
                local.with_suffix(".py").exists()
                or local.is_dir()
                or importlib.util.find_spec(module) is None
            ):
                raise RecordError(f"{name} needs {module}, a module that only the program can import")
        return
    plain = isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
    if not plain or any(isinstance(n, ast.Call | ast.Await | ast.NamedExpr) for n in ast.walk(node)):
        raise RecordError(f"{name} needs {identifier}, which is computed when {path.name} runs")
