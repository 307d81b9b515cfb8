"""Every rewrite, and the variants they make of a source, alone and together."""

from __future__ import annotations

import ast
import copy
import itertools
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from forecast_autotune.records import Argument, Config, digest
from forecast_autotune.variants.records import Origin, Provenance, Variant
from forecast_harness.authors.triton import local_changes, masks, one_pass, split_reductions
from forecast_harness.authors.triton.analysis.source_unit import (
    MAX_EDITS,
    Function,
    SourceUnit,
    arguments,
    assigned_names,
    docstring_length,
    names,
    read_names,
    swap_expressions,
)
from forecast_harness.authors.triton.protocol import RewriteContext, SourceEdit, TritonRewrite

_ROUNDS = 4
"""The depth to which helpers may call helpers."""


def inline_helpers(unit: SourceUnit) -> SourceUnit:
    """A copy with calls of one-expression helpers replaced by the expression. Helpers stay defined."""
    draft = unit.copy()
    for _ in range(_ROUNDS):
        count = 0
        for function in draft.kernels:
            values = {}
            for call in draft.helper_calls(function):
                value = _inline_value(draft, function, call)
                if value is not None:
                    values[id(call)] = value
            swap_expressions(function, values)
            count += len(values)
        if not count:
            break
    return SourceUnit.parse(draft.text(), draft.entry_name)


def _inline_value(unit: SourceUnit, caller: Function, call: ast.Call) -> ast.expr | None:
    assert isinstance(call.func, ast.Name)
    helper = unit.functions[call.func.id]
    body = helper.body[docstring_length(helper.body) :]
    bindings = _bind_arguments(helper, call)
    if len(body) != 1 or not isinstance(body[0], ast.Return) or body[0].value is None or bindings is None:
        return None
    # `@triton.jit` with options is not inlined: `noinline` is somebody's wish.
    if helper is caller or any(isinstance(d, ast.Call) for d in helper.decorator_list):
        return None
    value = copy.deepcopy(body[0].value)
    free = read_names(value) - set(bindings)
    inner = unit.effects(value) or any(isinstance(n, ast.Lambda | ast.NamedExpr) for n in ast.walk(value))
    if inner or free & (names(caller) - unit.constexprs(caller) | set(assigned_names(caller))) - {unit.tl}:
        return None
    count = {p: sum(isinstance(n, ast.Name) and n.id == p for n in ast.walk(value)) for p in bindings}
    if any(unit.effects(a) and count[p] != 1 for p, a in bindings.items()):
        return None  # one load would become two, or none
    parts = [n for n in ast.walk(value) if isinstance(n, ast.Name) and n.id in bindings]
    if isinstance(value, ast.Name):
        return copy.deepcopy(bindings[value.id]) if value.id in bindings else None
    return swap_expressions(value, {id(n): copy.deepcopy(bindings[n.id]) for n in parts})


def _bind_arguments(helper: Function, call: ast.Call) -> dict[str, ast.expr] | None:
    """Arguments by parameter; None where the call leaves some to defaults or spreads them."""
    parameters = [a.arg for a in arguments(helper)]
    if any(isinstance(a, ast.Starred) for a in call.args) or helper.args.vararg or helper.args.kwarg:
        return None
    bindings = dict(zip(parameters, call.args, strict=False))
    for keyword in call.keywords:
        if keyword.arg is None or keyword.arg in bindings:
            return None
        bindings[keyword.arg] = keyword.value
    return bindings if set(bindings) == set(parameters) else None


REWRITES: tuple[TritonRewrite, ...] = (
    # In the order in which they are applied to one another: structure first, hints last. Functions touch
    # nothing else, and stand first, so that rewrites which only add code to them are left out.
    TritonRewrite("sigmoid", local_changes.sigmoid, True, frozenset(("interior",))),
    TritonRewrite("one-pass", one_pass.one_pass, incompatible=frozenset(("peel", "pipeline", "unroll"))),
    TritonRewrite("peel", masks.peel),
    TritonRewrite("interior", masks.interior),
    TritonRewrite("split-reduction", split_reductions.split_reduction, True),
    TritonRewrite("exp2", local_changes.exp2, True),
    TritonRewrite("pipeline", local_changes.pipeline),
    TritonRewrite("unroll", local_changes.unroll),
    TritonRewrite("evict", local_changes.evict),
    TritonRewrite("stream-stores", local_changes.stream_stores),
)

_REPEAT_DISCOUNT = 0.7
"""A variant's promise counts this much for each one already taken with the same rewrites."""
_PARTNER_SHARE = 0.3
"""Share of the smaller promise that counts where two rewrites are combined: gains rarely add up."""
_MAX_PARTNERS = 6
"""Rewrites that are combined with one another: all pairs of so many would be too many to order well."""
_MIN_GAIN = 0.4
"""The least promise of a rewrite that joins another one, as a share of the other's."""


