"""Sources of whoever answers in files, and of a record: one request, and one answer.

A request, as an object in JSON (`schema` changes when fields change their meaning):

    {"type": "request", "schema": 1, "id": "<answer with it>", "n": 8, "seed": 1234, "style": "ask",
     "target": {"kind": "pack", "name": "softmax", "id": "...", "language": "torch", "entry": "run",
                "statement": "<what is computed, and the rules for a source>"},
     "work": {"<workload>": {"axes": {...}, "bytes": <moved at least>, "flops": <useful ones>}},
     "parents": [{"id": "...", "source": "...", "language": "torch", "note": "...", "judged": {...} or null}],
     "failures": [<like a parent, with outcome, stage and feedback in judged>],
     "score": <log2(time of the first parent / time of the first seed)>}

`files:FOLDER` is whoever answers in files: a coding agent, a program, a person. Each request becomes a folder
`FOLDER/0001`, `FOLDER/0002`, ... with `request.json`, and `request.md`, the same for reading. The nodes are the files
`*.py` and `*.cu` beside them, whose first line may be a comment that is the note. A file `done` says that they are
complete; it may hold the rest of the answer:

    {"author": "<model and version>", "tokens": 0, "money": 0.0, "exhausted": false,
     "problem": "<why there are none>"}

Requests come one at a time. A file `FOLDER/stop` says that there will be no more sources.

`recorded:FOLDER` answers with the sources in all files `*.py` and `*.cu` below a folder, such as one that was answered
in before, until each has been dealt.
"""

from __future__ import annotations

import json
import random
import threading
import time
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from forecast_autotune.errors import RecordError, SettingsError
from forecast_autotune.records import codec
from forecast_autotune.records.json_fields import decode_json, read_integer, read_number
from forecast_autotune.records.named_lines import read_document
from forecast_autotune.store.files import write_atomically
from forecast_autotune.variants.records import Origin, Provenance
from forecast_harness.authors.author import Author, Draft, defines_entry, draw_seed, new_nodes
from forecast_harness.records import Node, ProposalRequest, Proposed, SearchCost, SearchTarget
from forecast_harness.targets.novelty import node_identity
from forecast_harness.targets.packs.load import make_solution
from forecast_harness.targets.statement import timed_work

SCHEMA = 1
_POLL_S = 0.2
_MAX_TEXT_CHARS = 400
_MAX_NOTE_CHARS = 300
_SOURCE_SUFFIXES = (".py", ".cu")
_REQUEST, _READABLE, _DONE, _STOP = "request.json", "request.md", "done", "stop"


class _ProtocolError(Exception):
    """There is no answer that can be read; the text says why."""


class ExternalAuthor(Author):
    """An author outside of this program, which answers one request at a time."""

    def __init__(self, name: str) -> None:
        """`name`: the author's name, as problems state it."""
        self.name = name
        self._mutex = threading.Lock()

    @abstractmethod
    def answer(self, request: ProposalRequest) -> Mapping[str, Any]:
        """The answer to a request. Raises `_ProtocolError`."""

    def propose(self, request: ProposalRequest) -> Proposed:
        """See `Author`."""
        begin = time.monotonic()
        cost = SearchCost()
        with self._mutex:
            try:
                answer = self.answer(request)
                cost = _answer_cost(answer)
                proposal = _read_answer(answer, request)
            except (_ProtocolError, RecordError) as error:
                proposal = Proposed(request.id, (), problem=f"{self.name}: {error}")
        return replace(proposal, spent=replace(cost, wall_seconds=time.monotonic() - begin))

    def close(self) -> None:
        """End whoever answers. An answer under way is lost."""
        return


# --- files ---


