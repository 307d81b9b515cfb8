"""TTIR of a live call's candidates: remembered, and traced in children when there are many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from forecast_autotune.features.trace import trace_many
from forecast_autotune.features.ttir.extraction import assignment_of
from forecast_autotune.features.ttir.parser import FeatureError
from forecast_autotune.records import Candidate
from forecast_integrations.triton.call import KernelCall
from forecast_integrations.triton.compile.forked_children import run_in_children
from forecast_integrations.triton.compile.pool import can_fork, without_device

TraceFunction = Callable[[Sequence[Candidate]], Mapping[str, str]]

_MIN_FOR_CHILDREN = 6
"""Fewer assignments than this are traced here: a fork costs about as much as a trace."""
_TIMEOUT_S = 20.0
"""Children that take longer are given up, and their share is traced here."""


def make_tracer(call: KernelCall, known: dict[str, str], workers: int) -> TraceFunction:
    """A function from candidates to TTIR by assignment key.

    Texts are remembered in `known`: another shape of the same kind has the same ones. An assignment that
    cannot be traced is left out.
    """

    def some(candidates: Sequence[Candidate]) -> dict[str, str | None]:
        kwargs = {k: v for k, v in call.kwargs.items() if k not in ("grid", "warmup")}
        own = [c for c in candidates if c.variant not in call.functions]
        values = [dict(call.configs[c].kwargs) for c in own]
        texts = [text for _, text in trace_many(call.tuner.fn, call.args, kwargs, values)]
        others = [c for c in candidates if c.variant in call.functions]
        texts += [_trace_variant(call, c) for c in others]
        return {
            assignment_of(c): text if isinstance(text, str) else None
            for c, text in zip([*own, *others], texts, strict=True)
        }

    def trace(wanted: Sequence[Candidate]) -> dict[str, str]:
        keyed = {assignment_of(c): c for c in wanted}
        for key, c in keyed.items():
            if call.depends_on_call(c):
                known.pop(key, None)
        missing = {key: c for key, c in keyed.items() if key not in known}
        if len(missing) >= _MIN_FOR_CHILDREN and workers > 1 and can_fork():
            if not known:
                # The first one here warms what every child would otherwise warm for itself.
                key, first = next(iter(missing.items()))
                del missing[key]
                _store_texts(known, some([first]))
            for texts in _trace_in_children(some, list(missing.values()), workers):
                _store_texts(known, texts)
                missing = {k: c for k, c in missing.items() if k not in texts}
        # What no child could answer for is traced here.
        _store_texts(known, some(list(missing.values())))
        return {key: known[key] for key in keyed if key in known}

    return trace


def _trace_variant(call: KernelCall, candidate: Candidate) -> str | FeatureError:
    """The text of another source's candidate, or why there is none."""
    try:
        function = call.functions[candidate.variant]
        kernel, args, kwargs, meta = function.trace_inputs(call.args, call.kwargs, call.configs[candidate])
    except Exception as error:
        return FeatureError(f"{candidate} cannot be bound: {error!r}")
    ((_, text),) = trace_many(kernel, args, kwargs, [meta])
    return text


def _store_texts(known: dict[str, str], texts: Mapping[str, str | None]) -> None:
    known.update((key, text) for key, text in texts.items() if text is not None)


def _trace_in_children(
    some: Callable[[Sequence[Candidate]], dict[str, str | None]],
    candidates: Sequence[Candidate],
    workers: int,
) -> Iterator[dict[str, str | None]]:
    try:
        apart = without_device(some)
    except RuntimeError:  # no driver here: a child could not know the target
        return
    shares = min(workers, -(-len(candidates) // 2))
    yield from run_in_children([partial(apart, candidates[i::shares]) for i in range(shares)], _TIMEOUT_S)
