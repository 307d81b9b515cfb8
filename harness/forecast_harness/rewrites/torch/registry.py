"""Every rewrite, and what they make of a source, alone and in pairs."""

from __future__ import annotations

import ast
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from forecast_autotune import parsing
from forecast_autotune.errors import RecordError
from forecast_harness.rewrites.torch import (
    algebra,
    chunking,
    constants,
    fused,
    inplace,
    loops,
    matching,
    products,
    structure,
)
from forecast_harness.rewrites.torch.code import Code
from forecast_harness.rewrites.torch.protocol import Edit, Facts, Rewrite

PAIRS = 400
"""Most combinations of two rewrites that are made of one source."""


def _by_rules(rules: Iterable[matching.Rule]) -> Callable[[Code, Facts], Iterable[Edit]]:
    taken = tuple(rules)

    def apply(code: Code, facts: Facts) -> Iterator[Edit]:
        for rule in taken:
            yield from matching.rewritten(code, rule)

    return apply


def _ruled() -> Iterator[Rewrite]:
    grouped: dict[str, list[matching.Rule]] = defaultdict(list)
    for rule in (*fused.RULES, *algebra.RULES):
        grouped[rule.name].append(rule)
    for name, rules in grouped.items():
        yield Rewrite(name, _by_rules(rules))


REWRITES: tuple[Rewrite, ...] = (
    # In the order in which they are applied to one another: what shows patterns first, what hides them last.
    *_ruled(),
    Rewrite("einsum-to-matmul", products.einsum_to_matmul),
    Rewrite("once", structure.once),
    Rewrite("hoist", loops.hoist),
    Rewrite("pointwise-first", loops.pointwise_first),
    Rewrite("rows-together", loops.rows_together),
    Rewrite("contiguous-operands", products.contiguous_operands),
    Rewrite("overwrite", inplace.overwrite),
    Rewrite("destinations", inplace.destinations),
    Rewrite("inference-mode", structure.inference_mode),
    Rewrite("chunk-rows", chunking.chunk_rows),
    Rewrite("constants", constants.scatter),
)


@dataclass(frozen=True)
class Made:
    """An edited source and the rewrites that made it."""

    names: tuple[str, ...]
    text: str = field(repr=False)
    note: str


def rewrites_of(source: str, entry: str, facts: Facts | None = None, *, combine: bool = True) -> list[Made]:
    """What the rewrites make of a source, each different text once: single ones, then pairs.

    Always in the same order. Raises `RecordError` for a source that is not Python.
    """
    facts = facts or Facts()
    code = Code.parse(source, entry)
    seen = {_form(source)}
    singles = [made for rewrite in REWRITES for made in _apply(rewrite, code, facts, seen)]
    pairs: list[Made] = []
    if combine:
        order = {r.name: i for i, r in enumerate(REWRITES)}
        for first in singles:
            inner = Code.parse(first.text, entry)
            for second in REWRITES[order[first.names[0]] + 1 :]:
                if len(pairs) >= PAIRS:
                    break
                for made in _apply(second, inner, facts, seen):
                    pairs.append(Made((*first.names, *made.names), made.text, f"{first.note}; {made.note}"))
    return [*singles, *pairs[:PAIRS]]


def _apply(rewrite: Rewrite, code: Code, facts: Facts, seen: set[str]) -> Iterator[Made]:
    try:
        edits = list(rewrite.apply(code, facts))
        for edit in edits:
            compile(edit.text, "<proposal>", "exec")
    except (
        AssertionError,
        AttributeError,
        IndexError,
        KeyError,
        RecordError,
        SyntaxError,
        TypeError,
        ValueError,
    ) as e:
        # One rewrite that a text confuses must not cost the others.
        warnings.warn(f"the rewrite {rewrite.name} is left out: {type(e).__name__}: {e}", stacklevel=2)
        return
    for edit in edits:
        if (form := _form(edit.text)) not in seen:
            seen.add(form)
            yield Made((rewrite.name,), edit.text, edit.note)


def _form(text: str) -> str:
    return ast.dump(parsing.module(text))