class AnswerFolder(ExternalAuthor):
    """A folder in which somebody answers."""

    styles = ("ask",)

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder).expanduser()
        super().__init__(f"files:{self._folder.name}")
        self._closed = threading.Event()

    def answer(self, request: ProposalRequest) -> Mapping[str, Any]:
        """The answer in the request's folder. Waits as long as it takes; requests of earlier runs are not repeated."""
        place: Path | None = None
        while not self._closed.is_set():
            if (self._folder / _STOP).exists():
                return {"id": request.id, "nodes": [], "exhausted": True}
            place = place or self._place_for(request)
            if (place / _DONE).exists():
                return self._read(request, place)
            self._closed.wait(_POLL_S)
        raise _ProtocolError("it was closed")

    def close(self) -> None:
        """Wait no longer."""
        self._closed.set()
        with self._mutex:  # whoever waited for an answer has noticed that
            pass

    def _place_for(self, request: ProposalRequest) -> Path:
        """The request's folder: the one of an earlier run of the same search, or the next."""
        data = _request_json(request)
        try:
            places = sorted(p for p in self._folder.glob("[0-9]*") if p.is_dir())
            for place in places:
                request_file = place / _REQUEST
                if (
                    request_file.exists()
                    and decode_json(request_file.read_text(encoding="utf-8"))["id"] == request.id
                ):
                    return place
            place = self._folder / f"{len(places) + 1:04d}"
            place.mkdir(parents=True)
            write_atomically(place / _READABLE, readable_request(data).encode())
            write_atomically(place / _REQUEST, json.dumps(data, indent=1).encode())
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise _ProtocolError(f"{self._folder} cannot be asked in: {error}") from error
        return place

    def _read(self, request: ProposalRequest, place: Path) -> Mapping[str, Any]:
        where = f"{place.name}/{_DONE}"
        try:
            about = decode_json((place / _DONE).read_text(encoding="utf-8").strip() or "{}")
        except (OSError, ValueError, RecursionError) as error:
            return _refusal(request, f"{where} must be empty or an object in JSON: {error}")
        if not isinstance(about, dict):
            return _refusal(
                request, f"{where} must be empty or an object in JSON, not a {type(about).__name__}"
            )
        author = str(about.pop("author", ""))
        nodes = list(_source_nodes(place.iterdir(), place))
        nodes = [{**node, "author": author} for node in nodes]
        nothing = {} if nodes else {"problem": f"no sources in {place.name}"}
        return {**nothing, **about, "id": request.id, "nodes": nodes}


class RecordedSources(ExternalAuthor):
    """Sources of a folder, dealt in a drawn order until each has been.

    `ProposalRequest.known` alone tells what was dealt, so that a resumed search deals the same. Requests of one
    batch draw different orders and may still deal a source twice; it is one node all the same.

    Raises `SettingsError` where no file can be read, or no source defines the target's entry.
    """

    styles = ("dealt",)

    def __init__(self, folder: str, target: SearchTarget) -> None:
        path = Path(folder).expanduser()
        super().__init__(f"recorded:{path.name}")
        if not path.is_dir():
            raise SettingsError(f"recorded:{folder} is no folder: name one of .py and .cu files")
        try:
            nodes = list(_source_nodes(path.rglob("*"), path))
        except RecordError as error:
            raise SettingsError(f"recorded:{folder}: {error}") from error
        candidates = [n for n in nodes if defines_entry(n["source"], target.entry, n["language"])]
        if not candidates:
            raise SettingsError(
                f"recorded:{folder} has {len(nodes)} sources, and none defines {target.entry!r}, as "
                f"{target.name} needs"
            )
        self._nodes = {node_identity(target.id, n["language"], n["source"]): n for n in candidates}

    def answer(self, request: ProposalRequest) -> Mapping[str, Any]:
        """The sources that are not known yet."""
        ids = {*request.known, *(p.id for p in request.parents)}
        nodes = [node for id, node in self._nodes.items() if id not in ids]
        random.Random(draw_seed(request)).shuffle(nodes)
        nothing = {} if nodes else {"problem": "every recorded source is known already"}
        return {**nothing, "id": request.id, "nodes": nodes, "exhausted": len(nodes) <= request.n}


def _refusal(request: ProposalRequest, problem: str) -> Mapping[str, Any]:
    return {"id": request.id, "nodes": [], "problem": problem}


def _source_nodes(paths: Iterable[Path], folder: Path) -> Iterable[dict[str, Any]]:
    """The sources among files, in the order of their paths, as an answer holds them. Raises `RecordError`."""
    for path in sorted(p for p in paths if p.suffix in _SOURCE_SUFFIXES and p.is_file()):
        source = read_document(path)
        cuda = path.suffix == ".cu"
        yield {
            "source": source,
            "note": _note(source) or path.relative_to(folder).as_posix(),
            "language": "cuda" if cuda else str(make_solution("", source).language),
        }


