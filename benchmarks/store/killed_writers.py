"""Claim: no measurement that was committed is ever lost, whatever moment a process is killed at.

Each round starts writer processes that append measurements and print each one's number once `add`
has returned, and kills them with SIGKILL at random moments. Some rounds also leave a torn line, as
a kill inside a write would. Afterwards every number that was printed must be in the store exactly
once, every line of the log must be a record or a torn one, and no lock may be held.

    python -m benchmarks.store.killed_writers --rounds 200 --out benchmarks/results/store_torture.json
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.lib.environment import host_environment
from benchmarks.lib.processes.child_processes import module_command
from forecast_autotune.errors import RecordError
from forecast_autotune.records import (
    Argument,
    Candidate,
    Config,
    Decision,
    Device,
    Evidence,
    Kernel,
    Measurement,
    Outcome,
    Problem,
)
from forecast_autotune.records.json_fields import MALFORMED
from forecast_autotune.store import Store, StoreWarning
from forecast_autotune.store.files import decode, encode

PROBLEM = Problem.of(
    Kernel("torture", source="def torture(): ...\n" * 100, source_sha256="00"),
    [Argument("a", "tensor", "float16", (4096, 4096), (4096, 1), aligned=True)],
    Device("Test Device", "cuda", "90"),
)


def measurement(round_: int, writer: int, number: int) -> Measurement:
    config = Config.of({"ROUND": round_, "WRITER": writer, "NUMBER": number})
    return Measurement(
        PROBLEM.id, Candidate(config), Outcome.OK, 0.2 + number / 1000, repeats=87, protocol="torture"
    )


def decision(of: Measurement) -> Decision:
    return Decision(PROBLEM.id, of.candidate, Evidence.MEASURED, "torture", 0.1, 0.02, 100, of.repeats)


def write_until_killed(root: Path, round_: int, writer: int) -> None:
    """The child: commit, then say so. It takes the tuning lock first, to be killed while holding it."""
    store = Store(root)
    with store.tuning_lock(PROBLEM, 0.0):
        number = 0
        while True:
            m = measurement(round_, writer, number)
            store.add(PROBLEM, m)
            print(number, flush=True)
            if number % 4 == 0:
                store.put_decision(PROBLEM, decision(m))
            number += 1


def one_round(root: Path, round_: int, writers: int, chance: random.Random) -> list[tuple[int, int, int]]:
    """Run, kill; returns (round, writer, number) of everything the writers said was committed."""
    children = []
    for writer in range(writers):
        command = [*module_command(__file__), "--child", str(root), str(round_), str(writer)]
        children.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL))
    committed = []
    try:
        for child in children[: 0 if chance.random() < 0.1 else 1]:  # some die before their first write
            assert child.stdout is not None
            if child.stdout.readline():
                committed.append((round_, 0, 0))
        for writer, child in enumerate(children):
            time.sleep(chance.random() * 0.04)
            child.send_signal(signal.SIGKILL)
            assert child.stdout is not None
            text = child.stdout.read().decode()
            # A kill can cut the last number, too: only a whole line is a promise.
            committed += [(round_, writer, int(n)) for n in text[: text.rfind("\n") + 1].split()]
    finally:
        for child in children:
            child.kill()
            child.communicate()
    return committed


def tear_log(root: Path, chance: random.Random) -> int:
    """Leave the first part of a line at the end of the log, as a kill inside a write would."""
    logs = sorted(root.glob("v1/*/*/log-*.jsonl"))
    if not logs or not logs[0].read_bytes().endswith(b"\n"):
        return 0  # nothing yet, or torn already: two tears would make one line
    line = encode(measurement(-1, -1, -1).to_json())
    with logs[0].open("ab") as stream:
        stream.write(line[: chance.randrange(1, len(line) - 2)])
    return 1


def is_torn_line(raw: bytes) -> bool:
    """Whether these bytes are the beginning of a line that was written here, and nothing else."""
    named = re.search(rb'"NUMBER":(-?\d+),"ROUND":(-?\d+),"WRITER":(-?\d+)', raw)
    if named:
        number, round_, writer = (int(part) for part in named.groups())
        return encode(measurement(round_, writer, number).to_json()).startswith(raw)
    either = encode(PROBLEM.to_json()), encode(measurement(0, 0, 0).to_json())
    stem = either[1].index(b'"NUMBER":')
    numbers = re.fullmatch(rb'(-?\d*(,"[A-Z]*"?:?)?)*', raw[stem + len(b'"NUMBER":') :])
    return either[0].startswith(raw) or (either[1].startswith(raw[:stem]) and numbers is not None)


def audit_log(root: Path, committed: list[tuple[int, int, int]], torn: int) -> dict[str, int]:
    """Compare what was promised with what is there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StoreWarning)
        store = Store(root)
        result = Counter(m.candidate for m in store.measurements(PROBLEM))
        corrupt = cut = 0
        for log in root.glob("v1/*/*/log-*.jsonl"):
            for raw in log.read_bytes().split(b"\n"):
                try:
                    if raw:
                        kind = decode(raw).get("type")
                        if kind not in ("problem", "measurement"):
                            raise RecordError(f"type {kind!r}")
                except MALFORMED:
                    cut += is_torn_line(raw)
                    corrupt += not is_torn_line(raw)
        store.decision(PROBLEM)
        spoiled = sum("decision" in note for note in store.issued_warnings)
        with store.tuning_lock(PROBLEM, 0.0) as held:
            stuck = int(not held)
    promised = {measurement(*name).candidate for name in committed}
    return {
        "committed": len(committed),
        "found": sum(result.values()),
        "lost": len(promised - result.keys()),
        "duplicated": sum(n > 1 for n in result.values()),
        "corrupt": corrupt,
        "torn": cut,
        "torn_on_purpose": torn,
        "spoiled_decisions": spoiled,
        "stuck_locks": stuck,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--writers", type=int, default=2, help="processes per round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument("--child", nargs=3, metavar=("ROOT", "ROUND", "WRITER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        write_until_killed(Path(arguments.child[0]), int(arguments.child[1]), int(arguments.child[2]))
    chance = random.Random(arguments.seed)
    committed: list[tuple[int, int, int]] = []
    torn = 0
    with tempfile.TemporaryDirectory(prefix="store-torture-") as folder:
        for round_ in range(arguments.rounds):
            committed += one_round(Path(folder), round_, arguments.writers, chance)
            if chance.random() < 0.3:
                torn += tear_log(Path(folder), chance)
        counts = audit_log(Path(folder), committed, torn)
    result: dict[str, Any] = {
        "claim": "store survives kill -9",
        "rounds": arguments.rounds,
        "writers": arguments.writers,
        "environment": host_environment(arguments.seed),
        **counts,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n", encoding="utf-8")
    bad = ("lost", "duplicated", "corrupt", "spoiled_decisions", "stuck_locks")
    return int(any(counts[name] for name in bad))


if __name__ == "__main__":
    sys.exit(main())
