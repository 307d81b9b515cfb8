"""Rules that change one place of a right source, and other values to launch it with.

The rules are of six families, written from the families' names. They, and the values, were frozen before any check was
mended by what survives; they know nothing of the verifier's own draws.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

FAMILIES = ("boundary", "precision", "semantics", "indexing", "synchronisation", "arithmetic")

# --- rules: (family, rule, the text that takes a node's place) of every change of a node ---

NodeChange = tuple[str, str, str]
_INDEX_NAME = re.compile(r"off|idx|index|ptr|row|col|pid|start|inner|where|^[ijkmn]$|block|stride")
_MEMORY_CALLS = {"load", "store", "atomic_add", "make_block_ptr", "advance"}
_WAITS = {"debug_barrier", "synchronize", "join", "wait", "wait_stream", "result", "shutdown"}
# fmt: off
_FUNCTIONS = {
    "max": "min", "maximum": "minimum", "amax": "amin", "sum": "max", "mean": "sum", "exp": "exp2", "log": "log2",
    "rsqrt": "sqrt", "sqrt": "rsqrt", "sigmoid": "tanh", "softmax": "log_softmax", "silu": "gelu", "cumsum": "cumprod",
    "argmax": "argmin", "var": "std", "tril": "triu", "triu": "tril", "logsumexp": "amax", "abs": "square",
}
_NARROWER = {"float32": ("float16", "bfloat16"), "float64": ("float32",), "float": ("half", "bfloat16"), "double": ("float",)}  # noqa: E501
_SPECIAL = {"exp", "softmax", "sum", "mean", "dot", "matmul", "einsum", "rsqrt", "sigmoid", "bmm"}
_IN_PLACE = {"exp", "sub", "mul", "add", "div", "sqrt", "softmax"}
_EDGE = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
_TURNED = {ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
_OPERATORS = {ast.Add: (ast.Sub,), ast.Sub: (ast.Add,), ast.Mult: (ast.Div, ast.Add), ast.Div: (ast.Mult,)}
_SIGNS = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}  # noqa: E501
text = ast.unparse


def changes(node: ast.AST, in_index: bool) -> Iterator[NodeChange]:
    """The changes of one expression or statement; `in_index`: whether it is part of an address or of a size."""
    match node:
        case ast.Compare(left, [op], [right]):
            for table, named in ((_EDGE, ("boundary", "edge")), (_TURNED, ("semantics", "turned comparison"))):
                if new := table.get(type(op)):
                    yield *named, f"({text(ast.Compare(left, [new()], [right]))})"
            if type(op) in _EDGE:
                yield "boundary", "one less", f"({text(left)} {_SIGNS[type(op)]} {text(right)} - 1)"
                yield "boundary", "one more", f"({text(left)} {_SIGNS[type(op)]} {text(right)} + 1)"
        case ast.BinOp(left, ast.BitAnd(), right):
            yield from (("boundary", "half of a mask", text(half)) for half in (left, right))
        case ast.BinOp(left, (ast.FloorDiv() | ast.Mod()) as op, right):
            sign = "%" if isinstance(op, ast.FloorDiv) else "//"
            yield "indexing", "quotient and remainder", f"({text(left)} {sign} {text(right)})"
        case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
            family = "indexing" if in_index else "arithmetic"
            for kind in _OPERATORS[type(op)]:
                yield family, "operator", f"({text(ast.BinOp(left, kind(), right))})"
            yield family, "operand left out", f"({text(left)})"
            if not in_index:
                yield "arithmetic", "operands of a quotient swapped", f"({text(right)} {_SIGNS[type(op)]} {text(left)})"
        case ast.UnaryOp(ast.USub(), operand):
            yield "arithmetic", "sign", text(operand)
        case ast.Constant(float(value)):
            if value not in (0.0, 1.0):
                yield "precision", "constant of two digits", f"{value * 1.01:.2g}"
                yield "arithmetic", "constant doubled", repr(2 * value)
            yield "boundary", "another fill", "1.0" if value == 0.0 else "0.0"
        case ast.Constant(int(value)) if in_index and type(value) is int and 0 <= value < 8:
            yield "indexing", "constant", str(value + 1)
            if value:
                yield "boundary", "constant", str(value - 1)
        case ast.Attribute(ast.Name("tl" | "torch" as module), name) if name in _NARROWER:
            yield from (("precision", f"{narrow} throughout", f"{module}.{narrow}") for narrow in _NARROWER[name])
        case ast.Subscript(value, ast.Tuple([one, two])):
            yield "indexing", "axes of an index swapped", f"{text(value)}[{text(two)}, {text(one)}]"
        case ast.Slice(lower, ast.expr() as upper):
            yield "boundary", "slice", f"{'' if lower is None else text(lower)}:({text(upper)}) - 1"
        case ast.AugAssign(target, _, value):
            yield "synchronisation", "accumulator overwritten", f"{text(target)} = {text(value)}"
            yield "arithmetic", "accumulated with the other sign", f"{text(target)} = {text(target)} - {text(value)}"
        case ast.Call():
            yield from _changed_calls(node)
        case ast.Expr(ast.Call(func)) if text(func).rpartition(".")[2] in _WAITS:
            yield "synchronisation", "wait left out", "pass"


def _changed_calls(node: ast.Call) -> Iterator[NodeChange]:
    function, whole, given = text(node.func), text(node), [text(a) for a in node.args]
    named = {k.arg: text(k.value) for k in node.keywords if k.arg}
    name = function.rpartition(".")[2]
    head = function[: -len(name)]
    is_method = head not in ("", "tl.", "torch.")

    def call(function: str = function, args: Sequence[str] = given, keywords: Mapping[str, str] = named) -> str:
        return f"{function}({', '.join([*args, *(f'{k}={v}' for k, v in keywords.items())])})"

    def without(*names: str) -> dict[str, str]:
        return {k: v for k, v in named.items() if k not in names}

    if name in _FUNCTIONS:
        yield "semantics", "another function", call(head + _FUNCTIONS[name])
    if name in _NARROWER and head:
        yield from (("precision", "narrower cast", call(head + narrow)) for narrow in _NARROWER[name])
    if name in ("to", "float") and is_method:
        yield "precision", "cast left out", head[:-1]
    if name in _SPECIAL:
        for narrow in ("bfloat16", "float16"):
            back = f"(tl.{narrow}).to(tl.float32)" if head == "tl." else f"(torch.{narrow}).float()"
            yield "precision", f"intermediate in {narrow}", f"({whole}).to{back}"
    if name == "dot":
        yield from (("precision", f"product in {kind}", call(keywords={**named, "input_precision": repr(kind)}))
                    for kind in ("tf32", "bf16x3"))
    if "mask" in named:
        yield "boundary", "no mask", call(keywords=without("mask", "other"))
    if "other" in named:
        yield "boundary", "fill left out", call(keywords=without("other"))
    for axis in sorted({"dim", "axis"} & named.keys()):
        yield "indexing", "another axis", call(keywords={**named, axis: "0"})
    if name in _FUNCTIONS and len(given) == 2 and given[1] in ("-1", "0", "1"):
        yield "indexing", "another axis", call(args=[given[0], "1" if given[1] == "0" else "0"])
    if name == "program_id":
        yield "indexing", "another axis of the grid", call(args=["1" if given == ["0"] else "0"])
    if name == "cdiv" and len(given) == 2:
        yield "boundary", "last tile left out", f"(({given[0]}) // ({given[1]}))"
    if name == "range" and len(given) >= 2:
        yield "boundary", "first step left out", call(args=[f"{given[0]} + {(*given, 1)[2]}", *given[1:]])
        yield "boundary", "last step left out", call(args=[given[0], f"{given[1]} - 1", *given[2:]])
    if name in ("where", "gather", "sub", "div") and len(given) >= 2:
        yield "semantics", "operands swapped", call(args=[*given[:-2], given[-1], given[-2]])
    if name in ("transpose", "t", "permute", "trans", "flip") and head:
        yield "indexing", "not transposed", head[:-1] if is_method or not given else given[0]
    if name in ("clone", "contiguous") and head not in ("tl.", "torch."):
        yield "synchronisation", "copy left out", head[:-1]
    if name in _IN_PLACE and is_method:
        yield "synchronisation", "in place", call(f"{head}{name}_")
    if name in ("zeros", "zeros_like", "new_zeros") and head != "tl.":
        yield "synchronisation", "memory not cleared", call(head + name.replace("zeros", "empty"))
    if name == "atomic_add" and len(given) >= 2:
        masked = {k: v for k, v in named.items() if k == "mask"}
        yield "synchronisation", "not atomic", call("tl.store", [given[0], f"tl.load({given[0]}) + {given[1]}"], masked)
        yield "synchronisation", "overwritten", call("tl.store", given[:2], masked)
# fmt: on


class Change(NamedTuple):
    """A source with one place changed by one rule."""

    family: str
    rule: str
    line: int
    source: str


def changed_sources(source: str) -> Iterator[Change]:
    """All changes of a source, each text once."""
    tree = ast.parse(source)
    seen = {text(tree)}
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    for parent in (p for f in functions for one in f.body for p in ast.walk(one)):
        for name, value in ast.iter_fields(parent):
            for number, node in enumerate(value if isinstance(value, list) else [value]):
                if isinstance(node, ast.expr | ast.stmt) and name not in ("annotation", "decorator_list"):
                    for family, rule, new in changes(node, _is_index(parent, name)):
                        if (made := _replaced(tree, parent, name, number, node, new)) not in seen:
                            seen.add(made)
                            yield Change(family, rule, getattr(node, "lineno", 0), made)


def _is_index(parent: ast.AST, name: str) -> bool:
    match parent:
        case ast.Call(function):
            return name == "args" and text(function).rpartition(".")[2] in _MEMORY_CALLS
        case ast.Assign([target, *_]) | ast.AugAssign(target):
            return bool(_INDEX_NAME.search(text(target).lower()))
        case ast.BinOp():
            return bool(_INDEX_NAME.search(text(parent).lower().split("(")[0]))
    return isinstance(parent, ast.Subscript | ast.Slice | ast.Compare | ast.Tuple)


def _replaced(tree: ast.AST, parent: Any, name: str, number: int, node: ast.AST, new: str) -> str:
    """The whole text with `new` for a node; that of the tree where it is no Python."""
    field = getattr(parent, name)
    put = partial(field.__setitem__, number) if isinstance(field, list) else partial(setattr, parent, name)
    try:
        head, tail = (
            ("", "")
            if isinstance(node, ast.stmt)
            else ("x[", "]")
            if isinstance(node, ast.Slice)
            else ("(", ")")
        )
        made: Any = ast.parse(f"{head}{new}{tail}").body[0]
        put(made if not head else made.value if head == "(" else made.value.slice)
        result = text(tree)
        ast.parse(result)
    except (SyntaxError, ValueError):
        put(node)
        result = text(tree)
    put(node)
    return result


# --- values ---

_SCALES = ("x1", "x3", "x0.01", "x10", "negative", "+3", "-3", "nan", "inf", "-inf")
VALUE_KINDS = (*_SCALES, "equal", "spike", "rising", "ties", "cancelling", "integers", "near_overflow")


def drawn_values(kind: str, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Another draw of a floating tensor's values."""
    plain = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    flat, some = plain.reshape(-1), partial(torch.randint, 0, max(1, plain.numel()), generator=generator)
    if kind == "equal":
        flat[:] = flat[:1].clone()
    elif kind == "spike" and flat.numel():
        flat[some((1 + flat.numel() // 64,))] *= 40
    elif kind in ("nan", "inf", "-inf") and flat.numel():
        flat[some((1,))] = float(kind)
    made = {
        "x3": lambda: plain * 3, "x0.01": lambda: plain * 0.01, "x10": lambda: plain * 10, "+3": lambda: plain + 3,
        "-3": lambda: plain - 3, "negative": lambda: -plain.abs(), "rising": lambda: plain.sort(-1).values,
        "ties": plain.round, "cancelling": lambda: plain.sign() * (100 + plain / 16), "integers": (4 * plain).round,
        "near_overflow": lambda: plain.tanh() * min(torch.finfo(tensor.dtype).max / 8, 3e4),
    }.get(kind, lambda: plain)()  # fmt: skip
    return made.to(tensor.dtype)
