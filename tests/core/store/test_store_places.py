"""What is no regular file where the store has its files, and no folder where it has its folders."""

from __future__ import annotations

import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

import forecast_autotune.store.log as log_module
from forecast_autotune.commands import main
from forecast_autotune.records import Measurement, Problem
from forecast_autotune.store import Store, StoreWarning
from forecast_autotune.store.files import host_name
from tests.core.captured_output import Capture
from tests.core.special_files import SPECIAL_FILES
from tests.core.store.stored import decided, measured, problem

ONE, TWO = problem(1024), problem(2048)
OTHER = problem(1024, kernel="softmax")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store with two problems of one kernel and one of another."""
    store = Store(tmp_path / "s")
    for p in (ONE, TWO, OTHER):
        store.add(p, measured(p, 16))
        store.put_decision(p, decided(p))
        store.put_facts(p, {"version": "1", "units": []})
    return tmp_path / "s"


def files_of(root: Path) -> dict[str, Path]:
    (home,) = root.glob("v1/*/matmul-*")
    return {
        "log": home / f"log-{host_name()}.jsonl",
        "another log": home / "log-elsewhere.jsonl",
        "decision": home / "decisions" / f"{ONE.id}.json",
        "facts": home / "facts" / f"{ONE.id}.json",
        "a launch": home / f"running-{ONE.id}-{host_name()}-99999999.json",
        "a launch of nobody": home / f"running-{ONE.id}-{host_name()}-{'9' * 40}.json",
        "variant": root / "variants" / "x" / "y.json",
        "advice": root / "advice" / "x.json",
    }


PLACES = [*("log", "another log", "decision", "facts", "a launch", "a launch of nobody", "variant", "advice")]


def used(store: Store, p: Problem) -> list[Measurement]:
    """All that tuning does with a store."""
    store.recover(p)
    store.decision(p)
    store.facts(p)
    store.relatives(p)
    store.verdicts(p)
    store.variants()
    store.advice_of()
    with store.tuning_lock(p, 1.0), store.watch(p, measured(p, 32).candidate):
        store.add(p, measured(p, 32))
    store.put_decision(p, decided(p))
    store.put_facts(p, {"version": "1", "units": []})
    store.sync()
    return store.measurements(p)


@pytest.mark.sampled(28)
@pytest.mark.parametrize("kind", SPECIAL_FILES)
@pytest.mark.parametrize("place", PLACES)
def test_what_is_no_file_is_passed_over(root: Path, place: str, kind: str) -> None:
    path = files_of(root)[place]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    SPECIAL_FILES[kind](path)
    store = Store(root)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StoreWarning)
        for p in (ONE, TWO, OTHER):
            rows = (
                [measured(p, 32)] if place == "log" and p is not OTHER else [measured(p, 16), measured(p, 32)]
            )
            assert used(store, p) == rows
            assert store.decision(p) == decided(p)
            assert Store(root).measurements(p) == rows, "another process finds them"
    messages = [note for note in store.issued_warnings if str(path) in note]
    assert len([note for note in messages if "stay in memory" not in note]) <= 1
    assert place == "a launch of nobody" or store.issued_warnings


@pytest.mark.parametrize("kind", ["endless", "pipe", "loop", "terabyte"])
@pytest.mark.parametrize("place", ["", "v1", "device", "kernel", "decisions", "facts", "variants", "advice"])
def test_what_is_no_folder_is_passed_over(root: Path, place: str, kind: str, capsys: Capture) -> None:
    (home,) = root.glob("v1/*/matmul-*")
    places = {"device": home.parent, "kernel": home, "decisions": home / "decisions", "facts": home / "facts"}
    path = places.get(place, root / place)
    shutil.rmtree(path, ignore_errors=True)
    SPECIAL_FILES[kind](path)
    store = Store(root)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StoreWarning)
        for p in (ONE, TWO, OTHER):
            assert measured(p, 32) in used(store, p)
            assert store.decision(p) == decided(p)
        list(Store(root).tables())
    assert any(str(path) in note for note in store.issued_warnings)
    status = main(["show", "--store", str(root)])
    message = capsys.readouterr().err
    assert str(path).split("/")[-1] in message
    assert status == {"": 2, "v1": 1, "variants": 1, "advice": 1}.get(place, 0), message


def test_a_damaged_problem_hides_no_other(root: Path) -> None:
    """A problem line of another kernel in a log, and a decision under another's name, are not taken."""
    (home,) = root.glob("v1/*/matmul-*")
    (elsewhere,) = root.glob("v1/*/softmax-*")
    log = home / f"log-{host_name()}.jsonl"
    log.write_bytes((elsewhere / log.name).read_bytes() + log.read_bytes())
    decision = home / "decisions" / f"{ONE.id}.json"
    decision.write_bytes((home / "decisions" / f"{TWO.id}.json").read_bytes())
    store = Store(root)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StoreWarning)
        results = {t.problem.id: t.measurements for t in store.tables()}
        assert store.decision(ONE) is None
    assert results == {p.id: [measured(p, 16)] for p in (ONE, TWO, OTHER)}
    assert store.decision(TWO) == decided(TWO)
    message = store.issued_warnings
    assert any("is filed elsewhere" in text for text in message)
    assert any("it is about problem" in text for text in message)


