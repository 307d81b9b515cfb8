"""Claim: PyTorch's own tests of max-autotune pass under `forecast-autotune run` as they pass without.

    python -m benchmarks.inductor.upstream_tests --out benchmarks/results/upstream_inductor_tests_cpu.json \
        --tests FOLDER [--only REGEX] [--seconds 2400] [--each 120] [--processes 1] [--devices 0 1] [--continue FILE]

Runs the installed torch's `test_max_autotune.py`, `test_cpu_select_algorithm.py` and `test_autoheuristic.py`, or their
tests of some names, in processes with empty caches: under plain pytest, and under
`forecast-autotune run -m pytest`. A test that passes in one arm alone is run again in both, with little beside it: a
test that differs then in the same way is a difference, the rest is chance; tests without time left are neither, and
listed. A test that passes without us alone is run a last time with `FORECAST_AUTOTUNE_MODE=exhaustive`, where every
choice is made and timed: if it passes then, it needs a choice that we had left out. Prints a table, and ends with 1 if
anything else passes without us alone. `--processes` deals a file's tests out to so many processes at a time, and
repeated tests to a third of them. With two `--devices`, which may be the same, the arms run side by side, each on its
GPU and half of the cores. `--continue` takes the outcomes of an earlier result over: tests that ended in both arms are
not run again, and differences that could not be repeated are repeated now. Tests that were late there are run anew.

`--tests` is a folder with these files and their imports, `test/inductor` of PyTorch's repository at the release
installed. torch's tests need the `expecttest` package.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.lib.processes.child_processes import child_environment
from benchmarks.lib.result_files import ResultFile, parse_arguments, parser, read_parts, say

RUNNERS = {"plain": ["-m", "pytest"], "ours": ["-m", "forecast_autotune", "run", "-m", "pytest"]}
"""Options of an interpreter, by arm."""
LATE = "not done after"
"""The reason of a test that took too long, and its process with it."""
_NO_TESTS = 5
"""Exit status of pytest where there is nothing to run."""
_CONFTEST = """
import hashlib
import json
import os
import signal
import time

import pytest

_NAMES = os.environ.get("WANTED_TESTS")
_OUTCOMES = os.environ["TEST_OUTCOMES"]
_SECONDS = int(os.environ["TEST_SECONDS"])
_LATE = os.environ["TEST_LATE"]
_BUILDS = os.environ["TEST_BUILDS"]


def _say(**found):
    with open(_OUTCOMES, "a", encoding="utf-8") as stream:
        stream.write(json.dumps(found) + "\\n")


def pytest_pycollect_makemodule(module_path):
    if "torch" not in module_path.read_text(encoding="utf-8"):
        return
    import torch
    from torch._inductor.cpu_vec_isa import VecISA

    check = VecISA.check_build

    def check_once(isa, code):
        told = f"{torch.__version__} {isa} {isa.build_arch_flags()} {code}"
        path = os.path.join(_BUILDS, hashlib.sha256(told.encode()).hexdigest())
        if os.path.exists(path):
            return True
        if not check(isa, code):
            return False
        open(path, "w").close()
        return True

    VecISA.check_build = check_once


def pytest_collection_modifyitems(config, items):
    if not _NAMES:
        return
    wanted = set(json.loads(open(_NAMES, encoding="utf-8").read()))
    left = [item for item in items if item.nodeid not in wanted]
    items[:] = [item for item in items if item.nodeid in wanted]
    config.hook.pytest_deselected(items=left)


def pytest_collection_finish(session):
    ready_s = time.time() - float(os.environ["TEST_PROCESS_BEGAN"])
    _say(collected=[item.nodeid for item in session.items], ready_s=round(ready_s, 1))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    def end_process(*_):  # an exception may be caught by what is tested, which then goes on with less
        _say(test=item.nodeid, outcome="failed", why=f"{_LATE} {_SECONDS} s", seconds=_SECONDS)
        os._exit(1)

    _say(test=item.nodeid, outcome="began")
    signal.signal(signal.SIGALRM, end_process)
    signal.alarm(_SECONDS)
    try:
        return (yield)
    finally:
        signal.alarm(0)


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        word = {"passed": "passed", "skipped": "skipped", "failed": "failed"}[report.outcome]
        crash = getattr(report.longrepr, "reprcrash", None)
        why = crash.message[:300] if crash else str(report.longrepr)[-300:]
        why = "" if report.outcome == "passed" else why
        _say(test=report.nodeid, outcome=word, why=why, seconds=report.duration)
