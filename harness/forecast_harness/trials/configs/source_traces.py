"""Traces of sources of one kernel target, made in sandboxes and kept: who forecasts nodes and who chooses their
configs ask for the same ones. A source that nobody has verified is imported in a cell only. Tracing needs no device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from forecast_autotune.features.traced_texts import decode_facts
from forecast_autotune.features.ttir.facts import TtirFacts
from forecast_autotune.records import Argument, Config, Device, digest
from forecast_harness.records import SearchTarget
from forecast_harness.sandbox.api import JobStatus, ResourceLimits, SandboxJob
from forecast_harness.sandbox.cpu_lanes import CpuLanes
from forecast_harness.sandbox.jobs import JobResult
from forecast_harness.targets.search_target import subjects_of

_MOST_KEPT = 128
"""Sources whose traces are kept whole, the latest; of others it is what `keep` has named."""
TRACE_LIMITS = ResourceLimits(wall_s=120.0, trusted_s=120.0)
_TRACE_JOB = "forecast_harness.trials.judging.kernels.race:trace"
_FEWEST_TOGETHER = 16
"""Configs of one source that one sandbox traces at least: to be ready for the first takes as long as some ten more."""
RunJobs = Callable[[Sequence[SandboxJob]], Sequence[JobResult]]
"""Does jobs in sandboxes, under `TRACE_LIMITS`."""


@dataclass(frozen=True)
class CallTrace:
    """What one source is at one call, by config; None where a config has no IR, or no grid is known.

    Nothing is known of a call at which nobody has traced it.
    """

    arguments: tuple[Argument, ...]
    texts: Mapping[Config, str | None]
    grids: Mapping[Config, tuple[int, ...] | None]
    facts: Mapping[Config, TtirFacts | None]
    """What was read of a config's text at its grid; None for a text that cannot be read, or none."""

    def only(self, configs: Collection[Config]) -> CallTrace:
        """Without all other configs."""
        known = [c for c in configs if c in self.texts]
        return CallTrace(
            self.arguments,
            {c: self.texts[c] for c in known},
            {c: self.grids[c] for c in known},
            {c: self.facts[c] for c in known},
        )

    def joined(self, more: CallTrace) -> CallTrace:
        """With other configs, too."""
        return CallTrace(
            self.arguments or more.arguments,
            {**self.texts, **more.texts},
            {**self.grids, **more.grids},
            {**self.facts, **more.facts},
        )


_UNTRACED = CallTrace((), {}, {}, {})


