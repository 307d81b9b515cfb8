"""Arms that take turns, every run in a process of its own with empty caches."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.processes.child_processes import child_command, child_environment, run_child
from benchmarks.lib.result_files import ResultFile, say


def run_apart(
    script: str,
    arguments: argparse.Namespace,
    role: str,
    given: Mapping[str, Any],
    environment: Callable[[Path], Mapping[str, str]] = lambda folder: {},
    *,
    timeout_s: float,
) -> dict[str, Any]:
    """Return what `script --child role` prints, with empty caches and what `environment` makes of its folder.

    Raises what `run_child` does.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = child_command(script, arguments, role, given)
        return run_child(command, child_environment(folder, **environment(folder)), timeout_s)


def run_in_turns(
    result: ResultFile,
    arguments: argparse.Namespace,
    script: str,
    subjects: Sequence[str],
    arms: Sequence[str],
    *,
    subject: str,
    given: Mapping[str, Any],
    environment: Callable[[Path, str], Mapping[str, str]],
    timeout_s: float,
) -> list[dict[str, Any]]:
    """Have `script --child tune` print one JSON row for each of `arguments.repeats`, subjects and arms.

    The child is given the subject, under the name `subject`, the arm, and `given`; `environment` says what else its
    environment holds, from its empty folder and the arm. Each repeat begins with the next arm. A run that fails is
    said and left out.
    """
    rows: list[dict[str, Any]] = []
    for repeat in range(arguments.repeats):
        first = repeat % len(arms)
        for name in subjects:
            for arm in (*arms[first:], *arms[:first]):
                which = {subject: name, "arm": arm}
                try:
                    row = run_apart(
                        script,
                        arguments,
                        "tune",
                        {**which, **given},
                        lambda folder, arm=arm: environment(folder, arm),  # type: ignore[misc]
                        timeout_s=timeout_s,
                    )
                except Exception as error:  # one run less
                    say(f"{name} {arm}: {type(error).__name__}: {error}"[:300])
                    continue
                rows.append({**which, "repeat": repeat, **row})
                result.add("runs", rows[-1])
                say(f"{name} {arm}: {row['tune_s']:.2f} s, {row['ms']:.4f} ms")
    return rows


def retime_choices(
    result: ResultFile,
    arguments: argparse.Namespace,
    script: str,
    rows: Sequence[dict[str, Any]],
    *,
    subject: str,
    environment: Callable[[Path], Mapping[str, str]],
    timeout_s: float,
) -> list[dict[str, Any]]:
    """The same rows with `ms` as it is beside the others' of their subject, a process a subject.

    `script --child retime` is given the subject and `configs`, and prints `ms`, one for each.
    """
    results = []
    for name in dict.fromkeys(row[subject] for row in rows):
        own = [row for row in rows if row[subject] == name]
        given = {subject: name, "configs": [row["config"] for row in own]}
        times = run_apart(script, arguments, "retime", given, environment, timeout_s=timeout_s)
        result.add("retimed", {subject: name, **times})
        timed = [{**row, "ms": one} for row, one in zip(own, times["ms"], strict=True)]
        say(f"{name} in turns: " + ", ".join(f"{row['arm']} {row['ms']:.4f} ms" for row in timed))
        results += timed
    return results


def medians_in_turns(calls: Sequence[Callable[[], object]], rounds: int) -> dict[str, Any]:
    """Return what `--child retime` prints: median milliseconds of each, in turns, and of the first once more."""
    from benchmarks.lib.kernel_timing import time_in_turns

    for call in calls:
        call()
    *ms, again_ms = (statistics.median(t) for t in time_in_turns([*calls, calls[0]], rounds))
    return {"ms": ms, "again_ms": again_ms}


def ratios_to(
    rows: Sequence[dict[str, Any]], *, subject: str, ours: str, others: Sequence[str]
) -> dict[str, Any]:
    """Seconds of each other arm over ours, and the time of our choice over that of its own.

    Medians over repeats, geometric means over the subjects that both have; an arm without any is left out.
    """
    figures: dict[str, Any] = {}
    for other in others:
        seconds: list[float] = []
        times: dict[str, float] = {}
        for name in dict.fromkeys(row[subject] for row in rows):
            theirs = [r for r in rows if (r[subject], r["arm"]) == (name, other)]
            mine = [r for r in rows if (r[subject], r["arm"]) == (name, ours)]
            if theirs and mine:
                middle = lambda some, key: statistics.median(r[key] for r in some)  # noqa: E731
                seconds.append(middle(theirs, "tune_s") / middle(mine, "tune_s"))
                times[name] = middle(mine, "ms") / middle(theirs, "ms")
        if seconds:
            figures[other] = {
                f"{subject}s": len(seconds),
                "seconds_ratio": round(statistics.geometric_mean(seconds), 3),
                "latency_ratio": round(statistics.geometric_mean(times.values()), 4),
                "worst_latency_ratio": round(max(times.values()), 4),
                "latency_ratios": {name: round(ratio, 4) for name, ratio in times.items()},
            }
    return figures
