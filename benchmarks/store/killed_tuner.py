"""Claim: a tuner that is killed with SIGKILL at any moment loses no measurement and repeats none.

    python -m benchmarks.store.killed_tuner --rounds 200 --out benchmarks/results/kill9.json

CPU only. Each round starts processes that tune the same few problems with the real tuner, surrogate and
store; a table stands in for the GPU, with small random sleeps where compiling and timing would be. A
process says on its output what it has: a measurement once `Store.add` has returned, a decision once
`tune` has. They are killed at random moments, and then a fresh store must load with every measurement
and decision that was announced, none twice per (problem, candidate, protocol), and no line of its log
may be anything but a record (a torn last line is counted apart). Undecided problems stay on the list of
the next round; after the last round one process decides them undisturbed.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.lib import result_files
from benchmarks.lib.processes import child_processes
from forecast_autotune.records import Candidate, Decision, Kernel, Measurement, Problem
from forecast_autotune.records.json_fields import MALFORMED
from forecast_autotune.records.measurement import IN_TURNS
from forecast_autotune.records.table import Table
from forecast_autotune.settings import Settings
from forecast_autotune.store import Store, StoreWarning
from forecast_autotune.store.log import decode
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.testing import TableMeasurer, example_table
from forecast_autotune.tuning.loop import tune
from forecast_autotune.tuning.task import TuningTask, utc_now

LIST = 12
"""Problems on the list of a round: more than can be decided before the kill."""
PER_KERNEL = 40
"""Problems that share a kernel and hence a log, and are each other's relatives."""
LONGEST_S = 0.5
"""A process is killed at a random moment within so many seconds of its start, or of its first problem."""

Announcement = tuple[str, ...]
"""A line of a process: ("add", problem, candidate, protocol) or ("decided", problem, candidate)."""


def small_table(number: int) -> Table:
    """One of endlessly many small problems, the same for the same number."""
    made = example_table(sizes=(16, 32, 64, 128, 256, 512), warps=(1, 2, 4, 8), seed=number)
    kernel = Kernel(f"killed-{number // PER_KERNEL}", source="def killed(): ...", source_sha256="0" * 64)
    problem = Problem.of(kernel, made.problem.arguments, made.problem.device, key=(str(number),))
    return Table(problem, [replace(m, problem=problem.id, protocol="example") for m in made.measurements])


class SlowTableMeasurer(TableMeasurer):
    """A table that takes its time, so that a kill can hit it anywhere."""

    def __init__(self, of: Table, chance: random.Random) -> None:
        super().__init__(of, workers=4)
        self._chance, self._table = chance, of.by_candidate()

    def measure(
        self,
        candidates: Sequence[Candidate],
        *,
        prefetch: Sequence[Candidate] = (),
        within_s: float | None = None,
    ) -> Iterator[Measurement]:
        for m in super().measure(candidates, prefetch=prefetch, within_s=within_s):
            time.sleep(self._chance.random() * 0.008)
            yield m

    def compare(self, candidates: Sequence[Candidate]) -> list[Measurement]:
        time.sleep(self._chance.random() * 0.008)
        rows = [self._table[c] for c in candidates]
        return [replace(m, protocol=m.protocol + IN_TURNS, at=utc_now()) for m in rows]


class AnnouncingStore(Store):
    """A store that says what it has committed, after it has."""

    def add(self, problem: Problem, measurement: Measurement) -> None:
        super().add(problem, measurement)
        print("add", problem.id, measurement.candidate.id, measurement.protocol, flush=True)


def tune_listed(root: Path, numbers: Sequence[int], seed: int) -> None:
    """The child: decide these problems."""
    store, chance = AnnouncingStore(root), random.Random(seed)
    print("started", flush=True)
    for number in numbers:
        t = small_table(number)
        task = TuningTask(t.problem, list(t.by_candidate()))
        decision = tune(
            task,
            partial(SlowTableMeasurer, t, chance),
            store=store,
            surrogate=AnalyticSurrogate(),
            settings=Settings(),
        )
        print("decided", t.problem.id, decision.chosen.id, flush=True)


def start(root: Path, numbers: Sequence[int], seed: int) -> subprocess.Popen[str]:
    command = [
        *child_processes.module_command(__file__),
        "--child",
        str(root),
        "--seed",
        str(seed),
        "--numbers",
    ]
    return subprocess.Popen([*command, *map(str, numbers)], stdout=subprocess.PIPE, text=True)


def one_round(
    root: Path, numbers: Sequence[int], processes: int, chance: random.Random
) -> list[Announcement]:
    """Start, kill, and return what was said before."""
    children = [
        # Each begins with another problem, so that they work side by side and also meet.
        start(root, [*numbers[i:], *numbers[:i]], chance.randrange(2**31))
        for i in range(processes)
    ]
    said: list[Announcement] = []
    try:
        if chance.random() < 0.9:  # the others die while they are still starting
            assert children[0].stdout is not None
            children[0].stdout.readline()
        for child in children:
            time.sleep(chance.random() * LONGEST_S / processes)
            child.send_signal(signal.SIGKILL)
            said += announced_lines(child)
    finally:
        for child in children:
            child.kill()
            child.wait()
    return said


