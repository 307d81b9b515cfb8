"""The libraries benchmark: what its report says of arms' rows, and what is packed of a harvest's table."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tuning.libraries import (
    agreements,
    compact_rows,
    compare_arms,
    pack_tables,
    read_arms,
    text_free,
)
from forecast_autotune.records import Measurement, Outcome
from forecast_autotune.records.table import Table, write_tables
from forecast_autotune.testing import example_table
from forecast_autotune.tuning.replays.replay import load


def context(kernel: str) -> str:
    return json.dumps(["fla/norm", kernel, ["64"]])


def write_arm(folder: Path, arm: str, rows: Sequence[Mapping[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps({"config": {"B": 1}, "n": 4, **row}) + "\n" for row in rows)
    (folder / f"{arm}.jsonl").write_text(text)


def decisions(walls: Mapping[str, float], **more: Any) -> list[dict[str, Any]]:
    return [{"id": name, "wall_s": wall, **more} for name, wall in walls.items()]


A, B, C = context("a"), context("b"), context("c")


def test_ratios_are_of_contexts_that_both_arms_decided(tmp_path: Path) -> None:
    write_arm(tmp_path, "forecast", decisions({A: 1.0, B: 2.0}))
    write_arm(tmp_path, "before", decisions({A: 4.0, B: 5.0, C: 100.0}))
    result = compare_arms(read_arms([tmp_path]))
    for run, block in ((1, 1), (2, 1), (3, 2)):
        write_arm(
            tmp_path / str(run),
            "forecast",
            [{"id": A, "wall_s": 1.0}, {"id": B, "config": {"B": block}, "wall_s": 1.0}],
        )
    alike = agreements([tmp_path / str(run) for run in (1, 2, 3)])["forecast"]
    assert (alike["runs"], alike["contexts"], alike["always"], alike["share"]) == (3, 2, 1, round(2 / 3, 5))
    ratio = result["ratios"]["before/forecast"]
    assert (ratio["contexts"], ratio["other_s"], ratio["ours_s"], ratio["ratio"]) == (2, 9.0, 3.0, 3.0)
    assert (ratio["low"], ratio["high"]) == (2.5, 4.0), "the ends are those of either kernel drawn twice"
    assert ratio["slower_contexts"] == 0
    assert result["contexts_in_common"] == {"before & forecast": 2}
    assert result["arms"]["before"]["median_s"] == 5.0
    tied = {"ties": [{"b": 3}], "candidate": {"b": 1}}
    write_arm(tmp_path / "4", "again", [{"id": A, "wall_s": 1.0, "config": {"B": 3}, "candidate": {"b": 3}}])
    write_arm(tmp_path / "4", "forecast", [{"id": A, "wall_s": 1.0, **tied}])
    beside = agreements([tmp_path / "4"])["forecast"]
    assert (beside["runs"], beside["share"], beside["class_share"]) == (2, 0.0, 1.0)


def test_regret_is_of_times_taken_side_by_side(tmp_path: Path) -> None:
    cost = {"forecast_s": 0.25, "compile_s": 3.0, "timing_s": 0.5}
    write_arm(tmp_path, "harvest", decisions({A: 2.0, B: 2.0}, risk=0.0, cost=cost, measured=4))
    write_arm(tmp_path, "forecast", decisions({A: 1.0, B: 1.0, C: 1.0}, risk=0.25, cost=cost, measured=2))
    write_arm(tmp_path, "floor", decisions({A: 0.5, B: 0.25}))
    rows = [
        {"id": A, "ms": [1.0, 1.21], "again_ms": 1.0, "arms": {"harvest": 0, "forecast": 1}},
        {"id": B, "ms": [2.0], "again_ms": 2.0, "arms": {"harvest": 0, "forecast": 0}},
        {"id": C, "ms": [3.0], "again_ms": 3.0, "arms": {"forecast": 0}},  # its best is not known
    ]
    write_arm(tmp_path, "retime", rows)
    result = compare_arms(read_arms([tmp_path]))
    regret = result["arms"]["forecast"]["regret"]
    assert regret["geomean"] == pytest.approx(0.1)
    assert (regret["beyond_share"], regret["stated_risk"]) == (0.5, 0.25)
    assert (regret["low"], regret["high"]) == (0.0, pytest.approx(0.21))
    assert result["arms"]["exhaustive"]["regret"]["geomean"] == 0.0
    assert result["ratios"]["exhaustive/forecast"]["more_regret"]["mean"] == pytest.approx(0.105)
    write_arm(tmp_path, "untimed", decisions({A: 0.1, B: 0.1}, risk=0.1, measured=0))
    write_arm(tmp_path, "retime", [{**row, "arms": {**row["arms"], "untimed": 0}} for row in rows])
    untimed = compare_arms(read_arms([tmp_path]))["arms"]["untimed"]["regret"]["untimed"]
    assert untimed == {
        "contexts": 2,
        "stated_risk": 0.1,
        "beyond": {"2%": 0, "5%": 0, "10%": 0},
        "worst": 0.0,
    }
    assert "regret" not in result["arms"]["floor"]
    assert result["noise"] == 0.0
    assert result["arms"]["forecast"]["over_floor"]["geomean"] == pytest.approx(math.sqrt(8), abs=1e-5)
    assert result["arms"]["forecast"]["forecast_s"] == 0.75
    row = compact_rows(read_arms([tmp_path]))[0]
    assert json.loads(row["retimed"])["ms"] == [1.0, 1.21]
    assert json.loads(row["arms"]["forecast"])["wall_s"] == 1.0


SECRET = "a line of the kernel"


def harvested() -> Table:
    """A small table with source, whose first candidate was timed again in turns: the binary was there."""
    table = example_table((32, 64), (4,))
    kernel = replace(table.problem.kernel, source=SECRET)
    rows = [
        replace(m, compile_s=s, extra={"registers": 32})
        for m, s in zip(table.measurements, (0.5, 0.75), strict=True)
    ]
    rows[1] = Measurement(
        rows[1].problem,
        rows[1].candidate,
        Outcome.COMPILE_ERROR,
        compile_s=0.75,
        extra={"message": f"SomeError: {SECRET}"},
    )
    again = Measurement(rows[0].problem, rows[0].candidate, Outcome.OK, median_ms=1.25, protocol="turns")
    return Table(replace(table.problem, kernel=kernel, ttir={"BLOCK=32": SECRET}), [*rows, again])


def test_what_is_packed_holds_no_text_and_can_be_replayed(tmp_path: Path) -> None:
    table = harvested()
    write_arm(tmp_path, "harvest", [{"id": A, "wall_s": 1.0, "problem": table.problem.id}])
    out, harvest = tmp_path / "packed.jsonl", tmp_path / "harvest_table.jsonl.gz"
    write_tables(harvest, [table])
    with pytest.raises(ValueError, match="source or IR"):
        pack_tables([tmp_path], out)
    write_tables(harvest, [text_free(table)])
    assert pack_tables([tmp_path], out) == 2
    assert SECRET not in out.read_text()
    (packed,) = load([out])
    assert packed.problem.extra["label"] == "fla/norm"
    assert [m.compile_s for m in packed.measurements] == [0.5, 0.75]
    assert packed.measurements[1].extra["error"] == "SomeError"
