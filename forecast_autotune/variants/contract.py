"""A contract is what a variant's source defines, read without importing it, and the rules that it has to keep.

The rules say what may run when a verified variant is imported: imports of triton, `@triton.jit` functions,
constants, and a `grid` that calculates. They are a second fence. The first is that nothing is imported in
a user's process before it has been verified in a sandbox."""

from __future__ import annotations

import ast
import itertools
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from forecast_autotune import python_parser
from forecast_autotune.errors import RecordError
from forecast_autotune.records import LAUNCH_OPTIONS, Argument, Config, Scalar

BASE_GRID = {f"BASE_GRID_{axis}": axis for axis in range(3)}
"""Parameters that a launch fills with the call's own grid, name -> axis, for variants that launch another
one. As constexpr they are compiled in, and known to forecasts; as runtime parameters one binary serves all
grids."""

WORKSPACE, COUNTERS = MEMORY = ("WORKSPACE", "COUNTERS")
"""Parameters that a launch fills with memory of its own, in a module with a plain function `workspace`: float32
elements of any value, and int32 elements that are zero. Elsewhere they are parameters like others."""
_CALCULATIONS = {"grid": (2, 3), "workspace": (4,)}
"""Functions that only calculate, and how many parameters they may have."""

"""Names in a config that say how a kernel is launched; all others are parameters."""

_ALLOWED_CALLS = frozenset(
    (
        *("min", "max", "len", "range", "sum", "abs", "int", "float", "bool", "tuple", "list", "round"),
        *("divmod", "zip", "enumerate", "sorted", "any", "all", "prod", "cdiv", "next_power_of_2"),
        *("stride", "size", "numel", "dim", "element_size", "get", "items", "keys", "values", "bit_length"),
    )
)
"""Functions and methods that `grid` and `workspace` may call."""
_JIT_DECORATORS = ("jit", "constexpr_function")


@dataclass(frozen=True)
class Contract:
    """The entry's parameters, and what else the module defines."""

    kernel: str
    parameters: tuple[str, ...]
    """Runtime parameters in order, without those that a launch fills in."""
    meta: tuple[str, ...]
    """Constexpr parameters in order, without those that a launch fills in."""
    configs: tuple[Config, ...] = ()
    reset_to_zero: tuple[str, ...] = ()
    grid: bool = False
    optional: frozenset[str] = frozenset()
    """Constexpr parameters that have a default, or that the module's own heuristics compute."""
    lines: tuple[int, ...] = (0,)
    """The lines of `configs`, or that of the entry where there are none."""

    def require_fit(
        self, base: Contract, configs: Sequence[Config] = (), calls: Sequence[Sequence[Argument]] = ()
    ) -> None:
        """Raise `RecordError` unless it can be launched as its base is, with the base's `configs` on its `calls`.

        That is: its runtime parameters are the base's, and each constexpr parameter has a value, of a config or of
        the call.
        """
        self.require_same_parameters(base.parameters)
        names_tuned = set.intersection(*({n for n, _ in c.kwargs} for c in configs)) if configs else set()
        constants = {a.name for call in calls for a in call if a.kind == "constexpr"}
        known = {*LAUNCH_OPTIONS, *self.optional, *constants, *(n for n in base.meta if n not in names_tuned)}
        own = [{n for n, _ in c.kwargs} for c in self.configs]
        for line, names in zip(self.lines, own or [names_tuned], strict=True):
            if missing := [name for name in self.meta if name not in known and name not in names]:
                raise RecordError(
                    f"line {line} of the variant: {', '.join(missing)} of {self.kernel} has no value, neither of the "
                    f"call nor of {'this config' if own else 'the configs of the base'}: give it one in "
                    f'CONFIGS, as in {{"{missing[0]}": ..., "num_warps": 4}}, or a default'
                )

    def require_same_parameters(self, base: Sequence[str]) -> None:
        """Raise `RecordError` unless the runtime parameters are the base kernel's, in its order."""
        if self.parameters == tuple(base):
            return
        raise RecordError(
            f"a variant of {self.kernel} must have its runtime parameters ({', '.join(base)}), by these "
            f"names and in this order; it has ({', '.join(self.parameters)}): make others tl.constexpr and "
            "give them values in CONFIGS"
        )


