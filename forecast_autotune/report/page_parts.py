"""Parts of all pages: their style, files beside the code, and digests for content security policies."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files

STYLE = """
:root { color-scheme: light; --ink: #1b1f24; --soft: #6e7781; --line: #e3e7eb; --paper: #fff; }
:root { --good: #1a7f37; --fair: #9a6700; --bad: #cf222e; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); }
body { margin: 2.5rem auto; max-width: 78rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0; } p { color: var(--soft); margin: .2rem 0 1.4rem; }
.cards { display: flex; flex-wrap: wrap; gap: .8rem; margin-bottom: 1.5rem; }
.card { border: 1px solid var(--line); border-radius: 8px; padding: .6rem 1rem; }
.card b { display: block; font-size: 1.35rem; } .card span { color: var(--soft); font-size: .85rem; }
img { width: 100%; height: auto; } .scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .86rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child, td.text { text-align: left; }
th { position: sticky; top: 0; background: var(--paper); }
td.line { font-family: monospace; letter-spacing: -1px; text-align: left; }
.good { color: var(--good); } .fair { color: var(--fair); } .bad { color: var(--bad); }
"""
"""The style of all pages; a page that also has a dark face sets the variables anew."""


@cache
def page_file(package: str, name: str) -> str:
    """The text of a file of `package`, which is installed with the code."""
    return (files(package) / name).read_text(encoding="utf-8")


def policy_source(text: str) -> str:
    """The source in a content security policy that lets a page run or show `text`, and nothing else."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
