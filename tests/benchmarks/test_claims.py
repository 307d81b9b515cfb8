"""What the check of claims refuses, on a small repository of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks.claims.check import check_all, write_pages
from benchmarks.claims.figures import find_figures, split_units

CLAIM = """
[tuning.first-call]
claim = "The first call takes {seconds}, {speedup} less than it took."
headline = ["{seconds}", "for the first call, {speedup} less."]
script = "benchmarks.tuning.first"
arguments = "--rounds 3"
result = "first.json"
sources = ["package"]
figures.seconds = "summary['seconds'] -> {:.2f} s"
figures.speedup = "summary['before'] / summary['seconds'] -> {:.0f}x"
"""
CODE = "import os\n\n\ndef double(x):\n    return 2 * x\n"


def git(root: Path, *arguments: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *who, *arguments], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit(root: Path, subject: str) -> str:
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", subject)
    return git(root, "rev-parse", "--short", "HEAD")


def write_result(root: Path, measured_at: str) -> None:
    environment = {"date": "2026-01-02T03:04:05", "device": "GPU", "triton": "3.6", "commit": measured_at}
    result = {"environment": environment, "summary": {"seconds": 2.168, "before": 60.1}}
    (root / "benchmarks/results/first.json").write_text(json.dumps(result))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One claim, measured at the commit before the last; nothing is wrong with it."""
    root = tmp_path_factory.mktemp("measured")
    for folder in ("benchmarks/results", "benchmarks/tuning", "docs", "package"):
        (root / folder).mkdir(parents=True)
    (root / "benchmarks/claims.toml").write_text(CLAIM)
    (root / "benchmarks/tuning/first.py").write_text('parser.add_argument("--rounds")\n')
    (root / "package/code.py").write_text(CODE)
    (root / "README.md").write_text("It takes [2.17 s](docs/claims.md#first-call).\n")
    git(root, "init", "--quiet")
    write_result(root, commit(root, "First"))
    assert write_pages(root) == []
    commit(root, "Measure")
    assert check_all(root) == []
    return root


@pytest.fixture
def repository(measured: Path, tmp_path: Path) -> Path:
    return shutil.copytree(measured, tmp_path / "copy", symlinks=True)


def problem(root: Path) -> str:
    (result,) = check_all(root)
    return result


@pytest.mark.parametrize(
    ("text", "figures"),
    [
        ("takes 2.17 s, or 28x less", ["2.17 s", "28 x"]),
        ("1,000 us is 1 ms", ["1000 µs", "1 ms"]),
        ("from 1.3 to 2.3 s", ["1.3 s", "2.3 s"]),
        ("a regret of 0.4 %, 3 times", ["0.4 %", "3 x"]),
        ("72 configs on 16 threads, 16 x 16 tiles, 4096³, Python 3.11, an H200", []),
    ],
)
def test_figures_are_numbers_with_a_measured_unit(text: str, figures: list[str]) -> None:
    assert [str(f) for f in find_figures(text)] == figures


