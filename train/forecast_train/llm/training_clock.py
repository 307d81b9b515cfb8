"""A training run's clock: how fast it is, when its time is over, and a line of progress now and then."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

from forecast_train.llm.run_folder import TrainingError

PROGRESS_INTERVAL_S = 5.0
"""Seconds between lines of progress, at the least."""
_WARM_UP_STEPS = 2
"""Steps that do not count towards the pace: memory is allocated and kernels are chosen."""


class StopOnNonFinite(transformers.TrainerCallback):
    """Ends a run at the first loss or gradient that is no number; `remedy` is what the user can do."""

    def __init__(self, remedy: str) -> None:
        self._remedy = remedy

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Look at what is logged. Raises `TrainingError`."""
        told = {k: logs[k] for k in ("loss", "eval_loss", "grad_norm") if k in (logs or {})}
        if any(not math.isfinite(float(v)) for v in told.values()):
            raise TrainingError(f"no number any more after {state.global_step} steps, {told}: {self._remedy}")


class TrainingClock(StopOnNonFinite):
    """Stops a run when its time is over, and fails it when its loss is no number any more.

    `limit_s` is the time of all sittings together (0: none), `tokens` those of a step. Every line that the
    trainer logs is given `elapsed_s`, so that a checkpoint remembers what was used up.
    """

    def __init__(self, limit_s: float, tokens: float, say: Callable[[str], None]) -> None:
        super().__init__("lower steps.rate, or train in float32")
        self._limit, self._tokens, self._say = limit_s, tokens, say
        self._before = 0.0
        self._begin = math.inf
        self._told = time.monotonic()
        self._steps = 0
        self._marks: list[float] = []

    def elapsed(self) -> float:
        """Seconds of training so far, earlier sittings included."""
        return self._before + self._sitting()

    def _sitting(self) -> float:
        """Seconds since this sitting's training began; loading and preparing are not training."""
        return max(0.0, time.monotonic() - self._begin)

    def share(self) -> float:
        """Share of the time that has passed; 0 without a limit."""
        return min(1.0, self.elapsed() / self._limit) if self._limit else 0.0

    def pace(self) -> float:
        """Median seconds per step of this sitting, its first ones left out, or what there is; 0 for none."""
        gaps = sorted(b - a for a, b in itertools.pairwise(self._marks))
        if gaps:
            return gaps[len(gaps) // 2]
        return self._sitting() / self._steps if self._steps else 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start, or go on from what a checkpoint has used up."""
        self._before = max((row.get("elapsed_s", 0.0) for row in state.log_history), default=0.0)
        self._begin = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop in time: another step must still fit."""
        self._steps += 1
        if self._steps > _WARM_UP_STEPS:
            self._marks.append(time.monotonic())
        if self._limit and self.elapsed() + self.pace() >= self._limit:
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Note the time; say how it goes. Raises `TrainingError` for a loss or gradient that is no number."""
        state.log_history[-1]["elapsed_s"] = round(self.elapsed(), 3)
        super().on_log(args, state, control, logs)
        told = {k: logs[k] for k in ("loss", "eval_loss") if k in (logs or {})}
        late = time.monotonic() - self._told >= PROGRESS_INTERVAL_S
        if told and (late or "eval_loss" in told or state.global_step <= 1):
            self._told = time.monotonic()
            self._say(self._line(state, told))

    def _line(self, state: Any, told: dict[str, float]) -> str:
        shown = ", ".join(f"{name} {float(value):.4f}" for name, value in told.items())
        pace = self.pace()
        speed = f", {pace:.2f} s/step, {self._tokens / pace:,.0f} tokens/s" if pace else ""
        limit = f" of {self._limit:.0f}" if self._limit else ""
        return (
            f"step {state.global_step} of {state.max_steps}, {self.elapsed():.0f}{limit} s: {shown}{speed}, "
            f"peak {peak_bytes() / 2**30:.1f} GiB"
        )


def rate_schedule(progress: float, warmup: float) -> float:
    """Share of the highest rate at `progress` (0 to 1): a straight rise, then half a cosine down to 0."""
    if progress < warmup:
        return progress / warmup
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, (progress - warmup) / (1.0 - warmup))))


def reset_peak() -> None:
    """Forget the most memory that was held on the accelerator so far."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_bytes() -> int:
    """Most bytes held at once: on the accelerator since `reset_peak`, without one by the whole process."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
