"""Facts of a function's values that its text shows: shapes, float32, where they come from.

The flow of control is ignored: a fact about a name holds for every assignment of it, or is not known.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from forecast_autotune.python_parser import parse_expression
from forecast_harness.authors.triton.analysis.source_unit import (
    Block,
    Function,
    SourceUnit,
    arguments,
    assigned_names,
    blocks,
    every_node,
    nodes_in_order,
    read_names,
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
    rows = [("1",) * (rank - len(s)) + s for s in shapes]
    sides = []
    for column in zip(*rows, strict=True):
        sizes = {c for c in column if c != "1"}
        if len(sizes) > 1:
            return None
        sides.append(min(sizes, default="1"))
    return tuple(sides)


def indexed_shape(shape: BlockShape | None, index: ast.expr) -> BlockShape | None:
    """The shape of `x[index]` for indices that add dimensions; None for others."""
    if shape is None or shape == UNKNOWN_SHAPE:
        return shape
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    sides, result = list(shape), []
    for part in parts:
        if isinstance(part, ast.Constant) and part.value is None:
            result.append("1")
        elif isinstance(part, ast.Slice) and part.lower is part.upper is part.step is None and sides:
            result.append(sides.pop(0))
        else:
            return None
    return tuple(result + sides)


def arange_side(bounds: Sequence[ast.expr]) -> str:
    """The side of `arange(first, last)`."""
    first, last = bounds
    if isinstance(first, ast.Constant) and first.value == 0:
        return ast.unparse(last)
    return f"{ast.unparse(last)} - {ast.unparse(first)}"


def keyword(node: ast.Call, name: str) -> ast.expr | None:
    """A keyword's value; None if it is not given."""
    return next((k.value for k in node.keywords if k.arg == name), None)


def argument(node: ast.Call, position: int, name: str) -> ast.expr | None:
    """An argument of a call, by position or name; None if it is not given."""
    return node.args[position] if len(node.args) > position else keyword(node, name)


