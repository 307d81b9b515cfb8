"""Changes of single operations: hints to the compiler and the caches, and functions that it spells out at length."""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from forecast_harness.authors.triton.analysis.function_facts import (
    FunctionFacts,
    MemoryAccess,
    RangeLoop,
    accesses,
    broadcast_shape,
    loads_may_move,
    loops,
)
from forecast_harness.authors.triton.analysis.source_unit import (
    SourceUnit,
    fresh_name,
    names,
    nodes_in_order,
    parse_statements,
    swap_expressions,
)
from forecast_harness.authors.triton.protocol import RewriteContext, SourceEdit


def _with_hint(unit: SourceUnit, accesses: list[tuple[MemoryAccess, str]], keyword: str) -> SourceUnit | None:
    """A copy with a keyword on these accesses; None where there is nothing to add."""
    # PTX allows one of the two on an access, not both.
    hints = {"eviction_policy", "cache_modifier"}
    new = [(a, value) for a, value in accesses if not hints & {k.arg for k in a.call.keywords}]
    if not new:
        return None
    draft = unit.copy()
    for access, value in new:
        draft.twin(access.call).keywords.append(ast.keyword(keyword, ast.Constant(value)))
    return draft


def _hintable_accesses(unit: SourceUnit) -> list[MemoryAccess]:
    """Loads and stores of the entry; none where a dot reads them: tiles are shared in more ways than show."""
    if unit.calls(unit.kernels, "dot", "dot_scaled"):
        return []
    return [a for a in accesses(unit, unit.entry) if a.plain]


def _eviction_policies(unit: SourceUnit) -> Iterator[tuple[MemoryAccess, str]]:
    """The eviction policy that the address of each access suggests."""
    facts = FunctionFacts(unit, unit.entry)
    axes = {n for n in facts.sources(ast.Module(unit.entry.body, [])) if n.startswith("pid ")}
    hintable = _hintable_accesses(unit)
    counts = Counter(ast.unparse(a.pointer) for a in hintable if a.kind == "load")
    for access in hintable:
        key = ast.unparse(access.pointer)
        if access.kind == "load":
            counts[key] -= 1
            is_shared = not axes <= facts.sources(access.pointer)
            yield access, "evict_last" if is_shared or counts[key] else "evict_first"


def evict(unit: SourceUnit, context: RewriteContext) -> Iterator[SourceEdit]:
    """Eviction policies of loads: data that no other program and no later pass reads leave the cache first."""
    policies = list(_eviction_policies(unit))
    stores = [(a, "evict_first") for a in _hintable_accesses(unit) if a.kind == "store"]
    kinds = {policy for _, policy in policies}
    if (draft := _with_hint(unit, policies, "eviction_policy")) is not None:
        is_mixed = len(kinds) > 1
        note = "loads read once are evicted first" + (", those read again last" if is_mixed else "")
        if kinds == {"evict_last"}:
            note = "loads that other programs read again are evicted last"
        yield SourceEdit(draft, note, 3.0 + 2.0 * is_mixed)
    if policies and stores and (draft := _with_hint(unit, policies + stores, "eviction_policy")) is not None:
        yield SourceEdit(draft, "loads and results leave the cache in the order of their reuse", 3.5)


def stream_stores(unit: SourceUnit, context: RewriteContext) -> Iterator[SourceEdit]:
    """`.cs` on stores: results are not read again by this kernel."""
    facts = FunctionFacts(unit, unit.entry)
    load_roots = [facts.root_parameters(a.pointer) for a in accesses(unit, unit.entry) if a.kind == "load"]
    stores = []
    for access in (a for a in accesses(unit, unit.entry) if a.plain and a.kind == "store"):
        roots = facts.root_parameters(access.pointer)
        if roots is not None and not any(r is None or r & roots for r in load_roots):
            stores.append((access, ".cs"))
    if (draft := _with_hint(unit, stores, "cache_modifier")) is not None:
        yield SourceEdit(draft, "results are streamed past the cache (cache_modifier .cs)", 2.0)


# --- options of `tl.range` ---


STAGES = (3, 2, 4)
FACTORS = (2, 4)


