"""The changes of a claim's sources since it was measured, as git's diff from that commit tells them.

A file that was moved as it is counts as the same; any other change of its text counts, a comment's, too. That a source
changed does not mean that the figure is wrong: it has not been measured on the present code.
"""

from __future__ import annotations

import subprocess
from functools import cache, cached_property
from pathlib import Path

from benchmarks.claims.manifest import Claim


class History:
    """The history of a repository's HEAD."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def _git(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["git", *arguments], cwd=self.root, capture_output=True, check=False, text=True, errors="replace"
        )

    @cached_property
    def complete(self) -> bool:
        """Whether this is a whole repository, and not a shallow clone or an archive without a history."""
        try:
            return self._git("rev-parse", "--is-shallow-repository").stdout.strip() == "false"
        except OSError:  # no git
            return False

    @cache  # noqa: B019 - one object a process
    def knows(self, commit: str) -> bool:
        """Whether the commit is in the history; a shallow clone lacks most of it."""
        known = self.complete and bool(commit)
        return known and self._git("merge-base", "--is-ancestor", commit, "HEAD").returncode == 0

    def changed_sources(self, claim: Claim) -> list[str] | None:
        """Sources whose text is another than it was, those that are gone too; None where the commit is not known."""
        commit = claim.origin.base_commit
        if not self.knows(commit):
            return None
        return [path for path in self._changed_files(commit) if _below(path, claim.sources)]

    @cache  # noqa: B019
    def _changed_files(self, commit: str) -> list[str]:
        fields = iter(self._git("diff", "-M", "-z", "--name-status", commit).stdout.split("\0"))
        changed = []
        for status in fields:
            if not status:
                break
            path = next(fields)
            if status[0] in "RC":
                path = next(fields)
            if status != "R100":
                changed.append(path)
        return changed


def _below(path: str, sources: tuple[str, ...]) -> bool:
    return any(path == source or path.startswith(source + "/") for source in sources)
