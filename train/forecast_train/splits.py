"""Folds and sides over tables: what is left out, what may be learnt from, and a check that the two are apart.

Nothing is split by row: rows of one kernel repeat each other.
"""

from __future__ import annotations

import ast
import hashlib
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

from forecast_autotune import python_parser
from forecast_autotune.errors import ForecastAutotuneError
from forecast_autotune.records import Problem, digest
from forecast_autotune.records.table import Table
from forecast_autotune.store.formats import FORMATS, TABLE
from forecast_autotune.store.formats.protocol import IMPORTED_FROM
from forecast_autotune.surrogates.protocol import Relative
from forecast_autotune.tuning.replays.replay import tables_of_other_shapes

LeaveOut: TypeAlias = Literal["family", "hand", "kernel", "shape", "device"]
Sides: TypeAlias = Mapping[str, list[Table]]
_SIDES = ("train", "validation", "test")


class LeakageError(ForecastAutotuneError, ValueError):
    """The same kernel (or device) stands on both sides of a split."""


class SplitError(ForecastAutotuneError, ValueError):
    """Tables that cannot be split in the way asked for."""


@dataclass(frozen=True)
class Fold:
    """One split: `test` is forecast by what was fitted on `train`."""

    name: str
    kind: LeaveOut
    test: tuple[Table, ...]
    train: tuple[Table, ...]
    dropped: int = 0
    """Tables of other groups that hold a kernel of the test side, so neither side has them."""

    def relatives(self, table: Table) -> list[Relative]:
        """The tables that may be known of a test problem's kernel elsewhere, nearest first.

        The kernel's other problems on the same device, in full, when shapes are left out; else nothing.
        """
        if self.kind != "shape":
            return []
        return nearest_relatives(table.problem, self.train)


def nearest_relatives(problem: Problem, tables: Iterable[Table]) -> list[Relative]:
    """The tables of the same kernel function on the same device, as relatives, nearest first; ties by id."""
    by_id = sorted(tables, key=lambda t: t.problem.id)
    return [Relative(t.problem, t.measurements) for t in tables_of_other_shapes(problem, by_id)]


def kernel_of(problem: Problem) -> str:
    """The kernel's name in reports: what stands before the slash of the label, else the function's name."""
    label = problem.extra.get("label")
    if isinstance(label, str) and "/" in label:
        return label.split("/", 1)[0]
    return problem.kernel.name


def family_of(problem: Problem) -> str:
    """The family of a kernel (`extra["family"]`), else the kernel's name."""
    return str(problem.extra.get("family") or kernel_of(problem))


def hand_of(problem: Problem) -> str:
    """The author or code base (`extra["hand"]`), the tool that it was imported from, or `unknown`."""
    return str(problem.extra.get("hand") or problem.extra.get(IMPORTED_FROM) or "unknown")


def rows_by_tool(rows: Iterable[str]) -> dict[str, int]:
    """Rows by the tool that measured them, of the hands of all rows: those of no known tool are this project's."""
    tools = {each.name for each in FORMATS}
    return dict(Counter(hand if hand in tools else TABLE.tool for hand in rows))


def tools_text(counts: Mapping[str, int]) -> str:
    """The counts in words."""
    return "rows by tool: " + ", ".join(f"{n} of {tool}" for tool, n in counts.items())


_GROUP_KEYS: dict[LeaveOut, Callable[[Problem], str]] = {
    "family": family_of,
    "hand": hand_of,
    "kernel": kernel_of,
    "device": lambda problem: problem.device.slug,
}


