"""Tables of other hands: what is merely unusual replays, what breaks a rule is refused with file and line."""

from __future__ import annotations

import copy
import gzip
import io
import json
import math
import os
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import forecast_autotune.tuning.replays.replay as replaying
from forecast_autotune.errors import RecordError
from forecast_autotune.policy import Policy, RiskBounded
from forecast_autotune.records.table import Table, read_tables, table_lines
from forecast_autotune.settings import Settings
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.testing import TableMeasurer, example_table
from forecast_autotune.tuning.replays.replay import ReplayReport, load, replay, replay_one, shipped_tables
from forecast_autotune.tuning.results import NEGLIGIBLE_GAIN

Change = Callable[[dict[str, Any]], object]
SAME: Change = lambda row: None  # noqa: E731


def put(**values: Any) -> Change:
    return lambda row: row.update(values)


def argument(**values: Any) -> Change:
    return lambda problem: problem["arguments"][0].update(values)


def device(**values: Any) -> Change:
    return lambda problem: problem["device"].update(values)


def config(**values: Any) -> Change:
    return lambda row: row["config"].update(values)


def lines(problem: Change = SAME, measurement: Change = SAME) -> list[dict[str, Any]]:
    """The example problem's lines, changed."""
    found = [json.loads(text) for text in table_lines([example_table()])]
    problem(found[0])
    for row in found[1:]:
        measurement(row)
    return found


