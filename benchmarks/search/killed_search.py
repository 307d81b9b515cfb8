"""Claim: a search killed with SIGKILL at any moment ends as if it had not been, and asks for no logged answer again.

    python -m benchmarks.search.killed_search --kills 100 --out benchmarks/results/search_kill9.json

CPU only. Each search runs in a process of its own, with threads that propose and lanes that judge, and gets
SIGKILL at a random moment, again and again; then it is resumed and left to its end. The same search is run
without kills, and both must end in the same state: nodes, batches, choices, scores, confirmations, reason to
stop. The landscape of `synthetic_landscape` answers, after short random sleeps; a request that would cost money or
device time writes a line to a ledger as it begins, and one as the last thing before it answers.

`repeated`: begun again although the answer was in the log when the process was killed. `cut_short`: under way when the
process was killed, so that its log has no answer; these alone are done again. `complete_but_unseen`: of these, calls
that had come to their end by their own ledger in the last instant, before their answer was in the log.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.lib import result_files
from benchmarks.lib.processes import child_processes
from benchmarks.lib.search.synthetic_landscape import (
    CONTEXT,
    SEEDS,
    TARGET,
    CallLedger,
    LandscapeAuthor,
    LandscapeForecaster,
    LandscapeJudge,
)
from benchmarks.lib.search.synthetic_landscape import settings as table_settings
from forecast_harness.records import (
    SearchSettings,
)
from forecast_harness.search.events import RecordChoice, StopSearch
from forecast_harness.search.log import read_log
from forecast_harness.search.plan import action_key, pending_actions
from forecast_harness.search.run import LOG_FILE, search
from forecast_harness.search.state import SearchState, apply_event, replay_events
from forecast_harness.trials.judge_pool import LocalJudgePool

LEDGER = "ledger"
LANES = 2
DELAY_S = 0.25
"""Longest sleep of a table's answer: a search takes some seconds, and a kill hits it anywhere."""
TABLE_S = 1.2
"""Longest life of a process that is killed: a few of these make up a search."""
MOST_KILLS = 6
"""Kills of one search."""


def settings(seed: int) -> SearchSettings:
    return table_settings(24, seed=seed, depth=1 + seed % 3, audit=0.25)


def work(folder: Path, seed: int, delay_s: float = DELAY_S, announce: bool = False) -> SearchState:
    """Return what a process does: begin the search, or go on with it."""
    ledger = CallLedger(folder / LEDGER)
    lanes = LocalJudgePool(lambda index: LandscapeJudge(ledger, delay_s), LANES)
    begun: list[SearchState] = []

    def watch(state: SearchState) -> None:
        if announce and not begun:
            print("begun", flush=True)
            begun.append(state)

    try:
        return search(
            TARGET,
            SEEDS,
            settings=settings(seed),
            context=CONTEXT,
            proposers={"table": LandscapeAuthor(ledger, delay_s)},
            forecaster=LandscapeForecaster(ledger),
            lanes=lanes,
            folder=folder,
            watch=watch,
        )
    finally:
        lanes.close()


def comparable_state(state: SearchState) -> dict[str, Any]:
    """All of a final state but the order in which answers came."""
    return {
        "nodes": list(state.nodes),
        "refused": [r.id for r in state.duplicates],
        "chosen": {n: vars(b.chosen) for n, b in sorted(state.batches.items()) if b.chosen is not None},
        "requests": sorted(state.answers),
        "judged": {n: str(j.outcome) for n, j in sorted(state.judged.items())},
        "scores": dict(sorted(state.scores.items())),
        "confirmed": {n: j.log2_ratio for n, j in sorted(state.confirmed.items())},
        "pool": list(state.pool),
        "best": [state.best, state.best_score],
        "stopped": state.stopped.reason if state.stopped is not None else None,
        "spent": [state.spent.measurements, state.spent.tokens, round(state.spent.device_seconds, 6)],
    }


def answered_keys(folder: Path) -> set[str]:
    """Keys of what the log has answers to: all that was due at some time, and is not any more."""
    path, state = folder / LOG_FILE, SearchState()
    asked: set[str] = set()
    due: set[str] = set()
    for event in read_log(path) if path.exists() else ():
        apply_event(state, event)
        due = {action_key(a) for a in pending_actions(state) if not isinstance(a, RecordChoice | StopSearch)}
        asked |= due
    return asked - due


