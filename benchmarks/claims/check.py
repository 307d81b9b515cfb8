"""All rules of the manifest, the results and the pages in one list of problems."""

from __future__ import annotations

import ast
from pathlib import Path

from benchmarks.claims.figures import PAGE, check_pages
from benchmarks.claims.history import History, Staleness
from benchmarks.claims.manifest import MANIFEST, RESULTS, Claim, load_claims
from benchmarks.claims.page import AREAS, comparable, render_page


def check_all(root: Path) -> tuple[list[str], list[str]]:
    """Problems, each with its remedy, and notes on what could not be checked here."""
    claims, problems = load_claims(root)
    history = History(root)
    for claim in claims:
        problems += [f"{claim.area}.{claim.id}: {what}" for what in _check_claim(claim, history, root)]
    unknown = [c for c in claims if not history.knows(c.origin.base_commit)]
    notes = [f"no history here of {len(unknown)} claims' commits: marks are not compared"] if unknown else []
    problems += _unused_results(claims, root)
    problems += check_pages(claims, root)
    page = root / PAGE
    written = page.read_text(encoding="utf-8") if page.is_file() else ""
    wanted = render_page(claims, _staleness(claims, history))
    if comparable(written, marks=not unknown) != comparable(wanted, marks=not unknown):
        problems.append(f"{PAGE} is not what {MANIFEST} says; run python -m benchmarks page")
    return problems, notes


def write_page(root: Path) -> list[str]:
    """Write the results page; returns problems of the manifest, in which case the claims concerned are missing."""
    claims, problems = load_claims(root)
    text = render_page(claims, _staleness(claims, History(root)))
    (root / PAGE).write_text(text, encoding="utf-8")
    return problems


def _staleness(claims: list[Claim], history: History) -> dict[str, Staleness | None]:
    return {claim.id: history.staleness(claim) for claim in claims}


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
