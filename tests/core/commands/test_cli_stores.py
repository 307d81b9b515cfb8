"""`store` from the command line: merge, diff, verify, gc, bundle, install."""

from __future__ import annotations

import json
import warnings
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forecast_autotune.commands import main
from forecast_autotune.store import Store
from forecast_autotune.store.bundles import Bundle
from forecast_autotune.store.merging import StoreFolder
from tests.core.captured_output import command
from tests.core.store.bundled import PROBLEMS, bundle, filled
from tests.core.store.stored import decided, measured, row_digests

if TYPE_CHECKING:
    import pytest


_SAVED = (1).to_bytes(8, "big") + b"graphs"
GRAPHS = zlib.crc32(_SAVED).to_bytes(4, "big") + _SAVED
"""As `torch.compiler.save_cache_artifacts()` writes them."""


def json_of(capfd: pytest.CaptureFixture[str], *words: str, status: int = 0) -> dict[str, Any]:
    assert main([*words, "--json"]) == status
    results: dict[str, Any] = json.loads(capfd.readouterr().out)
    return results


def test_a_store_is_bundled_checked_and_merged(
    root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    filled(root)
    folder = str(tmp_path / "tuned")
    result = json_of(capfd, "store", "bundle", folder, "--kernel", "MATMUL", "--device", "h200")
    assert result["carries"] == []
    assert [(c["kernel"], c["problems"]) for c in result["covers"]] == [("matmul", 2)]
    assert result["digest"] == Bundle.open(Path(folder)).manifest.digest
    checked = json_of(capfd, "store", "check", folder, str(root))
    assert [entry["wrong"] for entry in checked["places"]] == [[], []]
    assert json_of(capfd, "store", "merge", folder, "--into", str(tmp_path / "other"))["added"] == 10
    differing = json_of(capfd, "store", "diff", folder)["kernels"]
    assert sorted(d["only_second"] for d in differing) == [3, 3]
    assert json_of(capfd, "store", "diff", folder, str(tmp_path / "other"))["kernels"] == []
    assert main(["store", "bundle", folder]) == 1
    assert "is not empty" in capfd.readouterr().err


def test_what_is_wrong_is_told_and_costs_status_1(
    root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source, result = filled(root), bundle(tmp_path)
    (result / "note.txt").write_text("x")
    log = next(root.rglob("log-*.jsonl"))
    log.write_bytes(log.read_bytes() + b"nonsense\n")
    checked = json_of(capfd, "store", "check", str(result), str(root), str(tmp_path / "nowhere"), status=1)
    messages = [entry["wrong"][0] for entry in checked["places"]]
    assert "does not belong to it" in messages[0]
    assert "not a line of JSON" in messages[1]
    assert "no such folder" in messages[2]
    before = row_digests(source)
    assert json_of(capfd, "store", "gc")["lines"] == 1
    assert row_digests(source) == before
    json_of(capfd, "store", "check")


def test_a_bundle_is_no_target_and_a_store_not_its_own_source(
    root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    filled(root)
    result = bundle(tmp_path)
    assert main(["store", "merge", str(root), "--into", str(result)]) == 2
    assert "never changes" in capfd.readouterr().err
    assert main(["store", "merge", str(root)]) == 2
    assert "a source and the target" in capfd.readouterr().err
    assert main(["store", "install", str(result)]) == 1
    assert "carries no compiled kernels" in capfd.readouterr().err


def test_a_bundle_is_read_as_a_store_and_never_written_to(
    root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result, table = bundle(tmp_path), tmp_path / "table.jsonl"
    before = {path: path.read_bytes() for path in result.rglob("*") if path.is_file()}
    given = ["--store", str(result)]
    rows = json_of(capfd, "show", *given)["kernels"]
    assert [(r["kernel"], r["problems"], r["decided"]) for r in rows] == [
        ("matmul", 1, 1),
        ("matmul", 2, 2),
        ("softmax", 1, 1),
    ]
    assert len(json_of(capfd, "explain", "softmax", *given)["problems"][0]["measurements"]) == 3
    assert json_of(capfd, "export", str(table), *given)["measurements"] == 12
    assert json_of(capfd, "store", "bundle", str(tmp_path / "again"), *given)["digest"]
    assert json_of(capfd, "store", "diff", str(tmp_path / "source"), *given)["kernels"] == []
    json_of(capfd, "store", "check", *given)
    writing = (
        ("import", str(table)),
        ("clear", "--yes"),
        ("clear", "--advice"),
        ("store", "gc"),
        ("store", "merge", str(tmp_path / "source")),
        ("warm",),
    )
    for words in writing:
        assert main([*words, *given]) == 2, words
        assert "is a bundle, which never changes: name it in FORECAST" in capfd.readouterr().err
    assert command("run", *given, str(table)).returncode == 2
    assert main(["doctor", *given]) == 1
    assert "is a bundle, which never changes" in " ".join(capfd.readouterr().out.split())
    monkeypatch.setenv("FORECAST_AUTOTUNE_CACHE_DIR", str(result))
    assert main(["import", str(table)]) == 2
    assert {path: path.read_bytes() for path in result.rglob("*") if path.is_file()} == before
    assert set(result.rglob("*")) - set(before) == {
        result / "rows",
        *(p.parent for p in before if p.parent != result),
    }


def test_what_a_newer_release_keeps_is_told_and_stays(
    root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    filled(root)
    newer, damaged, *_ = sorted(root.rglob("decisions/*.json"))
    newer.write_bytes(newer.read_bytes().replace(b'"schema":1', b'"schema":9'))
    damaged.write_bytes(b"{")
    before = newer.read_bytes()
    (root / "v2").mkdir()
    wrong = json_of(capfd, "store", "check", status=1)["places"][0]["wrong"]
    assert len(wrong) == 3
    assert all(text.endswith(("upgrade forecast-autotune", "`store gc` removes it")) for text in wrong)
    assert json_of(capfd, "store", "gc")["decisions"] == 1
    assert not damaged.exists()
    assert len(json_of(capfd, "store", "check", status=1)["places"][0]["wrong"]) == 2
    assert json_of(capfd, "store", "merge", str(filled(tmp_path / "other").root))["added"] == 1
    assert main(["show"]) == 0
    assert "v2 is of a newer release and not read" in capfd.readouterr().err
    store = Store(root)
    for p in PROBLEMS:
        with warnings.catch_warnings(record=True) as caught:
            store.put_decision(p, decided(p, 32))
        assert bool(caught) == (newer.stem == p.id and newer.parent.parent.parent.name == p.device.slug)
        assert store.decision(p) == decided(p, 32), "in memory where it cannot be filed"
    assert newer.read_bytes() == before


def test_a_place_that_is_not_there_is_wrong_usage(
    root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    filled(root)
    file, empty = tmp_path / "file", tmp_path / "empty"
    file.write_text("x")
    empty.mkdir()
    for place, message in (
        (tmp_path / "nowhere", "there is no such folder"),
        (file, "is a file: name a store's folder or a bundle"),
        (empty, "holds neither a store nor a bundle"),
    ):
        for words in (("merge",), ("diff",)):
            assert main(["store", *words, str(place)]) == 2
            assert message in capfd.readouterr().err
        assert message in json_of(capfd, "store", "check", str(place), status=1)["places"][0]["wrong"][0]


def test_a_store_is_a_folder_with_a_name(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    filled(tmp_path)
    for words in (("clear", "--yes"), ("show",), ("doctor",), ("store", "check")):
        assert main([*words, "--store", ""]) == 2
        assert "an empty name is no directory" in capfd.readouterr().err
        assert main([*words, "--store", "redis://:secret@localhost:1/0"]) == 2
        message = capfd.readouterr().err
        assert "redis://... is an address, not a directory: name it in FORECAST_AUTOTUNE_REMOTE" in message
        assert "secret" not in message
    assert main(["store", "check", ""]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["v1"]


def test_looking_makes_no_store(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for words in (("doctor",), ("show",)):
        main([*words, "--store", str(tmp_path / "new" / "store")])
        assert list(tmp_path.iterdir()) == []


def test_compiled_kernels_move_with_their_lists_of_files(
    root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(root)
    entry = tmp_path / "cache" / "ABC"
    entry.mkdir(parents=True)
    (entry / "k.cubin").write_bytes(b"\x7fELF")
    (entry / "__grp__k.json").write_text(json.dumps({"child_paths": {"k.cubin": str(entry / "k.cubin")}}))
    (entry / "k.lock").write_text("")
    folder = str(tmp_path / "tuned")
    result = json_of(capfd, "store", "bundle", folder, "--compiled", str(tmp_path / "cache"))
    assert result["carries"] == ["compiled"]
    assert str(tmp_path).encode() not in b"".join(
        p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()
    )
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "new"))
    given = ["store", "install", folder]
    assert json_of(capfd, *given, "--digest", result["digest"])["installed"] == 2
    assert json_of(capfd, *given)["installed"] == 0
    placed = tmp_path / "new" / "ABC"
    assert (placed / "k.cubin").read_bytes() == b"\x7fELF"
    assert json.loads((placed / "__grp__k.json").read_text()) == {
        "child_paths": {"k.cubin": str(placed / "k.cubin")}
    }
    (tmp_path / "empty").mkdir()
    assert main(["store", "bundle", str(tmp_path / "x"), "--compiled", str(tmp_path / "empty")]) == 1
    assert "holds no compiled kernels" in capfd.readouterr().err
    assert row_digests(StoreFolder(root)) == row_digests(Bundle.open(Path(folder)))


def test_compiled_graphs_go_along_as_one_file(
    root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    filled(root)
    saved, folder, taken = tmp_path / "saved.bin", str(tmp_path / "tuned"), tmp_path / "taken.bin"
    saved.write_bytes(GRAPHS)
    result = json_of(capfd, "store", "bundle", folder, "--graphs", str(saved))
    assert result["carries"] == ["graphs"]
    given = ["store", "install", folder, "--graphs", str(taken)]
    assert main([*given, "--digest", "0" * 64]) == 1
    assert not taken.exists()
    capfd.readouterr()
    assert json_of(capfd, *given, "--digest", result["digest"])["graphs"] == str(taken)
    assert taken.read_bytes() == GRAPHS
    assert main(given) == 1
    assert "exists: name a new file" in capfd.readouterr().err
    assert main(["store", "install", folder]) == 1
    assert "name a file for its graphs with --graphs" in capfd.readouterr().err
    (Path(folder) / "graphs" / "mega_cache.bin").write_bytes(GRAPHS.swapcase())
    assert main(["store", "install", folder, "--graphs", str(tmp_path / "other.bin")]) == 1
    assert "other contents than were bundled" in capfd.readouterr().err
    saved.write_bytes(b"")
    (tmp_path / "random").write_bytes(bytes(range(256)))
    for file, status, message in (
        (saved, 1, "is empty"),
        (tmp_path / "random", 1, "holds no compiled graphs: write the bytes of torch.compiler.save_cache"),
        (tmp_path, 1, "is a folder where a file belongs"),
        (tmp_path / "no", 2, "there is no such file"),
    ):
        assert main(["store", "bundle", str(tmp_path / "x"), "--graphs", str(file)]) == status
        assert message in capfd.readouterr().err
    assert main(["store", "bundle", str(saved)]) == 2
    assert "is a file: name a new or empty folder" in capfd.readouterr().err


def test_show_and_explain_know_the_layers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's own store holds one problem of the bundle's, with a measurement of its own."""
    monkeypatch.setenv("FORECAST_AUTOTUNE_STORES", str(bundle(tmp_path)))
    monkeypatch.setenv("FORECAST_AUTOTUNE_CACHE_DIR", str(tmp_path / "own"))
    assert main(["show"]) == 0
    text = capfd.readouterr().out
    assert "the store holds nothing yet" in text
    assert f"bundle: {tmp_path / 'bundle'}" in text.replace("\n", "")
    assert "softmax" in text
    Store.default().add(PROBLEMS[2], measured(PROBLEMS[2], 128, 0.1, "2026-02-01T00:00:00+00:00"))
    monkeypatch.setenv("FORECAST_AUTOTUNE_REMOTE", f"file://{tmp_path}/remote")
    shown = json_of(capfd, "show")
    assert [row["kernel"] for row in shown["kernels"]] == ["softmax"]
    (layer,) = shown["bundles"]
    assert layer["store"] == str(tmp_path / "bundle")
    assert sorted((row["kernel"], row["problems"]) for row in layer["kernels"]) == [
        ("matmul", 1),
        ("matmul", 2),
        ("softmax", 1),
    ]
    assert shown["remote"].endswith("/remote")
    (entry,) = json_of(capfd, "explain", "softmax")["problems"]
    assert len(entry["measurements"]) == 4
    assert entry["decision"] is not None, "the bundle's"
    assert json_of(capfd, "show", "--kernel", "softmax")["bundles"][0]["kernels"][0]["problems"] == 1