def ledger_lines(folder: Path) -> list[tuple[str, str]]:
    """The ledger: (begin or done, key)."""
    path = folder / LEDGER
    text = path.read_text() if path.exists() else ""
    return [(word, name) for word, name in (line.split(" ", 1) for line in text.splitlines())]


class KilledSearch:
    """One search, its kills, and what they did."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed
        self.counts: Counter[str] = Counter()

    def leg(self, wait_s: float | None, begun: bool = True) -> bool:
        """A process, killed `wait_s` seconds after its start, or after its first event; None: not at all.

        Returns whether the kill hit it at work.
        """
        before, old = answered_keys(self.folder), len(ledger_lines(self.folder))
        command = [
            *child_processes.module_command(__file__),
            "--child",
            str(self.folder),
            "--seed",
            str(self.seed),
        ]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        hit = False
        if wait_s is not None:
            if begun and child.stdout is not None:
                child.stdout.readline()
            try:
                child.wait(wait_s)
            except subprocess.TimeoutExpired:
                child.send_signal(signal.SIGKILL)
                hit = True
        child.communicate()
        if not hit and child.returncode:
            raise RuntimeError(f"the search failed with {child.returncode}: see above")
        request = Counter(name for word, name in ledger_lines(self.folder)[old:] if word == "begin")
        self.counts["repeated"] += sum(n for name, n in request.items() if name in before)
        if hit:
            done = answered_keys(self.folder)
            under_way = {name for word, name in ledger_lines(self.folder) if word == "begin"} - done
            self.counts["cut_short"] += len(under_way)
            log = self.folder / LOG_FILE
            raw = log.read_bytes() if log.exists() else b""
            self.counts["torn_lines"] += bool(raw) and not raw.endswith(b"\n")
            self.counts["before_the_first_event"] += not raw
        return hit

    def finish(self) -> SearchState:
        """Resume, undisturbed, and count."""
        self.leg(None)
        state = replay_events(read_log(self.folder / LOG_FILE))
        done = Counter(name for word, name in ledger_lines(self.folder) if word == "done")
        self.counts["complete_but_unseen"] += sum(n - 1 for n in done.values())
        self.counts["paid"] += len(done)
        self.counts["resumed"] += state.resumed
        return state


def run(a: argparse.Namespace) -> int:
    report, chance = result_files.ResultFile(a, "search_kill9", a.seed), random.Random(a.seed)
    kills = searches = different = 0
    counts: Counter[str] = Counter()
    begin = time.monotonic()
    while kills < a.kills:
        with tempfile.TemporaryDirectory(prefix="search-kill9-") as name:
            folder = Path(name)
            (folder / "calm").mkdir()
            expected = comparable_state(work(folder / "calm", searches, delay_s=0.0))
            killed = KilledSearch(folder / "killed", searches)
            killed.folder.mkdir()
            wanted, hits = min(a.kills - kills, chance.randint(1, MOST_KILLS)), 0
            for _ in range(wanted):
                begun = chance.random() < 0.9  # the others die while they are still starting
                hits += killed.leg(chance.random() * TABLE_S, begun)
            result = comparable_state(killed.finish())
        counts += killed.counts
        different += result != expected
        kills, searches = kills + hits, searches + 1
        report.add(
            "search", {"seed": searches - 1, "kills": hits, "same": result == expected, **killed.counts}
        )
        result_files.say(f"{kills} kills in {searches} searches, {different} ended otherwise, {dict(counts)}")
    summary = {
        "kills": kills,
        "searches": searches,
        "ended_otherwise": different,
        **{name: counts[name] for name in ("repeated", "cut_short", "complete_but_unseen", "paid")},
        "resumed": counts["resumed"],
        "torn_lines": counts["torn_lines"],
        "before_the_first_event": counts["before_the_first_event"],
        "minutes": round((time.monotonic() - begin) / 60, 2),
    }
    report.finish(summary)
    return int(any(summary[name] for name in ("ended_otherwise", "repeated")))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="the result file (JSON)")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    a = result_files.parse_arguments(parser, on_host=True)
    if a.child:
        work(a.child, a.seed, announce=True)
        return 0
    return run(a)


if __name__ == "__main__":
    sys.exit(main())
