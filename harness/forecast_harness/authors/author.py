"""The protocol of authors, who write new sources; and from sources to nodes, which each does at the end."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from forecast_autotune import python_parser
from forecast_autotune.records import digest
from forecast_autotune.variants.records import Provenance
from forecast_harness.records import Node, ProposalRequest, Proposed, SearchTarget
from forecast_harness.targets.novelty import node_identity


class Author(Protocol):
    """Writes new sources. `styles` are its arms, e.g. `("rewrite", "repair")`."""

    name: str
    styles: Sequence[str]

    def propose(self, request: ProposalRequest) -> Proposed:
        """Answer a request: up to `request.n` nodes. A failure is told in `Proposed.problem`, never raised.

        Deterministic given the request, or cached by `request.id`: an answer that was paid for is not paid
        for again after a crash. Called from several threads.
        """
        ...

    def close(self) -> None:
        """Free its resources."""
        ...


@dataclass(frozen=True)
class Draft:
    """A source that may become a node."""

    source: str
    provenance: Provenance
    language: str = ""
    """Empty: the target's."""
    parents: tuple[str, ...] = ()
    """Ids of the nodes it was made of; empty: the first parent of the request."""
    identity: str = ""
    """The id of its node, where that is known already."""


def draft_identity(target: SearchTarget, draft: Draft) -> str:
    """The id that a draft's node has."""
    return draft.identity or node_identity(target.id, draft.language or target.language, draft.source)


def node_from_draft(request: ProposalRequest, draft: Draft) -> Node:
    """The node of a draft that answers a request."""
    return Node(
        id=draft_identity(request.target, draft),
        source=draft.source,
        language=draft.language or request.target.language,
        parents=draft.parents or tuple(p.id for p in request.parents[:1]),
        provenance=draft.provenance,
        arm=request.arm,
        batch=request.batch,
        request=request.id,
    )


def new_nodes(
    request: ProposalRequest, drafts: Iterable[Draft], limit: int | None = None
) -> tuple[Node, ...]:
    """Nodes of drafts that are not known yet, each once, in order; at most `limit`, by default `n`."""
    most = request.n if limit is None else limit
    ids = set(request.known) | {p.id for p in request.parents}
    nodes: list[Node] = []
    for draft in drafts:
        if len(nodes) >= most:
            break
        node = node_from_draft(request, draft)
        if node.id not in ids:
            ids.add(node.id)
            nodes.append(node)
    return tuple(nodes)


def draw_seed(request: ProposalRequest) -> str:
    """The seed of draws for a request: other requests draw otherwise."""
    return digest(request.seed, request.id)


def defines_entry(source: str, entry: str, language: str) -> bool:
    """Whether a source can hold the entry: Python that binds the name at its top level, or CUDA naming it."""
    try:
        return entry in defined_names(source)
    except SyntaxError:
        return language == "cuda" and entry in source


def defined_names(source: str) -> set[str]:
    """Functions, classes and variables of a module's top level. Raises `SyntaxError` for what is no Python."""
    body = python_parser.parse_module(source).body
    targets = [t for n in body if isinstance(n, ast.Assign) for t in n.targets]
    functions = {n.name for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    return functions | {t.id for t in targets if isinstance(t, ast.Name)}
