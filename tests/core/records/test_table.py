"""Records and tables survive a round trip through JSON, unknown fields included."""

from __future__ import annotations

import gzip
import json
import lzma
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forecast_autotune.errors import RecordError
from forecast_autotune.features import traced_texts
from forecast_autotune.records import (
    Argument,
    Candidate,
    Config,
    Cost,
    Decision,
    Device,
    Evidence,
    Kernel,
    Measurement,
    Outcome,
    Problem,
)
from forecast_autotune.records.table import Table, latest_labels, read_tables, write_tables
from forecast_autotune.tuning.replays.replay import load

# Lone surrogates are no text: no UTF-8 file can hold them.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
SCALARS = st.none() | st.booleans() | st.integers() | FINITE | TEXT
JSON = st.recursive(
    SCALARS, lambda x: st.lists(x, max_size=3) | st.dictionaries(TEXT, x, max_size=3), max_leaves=5
)
EXTRA = st.dictionaries(TEXT.map("x-".__add__), JSON, max_size=3)
SIZES = st.integers(0, 2**40)
TIMES = st.floats(min_value=1e-6, max_value=1e6)

CONFIGS = st.builds(
    lambda kwargs, options: Config.of(kwargs, **options),
    st.dictionaries(TEXT, SCALARS, max_size=4),
    st.fixed_dictionaries(
        {"num_warps": st.integers(-1, 32), "num_stages": st.integers(-1, 9), "num_ctas": st.integers(-1, 4)},
        optional={"maxnreg": st.integers(-1, 255), "ir_override": TEXT},
    ),
)
CANDIDATES = st.builds(Candidate, CONFIGS, TEXT)
DEVICES = st.builds(
    Device, TEXT, TEXT.filter(bool), TEXT, SIZES, SIZES, SIZES, SIZES, SIZES, SIZES, extra=EXTRA
)
KERNELS = st.builds(Kernel, TEXT, TEXT.filter(bool), TEXT, TEXT, extra=EXTRA)
SHAPES = st.lists(SIZES, max_size=3).map(tuple)
ARGUMENTS = st.one_of(
    st.builds(Argument, TEXT, st.just("tensor"), TEXT, SHAPES, SHAPES, st.booleans(), extra=EXTRA),
    st.builds(Argument, TEXT, st.sampled_from(["scalar", "constexpr"]), TEXT, value=SCALARS, extra=EXTRA),
    st.builds(Argument, TEXT, st.just("none"), extra=EXTRA),
)
PROBLEMS = st.builds(
    Problem,
    TEXT.filter(bool),
    KERNELS,
    st.lists(ARGUMENTS, max_size=3).map(tuple),
    DEVICES,
    st.lists(TEXT, max_size=3).map(tuple),
    st.none() | st.lists(st.integers(1, 9999), max_size=3).map(tuple),
    st.dictionaries(TEXT, TEXT, max_size=3).map(lambda tools: tuple(sorted(tools.items()))),
    st.dictionaries(TEXT, TEXT, max_size=2),
    EXTRA,
)


@st.composite
def measurements(draw: st.DrawFn, problem_id: str | None = None) -> Measurement:
    outcome = draw(st.sampled_from(list(Outcome)))
    ok = outcome is Outcome.OK
    return Measurement(
        draw(TEXT) if problem_id is None else problem_id,
        draw(CANDIDATES),
        outcome,
        draw(TIMES) if ok else None,
        draw(st.none() | TIMES) if ok else None,
        draw(st.none() | TIMES) if ok else None,
        draw(st.integers(0, 10**6)),
        draw(st.none() | TIMES),
        draw(TEXT),
        draw(TEXT),
        draw(st.none() | st.lists(st.integers(1, 9999), max_size=3).map(tuple)),
        draw(EXTRA),
    )


