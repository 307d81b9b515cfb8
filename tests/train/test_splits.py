"""Folds keep what they leave out apart from what is learnt from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from forecast_autotune.records import Device, Kernel, Problem
from forecast_autotune.records.table import Table
from forecast_autotune.testing import example_table
from forecast_autotune.tuning.replays.replay import load, shipped_tables
from forecast_train.splits import (
    Fold,
    LeakageError,
    check_leakage,
    hand_of,
    make_folds,
    rows_by_tool,
    source_hash,
    tools_text,
)

SOURCE = '''
@triton.jit
def scale(x, n, BLOCK: tl.constexpr):
    """Doubles."""
    tl.store(x, 2 * tl.load(x))
'''
COPY = """
@triton.jit
def twice(x, n, BLOCK: tl.constexpr):
    # the same, by another name
    tl.store(x,
             2 * tl.load(x))
"""


def problem(name: str, source: str, label: str, device: str = "GPU", **extra: Any) -> Table:
    table = example_table()
    result = Problem.of(
        Kernel(name, source=source),
        table.problem.arguments,
        Device(device),
        key=(label,),
    )
    result = replace(result, extra={"label": label, **extra})
    return Table(result, [replace(m, problem=result.id) for m in table.measurements])


def numbered(name: str, shape: int, **extra: Any) -> Table:
    return problem(name, f"def {name}(): return {name!r}", f"{name}/{shape}", "GPU", **extra)


def labels(tables: tuple[Table, ...]) -> set[str]:
    return {str(t.problem.extra["label"]) for t in tables}


def test_what_a_source_looks_like_does_not_matter() -> None:
    assert source_hash(SOURCE) == source_hash(COPY)
    assert source_hash(SOURCE) != source_hash(COPY.replace("2 *", "3 *"))
    assert source_hash("not (python") == source_hash("not(python  # at all")


def test_every_problem_is_tested_once_and_never_learnt_from_then() -> None:
    tables = load(shipped_tables())
    for kind in ("kernel", "family", "shape"):
        result = make_folds(tables, kind)  # type: ignore[arg-type]
        tested = [t.problem.id for f in result for t in f.test]
        assert sorted(tested) == sorted(t.problem.id for t in tables)
        for fold in result:
            assert fold.train
            assert not {t.problem.id for t in fold.test} & {t.problem.id for t in fold.train}
    assert {f.name for f in make_folds(tables, "kernel")} >= {"matmul", "softmax"}


def test_copies_in_other_groups_are_dropped_from_training() -> None:
    one = problem("scale", SOURCE, "scale/1", hand="x")
    copy = problem("twice", COPY, "twice/1", hand="y")
    other = numbered("other", 1, hand="y")
    by_hand = {f.name: f for f in make_folds([one, copy, other], "hand")}
    assert labels(by_hand["x"].train) == {"other/1"}
    assert by_hand["x"].dropped == 1


@pytest.mark.parametrize(
    "known",
    [
        problem("twice", COPY, "twice/1"),  # the same source, by another name
        problem("scale", "def scale(): ...", "another/1"),  # the same function name
        problem("unlike", "def unlike(): ...", "Scale/7"),  # the same label
    ],
)
def test_leakage_is_found(known: Table) -> None:
    tested = problem("scale", SOURCE, "scale/1")
    fold = Fold("scale", "kernel", (tested,), (numbered("other", 1), known))
    with pytest.raises(LeakageError, match="both sides") as error:
        check_leakage(fold)
    assert "scale/1" in str(error.value)
    check_leakage(replace(fold, train=fold.train[:1]))
    check_leakage(replace(fold, kind="shape"))


def test_shapes() -> None:
    tables = [numbered("a", 1), numbered("a", 2), numbered("b", 1), numbered("b", 2), numbered("lonely", 1)]
    first, second = make_folds(tables, "shape")
    assert labels(first.test) == {"a/1", "b/1"}
    assert labels(first.train) == {"a/2", "b/2", "lonely/1"}
    assert [r.problem.id for r in first.relatives(tables[0])] == [tables[1].problem.id]
    assert labels(second.test) == {"a/2", "b/2"}
    for fold in make_folds(tables, "kernel"):
        assert fold.relatives(fold.test[0]) == []


def test_rows_are_counted_by_the_tool_that_measured_them() -> None:
    problem = Problem.of(Kernel("k"), (), Device("NVIDIA H200"))
    foreign = replace(problem, extra={"imported_from": "kernel-tuner"})
    hands = [hand_of(p) for p in (problem, foreign, foreign, replace(problem, extra={"hand": "liger"}))]
    counts = rows_by_tool(hands)
    assert counts == {"this project": 2, "kernel-tuner": 2}
    assert tools_text(counts) == "rows by tool: 2 of this project, 2 of kernel-tuner"
