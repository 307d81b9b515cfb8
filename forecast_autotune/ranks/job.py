"""One rank's place in a job: its name, its store, its clock, and how long it waits for others."""

from __future__ import annotations

import time
import uuid
import warnings
from dataclasses import dataclass, field
from typing import Protocol

from forecast_autotune.ranks.job_store import JobStore


class RankWarning(UserWarning):
    """Something about sharing with other ranks went wrong; this rank goes on without it."""


class Clock(Protocol):
    """Time as one process has it; clocks of different machines are never compared."""

    def now(self) -> float:
        """Seconds since some moment."""
        ...

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        ...


class HostClock:
    """The monotonic clock of this host."""

    def now(self) -> float:
        """Seconds since some moment."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        time.sleep(seconds)


@dataclass(frozen=True)
class JobLimits:
    """How long ranks wait for each other, in seconds of their own clocks."""

    wait_s: float = 60.0
    """A rank that has nothing to do and hears nothing new for so long goes on by itself."""
    lease_s: float = 10.0
    """A rank that gave no sign of life for so long has lost what it had undertaken to measure."""
    beat_s: float = 1.0
    """A living rank gives a sign of life so often."""
    poll_s: float = 0.01
    """How often a rank looks for news while candidates are measured."""
    idle_poll_s: float = 0.05
    """How often at least a rank looks for news while it only waits."""


@dataclass
class Job:
    """What one process needs to share decisions with the other ranks of its job."""

    store: JobStore
    rank: int
    size: int
    """How many ranks the job has."""
    limits: JobLimits = field(default_factory=JobLimits)
    clock: Clock = field(default_factory=HostClock)
    name: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    """No other process of the job, not even an earlier one of the same rank, has this name."""
    left: str = ""
    """Why this process shares no longer; empty while it does."""
    _complained: bool = False

    @property
    def beat_key(self) -> str:
        """Where this process gives signs of life."""
        return beat_key(self.name)

    def leave(self, why: str) -> None:
        """Stop sharing for the rest of this process, with one warning."""
        if not self.left:
            self.left = why
            warnings.warn(f"rank {self.rank} tunes by itself from here on: {why}", RankWarning, stacklevel=3)

    def complain(self, rank: object, what: str) -> None:
        """Warn, once for all, of what another rank has posted."""
        if not self._complained:
            self._complained = True
            warnings.warn(
                f"rank {self.rank} ignores an entry of rank {rank}: {what}"[:400], RankWarning, stacklevel=3
            )


def beat_key(name: str) -> str:
    """Where the process of this name gives signs of life."""
    return f"beat/{name}"
