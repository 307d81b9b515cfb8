"""Access to the device for timing: one decision of a process at a time, never inside a capture."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from forecast_autotune.records import Decision, Problem
from forecast_autotune.settings import Mode, Settings
from forecast_integrations.device import has_device
from forecast_integrations.triton.protocols import Tuner

LOCK = threading.RLock()
"""One decision at a time per process: two would share the device and spoil each other's times. Being
one lock for all tuners, and re-entrant, it cannot deadlock when a hook calls another tuned kernel."""


def _renew_lock() -> None:
    """Renew the lock after a fork: a thread that the child lacks may have held it."""
    lock: Any = LOCK
    if not lock._is_owned():
        lock._at_fork_reinit()


os.register_at_fork(after_in_child=_renew_lock)

_local = threading.local()


def decision_depth() -> int:
    """Return the depth of nested decisions of this thread: hooks may call tuned kernels."""
    return int(getattr(_local, "depth", 0))


@contextmanager
def inside_decision() -> Iterator[None]:
    """Count a decision of this thread while the block runs."""
    _local.depth = decision_depth() + 1
    try:
        yield
    finally:
        _local.depth = decision_depth() - 1


def capturing_graph() -> bool:
    """Whether the current stream is recording a CUDA graph."""
    import torch

    return bool(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED."""


@contextmanager
def harmless_to_captures() -> Iterator[None]:
    """Keep this thread's calls from ending other threads' captures; do nothing without CUDA."""
    exchange = _mode_exchange()
    if exchange is None:
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    is_relaxed = exchange(ctypes.byref(mode)) == 0
    try:
        yield
    finally:
        if is_relaxed:
            exchange(ctypes.byref(mode))


@cache
def _mode_exchange() -> Callable[[object], int] | None:
    """Return `cuThreadExchangeStreamCaptureMode`, which sets this thread's mode and returns the former one."""
    import torch

    if not torch.cuda.is_available() or torch.version.cuda is None:
        return None
    try:
        exchange: Callable[[object], int] = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None
    return exchange


def has_own_benchmark(tuner: Tuner) -> bool:
    """Whether a tuner has a benchmark function of the user's, a subclass's or a framework's."""
    from forecast_integrations.triton.upstream import is_of_triton

    bench = vars(tuner).get("do_bench")  # Triton's own is here as well, once it was asked for
    return (
        getattr(tuner, "_do_bench", None) is not None
        or getattr(bench, "__module__", "triton.testing") != "triton.testing"
        or not is_of_triton(tuner._bench)
        or not is_of_triton(getattr(type(tuner), "do_bench", None))
    )


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


def is_alive() -> bool:
    """Whether the device answers: an earlier launch may have broken it for good."""
    from triton.runtime.driver import driver

    try:
        driver.active.get_device_interface().synchronize()
    except RuntimeError:
        return False
    return True


def can_time(tuner: Tuner) -> bool:
    """Whether there is a device, or a benchmark function that may not need one."""
    return has_own_benchmark(tuner) or (has_device() and not is_interpreted())


def why_untimed(tuner: Tuner) -> str:
    """Why nothing can be timed here, and where it can; empty where it can."""
    of_interpreter = (
        "kernels run in Triton's interpreter (TRITON_INTERPRET=1), whose times say nothing of a GPU"
    )
    why = of_interpreter if is_interpreted() else "there is no GPU here"
    return "" if can_time(tuner) else f"not timed: {why}"


def warn_early() -> None:
    """Let Triton warn here, once, and not in each forked child, that its default for FP fusion will change."""
    from triton import knobs

    getattr(knobs.language, "fp_fusion_enabled", lambda _: None)(None)


def untimed_settings(settings: Settings, tuner: Tuner) -> Settings:
    """Return settings that use the best forecast where nothing can be timed (the interpreter, a stub driver).

    In the background a benchmark function of the user's is not called either: it would delay a launch.
    """
    if settings.mode is Mode.BACKGROUND:
        can_wait = can_time(tuner) and not has_own_benchmark(tuner)
        return settings if can_wait else settings.with_(mode=Mode.SKIP)
    if can_time(tuner):
        return settings
    if settings.mode in (Mode.TUNE, Mode.EXHAUSTIVE, Mode.LISTEN):
        return settings.with_(mode=Mode.SKIP)
    return settings


_mutex = threading.Lock()
_open: list[list[CaptureMiss]] = []
"""The lists of the entered blocks of all threads: a backward pass launches on threads of its own."""


@dataclass(frozen=True)
class CaptureMiss:
    """A key that was undecided inside a capture, and launched with a config that was not timed there."""

    kernel: str
    key: tuple[str, ...]
    decision: Decision
    """The launched candidate, and its evidence."""


@contextmanager
def allow_capture_misses() -> Iterator[list[CaptureMiss]]:
    """Within this block, a key that is met inside a CUDA-graph capture undecided is launched, not refused.

    It gets the best config that is stored for it, else the best forecast (from the kernel's other problems, if any
    are stored), and is recorded among the store's misses for `warm`. The list that the block is given has these
    launches. Outside of a capture the key is tuned as ever: graphs that are recorded after that have its choice.
    """
    misses: list[CaptureMiss] = []
    with _mutex:
        _open.append(misses)
    try:
        yield misses
    finally:
        with _mutex:
            # Not `remove`, which compares: two empty lists are equal.
            del _open[next(i for i, block in enumerate(_open) if block is misses)]


def settings_in_capture(settings: Settings) -> Settings:
    """Return the settings of a decision now: nothing is timed while the current stream records a graph."""
    if settings.mode in (Mode.SKIP, Mode.BACKGROUND) or not capturing_graph():
        return settings
    return settings.with_(mode=Mode.SKIP) if _open else settings.with_(mode=Mode.FROZEN, on_miss="error")


def note_capture_miss(problem: Problem, decision: Decision) -> None:
    """Add a key that was launched undecided to the lists of the entered blocks."""
    miss = CaptureMiss(problem.kernel.name, problem.key, decision)
    with _mutex:
        for misses in _open:
            misses.append(miss)
