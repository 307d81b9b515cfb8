"""Text that others wrote, in every field of every file of a store: none of it moves a terminal or floods it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from forecast_autotune.commands import main
from forecast_autotune.llm.advice.record import Advice
from forecast_autotune.printable import LONGEST_TEXT, REPLACEMENT, printable, printable_line, without_controls
from forecast_autotune.records import LLMConsultation
from forecast_autotune.store import Store
from forecast_autotune.variants import Check, Origin, Provenance, Variant
from tests.core.captured_output import Capture
from tests.core.tuning.loop import TABLE, Bench, decide

SEEN = "PLANTED"
HOSTILE = (
    f"{SEEN}\x1b[31m\x1b[2J\x1b]8;;http://evil.example\x07click\x1b]8;;\x07\x1b]52;c;QUFB\x07\x1bP1$r\x1b\\"
    "\x9b5A\x9d0;title\x9c\x90q\x9c\u202eover\u202d\u2066iso\u2069\u200f\u200b\ufeff\u061c"
    "\r\n\x08\x08\x07\x00\x7f\x85\u2028\u2029\ue000\U000e0041$\\frac[bold red]<script>\t"
)
TEXT = """SUMMARY = "middle-sized blocks"
def cost(config, args, device, launch):
    return exp2(abs(log2(config.BLOCK) - 6.4) * 0.3 + term(config.num_warps, "warps"))
"""
MOST_CHARS = 60_000
"""Of everything that one command prints about a store of one problem."""


@pytest.fixture(scope="module")
def planted_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store in which every kind of file holds something; nothing hostile yet."""
    root = tmp_path_factory.mktemp("planted") / "store"
    store = Store(root)
    for mode in ("tune", "exhaustive"):
        decide(store, Bench(TABLE), mode=mode, audit=0.2, seed=1)
    source = "def example(x, n):\n    pass\n"
    variant = Variant.of(
        "example", "0" * 64, source, Provenance(Origin.LLM, "model-1", "base", "", "wider", "2026")
    )
    store.put_variant(variant, [Check("example-gpu", "s", True, "18 trials", "2026")])
    store.put_advice(Advice("example", "0" * 64, TEXT, "writer-1", provenance="asked"))
    store.sync()
    for path in root.rglob("decisions/*.json"):
        data = json.loads(path.read_text())
        _first(data, "reason")["llm"] = LLMConsultation(
            "model-1", why="it pays", trouble="no answer"
        ).to_json()
        path.write_text(json.dumps(data))
    return root


@pytest.fixture
def planted(planted_once: Path, root: Path) -> Path:
    """A copy of that store, where the command line keeps its own."""
    shutil.copytree(planted_once, root)
    return root


def _first(data: Any, name: str) -> Any:
    """The innermost object that holds a key: files wrap their record or do not."""
    if isinstance(data, dict):
        if name in data:
            return data
        for value in data.values():
            if (result := _first(value, name)) is not None:
                return result
    return None


def documents(path: Path) -> list[Any] | None:
    """The JSON values in a file of a store; None for one that holds something else."""
    try:
        return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    except ValueError:
        try:
            return [json.loads(path.read_text())]
        except ValueError:
            return None


def plant(data: Any, place: tuple[str, ...], text: str) -> Any:
    """The same value with `text` put behind what is at a place."""
    if not place:
        return f"{data}{text}" if isinstance(data, str) else data
    name, *rest = place
    if isinstance(data, list):
        return [plant(value, tuple(rest), text) for value in data] if name == "[]" else data
    if not isinstance(data, dict) or name not in data:
        return data
    if rest == ["<name>"]:
        return {f"{key}{text}" if key == name else key: value for key, value in data.items()}
    return {key: plant(value, tuple(rest), text) if key == name else value for key, value in data.items()}


def commands(root: Path) -> list[list[str]]:
    """Commands that show what a store holds."""
    names = {"example"}
    for path in root.rglob("*.json*"):
        for data in documents(path) or ():
            result = _first(data, "kernel")
            if result is not None:
                kernel = result["kernel"]
                name = kernel.get("name") if isinstance(kernel, dict) else kernel
                names |= {name} if isinstance(name, str) else set()
    return [
        ["show"],
        ["show", "--calibration"],
        *(["explain", name, "--top", "99"] for name in sorted(names)),
        ["explain", f"example{HOSTILE}"],
        ["explain", "example", "--key", HOSTILE],
        ["variants", "list"],
        ["variants", "show", "llm"],
        ["variants", "show", HOSTILE],
    ]


