"""Sources of which no config runs: each failure tells of the source's other configs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from forecast_autotune.records import Measurement, Outcome
from forecast_autotune.surrogates.protocol import Forecasts

_OF_THE_SOURCE = (Outcome.COMPILE_ERROR, Outcome.RUNTIME_ERROR, Outcome.INCORRECT)
"""Failures that a source's other configs may share. Resources and time depend on the config, and are forecast."""
_FAILED, _TRIED = 0.2, 0.8
"""What counts as seen before anything was: failures, and tries. From the sixth failure in a row a source is refused."""


def expect_failing_sources(forecasts: Forecasts, measured: Sequence[Measurement]) -> Forecasts:
    """The forecasts, with P(failure) of another source's untried configs no lower than what was seen of it says.

    The kernel's own configs are left alone: where all of them fail, there is nothing else to try.
    """
    tried = [m for m in measured if not m.candidate.is_base_variant and m.outcome.is_label]
    failed = Counter(m.candidate.variant for m in tried if m.outcome in _OF_THE_SOURCE)
    if not failed:
        return forecasts
    ran = Counter(m.candidate.variant for m in tried if m.ok)
    odds = {name: (n + _FAILED) / (n + ran[name] + _TRIED) for name, n in failed.items()}
    known = {m.candidate for m in tried}
    least = [0.0 if c in known else odds.get(c.variant, 0.0) for c in forecasts.candidates]
    return replace(forecasts, p_fail=np.maximum(forecasts.p_fail, least))
