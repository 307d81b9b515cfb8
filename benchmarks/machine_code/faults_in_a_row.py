"""Claim: faults in a row lose no label, blame nobody else, and a healthy runner is back within seconds.

    python -m benchmarks.machine_code.faults_in_a_row --out benchmarks/results/faults_in_a_row.json \
        [--faults 1000] [--hangs 0.02] [--seed 0] [--fake]

Programs are asked for by two threads at once: right ones, and those that write out of bounds or into inputs, are
wrong, fail with an illegal address or a trap, or never end (`--hangs`: share of these). Every label is compared with
what the program does. On a device they are Triton kernels, compiled by the compile workers; with `--fake` they are
programs of a driver that runs on the CPU (`g++`), some of which take the whole process down: the seconds until a
runner is back are then those of a process, and not of a device.
"""

from __future__ import annotations

import argparse
import random
import statistics
import threading
import time
from collections import Counter
from contextlib import ExitStack
from typing import Any

from benchmarks.lib.machine_code import fake_code as code
from benchmarks.lib.machine_code.device_sums import BODIES, compile_sums
from benchmarks.lib.machine_code.fake_code import addition, honest
from benchmarks.lib.machine_code.opened import add_fake_option, add_launch_option, opened_runner
from benchmarks.lib.machine_code.sums import COUNT, SumCall, objection
from benchmarks.lib.result_files import ResultFile, parse_arguments, parser, say
from forecast_harness.machine_code.compilation.compile_workers import CompileWorkers
from forecast_harness.machine_code.fit_runner import facts_for_workers
from forecast_harness.machine_code.records import Program
from forecast_harness.machine_code.runner.client import RunnerClient

SUM = 2
FAKE: dict[str, tuple[list[code.Operation], str]] = {
    "right": (honest(), ""),
    "wrong": ([code.copy((SUM, 0), (0, 0), 4 * COUNT)], "wrong values"),
    "out of bounds": ([*honest(), code.store(SUM, 4 * COUNT, 64, 1)], "out of bounds"),
    "writes into an input": ([*honest(), code.store(1, 0, 4, 7)], "input changed"),
    "illegal address": ([code.store(SUM, 1 << 34, 16, 1)], "device error"),
    "trap": ([code.fail(719)], "device error"),
    "takes the process down": ([code.crash()], "crash"),
    "never ends": ([code.loop_for_ever()], "hang"),
}
REAL = ("right", "wrong", "out of bounds", "writes into an input", "illegal address", "trap", "never ends")
RESTARTING = ("device error", "crash", "hang")


def draw_kinds(chance: random.Random, known: list[str], faults: int, hangs: float) -> list[str]:
    """Programs until so many of them are faulty, right ones in between."""
    others = [k for k in known if k not in ("right", "never ends")]
    kinds: list[str] = []
    left = faults
    while left:
        if chance.random() < 0.2:
            kinds.append("right")
            continue
        kinds.append(
            "never ends" if "never ends" in known and chance.random() < hangs else chance.choice(others)
        )
        left -= 1
    return kinds


def run(
    arguments: argparse.Namespace, runner: RunnerClient, made: dict[str, Program], says: dict[str, str]
) -> dict[str, Any]:
    """Ask for all programs, from two threads; what was lost and misattributed."""
    kinds = draw_kinds(random.Random(arguments.seed), list(made), arguments.faults, arguments.hangs)
    told: dict[int, str] = {}
    began = time.perf_counter()

    def ask(first: int) -> None:
        call = SumCall(first)
        for n in range(first, len(kinds), 2):
            program = made[kinds[n]]
            named = Program(f"program-{n}", program.kernels, program.plan)
            told[n] = objection(runner, named, call, made["right"])
            if n % 100 < 2:
                say(f"{n} of {len(kinds)}")

    threads = [threading.Thread(target=ask, args=(n,)) for n in (0, 1)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    spent = time.perf_counter() - began
    wrong = {
        n: (kinds[n], told.get(n)) for n in range(len(kinds)) if not _expected(says[kinds[n]], told.get(n))
    }
    blamed = Counter(f.candidate for f in runner.faults)
    guilty = {f"program-{n}" for n, k in enumerate(kinds) if says[k] in RESTARTING}
    back = [f.restart_s for f in runner.faults if f.restart_s]
    return {
        "programs": len(kinds),
        "faulty": sum(k != "right" for k in kinds),
        "by_kind": dict(Counter(kinds)),
        "labels_lost": sum(n not in told for n in range(len(kinds))),
        "labels_wrong": len(wrong),
        "blamed_wrongly": sum(c for name, c in blamed.items() if name and name not in guilty),
        "not_blamed": len(guilty - set(blamed)),
        "nobodys": blamed.get("", 0),
        "restarts": runner.restarts,
        "restart_s_median": statistics.median(back) if back else None,
        "restart_s_most": max(back, default=None),
        "healthy_at_the_end": runner.check_health() == "",
        "seconds": spent,
        "wrong": {str(n): list(w) for n, w in list(wrong.items())[:20]},
    }


def _expected(says: str, told: str | None) -> bool:
    return told is not None and (told == "" if says == "" else told.startswith(says))


def main() -> None:
    made = parser(__doc__)
    add_fake_option(made)
    made.add_argument("--faults", type=int, default=1000)
    made.add_argument("--hangs", type=float, default=0.02, help="share of programs that never end")
    add_launch_option(made)
    made.add_argument("--seed", type=int, default=0)
    arguments = parse_arguments(made)
    result = ResultFile(arguments, "faults in a row lose no label", arguments.seed)
    with ExitStack() as stack:
        runner = stack.enter_context(opened_runner(arguments))
        if arguments.null:
            programs = {n: addition(n, operations, COUNT) for n, (operations, _) in FAKE.items()}
            says = {n: s for n, (_, s) in FAKE.items()}
        else:
            with CompileWorkers(facts_for_workers(runner)) as workers:
                compiled, missing = compile_sums(workers)
            result.add("not_compiled", missing)
            programs = {n: p for n, p in compiled.items() if n in REAL}
            says = {n: s for n, (_, s) in BODIES.items()}
        result.finish(run(arguments, runner, programs, says))


if __name__ == "__main__":
    main()
