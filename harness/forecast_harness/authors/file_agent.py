"""An agent that answers in files, as a program for `external:`.

    --proposer 'external:python -m forecast_harness.authors.file_agent FOLDER'

Each request becomes a folder `FOLDER/0001`, `FOLDER/0002`, ... with `request.json`, the request as `external`
describes it, and `request.md`, the same for reading. Whoever answers (a coding agent, a person) writes sources
beside them, `*.py` or `*.cu`, whose first line may be a comment that says what was changed, and in the end a file
`done`. That may be empty, or an object in JSON with `author`, `tokens` and `money`. A file `FOLDER/stop` says that
there will be no more sources.

What was asked and answered stays in FOLDER, and can be searched again without anybody: `--proposer recorded:FOLDER`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forecast_autotune.store.files import write_atomically

_POLL_S = 0.2
_SUFFIXES = {".py": "", ".cu": "cuda"}
"""Of sources, and the language they are in; empty: the target's."""
_REQUEST, _READABLE, _DONE, _STOP = "request.json", "request.md", "done", "stop"
_MOST_BYTES = 1 << 20


def readable_request(request: Mapping[str, Any]) -> str:
    """A request as Markdown: the statement, what is measured of the parents, and what went wrong lately."""
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
            judged = node["judged"] or {}
            lines += [f"### {node['note'] or node['id']}", ""]
            lines += [f"- {text}" for text in _measured(judged)]
            lines += [
                "",
                f"```{'cpp' if node['language'] == 'cuda' else 'python'}",
                node["source"].strip(),
                "```",
                "",
            ]
    return "\n".join(lines)


def _measured(judged: Mapping[str, Any]) -> list[str]:
    found = [f"outcome: {judged['outcome']}"] if "outcome" in judged else []
    if judged.get("log2_ratio") is not None:
        found.append(f"time over that of the source it was timed beside: {2 ** judged['log2_ratio']:.3f}")
    found += [f"{name}: {1e6 * seconds:.4g} us" for name, seconds in (judged.get("seconds") or {}).items()]
    return found + ([f"said: {judged['feedback']}"] if judged.get("feedback") else [])


def answer_in_files(request: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Put a request into its folder, wait for the answer, read it."""
    if (folder / _STOP).exists():
        return {"id": request["id"], "nodes": [], "exhausted": True}
    place = _place_for(request, folder)
    while not (place / _DONE).exists():
        if (folder / _STOP).exists():
            return {"id": request["id"], "nodes": [], "exhausted": True}
        time.sleep(_POLL_S)
    return _read_answer(request, place)


def _place_for(request: Mapping[str, Any], folder: Path) -> Path:
    """The request's folder: the one of an earlier run of the same search, or the next."""
    places = sorted(p for p in folder.glob("[0-9]*") if p.is_dir())
    for place in places:
        if (place / _REQUEST).exists() and json.loads((place / _REQUEST).read_text())["id"] == request["id"]:
            return place
    place = folder / f"{len(places) + 1:04d}"
    place.mkdir(parents=True)
    write_atomically(place / _READABLE, readable_request(request).encode())
    write_atomically(place / _REQUEST, json.dumps(request, indent=1).encode())
    return place


def _read_answer(request: Mapping[str, Any], place: Path) -> dict[str, Any]:
    answer: dict[str, Any] = {"id": request["id"], "nodes": []}
    try:
        about = json.loads((place / _DONE).read_text(encoding="utf-8").strip() or "{}")
    except ValueError as error:
        return {**answer, "problem": f"{place.name}/{_DONE} must be empty or an object in JSON: {error}"}
    if not isinstance(about, dict):
        return {
            **answer,
            "problem": f"{place.name}/{_DONE} must be empty or an object in JSON, not a {type(about).__name__}",
        }
    answer |= {name: about[name] for name in ("tokens", "money") if name in about}
    for path in sorted(place.iterdir()):
        if path.suffix not in _SUFFIXES or not path.is_file():
            continue
        if path.stat().st_size > _MOST_BYTES:
            return {**answer, "problem": f"{place.name}/{path.name} has more than {_MOST_BYTES} bytes"}
        source = path.read_text(encoding="utf-8", errors="replace")
        node = {
            "source": source,
            "note": _note(source) or path.stem,
            "author": str(about.get("author", "")),
            "origin": "llm",
        }
        language = _SUFFIXES[path.suffix]
        answer["nodes"].append(node | ({"language": language} if language else {}))
    if not answer["nodes"]:
        answer["problem"] = f"no sources in {place.name}"
    return answer


def _note(source: str) -> str:
    first = source.lstrip().partition("\n")[0]
    for mark in ("#", "//"):
        if first.startswith(mark) and not first.startswith("#include"):
            return first.removeprefix(mark).strip()
    return ""


def main() -> int:
    """Answer requests from stdin until it ends."""
    if len(sys.argv) != 2:
        print("usage: python -m forecast_harness.authors.file_agent FOLDER", file=sys.stderr)
        return 2
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for line in sys.stdin:
        print(json.dumps(answer_in_files(json.loads(line), folder)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
