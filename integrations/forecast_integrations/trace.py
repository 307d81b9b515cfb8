"""TTIR of a live call's candidates: remembered, and traced in children when there are many."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from forecast_autotune.features.trace import trace_many
from forecast_autotune.features.ttir import assignment_key
from forecast_autotune.records import Candidate
from forecast_integrations.call import Call
from forecast_integrations.children import answers
from forecast_integrations.triton_compile import can_fork

Trace = Callable[[Sequence[Candidate]], Mapping[str, str]]

_WORTH = 6
"""Fewer assignments than this are traced here: a fork costs about as much as a trace."""
_TIMEOUT_S = 20.0


def tracer(call: Call, known: dict[str, str], workers: int) -> Trace:
    """A function from candidates to TTIR by assignment key.

    Texts are remembered in `known`: another shape of the same kind has the same ones. An assignment that
    cannot be traced is left out.
    """
    target = _target()

    def some(candidates: Sequence[Candidate]) -> dict[str, str]:
        kwargs = {k: v for k, v in call.kwargs.items() if k not in ("grid", "warmup")}
        values = [dict(call.configs[c].kwargs) for c in candidates]
        found = trace_many(call.tuner.fn, call.args, kwargs, values, target=target)
        return {key: text for key, text in found if isinstance(text, str)}

    def trace(wanted: Sequence[Candidate]) -> dict[str, str]:
        keyed = {_key(c): c for c in wanted if c.variant not in call.functions}
        missing = [c for key, c in keyed.items() if key not in known]
        shares = min(workers, len(missing) // 2)
        # A child must not ask the driver, so the target has to be known.
        if len(missing) >= _WORTH and shares > 1 and target is not None and can_fork():
            known.update(some(missing[:1]))  # warms what every child would otherwise warm for itself
            parts = [missing[1 + i :: shares] for i in range(shares)]
            for texts in answers([partial(some, part) for part in parts if part], _TIMEOUT_S):
                known.update(texts)
            missing = []
        known.update(some(missing))
        return {key: known[key] for key in keyed if key in known}

    return trace


def _target() -> Any:
    from triton.runtime.driver import driver

    try:
        return driver.active.get_current_target()
    except RuntimeError:  # no driver here: tracing takes its own default
        return None


def _key(candidate: Candidate) -> str:
    return assignment_key(dict(candidate.config.kwargs))