def reduced_axis(node: ast.Call, operands: Sequence[ast.expr]) -> int | str | None:
    """The axis of a reduction; None for all of them, a text where it is no plain number."""
    axis = operands[1] if len(operands) > 1 else keyword(node, "axis")
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
    axis = argument(call, 0, "axis")
    return axis.value if isinstance(axis, ast.Constant) and isinstance(axis.value, int) else -1


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
        values = self.definitions.get(name, [])
        return values[0] if len(values) == 1 and name not in self.parameters else None

    # --- shapes ---

    @cached_property
    def targets(self) -> frozenset[str]:
        """Names that count loops."""
        loops = [n for n in ast.walk(self.function) if isinstance(n, ast.For)]
        return frozenset(name for loop in loops for name in assigned_names(loop.target))

    @cached_property
    def _shapes(self) -> dict[str, BlockShape | None]:
        by_name: dict[str, BlockShape | None] = {name: () for name in (*self.targets, *self.parameters)}
        # The shapes of names only grow from "not seen yet"; a few rounds settle loop-carried ones.
        for _ in range(4):
            before = dict(by_name)
            for name, values in self.definitions.items():
                shapes = [self._shape(v, by_name) for v in values if v is not None]
                definite = [s for s in shapes if s != UNKNOWN_SHAPE]
                if name in self.parameters or name in self.targets:
                    definite.append(())
                if definite:
                    by_name[name] = common_shape(definite)
            if by_name == before:
                break
        return by_name

    def shape(self, node: ast.expr) -> BlockShape | None:
        """Shape of an expression; None if it cannot be told."""
        result = self._shape(node, self._shapes)
        return None if result == UNKNOWN_SHAPE else result

    def _shape(self, node: ast.expr, by_name: dict[str, BlockShape | None]) -> BlockShape | None:
        if isinstance(node, ast.Constant):
            return ()
        if isinstance(node, ast.Name):
            return by_name.get(node.id, UNKNOWN_SHAPE if node.id in self.definitions else ())
        if isinstance(node, ast.BinOp):
            return self._cast([node.left, node.right], by_name)
        if isinstance(node, ast.UnaryOp):
            return self._shape(node.operand, by_name)
        if isinstance(node, ast.Compare):
            return self._cast([node.left, *node.comparators], by_name)
        if isinstance(node, ast.IfExp):
            return common_shape([self._shape(node.body, by_name), self._shape(node.orelse, by_name)])
        if isinstance(node, ast.Subscript):
            return indexed_shape(self._shape(node.value, by_name), node.slice)
        return self._call_shape(node, by_name) if isinstance(node, ast.Call) else None

    def _call_shape(self, node: ast.Call, by_name: dict[str, BlockShape | None]) -> BlockShape | None:
        name, operands = self.unit.callee_name(node), list(node.args)
        method = self.unit.method_name(node)
        if method and isinstance(node.func, ast.Attribute):
            name, operands = method, [node.func.value, *operands]
            if method == "to":
                return self._shape(operands[0], by_name)
        if name in _SCALAR_CALLS or _is_infinity(node):
            return ()
        if name == "arange" and len(operands) == 2:
            return (arange_side(operands),)
        if name in ("zeros", "full"):
            sides = operands[0] if operands else keyword(node, "shape")
            return tuple(map(ast.unparse, sides.elts)) if isinstance(sides, ast.Tuple | ast.List) else None
        if name == "zeros_like" and operands:
            return self._shape(operands[0], by_name)
        if name == "load" and operands:
            mask = operands[1] if len(operands) > 1 else keyword(node, "mask")
            return self._cast([operands[0], *([mask] if mask else [])], by_name)
        if name in ("max", "min") and len(operands) > 1 and isinstance(node.func, ast.Name):
            return self._cast(operands, by_name)
        if name in _REDUCTIONS and operands:
            return self._reduction_shape(node, operands, by_name)
        if name in ELEMENTWISE or name in ("max", "min", "abs") or self.unit.is_library_call(node):
            return self._cast([*operands, *(k.value for k in node.keywords)], by_name)
        return None

    def _reduction_shape(
        self, node: ast.Call, operands: list[ast.expr], by_name: dict[str, BlockShape | None]
    ) -> BlockShape | None:
        shape, axis = self._shape(operands[0], by_name), reduced_axis(node, operands)
        if shape is None or shape == UNKNOWN_SHAPE or keyword(node, "keep_dims") is not None:
            return None if shape != UNKNOWN_SHAPE else shape
        if axis is None:
            return ()
        if not isinstance(axis, int) or not -len(shape) <= axis < len(shape):
            return None
        sides = list(shape)
        del sides[axis]
        return tuple(sides)

    def _cast(self, nodes: Sequence[ast.expr], by_name: dict[str, BlockShape | None]) -> BlockShape | None:
        shapes = [self._shape(n, by_name) for n in nodes]
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
        floats = {
            n for n, values in self.definitions.items() if n not in self.parameters and None not in values
        }
        while True:
            wrong = {n for n in floats if not all(self._may_be_float(v, floats) for v in self.definitions[n])}
            if not wrong:
                # By induction over the execution: what a name is first given depends on earlier names only.
                return floats
            floats -= wrong

    def _may_be_float(self, value: ast.expr | None, floats: set[str]) -> bool:
        # A Python float that a block or scalar begins with becomes float32.
        begins = isinstance(value, ast.Constant) and isinstance(value.value, float)
        return value is not None and (begins or _is_infinity(value) or self._float(value, floats))

    def is_float32(self, node: ast.expr) -> bool:
        """Whether an expression is certainly a float32 block or scalar."""
        return self._float(node, self._floats)

    def _float(self, node: ast.expr, floats: set[str]) -> bool:
        if isinstance(node, ast.Name):
            return node.id in floats
        if isinstance(node, ast.UnaryOp):
            return isinstance(node.op, ast.USub) and self._float(node.operand, floats)
        if isinstance(node, ast.Subscript):
            return self._float(node.value, floats)
        if isinstance(node, ast.BinOp):
            sides = [node.left, node.right]
            arithmetic = isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.Div)
            return (
                arithmetic
                and any(self._float(s, floats) for s in sides)
                and all(self._float(s, floats) or self._neutral(s) for s in sides)
            )
        if not isinstance(node, ast.Call):
            return False
        return self._float_call(node, floats)

    def _float_call(self, node: ast.Call, floats: set[str]) -> bool:
        if self.unit.method_name(node) == "to" and len(node.args) == 1:
            return self.is_float32_type(node.args[0])
        name = self.unit.callee_name(node)
        if name in ("zeros", "full", "cast"):
            dtype = keyword(node, "dtype") or (node.args[-1] if len(node.args) > 1 else None)
            return dtype is not None and self.is_float32_type(dtype)
        if name == "dot":
            acc = node.args[2] if len(node.args) > 2 else keyword(node, "acc")
            return acc is not None and self._float(acc, floats)
        if name == "load" and node.args and self._float32:
            roots = self.root_parameters(node.args[0])
            return roots is not None and roots <= self._float32
        if (name in _TYPE_PRESERVING or self.unit.is_library_call(node)) and node.args:
            operands = (
                node.args[1:] if name == "where" else node.args[:1] if name in _REDUCTIONS else node.args
            )
            return any(self._float(a, floats) for a in operands) and all(
                self._float(a, floats) or self._neutral(a) for a in operands
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
        queue: list[ast.AST] = [node]
        while queue:
            tree = queue.pop()
            for n in ast.walk(tree):
                if self.unit.callee_name(n) == "program_id":
                    origins.add(f"pid {axis_of(n)}")
                if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and n.id not in origins:
                    origins.add(n.id)
                    queue += [v for v in self.definitions.get(n.id, []) if v is not None]
        return frozenset(origins)

    def root_parameters(self, pointer: ast.expr) -> frozenset[str] | None:
        """Parameters that an address is formed from by adding; None if it cannot be told.

        Integers that are only ever added count, too: a set may be too large, never too small.
        """
        if any(isinstance(n, ast.Attribute) and n.attr == "pointer_type" for n in ast.walk(self.function)):
            return None  # addresses that are loaded from memory
        parameters: set[str] = set()
        ids: set[str] = set()
        queue = [pointer]
        while queue:
            node = queue.pop()
            if isinstance(node, ast.Name) and node.id not in ids:
                ids.add(node.id)
                values = self.definitions.get(node.id, [])
                if None in values and node.id not in self.targets:
                    return None
                queue += [v for v in values if v is not None]
                if node.id in self.parameters and node.id not in self._counts:
                    parameters.add(node.id)
            queue += self._addends(node)
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


# --- loops ---


_EXIT_STATEMENTS = (ast.Break, ast.Continue, ast.Return)


@dataclass(frozen=True)
class RangeLoop:
    """A `for` over `range` or `tl.range` with one counter."""

    unit: SourceUnit
    function: Function
    node: ast.For
    block: Block
    """The list of statements that holds the loop."""
    outer: bool
    """Whether the loop stands inside another loop."""

    @property
    def range_call(self) -> ast.Call:
        """The call of `range`."""
        assert isinstance(self.node.iter, ast.Call)
        return self.node.iter

    @property
    def counter(self) -> str:
        """Name of the counter."""
        assert isinstance(self.node.target, ast.Name)
        return self.node.target.id

    @property
    def range_bounds(self) -> tuple[str, str, str]:
        """First value, end and step as texts."""
        texts = [ast.unparse(a) for a in self.range_call.args]
        keywords = {k.arg: ast.unparse(k.value) for k in self.range_call.keywords}
        if len(texts) == 1:
            return "0", texts[0], keywords.get("step", "1")
        return texts[0], texts[1], texts[2] if len(texts) > 2 else keywords.get("step", "1")

    @property
    def options(self) -> dict[str, ast.expr]:
        """Keywords of `tl.range`, without the extent."""
        return {
            k.arg: k.value
            for k in self.range_call.keywords
            if k.arg and k.arg not in ("arg1", "arg2", "step")
        }

    @property
    def innermost(self) -> bool:
        """Whether no other loop runs inside it, helpers included."""
        unit = self.unit

        def has_loop(body: Block) -> bool:
            loops = (n for n in every_node(body) if isinstance(n, ast.For | ast.While))
            return any(unit.callee_name(getattr(n, "iter", n)) != "static_range" for n in loops)

        return not _holds_anywhere(has_loop, unit, self.node.body)

    @property
    def may_exit_early(self) -> bool:
        """Whether control can leave an iteration or the loop early."""
        return bool(self.node.orelse) or any(isinstance(n, _EXIT_STATEMENTS) for n in ast.walk(self.node))

    @property
    def has_dots(self) -> bool:
        """Whether an iteration multiplies matrices, helpers included."""
        unit = self.unit
        return _holds_anywhere(lambda body: bool(unit.calls(body, "dot", "dot_scaled")), unit, self.node.body)

    @property
    def carried_names(self) -> set[str]:
        """Names whose value goes from one iteration into the next."""
        current: set[str] = {self.counter}
        names: set[str] = set()
        targets = set(assigned_names(self.node.body))
        for statement in self.node.body:
            names |= (read_names(statement) & targets) - current
            if not isinstance(statement, ast.If | ast.While | ast.For):
                current |= set(assigned_names(statement))
            elif isinstance(statement, ast.If):
                current |= set(assigned_names(statement.body)) & set(assigned_names(statement.orelse))
        return names

    @property
    def ascending(self) -> bool:
        """Whether the step is certainly positive: a tile is never empty."""
        step = self.range_bounds[2]
        expression = parse_expression(step)
        factors = [n for n in ast.walk(expression) if not isinstance(n, ast.Name | ast.Constant | ast.Load)]
        constant = self.unit.constexprs(self.function)
        return all(isinstance(n, ast.Expression | ast.BinOp | ast.Mult) for n in factors) and all(
            (n.id in constant if isinstance(n, ast.Name) else isinstance(n.value, int) and n.value > 0)
            for n in ast.walk(expression)
            if isinstance(n, ast.Name | ast.Constant)
        )

    def used_after(self, names: set[str]) -> bool:
        """Whether the function reads one of these names outside of this loop."""
        inside = {id(n) for n in ast.walk(self.node)}
        return any(
            isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and n.id in names and id(n) not in inside
            for n in ast.walk(self.function)
        )


def loops(unit: SourceUnit, function: Function) -> Iterator[RangeLoop]:
    """Every `range` loop of a function, outer ones first."""
    inner = {
        id(n)
        for loop in ast.walk(function)
        if isinstance(loop, ast.For | ast.While)
        for s in loop.body
        for n in ast.walk(s)
    }
    for block in blocks(function):
        for statement in block:
            if (
                isinstance(statement, ast.For)
                and isinstance(statement.target, ast.Name)
                and unit.callee_name(statement.iter) == "range"
                and isinstance(statement.iter, ast.Call)
                and 1 <= len(statement.iter.args) <= 3
                and not any(isinstance(a, ast.Starred) for a in statement.iter.args)
                and not any(k.arg in (None, "arg1", "arg2") for k in statement.iter.keywords)
            ):
                yield RangeLoop(unit, function, statement, block, id(statement) in inner)


def _holds_anywhere(
    test: Callable[[Block], bool], unit: SourceUnit, body: Block, helpers: frozenset[str] = frozenset()
) -> bool:
    """Whether a test holds of statements, or of the body of a helper that they call."""
    if test(body):
        return True
    names = {c.func.id for s in body for c in unit.helper_calls(s) if isinstance(c.func, ast.Name)} - helpers
    return any(_holds_anywhere(test, unit, unit.functions[n].body, helpers | names) for n in names)


@dataclass(frozen=True)
class MemoryAccess:
    """A load, store or atomic through an address, not through a descriptor."""

    call: ast.Call
    kind: str
    """`load`, `store` or `atomic`."""
    pointer: ast.expr
    mask: ast.expr | None

    @property
    def plain(self) -> bool:
        """A load or store whose mask, if any, is a mask (block pointers are checked by dimensions)."""
        keywords = {k.arg for k in self.call.keywords}
        return self.kind in ("load", "store") and not keywords & {
            "boundary_check",
            "padding_option",
            "volatile",
            None,
        }


def keep_conditions(call: ast.Call, kind: str, rest: Sequence[ast.expr]) -> None:
    """Leave of a load's or store's mask only these conditions, in place; without any, `other` goes too."""
    position = 1 if kind == "load" else 2
    mask: ast.expr | None = None
    for test in rest:
        mask = test if mask is None else ast.BinOp(mask, ast.BitAnd(), test)
    call.keywords = [k for k in call.keywords if k.arg != "mask" and (k.arg != "other" or mask is not None)]
    other = call.args[position + 1 :]
    call.args = call.args[:position]
    if mask is not None:
        call.keywords.append(ast.keyword("mask", mask))
        call.keywords += [ast.keyword("other", o) for o in other]


def accesses(unit: SourceUnit, node: ast.AST | Block) -> list[MemoryAccess]:
    """Memory accesses of a tree in the order of the text; those of helpers are not among them."""
    results = []
    for root in node if isinstance(node, list) else [node]:
        for n in nodes_in_order(root):
            name = unit.callee_name(n)
            if not isinstance(n, ast.Call) or not n.args:
                continue
            if name == "load":
                results.append(MemoryAccess(n, "load", n.args[0], argument(n, 1, "mask")))
            elif name == "store":
                results.append(MemoryAccess(n, "store", n.args[0], argument(n, 2, "mask")))
            elif name.startswith("atomic_"):
                at = 3 if name == "atomic_cas" else 2
                results.append(MemoryAccess(n, "atomic", n.args[0], argument(n, at, "mask")))
    return results


def always_executes(statement: ast.AST, call: ast.Call) -> bool:
    """Whether a statement that is executed always makes this call: it is in no branch of an expression."""
    maybe = (ast.IfExp, ast.BoolOp, ast.Lambda, ast.ListComp, ast.GeneratorExp)
    branches = [n for n in ast.walk(statement) if isinstance(n, maybe)]
    return not any(inner is call for branch in branches for inner in ast.walk(branch))


def all_accesses_known(unit: SourceUnit, node: ast.AST | Block) -> bool:
    """Whether every memory access of a tree is one that `accesses` finds."""
    ids = {id(a.call) for a in accesses(unit, node)}
    for n in every_node(node):
        if isinstance(n, ast.Call) and id(n) not in ids and unit.effect(n) & {"load", "store", "atomic"}:
            return False
    return True


def loads_may_move(facts: FunctionFacts, body: Block) -> bool:
    """Whether no memory that the statements write is read by them: loads may move over the stores.

    Arguments of different names are taken not to overlap: no variant is launched where a tensor that is
    written overlaps another one (`forecast_integrations.triton.variants.loading`).
    """
    if not all_accesses_known(facts.unit, body):
        return not facts.unit.effects(body) & {"store", "atomic", "other"}
    if "other" in facts.unit.effects(body):
        return False
    read_roots, write_roots = set[str](), set[str]()
    for access in accesses(facts.unit, body):
        roots = facts.root_parameters(access.pointer)
        if access.kind != "load" and roots is None:
            return False
        if access.kind == "load":
            read_roots |= roots or {"?"}
        else:
            write_roots |= roots or set()
    return not write_roots or ("?" not in read_roots and not read_roots & write_roots)