@dataclass(frozen=True)
class AppliedRewrites:
    """One edited source, and the rewrites that made it."""

    rewrites: tuple[TritonRewrite, ...]
    edit: SourceEdit

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its rewrites."""
        return tuple(r.name for r in self.rewrites)

    @property
    def leading_name(self) -> str:
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
    context = RewriteContext(tuple(configs), tuple(arguments))
    unit = inline_helpers(SourceUnit.parse(source, entry))
    rewrites = [r for r in REWRITES if not only or r.name in only]
    singles = [result for rewrite in rewrites for result in _apply(rewrite, unit, context)]
    every = [*singles, *(_combine(singles, context) if combine else ())]
    forms = {_normal_form(unit)}
    distinct = []
    for result in every:
        form = _normal_form(result.edit.unit, result.edit.configs)
        if form not in forms and result.edit.unit.runtime_parameters() == unit.runtime_parameters():
            forms.add(form)
            distinct.append(result)
    return [_variant(result, base_sha256) for result in _rank(distinct)[:limit]]


def _apply(rewrite: TritonRewrite, unit: SourceUnit, context: RewriteContext) -> Iterator[AppliedRewrites]:
    try:
        edits = list(itertools.islice(rewrite.apply(unit, context), MAX_EDITS))
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
        yield AppliedRewrites(
            (rewrite,), replace(edit, unit=SourceUnit.parse(edit.unit.text(), unit.entry_name))
        )


def _combine(singles: Sequence[AppliedRewrites], context: RewriteContext) -> Iterator[AppliedRewrites]:
    """Pairs of rewrites, and the best pairs with a third."""
    best: dict[str, AppliedRewrites] = {}
    for result in sorted(singles, key=lambda f: -f.edit.expected_gain):
        best.setdefault(result.leading_name, result)
    order = {r.name: i for i, r in enumerate(REWRITES)}
    partners = list(best.values())[:_MAX_PARTNERS]
    pairs = []
    for first in partners:
        for second in partners:
            if order[first.leading_name] < order[second.leading_name]:
                pairs += _apply_on_top(first, second, context)
    yield from pairs
    for pair in sorted(pairs, key=lambda f: -f.edit.expected_gain)[:_MAX_PARTNERS]:
        for third in partners:
            if order[pair.rewrites[-1].name] < order[third.leading_name]:
                yield from _apply_on_top(pair, third, context)


def _apply_on_top(
    first: AppliedRewrites, second: AppliedRewrites, context: RewriteContext
) -> list[AppliedRewrites]:
    """The best edit of a rewrite on top of others; nothing where it would hardly add to them."""
    (rewrite,) = second.rewrites
    low, high = sorted((first.edit.expected_gain, second.edit.expected_gain))
    if low < _MIN_GAIN * high or any(rewrite.name in r.incompatible for r in first.rewrites):
        return []
    inner_context = replace(context, configs=first.edit.configs or context.configs)
    results = list(_apply(rewrite, first.edit.unit, inner_context))
    if not results:
        return []
    edit = max(results, key=lambda f: f.edit.expected_gain).edit
    promises = sorted((first.edit.expected_gain, edit.expected_gain))
    joint_edit = SourceEdit(
        edit.unit,
        f"{first.edit.note}; {edit.note}",
        promises[1] + _PARTNER_SHARE * promises[0],
        edit.configs or first.edit.configs,
    )
    return [AppliedRewrites((*first.rewrites, rewrite), joint_edit)]


def _normal_form(unit: SourceUnit, configs: Sequence[Config] = ()) -> str:
    """Digest of a source and its configs; formatting does not count."""
    return digest(ast.dump(unit.tree), [c.to_json() for c in configs])


def _rank(results: Sequence[AppliedRewrites]) -> list[AppliedRewrites]:
    """Most promising first, in turns: a rewrite that was just taken waits for others a little."""
    rest, counts = list(results), Counter[str]()
    order = []
    while rest:
        promise = [
            f.edit.expected_gain * _REPEAT_DISCOUNT ** (sum(counts[n] for n in f.names) / len(f.names))
            for f in rest
        ]
        best = rest.pop(promise.index(max(promise)))
        counts.update(best.names)
        order.append(best)
    return order


def _variant(result: AppliedRewrites, base_sha256: str) -> Variant:
    names = list(result.names)
    author = "+".join(f"{r.name}/{r.version}" for r in result.rewrites)
    approximate = any(r.approximate for r in result.rewrites)
    note = result.edit.note + (" (approximate: rounds in another order)" if approximate else "")
    variant = Variant.of(
        result.edit.unit.entry_name,
        base_sha256,
        result.edit.unit.text(),
        Provenance(Origin.REWRITE, author=author, note=note),
        title="+".join(names),
        configs=result.edit.configs,
    )
    return replace(variant, extra={"rewrites": names, "approximate": approximate})
