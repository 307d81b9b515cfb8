"""Sources that were written before: every form of a record, and dealing that repeats itself."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from forecast_autotune.errors import SettingsError
from forecast_autotune.variants.records import Origin
from forecast_harness.authors import open_author
from forecast_harness.authors.author import Author
from tests.harness.search.proposal_examples import node, pack_target, plain_target, request

ROOT = Path(__file__).parents[3]


def source(number: int) -> str:
    return f"def run(x):\n    return x + {number}\n"


def table(path: Path, *lines: Any) -> str:
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return f"recorded:{path}"


def folder(path: Path, count: int = 6) -> str:
    for i in range(count):
        (path / f"part{i % 2}").mkdir(exist_ok=True)
        (path / f"part{i % 2}" / f"s{i}.py").write_text(source(i))
    (path / "notes.txt").write_text("def run(x): no source")
    (path / "helper.py").write_text("def other(x):\n    return x\n")
    return f"recorded:{path}"


def test_a_folder_is_dealt_until_nothing_is_left(tmp_path: Path) -> None:
    target = plain_target()
    proposer: Author = open_author(folder(tmp_path), target)
    seed = node(target, source(100))
    known, dealt = [seed], []
    for batch in range(3):
        answer = proposer.propose(request(target, seed, n=2, seed=batch, known=known))
        assert answer.exhausted == (batch == 2)
        assert not answer.problem
        assert all(n.parents == (seed.id,) and n.request == answer.request for n in answer.nodes)
        dealt += answer.nodes
        known += answer.nodes
    assert sorted(n.source for n in dealt) == [source(i) for i in range(6)], "all of them, none twice"
    last = proposer.propose(request(target, seed, known=known))
    assert (last.nodes, last.exhausted) == ((), True)
    assert "known already" in last.problem


def test_dealing_is_a_function_of_the_request(tmp_path: Path) -> None:
    target = plain_target()
    spec, seed = folder(tmp_path), node(target, source(100))

    def dealt(number: int) -> list[str]:
        return [n.source for n in open_author(spec, target).propose(request(target, seed, seed=number)).nodes]

    assert dealt(1) == dealt(1)
    assert len({tuple(dealt(number)) for number in range(6)}) > 1, "other requests draw another order"


def test_children_of_the_asked_parent_come_first(tmp_path: Path) -> None:
    target = plain_target()
    seed = node(target, source(100))
    spec = table(
        tmp_path / "all.jsonl.gz",
        *({"source": source(i), "name": f"s{i}", "parent": "" if i < 10 else "s0"} for i in range(12)),
        {"source": source(12), "parent": seed.id},
        {"source": source(13), "parent": "never heard of"},
    )
    proposer = open_author(spec, target)
    assert proposer.propose(request(target, seed, n=1)).nodes[0].source == source(12)
    first = node(target, source(0))
    found = proposer.propose(request(target, first, n=4)).nodes
    assert [n.source for n in found[:2]] == [source(10), source(11)]
    assert all(n.parents == (first.id,) for n in found), "the lineage is the search's"


def test_lines_keep_language_and_provenance(tmp_path: Path) -> None:
    target = plain_target()
    told = {"origin": "llm", "author": "model 1", "note": "faster"}
    cuda = "KERNEL = '__global__ void f() {}'\n\ndef run(x):\n    return x\n"
    spec = table(
        tmp_path / "a.jsonl", {"source": source(1), "provenance": told}, {"source": cuda, "language": "cuda"}
    )
    found = open_author(spec, target).propose(request(target, node(target, source(100)))).nodes
    by_language = {n.language: n for n in found}
    assert by_language["torch"].provenance.author == "model 1"
    assert by_language["torch"].provenance.origin is Origin.LLM
    assert by_language["cuda"].provenance.origin is Origin.HAND


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"source": ""}, "line 1 needs a source"),
        ({"source": source(1), "language": "fortran"}, "language must be one of torch, triton, cuda"),
        ({"source": source(1), "provenance": {"author": "x"}}, "provenance needs .*origin"),
        ([1], "line 1 must be an object"),
        ({"source": "def other(): pass"}, "none defines 'run'"),
    ],
)
def test_a_bad_record_is_refused_with_its_place(tmp_path: Path, line: Any, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        open_author(table(tmp_path / "bad.jsonl", line), plain_target())


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"source": "x"}\n' * 99)[:30])
    (tmp_path / "text.jsonl").write_text("{not json\n")
    for name in ("cut.jsonl.gz", "text.jsonl", "missing.jsonl"):
        with pytest.raises(SettingsError, match=name):
            open_author(f"recorded:{tmp_path / name}", plain_target())


def test_this_projects_own_table_is_read_for_its_kernel() -> None:
    """The files that define the kernel, without what only the table's readers use."""
    path = ROOT / "benchmarks" / "data" / "variants.jsonl.gz"
    with gzip.open(path, "rt") as lines:
        texts = [str(d["text"]) for d in map(json.loads, lines)]
    mine = [t for t in texts if "def online_softmax(" in t]
    target = plain_target("triton", "online_softmax")
    seed = node(target, "def online_softmax(): pass\n")
    found = open_author(f"recorded:{path}", target).propose(request(target, seed, n=999))
    assert len(found.nodes) == len(mine) > 5
    assert found.exhausted
    assert all("EXPECT" not in n.source and n.language == "triton" for n in found.nodes)
    assert all(n.provenance.note and n.provenance.author for n in found.nodes)


def test_a_pack_takes_a_folder_of_solutions(tmp_path: Path) -> None:
    target, seed = pack_target("softmax")
    (tmp_path / "native.py").write_text("import torch\n\n\ndef run(x):\n    return torch.softmax(x, -1)\n")
    (tmp_path / "again.py").write_text(seed.source)
    found = open_author(f"recorded:{tmp_path}", target).propose(request(target, seed, known=[seed]))
    assert [n.provenance.note for n in found.nodes] == ["native.py"], "the seed itself is known"
