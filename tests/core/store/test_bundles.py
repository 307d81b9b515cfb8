"""Bundles: what goes in is used elsewhere as it was decided; what was changed since is refused whole."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import SimpleNamespace

import pytest

from forecast_autotune.errors import StoreError
from forecast_autotune.records import Device, Evidence
from forecast_autotune.records.table import Table
from forecast_autotune.store import Store, StoreWarning, layers
from forecast_autotune.store.bundles import (
    Bundle,
    BundledFile,
    BundleError,
    BundleOptions,
    Manifest,
    write_bundle,
)
from forecast_autotune.store.files import MANIFEST
from forecast_autotune.store.merging import StoreFolder, merge
from forecast_autotune.store.misses import Miss
from forecast_autotune.variants import Origin, Provenance, Variant
from tests.core.store.bundled import bundle
from tests.core.store.stored import A100, H200, decided, measured, problem, row_digests
from tests.core.tuning.loop import TABLE, Bench, decide


def reseal(folder: Path, change: Callable[[Manifest], Manifest] = lambda m: m) -> None:
    """Make the manifest fit the files, as somebody would who wants to be believed."""
    old = Manifest.of_bytes((folder / MANIFEST).read_bytes())
    files = {
        p.relative_to(folder).as_posix(): BundledFile.of(p.read_bytes())
        for p in folder.rglob("*")
        if p.is_file() and p.name != MANIFEST
    }
    (folder / MANIFEST).write_bytes(change(replace(old, files=files)).sealed().to_bytes())


def rows_file(folder: Path) -> Path:
    (result,) = folder.glob("rows/*/softmax-*.jsonl")
    return result


def test_a_bundle_holds_the_rows_and_no_code(tmp_path: Path) -> None:
    opened = Bundle.open(bundle(tmp_path))
    source = StoreFolder(tmp_path / "source")
    assert row_digests(opened) == row_digests(source)
    assert opened.manifest.carries == ()
    text = b"".join(p.read_bytes() for p in opened.path.rglob("*.jsonl"))
    assert b"module {}" not in text
    assert b'"source":""' in text
    covered = sorted(
        (c.kernel, c.slug, c.problems, c.measurements, c.decisions) for c in opened.manifest.covers
    )
    assert covered == [
        ("matmul", A100.slug, 1, 3, 1),
        ("matmul", H200.slug, 2, 6, 2),
        ("softmax", H200.slug, 1, 3, 1),
    ]


def test_equal_stores_give_equal_bundles(tmp_path: Path) -> None:
    first, second = bundle(tmp_path / "1"), tmp_path / "2" / "bundle"
    merged = StoreFolder(tmp_path / "merged")
    merge([StoreFolder(tmp_path / "1" / "source")], merged)
    write_bundle(merged, second)
    names = sorted(p.relative_to(first) for p in first.rglob("*") if p.is_file())
    assert [(first / n).read_bytes() for n in names] == [(second / n).read_bytes() for n in names]


def test_sources_go_along_when_asked_for(tmp_path: Path) -> None:
    opened = Bundle.open(bundle(tmp_path, BundleOptions(sources=True, kernel="soft")))
    assert opened.manifest.carries == ("sources",)
    assert [c.kernel for c in opened.manifest.covers] == ["softmax"]
    assert b"module {}" in rows_file(opened.path).read_bytes()


def test_a_bundle_needs_a_new_folder_and_something_to_hold(tmp_path: Path) -> None:
    result = bundle(tmp_path)
    with pytest.raises(StoreError, match="is not empty"):
        write_bundle(StoreFolder(tmp_path / "source"), result)
    with pytest.raises(StoreError, match="holds nothing"):
        write_bundle(StoreFolder(tmp_path / "source"), tmp_path / "new", BundleOptions(kernel="conv"))
    assert not (tmp_path / "new").exists()


def test_a_decision_without_its_rows_is_not_bundled(tmp_path: Path) -> None:
    p = problem()
    store = Store(tmp_path / "source")
    store.add(p, measured(p, 32))
    store.put_decision(p, decided(p, 16))
    write_bundle(StoreFolder(tmp_path / "source"), tmp_path / "bundle")
    assert Bundle.open(tmp_path / "bundle").manifest.covers[0].decisions == 0


# --- refusal ---


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def drop_line(folder: Path) -> None:
    path = rows_file(folder)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(line for line in lines if b'"outcome":"ok"' not in line))
    reseal(folder)


def with_edited_row(folder: Path, **changes: object) -> None:
    path = rows_file(folder)
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    lines[-1].update(changes)
    text = "".join(json.dumps(line, sort_keys=True, separators=(",", ":")) + "\n" for line in lines)
    path.write_text(text)
    reseal(folder)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit": (lambda b: flip(rows_file(b), 100), "other contents"),
    "a cut file": (lambda b: os.truncate(rows_file(b), 50), "50 bytes, not"),
    "a longer file": (lambda b: rows_file(b).open("ab").write(b"\n"), "more than|bytes, not"),
    "a missing file": (lambda b: rows_file(b).unlink(), "is missing"),
    "another file": (lambda b: (b / "rows" / "note.txt").write_text("x"), "does not belong"),
    "a hidden file": (lambda b: (b / ".hidden").write_text("x"), "does not belong"),
    "an empty folder": (lambda b: (b / "extra").mkdir(), "does not belong"),
    "a linked folder": (lambda b: (b / "linked").symlink_to("/"), "does not belong"),
    "no manifest": (lambda b: (b / MANIFEST).unlink(), "no manifest.json"),
    "a cut manifest": (lambda b: os.truncate(b / MANIFEST, 200), "no manifest"),
    "a space in the manifest": (
        lambda b: (b / MANIFEST).write_bytes((b / MANIFEST).read_bytes() + b" "),
        "edited",
    ),
    "a flipped bit in the manifest": (lambda b: flip(b / MANIFEST, 300), "manifest"),
    "a pipe": (lambda b: make_pipe(rows_file(b)), "named pipe"),
    "a file of code, sealed": (
        lambda b: ((b / "setup.py").write_text("x"), reseal(b)),
        "nothing that a bundle",
    ),
    "a decision without rows, sealed": (drop_line, "rests on a time that is not there"),
    "rows out of order, sealed": (
        lambda b: (
            rows_file(b).write_bytes(b"".join(reversed(rows_file(b).read_bytes().splitlines(keepends=True)))),
            reseal(b),
        ),
        "not in order",
    ),
    "a foreign problem, sealed": (
        lambda b: with_edited_row(b, problem="x"),
        "not in order|does not describe|rests",
    ),
    "a wrong type, sealed": (lambda b: with_edited_row(b, stated_risk="high"), "is no record"),
    "rows under another name, sealed": (
        lambda b: (rows_file(b).rename(rows_file(b).with_name("other-0123.jsonl")), reseal(b)),
        "another kernel",
    ),
    "covers nothing, sealed": (lambda b: reseal(b, lambda m: replace(m, covers=())), "covers something else"),
    "another time, sealed": (lambda b: reseal(b, lambda m: replace(m, newest="")), "another time"),
    "untold code, sealed": (
        lambda b: reseal(b, lambda m: replace(m, carries=("compiled",))),
        "whether it carries",
    ),
    "untold graphs, sealed": (
        lambda b: reseal(b, lambda m: replace(m, carries=("graphs",))),
        "carries compiled graphs",
    ),
    "unknown code, sealed": (lambda b: reseal(b, lambda m: replace(m, carries=("magic",))), "unknown kinds"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_what_was_changed_is_refused_whole_in_one_line(tmp_path: Path, name: str) -> None:
    result = bundle(tmp_path)
    damage, message = DAMAGE[name]
    damage(result)
    with pytest.raises(BundleError, match=message) as refused:
        Bundle.open(result)
    assert str(refused.value).startswith(f"the bundle {result} is refused: ")
    assert "\n" not in str(refused.value)


def test_files_may_be_links_as_hubs_lay_them_out(tmp_path: Path) -> None:
    result = bundle(tmp_path)
    for path in [p for p in result.rglob("*") if p.is_file()]:
        blob = tmp_path / "blobs" / f"{path.parent.name}-{path.name}"
        blob.parent.mkdir(exist_ok=True)
        path.rename(blob)
        path.symlink_to(blob)
    assert len(Bundle.open(result).kernels()) == 3


# --- layers ---


@pytest.fixture
def layered(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's empty store over a bundle."""
    result = bundle(tmp_path)
    monkeypatch.setenv("FORECAST_AUTOTUNE_STORES", str(result))
    return result


