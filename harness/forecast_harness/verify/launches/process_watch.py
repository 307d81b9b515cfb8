"""What a cell notices about its own process: replaced functions, changed settings, threads left running.

Runs next to the candidate, so it finds honest mistakes, and cheats that do not look for it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

# Captured on import, before the candidate's code loads.
_cpu_seconds, _clock = time.process_time, time.perf_counter
_modes = torch.overrides._get_current_function_mode_stack
_dispatch_modes = _get_current_dispatch_mode_stack

_MOST_IDLE_SECONDS, _MOST_IDLE_SHARE = 0.2, 0.2
"""CPU seconds between questions, and their share of that time, up to which threads that wait actively, as those
of parallel loops do for a moment, are taken for idle."""
_SERVING_SECONDS = 0.003
"""CPU seconds that reading a question and writing an answer may take, on a machine whose caches others fill."""

WATCHED: tuple[tuple[Any, str], ...] = (
    (time, "perf_counter"),
    (time, "perf_counter_ns"),
    (time, "time"),
    (time, "monotonic"),
    (time, "sleep"),
    (statistics, "median"),
    (statistics, "mean"),
    (ctypes, "string_at"),
    (ctypes, "memmove"),
    (gc, "collect"),
    (os, "urandom"),
    (sys, "settrace"),
    (threading, "enumerate"),
    (torch, "allclose"),
    (torch, "equal"),
    (torch, "isclose"),
    (torch, "empty"),
    (torch, "zeros"),
    (torch, "as_strided"),
    (torch.testing, "assert_close"),
    (torch.cuda, "synchronize"),
    (torch.cuda, "Event"),
    (torch.cuda.Event, "elapsed_time"),
    (torch.cuda.Event, "record"),
    (torch.Tensor, "data_ptr"),
    (torch.Tensor, "clone"),
    (torch.Tensor, "copy_"),
    (torch.Tensor, "allclose"),
    (torch.Tensor, "equal"),
    (torch.Tensor, "__eq__"),
    (torch.Tensor, "cpu"),
    (torch.Tensor, "to"),
)
"""Functions a harness rests on; a candidate has no reason to replace any of them."""


def _identities() -> list[int]:
    return [id(getattr(place, name, None)) for place, name in WATCHED]


def _flags() -> dict[str, str]:
    """Settings that change what other code computes."""
    return {name: _setting(read) for name, read in _SETTINGS.items()}


_SETTINGS: dict[str, Callable[[], Any]] = {
    "default dtype": torch.get_default_dtype,
    "float32 matmul precision": torch.get_float32_matmul_precision,
    "cuda tf32": lambda: torch.backends.cuda.matmul.allow_tf32,
    "cudnn tf32": lambda: torch.backends.cudnn.allow_tf32,
    "cudnn benchmark": lambda: torch.backends.cudnn.benchmark,
    "fp16 reduced reduction": lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
    "deterministic": torch.are_deterministic_algorithms_enabled,
    "grad mode": torch.is_grad_enabled,
    "denormals": lambda: bool((torch.tensor([1e-40]) * 1.0 != 0).item()),
    "threads": torch.get_num_threads,
    # They see every operation of this process, those of the harness included.
    "modes": lambda: [
        type(m).__name__ for m in (*_modes(), *_dispatch_modes()) if not isinstance(m, DeviceContext)
    ],
}


def _setting(read: Callable[[], Any]) -> str:
    try:
        return str(read())
    except RuntimeError:  # torch refuses to tell when old and new ways of setting it were mixed
        return "inconsistent"


def remember_process(state: dict[str, Any]) -> None:
    """Note how things are before the candidate's code is imported."""
    state["identities"], state["flags"] = _identities(), _flags()


def note_question(state: dict[str, Any]) -> None:
    """Note what the process computed since the last answer: nothing was asked of it meanwhile."""
    if "rested" in state:
        cpu, wall = state["rested"]
        seconds, before = state.get("outside", (0.0, 0.0))
        served = max(0.0, _cpu_seconds() - cpu - _SERVING_SECONDS)
        state["outside"] = seconds + served, before + _clock() - wall


def note_answer(state: dict[str, Any]) -> None:
    """Note that what was asked is done: what the process computes from here on, nobody asked of it."""
    state["rested"] = _cpu_seconds(), _clock()


def process_report(state: dict[str, Any]) -> dict[str, Any]:
    """What is no longer as it was: `patched` functions, `flags` of the process, and work of its `threads`.

    Threads may live on, as those of libraries do; to compute while nothing is asked is what none may do.
    """
    now, flags = _identities(), _flags()
    patched = [
        f"{place.__name__}.{name}"
        for (place, name), was, found in zip(WATCHED, state["identities"], now, strict=True)
        if was != found
    ]
    seconds, wall = state.get("outside", (0.0, 0.0))
    busy = seconds > _MOST_IDLE_SECONDS and seconds > _MOST_IDLE_SHARE * wall
    note_answer(state)
    return {
        "patched": patched,
        "flags": {n: v for n, v in flags.items() if v != state["flags"][n]},
        "threads": [f"{seconds:.2f} s of CPU time in {wall:.2f} s between questions"] if busy else [],
    }
