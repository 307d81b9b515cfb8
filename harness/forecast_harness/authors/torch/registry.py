"""Every rewrite, and what they make of a source, alone and in pairs."""

from __future__ import annotations

import ast
import itertools
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from forecast_autotune import python_parser
from forecast_autotune.errors import RecordError
from forecast_harness.authors.torch import functions, inplace, rules
from forecast_harness.authors.torch.source_code import InputFacts, ParsedSource, TorchEdit, TorchRewrite
from forecast_harness.authors.triton.analysis.source_unit import MAX_EDITS

MAX_PAIRS = 400
"""Most combinations of two rewrites that are made of one source."""


def _rule_rewrites() -> Iterator[TorchRewrite]:
    """One rewrite for all rules of a name."""
    grouped: dict[str, list[rules.RewriteRule]] = defaultdict(list)
    for rule in rules.RULES:
        grouped[rule.name].append(rule)
    for name, named in grouped.items():
        yield TorchRewrite(name, partial(_apply_rules, tuple(named)))


def _apply_rules(
    taken: Iterable[rules.RewriteRule], code: ParsedSource, facts: InputFacts
) -> Iterator[TorchEdit]:
    for rule in taken:
        yield from rules.apply_rule(code, rule)


REWRITES: tuple[TorchRewrite, ...] = (
    # In the order in which they are applied to one another: what shows patterns first, what hides them last.
    *_rule_rewrites(),
    TorchRewrite("einsum-to-matmul", functions.einsum_to_matmul),
    TorchRewrite("contiguous-operands", functions.contiguous_operands),
    TorchRewrite("overwrite", inplace.operate_in_place),
    TorchRewrite("destinations", inplace.write_with_out),
    TorchRewrite("inference-mode", functions.inference_mode),
    TorchRewrite("chunk-rows", functions.chunk_rows),
    TorchRewrite("constants", functions.vary_constants),
)


@dataclass(frozen=True)
class RewrittenSource:
    """An edited source and the rewrites that made it."""

    names: tuple[str, ...]
    text: str = field(repr=False)
    note: str


def rewrites_of(
    source: str, entry: str, facts: InputFacts | None = None, *, combine: bool = True
) -> list[RewrittenSource]:
    """All rewrites of a source, each different text once: single ones, then pairs.

    Always in the same order. Raises `RecordError` for a source that is not Python.
    """
    facts = facts or InputFacts()
    code = ParsedSource.parse(source, entry)
    seen = {_canonical_form(source)}
    singles = [edited for rewrite in REWRITES for edited in _apply_rewrite(rewrite, code, facts, seen)]
    pairs: list[RewrittenSource] = []
    if combine:
        order = {r.name: i for i, r in enumerate(REWRITES)}
        for first in singles:
            inner = ParsedSource.parse(first.text, entry)
            for second in REWRITES[order[first.names[0]] + 1 :]:
                if len(pairs) >= MAX_PAIRS:
                    break
                for edited in _apply_rewrite(second, inner, facts, seen):
                    pairs.append(
                        RewrittenSource(
                            (*first.names, *edited.names), edited.text, f"{first.note}; {edited.note}"
                        )
                    )
    return [*singles, *pairs[:MAX_PAIRS]]


def _apply_rewrite(
    rewrite: TorchRewrite, code: ParsedSource, facts: InputFacts, seen: set[str]
) -> Iterator[RewrittenSource]:
    try:
        edits = list(itertools.islice(rewrite.apply(code, facts), MAX_EDITS))
        for edit in edits:
            compile(edit.text, "<proposal>", "exec")
    except (
        AssertionError,
        AttributeError,
        IndexError,
        KeyError,
        MemoryError,
        RecordError,
        RecursionError,
        SyntaxError,
        TypeError,
        ValueError,
    ) as e:
        # One rewrite that a text confuses must not cost the others.
        warnings.warn(f"the rewrite {rewrite.name} is left out: {type(e).__name__}: {e}", stacklevel=2)
        return
    for edit in edits:
        if (form := _canonical_form(edit.text)) not in seen:
            seen.add(form)
            yield RewrittenSource((rewrite.name,), edit.text, edit.note)


def _canonical_form(text: str) -> str:
    return ast.dump(python_parser.parse_module(text))