def announced_lines(child: subprocess.Popen[str]) -> list[Announcement]:
    """What a process said to its end. A kill can cut its last line: only whole lines are promises."""
    text = child.communicate()[0]
    whole = text[: text.rfind("\n") + 1].splitlines()
    return [tuple(line.split()) for line in whole if line.startswith(("add ", "decided "))]


class StoreAudit:
    """What was announced so far, and what a fresh store says to it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.added: Counter[Announcement] = Counter()
        self.begun: set[str] = set()
        """Problems with a measurement that was announced."""
        self.decided: dict[str, set[str]] = {}
        self.torn: set[tuple[str, bytes]] = set()
        """(log, text) of last lines that a kill left unfinished."""

    def hear(self, said: list[Announcement]) -> None:
        """Take in what processes announced."""
        self.added.update(s[1:] for s in said if s[0] == "add")
        self.begun = {s[0] for s in self.added}
        for _, problem, chosen in (s for s in said if s[0] == "decided"):
            self.decided.setdefault(problem, set()).add(chosen)

    def check(self) -> tuple[dict[str, int], dict[str, Decision]]:
        """Counts (those in `FORBIDDEN_COUNTS` must be zero), and the decisions on file by problem."""
        corrupt = self._corrupt()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StoreWarning)
            store = Store(self.root)
            held: Counter[Announcement] = Counter(
                (m.problem, m.candidate.id, m.protocol) for t in store.tables() for m in t.measurements
            )
            decisions = {problem.id: decision for problem, decision in store.decisions()}
        other = sum(
            chosen != {decisions[p].chosen.id} for p, chosen in self.decided.items() if p in decisions
        )
        return {
            "announced": sum(self.added.values()),
            "held": sum(held.values()),
            "lost": sum((self.added - held).values()),
            "repeated": sum(n > 1 for n in held.values()),
            "decisions_announced": len(self.decided),
            "decisions_held": len(decisions),
            "decisions_lost": len(self.decided.keys() - decisions.keys()),
            "decisions_changed": other,
            "corrupt": corrupt,
            "torn": len(self.torn),
        }, decisions

    def _corrupt(self) -> int:
        count = 0
        for log in self.root.rglob("log-*.jsonl"):
            *whole, last = log.read_bytes().split(b"\n")
            if last:
                self.torn.add((log.parent.name, last))
            for raw in whole:
                try:
                    decode(raw)
                except MALFORMED:
                    count += (log.parent.name, raw) not in self.torn
        return count


FORBIDDEN_COUNTS = ("lost", "repeated", "decisions_lost", "decisions_changed", "corrupt")


def run(a: argparse.Namespace) -> int:
    report, chance = result_files.ResultFile(a, "kill9", a.seed), random.Random(a.seed)
    with tempfile.TemporaryDirectory(prefix="kill9-") as folder:
        audit, unfinished, used, interrupted = StoreAudit(Path(folder)), list[int](), 0, 0
        for round_ in range(a.rounds):
            fresh = LIST - len(unfinished)
            numbers, used = [*unfinished, *range(used, used + fresh)], used + fresh
            audit.hear(one_round(Path(folder), numbers, a.processes, chance))
            counts, decisions = audit.check()
            unfinished = [n for n in numbers if small_table(n).problem.id not in decisions]
            interrupted += sum(small_table(n).problem.id in audit.begun for n in unfinished)
            if any(counts[name] for name in FORBIDDEN_COUNTS):
                report.add("round", {"round": round_, **counts})
                result_files.say(f"round {round_}: BROKEN {counts}")
                return 1
            if round_ % 20 == 19:
                report.add("round", {"round": round_ + 1, "decisions_interrupted": interrupted, **counts})
                result_files.say(f"{round_ + 1} rounds: {counts}, {interrupted} decisions interrupted")
        last = start(Path(folder), unfinished, a.seed)
        audit.hear(announced_lines(last))
        counts, decisions = audit.check()
        complete = sum(small_table(n).problem.id in decisions for n in range(used))
    summary = {
        "rounds": a.rounds,
        "kills": a.rounds * a.processes,
        **counts,
        "decisions_interrupted": interrupted,
        "problems": used,
        "problems_decided": complete,
    }
    report.finish(summary)
    return int(any(counts[name] for name in FORBIDDEN_COUNTS) or complete < used or last.returncode != 0)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--processes", type=int, default=2, help="processes per round, all of them killed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="the result file (JSON)")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--numbers", type=int, nargs="*", default=[], help=argparse.SUPPRESS)
    a = result_files.parse_arguments(parser, on_host=True)
    if a.child:
        tune_listed(a.child, a.numbers, a.seed)
        return 0
    return run(a)


if __name__ == "__main__":
    sys.exit(main())