def written(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "odd.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def played(tables: list[Table], policy: Policy | None = None) -> ReplayReport:
    """A replay whose report is valid JSON with finite numbers only."""
    report = replay(tables, surrogate=AnalyticSurrogate(), policy=lambda table: policy, settings=Settings())
    json.dumps(report.to_json(), allow_nan=False)
    assert all(math.isfinite(v) for v in report.summary().values() if isinstance(v, float))
    return report


def retimed(ms: Callable[[int], float]) -> Change:
    """Give the rows that ran other times, by their number."""
    count = iter(range(1000))

    def change(row: dict[str, Any]) -> None:
        if row["outcome"] == "ok":
            row.update(median_ms=ms(next(count)), p20_ms=None, p80_ms=None)

    return change


def parameter(*values: object) -> Change:
    count = iter(range(1000))
    return lambda row: row["config"]["kwargs"].update(X=values[next(count) % len(values)])


UNUSUAL: dict[str, tuple[Change, Change]] = {
    "arguments null": (put(arguments=None), SAME),
    "unknown dtype": (argument(dtype="float4_e2m1x?"), SAME),
    "hip": (put(device={"name": "MI300X", "backend": "hip", "arch": "gfx942"}), SAME),
    "unknown card": (put(device={"name": "?", "arch": 90}), SAME),
    "whole floats": (device(multiprocessors=132.0), SAME),
    "another language": (lambda p: p["kernel"].update(language="cuda"), SAME),
    "TTIR that is none": (put(ttir={"BLOCK=16": "module {"}, grid=[4]), SAME),
    "words": (SAME, parameter("a", None, 1.5, True, 10**30)),
    "large integers": (SAME, parameter(10**38, -(10**38), 0)),
    "lists": (SAME, parameter([1], [2], {"a": 1})),
    "no warps": (SAME, config(num_warps=0, num_stages=0, num_ctas=2)),
    "registers": (SAME, config(maxnreg=64)),
    "variants": (SAME, put(variant="mine")),
    "no compile times": (SAME, put(compile_s=None)),
    "all alike": (SAME, retimed(lambda i: 1.0)),
    "nanoseconds": (SAME, retimed(lambda i: 1e-6 * (1 + i))),
    "far apart": (SAME, retimed(lambda i: (1e-300, 1.0, 1e300)[i % 3])),
    "integers": (SAME, retimed(lambda i: i + 1)),
    "unknown fields": (
        lambda p: (p.update(x=[1], label=7), p["device"].update(x={}), p["arguments"][0].update(x=0)),
        put(x={"y": None}, forecast="?", message=5),
    ),
    "no schema": (lambda p: p.pop("schema"), lambda m: m.pop("schema")),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", UNUSUAL)
def test_what_is_unusual_replays_without_a_failing_surrogate(tmp_path: Path, name: str) -> None:
    (row,) = played(load([written(tmp_path, lines(*UNUSUAL[name]))])).rows
    assert row.regret >= 0
    assert row.measured <= row.candidates


@pytest.mark.parametrize("count", [2, 6])
def test_few_candidates(tmp_path: Path, count: int) -> None:
    (row,) = played(load([written(tmp_path, lines()[: count + 1])])).rows
    assert row.candidates == count


WRONG: dict[str, tuple[int, Change, str]] = {
    "arguments": (0, put(arguments=5), "arguments must be a list"),
    "a key that is a text": (0, put(key="M"), "key must be a list"),
    "a shape that is a text": (0, argument(shape="12"), r"arguments\[0\].shape must be"),
    "a negative size": (0, argument(shape=[-1]), r"arguments\[0\].shape\[0\] must be"),
    "a device's text": (0, device(multiprocessors="132"), "device.multiprocessors"),
    "a device's list": (0, device(l2_bytes=[1]), "device.l2_bytes"),
    "a negative device": (0, device(warp_size=-1), "from 0 to"),
    "a grid that is a text": (1, put(grid="12"), "grid must be a list"),
    "a grid of fractions": (1, put(grid=[1.5]), r"grid\[0\] must be an integer"),
    "a boolean in a grid": (1, put(grid=[True]), r"grid\[0\] must be an integer"),
    "warps as text": (1, config(num_warps="4"), "config.num_warps"),
    "warps as list": (1, config(num_warps=[4]), "config.num_warps"),
    "too many warps": (1, config(num_warps=10**30), "config.num_warps"),
    "registers as list": (1, config(maxnreg=[1]), "config.maxnreg"),
    "an override": (1, config(ir_override={}), "config.ir_override"),
    "a time beyond floats": (1, put(median_ms=1e301), "finite positive times"),
    "an integer beyond floats": (1, put(median_ms=10**400), "128 bits at most"),
    "a huge parameter": (1, lambda m: m["config"]["kwargs"].update(X=-(10**400)), "128 bits at most"),
    "a negative time": (1, put(median_ms=-1.0), "finite positive"),
    "NaN": (1, put(median_ms=math.nan), "NaN is not JSON"),
    "a negative compile time": (1, put(compile_s=-1), "compile_s must be"),
    "repeats": (1, put(repeats="many"), "repeats must be"),
    "a later schema": (1, put(schema=2), "upgrade"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_breaks_a_rule_is_refused_with_file_and_line(tmp_path: Path, name: str) -> None:
    at, change, said = WRONG[name]
    rows = lines()
    change(rows[at])
    with pytest.raises(RecordError, match=rf"odd\.jsonl:{at + 1}: .*{said}"):
        load([written(tmp_path, rows)])


def test_one_id_for_two_problems_is_refused(tmp_path: Path) -> None:
    """Measurements behind the second line would count for the first kernel."""
    rows = [*lines(), *lines(lambda p: p["kernel"].update(name="another"))]
    with pytest.raises(RecordError, match=rf":{len(lines()) + 1}: id .* names example on"):
        read_tables(written(tmp_path, rows))
    (table,) = read_tables(written(tmp_path, [*lines(), *lines()]))
    assert len(table.by_candidate()) == len(lines()) - 1


def test_two_files_of_one_problem_count_once(tmp_path: Path) -> None:
    rows = lines()
    (tmp_path / "one").mkdir()
    half, rest = written(tmp_path / "one", rows[:8]), written(tmp_path, [rows[0], *rows[4:]])
    (table,) = load([half, rest])
    assert table.by_candidate() == example_table().by_candidate()
    (row,) = played(load([half, rest])).rows
    assert row.candidates == len(rows) - 1
    other = written(tmp_path / "one", lines(lambda p: p["kernel"].update(name="another")))
    with pytest.raises(RecordError, match=r"odd\.jsonl: id .* names example on"):
        load([rest, other])


@pytest.mark.parametrize("change", [lambda t: "\ufeff" + t, lambda t: t.replace("\n", "\r\n"), str.rstrip])
def test_files_of_other_systems_are_read(tmp_path: Path, change: Callable[[str], str]) -> None:
    path = written(tmp_path, lines())
    path.write_bytes(change(path.read_text()).encode())
    (table,) = read_tables(path)
    assert table == example_table()


@pytest.mark.parametrize("packed", [False, True])
def test_a_pipe_is_read_whole(tmp_path: Path, packed: bool) -> None:
    """`replay <(zcat ...)`: what is looked at to tell gzip from text cannot be read again."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    data = written(tmp_path, lines()).read_bytes()
    writer = threading.Thread(target=pipe.write_bytes, args=(gzip.compress(data) if packed else data,))
    writer.start()
    (table,) = read_tables(pipe)
    writer.join()
    assert table == example_table()


@pytest.mark.parametrize("packed", [False, True])
def test_standard_input_is_read_as_utf_8_packed_or_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, packed: bool
) -> None:
    rows = lines(lambda p: p["kernel"].update(source="µ"))
    data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    stream = io.TextIOWrapper(io.BytesIO(gzip.compress(data) if packed else data), encoding="ascii")
    monkeypatch.setattr(sys, "stdin", stream)
    (table,) = read_tables(Path("-"))
    assert table.problem.kernel.source == "µ"
    assert len(table.measurements) == len(rows) - 1


def test_damaged_compressed_bytes_are_an_error_with_the_file(tmp_path: Path) -> None:
    text = "".join(json.dumps({"type": "note", "n": i * 7919 % 10007}) + "\n" for i in range(2000))
    whole = gzip.compress(text.encode())
    path = tmp_path / "cut.jsonl.gz"
    for damaged in (whole[:-100], whole[:60] + b"\xff" * 40 + whole[100:], whole[:-8] + b"12345678"):
        path.write_bytes(damaged)
        with pytest.raises(RecordError, match=r"cut\.jsonl\.gz"):
            read_tables(path)


def recorded(kernel: str) -> Table:
    """The first shipped table of a kernel."""
    tables = (table for path in shipped_tables() for table in read_tables(path))
    return next(table for table in tables if kernel in table.problem.kernel.name)


def assert_alike(one: Table, other: Table, policy: Policy | None = None) -> None:
    """Both are decided alike, but for the order of ties, which goes by the IR where there is some."""
    left, right = played([one, other], policy).rows
    assert left.stated_risk == right.stated_risk
    assert left.chosen_ms == pytest.approx(right.chosen_ms, rel=NEGLIGIBLE_GAIN)


def without_grids(table: Table, every: int = 1) -> Table:
    rows = [replace(m, grid=None) if i % every == 0 else m for i, m in enumerate(table.measurements)]
    return Table(replace(table.problem, grid=None), rows)


@pytest.mark.parametrize("kernel", ["matmul_kernel", "w8a16_matmul"])
def test_without_grids_the_formula_does_not_pretend_to_know(kernel: str) -> None:
    """With the same number of programs for every tile it ended 80 % above the best, stating a risk of 7 %."""
    blind = replace(recorded(kernel).problem, ttir={})
    plain = without_grids(Table(blind, recorded(kernel).measurements))
    # In rounds: how long compilations take is read from IR without grids, too.
    assert_alike(without_grids(recorded(kernel)), plain, RiskBounded())


def test_a_few_missing_grids_follow_from_the_others() -> None:
    table = recorded("matmul_kernel")
    (row,) = played([without_grids(table, every=3)]).rows
    assert row.regret <= 0.05


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("pattern", "rest"),
    [
        (r"(tt\.dot) .*", r"\1"),
        (r"(tt\.splat) [^:]*", r"\1 "),
        (r"(tt\.dot .*tensor<)\d+x", r"\1"),
        (r"!tt\.ptr<f16>", "!tt.ptr<"),
    ],
)
def test_ttir_whose_operations_lost_their_operands_is_as_good_as_none(pattern: str, rest: str) -> None:
    table = recorded("matmul_kernel")
    texts = {k: re.sub(pattern, rest, v) for k, v in table.problem.ttir.items()}
    assert texts != table.problem.ttir
    assert_alike(*(Table(replace(table.problem, ttir=t), table.measurements) for t in (texts, {})))


def test_without_arguments_loops_of_unknown_length_are_not_guessed() -> None:
    table = recorded("online_softmax")
    bare = Table(replace(table.problem, arguments=()), table.measurements)
    untraced = Table(replace(bare.problem, ttir={}), table.measurements)
    assert_alike(bare, untraced, RiskBounded())


@pytest.mark.slow
def test_the_order_of_tables_and_other_tables_change_nothing() -> None:
    names = ("layer_norm", "matmul_kernel", "transpose")
    tables = [recorded(name) for name in names]

    def scores(found: list[Table]) -> dict[str, object]:
        return {r.id: (r.chosen, r.measured, r.regret, r.path, r.stated_risk) for r in played(found).rows}

    together = scores(tables)
    assert scores(tables[::-1]) == together
    assert scores(tables[:1]) == {tables[0].problem.id: together[tables[0].problem.id]}


@pytest.mark.parametrize("kernel", ["layer_norm", "matmul_kernel", "attention"])
def test_unmeasured_rows_are_invisible(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    """Whatever stands in the rows that no plan has asked for yet: the next plan asks for the same."""
    asked: list[list[Any]] = []

    class Watched(TableMeasurer):
        def measure(self, candidates: Any, **options: Any) -> Any:
            asked.append([*candidates, *options.get("prefetch", ())])
            return super().measure(candidates, **options)

    monkeypatch.setattr(replaying, "TableMeasurer", Watched)

    def rounds(table: Table) -> list[list[Any]]:
        asked.clear()
        replay_one(table, surrogate=AnalyticSurrogate(), policy=None, settings=Settings())
        return copy.copy(asked)

    table = recorded(kernel)
    before = rounds(table)
    rows = list(table.by_candidate().values())
    for count in range(min(2, len(before))):
        seen = {c for asked_now in before[:count] for c in asked_now}
        hidden = [m for m in rows if m.candidate not in seen]
        others = iter(hidden[7:] + hidden[:7])
        moved = [
            m if m.candidate in seen else replace(next(others), candidate=m.candidate, grid=m.grid)
            for m in rows
        ]
        assert moved != rows
        assert rounds(Table(table.problem, moved))[: count + 1] == before[: count + 1]