def test_one_half_of_a_pair_blocks_no_export(root: Path, tmp_path: Path) -> None:
    """A compiler's message may hold bytes of no known encoding, which Python keeps as such halves."""
    store = Store(root)
    store.add(ONE, replace(measured(ONE, 64, None), extra={"message": "no \udcff such\ud800"}))
    strange = problem(1, kernel="k\ud800")
    store.add(strange, measured(strange, 16))
    assert main(["export", str(tmp_path / "t.jsonl"), "--store", str(root)]) == 0
    text = (tmp_path / "t.jsonl").read_text(encoding="utf-8")
    assert "no \ufffd such\ufffd" in text
    assert '"k\ufffd"' in text
    assert len(Store(root).measurements(ONE)) == 2
    assert Store(root).measurements(strange) == [measured(strange, 16)]


def test_the_words_of_a_file_reach_nobodys_terminal_raw(root: Path) -> None:
    (home,) = root.glob("v1/*/matmul-*")
    with (home / f"log-{host_name()}.jsonl").open("ab") as stream:
        stream.write(b'{"type":"measurement","\\u001b]52;c;eA==\\u0007":1}\n')
    store = Store(root)
    with pytest.warns(StoreWarning):
        store.measurements(ONE)
    assert all(note.isprintable() for note in store.issued_warnings)


def test_a_log_is_read_up_to_a_bound(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home,) = root.glob("v1/*/matmul-*")
    log = home / f"log-{host_name()}.jsonl"
    line = log.read_bytes().splitlines(keepends=True)[1]
    long = b'{"x":"' + b"y" * 3000 + b'"}\n'
    monkeypatch.setattr(log_module, "MAX_RECORD_BYTES", 2000)
    monkeypatch.setattr(log_module, "_CHUNK", 512)
    log.write_bytes(log.read_bytes() + long + line + long[:-1])
    store = Store(root)
    with pytest.warns(StoreWarning, match=r"more than 2000 bytes"):
        assert len(store.measurements(ONE)) == 2
    with log.open("ab") as stream:
        stream.write(b"\n" + line)
    assert len(store.measurements(ONE)) == 3, "what follows a long line is read"
    for bound, value in (("MAX_LOG_BYTES", 100), ("MAX_LOG_LINES", 2)):
        with monkeypatch.context() as bounded:
            bounded.setattr(log_module, bound, value)
            short = Store(root)
            with pytest.warns(StoreWarning, match="longer than is read"):
                assert len(short.measurements(ONE)) < 3
            assert len(short.issued_warnings) == 1


@pytest.fixture
def without_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A user id of a container that has no passwd entry."""

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("HOME", "XDG_CACHE_HOME", "FORECAST_AUTOTUNE_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.chdir(tmp_path)


def test_without_a_home_everything_stays_in_memory_and_one_warning_says_so(
    without_home: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forecast_autotune.store.store._DEFAULTS", {})
    with pytest.warns(StoreWarning, match="no home directory .* FORECAST_AUTOTUNE_CACHE_DIR") as said:
        Store.default().add(ONE, measured(ONE, 2))
    Store.default().add(ONE, measured(ONE, 4))
    assert len(said) == 1
    assert Store.default().root is None
    assert len(Store.default().measurements(ONE)) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (["show"], 0, "the store holds nothing yet"),
        (["show", "--json"], 0, '"store": "memory"'),
        (["explain", "matmul"], 1, "the store at memory holds no kernel yet"),
        (["export", "-"], 1, "nothing to export"),
        (["show", "--calibration"], 0, "no stated risk was checked"),
        (["store", "merge", "here"], 2, "no home directory"),
        (["clear", "--yes"], 2, "or name a folder by --store"),
        (["doctor", "--json"], 0, '"detail": "no home directory'),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_commands_without_a_home(
    without_home: None,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    words: list[str],
    status: int,
    text: str,
) -> None:
    (tmp_path / "here").mkdir()
    assert main(words) == status
    said = capsys.readouterr()
    assert text in said.out + said.err
    assert "internal error" not in said.err