def with_options(unit: SourceUnit, loops: Sequence[RangeLoop], options: Mapping[str, int]) -> SourceUnit:
    """A copy whose loops are `tl.range` with these options on top of their own."""
    draft = unit.copy()
    for loop in loops:
        head = draft.twin(loop.node).iter
        assert isinstance(head, ast.Call)
        head.func = ast.Attribute(ast.Name(unit.tl, ast.Load()), "range", ast.Load())
        head.keywords = [k for k in head.keywords if k.arg not in options]
        head.keywords += [ast.keyword(name, ast.Constant(value)) for name, value in options.items()]
    return draft


def pipeline(unit: SourceUnit, context: RewriteContext) -> Iterator[SourceEdit]:
    """`num_stages` on loops without a dot: Triton pipelines loads there only when it is asked to.

    Loads of later iterations are issued before the stores of earlier ones, so a loop must not read what
    it writes.
    """
    fitting: list[RangeLoop] = []
    for function, group in _loading_loops(unit):
        facts = FunctionFacts(unit, function)
        plain = [loop for loop in group if "num_stages" not in loop.options]
        fitting += [loop for loop in plain if loads_may_move(facts, loop.node.body)]
    if not fitting:
        return
    for place, stages in enumerate(STAGES):
        yield SourceEdit(
            with_options(unit, fitting, {"num_stages": stages}),
            f"loads of {_count(fitting)} run {stages - 1} iterations ahead (tl.range num_stages={stages})",
            8.0 - 2.5 * place,
        )


def unroll(unit: SourceUnit, context: RewriteContext) -> Iterator[SourceEdit]:
    """`loop_unroll_factor` on innermost loops with loads: more of them in flight, fewer branches."""
    fitting = [loop for _, group in _loading_loops(unit) for loop in group if not loop.options]
    if not fitting:
        return
    for place, factor in enumerate(FACTORS):
        yield SourceEdit(
            with_options(unit, fitting, {"loop_unroll_factor": factor}),
            f"{_count(fitting)} unrolled {factor} times (tl.range loop_unroll_factor={factor})",
            5.0 - 2.0 * place,
        )


def _loading_loops(unit: SourceUnit) -> Iterator[tuple[ast.FunctionDef, list[RangeLoop]]]:
    """The innermost loops of each kernel that load, have no dot and run to their end."""
    for function in unit.kernels:
        yield (
            function,
            [
                loop
                for loop in loops(unit, function)
                if loop.innermost
                and not loop.has_dots
                and not loop.may_exit_early
                and "load" in unit.effects(loop.node.body)
            ],
        )


def _count(loops: Sequence[RangeLoop]) -> str:
    return "the loop" if len(loops) == 1 else f"{len(loops)} loops"


# --- functions ---


LOG2_E = 1.4426950408889634


def exp2(unit: SourceUnit, context: RewriteContext) -> Iterator[SourceEdit]:
    """`exp(x - m)` as `exp2(x * c - m * c)`: one fused multiply-add and one `ex2` for each element.

    Any other `exp(x)` of float32 is `exp2(x * c)`: Triton's own `exp` scales its argument and its
    result once more, for results too small for a normal float32.
    """
    draft, count = unit.copy(), 0
    for function in unit.kernels:
        facts, swaps = context.facts(unit, function), {}
        for call in unit.calls(function, "exp"):
            inner = call.args[0] if len(call.args) == 1 and not call.keywords else None
            if inner is None or not facts.is_float32(inner):
                continue
            if (
                isinstance(inner, ast.BinOp)
                and isinstance(inner.op, ast.Sub)
                and _subtracts_broadcast(facts, inner)
            ):
                power = ast.BinOp(_times_log2_e(inner.left), ast.Sub(), _times_log2_e(inner.right))
            else:
                power = _times_log2_e(inner)
            swaps[id(draft.twin(call))] = unit.language_call("exp2", power)
        swap_expressions(draft.twin(function), swaps)
        count += len(swaps)
    if count:
        yield SourceEdit(draft, "exp as exp2, with a fused multiply-add where something is subtracted", 2.0)


def _times_log2_e(value: ast.expr) -> ast.BinOp:
    return ast.BinOp(copy.deepcopy(value), ast.Mult(), ast.Constant(LOG2_E))