@st.composite
def tables(draw: st.DrawFn) -> Table:
    problem = draw(PROBLEMS)
    return Table(problem, draw(st.lists(measurements(problem.id), max_size=4)))


DECISIONS = st.builds(
    Decision,
    problem=TEXT,
    chosen=CANDIDATES,
    evidence=st.sampled_from(list(Evidence)),
    reason=TEXT,
    stated_risk=st.floats(0.0, 1.0),
    tolerance=TIMES,
    candidates=SIZES,
    measured=SIZES,
    known=SIZES,
    trusted=SIZES,
    refused=SIZES,
    median_ms=st.none() | TIMES,
    saved_s=st.floats(-1e300, 1e300),
    cost=st.builds(Cost, TIMES, TIMES, TIMES, TIMES, SIZES),
    settings=TEXT,
    at=TEXT,
    rounds=st.lists(TEXT, max_size=3).map(tuple),
)


def through_json(data: dict[str, Any]) -> dict[str, Any]:
    read = json.loads(json.dumps(data, allow_nan=False))
    assert isinstance(read, dict)
    return read


@given(record=st.one_of(CONFIGS, DEVICES, KERNELS, ARGUMENTS, PROBLEMS, measurements(), DECISIONS))
def test_every_record_survives_json(record: Any) -> None:
    data = through_json(record.to_json())
    read = type(record).from_json(data)
    assert read == record
    assert read.to_json() == record.to_json(), "fields that do not count for equality are kept, too"


@given(record=st.one_of(DEVICES, KERNELS, ARGUMENTS, PROBLEMS, measurements()), extra=EXTRA)
def test_fields_of_a_newer_release_survive_and_do_not_count(record: Any, extra: dict[str, Any]) -> None:
    data = {**through_json(record.to_json()), **extra}
    read = type(record).from_json(data)
    assert read == record
    assert through_json(read.to_json()) == data


