"""Runs files of PyTorch's own tests, as torch comes or with us, and tells the outcome of every test."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.lib.processes.child_processes import child_environment

RUNNERS = {"plain": ["-m", "pytest"], "ours": ["-m", "forecast_autotune", "run", "-m", "pytest"]}
"""What an interpreter is given, by arm."""
LATE = "not done after"
"""What is said of a test that took too long, and its process with it."""
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
    """Where all test processes note what builds; it goes with this process."""
    return tempfile.TemporaryDirectory(ignore_cleanup_errors=True)


class TestRun:
    """One arm's runs of test files, in a folder of their own."""

    __test__ = False

    def __init__(
        self,
        arm: str,
        tests: Path,
        python: str,
        each_s: int,
        processes: int = 1,
        device: str | None = None,
        cores: Collection[int] | None = None,
    ) -> None:
        self.arm, self.tests, self.python, self.each_s = arm, tests, python, each_s
        self.processes, self.cores = processes, cores
        self.ready_s: list[float] = []
        """Of each process: seconds until its first test."""
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
        found: dict[str, dict[str, Any]] = {}
        while (left := [t for t in wanted if t not in found]) and (seconds := until - time.monotonic()) > 1:
            *lines, end = self._pytest(name, left, [], seconds)
            began = {line["test"] for line in lines if line.get("outcome") == "began"}
            for line in lines:
                if line.get("outcome") in ("passed", "skipped", "failed"):
                    found[line["test"]] = {**line, "why": without_folders(line["why"])}
            if time.monotonic() >= until:
                break
            for test in began - set(found):
                found[test] = {"test": test, "outcome": "died", "why": "its process ended", "seconds": None}
            if not began:
                raise RuntimeError(f"{name} began no test under {self.arm}:\n{end['log']}")
        return found

    def _pytest(
        self, name: str, wanted: Sequence[str] | None, options: Iterable[str], seconds: float
    ) -> list[Any]:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as root:
            folder = Path(root)
            for path in self.tests.glob("*.py"):
                shutil.copy(path, folder)
            (folder / "conftest.py").write_text(_CONFTEST, encoding="utf-8")
            said = folder / "outcomes.jsonl"
            more = {"TEST_OUTCOMES": str(said), "TEST_SECONDS": str(self.each_s)}
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
                [self.python, *RUNNERS[self.arm], *fixed],
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
            lines = said.read_text(encoding="utf-8").splitlines() if said.exists() else []
            told = list(map(json.loads, lines))
            self.ready_s += [line["ready_s"] for line in told if "ready_s" in line]
            return [*told, {"status": process.returncode, "log": log[-2000:]}]


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
