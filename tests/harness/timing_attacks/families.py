"""Programs that try to be called faster than they are, in families of one idea each.

Every variant is the pack's own plain solution, which it is timed against, and a way to cheat the clock: none
computes anything better. `sources(pack)` gives their texts, by (family, variant).
"""

from __future__ import annotations

from collections.abc import Mapping

from forecast_harness.targets.packs import Pack
from tests.harness.timing_attacks import hidden_work, other_processes, serving_code, stale_results

_PRELUDE = '''
import ctypes, gc, mmap, os, signal, sys, threading, time
import torch

inside = sys.modules["forecast_harness.verify.launch_cell"]


def mark(given):
    """Bytes that differ between launches, read in no time."""
    return b"".join(t.reshape(-1)[:: max(1, t.numel() // 16)].clone().cpu().numpy().tobytes() for t in given.values())


def replace(place, name, make):
    setattr(place, name, make(getattr(place, name)))


def mapped(count):
    """Memory that this process shares with its children."""
    return torch.frombuffer(mmap.mmap(-1, max(8, count)), dtype=torch.uint8)
'''

FAMILIES: Mapping[str, Mapping[str, str]] = {
    **hidden_work.FAMILIES,
    **stale_results.FAMILIES,
    **serving_code.FAMILIES,
    **other_processes.FAMILIES,
}


def sources(pack: Pack) -> dict[tuple[str, str], str]:
    """All attacks on a pack whose plain solution takes named tensors and returns one."""
    plain = pack.solution("torch_plain").source.replace("def run(", "def honest(")
    return {
        (family, variant): f"{_PRELUDE}\n\n{plain}\n\n{body}"
        for family, variants in FAMILIES.items()
        for variant, body in variants.items()
    }
