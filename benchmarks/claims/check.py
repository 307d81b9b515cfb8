"""All rules of the manifest, the results and the pages in one list of problems."""

from __future__ import annotations

import ast
from pathlib import Path

from benchmarks.claims.figures import CLAIMS_PAGE, RESULTS_PAGE, check_pages
from benchmarks.claims.history import History
from benchmarks.claims.manifest import MANIFEST, RESULTS, Claim, load_claims
from benchmarks.claims.page import AREAS, render_claims, render_results

PAGES = {RESULTS_PAGE: render_results, CLAIMS_PAGE: render_claims}
"""The writer of each generated page."""


def check_all(root: Path) -> list[str]:
    """Problems, each with its remedy."""
    claims, problems = load_claims(root)
    history = History(root)
    for claim in claims:
        problems += [f"{claim.area}.{claim.id}: {what}" for what in _check_claim(claim, history, root)]
    problems += _unused_results(claims, root)
    problems += check_pages(claims, root)
    for page, render in PAGES.items():
        if not (root / page).is_file() or (root / page).read_text(encoding="utf-8") != render(claims):
            problems.append(f"{page} is not what {MANIFEST} says; run python -m benchmarks page")
    return problems


def write_pages(root: Path) -> list[str]:
    """Write the generated pages; returns problems of the manifest, in which case the claims concerned are missing."""
    claims, problems = load_claims(root)
    for page, render in PAGES.items():
        (root / page).write_text(render(claims), encoding="utf-8")
    return problems


def _text_with_library(script: Path, root: Path) -> str:
    """A script's text, with that of the modules of `benchmarks.lib` that it imports: options come from there, too."""
    text = script.read_text(encoding="utf-8")
    named = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("benchmarks.lib"):
            named |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    files = [(root / str(name).replace(".", "/")).with_suffix(".py") for name in sorted(map(str, named))]
    return "".join([text, *(file.read_text(encoding="utf-8") for file in files if file.is_file())])


def _check_claim(claim: Claim, history: History, root: Path) -> list[str]:
    problems = []
    if claim.area not in AREAS:
        problems.append(f"no area {claim.area!r}; there are {', '.join(AREAS)}")
    if not claim.figures:
        problems.append("no figures; a claim shows at least one, computed from its result")
    script = (root / claim.script.replace(".", "/")).with_suffix(".py")
    if script.is_file():
        text = _text_with_library(script, root)
        options = [word for word in claim.arguments.split() if word.startswith("--")]
        problems += [f"{claim.script} has no option {o}" for o in options if f'"{o}"' not in text]
    else:
        problems.append(f"no script {claim.script}")
    problems += [f"no source {source}" for source in claim.sources if not (root / source).exists()]
    origin = claim.origin
    if not origin.base_commit:
        problems.append(f"the result names no commit, but {origin.commit!r}; give `commit`")
    elif history.complete and not history.knows(origin.base_commit):
        problems.append(f"commit {origin.base_commit} is not in the history of HEAD")
    if not (origin.date and origin.device):
        problems.append(f"the result names date {origin.date!r} and device {origin.device!r}; give both")
    return problems


def _unused_results(claims: list[Claim], root: Path) -> list[str]:
    used = {file for claim in claims for file in claim.results}
    present = sorted(path.name for path in (root / RESULTS).iterdir() if not path.name.startswith("."))
    return [
        f"{RESULTS / f}: no claim uses this result; add one, or remove the file"
        for f in present
        if f not in used
    ]