def make_folds(tables: Sequence[Table], leave_out: LeaveOut) -> list[Fold]:
    """All folds of a kind, by name. Every fold has passed `check_leakage`.

    family, hand, kernel: one group is the test side; tables of other groups that share a kernel's name or
    normalised source with it are dropped from training. device: one device is the test side, and the same
    kernels may have been measured on the others. shape: fold i tests the i-th problem of each kernel that
    has several, and learns from all the rest.

    Raises `SplitError` when there is only one group.
    """
    if leave_out == "shape":
        return _shape_folds(tables)
    name = _GROUP_KEYS[leave_out]
    groups: dict[str, list[Table]] = {}
    for table in tables:
        groups.setdefault(name(table.problem), []).append(table)
    if len(groups) < 2:
        raise SplitError(
            f"leaving out one {leave_out} at a time needs two or more, and all {len(tables)} problems are of "
            f"{', '.join(groups) or 'none'}: add tables, or leave out something else"
        )
    folds = []
    for group, test in sorted(groups.items()):
        identities = {i for t in test for i in kernel_identities(t.problem)}
        other_tables = [t for key, rows in groups.items() if key != group for t in rows]
        # Another device may know the kernel: that is what is asked there.
        apart = leave_out != "device"
        train = [t for t in other_tables if not (apart and identities & kernel_identities(t.problem))]
        folds.append(Fold(group, leave_out, tuple(test), tuple(train), len(other_tables) - len(train)))
        check_leakage(folds[-1])
    return folds


def _shape_folds(tables: Sequence[Table]) -> list[Fold]:
    kernels: dict[tuple[str, str], list[Table]] = {}
    for table in tables:
        kernels.setdefault((kernel_of(table.problem), table.problem.device.slug), []).append(table)
    several = [rows for rows in kernels.values() if len(rows) > 1]
    if not several:
        raise SplitError(
            f"leaving out one shape at a time needs a kernel with two problems, and the {len(kernels)} "
            "kernels have one each: add tables, or leave out the kernel"
        )
    folds = []
    for i in range(max(map(len, several))):
        test = tuple(rows[i] for rows in several if i < len(rows))
        ids = {t.problem.id for t in test}
        folds.append(Fold(f"shape-{i}", "shape", test, tuple(t for t in tables if t.problem.id not in ids)))
        check_leakage(folds[-1])
    return folds


def kernel_identities(problem: Problem) -> frozenset[str]:
    """Names under which two problems count as one kernel: label, function, normalised source."""
    names = {f"name {kernel_of(problem).lower()}", f"name {problem.kernel.name.lower()}"}
    if problem.kernel.source.strip():
        names.add(f"source {source_hash(problem.kernel.source)}")
    elif problem.kernel.source_sha256:
        names.add(f"sha256 {problem.kernel.source_sha256}")
    return frozenset(names)


def family_groups(tables: Iterable[Table], count: int) -> list[list[Table]]:
    """Whole families in so many groups, or one each if they are fewer, of about equally many problems."""
    families: dict[str, list[Table]] = {}
    for table in tables:
        families.setdefault(family_of(table.problem), []).append(table)
    groups: list[list[Table]] = [[] for _ in range(min(count, len(families)))]
    for _, some in sorted(families.items(), key=lambda item: (-len(item[1]), item[0])):
        min(groups, key=len).extend(some)
    return groups


def tables_without(tables: Iterable[Table], group: Iterable[Table]) -> list[Table]:
    """The tables that share no kernel with a group: those of the group neither."""
    identities = {i for t in group for i in kernel_identities(t.problem)}
    return [t for t in tables if not identities & kernel_identities(t.problem)]


def check_leakage(fold: Fold) -> None:
    """Raise `LeakageError` if the train side holds what the fold claims to leave out.

    shape: the same problem. device: the same device. Else: a kernel of the same name or normalised source.
    """
    for name, of in _leakage_keys(fold.kind):
        tables_by_key = {i: t for t in fold.train for i in of(t.problem)}
        for table in fold.test:
            for key in sorted(of(table.problem) & tables_by_key.keys()):
                raise LeakageError(
                    f"fold {fold.name!r} leaves out one {fold.kind}, but {name} {key!r} is on both sides: "
                    f"{_describe_table(table)} is tested, {_describe_table(tables_by_key[key])} was learnt "
                    "from. Drop one of the two, or build folds with forecast_train.splits.make_folds"
                )