def _note(source: str) -> str:
    first = source.lstrip().partition("\n")[0]
    for mark in ("#", "//"):
        if first.startswith(mark) and not first.startswith("#include"):
            return first.removeprefix(mark).strip()
    return ""


def readable_request(request: Mapping[str, Any]) -> str:
    """A request as Markdown: the statement, the parents with their results, and the latest failures."""
    target = request["target"]
    lines = [f"# {target['name']}: up to {request['n']} new sources", "", target["statement"], ""]
    if request["work"]:
        lines += [
            "## Work of one launch",
            "",
            "| workload | sizes | bytes | flops |",
            "| --- | --- | --- | --- |",
        ]
        for name, work in request["work"].items():
            sizes = ", ".join(f"{k}={v}" for k, v in work["axes"].items())
            lines.append(f"| {name} | {sizes} | {work['bytes']} | {work['flops']} |")
        lines.append("")
    for title, nodes in (("Parents, the best first", request["parents"]), ("Failures", request["failures"])):
        if nodes:
            lines += [f"## {title}", ""]
        for node in nodes:
            result = node["judged"] or {}
            lines += [f"### {node['note'] or node['id']}", ""]
            lines += [f"- {text}" for text in _result_lines(result)]
            lines += [
                "",
                f"```{'cpp' if node['language'] == 'cuda' else 'python'}",
                node["source"].strip(),
                "```",
                "",
            ]
    return "\n".join(lines)


def _result_lines(result: Mapping[str, Any]) -> list[str]:
    lines = [f"outcome: {result['outcome']}"] if "outcome" in result else []
    if result.get("log2_ratio") is not None:
        lines.append(f"time over that of the source it was timed beside: {2 ** result['log2_ratio']:.3f}")
    lines += [f"{name}: {1e6 * seconds:.4g} us" for name, seconds in (result.get("seconds") or {}).items()]
    return lines + ([f"said: {result['feedback']}"] if result.get("feedback") else [])


# --- requests and answers ---


def _request_json(request: ProposalRequest) -> dict[str, Any]:
    target = {k: str(v) for k, v in vars(request.target).items() if k != "payload"}
    return {
        "type": "request",
        "schema": SCHEMA,
        "id": request.id,
        "n": request.n,
        "seed": request.seed,
        "style": request.arm.rpartition("/")[2],
        "target": target,
        "work": timed_work(request.target),
        "parents": [_node_json(p, request) for p in request.parents],
        "failures": [_node_json(f, request) for f in request.failures],
        "score": request.score,
    }


def _node_json(node: Node, request: ProposalRequest) -> dict[str, Any]:
    result = request.judged.get(node.id)
    return {
        "id": node.id,
        "source": node.source,
        "language": node.language,
        "note": node.provenance.note,
        "judged": None if result is None else codec.to_json(result),
    }


def _answer_cost(answer: Mapping[str, Any]) -> SearchCost:
    tokens = read_integer(answer.get("tokens", 0), "tokens")
    money = read_number(answer.get("money"), "money") or 0.0
    if money < 0:
        raise RecordError(f"money must not be negative, it is {money:g}")
    return SearchCost(tokens=tokens, money=money)


def _read_answer(answer: Mapping[str, Any], request: ProposalRequest) -> Proposed:
    """The nodes of an answer. Raises `RecordError` for a source that is empty."""
    drafts = [_draft(data, request) for data in answer["nodes"]]
    nodes = new_nodes(request, drafts)
    problem = str(answer.get("problem") or "")[:_MAX_TEXT_CHARS]
    if not nodes and not problem:
        problem = "nothing new among its sources" if drafts else "it gave no source"
    return Proposed(request.id, nodes, problem=problem, exhausted=answer.get("exhausted") is True)


def _draft(data: Mapping[str, str], request: ProposalRequest) -> Draft:
    note = " ".join(data["note"].split())[:_MAX_NOTE_CHARS]
    if not data["source"].strip():
        raise RecordError(f"a source must not be empty: {note}")
    author = (data.get("author") or request.arm)[:_MAX_NOTE_CHARS]
    return Draft(data["source"], Provenance(Origin.LLM, author=author, note=note), data["language"])
