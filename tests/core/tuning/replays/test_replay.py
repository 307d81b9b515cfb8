"""`replay`: the tuner against recorded tables, as a library and as a command."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forecast_autotune.commands import main
from forecast_autotune.errors import RecordError
from forecast_autotune.policy import Exhaustive, Fixed, Policy
from forecast_autotune.records import Problem
from forecast_autotune.records.table import Table, write_tables
from forecast_autotune.settings import Mode, Settings
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.testing import example_table
from forecast_autotune.tuning.replays.replay import ReplayReport, load, replay, tables_elsewhere
from forecast_autotune.tuning.replays.table_measurer import SOLO_COMPILE_RATIO, exhaustive_seconds
from tests.core.captured_output import command

ROW_KEYS = """best_ms candidates chosen chosen_ms evidence exhaustive_s forecast_s id kernel label measured path
regret rounds stated_risk tune_s"""


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FORECAST_AUTOTUNE_CACHE_DIR", str(tmp_path / "store"))


def labelled(name: str, seed: int) -> Table:
    """An example problem of its own: name, key and noise differ."""
    table = example_table(seed=seed)
    problem = replace(table.problem, id=f"{table.problem.id}{seed}", key=(name,), extra={"label": name})
    return Table(problem, [replace(m, problem=problem.id) for m in table.measurements])


def run(tables: list[Table], policy: Policy | None = None, **changes: object) -> ReplayReport:
    return replay(
        tables,
        surrogate=AnalyticSurrogate(),
        policy=lambda table: policy,
        settings=Settings().with_(**changes),
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tables.jsonl.gz"
    write_tables(path, [labelled("one", 1), labelled("two", 2)])
    return path


# --- the library ---


def test_measuring_everything_finds_the_oracle() -> None:
    row = run([labelled("one", 1)], Exhaustive()).rows[0]
    assert row.measured == row.candidates == len(row.path) == 15
    assert row.regret == 0.0
    assert row.path[-1] == 0.0
    assert row.chosen_ms == row.best_ms


def test_the_default_policy_measures_less_and_its_incumbent_never_gets_worse() -> None:
    table = example_table([2**k for k in range(2, 14)])
    row = run([table]).rows[0]
    assert 0 < row.measured < row.candidates
    assert list(row.path) == sorted(row.path, reverse=True)
    assert row.regret <= row.path[-1] + 1e-12
    assert row.tune_s < row.exhaustive_s


def test_first_takes_the_best_of_the_first_configs() -> None:
    table = labelled("one", 1)
    row = run([table], Fixed(4)).rows[0]
    times = [m.ms for m in table.measurements if m.ok]
    assert row.measured == 4
    assert row.chosen_ms == min(m.ms for m in table.measurements[:4])
    assert row.regret == pytest.approx(row.chosen_ms / min(times) - 1)


def test_a_path_follows_the_replay_whenever_its_rows_were_recorded() -> None:
    table = labelled("one", 1)
    rows = table.measurements
    days = [f"2026-01-{1 + (7 * i) % len(rows):02}T00:00:00+00:00" for i in range(len(rows))]
    dated = Table(table.problem, [replace(m, at=day) for m, day in zip(rows, days, strict=True)])
    paths = [run([t], Fixed(9)).rows[0].path for t in (table, dated)]
    assert paths[0] == paths[1]
    assert len(set(paths[0])) > 2


def test_the_seed_decides_what_random_measures() -> None:
    table = labelled("one", 1)
    chosen = {run([table], Fixed(3, random=True), seed=seed).rows[0].path for seed in range(6)}
    again = run([table], Fixed(3, random=True), seed=0).rows[0].path
    assert again in chosen
    assert len(chosen) > 1


def test_exhaustive_seconds_are_the_sum_over_all_configs() -> None:
    table = labelled("one", 1)
    # 15 compilations of 0.5 s, 14 of which ran and were timed for 0.13 s.
    assert exhaustive_seconds(table) == pytest.approx(15 * 0.5 + 14 * 0.13)
    assert run([table]).rows[0].exhaustive_s == exhaustive_seconds(table)
    crowded = Table(replace(table.problem, extra={"compiled_at_once": 16}), table.measurements)
    assert exhaustive_seconds(crowded) == pytest.approx(SOLO_COMPILE_RATIO * 15 * 0.5 + 14 * 0.13)


def on(table: Table, device: str, *, key: tuple[str, ...] = ()) -> Table:
    """The same table, as if measured on another device, perhaps under another key."""
    p = table.problem
    where = replace(p.device, name=device)
    moved = Problem.of(p.kernel, p.arguments, where, key=key or p.key, toolchain=p.toolchain)
    return Table(moved, [replace(m, problem=moved.id) for m in table.measurements])


def test_tables_elsewhere_have_the_same_sizes() -> None:
    one = labelled("one", 1)
    same, other = on(one, "another GPU"), on(one, "another GPU", key=("9", "9"))
    stranger = Table(replace(same.problem, kernel=replace(one.problem.kernel, name="other")), [])
    everything = [one, labelled("two", 2), stranger, same, other]
    assert [r.problem.id for r in tables_elsewhere(one, everything)] == [same.problem.id]


def test_json_has_one_row_per_problem_and_no_infinity() -> None:
    data = run([labelled("one", 1), labelled("two", 2)]).to_json()
    assert [sorted(row) for row in data["problems"]] == [ROW_KEYS.split()] * 2
    json.dumps(data, allow_nan=False)
    summary = data["summary"]
    assert summary["problems"] == 2
    regrets = [row["regret"] for row in data["problems"]]
    assert summary["geomean_regret"] == pytest.approx(math.prod(1 + r for r in regrets) ** 0.5 - 1)
    assert summary["speedup"] == pytest.approx(
        sum(row["exhaustive_s"] for row in data["problems"]) / sum(row["tune_s"] for row in data["problems"])
    )


def test_a_table_without_anything_to_decide_is_refused(tmp_path: Path) -> None:
    table = example_table()
    path = tmp_path / "one.jsonl"
    write_tables(path, [Table(table.problem, table.measurements[:1])])
    with pytest.raises(
        RecordError, match=r"one.jsonl: no problem with at least two candidates.*: nothing to decide"
    ):
        load([path])
    with pytest.raises(RecordError, match=r"one\.jsonl and 1 other file: no problem"):
        load([path, path])


# --- the command ---


@pytest.fixture
def replayed(file: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs the command on the file with `--json`; returns what it says."""

    def replayed(*options: str) -> Any:
        assert main(["replay", str(file), *options, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return replayed


def test_a_line_says_at_once_what_is_waited_for(file: Path) -> None:
    done = command("replay", str(file), "--json")
    first, last = done.stderr.splitlines()
    assert (first, last.split(" ")[:2]) == ("replaying ...", ["replaying:", "2/2"])
    assert json.loads(done.stdout)["summary"]["problems"] == 2


def test_json_is_the_report_unchanged(file: Path, replayed: Callable[..., Any]) -> None:
    shown = replayed("--policy", "exhaustive")
    expected = json.loads(json.dumps(run(load([file]), Exhaustive()).to_json()))
    for row in [*shown["problems"], *expected["problems"], shown["summary"], expected["summary"]]:
        for clocked in ("tune_s", "forecast_s", "speedup"):  # hold real seconds of forecasting
            row.pop(clocked, None)
    assert shown == expected


@pytest.mark.parametrize(("given", "count"), [([], 3), (["--max-measurements", "5"], 5)])
@pytest.mark.parametrize("policy", ["random", "first"])
def test_baselines_measure_the_count_given_or_a_tenth(
    replayed: Callable[..., Any], policy: str, given: list[str], count: int
) -> None:
    data = replayed("--policy", policy, *given)
    assert [row["measured"] for row in data["problems"]] == [count, count]
    assert data["summary"]["policy"] == policy


def test_a_budget_limits_the_default_policy_and_whatever_mode_is_set_it_measures(
    replayed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = replayed("--max-measurements", "2", "--risk", "0")
    assert [row["measured"] for row in data["problems"]] == [2, 2]
    monkeypatch.setenv("FORECAST_AUTOTUNE_MODE", str(Mode.FROZEN))
    assert all(row["measured"] > 0 for row in replayed()["problems"])


def test_people_see_every_problem_its_path_and_the_sum(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "130")
    assert main(["replay", str(file), "--policy", "exhaustive"]) == 0
    text = capsys.readouterr().out
    for part in ("one", "two", "▁", "2 of 1 kernels", "policy exhaustive"):
        assert part in text
    assert text.count("15 of 15") == 2
