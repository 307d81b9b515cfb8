"""Memory written again instead of anew: in-place operations on fresh values, results into destinations."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Sequence

from forecast_harness.authors.torch.rules import ExpressionTerm, term_of
from forecast_harness.authors.torch.source_code import (
    FunctionScope,
    InputFacts,
    ParsedSource,
    TorchEdit,
    is_arithmetic,
    read_expressions,
    statement_lists,
)
from forecast_harness.authors.triton.analysis.source_unit import (
    nodes_in_order,
    replace_statement,
    swap_expressions,
)

_UNARY_OPERATIONS = frozenset(
    [
        "exp",
        "exp2",
        "expm1",
        "log",
        "log2",
        "log1p",
        "sqrt",
        "rsqrt",
        "square",
        "reciprocal",
        "sigmoid",
        "tanh",
        "relu",
        "abs",
        "neg",
        "clamp",
        "tril",
        "triu",
        "erf",
    ]
)
_IN_PLACE_METHODS = {ast.Add: "add_", ast.Sub: "sub_", ast.Mult: "mul_", ast.Div: "div_"}
_OUT_FUNCTIONS = {"Add": "add", "Sub": "sub", "Mult": "mul", "Div": "div", "MatMult": "matmul"}
_REDUCTIONS = frozenset(
    [
        "sum",
        "mean",
        "amax",
        "amin",
        "var",
        "std",
        "prod",
        "norm",
        "logsumexp",
        "linalg.vector_norm",
        "linalg.vecdot",
    ]
)
_ALLOCATING_OPERATIONS = (
    _UNARY_OPERATIONS
    | frozenset(
        [
            "zeros",
            "empty",
            "ones",
            "full",
            "zeros_like",
            "empty_like",
            "clone",
            "einsum",
            "addcmul",
            "addcdiv",
        ]
    )
    | frozenset(("F.silu", "softmax", "F.layer_norm", "F.rms_norm", "addmm", "baddbmm", "cat", "stack"))
)
_VIEW_OPERATIONS = frozenset(
    [
        "view",
        "reshape",
        "permute",
        "transpose",
        "chunk",
        "split",
        "unbind",
        "expand",
        "squeeze",
        "unsqueeze",
        "flatten",
        "narrow",
        "T",
        "mT",
        "unfold",
    ]
)


def operate_in_place(code: ParsedSource, facts: InputFacts) -> Iterator[TorchEdit]:
    """Arithmetic on a value that nothing else holds happens in its own memory."""
    if code.uses_autograd:
        return
    places: list[tuple[ast.expr, ast.expr]] = []
    for function in code.functions:
        scope = FunctionScope(code, function)
        for node in read_expressions(function):
            if (form := _in_place_form(node, code, scope)) is not None:
                places.append((node, form))
    for old, new in places:
        draft = code.copy()
        swap_expressions(draft.tree, {id(draft.twin(old)): copy.deepcopy(new)})
        yield TorchEdit(draft.text(), "written over a value that nothing else holds, not into new memory")
    updates = [
        pair
        for function in code.functions
        for pair in _in_place_updates(function, FunctionScope(code, function))
    ]
    for group in [[u] for u in updates] + ([updates] if len(updates) > 1 else []):
        draft = code.copy()
        for statement, value in group:
            twin = draft.twin(statement)
            twin.value = copy.deepcopy(value)
        yield TorchEdit(draft.text(), "a running value is updated in its own memory")


def write_with_out(code: ParsedSource, facts: InputFacts) -> Iterator[TorchEdit]:
    """`y.copy_(a * b)` and `y[i] = a * b` as operations with `out=`."""
    if code.uses_autograd:
        return
    for function in code.functions:
        for statement in nodes_in_order(function):
            if (write := _destination_write(statement)) is None:
                continue
            target, value = write
            form = term_of(value, code.modules)
            if form.head not in _OUT_FUNCTIONS or len(form.parts) != 2:
                continue
            call = ast.Call(
                ast.Attribute(ast.Name("torch", ast.Load()), _OUT_FUNCTIONS[form.head], ast.Load()),
                [copy.deepcopy(p.node) for p in form.parts],
                [ast.keyword("out", _as_load(target))],
            )
            draft = code.copy()
            assert isinstance(statement, ast.stmt)
            draft.twin(statement).__dict__.update(value=call)
            twin = draft.twin(statement)
            if isinstance(twin, ast.Assign):
                block = next(b for b in statement_lists(draft.tree) if any(s is twin for s in b))
                replace_statement(block, twin, [ast.Expr(call)])
            yield TorchEdit(draft.text(), "the result goes where it belongs without a copy")


def _in_place_form(node: ast.expr, code: ParsedSource, scope: FunctionScope) -> ast.expr | None:
    if is_arithmetic(node) and isinstance(node, ast.BinOp) and type(node.op) in _IN_PLACE_METHODS:
        sides = [(node.left, node.right, _IN_PLACE_METHODS[type(node.op)])]
        if isinstance(node.op, ast.Add | ast.Mult):
            sides.append((node.right, node.left, _IN_PLACE_METHODS[type(node.op)]))
        for value, other, name in sides:
            if (
                not scope.scalar(value)
                and _is_unshared(value, code, scope, node)
                and _result_fits(value, other, code, scope)
            ):
                return _method_call(value, name, [other], [])
        return None
    form = term_of(node, code.modules)
    if isinstance(node, ast.Call) and form.head in _UNARY_OPERATIONS and form.parts:
        value = form.parts[0].node
        if not scope.scalar(value) and _is_unshared(value, code, scope, node):
            whole = node.args[1:] if value is not _receiver(node) else node.args
            return _method_call(value, f"{form.head}_", whole, node.keywords)
    return None


def _receiver(node: ast.Call) -> ast.expr | None:
    return node.func.value if isinstance(node.func, ast.Attribute) else None


def _method_call(
    value: ast.expr, name: str, given: Sequence[ast.expr], keywords: list[ast.keyword]
) -> ast.expr:
    owner = ast.Attribute(copy.deepcopy(value), name, ast.Load())
    return ast.Call(owner, [copy.deepcopy(g) for g in given], copy.deepcopy(keywords))


def _is_unshared(value: ast.expr, code: ParsedSource, scope: FunctionScope, user: ast.expr) -> bool:
    """Whether nothing else holds the memory of a value: it is a result, or a local name's last use."""
    if isinstance(value, ast.Name):
        defined = scope.definitions.get(value.id)
        return (
            defined is not None
            and not isinstance(defined, ast.Name)
            and _is_unshared(defined, code, scope, user)
            and not scope.scalar(defined)
            and _is_last_use(value, scope)
        )
    if is_arithmetic(value):
        return True
    return term_of(value, code.modules).head in _ALLOCATING_OPERATIONS