@lru_cache(maxsize=256)  # a search asks for every config of a source, and at every call
def read_contract(source: str, kernel: str) -> Contract:
    """Read a variant's source. Raises `RecordError` naming the rule it breaks, and the line."""
    try:
        tree = python_parser.parse_module(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise RecordError(f"the variant's source is not Python: {error}") from error
    functions: dict[str, ast.FunctionDef] = {}
    values: dict[str, Any] = {}
    config_rows: tuple[tuple[int, Mapping[str, Scalar]], ...] = ()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            _check_function(node)
            functions[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            if "CONFIGS" in (ast.unparse(t) for t in _targets(node)) and node.value is not None:
                config_rows = read_configs(node.value, values)
            else:
                values |= _assigned(node, values)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            _check_import(node)
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            rule = "a variant's module holds imports, functions and constants, and runs nothing else"
            if "set_allocator" in ast.unparse(node):
                rule += ": launches have an allocator for the scratch memory that descriptors need"
            raise _violation(node, rule)
    if kernel not in functions or not functions[kernel].decorator_list:
        raise RecordError(
            f"the variant must define {kernel!r} with @triton.jit; it defines "
            f"{', '.join(functions) or 'no function'}"
        )
    filled_in = filled_in_parameters(functions)
    if not filled_in.isdisjoint(MEMORY):
        _check_workspace(functions[kernel])
    entry = functions[kernel]
    parameters, meta = _parameters(entry, filled_in)
    configs = _configs(config_rows, meta)
    contract = Contract(
        kernel,
        parameters,
        meta,
        tuple(configs),
        _parse_reset_to_zero(values.get("RESET_TO_ZERO"), parameters),
        "grid" in functions,
        _optional(entry),
        tuple(configs.values()) or (entry.lineno,),
    )
    if strange := sorted(set(values) & set(_CALCULATIONS)):
        raise RecordError(f"{strange[0]} must be a function of {_taken(strange[0])}")
    return contract


def filled_in_parameters(functions: Mapping[str, ast.FunctionDef]) -> frozenset[str]:
    """Parameters that a launch fills in, in a module with these functions."""
    workspace = functions.get("workspace")
    # A kernel's helper may have this name, too.
    has_workspace = workspace is not None and not workspace.decorator_list
    return frozenset((*BASE_GRID, *(MEMORY if has_workspace else ())))


def _parameters(node: ast.FunctionDef, filled_in: Collection[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(runtime parameters, constexpr parameters), each in order, without those that a launch fills in."""
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    names = [a for a in arguments if a.arg not in filled_in]
    runtime = tuple(a.arg for a in names if not _is_constexpr(a))
    return runtime, tuple(a.arg for a in names if _is_constexpr(a))


def _optional(node: ast.FunctionDef) -> frozenset[str]:
    """Parameters with a default, and those that a heuristic above the function computes."""
    positional, every = [*node.args.posonlyargs, *node.args.args], node.args
    results = [a.arg for a in positional[len(positional) - len(every.defaults) :]]
    results += [a.arg for a, d in zip(every.kwonlyargs, every.kw_defaults, strict=True) if d is not None]
    for rules in (d for n in node.decorator_list for d in ast.walk(n) if isinstance(d, ast.Dict)):
        results += [str(key.value) for key in rules.keys if isinstance(key, ast.Constant)]
    return frozenset(results)


def _check_workspace(node: ast.FunctionDef) -> None:
    """The kernel of a module with `workspace` takes what that tells the size of, as pointers."""
    requests = [a for a in ast.walk(node.args) if isinstance(a, ast.arg) and a.arg in MEMORY]
    if not requests:
        raise RecordError(
            f"workspace tells the elements of the parameters {WORKSPACE} and {COUNTERS}: {node.name} takes neither"
        )
    if constant := [a.arg for a in requests if _is_constexpr(a)]:
        raise RecordError(f"{constant[0]} is memory: it cannot be tl.constexpr")


def _taken(function: str) -> str:
    """The parameters of a function that only calculates, for messages."""
    both = "(meta, arguments) or (meta, arguments, base)"
    return both if function == "grid" else "(meta, arguments, base, grid)"


def _is_constexpr(argument: ast.arg) -> bool:
    return argument.annotation is not None and "constexpr" in ast.unparse(argument.annotation)


def _check_import(node: ast.Import | ast.ImportFrom) -> None:
    if isinstance(node, ast.ImportFrom):
        names = ["." * node.level + (node.module or "")]
    else:
        names = [a.name for a in node.names]
    for name in names:
        language = name == "triton.language" or name.startswith("triton.language.")
        if not language and name not in ("triton", "__future__"):
            rule = f"a variant imports triton and triton.language alone, not {name}"
            if "descriptor" in ast.unparse(node):
                rule += ": its kernel makes descriptors, by tl.make_tensor_descriptor"
            raise _violation(node, rule)
        if name == "triton" and isinstance(node, ast.ImportFrom):
            permitted = {"language", "jit", "cdiv", "next_power_of_2", "constexpr_function"}
            if strangers := sorted({a.name for a in node.names} - permitted):
                raise _violation(
                    node, f"a variant imports {', '.join(sorted(permitted))} of triton, not {strangers}"
                )


def _check_function(node: ast.FunctionDef) -> None:
    if node.name == "grid" or (node.name == "workspace" and not node.decorator_list):
        if node.decorator_list or len(node.args.args) not in _CALCULATIONS[node.name]:
            raise _violation(node, f"{node.name} takes {_taken(node.name)}, undecorated")
        _check_calculation(node, node.name)
        return
    if not node.decorator_list:
        raise _violation(
            node, f"{node.name} must be a @triton.jit function; only `grid` and `workspace` are plain Python"
        )
    for decorator in node.decorator_list:
        _check_decorator(decorator, node.name)
    signature = [*node.args.defaults, *(d for d in node.args.kw_defaults if d is not None)]
    signature += [a.annotation for a in ast.walk(node.args) if isinstance(a, ast.arg) and a.annotation]
    if node.returns is not None:
        signature.append(node.returns)
    for part in signature:
        if not _is_constant(part):
            raise _violation(
                node, f"defaults and annotations of {node.name} must be constants: {ast.unparse(part)}"
            )
    _check_names(node)


def _check_decorator(node: ast.expr, function: str) -> None:
    name, arguments = _called(node), []
    if isinstance(node, ast.Call):
        name, arguments = _called(node.func), [*node.args, *(k.value for k in node.keywords)]
    if name == "heuristics" and len(arguments) == 1 and isinstance(arguments[0], ast.Dict):
        for rule in arguments[0].values:
            if not isinstance(rule, ast.Lambda):
                raise _violation(rule, "a heuristic must be a lambda that calculates")
            _check_calculation(rule.body, "a heuristic")
    elif name not in _JIT_DECORATORS or not all(map(_is_constant, arguments)):
        raise _violation(
            node,
            f"{function} may be decorated with @triton.jit (and @triton.heuristics of lambdas) alone, not "
            f"{ast.unparse(node)}; configs belong into CONFIGS",
        )


def _called(node: ast.expr) -> str:
    """The last name of what is called."""
    return node.attr if isinstance(node, ast.Attribute) else str(getattr(node, "id", ""))


def _check_names(node: ast.AST) -> None:
    for inner in ast.walk(node):
        name = inner.attr if isinstance(inner, ast.Attribute) else getattr(inner, "id", "")
        if isinstance(name, str) and name.startswith("__"):
            raise _violation(inner, f"a variant has no business with {name}")


def _check_calculation(node: ast.AST, what: str) -> None:
    _check_names(node)
    for inner in ast.walk(node):
        if isinstance(inner, ast.Import | ast.ImportFrom | ast.Global | ast.Nonlocal | ast.Lambda):
            raise _violation(inner, f"{what} only calculates: no imports, globals or lambdas")
        if isinstance(inner, ast.Call) and _called(inner.func) not in _ALLOWED_CALLS:
            raise _violation(
                inner, f"{what} may call {', '.join(sorted(_ALLOWED_CALLS))}, not {_called(inner.func)}"
            )


def _targets(node: ast.Assign | ast.AnnAssign) -> Sequence[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def _assigned(node: ast.Assign | ast.AnnAssign, known: Mapping[str, Any]) -> dict[str, Any]:
    """Names and values of one assignment; `...` is the value of what is constant, but no literal."""
    targets = _targets(node)
    if node.value is None or not all(isinstance(t, ast.Name) for t in targets):
        raise _violation(node, "a variant's module assigns constants to plain names")
    try:
        value: Any = evaluate_literal(node.value, known)
    except ValueError as error:
        if not _is_constant(node.value):
            raise _violation(
                node,
                f"{ast.unparse(targets[0])} must be a literal, a list that is calculated from literals, a "
                f"tl.constexpr or a name in triton ({error})",
            ) from error
        value = ...
    return {t.id: value for t in targets if isinstance(t, ast.Name)}


def _is_constant(node: ast.expr) -> bool:
    """Literals, names, attributes of names, arithmetic on them, and `constexpr(...)` of all that."""
    if isinstance(node, ast.Constant):
        return True
    if isinstance(node, ast.Name):
        return not node.id.startswith("__")
    if isinstance(node, ast.Attribute):
        return not node.attr.startswith("__") and _is_constant(node.value)
    if isinstance(node, ast.Call):
        function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        return function == "constexpr" and all(map(_is_constant, node.args)) and not node.keywords
    if isinstance(node, ast.List | ast.Tuple | ast.Set | ast.Dict | ast.UnaryOp | ast.BinOp):
        return all(map(_is_constant, _child_expressions(node)))
    # `constexpr[int]` and the like, in annotations.
    return isinstance(node, ast.Subscript) and _is_constant(node.value) and _is_constant(node.slice)


def _child_expressions(node: ast.expr) -> Iterator[ast.expr]:
    return (part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr))


def read_configs(node: ast.expr, names: Mapping[str, Any]) -> tuple[tuple[int, Mapping[str, Scalar]], ...]:
    """The configs that a source assigns to `CONFIGS`, each as its line, and parameters and launch options by name.

    A config is flat, `{"BLOCK": 64, "num_warps": 4}`, or has its parameters under `kwargs`. `names` are known values
    of the module. Raises `RecordError` for anything else.
    """
    form = 'CONFIGS must be a list like [{"BLOCK": 1024, "num_warps": 4}], written out or calculated from literals'
    try:
        entries = evaluate_literal(node, names)
    except ValueError as error:
        raise RecordError(f"line {node.lineno}: {form} ({error})") from error
    if not isinstance(entries, list | tuple) or not entries:
        raise RecordError(f"line {node.lineno}: {form}, not {entries!r:.60}")
    elements = node.elts if isinstance(node, ast.List | ast.Tuple) else []
    results = []
    for number, entry in enumerate(entries):
        line = elements[number].lineno if len(elements) == len(entries) else node.lineno
        kwargs = entry.get("kwargs", {}) if isinstance(entry, dict) else None
        if not isinstance(kwargs, dict):
            raise RecordError(f"line {line}: {form}; one of it is {entry!r:.60}")
        flat = {name: value for name, value in entry.items() if name != "kwargs"}
        if twice := sorted(map(str, flat.keys() & kwargs.keys())):
            raise RecordError(f"line {line}: a config gives {twice[0]} twice: leave one of them out")
        for name, value in (flat := {**kwargs, **flat}).items():
            if not isinstance(name, str) or not (
                value is None or isinstance(value, bool | int | float | str)
            ):
                raise RecordError(
                    f"line {line}: CONFIGS gives {name} a {type(value).__name__}: give a number, a text or None"
                )
        results.append((line, flat))
    return tuple(results)


def _configs(rows: Sequence[tuple[int, Mapping[str, Scalar]]], meta: Sequence[str]) -> dict[Config, int]:
    """Configs of a kernel with these constexpr parameters, each once with its line. Raises `RecordError`."""
    results: dict[Config, int] = {}
    for line, flat in rows:
        options = {name: value for name, value in flat.items() if name in LAUNCH_OPTIONS}
        kwargs = {name: value for name, value in flat.items() if name not in options}
        if strange := sorted(kwargs.keys() - set(meta)):
            raise RecordError(
                f"line {line} of the variant: CONFIGS give {', '.join(strange)}, which is neither a tl.constexpr "
                f"parameter ({', '.join(meta) or 'there is none'}) nor one of {', '.join(LAUNCH_OPTIONS)}: declare it "
                "or leave it out"
            )
        try:
            results.setdefault(Config.from_json({"kwargs": kwargs, **options}), line)
        except RecordError as error:
            raise RecordError(f"line {line} of the variant: {error}") from error
    return results


def _parse_reset_to_zero(names: Any, parameters: Sequence[str]) -> tuple[str, ...]:
    if names is None:
        return ()
    if not isinstance(names, list | tuple) or not all(name in parameters for name in names):
        raise RecordError(
            f"RESET_TO_ZERO must list runtime parameters ({', '.join(parameters)}), not {names!r:.80}"
        )
    return tuple(dict.fromkeys(names))


def _violation(node: ast.AST, rule: str) -> RecordError:
    return RecordError(f"line {getattr(node, 'lineno', '?')} of the variant: {rule}")


_MAX_NUMBER = 1 << 62
_MAX_LENGTH = 4096
"""Elements of a list, passes of a comprehension."""

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.LShift: lambda a, b: a << _check_exponent(b),
    ast.RShift: lambda a, b: a >> _check_exponent(b),
    ast.Pow: lambda a, b: a ** _check_exponent(b),
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_CALLS: dict[str, Callable[..., Any]] = {"min": min, "max": max, "len": len, "int": int}


def evaluate_literal(node: ast.expr, names: Mapping[str, Any] | None = None) -> Any:
    """The value, with these names known.

    Numbers, texts, lists, tuples, dicts, arithmetic, comparisons, conditions, comprehensions, and calls of
    range, min, max, len, int. Raises `ValueError` for all else, and for what grows too large.
    """
    try:
        return _value(node, dict(names or {}))
    except (TypeError, KeyError, IndexError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"{ast.unparse(node)[:60]}: {error}") from error


def _value(node: ast.expr, names: dict[str, Any]) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        if node.id not in names:
            raise ValueError(f"{node.id} is not known here")
        return names[node.id]
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        items = [_value(n, names) for n in node.elts]
        return tuple(items) if isinstance(node, ast.Tuple) else items
    if isinstance(node, ast.Dict):
        return {_value(k, names): _value(v, names) for k, v in zip(node.keys, node.values, strict=True) if k}
    if isinstance(node, ast.ListComp | ast.GeneratorExp):
        return [_value(node.elt, inner) for inner in _comprehension_scopes(node.generators, names)]
    if isinstance(node, ast.Call):
        return _calculated_call(node, names)
    return _calculated(node, names)


def _calculated(node: ast.expr, names: dict[str, Any]) -> Any:
    if isinstance(node, ast.UnaryOp):
        value = _value(node.operand, names)
        return (
            not value if isinstance(node.op, ast.Not) else -value if isinstance(node.op, ast.USub) else value
        )
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        value = _BINARY[type(node.op)](_value(node.left, names), _value(node.right, names))
        if (isinstance(value, int) and abs(value) > _MAX_NUMBER) or (
            isinstance(value, str | list | tuple) and len(value) > _MAX_LENGTH
        ):
            raise ValueError("the value grows too large")
        return value
    if isinstance(node, ast.BoolOp):
        values = [_value(n, names) for n in node.values]
        return all(values) if isinstance(node.op, ast.And) else any(values)
    if isinstance(node, ast.Compare):
        sides = [_value(n, names) for n in (node.left, *node.comparators)]
        pairs = zip(node.ops, itertools.pairwise(sides), strict=True)
        return all(_COMPARE[type(op)](a, b) for op, (a, b) in pairs)
    if isinstance(node, ast.IfExp):
        return _value(node.body if _value(node.test, names) else node.orelse, names)
    if isinstance(node, ast.Subscript):
        return _value(node.value, names)[_value(node.slice, names)]
    raise ValueError(f"{type(node).__name__} is more than calculation")


def _calculated_call(node: ast.Call, names: dict[str, Any]) -> Any:
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    arguments = [_value(a, names) for a in node.args]
    if name == "range" and not node.keywords:
        return list(itertools.islice(range(*arguments), _MAX_LENGTH))
    if name not in _CALLS or node.keywords:
        raise ValueError(f"it calls {ast.unparse(node.func)}")
    return _CALLS[name](*arguments)


def _comprehension_scopes(
    generators: list[ast.comprehension], names: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """The names of every pass of nested loops that its conditions let through."""
    count = 0

    def nested(depth: int, known: dict[str, Any]) -> Iterator[dict[str, Any]]:
        nonlocal count
        if depth == len(generators):
            yield known
            return
        loop = generators[depth]
        for item in _value(loop.iter, known):
            count += 1
            if count > _MAX_LENGTH:
                raise ValueError(f"more than {_MAX_LENGTH} passes")
            inner = {**known, **_bind_target(loop.target, item)}
            if all(_value(test, inner) for test in loop.ifs):
                yield from nested(depth + 1, inner)

    return nested(0, names)


def _bind_target(target: ast.expr, item: Any) -> dict[str, Any]:
    if isinstance(target, ast.Name):
        return {target.id: item}
    if isinstance(target, ast.Tuple | ast.List):
        pairs = zip(target.elts, item, strict=True)
        return {name: value for part, v in pairs for name, value in _bind_target(part, v).items()}
    raise ValueError(f"{ast.unparse(target)} is no plain name")


def _check_exponent(value: Any) -> Any:
    if isinstance(value, int) and abs(value) > 62:
        raise ValueError("the value grows too large")
    return value