def test_the_users_store_comes_first_and_is_the_only_one_written_to(layered: Path, root: Path) -> None:
    p = problem()
    before = {path: path.read_bytes() for path in layered.rglob("*") if path.is_file()}
    store = Store.default()
    assert store.decision(p) == replace(decided(p), at="2026-01-01T00:00:00+00:00", median_ms=0.5)
    assert len(store.measurements(p)) == 3
    store.add(p, measured(p, 128, 0.25, "2026-02-01"))
    store.put_decision(p, decided(p, 128))
    assert store.decision(p) == decided(p, 128)
    assert [m.candidate for m in store.measurements(p)][-1] == measured(p, 128).candidate
    assert len(Store(root).measurements(p)) == 1, "a store that is opened by its path is that store"
    assert {path: path.read_bytes() for path in layered.rglob("*") if path.is_file()} == before


def test_what_was_merged_from_a_bundle_is_not_counted_twice(layered: Path, root: Path) -> None:
    merge([Bundle.open(layered)], StoreFolder(root))
    assert len(Store.default().measurements(problem())) == 3


def test_relatives_come_from_bundles_too(layered: Path) -> None:
    result = Store.default().relatives(problem(512))
    assert {r.problem.id for r in result} >= {problem().id, problem(2048).id}


def test_bundles_are_asked_in_order_and_a_refused_one_is_left_out(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = bundle(tmp_path / "1"), bundle(tmp_path / "2")
    p = problem()
    flip(rows_file(first), 10)
    places = os.pathsep.join([str(tmp_path / "nowhere"), str(first), "", str(second)])
    monkeypatch.setenv("FORECAST_AUTOTUNE_STORES", places)
    store = Store.default()
    with pytest.warns(StoreWarning) as text:
        assert store.decision(p) is not None
    assert [str(w.message).split(" is refused")[0] for w in text] == [
        f"the bundle {tmp_path / 'nowhere'}",
        f"the bundle {first}",
    ]
    assert [b.path for b in store.layers.bundles] == [second]


def test_a_folder_beside_the_program_and_packages_are_found(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = tmp_path / "app" / layers.BESIDE / "h200"
    bundle(tmp_path).rename(tmp_path / "made")
    shutil.copytree(tmp_path / "made", beside)
    shutil.copytree(tmp_path / "made", tmp_path / "shelf" / "kernels_of_mine" / "tuned")
    (tmp_path / "shelf" / "kernels_of_mine" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path / "shelf"))
    monkeypatch.setattr(
        sys.modules["__main__"], "__file__", str(tmp_path / "app" / "serve.py"), raising=False
    )
    entries = [
        EntryPoint(name, value, layers.GROUP)
        for name, value in (("mine", "kernels_of_mine.tuned"), ("gone", "no_such_package.tuned"))
    ]
    monkeypatch.setattr(layers, "entry_points", lambda group: EntryPoints(entries))
    result = layers.bundle_folders()
    assert result[0] == beside
    assert result[2] == tmp_path / "shelf" / "kernels_of_mine" / "tuned"
    assert "the bundle gone" in str(result[1])
    with pytest.warns(StoreWarning, match="gone"):
        assert Store.default().decision(problem()) is not None
    assert "kernels_of_mine" not in sys.modules


@pytest.mark.parametrize(
    "other",
    [
        SimpleNamespace(),
        SimpleNamespace(get_loaded_kernels=lambda: [SimpleNamespace()]),
        SimpleNamespace(get_loaded_kernels=lambda: [SimpleNamespace(module=SimpleNamespace(__file__=None))]),
        SimpleNamespace(get_loaded_kernels=lambda: 1 / 0),
    ],
)
def test_another_package_of_that_name_brings_nothing(other: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kernels", other)
    assert layers.loaded_kernel_files() == []


def test_a_bundled_decision_is_used_without_a_measurement(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(TABLE)
    output = decide(Store(tmp_path / "ci"), bench)
    write_bundle(StoreFolder(tmp_path / "ci"), tmp_path / "bundle")
    monkeypatch.setenv("FORECAST_AUTOTUNE_STORES", str(tmp_path / "bundle"))
    for mode in ("tune", "frozen", "skip"):
        result = decide(Store.default(), bench, mode=mode)
        assert (result.chosen, result.evidence, result.measured) == (output.chosen, Evidence.STORED, 0)
    assert bench.made == 1
    again = decide(Store.default(), bench, tolerance=0.03)
    assert again.known >= output.measured, "its rows answer other settings, too"
    elsewhere = Table(replace(TABLE.problem, id="another", device=Device("another")), TABLE.measurements)
    with pytest.raises(LookupError, match="holds nothing"):
        decide(Store.default(), bench, table=elsewhere, mode="frozen")


def test_a_program_whose_store_is_a_bundle_decides_and_writes_nothing(tmp_path: Path) -> None:
    output = bundle(tmp_path)
    before = sorted(output.rglob("*"))
    store = Store(output)
    with pytest.warns(
        StoreWarning, match="a bundle, which never changes: name it in FORECAST_AUTOTUNE_STORES"
    ):
        result = decide(store, Bench(TABLE))
    assert result.measured
    assert store.decision(TABLE.problem) == result
    store.put_facts(TABLE.problem, {"version": "1", "units": []})
    with pytest.warns(StoreWarning, match="a record is not kept"):
        store.add_miss(Miss.of(TABLE.problem, "frozen", 4, {}, ""))
    made_variant = Variant.of("k", "aa", "def k(): pass", Provenance(Origin.HAND))
    with pytest.warns(StoreWarning, match="variants cannot be written"):
        store.put_variant(made_variant)
    assert store.variants() == [made_variant]
    with store.watch(TABLE.problem, result.chosen), store.tuning_lock(TABLE.problem, 0.1):
        assert sorted(output.rglob("*")) == before
    Bundle.open(output)
