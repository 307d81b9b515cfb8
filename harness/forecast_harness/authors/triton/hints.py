"""Hints to the compiler and the caches, which never change what is computed: options of loops, eviction policies."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from forecast_harness.authors.triton.analysis.function_facts import FunctionFacts
from forecast_harness.authors.triton.analysis.loops import (
    MemoryAccess,
    RangeLoop,
    accesses,
    loads_may_move,
    loops,
)
from forecast_harness.authors.triton.analysis.source_unit import SourceUnit
from forecast_harness.authors.triton.protocol import RewriteContext, SourceEdit


def _with_hint(unit: SourceUnit, accesses: list[tuple[MemoryAccess, str]], keyword: str) -> SourceUnit | None:
    """A copy with a keyword on these accesses; None where there is nothing to add."""
    # PTX allows one of the two on an access, not both.
    hinted = {"eviction_policy", "cache_modifier"}
    new = [(a, value) for a, value in accesses if not hinted & {k.arg for k in a.call.keywords}]
    if not new:
        return None
    draft = unit.copy()
    for access, value in new:
        draft.twin(access.call).keywords.append(ast.keyword(keyword, ast.Constant(value)))
    return draft


def _axes(unit: SourceUnit) -> set[str]:
    sources = FunctionFacts(unit, unit.entry).sources(ast.Module(unit.entry.body, []))
    return {n for n in sources if n.startswith("pid ")}


def _hintable_accesses(unit: SourceUnit) -> list[MemoryAccess]:
    """Loads and stores of the entry; none where a dot reads them: tiles are shared in more ways than show."""
    if unit.calls(unit.kernels, "dot", "dot_scaled"):
        return []
    return [a for a in accesses(unit, unit.entry) if a.plain]


def _eviction_policies(unit: SourceUnit) -> Iterator[tuple[MemoryAccess, str]]:
    """The eviction policy that the address of each access suggests."""
    facts, axes = FunctionFacts(unit, unit.entry), _axes(unit)
    hintable = _hintable_accesses(unit)
    again = Counter(ast.unparse(a.pointer) for a in hintable if a.kind == "load")
    for access in hintable:
        key = ast.unparse(access.pointer)
        if access.kind == "load":
            again[key] -= 1
            shared = not axes <= facts.sources(access.pointer)
            yield access, "evict_last" if shared or again[key] else "evict_first"


def evict(unit: SourceUnit, context: RewriteContext) -> Iterator[SourceEdit]:
    """Eviction policies of loads: what no other program and no later pass reads leaves the cache first."""
    policies = list(_eviction_policies(unit))
    stores = [(a, "evict_first") for a in _hintable_accesses(unit) if a.kind == "store"]
    kinds = {policy for _, policy in policies}
    if (draft := _with_hint(unit, policies, "eviction_policy")) is not None:
        mixed = len(kinds) > 1
        note = "loads read once are evicted first" + (", those read again last" if mixed else "")
        if kinds == {"evict_last"}:
            note = "loads that other programs read again are evicted last"
        yield SourceEdit(draft, note, 3.0 + 2.0 * mixed)
    if policies and stores and (draft := _with_hint(unit, policies + stores, "eviction_policy")) is not None:
        yield SourceEdit(draft, "loads and results leave the cache in the order of their reuse", 3.5)


def stream_stores(unit: SourceUnit, context: RewriteContext) -> Iterator[SourceEdit]:
    """`.cs` on stores: results are not read again by this kernel."""
    facts = FunctionFacts(unit, unit.entry)
    loaded = [facts.root_parameters(a.pointer) for a in accesses(unit, unit.entry) if a.kind == "load"]
    stores = []
    for access in (a for a in accesses(unit, unit.entry) if a.plain and a.kind == "store"):
        roots = facts.root_parameters(access.pointer)
        if roots is not None and not any(r is None or r & roots for r in loaded):
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
    fitting = []
    for function in unit.kernels:
        facts = FunctionFacts(unit, function)
        for loop in loops(unit, function):
            fits = (
                loop.innermost
                and not loop.has_dots
                and not loop.may_exit_early
                and "num_stages" not in loop.options
            )
            if fits and "load" in unit.effects(loop.node.body) and loads_may_move(facts, loop.node.body):
                fitting.append(loop)
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
    fitting = []
    for function in unit.kernels:
        for loop in loops(unit, function):
            fits = loop.innermost and not loop.has_dots and not loop.may_exit_early and not loop.options
            if fits and "load" in unit.effects(loop.node.body):
                fitting.append(loop)
    if not fitting:
        return
    for place, factor in enumerate(FACTORS):
        yield SourceEdit(
            with_options(unit, fitting, {"loop_unroll_factor": factor}),
            f"{_count(fitting)} unrolled {factor} times (tl.range loop_unroll_factor={factor})",
            5.0 - 2.0 * place,
        )


def _count(loops: Sequence[RangeLoop]) -> str:
    return "the loop" if len(loops) == 1 else f"{len(loops)} loops"
