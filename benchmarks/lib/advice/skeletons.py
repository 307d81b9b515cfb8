"""Advice as a skeleton: a cost function whose named constants are open, in a kernel's own names or in another's."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass

from forecast_autotune.llm.advice.language import ENTRY, parse_cost_function
from forecast_autotune.llm.advice.subject import LAUNCH_OPTIONS, AdviceError
from forecast_autotune.records import Problem

OPEN = "?"
"""What stands for a constant that is open."""
_PLACE = re.compile(r"__open_\d+__")
_CONSTANT = "constant"


@dataclass(frozen=True)
class Skeleton:
    """The functions of a module of advice without comments, and where its constants stand."""

    parts: tuple[str, ...]
    """The text between the open constants: one more than there are constants."""

    outline: str
    """The same, from `cost` on and with `constant(?)` for each constant: little is said before the structure."""

    def before(self, constant: int) -> str:
        """What stands before the value of a constant, by its number; earlier constants are open."""
        return OPEN.join(self.parts[: constant + 1])


def open_skeleton(text: str) -> Skeleton:
    """The skeleton of a module of advice: its functions, with `constant(label='...', value=?)` for each constant.

    The label comes first, so that whoever reads on to a value knows what it is of. The author's summary, confidence
    and spreads are left out, since they are not part of the structure. Constants have the numbers that they have in
    `CostFunction.constants`. Raises `AdviceError` for a text outside of the language.
    """
    constants = parse_cost_function(text).constants
    opener = _ConstantOpener(labels=True)
    opened = [opener.visit(node) for node in _functions(text)]
    if opener.values != [c.value for c in constants]:
        raise AdviceError("the constants of a skeleton must be those of its cost function, in their order")
    short = _ConstantOpener(labels=False)
    entry_first = sorted((short.visit(node) for node in _functions(text)), key=lambda f: f.name != ENTRY)
    return Skeleton(tuple(_PLACE.split(_unparsed(opened))), _PLACE.sub(OPEN, _unparsed(entry_first)))


def _functions(text: str) -> list[ast.FunctionDef]:
    return [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]


def _unparsed(functions: Sequence[ast.FunctionDef]) -> str:
    return "\n\n".join(map(ast.unparse, functions))


class _ConstantOpener(ast.NodeTransformer):
    def __init__(self, labels: bool) -> None:
        self.labels = labels
        self.values: list[float] = []

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if not (isinstance(node.func, ast.Name) and node.func.id == _CONSTANT):
            return self.generic_visit(node)
        given = dict(zip(("value", "spread", "label"), node.args, strict=False))
        given |= {str(k.arg): k.value for k in node.keywords}
        place = ast.Name(f"__open_{len(self.values)}__")
        self.values.append(float(ast.literal_eval(given["value"])))
        if not self.labels:
            return ast.Call(node.func, [place], [])
        label = [ast.keyword("label", given["label"])] if "label" in given else []
        return ast.Call(node.func, [], [*label, ast.keyword("value", place)])


def in_names_of(text: str, problem: Problem, parameters: Sequence[str]) -> str:
    """Advice on another kernel with every meta-parameter and argument renamed to one that this kernel has.

    Names are given out in their order (tensors to tensors, numbers to numbers, meta-parameters to `parameters`),
    from the first one again where the other kernel has more. Raises `AdviceError` where this kernel has none of a kind.
    """
    tree = ast.parse(text)
    reads = _NameReader()
    reads.visit(tree)
    tensors = [a.name for a in problem.arguments if a.kind == "tensor"]
    numbers = [a.name for a in problem.arguments if a.kind != "tensor" and isinstance(a.value, int | float)]
    scalars = [n for n in reads.scalars if n not in reads.parameters and n not in reads.tensors]
    names = {
        **_given_out(scalars, [n for n in numbers if n not in parameters], "number"),
        **_given_out(reads.parameters, parameters, "meta-parameter"),
        **_given_out(reads.tensors, tensors, "tensor"),
    }
    return ast.unparse(_Renamer(names).visit(tree))


def _given_out(names: Sequence[str], own: Sequence[str], kind: str) -> dict[str, str]:
    if names and not own:
        raise AdviceError(f"the kernel has no {kind} that {names[0]} could stand for")
    return {name: own[i % len(own)] for i, name in enumerate(names)}


class _NameReader(ast.NodeVisitor):
    """Names that a module reads, in their order; of arguments, those with attributes are tensors."""

    def __init__(self) -> None:
        self.parameters: list[str] = []
        self.tensors: list[str] = []
        self.scalars: list[str] = []

    def visit_Attribute(self, node: ast.Attribute) -> None:
        owner = node.value
        if _is_name(owner, "config") and node.attr not in LAUNCH_OPTIONS:
            _enter(self.parameters, node.attr)
        elif _is_name(owner, "args"):
            _enter(self.scalars, node.attr)
        elif isinstance(owner, ast.Attribute) and _is_name(owner.value, "args"):
            _enter(self.tensors, owner.attr)
        else:
            self.generic_visit(node)


class _Renamer(ast.NodeTransformer):
    def __init__(self, names: dict[str, str]) -> None:
        self.names = names

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if _is_name(node.value, "config") or _is_name(node.value, "args"):
            return ast.Attribute(node.value, self.names.get(node.attr, node.attr))
        return self.generic_visit(node)


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _enter(names: list[str], name: str) -> None:
    if name not in names:
        names.append(name)


def shared_names(skeleton: str, question: str) -> float:
    """Share of a skeleton's distinct words that the question has too: a choice without any model."""
    words = set(re.findall(r"[A-Za-z_]\w+", skeleton))
    return len(words & set(re.findall(r"[A-Za-z_]\w+", question))) / max(1, len(words))
