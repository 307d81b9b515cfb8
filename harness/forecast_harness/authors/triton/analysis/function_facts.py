"""Facts of a function's values that its text shows: shapes, float32, where they come from.

The flow of control is ignored: a fact about a name holds for every assignment of it, or is not known.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import cached_property

from forecast_harness.authors.triton.analysis.source_unit import (
    Function,
    SourceUnit,
    arguments,
    assigned_names,
)

BlockShape = tuple[str, ...]
"""One text per dimension, `1` for a broadcast one; the empty tuple is a scalar."""

UNKNOWN_SHAPE: BlockShape = ("?",)
"""Shape of names that nothing is known of yet."""


def common_shape(shapes: Sequence[BlockShape | None]) -> BlockShape | None:
    """The shape if all are the same; else None."""
    first = shapes[0]
    return first if all(s == first for s in shapes) else None


def broadcast_shape(shapes: Sequence[BlockShape]) -> BlockShape | None:
    """The shape that shapes broadcast to; None where they do not fit. Missing dimensions are in front."""
    rank = max(map(len, shapes))
    padded = [("1",) * (rank - len(s)) + s for s in shapes]
    sides = []
    for column in zip(*padded, strict=True):
        given = {c for c in column if c != "1"}
        if len(given) > 1:
            return None
        sides.append(min(given, default="1"))
    return tuple(sides)


def indexed_shape(shape: BlockShape | None, index: ast.expr) -> BlockShape | None:
    """The shape of `x[index]` for indices that add dimensions; None for others."""
    if shape is None or shape == UNKNOWN_SHAPE:
        return shape
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    left, result = list(shape), []
    for part in parts:
        if isinstance(part, ast.Constant) and part.value is None:
            result.append("1")
        elif isinstance(part, ast.Slice) and part.lower is part.upper is part.step is None and left:
            result.append(left.pop(0))
        else:
            return None
    return tuple(result + left)


def arange_side(given: Sequence[ast.expr]) -> str:
    """The side of `arange(first, last)`."""
    first, last = given
    if isinstance(first, ast.Constant) and first.value == 0:
        return ast.unparse(last)
    return f"{ast.unparse(last)} - {ast.unparse(first)}"


def keyword(node: ast.Call, name: str) -> ast.expr | None:
    """A keyword's value; None if it is not given."""
    return next((k.value for k in node.keywords if k.arg == name), None)


def argument(node: ast.Call, position: int, name: str) -> ast.expr | None:
    """An argument of a call, by position or name; None if it is not given."""
    return node.args[position] if len(node.args) > position else keyword(node, name)


def reduced_axis(node: ast.Call, given: Sequence[ast.expr]) -> int | str | None:
    """The axis of a reduction; None for all of them, a text where it is no plain number."""
    axis = given[1] if len(given) > 1 else keyword(node, "axis")
    if axis is None or (isinstance(axis, ast.Constant) and axis.value is None):
        return None
    if isinstance(axis, ast.Constant) and isinstance(axis.value, int):
        return axis.value
    if (
        isinstance(axis, ast.UnaryOp)
        and isinstance(axis.op, ast.USub)
        and isinstance(axis.operand, ast.Constant)
    ):
        return -int(axis.operand.value)  # type: ignore[arg-type]
    return ast.unparse(axis)


def axis_of(call: ast.AST) -> int:
    """The axis of a `program_id` or `num_programs` call; -1 if it is no plain number."""
    assert isinstance(call, ast.Call)
    given = argument(call, 0, "axis")
    return given.value if isinstance(given, ast.Constant) and isinstance(given.value, int) else -1


ELEMENTWISE = frozenset(
    (
        *("abs", "cast", "ceil", "cdiv", "clamp", "cos", "div_rn", "erf", "exp", "exp2", "fdiv", "floor"),
        *("fma", "log", "log2", "max_constancy", "max_contiguous", "maximum", "minimum", "multiple_of"),
        *("rsqrt", "sigmoid", "sin", "sqrt", "sqrt_rn", "umulhi", "where"),
    )
)
_REDUCTIONS = frozenset(("sum", "max", "min", "argmax", "argmin", "xor_sum"))
_SCALAR_CALLS = frozenset(("program_id", "num_programs", "len"))
_TYPE_PRESERVING = ELEMENTWISE - {"cast", "cdiv", "floor", "ceil", "umulhi"} | {
    "sum",
    "max",
    "min",
    "softmax",
}


