"""Variants in the store: kept whole, with their checks, whatever happens to processes and files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from forecast_autotune.store import Store, StoreWarning
from forecast_autotune.variants import Variant
from tests.core.variants.varied import BASE, NOTE, SHA, SUM, check, variant

OTHER = "7" * 64


def files(root: Path) -> list[Path]:
    return sorted(root.glob("variants/*/*.json"))


def test_variants_are_kept_by_base_source(store: Store) -> None:
    for result in (variant(), variant(BASE, title="again"), variant(sha=OTHER)):
        store.put_variant(result)
    assert [v.name for v in store.variants(SHA)] == sorted(
        v.name for v in (variant(), variant(BASE, title="again"))
    )
    assert [v.base_sha256 for v in store.variants(OTHER)] == [OTHER]
    assert len(store.variants()) == 3
    assert store.variants("8" * 64) == []
    again = Store(store.root) if store.root else store
    assert again.variants(SHA) == store.variants(SHA)


def test_checks_add_up_and_count_once(store: Store) -> None:
    store.put_variant(variant(), [check("a")])
    store.put_variant(variant(), [check("b", passed=False), check("a")])
    (kept,) = store.variants(SHA)
    assert [(c.signature, c.passed) for c in kept.checks] == [("a", True), ("b", False)]


def test_another_source_under_a_name_starts_without_checks(store: Store) -> None:
    store.put_variant(variant(), [check("a")])
    swapped = Variant(**{**vars(variant()), "source": BASE})
    store.put_variant(swapped)
    (kept,) = store.variants(SHA)
    assert (kept.source, kept.checks) == (BASE, ())


def test_a_source_changed_on_disk_loses_its_checks(tmp_path: Path) -> None:
    Store(tmp_path).put_variant(variant(), [check("a")])
    (path,) = files(tmp_path)
    path.write_text(path.read_text().replace("tl.arange(0, BLOCK)", "tl.arange(0, 2 * BLOCK)"))
    store = Store(tmp_path)
    with pytest.warns(StoreWarning, match="not the one that was checked"):
        (kept,) = store.variants(SHA)
    assert kept.checks == ()
    assert "2 * BLOCK" in kept.source


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b'{"type":"variant","schema":1}',
        b'{"type":"variant","schema":9,"name":"x"}',
    ],
)
def test_damaged_files_are_skipped_with_a_note(tmp_path: Path, damage: bytes) -> None:
    store = Store(tmp_path)
    store.put_variant(variant())
    store.put_variant(variant(BASE, title="again"), [check("a")])
    files(tmp_path)[0].write_bytes(damage)
    other = Store(tmp_path)
    with pytest.warns(StoreWarning, match="not a variant"):
        assert len(other.variants(SHA)) == 1
    # A new one takes the place of the damaged file.
    for result in (variant(), variant(BASE, title="again")):
        other.put_variant(result)
    assert len(Store(tmp_path).variants(SHA)) == 2


def test_a_file_under_another_name_is_not_believed(tmp_path: Path) -> None:
    Store(tmp_path).put_variant(variant(), [check("a")])
    (path,) = files(tmp_path)
    path.rename(path.with_name("renamed.json"))
    with pytest.warns(StoreWarning, match="not filed under its own"):
        assert Store(tmp_path).variants() == []


def test_processes_that_add_checks_lose_none(tmp_path: Path) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[3])!r})\n"
        "from pathlib import Path\n"
        "from forecast_autotune.store import Store\n"
        "from tests.core.variants.varied import check, variant\n"
        f"store = Store(Path({str(tmp_path)!r}))\n"
        "for i in range(15):\n"
        "    store.put_variant(variant(), [check(f'{sys.argv[1]}-{i}')])\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", program, str(n)]) for n in range(4)]
    assert [p.wait(120) for p in running] == [0] * 4
    (kept,) = Store(tmp_path).variants(SHA)
    assert {c.signature for c in kept.checks} == {f"{n}-{i}" for n in range(4) for i in range(15)}


def test_a_store_that_cannot_be_written_keeps_them_in_memory(tmp_path: Path) -> None:
    (tmp_path / "variants").write_text("a file where the folder should be")
    store = Store(tmp_path)
    with pytest.warns(StoreWarning, match="stay in memory only"):
        store.put_variant(variant(), [check("a")])
    store.put_variant(variant(), [check("b")])
    (kept,) = store.variants(SHA)
    assert [c.signature for c in kept.checks] == ["a", "b"]
    (tmp_path / "variants").unlink()
    store.put_variant(variant(), [check("c")])
    (saved,) = Store(tmp_path).variants(SHA)
    assert {c.signature for c in saved.checks} == {"a", "b", "c"}


def test_names_cannot_leave_the_folder(tmp_path: Path) -> None:
    odd = Variant("../../up", "double", "../" * 9, SUM, NOTE)
    Store(tmp_path / "store").put_variant(odd)
    assert Store(tmp_path / "store").variants() == [odd]
    assert [p.name for p in tmp_path.iterdir()] == ["store"]
    assert len(files(tmp_path / "store")) == 1


def test_unknown_fields_survive(tmp_path: Path) -> None:
    Store(tmp_path).put_variant(Variant(**{**vars(variant()), "extra": {"rewrites": ["exp2"]}}))
    (kept,) = Store(tmp_path).variants()
    assert kept.extra == {"rewrites": ["exp2"]}
    (path,) = files(tmp_path)
    assert json.loads(path.read_bytes())["rewrites"] == ["exp2"]


def test_clearing_by_kernel(store: Store) -> None:
    store.put_variant(variant())
    store.put_variant(Variant.of("triple", SHA, SUM.replace("double", "triple"), NOTE))
    assert store.clear_variants("DOU") == 1
    assert [v.kernel for v in store.variants()] == ["triple"]
    assert store.clear_variants() == 1
    assert store.variants() == []
    assert store.clear() == 0
