"""Training, validation and test sides of a set of tables, kept apart by family, device or time.

Nothing is split by row: rows of one kernel repeat each other. A kernel whose source is nearly that of
another counts as the same kernel, whatever it is called.
"""

from __future__ import annotations

import ast
import io
import textwrap
import tokenize
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import combinations
from typing import Literal, TypeAlias, get_args

from forecast_autotune import python_parser
from forecast_autotune.records import digest
from forecast_autotune.records.table import Table
from forecast_train.evaluation.splits import LeakageError, SplitError, family_of, kernel_identities, kernel_of

SplitBy: TypeAlias = Literal["family", "device", "time"]
SPLIT_KINDS: tuple[SplitBy, ...] = get_args(SplitBy)
SIDES = ("train", "validation", "test")
NEAR_DUPLICATE = 0.8
"""Share of common token sequences (Jaccard) from which on two sources count as one kernel."""
_SHINGLE_TOKENS = 6
"""Tokens of a sequence: long enough that common phrases of the language do not count."""

Sides: TypeAlias = Mapping[str, list[Table]]


def split(
    tables: Sequence[Table],
    by: SplitBy = "family",
    *,
    shares: tuple[float, float] = (0.15, 0.15),
    hold_out: Sequence[str] = (),
    seed: int = 0,
) -> Sides:
    """`train`, `validation` and `test` tables, checked by `check_sides`.

    family, device: whole groups go to one side, drawn from the seed until `shares` (validation, test) of the
    tables are reached; groups named in `hold_out` are the test side instead. time: the latest tables are
    tested, the ones before validate. Under `family`, tables of the training side whose kernel is (nearly)
    one of another side are dropped. Raises `SplitError` where a side would be empty.
    """
    if min(shares) <= 0 or sum(shares) >= 1:
        raise SplitError(f"shares of validation and test are positive and leave a rest, got {shares}")
    groups = _groups(tables, by)
    if unknown := set(hold_out) - groups.keys():
        raise SplitError(f"no {by} is named {', '.join(sorted(unknown))}: there are {', '.join(groups)}")
    order = list(groups) if by == "time" else sorted(groups, key=lambda name: digest(seed, name))
    test = list(hold_out) or _last_groups(order, groups, shares[1] * len(tables))
    rest = [name for name in order if name not in test]
    validation = _last_groups(rest, groups, shares[0] * len(tables))
    train = [name for name in rest if name not in validation]
    names = dict(zip(SIDES, (train, validation, test), strict=True))
    made = {side: [t for name in names[side] for t in groups[name]] for side in SIDES}
    if by == "family":
        _drop_known(made)
    if empty := [side for side in SIDES if not made[side]]:
        raise SplitError(
            f"nothing is left for {', '.join(empty)}: {len(tables)} tables of {len(groups)} groups by {by} "
            "are too few; add tables or take another split"
        )
    check_sides(made, by)
    return made


def _last_groups(order: Sequence[str], groups: Mapping[str, list[Table]], most: float) -> list[str]:
    """The last group and those before it, as long as they hold no more than `most` tables together."""
    taken: list[str] = []
    for name in reversed(order):
        if taken and sum(len(groups[n]) for n in (*taken, name)) > most:
            break
        taken.append(name)
    return taken


def _groups(tables: Sequence[Table], by: SplitBy) -> dict[str, list[Table]]:
    if by not in SPLIT_KINDS:
        raise SplitError(f"a split is by {', '.join(SPLIT_KINDS)}, got {by!r}")
    if by == "time":
        when = sorted(tables, key=lambda t: (max((m.at for m in t.measurements), default=""), t.problem.id))
        return {t.problem.id: [t] for t in when}
    name: Callable[[Table], str] = (
        (lambda t: family_of(t.problem)) if by == "family" else (lambda t: t.problem.device.slug)
    )
    groups: dict[str, list[Table]] = {}
    for table in tables:
        groups.setdefault(name(table), []).append(table)
    return groups


def _drop_known(sides: dict[str, list[Table]]) -> None:
    """Of each pair of sides, the one that is learnt from gives way."""
    for learnt, judged in (("train", "test"), ("train", "validation"), ("validation", "test")):
        kept = [t for t in sides[learnt] if not any(_same_kernel(t, other) for other in sides[judged])]
        sides[learnt] = kept


def check_sides(sides: Sides, by: SplitBy) -> None:
    """Raise `LeakageError` if two sides share what the split keeps apart.

    Always: a problem. family: a kernel's name, its normalised source, or nearly its source. device: a device.
    """
    for a, b in combinations(sides, 2):
        for one in sides[a]:
            for two in sides[b]:
                if shared := _shared(one, two, by):
                    raise LeakageError(
                        f"{a} and {b} share {shared}: {kernel_of(one.problem)} ({one.problem.id}) and "
                        f"{kernel_of(two.problem)} ({two.problem.id}). Drop one of them, or build the sides "
                        "with forecast_train.llm.data.split"
                    )


def _shared(one: Table, two: Table, by: SplitBy) -> str:
    if one.problem.id == two.problem.id:
        return "a problem"
    if by == "device" and one.problem.device.slug == two.problem.device.slug:
        return f"the device {one.problem.device.slug}"
    if by == "family" and _same_kernel(one, two):
        return "a kernel, by name or by (nearly) its source"
    return ""


def _same_kernel(one: Table, two: Table) -> bool:
    if kernel_identities(one.problem) & kernel_identities(two.problem):
        return True
    a, b = one.problem.kernel.source, two.problem.kernel.source
    return bool(a.strip() and b.strip()) and source_similarity(a, b) >= NEAR_DUPLICATE


@lru_cache(maxsize=65536)
def source_similarity(a: str, b: str) -> float:
    """Share of token sequences that two sources have in common (Jaccard), 0 to 1.

    Names of variables and functions do not count, so renaming changes nothing.
    """
    one, two = _shingles(a), _shingles(b)
    return len(one & two) / max(1, len(one | two))


@lru_cache(maxsize=4096)
def _shingles(source: str) -> frozenset[tuple[str, ...]]:
    tokens = _tokens(textwrap.dedent(source))
    return frozenset(
        tuple(tokens[i : i + _SHINGLE_TOKENS]) for i in range(max(1, len(tokens) - _SHINGLE_TOKENS + 1))
    )


def _tokens(source: str) -> list[str]:
    """Tokens without comments, docstrings and layout; names of variables replaced by a place holder."""
    try:
        source = ast.unparse(_without_docstrings(python_parser.parse_module(source)))
        words = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.string.strip()]
    except (SyntaxError, ValueError, RecursionError, tokenize.TokenError):
        return source.split()
    shown = []
    for i, t in enumerate(words):
        # What follows a dot is the language's own word (`tl.load`): that stays.
        own = t.type == tokenize.NAME and not (i and words[i - 1].string == ".")
        shown.append("name" if own and t.string not in _WORDS else t.string)
    return shown


_WORDS = frozenset(("def", "for", "in", "if", "else", "while", "return", "range", "tl", "not", "and", "or"))


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and len(node.body) > 1:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                node.body = node.body[1:]
    return tree
