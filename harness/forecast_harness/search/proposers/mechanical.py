"""Proposals without a language model: known rewrites of a parent's text, alone and in pairs.

All of what can be made of a parent is worked out once and kept; a request draws from it by its seed, those of
its style first. The styles are `single`, `combined`, `constants` and `crossover` (the constants of another
parent). No style ends before all have: a parent is exhausted when everything that can be made of it is known.
"""

from __future__ import annotations

import random
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from forecast_autotune.errors import RecordError
from forecast_autotune.variants.records import Origin, Provenance
from forecast_harness.rewrites.torch.code import Code
from forecast_harness.rewrites.torch.constants import crossed
from forecast_harness.rewrites.torch.registry import Made, rewrites_of
from forecast_harness.search.events import Proposed, Request
from forecast_harness.search.proposers import cuda_rewrites, triton_rewrites
from forecast_harness.search.proposers.facts import facts_of
from forecast_harness.search.proposers.making import Draft, identity_of, new_nodes, salt
from forecast_harness.search.records import Kind, Node, Target

_KEPT = 64
"""Parents whose rewrites are kept in memory."""
_FADING = 0.05
"""Where rewrites come in the order of their promise, each counts this much less than the one before."""
STYLES = ("single", "combined", "constants", "crossover")


class Mechanical:
    """See the module. Thread-safe; the same request gives the same answer in any process."""

    name = "mechanical"
    styles: Sequence[str] = STYLES

    def __init__(self, target: Target) -> None:
        self._target = target
        self._facts = facts_of(target)
        self._mutex = threading.Lock()
        self._kept: OrderedDict[str, tuple[tuple[str, Made], ...]] = OrderedDict()

    def propose(self, request: Request) -> Proposed:
        """See `Proposer`. A parent that no rewrite can read is told in `problem`, and is exhausted."""
        parent = request.parents[0]
        style = request.arm.rpartition("/")[2]
        try:
            pool = [(parent.id, made, identity) for identity, made in self._pool(parent)]
            pool += [
                (other.id, made, "") for other in request.parents[1:] for made in _crossed(parent, other)
            ]
        except RecordError as error:
            return Proposed(request.id, (), problem=f"{parent.id}: {error}", exhausted=True)
        known = set(request.known)
        left = [one for one in pool if one[2] not in known]
        chance = random.Random(salt(request))
        weights = [1.0 / (1.0 + _FADING * place) for place in range(len(left))]
        draws = [chance.random() ** (1.0 / weight) for weight in weights]
        order = sorted(range(len(left)), key=lambda i: (_kind(left[i][1]) != style, -draws[i], i))
        drafts = [_draft(request, *left[i][:2]) for i in order]
        found = new_nodes(request, drafts, request.n + 1)
        nodes = found[: request.n]
        problem = "" if nodes else f"every rewrite of {parent.id} is known already"
        return Proposed(request.id, nodes, problem=problem, exhausted=len(found) <= request.n)

    def close(self) -> None:
        """Forget what is kept."""
        with self._mutex:
            self._kept.clear()

    def _pool(self, parent: Node) -> tuple[tuple[str, Made], ...]:
        """Everything that rewrites make of a parent, with the ids that it would have."""
        with self._mutex:
            if parent.id in self._kept:
                self._kept.move_to_end(parent.id)
                return self._kept[parent.id]
        provenance = Provenance(Origin.MECHANICAL)
        found = tuple(
            (identity_of(self._target, Draft(made.text, provenance, parent.language)), made)
            for made in self._made(parent)
        )
        with self._mutex:
            self._kept[parent.id] = found
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return found

    def _made(self, parent: Node) -> list[Made]:
        if parent.language == "cuda":
            return cuda_rewrites.rewrites_of(parent.source)
        if self._target.kind is Kind.KERNEL:
            return triton_rewrites.of_kernel(parent.source, self._target.entry, self._target.payload)
        if parent.language == "triton":
            return triton_rewrites.of_module(parent.source, self._target.entry)
        return rewrites_of(parent.source, self._target.entry, self._facts)


def _crossed(parent: Node, other: Node) -> Iterator[Made]:
    """A parent with constants of another one of its language."""
    if parent.language != other.language:
        return
    if parent.language == "cuda":
        yield from cuda_rewrites.crossed(parent.source, other.source)
        return
    for edit in crossed(Code.parse(parent.source, ""), Code.parse(other.source, "")):
        yield Made(("crossed",), edit.text, edit.note)


def _kind(made: Made) -> str:
    """The style that something made belongs to."""
    kinds: dict[tuple[str, ...], str] = {("crossed",): "crossover", ("constants",): "constants"}
    return kinds.get(made.names, "single" if len(made.names) == 1 else "combined")


def _draft(request: Request, source_parent: str, made: Made) -> Draft:
    first = request.parents[0]
    parents = (first.id,) if source_parent == first.id else (first.id, source_parent)
    provenance = Provenance(
        Origin.MECHANICAL,
        author="+".join(made.names),
        parent=first.provenance.note[:80],
        note=made.note[:300],
    )
    return Draft(made.text, provenance, first.language, parents)