def _subtracts_broadcast(facts: FunctionFacts, difference: ast.BinOp) -> bool:
    """Whether float32 is subtracted that is the same for many elements, so that its product is cheap."""
    left, right = facts.shape(difference.left), facts.shape(difference.right)
    if left is None or right is None or broadcast_shape([left, right]) != left:
        return False
    are_floats = facts.is_float32(difference.left) and facts.is_float32(difference.right)
    return are_floats and _count_dimensions(right) < _count_dimensions(left)


def _count_dimensions(shape: tuple[str, ...]) -> int:
    return len([side for side in shape if side != "1"])


_SIGMOID = """
def {name}(x):
    root = {tl}.rsqrt(1.0 + {tl}.exp2(x * -{log2_e}))
    return root * root
"""


def sigmoid(unit: SourceUnit, context: RewriteContext) -> Iterator[SourceEdit]:
    """`sigmoid` of float32 by a reciprocal square root: a division guards against what never happens here."""
    draft = _replace_sigmoids(unit, context)
    if draft is not None:
        yield SourceEdit(draft, "sigmoid by a reciprocal square root instead of a division", 8.0)


@dataclass(frozen=True)
class _FunctionMatch:
    """A call of a function, or what amounts to one."""

    argument: ast.expr
    times: ast.expr | None = None
    """Factor of the result."""


def _match_sigmoid(facts: FunctionFacts, node: ast.AST) -> _FunctionMatch | None:
    """`tl.sigmoid(x)`, `1 / (1 + tl.exp(-x))` and `y / (1 + tl.exp(-x))`."""
    if call := _single_call(facts, node, "sigmoid"):
        return call
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Div):
        return None
    divisor = node.right
    if not isinstance(divisor, ast.BinOp) or not isinstance(divisor.op, ast.Add):
        return None
    power = divisor.right if _is_one(divisor.left) else divisor.left if _is_one(divisor.right) else None
    inner = None if power is None else _single_call(facts, power, "exp")
    if inner is None or not isinstance(inner.argument, ast.UnaryOp):
        return None
    if not isinstance(inner.argument.op, ast.USub):
        return None
    if _is_one(node.left):
        return _FunctionMatch(inner.argument.operand)
    return _FunctionMatch(inner.argument.operand, node.left) if facts.is_float32(node.left) else None


def _single_call(facts: FunctionFacts, node: ast.AST, name: str) -> _FunctionMatch | None:
    if not isinstance(node, ast.Call) or facts.unit.callee_name(node) != name:
        return None
    alone = len(node.args) == 1 and not node.keywords
    return _FunctionMatch(node.args[0]) if alone and facts.is_float32(node.args[0]) else None


def _is_one(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == 1


def _replace_sigmoids(unit: SourceUnit, context: RewriteContext) -> SourceUnit | None:
    """A copy that calls a function of its own in place of sigmoids; None where there are none."""
    jit = unit.entry.decorator_list[-1] if unit.entry.decorator_list else None
    jit = jit.func if isinstance(jit, ast.Call) else jit
    if jit is None or not unit.tl:
        return None
    name = fresh_name("sigmoid_by_root", names(unit.tree) | set(unit.functions))
    places = []
    for function in unit.kernels:
        facts = context.facts(unit, function)
        places += [
            (node, match) for node in nodes_in_order(function) if (match := _match_sigmoid(facts, node))
        ]
    if not places:
        return None
    draft = unit.copy()
    # The innermost first: an argument may hold another place.
    for node, match in reversed(places):
        call: ast.expr = ast.Call(ast.Name(name, ast.Load()), [draft.twin(match.argument)], [])
        if match.times is not None:
            call = ast.BinOp(draft.twin(match.times), ast.Mult(), call)
        swap_expressions(draft.tree, {id(draft.twin(node)): call})
    (helper,) = parse_statements(_SIGMOID.format(name=name, tl=unit.tl, log2_e=LOG2_E))
    assert isinstance(helper, ast.FunctionDef)
    helper.decorator_list = [copy.deepcopy(jit)]
    at = next(i for i, s in enumerate(draft.tree.body) if isinstance(s, ast.FunctionDef))
    draft.tree.body.insert(at, helper)
    return draft