class SourceTraces:
    """A trace per call of the target, by source; none for a source that cannot be traced. Any thread may ask."""

    _shared: ClassVar[dict[str, tuple[SourceTraces, int]]] = {}
    _shared_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, target: SearchTarget, folder: Path | None = None) -> None:
        """`folder` is for scratch files; sandboxes start when they are first needed."""
        self._subjects = [s.to_json() for s in subjects_of(target)]
        device = Device.from_json(target.payload.get("device", {"name": "unknown"}))
        self._arch = int(device.arch or 90)
        self._lanes = CpuLanes(folder, TRACE_LIMITS)
        self._run: RunJobs = self._lanes.run
        self._idle: Callable[[], int] = lambda: 0
        self._lock = threading.Lock()
        self._found: dict[str, tuple[CallTrace, ...]] = {}
        self._tracing: dict[str, threading.Event] = {}
        """Sources under way in some thread: others wait for it."""
        self._kept: Mapping[str, Collection[Config]] = {}

    @classmethod
    def shared(cls, target: SearchTarget, folder: Path | None = None) -> SourceTraces:
        """Those of all in this process that ask for the same target; `close` ends them with the last one's."""
        key = _target_key(target)
        with cls._shared_lock:
            made, users = cls._shared.get(key) or (cls(target, folder), 0)
            cls._shared[key] = made, users + 1
        return made

    def trace_in(self, run: RunJobs, idle: Callable[[], int] = lambda: 0) -> None:
        """Have sandboxes trace from here on that others have opened; `idle`: how many have nothing to do."""
        self._run, self._idle = run, idle

    def prepare(self, asked: Mapping[str, Sequence[Config]], calls: Sequence[int] = ()) -> None:
        """Trace what is not known yet of these, together: at these calls, or at all.

        Raises `ForecastAutotuneError` without a sandbox.
        """
        with self._lock:
            missing = {
                s: m for s, c in asked.items() if s not in self._tracing and (m := self._missing(s, c, calls))
            }
            under_way = [self._tracing[s] for s in asked if s in self._tracing]
            ours = {s: threading.Event() for s in missing}
            self._tracing |= ours
        try:
            each = self._idle() // max(1, len(missing))
            parts = [(s, part) for s, c in missing.items() for part in _parts(c, each)]
            results = self._run([self._job(source, configs, calls) for source, configs in parts])
            for (source, configs), result in zip(parts, results, strict=True):
                if result.status is not JobStatus.INFRA_ERROR:  # which says nothing about the source
                    self._add(source, self._read(result, configs, calls))
        finally:
            with self._lock:
                for source, done in ours.items():
                    del self._tracing[source]
                    done.set()
        for done in under_way:
            done.wait()

    def _missing(self, source: str, configs: Sequence[Config], calls: Sequence[int]) -> Sequence[Config]:
        """Those that nobody has traced at one of these calls; none of a source that cannot be traced."""
        if (found := self._found.get(source)) is None:
            return configs
        traced = [found[n].texts for n in self._at(calls)] if found else []
        return [c for c in configs if not all(c in texts for texts in traced)]

    def _at(self, calls: Sequence[int]) -> Sequence[int]:
        return calls or range(len(self._subjects))

    def get(self, source: str, configs: Iterable[Config], calls: Sequence[int] = ()) -> tuple[CallTrace, ...]:
        """A trace per call, which at these calls (or at all) has these configs, and perhaps more.

        Raises `ForecastAutotuneError` without a sandbox.
        """
        wanted = list(configs)
        self.prepare({source: wanted}, calls)
        with self._lock:
            found = self._found.get(source)
            missing = self._missing(source, wanted, calls)
        if missing:  # others have traced less of it, or have failed
            (result,) = self._run([self._job(source, missing, calls)])
            more = self._read(result, missing, calls)
            failed = result.status is JobStatus.INFRA_ERROR or found
            return () if not more and failed else self._add(source, more)
        self._add(source, ())  # the latest
        return found or ()

    def known(self, source: str) -> tuple[CallTrace, ...]:
        """A trace per call, of configs that were traced before: nothing is traced for it, and nobody is waited for."""
        with self._lock:
            return self._found.get(source, ())

    def keep(self, configs: Mapping[str, Collection[Config]]) -> None:
        """Never forget these configs of these sources; no longer those that were named before."""
        with self._lock:
            self._kept = {source: tuple(those) for source, those in configs.items()}

    def close(self) -> None:
        """End the sandboxes, where nobody else shares them."""
        with self._shared_lock:
            for key, (made, users) in list(self._shared.items()):
                if made is self:
                    if users > 1:
                        self._shared[key] = made, users - 1
                        return
                    del self._shared[key]
        self._lanes.close()

    def _add(self, source: str, more: tuple[CallTrace, ...]) -> tuple[CallTrace, ...]:
        """What is known with what was traced now; the source is the latest one from here on."""
        with self._lock:
            before = self._found.pop(source, ())
            joined = tuple(a.joined(b) for a, b in zip(before, more, strict=True)) if before and more else ()
            self._found[source] = found = joined or more or before
            for other in list(self._found)[:-_MOST_KEPT]:
                if (kept := self._kept.get(other)) is None:
                    del self._found[other]
                else:
                    self._found[other] = tuple(trace.only(kept) for trace in self._found[other])
        return found

    def _job(self, source: str, configs: Sequence[Config], calls: Sequence[int]) -> SandboxJob:
        payload = {
            "subjects": [self._subjects[n] for n in self._at(calls)],
            "source": source,
            "configs": [c.to_json() for c in configs],
            "arch": self._arch,
        }
        return SandboxJob(_TRACE_JOB, payload, {"variant.py": source})

    def _read(
        self, result: JobResult, configs: Sequence[Config], calls: Sequence[int]
    ) -> tuple[CallTrace, ...]:
        """Of every call, those at `calls` as they were traced; empty where they could not be."""
        if result.status is not JobStatus.OK:
            return ()
        with suppress(ValueError, TypeError, KeyError, IndexError, OverflowError):
            traced = dict(
                zip(self._at(calls), (_read_call(said, configs) for said in result.value), strict=True)
            )
            return tuple(traced.get(n, _UNTRACED) for n in range(len(self._subjects)))
        return ()


def _parts(configs: Sequence[Config], most: int) -> list[Sequence[Config]]:
    """As many as `most`, about equal, unless they would be too small; one at least."""
    count = max(1, min(most, len(configs) // _FEWEST_TOGETHER))
    return [configs[n::count] for n in range(count)]


def _read_call(said: Mapping[str, Any], configs: Sequence[Config]) -> CallTrace:
    facts = {int(number): decode_facts(encoded) for number, encoded in said["facts"].items()}
    which = dict(zip(configs, said["which"], strict=True))
    grids = {
        c: None if g is None else tuple(map(int, g)) for c, g in zip(configs, said["grids"], strict=True)
    }
    return CallTrace(
        tuple(Argument.from_json(a) for a in said["arguments"]),
        {c: None if n is None else said["ttir"][n] for c, n in which.items()},
        grids,
        {c: None if n is None else facts[n][grids[c]] for c, n in which.items()},
    )


def _target_key(target: SearchTarget) -> str:
    return digest(target.payload["subjects"], target.payload.get("device"))
