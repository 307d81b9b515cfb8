"""Which processors a contest on a host runs on: as many for either contestant as it may have threads."""

from __future__ import annotations

import os
import random


def reserve_processors(threads: int = 1) -> tuple[int, ...]:
    """Choose so many processors for cells, by the kernel's numbers, and keep this process off them.

    All cells of a contest are bound to the same ones, and take turns on them: with more threads than that
    nobody computes faster. Where there are no others, this process shares them.
    """
    allowed = sorted(os.sched_getaffinity(0))
    chosen = tuple(sorted(random.SystemRandom().sample(allowed, min(threads, len(allowed)))))
    if rest := set(allowed) - set(chosen):
        os.sched_setaffinity(0, rest)
    return chosen
