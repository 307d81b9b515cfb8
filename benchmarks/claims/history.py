"""The history of a claim's sources since it was measured.

A source is what it was at the commit of the measurement, under whatever name it had then: renames are followed
commit by commit. Python files are compared as syntax trees without docstrings and imports, so that a file that was
moved, formatted or documented counts as the same; all others are compared byte by byte. A name that was changed in
the code counts as a change: that the figures stay the same would have to be measured.
"""

from __future__ import annotations

import ast
import hashlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from benchmarks.claims.manifest import Claim


@dataclass(frozen=True)
class Change:
    """A change of one file by one commit: `old` and `new` are its names; None where it did not or does not exist."""

    old: str | None
    new: str | None
    moved_only: bool


@dataclass(frozen=True)
class Staleness:
    """The state of a claim's sources since it was measured."""

    stale: bool
    commits: tuple[str, ...]
    """Commits since the measurement that changed a source's text, newest first."""
    paths: tuple[str, ...]
    """Sources, by their present names, whose text is another than it was."""


class History:
    """The first-parent history of a repository's HEAD; what came by a merge counts from the merge on."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def _git(self, *arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=self.root, capture_output=True, check=True, text=True, errors="replace"
        )
        return done.stdout

    @cached_property
    def commits(self) -> list[str]:
        """Full hashes, newest first; empty without a repository or git."""
        try:
            return self._git("log", "--first-parent", "--format=%H").split()
        except (OSError, subprocess.CalledProcessError):
            return []

    @cached_property
    def _changes(self) -> list[list[Change]]:
        """By commit, newest first."""
        text = self._git("log", "--first-parent", "-m", "-M", "-z", "--name-status", "--format=%x01%H")
        return [list(_parse_changes(part)) for part in text.split("\x01")[1:]]

    @cached_property
    def complete(self) -> bool:
        """Whether this is a whole repository, and not a shallow clone or an archive without a history."""
        return bool(self.commits) and self._git("rev-parse", "--is-shallow-repository").strip() == "false"

    def knows(self, commit: str) -> bool:
        """Whether the commit is in the history; a shallow clone lacks most of it."""
        return self._index(commit) is not None

    def _index(self, commit: str) -> int | None:
        """Its place in the history, or that of the merge that brought it."""
        if not commit:
            return None
        place = next((i for i, known in enumerate(self.commits) if known.startswith(commit)), None)
        return self._merge_of(commit) if place is None and self.complete else place

    @cache  # noqa: B019 - one object a process
    def _merge_of(self, commit: str) -> int | None:
        """Place of the oldest commit that this one is an ancestor of."""
        holds = lambda place: self._is_ancestor(commit, self.commits[place])  # noqa: E731
        if not holds(0):
            return None
        newer, older = 0, len(self.commits)  # the first holds it, and what is older than the merge does not
        while older - newer > 1:
            middle = (newer + older) // 2
            newer, older = (middle, older) if holds(middle) else (newer, middle)
        return newer

    def _is_ancestor(self, commit: str, of: str) -> bool:
        command = ["git", "merge-base", "--is-ancestor", commit, of]
        return subprocess.run(command, cwd=self.root, capture_output=True, check=False).returncode == 0

    def staleness(self, claim: Claim) -> Staleness | None:
        """Return the state of its sources; None if the commit of the measurement is not in the history."""
        since = self._index(claim.origin.base_commit)
        if since is None:
            return None
        files = [file for file in self._files if _below(file, claim.sources)]
        then_names: dict[str, str | None] = dict(zip(files, files, strict=True))
        # Name at the commit that is looked at -> name now; None: deleted since.
        present: dict[str, str | None] = {**then_names}
        commits = []
        for commit, changes in zip(self.commits[:since], self._changes[:since], strict=True):
            touched = False
            for change in changes:
                if change.new in present:
                    now = present.pop(change.new)
                    if now is not None:
                        then_names[now] = change.old
                elif change.new is None and _below(change.old or "", claim.sources):
                    now = None
                else:
                    continue
                if change.old is not None:
                    present[change.old] = now
                touched = touched or not change.moved_only
            if touched:
                commits.append(commit)
        # Of what was measured beside the history, only what the merge itself has changed is not looked at for renames.
        measured = claim.origin.base_commit
        then = self._blobs(measured if not self.commits[since].startswith(measured) else self.commits[since])
        paths = [f for f in files if then.get(then_names[f] or "") != self._present_blob(f)]
        deleted = any(now is None and name in then for name, now in present.items())
        stale = deleted or any(self._differs(then.get(then_names[f] or ""), f) for f in paths)
        return Staleness(stale, tuple(commits), tuple(paths))

    @cached_property
    def _files(self) -> list[str]:
        listed = self._git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
        return [file for file in dict.fromkeys(listed) if file and (self.root / file).is_file()]

    @cache  # noqa: B019 - one object a process
    def _blobs(self, commit: str) -> dict[str, str]:
        """Path to blob, for every file of a commit."""
        entries = self._git("ls-tree", "-r", "-z", commit).split("\0")
        return {path: head.split()[2] for head, _, path in (e.partition("\t") for e in entries if e)}

    @cache  # noqa: B019
    def _present_blob(self, file: str) -> str:
        content = (self.root / file).read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    @cache  # noqa: B019
    def _differs(self, blob: str | None, file: str) -> bool:
        if blob is None or not file.endswith(".py"):
            return True
        now = (self.root / file).read_text(encoding="utf-8")
        return _syntax(self._git("cat-file", "blob", blob)) != _syntax(now)


def _below(file: str, sources: tuple[str, ...]) -> bool:
    return any(file == source or file.startswith(source + "/") for source in sources)


def _parse_changes(part: str) -> Iterator[Change]:
    """Parse `HASH NUL [newline STATUS NUL PATH NUL [PATH NUL]]...`, which is what `-z --name-status` prints."""
    fields = iter(part.split("\0")[1:])
    for field in fields:
        status = field.strip()
        if not status:
            continue
        if status[0] == "R":
            old, new = next(fields), next(fields)
            yield Change(old, new, moved_only=status == "R100")
        else:
            path = next(fields)
            yield Change(None if status == "A" else path, None if status == "D" else path, moved_only=False)


def _syntax(source: str) -> str:
    """A module's syntax tree as text, without docstrings and import statements."""
    return ast.dump(_Bare().visit(ast.parse(source)))


class _Bare(ast.NodeTransformer):
    def visit_Import(self, node: ast.Import) -> None:
        return None

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        return None

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            return None
        return self.generic_visit(node)
