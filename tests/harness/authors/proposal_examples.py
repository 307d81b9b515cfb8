"""Targets, parents and requests for tests of proposers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from forecast_autotune.variants.records import Origin, Provenance
from forecast_harness.records import Node, NodeResult, ProposalRequest, SearchTarget, TargetKind
from forecast_harness.targets.novelty import node_identity
from forecast_harness.targets.search_target import open_target

NATIVE_SOFTMAX = "import torch\n\n\ndef run(x):\n    return torch.softmax(x, {})\n"
"""A solution of softmax, by its axis."""


def pack_target(name: str = "softmax") -> tuple[SearchTarget, Node]:
    """A shipped pack on the CPU, and its first seed."""
    target, seeds = open_target(name, device="cpu")
    return target, seeds[0]


def plain_target(language: str = "torch") -> SearchTarget:
    """A target about which nothing is known but its entry."""
    return SearchTarget(TargetKind.PACK, "made_up", "t" * 24, language, "run", "Compute it.", {})


def node(
    target: SearchTarget, source: str, *, parents: Sequence[Node] = (), language: str = "", note: str = ""
) -> Node:
    """A node of a source."""
    language = language or target.language
    return Node(
        node_identity(target.id, language, source),
        source,
        language,
        tuple(p.id for p in parents),
        Provenance(Origin.HAND, note=note),
    )


def request(
    target: SearchTarget,
    *parents: Node,
    style: str = "single",
    n: int = 4,
    seed: int = 1,
    batch: int = 1,
    known: Sequence[Node | str] = (),
    failures: Sequence[Node] = (),
    judged: Mapping[str, NodeResult] | None = None,
    score: float = 0.0,
) -> ProposalRequest:
    """A request; those with another seed have another id."""
    return ProposalRequest(
        id=f"{batch:04d}-{style}-{seed}",
        batch=batch,
        arm=f"it/{style}",
        target=target,
        parents=parents,
        judged=judged or {},
        score=score,
        n=n,
        seed=seed,
        failures=tuple(failures),
        known=tuple(k if isinstance(k, str) else k.id for k in known),
    )


def code_block(source: str, before: str = "One native operation.") -> str:
    return f"{before}\n\n```python\n{source}```\n"