@given(
    given_=st.lists(tables(), max_size=3, unique_by=lambda t: t.problem.id),
    name=st.sampled_from(["t.jsonl", "t.jsonl.gz", "t.jsonl.xz"]),
)
@settings(max_examples=25)
def test_tables_survive_a_file(given_: list[Table], name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        assert write_tables(path, given_) == sum(len(t.measurements) for t in given_)
        read = read_tables(path)
        assert read == given_
        for a, b in zip(read, given_, strict=True):
            assert a.problem.to_json() == b.problem.to_json()
            assert [m.to_json() for m in a.measurements] == [m.to_json() for m in b.measurements]
        first = path.read_bytes()
        write_tables(path, read)
        assert path.read_bytes() == first
        assert [f.name for f in Path(folder).iterdir()] == [name]


def sample() -> Table:
    problem = Problem.of(Kernel("k", source_sha256="00"), [], Device("D"))
    config = Config.of({"B": 1})
    return Table(problem, [Measurement(problem.id, Candidate(config), Outcome.OK, 1.0)])


def test_the_order_of_meta_parameters_does_not_matter() -> None:
    assert Config.of({"A": 1, "B": 2}) == Config.of({"B": 2, "A": 1})
    assert hash(Config.of({"A": 1, "B": 2})) == hash(Config.of({"B": 2, "A": 1}))


def test_lines_of_other_types_are_ignored_and_one_problem_may_be_split(tmp_path: Path) -> None:
    table = sample()
    problem, measurement = table.problem.to_json(), table.measurements[0].to_json()
    lines = [problem, {"type": "weather"}, measurement, problem, measurement]
    (tmp_path / "t.jsonl").write_text("\n\n".join(json.dumps(line) for line in lines))
    assert read_tables(tmp_path / "t.jsonl") == [Table(table.problem, table.measurements * 2)]


def test_ir_and_facts_of_all_parts_are_kept(tmp_path: Path) -> None:
    """A run that adds configs to a table traces those alone."""
    facts = [
        {"version": traced_texts.VERSION, "units": [[name, [8], {"load_bytes": n}]]}
        for n, name in enumerate("AB")
    ]
    parts = [
        replace(
            sample().problem, ttir={"A": "first", "B": "module"}, extra={"facts": facts[0], "label": "x"}
        ),
        replace(sample().problem, ttir={"A": "again", "C": "more"}, extra={"facts": facts[1]}),
        replace(sample().problem, ttir={}, extra={}),
    ]
    for i, part in enumerate(parts):
        added = Measurement(part.id, Candidate(Config.of({"B": i})), Outcome.OK, 1.0)
        write_tables(tmp_path / f"{i}.jsonl", [Table(part, [added])])
    (tmp_path / "all.jsonl").write_text("".join((tmp_path / f"{i}.jsonl").read_text() for i in range(3)))
    for tables in (read_tables(tmp_path / "all.jsonl"), load(tmp_path / f"{i}.jsonl" for i in range(3))):
        (table,) = tables
        assert table.problem.ttir == {"A": "first", "B": "module", "C": "more"}
        assert table.problem.extra["label"] == "x"
        assert {name: f.load_bytes for (name, _), f in traced_texts.facts_by_unit(table.problem).items()} == {
            "A": 0,
            "B": 1,
        }
        assert len(table.by_candidate()) == 3


BAD_LINES = [
    "{", "[]", '{"type":"problem","schema":1}',
    '{"type":"measurement","schema":1,"problem":"unknown","config":{},"outcome":"timeout"}',
    '{"type":"measurement","schema":1,"problem":"unknown","config":{},"outcome":"ok"}',
    '{"type":"measurement","schema":1,"problem":"unknown","config":{},"outcome":"timeout","median_ms":1.0}',
    '{"type":"measurement","schema":1,"problem":"unknown","config":{},"outcome":"invented"}',
]  # fmt: skip


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_malformed_line_is_named_by_file_and_number(tmp_path: Path, line: str) -> None:
    write_tables(tmp_path / "t.jsonl", [sample()])
    with (tmp_path / "t.jsonl").open("a") as stream:
        stream.write(line + "\n")
    with pytest.raises(RecordError, match=r"t\.jsonl:3: "):
        read_tables(tmp_path / "t.jsonl")


@pytest.mark.parametrize("name", ["t.jsonl.gz", "t.jsonl.xz"])
def test_a_cut_file_is_an_error_not_a_short_table(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    write_tables(path, [sample()])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(RecordError, match="cut off"):
        read_tables(path)


@pytest.mark.parametrize("compress", [gzip.compress, lzma.compress])
def test_compression_is_told_by_content_not_by_name(
    tmp_path: Path, compress: Callable[[bytes], bytes]
) -> None:
    write_tables(tmp_path / "t.jsonl", [sample()])
    (tmp_path / "packed.jsonl").write_bytes(compress((tmp_path / "t.jsonl").read_bytes()))
    assert read_tables(tmp_path / "packed.jsonl") == [sample()]


def test_the_last_label_counts_and_infrastructure_faults_never_do() -> None:
    table = sample()
    first = table.measurements[0]
    again = Measurement(first.problem, first.candidate, Outcome.OK, 2.0)
    fault = Measurement(first.problem, first.candidate, Outcome.INFRASTRUCTURE)
    unlucky = Measurement(first.problem, Candidate(Config.of({"B": 2})), Outcome.INFRASTRUCTURE)
    assert latest_labels([first, again, fault, unlucky]) == {first.candidate: again}


def test_a_failed_rewrite_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_tables(path, [sample()])
    before = path.read_bytes()
    bad = sample()
    object.__setattr__(bad.measurements[0], "extra", {"odd": float("nan")})
    with pytest.raises(ValueError, match="Out of range float"):
        write_tables(path, [sample(), bad])
    assert path.read_bytes() == before
    assert [f.name for f in tmp_path.iterdir()] == ["t.jsonl"]