class FunctionFacts:
    """Facts about one function."""

    def __init__(self, unit: SourceUnit, function: Function, float32: frozenset[str] = frozenset()) -> None:
        """`float32` names parameters that are known to be float32 tensors."""
        self.unit, self.function, self._float32 = unit, function, float32
        self.parameters = [a.arg for a in arguments(function)]
        self.constant = unit.constexprs(function)

    @cached_property
    def definitions(self) -> dict[str, list[ast.expr | None]]:
        """The values assigned to each name; None for a loop's target and for parts of a tuple."""
        values: dict[str, list[ast.expr | None]] = {}
        for node in ast.walk(self.function):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    for name, value in _target_values(target, node.value):
                        values.setdefault(name, []).append(value)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
                values.setdefault(node.target.id, []).append(node.value)
            elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                value = ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value)
                values.setdefault(node.target.id, []).append(value)
            elif isinstance(node, ast.For):
                for name in assigned_names(node.target):
                    values.setdefault(name, []).append(None)
            elif isinstance(node, ast.NamedExpr) and isinstance(node.target, ast.Name):
                values.setdefault(node.target.id, []).append(node.value)
        return values

    def single_value(self, name: str) -> ast.expr | None:
        """The value of a name that is assigned exactly once and is no parameter; else None."""
        given = self.definitions.get(name, [])
        return given[0] if len(given) == 1 and name not in self.parameters else None

    # --- shapes ---

    @cached_property
    def targets(self) -> frozenset[str]:
        """Names that count loops."""
        loops = [n for n in ast.walk(self.function) if isinstance(n, ast.For)]
        return frozenset(name for loop in loops for name in assigned_names(loop.target))

    @cached_property
    def _shapes(self) -> dict[str, BlockShape | None]:
        known: dict[str, BlockShape | None] = {name: () for name in (*self.targets, *self.parameters)}
        # The shapes of names only grow from "not seen yet"; a few rounds settle loop-carried ones.
        for _ in range(4):
            before = dict(known)
            for name, values in self.definitions.items():
                shapes = [self._shape(v, known) for v in values if v is not None]
                seen = [s for s in shapes if s != UNKNOWN_SHAPE]
                if name in self.parameters or name in self.targets:
                    seen.append(())
                if seen:
                    known[name] = common_shape(seen)
            if known == before:
                break
        return known

    def shape(self, node: ast.expr) -> BlockShape | None:
        """Shape of an expression; None if it cannot be told."""
        result = self._shape(node, self._shapes)
        return None if result == UNKNOWN_SHAPE else result

    def _shape(self, node: ast.expr, known: dict[str, BlockShape | None]) -> BlockShape | None:
        if isinstance(node, ast.Constant):
            return ()
        if isinstance(node, ast.Name):
            return known.get(node.id, UNKNOWN_SHAPE if node.id in self.definitions else ())
        if isinstance(node, ast.BinOp):
            return self._cast([node.left, node.right], known)
        if isinstance(node, ast.UnaryOp):
            return self._shape(node.operand, known)
        if isinstance(node, ast.Compare):
            return self._cast([node.left, *node.comparators], known)
        if isinstance(node, ast.IfExp):
            return common_shape([self._shape(node.body, known), self._shape(node.orelse, known)])
        if isinstance(node, ast.Subscript):
            return indexed_shape(self._shape(node.value, known), node.slice)
        return self._call_shape(node, known) if isinstance(node, ast.Call) else None

    def _call_shape(self, node: ast.Call, known: dict[str, BlockShape | None]) -> BlockShape | None:
        name, given = self.unit.callee_name(node), list(node.args)
        method = self.unit.method_name(node)
        if method and isinstance(node.func, ast.Attribute):
            name, given = method, [node.func.value, *given]
            if method == "to":
                return self._shape(given[0], known)
        if name in _SCALAR_CALLS or _is_infinity(node):
            return ()
        if name == "arange" and len(given) == 2:
            return (arange_side(given),)
        if name in ("zeros", "full"):
            sides = given[0] if given else keyword(node, "shape")
            return tuple(map(ast.unparse, sides.elts)) if isinstance(sides, ast.Tuple | ast.List) else None
        if name == "zeros_like" and given:
            return self._shape(given[0], known)
        if name == "load" and given:
            mask = given[1] if len(given) > 1 else keyword(node, "mask")
            return self._cast([given[0], *([mask] if mask else [])], known)
        if name in ("max", "min") and len(given) > 1 and isinstance(node.func, ast.Name):
            return self._cast(given, known)
        if name in _REDUCTIONS and given:
            return self._reduced(node, given, known)
        if name in ELEMENTWISE or name in ("max", "min", "abs") or self.unit.is_library_call(node):
            return self._cast([*given, *(k.value for k in node.keywords)], known)
        return None

    def _reduced(
        self, node: ast.Call, given: list[ast.expr], known: dict[str, BlockShape | None]
    ) -> BlockShape | None:
        shape, axis = self._shape(given[0], known), reduced_axis(node, given)
        if shape is None or shape == UNKNOWN_SHAPE or keyword(node, "keep_dims") is not None:
            return None if shape != UNKNOWN_SHAPE else shape
        if axis is None:
            return ()
        if not isinstance(axis, int) or not -len(shape) <= axis < len(shape):
            return None
        left = list(shape)
        del left[axis]
        return tuple(left)

    def _cast(self, nodes: Sequence[ast.expr], known: dict[str, BlockShape | None]) -> BlockShape | None:
        shapes = [self._shape(n, known) for n in nodes]
        if None in shapes:
            return None
        return (
            UNKNOWN_SHAPE
            if UNKNOWN_SHAPE in shapes
            else broadcast_shape([s for s in shapes if s is not None])
        )

    # --- float32 ---

    @cached_property
    def _floats(self) -> set[str]:
        """Names that hold float32 whenever they are assigned; found from the top down."""
        held = {
            n for n, values in self.definitions.items() if n not in self.parameters and None not in values
        }
        while True:
            wrong = {n for n in held if not all(self._may_be_float(v, held) for v in self.definitions[n])}
            if not wrong:
                # By induction over the execution: what a name is first given depends on earlier names only.
                return held
            held -= wrong

    def _may_be_float(self, value: ast.expr | None, held: set[str]) -> bool:
        # A Python float that a block or scalar begins with becomes float32.
        begins = isinstance(value, ast.Constant) and isinstance(value.value, float)
        return value is not None and (begins or _is_infinity(value) or self._float(value, held))

    def is_float32(self, node: ast.expr) -> bool:
        """Whether an expression is certainly a float32 block or scalar."""
        return self._float(node, self._floats)

    def _float(self, node: ast.expr, held: set[str]) -> bool:
        if isinstance(node, ast.Name):
            return node.id in held
        if isinstance(node, ast.UnaryOp):
            return isinstance(node.op, ast.USub) and self._float(node.operand, held)
        if isinstance(node, ast.Subscript):
            return self._float(node.value, held)
        if isinstance(node, ast.BinOp):
            sides = [node.left, node.right]
            arithmetic = isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.Div)
            return (
                arithmetic
                and any(self._float(s, held) for s in sides)
                and all(self._float(s, held) or self._neutral(s) for s in sides)
            )
        if not isinstance(node, ast.Call):
            return False
        return self._float_call(node, held)

    def _float_call(self, node: ast.Call, held: set[str]) -> bool:
        if self.unit.method_name(node) == "to" and len(node.args) == 1:
            return self.is_float32_type(node.args[0])
        name = self.unit.callee_name(node)
        if name in ("zeros", "full", "cast"):
            given = keyword(node, "dtype") or (node.args[-1] if len(node.args) > 1 else None)
            return given is not None and self.is_float32_type(given)
        if name == "dot":
            into = node.args[2] if len(node.args) > 2 else keyword(node, "acc")
            return into is not None and self._float(into, held)
        if name == "load" and node.args and self._float32:
            roots = self.root_parameters(node.args[0])
            return roots is not None and roots <= self._float32
        if (name in _TYPE_PRESERVING or self.unit.is_library_call(node)) and node.args:
            given_args = (
                node.args[1:] if name == "where" else node.args[:1] if name in _REDUCTIONS else node.args
            )
            return any(self._float(a, held) for a in given_args) and all(
                self._float(a, held) or self._neutral(a) for a in given_args
            )
        return False

    def _neutral(self, node: ast.expr) -> bool:
        """A constant, or a scalar parameter: Triton passes Python's numbers as int32, int64 and float32."""
        if isinstance(node, ast.Constant):
            return isinstance(node.value, int | float)
        if isinstance(node, ast.UnaryOp):
            return self._neutral(node.operand)
        if _is_infinity(node):
            return True
        return isinstance(node, ast.Name) and node.id in self.parameters and node.id not in self.definitions

    def is_float32_type(self, node: ast.expr) -> bool:
        """Whether a text names float32."""
        return isinstance(node, ast.Attribute) and ast.unparse(node) == f"{self.unit.tl}.float32"

    # --- where values come from ---

    def sources(self, node: ast.AST) -> frozenset[str]:
        """Names and `program_id` axes (as `pid 0`) that an expression depends on, through assignments."""
        origins: set[str] = set()
        left: list[ast.AST] = [node]
        while left:
            one = left.pop()
            for n in ast.walk(one):
                if self.unit.callee_name(n) == "program_id":
                    origins.add(f"pid {axis_of(n)}")
                if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and n.id not in origins:
                    origins.add(n.id)
                    left += [v for v in self.definitions.get(n.id, []) if v is not None]
        return frozenset(origins)

    def root_parameters(self, pointer: ast.expr) -> frozenset[str] | None:
        """Parameters that an address is formed from by adding; None if it cannot be told.

        Integers that are only ever added count, too: a set may be too large, never too small.
        """
        if any(isinstance(n, ast.Attribute) and n.attr == "pointer_type" for n in ast.walk(self.function)):
            return None  # addresses that are loaded from memory
        parameters: set[str] = set()
        seen: set[str] = set()
        left = [pointer]
        while left:
            node = left.pop()
            if isinstance(node, ast.Name) and node.id not in seen:
                seen.add(node.id)
                values = self.definitions.get(node.id, [])
                if None in values and node.id not in self.targets:
                    return None
                left += [v for v in values if v is not None]
                if node.id in self.parameters and node.id not in self._counts:
                    parameters.add(node.id)
            left += self._addends(node)
        return frozenset(parameters) or None

    def _addends(self, node: ast.expr) -> list[ast.expr]:
        """Expressions that may hold the address within one that does."""
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return [node.left, node.right]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
            return [node.left]
        if isinstance(node, ast.Subscript):
            return [node.value]
        if isinstance(node, ast.IfExp):
            return [node.body, node.orelse]
        if not isinstance(node, ast.Call):
            return []
        if self.unit.method_name(node) and isinstance(node.func, ast.Attribute):
            return [node.func.value]
        name = self.unit.callee_name(node)
        if name in ("make_block_ptr", "make_tensor_descriptor", "advance", "multiple_of", "max_contiguous"):
            return [*node.args[:1], *(k.value for k in node.keywords if k.arg == "base")]
        own = isinstance(node.func, ast.Name) and node.func.id in self.unit.functions
        return list(node.args) if own or name == "where" else []

    @cached_property
    def _counts(self) -> frozenset[str]:
        """Parameters that are compared, multiplied or counted to, which no address is."""
        counts: set[str] = set(self.constant)
        for n in ast.walk(self.function):
            sides: list[ast.expr] = []
            if isinstance(n, ast.Compare):
                sides = [n.left, *n.comparators]
            elif isinstance(n, ast.BinOp) and not isinstance(n.op, ast.Add | ast.Sub):
                sides = [n.left, n.right]
            elif isinstance(n, ast.Call) and self.unit.callee_name(n) in (
                "range",
                "cdiv",
                "arange",
                "static_range",
            ):
                sides = n.args
            counts |= {s.id for s in sides if isinstance(s, ast.Name)}
        return frozenset(counts)


def _is_infinity(node: ast.expr) -> bool:
    """`float("-inf")` and the like."""
    if isinstance(node, ast.UnaryOp):
        return _is_infinity(node.operand)
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "float"


def _target_values(target: ast.expr, value: ast.expr) -> list[tuple[str, ast.expr | None]]:
    if isinstance(target, ast.Name):
        return [(target.id, value)]
    if isinstance(target, ast.Tuple | ast.List):
        if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts):
            return [p for t, v in zip(target.elts, value.elts, strict=True) for p in _target_values(t, v)]
        return [(name, None) for name in assigned_names(target)]
    return []