def test_a_table_row_a_list_item_and_a_paragraph_stand_for_themselves() -> None:
    page = "# Head\none\ntwo\n\n| a |\n|---|\n| b |\n- c\n  d\n- e\n```\n9 s\n```\nf\n"
    assert [(u.line, u.text) for u in split_units(page)] == [
        (1, "# Head"),
        (2, "one\ntwo"),
        (5, "| a |"),
        (6, "|---|"),
        (7, "| b |"),
        (8, "- c\n  d"),
        (10, "- e"),
        (14, "f"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "It takes [2.17 s](docs/claims.md#first-call), which is 28 times less.",
        "| first | 2.17 s | 28x | <!-- claim: first-call -->",
        "The default is `2 %`.",
        "```\n5 s\n```",
        "Up to 2 % is accepted. <!-- no claim: a setting -->",
    ],
)
def test_a_figure_that_is_backed_or_marked_passes(repository: Path, text: str) -> None:
    (repository / "README.md").write_text(text + "\n")
    assert check_all(repository) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("It takes 2.17 s.", "README.md:1: no claim backs the figure 2.17 s; link to one"),
        (
            "It takes [2.2 s](claims.md#first-call).",
            "backs the figure 2.2 s; first-call displays 2.17 s, 28 x",
        ),
        ("It takes [2.17 s](claims.md#second-call).", "no claim second-call in benchmarks/claims.toml"),
        (
            "| [a](claims.md#first-call) | 2.17 s |\n| b | 28x |",
            "README.md:2: no claim backs the figure 28 x",
        ),
        ("It takes 3 s. <!-- no claim: -->", "no claim backs the figure 3 s"),
    ],
)
def test_a_figure_that_no_claim_displays_is_told(repository: Path, text: str, said: str) -> None:
    (repository / "README.md").write_text(text + "\n")
    assert said in "\n".join(check_all(repository))


@pytest.mark.parametrize(
    ("number", "right"), [("27.7", True), ("26.5", False), ("26.5x", False), ("3", False)]
)
def test_a_link_shows_an_estimate_and_no_end_of_an_interval(
    repository: Path, number: str, right: bool
) -> None:
    manifest = repository / "benchmarks/claims.toml"
    more = """figures.gain = "27.7 -> {:.1f}"\nfigures.gain_low = "26.5 -> {:.1f}x"\n"""
    manifest.write_text(CLAIM + more)
    (repository / "README.md").write_text(f"The gain is [{number}](docs/claims.md#first-call).\n")
    rows = [p for p in check_all(repository) if "a link shows an estimate" in p]
    assert bool(rows) is not right


def test_a_new_result_makes_the_figures_shown_wrong(repository: Path) -> None:
    path = repository / "benchmarks/results/first.json"
    path.write_text(path.read_text().replace("2.168", "1.9"))
    result = check_all(repository)
    assert "README.md:1: no claim backs the figure 2.17 s" in result[0]
    assert sum("run python -m benchmarks page" in line for line in result) == 2


def test_a_result_that_no_claim_uses_is_told(repository: Path) -> None:
    (repository / "benchmarks/results/second.json").write_text("{}")
    assert problem(repository).startswith("benchmarks/results/second.json: no claim uses this result")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("benchmarks.tuning.first", "benchmarks.tuning.gone", "no script benchmarks.tuning.gone"),
        ("--rounds 3", "--laps 3", "benchmarks.tuning.first has no option --laps"),
        ('["package"]', '["gone"]', "no source gone"),
        ('["package"]', '["@gone"]', "no list [sources] 'gone'"),
        ('"first.json"', '"gone.json"', "no result file benchmarks/results/gone.json"),
        ("summary['seconds'] ->", "summary['hours'] ->", "gives KeyError: 'hours'"),
        ("{speedup} less", "{factor} less", "the sentence shows ['factor']"),
        ('"first.json"', '"first.json"\ncommit = "1234567"', "commit 1234567 is not in the history"),
        ('"first.json"', '"first.json"\ncommit = "working-tree"', "the result names no commit"),
    ],
)
def test_a_claim_that_breaks_a_rule_is_told(repository: Path, old: str, new: str, said: str) -> None:
    (repository / "benchmarks/claims.toml").write_text(CLAIM.replace(old, new, 1))
    assert said in "\n".join(check_all(repository))


def test_the_pages_show_a_claim_and_its_headline(repository: Path) -> None:
    results, claims = (repository / f"docs/{name}.md" for name in ("results", "claims"))
    row = "| [2.17 s](claims.md#first-call) | for the first call, 28x less. | GPU | 2026-01-02 |"
    assert row in results.read_text().splitlines()
    assert '<a id="first-call"></a>The first call takes 2.17 s, 28x less than it took.' in claims.read_text()
    results.write_text("")
    assert problem(repository).startswith("docs/results.md is not what")