def _leakage_keys(kind: LeaveOut) -> list[tuple[str, Callable[[Problem], frozenset[str]]]]:
    same: tuple[str, Callable[[Problem], frozenset[str]]] = ("problem", lambda p: frozenset((p.id,)))
    if kind == "shape":
        return [same]
    if kind == "device":
        return [same, ("device", lambda p: frozenset((p.device.slug,)))]
    return [same, ("kernel", kernel_identities)]


def _describe_table(table: Table) -> str:
    return str(table.problem.extra.get("label") or f"{table.problem.kernel.name}/{table.problem.id}")


@lru_cache(maxsize=1024)
def source_hash(source: str) -> str:
    """A hash that comments, docstrings, layout, decorators and the function's own name do not change."""
    try:
        tree = python_parser.parse_module(textwrap.dedent(source))
    except (SyntaxError, ValueError, RecursionError):
        text = re.sub(r"\s+", "", re.sub(r"#[^\n]*", "", source))
        return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:24]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                node.body = node.body[1:] or [ast.Pass()]
            node.decorator_list = []
    if tree.body and isinstance(tree.body[0], ast.FunctionDef):
        tree.body[0].name = "kernel"
    return hashlib.sha256(ast.dump(tree).encode(errors="replace")).hexdigest()[:24]


def spread_over_kernels(tables: Sequence[Table], limit: int) -> list[Table]:
    """At most `limit` tables, in turn from each kernel, so that few problems still are many kernels.

    Raises `SplitError` for a limit below 1.
    """
    if limit < 1:
        raise SplitError(f"the limit must be at least 1 problem, got {limit}")
    kernels: dict[str, list[Table]] = {}
    for table in tables:
        kernels.setdefault(kernel_of(table.problem), []).append(table)
    turns = range(max(map(len, kernels.values()), default=0))
    order = [rows[i] for i in turns for rows in kernels.values() if i < len(rows)]
    return order[:limit]


def split_sides(
    tables: Sequence[Table],
    *,
    shares: tuple[float, float] = (0.15, 0.15),
    hold_out: Sequence[str] = (),
    seed: int = 0,
) -> Sides:
    """`train`, `validation` and `test` tables.

    Whole families go to one side, drawn from the seed until `shares` (validation, test) of the tables are reached;
    those named in `hold_out` are the test side instead. Tables of the training side whose kernel is one of another
    side, by name or by normalised source, are dropped. Raises `SplitError` where a side would be empty.
    """
    groups: dict[str, list[Table]] = {}
    for table in tables:
        groups.setdefault(family_of(table.problem), []).append(table)
    if unknown := set(hold_out) - groups.keys():
        raise SplitError(f"no family is named {', '.join(sorted(unknown))}: there are {', '.join(groups)}")
    order = sorted(groups, key=lambda name: digest(seed, name))
    test = list(hold_out) or _last_groups(order, groups, shares[1] * len(tables))
    rest = [name for name in order if name not in test]
    validation = _last_groups(rest, groups, shares[0] * len(tables))
    train = [name for name in rest if name not in validation]
    names = dict(zip(_SIDES, (train, validation, test), strict=True))
    sides = {side: [t for name in names[side] for t in groups[name]] for side in _SIDES}
    # The side that is learnt from gives way, in each pair.
    for side, other_side in (("train", "test"), ("train", "validation"), ("validation", "test")):
        sides[side] = tables_without(sides[side], sides[other_side])
    if empty := [side for side in _SIDES if not sides[side]]:
        raise SplitError(
            f"nothing is left for {', '.join(empty)}: {len(tables)} tables of {len(groups)} families "
            "are too few; add tables"
        )
    return sides


def _last_groups(order: Sequence[str], groups: Mapping[str, list[Table]], most: float) -> list[str]:
    """The last group and those before it, as long as they hold no more than `most` tables together."""
    names: list[str] = []
    for name in reversed(order):
        if names and sum(len(groups[n]) for n in (*names, name)) > most:
            break
        names.append(name)
    return names
