"""Every rewrite, and the variants they make of a source, alone and together."""

from __future__ import annotations

import ast
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from forecast_autotune.records import Argument, Config, digest
from forecast_autotune.variants.records import Origin, Provenance, Variant
from forecast_harness.rewrites.triton import (
    arithmetic,
    caching,
    descriptors,
    functions,
    interior,
    motion,
    ordering,
    passes,
    peeling,
    pipelining,
    programs,
    splitting,
)
from forecast_harness.rewrites.triton.inlining import inlined
from forecast_harness.rewrites.triton.protocol import Context, Edit, Rewrite
from forecast_harness.rewrites.triton.unit import Unit

_CODE = frozenset(("exchange", "interior", "persist", "two-tiles"))

REWRITES: tuple[Rewrite, ...] = (
    # In the order in which they are applied to one another: structure first, hints last. Functions touch
    # nothing else, and stand first so that what only adds code to them is left out.
    Rewrite("erf", "erf without branches", functions.erf, True, apart=_CODE),
    Rewrite("sigmoid", "sigmoid without a division", functions.sigmoid, True, apart=_CODE),
    Rewrite(
        "one-pass",
        "a row that fits one tile is loaded once",
        passes.one_pass,
        apart=frozenset(("turn-back", "lane-sums", "peel", "hoist", "pipeline", "unroll")),
    ),
    Rewrite("turn-back", "the later pass over a row runs backwards", passes.turn_back),
    Rewrite("lane-sums", "one reduction after a loop, not one in each iteration", arithmetic.lane_sums, True),
    Rewrite("peel", "full tiles without masks", peeling.peel, apart=frozenset(("describe",))),
    Rewrite("hoist", "invariant loads before the loop", motion.hoist),
    Rewrite("load-early", "loads before reductions", motion.load_early),
    Rewrite(
        "one-row",
        "one division for each program",
        interior.one_row,
        apart=frozenset(("interior", "two-tiles", "persist")),
    ),
    Rewrite(
        "interior",
        "whole tiles without masks",
        interior.interior,
        apart=frozenset(("two-tiles", "persist", "describe")),
    ),
    Rewrite("two-tiles", "two neighbouring tiles in each program", programs.two_tiles),
    Rewrite(
        "spread", "more programs that take tile after tile", programs.spread, apart=frozenset(("persist",))
    ),
    Rewrite("persist", "programs that stay and take tile after tile", programs.persist),
    Rewrite("split-sum", "several programs share a sum of dots", splitting.split_sum, True),
    Rewrite("describe", "tiles through tensor descriptors", descriptors.describe),
    Rewrite("group", "tiles in bands that share the cache", ordering.group),
    Rewrite("exchange", "the second grid axis varies fastest", ordering.exchange),
    Rewrite("reverse", "the longest programs first", ordering.reverse),
    Rewrite("accumulate", "dots add to their accumulator", arithmetic.accumulate, True),
    Rewrite("exp2", "exp as exp2 of a multiply-add", arithmetic.exp2, True),
    Rewrite("reciprocal", "products for quotients", arithmetic.reciprocal, True),
    Rewrite("flatten", "a loop nest in one pipeline", pipelining.flatten),
    Rewrite("pipeline", "loads run iterations ahead", pipelining.pipeline),
    Rewrite("unroll", "loops unrolled", pipelining.unroll),
    Rewrite("single-buffer", "one accumulator in tensor memory", pipelining.single_buffer),
    Rewrite("specialise-warps", "loads and dots in warps of their own", pipelining.specialise_warps),
    Rewrite("evict", "eviction policies by reuse", caching.evict),
    Rewrite("bypass-l1", "loads read once do not fill L1", caching.bypass_l1),
    Rewrite("stream-stores", "results past the cache", caching.stream_stores),
)

_AGAIN = 0.7
"""A variant's promise counts this much for each one already taken with the same rewrites."""
_WITH = 0.3
"""Share of the smaller promise that counts where two rewrites are combined: gains rarely add up."""
_PARTNERS = 6
"""Rewrites that are combined with one another: all pairs of so many would be too many to order well."""
_WORTH = 0.4
"""The least promise of a rewrite that joins another one, as a share of the other's."""


@dataclass(frozen=True)
class Found:
    """One edited source, and the rewrites that made it."""

    rewrites: tuple[Rewrite, ...]
    edit: Edit

    @property
    def names(self) -> tuple[str, ...]:
        """Of its rewrites."""
        return tuple(r.name for r in self.rewrites)

    @property
    def lead(self) -> str:
        """The first of its rewrites."""
        return self.names[0]