def _is_last_use(name: ast.Name, scope: FunctionScope) -> bool:
    """Whether a name is read here last, outside of loops, and no view of it was made."""
    reads = [n for n in nodes_in_order(scope.function) if isinstance(n, ast.Name) and n.id == name.id]
    for node in ast.walk(scope.function):
        repeated = isinstance(node, ast.For | ast.While | ast.FunctionDef) and node is not scope.function
        if repeated and any(n is r for n in ast.walk(node) for r in reads):
            return False
        if (
            isinstance(node, ast.Attribute)
            and node.attr in _VIEW_OPERATIONS
            and _is_name(node.value, name.id)
        ):
            return False
        if isinstance(node, ast.Subscript) and _is_name(node.value, name.id):
            return False
        if isinstance(node, ast.Assign | ast.Return) and _is_name(node.value, name.id):
            return False
    last = reads[-1]
    if last is name:
        return True
    # `e / e.sum()`: the second read is an argument of the same operation and is evaluated before it.
    for node in ast.walk(scope.function):
        if isinstance(node, ast.BinOp) and node.left is name:
            return any(n is last for n in ast.walk(node.right))
    return False


def _is_name(node: ast.expr | None, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _result_fits(value: ast.expr, other: ast.expr, code: ParsedSource, scope: FunctionScope) -> bool:
    """Whether the other operand is hardly larger: a broadcast result does not fit into the smaller one."""
    return scope.scalar(other) or not _is_reduced(value, code, scope) or _is_reduced(other, code, scope)


def _is_reduced(node: ast.expr, code: ParsedSource, scope: FunctionScope, depth: int = 0) -> bool:
    node = scope.resolve_name(node)
    if depth > 8 or isinstance(node, ast.Name):
        return False
    if isinstance(node, ast.BinOp) and not isinstance(node.op, ast.MatMult):
        sides = [s for s in (node.left, node.right) if not scope.scalar(s)]
        return bool(sides) and all(_is_reduced(s, code, scope, depth + 1) for s in sides)
    if isinstance(node, ast.Subscript):
        return "None" in ast.unparse(node.slice)
    form: ExpressionTerm = term_of(node, code.modules)
    if form.head in _REDUCTIONS:
        return True
    return form.head in (*_UNARY_OPERATIONS, "float", "to") and _is_reduced(
        form.parts[0].node, code, scope, depth + 1
    )


def _in_place_updates(
    function: ast.FunctionDef, scope: FunctionScope
) -> Iterator[tuple[ast.Assign, ast.expr]]:
    """`v = v * x` where every value that v takes is fresh: each such statement and what to assign."""
    for node in nodes_in_order(function):
        if not (
            isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.value, ast.BinOp)
        ):
            continue
        name, value = node.targets[0], node.value
        if (
            not isinstance(name, ast.Name)
            or name.id in scope.parameters
            or type(value.op) not in _IN_PLACE_METHODS
        ):
            continue
        if not _is_name(value.left, name.id) or scope.scalar(value):
            continue
        given = [
            n.value
            for n in ast.walk(function)
            if isinstance(n, ast.Assign) and any(_is_name(t, name.id) for t in n.targets)
        ]
        if len(given) == scope.assigned[name.id] and all(_allocates(g, name.id, scope) for g in given):
            yield node, _method_call(value.left, _IN_PLACE_METHODS[type(value.op)], [value.right], [])


def _allocates(value: ast.expr, name: str, scope: FunctionScope) -> bool:
    if is_arithmetic(value):
        return True
    return term_of(value, scope.code.modules).head in _ALLOCATING_OPERATIONS or (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and _is_name(value.func.value, name)
    )


def _destination_write(statement: ast.AST) -> tuple[ast.expr, ast.expr] | None:
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Subscript):
        return statement.targets[0], statement.value
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        call = statement.value
        if isinstance(call.func, ast.Attribute) and call.func.attr == "copy_" and len(call.args) == 1:
            return call.func.value, call.args[0]
    return None


def _as_load(target: ast.expr) -> ast.expr:
    loaded = copy.deepcopy(target)
    if isinstance(loaded, ast.Subscript):
        loaded.ctx = ast.Load()
    return loaded
