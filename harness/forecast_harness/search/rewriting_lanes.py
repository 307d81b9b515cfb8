"""Rewrites of a kernel worked out in processes of their own.

Reading and rewriting one source takes a second of Python. The process of a search has none to spare: while others
compile, it forecasts, chooses, and hands on what comes. A lane forgets everything between two sources.
"""

from __future__ import annotations

from typing import Any

from forecast_autotune.errors import ForecastAutotuneError, RecordError
from forecast_harness.authors.torch.registry import RewrittenSource
from forecast_harness.authors.triton_rewrites import kernel_rewrites
from forecast_harness.records import SearchTarget
from forecast_harness.sandbox.api import JobStatus, ResourceLimits, SandboxError, SandboxJob
from forecast_harness.sandbox.judge_process import JobContext
from forecast_harness.sandbox.lane_pools import CpuLanes
from forecast_harness.targets.novelty import node_identity

_LANES = 2
"""A batch expands as many parents."""
_LIMITS = ResourceLimits(wall_s=120.0, trusted_s=120.0)


class RewritingFailed(ForecastAutotuneError):
    """There are no rewrites of a source, and trying again elsewhere would not help."""


class RewritingLanes:
    """Rewrites of sources of one kernel target. Any thread may ask; the first lane begins to open at once."""

    def __init__(self, target: SearchTarget) -> None:
        self._target, self._closed = target, False
        self._lanes = CpuLanes(None, _LIMITS, _LANES, warm=(__name__,))
        self._lanes.open_ahead()

    def rewrites(self, source: str) -> tuple[tuple[str, RewrittenSource], ...] | None:
        """The `kernel_rewrites` of a source, each with the id that its node would have.

        None where no lane can be opened. Raises `RecordError` for what is no kernel, and `RewritingFailed` for a
        source that takes too long, and after `close`.
        """
        payload = {
            "target": self._target.id,
            "source": source,
            "entry": self._target.entry,
            "payload": {
                name: self._target.payload[name]
                for name in ("subjects", "source_sha256")
                if name in self._target.payload
            },
        }
        try:
            (result,) = self._lanes.run([SandboxJob(f"{__name__}:rewrite", payload)])
        except SandboxError as error:
            if self._closed:
                raise RewritingFailed("the search ends") from error
            return None
        if result.status is not JobStatus.OK:
            raise RewritingFailed(f"no rewrites could be worked out: {result.detail[-500:]}")
        if "refused" in result.value:
            raise RecordError(result.value["refused"])
        return tuple(
            (identity, RewrittenSource(tuple(names), text, note))
            for identity, names, text, note in result.value["made"]
        )

    def close(self) -> None:
        """End the lanes."""
        self._closed = True
        self._lanes.close()


def rewrite(work: JobContext) -> dict[str, Any]:
    """The job: `kernel_rewrites` of the payload's `source`, under `made`; `refused` says why there are none."""
    payload = work.payload
    try:
        rewrites = kernel_rewrites(payload["source"], payload["entry"], payload["payload"])
    except RecordError as error:
        return {"refused": str(error)}
    ids = (node_identity(payload["target"], "triton", r.text) for r in rewrites)
    return {"made": [[i, list(r.names), r.text, r.note] for i, r in zip(ids, rewrites, strict=True)]}