def assert_tame(text: str, what: object) -> None:
    wrong = {c for c in text if not c.isprintable() and c != "\n"}
    assert not wrong, (what, wrong, text[:2000])
    assert len(text) < MOST_CHARS, what
    assert "Traceback" not in text, (what, text[-2000:])
    assert "internal error" not in text, (what, text[-2000:])


PLACES = [
    *(("reason",), ("kernel", "name"), ("message",), ("rounds", "[]"), ("note",)),
    *(("why",), ("key", "[]"), ("device", "name"), ("at",), ("author",)),
]


@pytest.mark.parametrize(
    ("place", "text"),
    [*((place, "long " * 600_000) for place in PLACES[:3]), *((place, HOSTILE) for place in PLACES)],
    ids=lambda value: ".".join(value) if isinstance(value, tuple) else value[:4],
)
def test_what_others_wrote_is_shown_tame_and_cut(
    planted: Path, capsys: Capture, place: tuple[str, ...], text: str
) -> None:
    result = 0
    for path in planted.rglob("*.json*"):
        if (parsed := documents(path)) is not None:
            for data in parsed:
                if place == ("message",) and data.get("type") == "measurement":
                    data |= {"outcome": "compile_error", "median_ms": None, "message": "m"}
            changed = [_planted_somewhere(data, place, text) for data in parsed]
            result += sum(one != data for one, data in zip(changed, parsed, strict=True))
            path.write_text("\n".join(map(json.dumps, changed)) + "\n")
    assert result, "no file of the store has such a place"
    for words in commands(planted):
        main([*words, "--store", str(planted)])
        captured = capsys.readouterr()
        assert_tame(captured.out, words)
        assert_tame(captured.err, words)


def _planted_somewhere(data: Any, place: tuple[str, ...], text: str) -> Any:
    """`plant` in the first object that has the place's first name."""
    if isinstance(data, dict) and place[0] not in data:
        return {key: _planted_somewhere(value, place, text) for key, value in data.items()}
    return plant(data, place, text)


@pytest.mark.parametrize(
    "words",
    [
        ["import", f"/nowhere/{HOSTILE}"],
        ["export", f"/nowhere/{HOSTILE}.jsonl"],
        ["show", f"--{HOSTILE}"],
        [HOSTILE],
        ["search", HOSTILE],
        ["advise", f"{HOSTILE}.py:fn", "--llm", HOSTILE],
        ["run", f"/nowhere/{HOSTILE}.py"],
        ["llm", "ask", "--export", HOSTILE],
        ["explain", "x" * 3_000_000],
    ],
    ids=lambda words: " ".join(words)[:20].encode("ascii", "replace").decode(),
)
@pytest.mark.usefixtures("root")
def test_words_of_the_command_line_are_shown_as_tamely(words: list[str], capsys: Capture) -> None:
    words = [word.replace("\0", "") for word in words]  # as no argument of a process can hold one
    status = main(words)
    captured = capsys.readouterr()
    assert status in (0, 1, 2)
    assert_tame(captured.out, words)
    assert_tame(captured.err, words)
    *progress, text = captured.err.splitlines() or [""]
    assert len(text) < LONGEST_TEXT + 200
    assert all(line.startswith(("reading ", "opening ")) for line in progress)
    assert len(progress) <= 1


def test_json_is_escaped_and_whole(planted: Path, capsys: Capture) -> None:
    for path in planted.rglob("decisions/*.json"):
        data = json.loads(path.read_text())
        _first(data, "reason")["reason"] = HOSTILE + "long" * 10_000
        path.write_text(json.dumps(data))
    assert main(["explain", "example", "--json"]) == 0
    out = capsys.readouterr().out
    assert out.isascii()
    assert out.removesuffix("\n").isprintable()
    assert json.loads(out)["problems"][0]["decision"]["reason"] == HOSTILE + "long" * 10_000


def test_printable() -> None:
    assert printable("plain µs ▁▂▃ 日本 é") == "plain µs ▁▂▃ 日本 é"
    assert printable(HOSTILE).isprintable()
    assert printable("a\nb\tc\r\nd") == "a b c  d"
    assert printable("a\nb\x1bc", lines=True) == f"a\nb{REPLACEMENT}c"
    assert printable("x" * 5, 5) == "x" * 5
    assert printable("x" * 3_000_000, 5) == "xxxxx... (3,000,000 characters)"
    assert printable("\ud800") == REPLACEMENT
    assert printable("\N{NO-BREAK SPACE}\N{EM SPACE}") == "  "
    assert printable_line(f" a\n\t b\x1b[2Jc{HOSTILE}", 8) == "a b [2Jc"
    assert printable_line(HOSTILE, 10_000).isprintable()
    assert len(without_controls(HOSTILE)) == len(HOSTILE)
    assert printable(ValueError("no")) == "no"