"""
"""Says outcomes as they come, since a process may die; ends what takes too long; runs the wanted tests alone.

That a program for an instruction set of the processor builds and loads is found out once, not by each process with its
empty cache: each of these builds imports torch, and a processor may have eight.
"""


@functools.cache
def _builds() -> tempfile.TemporaryDirectory[str]:
    """Return where all test processes note what builds; it goes with this process."""
    return tempfile.TemporaryDirectory(ignore_cleanup_errors=True)


class TestRun:
    """One arm's runs of test files, in a folder of their own."""

    __test__ = False

    def __init__(
        self,
        arm: str,
        tests: Path,
        each_s: int,
        processes: int = 1,
        device: str | None = None,
        cores: Collection[int] | None = None,
    ) -> None:
        self.arm, self.tests, self.each_s = arm, tests, each_s
        self.processes, self.cores = processes, cores
        self.ready_s: list[float] = []
        """Seconds until the first test, by process."""
        self.environment = {} if device is None else {"CUDA_VISIBLE_DEVICES": device}

    def collect(self, name: str) -> list[str]:
        """The names of all tests of a file. Raises `RuntimeError` where it cannot be imported."""
        *lines, end = self._pytest(name, None, ["--collect-only"], 600.0)
        if end["status"] not in (0, _NO_TESTS):
            raise RuntimeError(f"{name} cannot be imported under {self.arm}:\n{end['log']}")
        return [test for line in lines for test in line.get("collected", [])]

    def outcomes(
        self,
        name: str,
        wanted: Sequence[str],
        until: float,
        expected_s: Mapping[str, float] = MappingProxyType({}),
    ) -> dict[str, dict[str, Any]]:
        """Outcome by test, of those that there was time for; a test that ends its process has `died`.

        `expected_s` are seconds by test, as far as they are known.
        """
        dealt = deal(wanted, self.processes, expected_s)
        with ThreadPoolExecutor(max(1, len(dealt))) as pool:
            parts = list(pool.map(lambda part: self._outcomes(name, part, until), dealt))
        every = {test: outcome for part in parts for test, outcome in part.items()}
        return {test: every[test] for test in wanted if test in every}

    def _outcomes(self, name: str, wanted: Sequence[str], until: float) -> dict[str, dict[str, Any]]:
        """The same of tests that run one after the other."""
        result: dict[str, dict[str, Any]] = {}
        while (left := [t for t in wanted if t not in result]) and (seconds := until - time.monotonic()) > 1:
            *lines, end = self._pytest(name, left, [], seconds)
            began = {line["test"] for line in lines if line.get("outcome") == "began"}
            for line in lines:
                if line.get("outcome") in ("passed", "skipped", "failed"):
                    result[line["test"]] = {**line, "why": without_folders(line["why"])}
            if time.monotonic() >= until:
                break
            for test in began - set(result):
                result[test] = {"test": test, "outcome": "died", "why": "its process ended", "seconds": None}
            if not began:
                raise RuntimeError(f"{name} began no test under {self.arm}:\n{end['log']}")
        return result

    def _pytest(
        self, name: str, wanted: Sequence[str] | None, options: Iterable[str], seconds: float
    ) -> list[Any]:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as root:
            folder = Path(root)
            for path in self.tests.glob("*.py"):
                shutil.copy(path, folder)
            (folder / "conftest.py").write_text(_CONFTEST, encoding="utf-8")
            text = folder / "outcomes.jsonl"
            more = {"TEST_OUTCOMES": str(text), "TEST_SECONDS": str(self.each_s)}
            more |= {"TEST_LATE": LATE, "TEST_PROCESS_BEGAN": str(time.time())}
            more["TEST_BUILDS"] = _builds().name
            more["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # none is asked for, and some import much
            more["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
            more |= self.environment
            if wanted is not None:
                (folder / "wanted.json").write_text(json.dumps(list(wanted)), encoding="utf-8")
                more["WANTED_TESTS"] = str(folder / "wanted.json")
            fixed = ["-q", "-p", "no:cacheprovider", f"--rootdir={folder}", *options, name]
            process = subprocess.Popen(
                [sys.executable, *RUNNERS[self.arm], *fixed],
                cwd=folder,
                env=child_environment(folder, **more),
                stdout=(folder / "log").open("w"),
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                if self.cores:
                    os.sched_setaffinity(process.pid, self.cores)
                process.wait(timeout=seconds)
            except (subprocess.TimeoutExpired, ProcessLookupError):  # out of time, or already gone
                pass
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # its compile workers, too
                process.wait()
            log = (folder / "log").read_text(encoding="utf-8", errors="replace")
            lines = text.read_text(encoding="utf-8").splitlines() if text.exists() else []
            result = list(map(json.loads, lines))
            self.ready_s += [line["ready_s"] for line in result if "ready_s" in line]
            return [*result, {"status": process.returncode, "log": log[-2000:]}]


def deal(names: Sequence[str], processes: int, expected_s: Mapping[str, float]) -> list[list[str]]:
    """Tests by process, each part in its order, so that all are expected to take as long.

    Tests of unknown duration are shuffled by a fixed seed: slow ones come at regular distances.
    """
    shuffled = random.Random(0).sample(names, len(names))
    usual = statistics.median(expected_s.values()) if expected_s else 1.0
    parts: list[list[str]] = [[] for _ in range(min(processes, len(names)))]
    load = [0.0] * len(parts)
    for name in sorted(shuffled, key=lambda name: -expected_s.get(name, usual)):
        least = load.index(min(load))
        parts[least].append(name)
        load[least] += max(expected_s.get(name, usual), 0.1)
    return [sorted(part, key=names.index) for part in parts]


def without_folders(text: str) -> str:
    """A message without the folders of this machine, which are its own affair: of a path, the file's name is kept."""
    return re.sub(r"(?<![\w.:/])/(?:[\w.+@-]+/)+", "", text)


FILES = ("test_max_autotune.py", "test_cpu_select_algorithm.py", "test_autoheuristic.py")
_FIRST_SHARE, _SECOND_SHARE = 0.75, 0.15
"""Shares of a file's seconds, for both arms, and for what came out differently; the rest is for what is left out."""
_NOTHING_LEFT_OUT = {"FORECAST_AUTOTUNE_MODE": "exhaustive"}
_LESS_BESIDE = 3
"""So many times fewer processes run the tests that differed: a failure for want of time or memory passes then."""


def cores_of_arms() -> dict[str, list[int]]:
    """Half of this process's cores for each arm; empty where there are fewer than two."""
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    return {"plain": cores[:half], "ours": cores[half : 2 * half]} if half else {}


Outcomes = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""By arm and test."""


def differences(outcomes: Outcomes) -> tuple[list[str], list[str]]:
    """Tests that passed in the plain arm alone, and in ours alone, of those that both came to."""
    both = compared(outcomes)
    passed = {arm: {t for t in both if outcomes[arm][t].get("outcome") == "passed"} for arm in RUNNERS}
    return sorted(passed["plain"] - passed["ours"]), sorted(passed["ours"] - passed["plain"])


def standing(first: Outcomes, repeated: Outcomes) -> dict[str, list[str]]:
    """Return what is `lost` and `gained` both times, and what is `chance`: a difference the other way, too.

    `open` is what differed and was not repeated in both arms.
    """
    (lost, gained), (lost_again, gained_again) = differences(first), differences(repeated)
    same = {
        "lost": [t for t in lost if t in lost_again],
        "gained": [t for t in gained if t in gained_again],
    }
    rest = [t for t in (*lost, *gained) if t not in (*same["lost"], *same["gained"])]
    ran = compared(repeated)
    return {**same, "chance": [t for t in rest if t in ran], "open": [t for t in rest if t not in ran]}


def compared(outcomes: Outcomes) -> list[str]:
    """Tests that both arms came to: where one had more time, its further tests say nothing of the other."""
    return [test for test in outcomes["plain"] if test in outcomes["ours"]]


def counts(outcomes: Outcomes) -> dict[str, dict[str, int]]:
    """How many of the compared tests had each outcome, by arm."""
    both = compared(outcomes)
    words = ("passed", "skipped", "failed", "died")
    return {w: {arm: sum(outcomes[arm][t]["outcome"] == w for t in both) for arm in outcomes} for w in words}


def run_arms(
    runs: Mapping[str, TestRun],
    name: str,
    wanted: Sequence[str],
    until: float,
    expected_s: Mapping[str, float],
    *,
    side_by_side: bool,
) -> dict[str, dict[str, dict[str, Any]]]:
    """Outcomes of these tests by arm; one arm after the other has the same share of the time, or all of it at once."""
    begin = time.monotonic()

    def outcomes_of(arm: str, ends: float) -> dict[str, dict[str, Any]]:
        result = runs[arm].outcomes(name, wanted, ends, expected_s) if wanted else {}
        say(f"{name}, {arm}: {len(result)} of {len(wanted)} tests in {time.monotonic() - begin:.0f} s")
        return result

    if side_by_side:
        with ThreadPoolExecutor(len(runs)) as pool:
            begun = {arm: pool.submit(outcomes_of, arm, until) for arm in runs}
            return {arm: future.result() for arm, future in begun.items()}
    result: dict[str, dict[str, dict[str, Any]]] = {}
    for place, arm in enumerate(runs):
        now = time.monotonic()
        result[arm] = outcomes_of(arm, now + (until - now) / (len(runs) - place))
    return result


def run_file(
    name: str,
    arguments: argparse.Namespace,
    tests: Path,
    seconds: float,
    earlier: Mapping[str, Any],
    keep: Callable[[dict[str, Any]], None] = lambda row: None,
) -> dict[str, Any]:
    """Both arms over one file's sample, and what differs once more; `earlier` is this of an earlier run, or empty.

    `keep` is given the row as far as it has come, before anything is repeated.
    """
    devices = dict(zip(RUNNERS, arguments.devices, strict=True)) if arguments.devices else {}
    cores = cores_of_arms() if devices else {}
    result = (tests, arguments.each, arguments.processes)
    runs = {arm: TestRun(arm, *result, devices.get(arm), cores.get(arm)) for arm in RUNNERS}
    begin = time.monotonic()
    names = runs["plain"].collect(name)
    sampled = [name for name in names if arguments.only is None or re.search(arguments.only, name)]
    kept, expected_s = kept_outcomes(earlier), known_seconds(earlier)

    def both_arms(taken_over: str, wanted: Sequence[str], share: float) -> dict[str, dict[str, Any]]:
        known = kept[taken_over]
        done = compared(known)
        until, left = begin + seconds * share, [test for test in wanted if test not in done]
        new = run_arms(runs, name, left, until, expected_s, side_by_side=bool(devices))
        return {arm: known[arm] | new[arm] for arm in RUNNERS}

    def row(
        outcomes: Outcomes, repeated: Outcomes, complete: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, Any]:
        stands = standing(outcomes, repeated)
        left_out = [test for test in stands["lost"] if complete.get(test, {}).get("outcome") == "passed"]
        return {
            "file": name,
            "collected": len(names),
            "sampled": len({*sampled, *compared(outcomes)}),
            "came_to": {arm: len(answer) for arm, answer in outcomes.items()},
            "compared": len(compared(outcomes)),
            **counts(outcomes),
            **stands,
            "lost": [test for test in stands["lost"] if test not in left_out],
            "left_out": left_out,
            "outcomes": outcomes,
            "repeated": repeated,
            "complete": complete,
            "ready_s": {arm: run.ready_s for arm, run in runs.items()},
        }

    outcomes = both_arms("outcomes", sampled, _FIRST_SHARE)
    complete = dict(kept["complete"]["ours"])
    keep(row(outcomes, kept["repeated"], complete))
    for run in runs.values():
        run.processes = max(1, arguments.processes // _LESS_BESIDE)
    differing = [test for part in differences(outcomes) for test in part]
    repeated = both_arms("repeated", differing, _FIRST_SHARE + _SECOND_SHARE)
    keep(row(outcomes, repeated, complete))
    ours = runs["ours"]
    ours.environment |= _NOTHING_LEFT_OUT
    ours.cores = None  # nothing runs beside it
    request = [test for test in standing(outcomes, repeated)["lost"] if test not in complete]
    complete |= ours.outcomes(name, request, begin + seconds, expected_s) if request else {}
    return row(outcomes, repeated, complete)


def kept_outcomes(earlier: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Take a file's earlier row: outcomes by phase and arm, without tests that are run anew."""
    phases = {phase: dict(earlier.get(phase, {})) for phase in ("outcomes", "repeated")}
    phases["complete"] = {"ours": earlier.get("complete", {})}
    late = {
        test
        for arms in phases.values()
        for answer in arms.values()
        for test, result in answer.items()
        if result.get("why", "").startswith(LATE)
    }

    return {
        phase: {
            arm: {test: result for test, result in arms.get(arm, {}).items() if test not in late}
            for arm in RUNNERS
        }
        for phase, arms in phases.items()
    }


def known_seconds(earlier: Mapping[str, Any]) -> dict[str, float]:
    """Take from a file's earlier row how long each test took, in the arm where it took longer."""
    seconds: dict[str, float] = {}
    for answer in earlier.get("outcomes", {}).values():
        for test, result in answer.items():
            seconds[test] = max(seconds.get(test, 0.0), float(result.get("seconds") or 0.0))
    return seconds


def earlier_run(path: Path | None, environment: Mapping[str, Any]) -> dict[str, Any]:
    """An earlier result's `files` by their names, and its `runs`, itself the last of them.

    Raises `SystemExit` where it is of another device or release than this run's.
    """
    if path is None:
        return {"files": {}, "runs": []}
    data = read_parts([path])[0]
    for key in ("device", "torch", "triton"):
        if data["environment"].get(key) != environment.get(key):
            here, there = environment.get(key), data["environment"].get(key)
            raise SystemExit(f"--continue wants a result of this {key}, {here!r}; {path.name} has {there!r}")
    result = {key: data["environment"].get(key) for key in ("date", "commit")} | {"options": data["options"]}
    return {
        "files": {row["file"]: row for row in data["raw"].get("files", [])},
        "runs": [*data["raw"].get("earlier_runs", []), result],
    }


def parse() -> argparse.Namespace:
    """The command line."""
    command_line = parser(__doc__)
    command_line.add_argument(
        "--tests", type=Path, required=True, help="a folder with the installed torch's files"
    )
    command_line.add_argument("--files", nargs="+", default=list(FILES))
    command_line.add_argument("--only", metavar="REGEX", help="found in the names of the tests to run")
    command_line.add_argument("--seconds", type=float, default=2400.0, help="for all files together")
    command_line.add_argument("--each", type=int, default=120, help="seconds that one test may take")
    command_line.add_argument("--processes", type=int, default=1, help="that run a file's tests at a time")
    command_line.add_argument(
        "--devices", nargs=2, metavar="GPU", help="of the plain arm and of ours; may be the same"
    )
    command_line.add_argument(
        "--continue", type=Path, dest="earlier", metavar="FILE", help="a result to go on from"
    )
    arguments = parse_arguments(command_line, on_host=True)
    if arguments.processes < 1:
        command_line.error(f"--processes must be at least 1, got {arguments.processes}")
    return arguments


def main() -> int:
    """Run, print, record."""
    arguments = parse()
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    version = importlib.metadata.version("torch")
    report = ResultFile(arguments, "PyTorch's own tests of max-autotune")
    earlier = earlier_run(arguments.earlier, report.data["environment"])
    for run in earlier["runs"]:
        report.add("earlier_runs", run)
    results: list[dict[str, Any]] = []
    for number, file in enumerate(arguments.files):
        left = arguments.seconds - sum(row["wall_s"] for row in results)
        begin = time.monotonic()
        share = left / (len(arguments.files) - number)

        def keep(row: dict[str, Any], begin: float = begin) -> None:
            row["wall_s"] = time.monotonic() - begin
            report.put("files", [*results, row])

        row = run_file(file, arguments, arguments.tests, share, earlier["files"].get(file, {}), keep)
        keep(row)
        results.append(row)
        say(f"{file}: {row['compared']} of {row['collected']} tests, passed {row['passed']}")
    print(table(results), flush=True)
    threads = int(os.environ["TORCHINDUCTOR_COMPILE_THREADS"])
    report.finish({"torch": version, "compile_threads": threads, **summary(results)})
    return 1 if report.data["summary"]["lost"] else 0


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what all files came to."""
    return {
        **{word: sum(row[word] for row in rows) for word in ("collected", "sampled", "compared")},
        **{w: {arm: sum(row[w][arm] for row in rows) for arm in RUNNERS} for w in ("passed", "skipped")},
        **{
            kind: [test for row in rows for test in row[kind]]
            for kind in ("lost", "left_out", "gained", "open")
        },
        "chance": sum(len(row["chance"]) for row in rows),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line per file, and one per test that differs."""
    lines = [f"{'file':32} {'tests':>6} {'ran':>6} {'passed':>15} {'skipped':>15} {'lost':>5} {'gained':>7}"]
    for row in rows:
        pairs = [f"{row[word]['plain']} / {row[word]['ours']}" for word in ("passed", "skipped")]
        numbers = f"{row['collected']:6} {row['compared']:6} {pairs[0]:>15} {pairs[1]:>15}"
        lines.append(f"{row['file']:32} {numbers} {len(row['lost']):5} {len(row['gained']):7}")
        for kind, arm in (("lost", "ours"), ("gained", "plain")):
            lines += [f"  {kind}: {t}: {row['repeated'][arm][t].get('why', '')[:160]}" for t in row[kind]]
        lines += [f"  passes with us once nothing is left out: {t}" for t in row["left_out"]]
        lines += [f"  differed, and was not run again: {t}" for t in row["open"]]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
