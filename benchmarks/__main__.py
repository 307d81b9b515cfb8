"""Checks of the measured claims; nothing is measured.

    python -m benchmarks check     every figure backed, every result used, both pages current
    python -m benchmarks stale     claims whose sources changed since they were measured, oldest first
    python -m benchmarks page      write docs/results.md and docs/claims.md

Exit status 0; 1 if `check` found something. Claims are in `benchmarks/claims.toml`, whose head explains them.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.claims.check import check_all, write_pages
from benchmarks.claims.history import History
from benchmarks.claims.manifest import ROOT, load_claims


def main() -> int:
    """Run one command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="fail if a figure, a result or a generated page is not in order")
    stale = commands.add_parser("stale", help="list the claims whose sources changed since")
    stale.add_argument("--paths", action="store_true", help="name every changed file, not the first three")
    commands.add_parser("page", help="write docs/results.md and docs/claims.md")
    arguments = parser.parse_args()
    if arguments.command == "check":
        return _check()
    if arguments.command == "page":
        return _page()
    return _stale(every_path=arguments.paths)


def _check() -> int:
    problems = check_all(ROOT)
    for line in problems:
        print(line)
    print(f"{len(problems)} problems" if problems else "claims, results and pages agree")
    return 1 if problems else 0


def _page() -> int:
    problems = write_pages(ROOT)
    for line in problems:
        print(line, file=sys.stderr)
    return 1 if problems else 0


def _stale(every_path: bool) -> int:
    claims, _ = load_claims(ROOT)
    history = History(ROOT)
    stale = 0
    for claim in sorted(claims, key=lambda c: (c.origin.date, c.area, c.id)):
        paths = history.changed_sources(claim)
        if paths == []:
            continue
        stale += 1
        head = f"{claim.origin.date}  {claim.origin.commit:12}  {claim.area}.{claim.id}"
        if paths is None:
            print(f"{head}: the commit is not in this clone's history")
            continue
        shown = paths if every_path else paths[:3]
        rest = f" and {len(paths) - len(shown)} more" if len(paths) > len(shown) else ""
        print(f"{head}: {len(paths)} files: {', '.join(shown)}{rest}")
    print(f"{stale} of {len(claims)} claims")
    return 0


if __name__ == "__main__":
    sys.exit(main())
