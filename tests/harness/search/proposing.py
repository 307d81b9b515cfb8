"""Targets, parents and requests for tests of proposers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forecast_autotune.variants.records import Origin, Provenance
from forecast_harness.search.events import Request
from forecast_harness.search.novelty import identity
from forecast_harness.search.records import Judged, Kind, Node, Target
from forecast_harness.search.targets import open_target

NATIVE = "import torch\n\n\ndef run(x):\n    return torch.softmax(x, {})\n"
"""A solution of softmax, by its axis."""


def pack(name: str = "softmax") -> tuple[Target, Node]:
    """A shipped pack on the CPU, and its first seed."""
    target, seeds = open_target(name, device="cpu")
    return target, seeds[0]


def plain_target(language: str = "torch", entry: str = "run", **payload: Any) -> Target:
    """A target about which nothing is known but its entry."""
    return Target(Kind.PACK, "made_up", "t" * 24, language, entry, "Compute it.", payload)


def node(
    target: Target, source: str, *, parents: Sequence[Node] = (), language: str = "", note: str = ""
) -> Node:
    """A node of a source."""
    language = language or target.language
    return Node(
        identity(target.id, language, source),
        source,
        language,
        tuple(p.id for p in parents),
        Provenance(Origin.HAND, note=note),
    )


def request(
    target: Target,
    *parents: Node,
    style: str = "single",
    n: int = 4,
    seed: int = 1,
    batch: int = 1,
    known: Sequence[Node | str] = (),
    failures: Sequence[Node] = (),
    judged: Mapping[str, Judged] | None = None,
    score: float = 0.0,
) -> Request:
    """A request; those with another seed have another id."""
    return Request(
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


def block(source: str, before: str = "One native operation.") -> str:
    return f"{before}\n\n```python\n{source}```\n"


def edit(*pairs: tuple[str, str]) -> str:
    return "A change.\n" + "\n".join(
        f"<<<<<<< SEARCH\n{old}\n=======\n{new}{'' if not new else chr(10)}>>>>>>> REPLACE"
        for old, new in pairs
    )
