"""Arms that take turns, every run in a process of its own with empty caches."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.processes.child_processes import child_command, child_environment, run_child
from benchmarks.lib.result_files import ResultFile, read_parts, say


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
                with tempfile.TemporaryDirectory() as folder:
                    command = child_command(script, arguments, "tune", {**which, **given})
                    surroundings = child_environment(Path(folder), **environment(Path(folder), arm))
                    try:
                        row = run_child(command, surroundings, timeout_s)
                    except Exception as error:  # one run less
                        say(f"{name} {arm}: {type(error).__name__}: {error}"[:300])
                        continue
                rows.append({**which, "repeat": repeat, **row})
                result.add("runs", rows[-1])
                say(f"{name} {arm}: {row['tune_s']:.2f} s, {row['ms']:.4f} ms")
    return rows


def add_parts(result: ResultFile, parts: Sequence[Path], *, as_measured: bool = True) -> list[dict[str, Any]]:
    """The runs of parts that were measured apart, in one environment; `result` has them, too.

    It has their environment as well, unless what they chose is measured again.
    """
    read = read_parts(parts)
    if as_measured:
        result.data["environment"] = read[-1]["environment"]
    rows = [row for part in read for row in part["raw"].get("runs", ())]
    for row in rows:
        result.add("runs", row)
    return rows
