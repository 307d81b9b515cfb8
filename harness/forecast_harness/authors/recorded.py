"""Sources that were written before: searches that can be repeated without asking anyone.

`recorded:DIR` takes every `.py` and `.cu` file below a folder in the order of paths, and
`recorded:FILE.jsonl[.gz]` one source per line:

    {"source": "...", "language": "torch", "name": "tiled", "parent": "plain", "provenance": {...}}

Only `source` is needed; `provenance` is an object as `Provenance.to_json` writes it. `parent` is the `name`
of another line, or the id of a node. Lines of the form `{"path": "KERNEL/NAME.py", "text": "..."}` are read,
too: a table of files, of which those below a folder named like the target are taken, or all if there is
none.
"""

from __future__ import annotations

import ast
import json
import random
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from forecast_autotune import python_parser
from forecast_autotune.errors import RecordError, SettingsError
from forecast_autotune.records.named_lines import read_document
from forecast_autotune.variants.records import Origin, Provenance
from forecast_harness.authors.author import Draft, defines_entry, draft_identity, draw_seed, new_nodes
from forecast_harness.records import ProposalRequest, Proposed, SearchTarget
from forecast_harness.targets.packs.load import make_solution
from forecast_harness.targets.packs.schema import Language

_MAX_NOTE_CHARS = 300
_SOURCE_SUFFIXES = (".py", ".cu")
_ANNOTATION_NAMES = ("EXPECT",)
"""Names that a table's files assign for its own readers only."""


@dataclass(frozen=True)
class _RecordedSource:
    draft: Draft
    name: str
    parent: str


class RecordedAuthor:
    """Deals recorded sources: children of the asked parent first, then the others in a drawn order.

    What was dealt is told by `ProposalRequest.known` alone, so that a resumed search deals the same. Requests of one
    batch draw different orders and may still deal a source twice; it is one node all the same.

    Raises `SettingsError` when there is no source that defines the target's entry.
    """

    styles: Sequence[str] = ("dealt",)

    def __init__(self, place: str, target: SearchTarget) -> None:
        self.name = f"recorded:{Path(place).name}"
        path = Path(place).expanduser()
        try:
            found = list(_read_folder(path) if path.is_dir() else _read_table(path, target))
        except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
            raise SettingsError(f"recorded:{place} cannot be read: {error}") from error
        except RecordError as error:
            raise SettingsError(f"recorded:{place}: {error}") from error
        fitting = [
            e for e in found if defines_entry(e.draft.source, target.entry, _language_of(e.draft, target))
        ]
        if not fitting:
            raise SettingsError(
                f"recorded:{place} has {len(found)} sources, and none defines {target.entry!r}, as "
                f"{target.name} needs"
            )
        ids = [draft_identity(target, e.draft) for e in fitting]
        named = {e.name: id for e, id in zip(fitting, ids, strict=True) if e.name}
        self._sources = [
            (id, e.draft, named.get(e.parent, e.parent)) for e, id in zip(fitting, ids, strict=True)
        ]

    def propose(self, request: ProposalRequest) -> Proposed:
        """See `Author`."""
        parents = {p.id for p in request.parents}
        known = parents | set(request.known)
        left = [one for one in self._sources if one[0] not in known]
        own = [draft for _, draft, parent in left if parent in parents]
        others = [draft for _, draft, parent in left if parent not in parents]
        random.Random(draw_seed(request)).shuffle(others)
        nodes = new_nodes(request, [*own, *others])
        rest = {id for id, _, _ in left} - {n.id for n in nodes}
        problem = "" if nodes else "every recorded source is known already"
        return Proposed(request.id, nodes, problem=problem, exhausted=not rest)

    def close(self) -> None:
        """Nothing is held."""


def _read_folder(path: Path) -> Iterator[_RecordedSource]:
    for file in sorted(p for p in path.rglob("*") if p.suffix in _SOURCE_SUFFIXES and p.is_file()):
        text = read_document(file)
        where = file.relative_to(path).as_posix()
        yield _RecordedSource(
            Draft(text, Provenance(Origin.HAND, note=where), _language_of_text(file.name, text)), where, ""
        )


def _read_table(path: Path, target: SearchTarget) -> Iterator[_RecordedSource]:
    lines = read_document(path).splitlines()
    data = [_parse_object(line, number) for number, line in enumerate(lines, 1) if line.strip()]
    files = {PurePosixPath(str(d["path"])): d for d in data if "path" in d and "source" not in d}
    if not files:
        yield from (_parse_source_line(d, number) for number, d in enumerate(data, 1))
        return
    author = _table_provenance(files)
    folders = {p.parts[0] for p in files if len(p.parts) > 1}
    mine = next((f for f in (target.name, _plain_kernel_name(target.name)) if f in folders), "")
    for where, one in files.items():
        if where.suffix in _SOURCE_SUFFIXES and (not mine or where.parts[0] == mine):
            text = str(one.get("text", ""))
            source, note = _strip_annotations(text)
            made = Provenance(
                Origin.LLM, author=author.get("author", ""), note=note, at=author.get("date", "")
            )
            yield _RecordedSource(Draft(source, made, _language_of_text(where.name, text)), str(where), "")


def _parse_object(line: str, number: int) -> Mapping[str, Any]:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"line {number} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise RecordError(f"line {number} must be an object, not {data!r:.60}")
    return data


def _parse_source_line(data: Mapping[str, Any], number: int) -> _RecordedSource:
    source, language = data.get("source"), data.get("language", "")
    if not isinstance(source, str) or not source.strip():
        raise RecordError(f"line {number} needs a source, as a text that is not empty")
    if language and language not in list(Language):
        raise RecordError(f"line {number}: language must be one of {', '.join(Language)}, not {language!r}")
    given = data.get("provenance")
    made = Provenance(Origin.HAND) if given is None else Provenance.from_json(given)
    parent = data.get("parent") or ""
    draft = Draft(source, made, language or _language_of_text("", source))
    return _RecordedSource(draft, str(data.get("name") or ""), str(parent))


def _table_provenance(files: Mapping[PurePosixPath, Mapping[str, Any]]) -> dict[str, str]:
    """What the table's own line says of who wrote it; nothing where there is none."""
    stated = files.get(PurePosixPath("PROVENANCE.json"), {}).get("text", "{}")
    try:
        data = json.loads(str(stated))
    except ValueError:
        return {}
    return {k: str(v) for k, v in data.items()} if isinstance(data, dict) else {}


def _strip_annotations(text: str) -> tuple[str, str]:
    """A table's file without docstring and what is meant for its readers; and the docstring's first line."""
    try:
        tree = python_parser.parse_module(text)
    except (SyntaxError, ValueError, RecursionError):
        return text, ""
    note = (ast.get_docstring(tree) or "").partition("\n")[0][:_MAX_NOTE_CHARS]
    lines = text.splitlines(keepends=True)
    for node in reversed(tree.body):
        said = isinstance(node, ast.Expr) and node is tree.body[0] and isinstance(node.value, ast.Constant)
        targets = node.targets if isinstance(node, ast.Assign) else []
        if said or any(isinstance(t, ast.Name) and t.id in _ANNOTATION_NAMES for t in targets):
            del lines[node.lineno - 1 : node.end_lineno]
    return "".join(lines).strip() + "\n", note


def _language_of_text(file: str, source: str) -> str:
    """The language of a source by its text."""
    return "cuda" if file.endswith(".cu") else str(make_solution("", source).language)


def _plain_kernel_name(name: str) -> str:
    return re.sub(r"^_+|_kernel$", "", name)


def _language_of(draft: Draft, target: SearchTarget) -> str:
    return draft.language or target.language
