"""The site builds without a warning and is seen in a browser; its pages are current, short and lead to each other."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.browser import PageVisit, chromium

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)|(?:src|srcset|href)=\"(?P<attribute>[^\"]+)\"")
_REMOTE = re.compile(
    r"""<(?:script|img)\b[^>]*\bsrc="https?:|<link\b[^>]*\brel="stylesheet"[^>]*\bhref="https?:"""
)
_OVERFLOW = """
[...document.querySelectorAll("html, .md-content pre > code, .md-content p")]
    .filter(one => one.scrollWidth > one.clientWidth + 1).map(one => one.textContent.trim().slice(0, 80))
"""
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ +(?P<text>.+?)(?: *\{#(?P<id>[\w-]+)\})? *$", re.MULTILINE)
_ANCHOR = re.compile(r"(?:id|name)=\"(?P<id>[^\"]+)\"|\{[^}]*#(?P<attribute>[\w-]+)[^}]*\}")


def test_reference_pages_are_what_the_code_says() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "tools" / "reference.py"), "--check"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs the extra docs")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        # Not --quiet: a warning that is not shown does not fail the build.
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "REPOSITORY_URL": "https://example.org/some/place"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "reference" / "api" / "index.html").is_file()
    assert 'href="https://example.org/some/place"' in (tmp_path / "index.html").read_text(encoding="utf-8")
    for page in tmp_path.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not _REMOTE.search(text), page
        # The theme fetches the renderer of a diagram that a page holds as text.
        assert 'class="mermaid"' not in text, page
    with chromium() as browser:
        for width in (1280, 400):
            tab = browser.new_page(viewport={"width": width, "height": 800})
            for page in (
                "",
                "quickstart",
                "how_to/torch_compile",
                "how_to/coding_agents",
                "reference/command_line",
            ):
                tab.goto((tmp_path / page / "index.html").as_uri())
                assert tab.evaluate(_OVERFLOW) == [], f"{page} at {width} pixels"


@pytest.mark.parametrize("fresh", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_tour_shows_every_step_of_a_decision_and_of_a_search(fresh: bool, tmp_path: Path) -> None:
    folder = tmp_path if fresh else ROOT / "docs" / "tour"
    if fresh:
        subprocess.run([sys.executable, str(ROOT / "docs" / "tools" / "tour.py"), str(folder)], check=True)
    steps = runpy.run_path(str(ROOT / "docs" / "tools" / "tour.py"))["STEPS"]
    with chromium() as browser:
        visit = PageVisit(browser, (folder / "index.html").as_uri())
        texts = {
            name: visit.tab.eval_on_selector_all(f"section {name}", "all => all.map(e => e.innerText)")
            for name in ("h2", ".command", ".output", "a")
        }
        assert visit.tab.evaluate(_OVERFLOW) == []
        assert visit.requested_urls == [(folder / "index.html").as_uri()]
        for link in texts["a"]:
            assert PageVisit(browser, (folder / link).as_uri()).messages == []
    assert texts["h2"] == [step[0] for step in steps]
    assert texts[".command"] == [f"$ {step[2]}" for step in steps]
    assert all(texts[".output"])
    shown = "\n".join(texts[".output"])
    for part in ("plan 1 ", "90 % range", "stated risk", "[stored; "):
        assert part in shown
    # On a busy machine nothing may be faster beyond doubt.
    assert fresh or " over the seed, 95 % interval" in shown


def test_every_page_is_behind_a_door() -> None:
    """Links lead from the start page to every page, and the navigation names no other."""
    docs, to_read, met = ROOT / "docs", [ROOT / "docs" / "index.md"], set[Path]()
    while to_read:
        page = to_read.pop().resolve()
        if page not in met and page.suffix == ".md":
            met.add(page)
            to_read += [
                page.parent / t.partition("#")[0] for t in _links(page) if ":" not in t and t[0] != "#"
            ]
    assert {page for page in docs.rglob("*.md")} - met == set()


def test_pages_are_short_and_their_sentences_too() -> None:
    """19 of 20 sentences have at most 28 words, and none begins with "Of"; tables, headings and code do not count."""
    pages = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CHANGELOG.md")}
    site = {
        str(p.relative_to(ROOT)): p.read_text(encoding="utf-8") for p in sorted((ROOT / "docs").rglob("*.md"))
    }
    every = [(len(s.split()), name, s) for name, text in (pages | site).items() for s in _sentences(text)]
    assert [one for one in every if re.match(r"(?:Of|What|Who)\b[^?]*$", one[2])] == []
    longest = sorted(every, reverse=True)[: len(every) // 20]
    assert longest[-1][0] <= 28, longest
    words = {name: len(text.split()) for name, text in (pages | site).items()}
    assert sum(words[name] for name in site) <= 35_000
    assert words["README.md"] <= 1_100
    assert len(pages["README.md"].splitlines()) <= 130
    assert words["docs/results.md"] <= 900


def _sentences(text: str) -> list[str]:
    prose = re.sub(r"<!--.*?-->|<[^>]+>|^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", prose)
    prose = re.sub(r"`[^`]*`", "code", prose)
    prose = re.sub(r"^ *(?:#|:::|\|).*$", "", prose, flags=re.MULTILINE)
    parts = re.split(r"\n\s*\n|^ *(?:[-*]|\d+\.) ", prose, flags=re.MULTILINE)
    whole = (" ".join(part.replace("*", "").split()) for part in parts)
    return [s for part in whole for s in re.split(r"(?<=[.!?])\s+(?=[\"'(]?[A-Z0-9]|code\b)", part) if s]


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_links_to_files_and_headings_lead_somewhere(page: str) -> None:
    path = ROOT / page
    if not path.is_file():
        pytest.fail(f"{page} is missing")
    broken = []
    for target in _links(path):
        if re.match(r"^[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        there = (path.parent / name).resolve() if name else path
        wrong_anchor = anchor and there.suffix == ".md" and there.is_file() and anchor not in _anchors(there)
        if not there.exists() or wrong_anchor:
            broken.append(target)
    assert not broken, f"{page} has broken links: {', '.join(broken)}"


def test_every_settings_variable_and_command_is_in_the_reference() -> None:
    from forecast_autotune.commands import grammar
    from forecast_autotune.settings import Settings

    settings = (ROOT / "docs" / "reference" / "settings.md").read_text(encoding="utf-8")
    for variable, _, _ in Settings().describe():
        assert f"`{variable}`" in settings
    commands = (ROOT / "docs" / "reference" / "command_line.md").read_text(encoding="utf-8")
    for name in grammar.ORDER:
        assert f"{{#{name}" in commands


def test_every_public_name_is_in_the_reference() -> None:
    import forecast_autotune
    from forecast_autotune import languages, testing

    api = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    listed = re.findall(r"^(?:::: [\w.]+\.|### )(\w+)$", api, re.MULTILINE)
    public = [*forecast_autotune.__all__, *testing.__all__, *languages.__all__]
    assert sorted(listed) == sorted(public)


def _links(path: Path) -> list[str]:
    text = _FENCE.sub("", path.read_text(encoding="utf-8"))
    return [match["target"] or match["attribute"] for match in _LINK.finditer(text)]


def _anchors(path: Path) -> set[str]:
    """Return what a link into a page may name: its headings, as GitHub and MkDocs spell them, and explicit ids."""
    text = path.read_text(encoding="utf-8")
    names = {match["id"] or match["attribute"] for match in _ANCHOR.finditer(text)}
    for match in _HEADING.finditer(_FENCE.sub("", text)):
        if match["id"]:
            names.add(match["id"])
        words = re.sub(r"[^\w\s-]", "", match["text"].lower()).strip()
        names |= {re.sub(r"\s", "-", words), re.sub(r"[-\s]+", "-", words)}
    return names
