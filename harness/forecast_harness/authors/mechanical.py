"""Proposals without a language model: known rewrites of a parent's text, alone and in pairs.

All of what can be made of a parent is worked out once and kept; a request draws from it by its seed. A parent is
exhausted when everything that can be made of it is known.
"""

from __future__ import annotations

import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeAlias

from forecast_autotune.errors import RecordError
from forecast_autotune.variants.records import Origin, Provenance
from forecast_harness.authors import cuda_rewrites, triton_rewrites
from forecast_harness.authors.author import Draft, draft_identity, draw_seed, new_nodes
from forecast_harness.authors.torch.registry import RewrittenSource, rewrites_of
from forecast_harness.records import Node, ProposalRequest, Proposed, SearchTarget, TargetKind

_MAX_CACHED_PARENTS = 64
"""Parents whose rewrites are kept in memory."""
_RANK_DISCOUNT = 0.05
"""Each rewrite counts so much less than the one before it, in the order of their promise."""


Rewriter: TypeAlias = Callable[[str], tuple[tuple[str, RewrittenSource], ...] | None]
"""Gives everything that rewrites make of a kernel's source, with the ids that the nodes would have.

None where that cannot be worked out there. Raises `RecordError` for what is no kernel."""


class RewriteAuthor:
    """Proposes known rewrites of a parent. Thread-safe; the same request gives the same answer in any process."""

    name = "mechanical"
    styles: Sequence[str] = ("rewrite",)

    def __init__(self, target: SearchTarget, *, rewriter: Rewriter | None = None) -> None:
        """`rewriter` works out the rewrites of a kernel's sources elsewhere; see `Rewriter`."""
        self._target, self._rewriter = target, rewriter
        self._mutex = threading.Lock()
        self._cache: OrderedDict[str, Future[tuple[tuple[str, RewrittenSource], ...]]] = OrderedDict()

    def propose(self, request: ProposalRequest) -> Proposed:
        """See `Author`. A parent that no rewrite can read is told in `problem`, and is exhausted."""
        parent = request.parents[0]
        try:
            pool = self._all_rewrites(parent)
        except RecordError as error:
            return Proposed(request.id, (), problem=f"{parent.id}: {error}", exhausted=True)
        ids = set(request.known)
        candidates = [(identity, rewrite) for identity, rewrite in pool if identity not in ids]
        chance = random.Random(draw_seed(request))
        weights = [1.0 / (1.0 + _RANK_DISCOUNT * place) for place in range(len(candidates))]
        draws = [chance.random() ** (1.0 / weight) for weight in weights]
        order = sorted(range(len(candidates)), key=lambda i: -draws[i])
        drafts = [_draft_of(request, *candidates[i]) for i in order]
        unknown = new_nodes(request, drafts, request.n + 1)
        nodes = unknown[: request.n]
        problem = "" if nodes else f"every rewrite of {parent.id} is known already"
        return Proposed(request.id, nodes, problem=problem, exhausted=len(unknown) <= request.n)

    def close(self) -> None:
        """Forget what is kept."""
        with self._mutex:
            self._cache.clear()

    def _all_rewrites(self, parent: Node) -> tuple[tuple[str, RewrittenSource], ...]:
        """Everything that rewrites make of a parent, with the ids that it would have."""
        with self._mutex:
            if (future := self._cache.get(parent.id)) is not None:
                self._cache.move_to_end(parent.id)
            else:  # requests for several nodes come at once: one of them does the work
                promise = self._cache[parent.id] = Future[tuple[tuple[str, RewrittenSource], ...]]()
                while len(self._cache) > _MAX_CACHED_PARENTS:
                    self._cache.popitem(last=False)
        if future is not None:
            return future.result()
        try:
            rewrites = self._with_identities(parent)
        except BaseException as error:
            promise.set_exception(error)
            raise
        promise.set_result(rewrites)
        return rewrites

    def _with_identities(self, parent: Node) -> tuple[tuple[str, RewrittenSource], ...]:
        if self._rewriter is not None and parent.language == "triton":
            rewrites = self._rewriter(parent.source)
            if rewrites is not None:
                return rewrites
        provenance = Provenance(Origin.REWRITE)
        return tuple(
            (draft_identity(self._target, Draft(rewrite.text, provenance, parent.language)), rewrite)
            for rewrite in self._rewrite(parent)
        )

    def _rewrite(self, parent: Node) -> list[RewrittenSource]:
        if parent.language == "cuda":
            return cuda_rewrites.rewrites_of(parent.source)
        if self._target.kind is TargetKind.KERNEL:
            return triton_rewrites.kernel_rewrites(parent.source, self._target.entry, self._target.payload)
        if parent.language == "triton":
            return triton_rewrites.module_rewrites(parent.source, self._target.entry)
        return rewrites_of(parent.source, self._target.entry)


def _draft_of(request: ProposalRequest, identity: str, rewrite: RewrittenSource) -> Draft:
    parent = request.parents[0]
    provenance = Provenance(
        Origin.REWRITE,
        author="+".join(rewrite.names),
        parent=parent.provenance.note[:80],
        note=rewrite.note[:300],
    )
    return Draft(rewrite.text, provenance, parent.language, (parent.id,), identity)
