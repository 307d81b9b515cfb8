"""Hints to the caches: eviction policies and cache modifiers. They never change what is computed."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator

from forecast_harness.authors.triton.analysis.function_facts import FunctionFacts
from forecast_harness.authors.triton.analysis.loops import MemoryAccess, accesses
from forecast_harness.authors.triton.analysis.source_unit import SourceUnit
from forecast_harness.authors.triton.protocol import RewriteContext, SourceEdit


def _with_hint(unit: SourceUnit, found: list[tuple[MemoryAccess, str]], keyword: str) -> SourceUnit | None:
    """A copy with a keyword on these accesses; None where there is nothing to add."""
    # PTX allows one of the two on an access, not both.
    told = {"eviction_policy", "cache_modifier"}
    new = [(a, value) for a, value in found if not told & {k.arg for k in a.call.keywords}]
    if not new:
        return None
    draft = unit.copy()
    for access, value in new:
        draft.twin(access.call).keywords.append(ast.keyword(keyword, ast.Constant(value)))
    return draft


def _axes(unit: SourceUnit) -> set[str]:
    found = FunctionFacts(unit, unit.entry).sources(ast.Module(unit.entry.body, []))
    return {n for n in found if n.startswith("pid ")}


def _hintable_accesses(unit: SourceUnit) -> list[MemoryAccess]:
    """Loads and stores of the entry; none where a dot reads them: tiles are shared in more ways than show."""
    if unit.calls(unit.kernels, "dot", "dot_scaled"):
        return []
    return [a for a in accesses(unit, unit.entry) if a.plain]


def _eviction_policies(unit: SourceUnit) -> Iterator[tuple[MemoryAccess, str]]:
    """What the address of each access says of its reuse."""
    facts, axes = FunctionFacts(unit, unit.entry), _axes(unit)
    found = _hintable_accesses(unit)
    again = Counter(ast.unparse(a.pointer) for a in found if a.kind == "load")
    for access in found:
        key = ast.unparse(access.pointer)
        if access.kind == "load":
            again[key] -= 1
            shared = not axes <= facts.sources(access.pointer)
            yield access, "evict_last" if shared or again[key] else "evict_first"


def evict(unit: SourceUnit, context: RewriteContext) -> Iterator[SourceEdit]:
    """Eviction policies of loads: what no other program and no later pass reads leaves the cache first."""
    found = list(_eviction_policies(unit))
    stores = [(a, "evict_first") for a in _hintable_accesses(unit) if a.kind == "store"]
    told = {policy for _, policy in found}
    if (draft := _with_hint(unit, found, "eviction_policy")) is not None:
        mixed = len(told) > 1
        note = "loads read once are evicted first" + (", those read again last" if mixed else "")
        if told == {"evict_last"}:
            note = "loads that other programs read again are evicted last"
        yield SourceEdit(draft, note, 3.0 + 2.0 * mixed)
    if found and stores and (draft := _with_hint(unit, found + stores, "eviction_policy")) is not None:
        yield SourceEdit(draft, "loads and results leave the cache in the order of their reuse", 3.5)


def bypass_l1(unit: SourceUnit, context: RewriteContext) -> Iterator[SourceEdit]:
    """`.cg` on loads that are read once: L1 stays for what is read again."""
    found = [(a, ".cg") for a, policy in _eviction_policies(unit) if policy == "evict_first"]
    found = [(a, value) for a, value in found if access_shape(unit, a) != ()]
    if (draft := _with_hint(unit, found, "cache_modifier")) is not None:
        yield SourceEdit(draft, "loads read once do not fill L1 (cache_modifier .cg)", 1.5)


def stream_stores(unit: SourceUnit, context: RewriteContext) -> Iterator[SourceEdit]:
    """`.cs` on stores: results are not read again by this kernel."""
    facts = FunctionFacts(unit, unit.entry)
    loaded = [facts.root_parameters(a.pointer) for a in accesses(unit, unit.entry) if a.kind == "load"]
    found = []
    for access in (a for a in accesses(unit, unit.entry) if a.plain and a.kind == "store"):
        roots = facts.root_parameters(access.pointer)
        if roots is not None and not any(r is None or r & roots for r in loaded):
            found.append((access, ".cs"))
    if (draft := _with_hint(unit, found, "cache_modifier")) is not None:
        yield SourceEdit(draft, "results are streamed past the cache (cache_modifier .cs)", 2.0)


def access_shape(unit: SourceUnit, access: MemoryAccess) -> tuple[str, ...] | None:
    """Shape of what an access of the entry touches."""
    return FunctionFacts(unit, unit.entry).shape(access.pointer)