def variants_of(
    source: str,
    entry: str,
    base_sha256: str,
    *,
    limit: int = 12,
    combine: bool = True,
    only: Sequence[str] = (),
    configs: Iterable[Config] = (),
    arguments: Iterable[Argument] = (),
    arch: int = 90,
    multiprocessors: int = 132,
) -> list[Variant]:
    """Variants that known rewrites make of a kernel; most promising first, always in the same order.

    Args:
        source: one self-contained module: imports, helpers, the entry.
        entry: name of the kernel.
        base_sha256: `Kernel.source_sha256` of the base.
        limit: the most variants.
        combine: whether rewrites are applied to the results of other rewrites, too.
        only: names of rewrites to use; all by default.
        configs: the base's configs; rewrites that need other tiles extend them.
        arguments: one call's arguments, where known.
        arch: compute capability times ten.
        multiprocessors: of the device.

    Returns:
        Variants without duplicates. `extra["rewrites"]` names the rewrites, `extra["approximate"]` says
        whether results may differ from the base's by rounding.

    Raises:
        RecordError: the source is not Python or does not define the entry.
        ValueError: `only` names a rewrite that does not exist.
    """
    names = [r.name for r in REWRITES]
    if unknown := [n for n in only if n not in names]:
        raise ValueError(f"no rewrite is named {unknown}; there are {names}")
    context = Context(arch, tuple(configs), tuple(arguments), multiprocessors)
    unit = inlined(Unit.parse(source, entry))
    chosen = [r for r in REWRITES if not only or r.name in only]
    singles = [found for rewrite in chosen for found in _apply(rewrite, unit, context)]
    every = [*singles, *(_combined(singles, context) if combine else ())]
    seen = {_form(unit)}
    distinct = []
    for found in every:
        form = _form(found.edit.unit, found.edit.configs)
        if form not in seen and found.edit.unit.runtime() == unit.runtime():
            seen.add(form)
            distinct.append(found)
    return [_variant(found, base_sha256) for found in _ranked(distinct)[:limit]]


def _apply(rewrite: Rewrite, unit: Unit, context: Context) -> Iterator[Found]:
    try:
        edits = list(rewrite.apply(unit, context))
        for edit in edits:
            compile(edit.unit.text(), "<variant>", "exec")
    except Exception as error:
        # One rewrite that a kernel's text confuses must not cost the others.
        warnings.warn(
            f"the rewrite {rewrite.name} failed on {unit.entry_name} and is left out: "
            f"{type(error).__name__}: {error}",
            stacklevel=3,
        )
        return
    for edit in edits:
        # Texts are read again, so that every tree has the line numbers of its own text.
        yield Found((rewrite,), replace(edit, unit=Unit.parse(edit.unit.text(), unit.entry_name)))


def _combined(singles: Sequence[Found], context: Context) -> Iterator[Found]:
    """Pairs of rewrites, and the best pairs with a third."""
    best: dict[str, Found] = {}
    for found in singles:
        if found.lead not in best or found.edit.promise > best[found.lead].edit.promise:
            best[found.lead] = found
    order = {r.name: i for i, r in enumerate(REWRITES)}
    partners = sorted(best.values(), key=lambda f: (-f.edit.promise, order[f.lead]))[:_PARTNERS]
    pairs = []
    for first in partners:
        for second in partners:
            if order[first.lead] < order[second.lead]:
                pairs += _with(first, second, context)
    yield from pairs
    for pair in sorted(pairs, key=lambda f: -f.edit.promise)[:_PARTNERS]:
        for third in partners:
            if order[pair.rewrites[-1].name] < order[third.lead]:
                yield from _with(pair, third, context)


def _with(first: Found, second: Found, context: Context) -> list[Found]:
    """The best edit of a rewrite on top of others; nothing where it would hardly add to them."""
    (rewrite,) = second.rewrites
    low, high = sorted((first.edit.promise, second.edit.promise))
    if low < _WORTH * high or any(rewrite.name in r.apart for r in first.rewrites):
        return []
    known = replace(context, configs=first.edit.configs or context.configs)
    found = list(_apply(rewrite, first.edit.unit, known))
    if not found:
        return []
    edit = max(found, key=lambda f: f.edit.promise).edit
    promises = sorted((first.edit.promise, edit.promise))
    joined = Edit(
        edit.unit,
        f"{first.edit.note}; {edit.note}",
        promises[1] + _WITH * promises[0],
        edit.configs or first.edit.configs,
    )
    return [Found((*first.rewrites, rewrite), joined)]


def _form(unit: Unit, configs: Sequence[Config] = ()) -> str:
    """Digest of a source and its configs; formatting does not count."""
    return digest(ast.dump(unit.tree), [c.to_json() for c in configs])


def _ranked(found: Sequence[Found]) -> list[Found]:
    """Most promising first, in turns: a rewrite that was just taken waits for others a little."""
    left, taken = list(found), Counter[str]()
    ranked = []
    while left:
        promise = [f.edit.promise * _AGAIN ** (sum(taken[n] for n in f.names) / len(f.names)) for f in left]
        one = left.pop(promise.index(max(promise)))
        taken.update(one.names)
        ranked.append(one)
    return ranked


def _variant(found: Found, base_sha256: str) -> Variant:
    names = list(found.names)
    author = "+".join(f"{r.name}/{r.version}" for r in found.rewrites)
    approximate = any(r.approximate for r in found.rewrites)
    note = found.edit.note + (" (approximate: rounds in another order)" if approximate else "")
    variant = Variant.of(
        found.edit.unit.entry_name,
        base_sha256,
        found.edit.unit.text(),
        Provenance(Origin.MECHANICAL, author=author, note=note),
        title="+".join(names),
        configs=found.edit.configs,
    )
    return replace(variant, extra={"rewrites": names, "approximate": approximate})
