"""The site builds without a warning, its reference pages are current, and README.md's links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)|(?:src|srcset|href)=\"(?P<attribute>[^\"]+)\"")
_REMOTE = re.compile(
    r"""<(?:script|img)\b[^>]*\bsrc="https?:|<link\b[^>]*\brel="stylesheet"[^>]*\bhref="https?:"""
)
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
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "reference" / "api" / "index.html").is_file()
    for page in tmp_path.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not _REMOTE.search(text), page
        # The theme fetches the renderer of a diagram that a page holds as text.
        assert 'class="mermaid"' not in text, page


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
    listed = re.findall(r"^(?:      heading:|###) (\w+)$", api, re.MULTILINE)
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
