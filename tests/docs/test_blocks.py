"""The code blocks of README.md and docs/**.md run, and print what the pages say. See docs/tools/blocks.py."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUNNER = ROOT / "docs" / "tools" / "blocks.py"
LIMIT_S = 600


def _runner() -> object:
    spec = importlib.util.spec_from_file_location("docs_blocks", RUNNER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


blocks = _runner()


@pytest.mark.skipif(sys.platform != "linux", reason="pages run in forked processes")
def test_every_block_runs_and_prints_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, str(RUNNER), "--json"], capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT
    )
    assert done.stdout, done.stderr
    reports = json.loads(done.stdout)
    failures = [failure for report in reports for failure in report["failures"]]
    assert not failures, "\n\n".join(failures)
    shown = blocks.summary([blocks.PageReport(**report) for report in reports])
    with capsys.disabled():
        print(f"\n{shown}")
    assert sum(report["counts"].get("python", 0) for report in reports) >= 10


def test_a_text_fence_below_python_is_its_output() -> None:
    page = "```python\nprint(1)\n```\n```text\n1\n```\n\nand\n\n```text\nno output\n```\n"
    first, second, third = blocks.blocks_of(page)
    assert (first.language, first.output) == ("python", "1\n")
    assert second.output is None
    assert third.text == "no output\n"


def test_the_comment_above_a_fence_says_why_it_is_not_run() -> None:
    (block,) = blocks.blocks_of("<!-- not run: needs a GPU -->\n```bash\nforecast-autotune demo\n```\n")
    assert block.reason == "needs a GPU"
    assert blocks.check_unrun(block) is None


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("python", "def f(:\n"),
        ("bash", "if true; then\n"),
        ("bash", "forecast-autotune replay --no-such-option\n"),
        ("console", "$ forecast-autotune no-such-command\n"),
    ],
)
def test_a_block_that_is_not_run_is_still_checked(language: str, text: str) -> None:
    block = blocks.Block(1, language, text, reason="for this test")
    assert blocks.check_unrun(block) is not None


@pytest.mark.parametrize(
    ("expected", "actual", "missing"),
    [
        ("measured 3 of 12", "measured 8 of 12\n", None),
        ("0.33 s spent", "1.2 ms spent", None),
        ("a ███ b", "a ▏ b", None),
        ("first\n...\nlast", "first\nmore\nlast\n", None),
        ("spent 0.8 s...", "spent 1.2 s, 6 s saved", None),
        ("1 s spent, about 3 s saved; chose b", "16 s spent; chose b", None),
        ("1 s spent, about 3 s saved", "nothing spent", "1 s spent, about 3 s saved"),
        ("last\nfirst", "first\nlast\n", "first"),
        ("measured", "forecast\n", "measured"),
    ],
)
def test_outputs_are_compared_up_to_numbers_and_bars(expected: str, actual: str, missing: str | None) -> None:
    assert blocks.missing_line(expected, actual) == missing


def test_a_fence_that_is_not_closed_is_an_error() -> None:
    with pytest.raises(ValueError, match="line 1: the fence is not closed"):
        blocks.blocks_of("```python\nprint(1)\n")


def test_what_a_replay_measures_is_compared_to_the_digit_and_its_seconds_are_not() -> None:
    printed = "│ measured   28 % of the configs  │\n│ tuning   61.6 s   │\n"
    assert blocks.missing_line("│ measured  28 % of the configs │\n...\n", printed) is None
    assert blocks.missing_line("│ measured  29 % of the configs │\n...\n", printed) is not None
    assert blocks.missing_line("│ tuning  70.2 s │\n", printed) is None


@pytest.mark.parametrize("row", ["measured", "regret"])
def test_the_readme_shows_what_a_replay_measures(row: str) -> None:
    assert f"\n│ {row} " in (ROOT / "README.md").read_text(encoding="utf-8")
