"""Claim: the own tests of packages with autotuned Triton kernels pass with this project as they pass without.

    python -m benchmarks.zoo.own_tests fetch --to FOLDER [--only NAMES]
    python -m benchmarks.zoo.own_tests run --from FOLDER --out FILE [--null] [--seconds 15] [--seed 0] [--only NAMES]
    python -m benchmarks.zoo.own_tests join PART ... --out FILE

`fetch` needs a network, git and pip: it packs the packages of `packages.toml` at their commits into one archive.
`run` needs none. A seeded sample of each package's tests is run by plain Triton until it has taken `--seconds`, and
the same tests then under `FORECAST_AUTOTUNE=1`, each arm in a process of its own with fresh caches and a fresh store,
and on the same cores. Several packages run at once, each on a share of the cores, so that both arms have equal
neighbours. A test that only plain Triton passes is run by both once more: it is lost if that happens again. Before, a
part of the time shows which tests of the sample tune five keys or more, without timing any config: these come first.

`--null` runs on a null device with torch on the CPU: kernels are compiled and not run, and what is compared are the
calls of kernels, by their arguments, and the exceptions.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.environment import ROOT
from benchmarks.lib.libraries.installation import PACKAGE_FOLDERS
from benchmarks.lib.result_files import ResultFile, read_parts, say
from benchmarks.lib.zoo.packages import Package, fetch, packages, unpack
from benchmarks.lib.zoo.suite import DIED

ARMS = ("plain", "ours")
_CORES = 4
"""Cores of a package while it runs."""
_START_S = 90.0
"""Seconds that a process may take beside its tests: imports, collection, one slow test."""
_RESTARTS = 3
_RICH = 5
"""Keys that a test tunes which says something about tuning."""
_COUNTING = 0.3
"""The share of a part's seconds in which keys are counted."""


def suite_command(package: Package, top: Path, home: Path, **given: Any) -> tuple[list[str], dict[str, str]]:
    """Arguments behind `python`, and variables, of a process that runs tests of a package.

    `top` is the folder that the archive is unpacked in, `home` an empty one for caches, and `given` the rest of what
    `benchmarks.lib.zoo.suite` takes: for one test `tests=[ID]`, `null` and `out`. To have it served, add the variable
    `FORECAST_AUTOTUNE=1`, or put `-m forecast_autotune run` before the arguments.
    """
    ours = [str(ROOT / folder) for folder in PACKAGE_FOLDERS]
    path = (*package.search_path(top), *ours, os.environ.get("PYTHONPATH", ""))
    variables = {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PYTHONUNBUFFERED": "1",
        "PYTHONHASHSEED": "0",  # some parameters of tests come out of sets
        "TRITON_CACHE_DIR": str(home / "binaries"),
        "TORCHINDUCTOR_CACHE_DIR": str(home / "inductor"),
        "FORECAST_AUTOTUNE_CACHE_DIR": str(home / "measurements"),
        "FLAGGEMS_CACHE_DIR": str(home / "flag_gems"),
        "XDG_CACHE_HOME": str(home),
        **package.environment,
    }
    text = json.dumps({"package": package.name, "top": str(top), **given})
    return ["-m", "benchmarks.lib.zoo.suite", text], variables


class Zoo:
    """One run: packages in lanes, lines of tests by package and arm."""

    def __init__(self, arguments: argparse.Namespace, top: Path, result: ResultFile) -> None:
        self.arguments, self.top, self.result = arguments, top, result
        self.lines: dict[str, dict[str, dict[str, Any]]] = {}
        self.errors: dict[str, str] = {}
        self.stop_at = time.monotonic() + arguments.limit
        self._mutex = threading.Lock()

    def run(self, wanted: Sequence[Package]) -> None:
        """Run all parts of all packages, the first part of each before the second of any."""
        parts = max(package.weight for package in wanted)
        jobs = [(package, i) for i in range(parts) for package in wanted if i < package.weight]
        cores = sorted(os.sched_getaffinity(0))
        size = 1 if self.arguments.null else _CORES
        shares = [cores[i : i + size] for i in range(0, len(cores), size)]

        def lane(share: list[int]) -> None:
            while True:
                with self._mutex:
                    if not jobs or time.monotonic() > self.stop_at - 20:
                        return
                    package, part = jobs.pop(0)
                self._part(package, part, share)

        lanes = [threading.Thread(target=lane, args=(share,)) for share in shares]
        for thread in lanes:
            thread.start()
        for thread in lanes:
            thread.join()

    def _part(self, package: Package, part: int, cores: list[int]) -> None:
        """One part of a package's sample, by both arms in turn."""
        sample = {"seed": self.arguments.seed, "part": part, "parts": package.weight}
        seconds = self.arguments.seconds * (1 - _COUNTING)
        counting = {**sample, "seconds": self.arguments.seconds * _COUNTING, "counts": True}
        counted = self._arm(package, "plain", cores, counting)
        rich = [name for name, line in counted.items() if line["keys"] >= _RICH]
        plain = self._arm(package, "plain", cores, {**sample, "seconds": seconds, "first": rich})
        ours = self._arm(package, "ours", cores, {**sample, "tests": list(plain)}) if plain else {}
        rows = {name: {"plain": line, "ours": ours.get(name)} for name, line in plain.items()}
        # Some tests are random, or read memory that no kernel of a null device wrote.
        unsure = [n for n, arms in rows.items() if _lost(arms) or (self.arguments.null and _unlike(arms))]
        for arm in ARMS if unsure and time.monotonic() < self.stop_at - 20 else ():
            for name, line in self._arm(package, arm, cores, {**sample, "tests": unsure}).items():
                rows[name][arm]["again"] = line
        with self._mutex:
            every = self.lines.setdefault(package.name, {})
            every |= rows
            summary = summarize(every, self.errors.get(package.name))
            self.result.put(package.name, [{"test": name, **arms} for name, arms in every.items()])
        say(f"{package.name} {part + 1}/{package.weight}: {json.dumps(summary)}")

    def _arm(
        self, package: Package, arm: str, cores: list[int], given: dict[str, Any]
    ) -> dict[str, dict[str, Any]]:
        """Lines by test; a process that dies is followed by another, for the tests behind the one it died of."""
        with tempfile.TemporaryDirectory(prefix="zoo-") as name:
            out = Path(name) / "lines.jsonl"
            given = {"out": str(out), "null": self.arguments.null, "cores": cores, **given}
            lines: dict[str, dict[str, Any]] = {}
            for _ in range(_RESTARTS):
                spent = sum(line["seconds"] for line in lines.values())
                left = given.get("seconds", self.arguments.seconds * 4) - spent
                if left <= 0:
                    break
                rest = {**given, "done": list(lines)} | ({"seconds": left} if "seconds" in given else {})
                code, tail = self._process(package, arm, Path(name), left + _START_S, rest)
                before = len(lines)
                for text in out.read_text(encoding="utf-8").splitlines() if out.exists() else ():
                    line = json.loads(text)
                    lines[line.pop("id")] = line
                if time.monotonic() > self.stop_at:
                    return {n: line for n, line in lines.items() if line["outcome"] != DIED}
                if code in (0, 1, 2) or len(lines) == before:  # pytest's own; nothing else to come
                    break
            if not lines and code:
                self.errors[package.name] = tail
                say(f"{package.name}, {arm}: no test ran, status {code}: {tail}")
            return lines

    def _process(
        self, package: Package, arm: str, home: Path, seconds: float, given: dict[str, Any]
    ) -> tuple[int, str]:
        """The exit status, and the end of the output, of one process; it and all it started end with the time."""
        words, variables = suite_command(package, self.top, home, **given)
        kept = {k: v for k, v in os.environ.items() if not k.startswith("FORECAST_AUTOTUNE")}
        kept |= variables | ({"FORECAST_AUTOTUNE": "1"} if arm == "ours" else {})
        if self.arguments.null:  # seconds are not compared there, and compiling takes most of them
            kept["TRITON_CACHE_DIR"] = str(self.top / "binaries")
            seconds *= 10
        seconds = min(seconds, self.stop_at - time.monotonic())
        log = home / "log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, *words],
                cwd=self.top / package.name,
                env=kept,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                code = process.wait(max(seconds, 1.0))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                code = process.wait() or -1
        text = log.read_text(encoding="utf-8", errors="replace")
        if self.arguments.logs is not None:
            self.arguments.logs.mkdir(parents=True, exist_ok=True)
            with (self.arguments.logs / f"{package.name}.{arm}.log").open("a", encoding="utf-8") as kept_log:
                kept_log.write(text)
        return code, " | ".join(text.strip().splitlines()[-3:])[-400:]


def _passed(line: dict[str, Any] | None) -> bool:
    return line is not None and line["outcome"] == "passed"


def summarize(rows: dict[str, dict[str, Any]], error: str | None = None) -> dict[str, Any]:
    """Figures of one package. Passed tests, seconds and calls are those of tests that both arms ran to the end."""
    both = [
        arms
        for arms in rows.values()
        if arms["ours"] is not None and DIED not in (arms["plain"]["outcome"], arms["ours"]["outcome"])
    ]
    lost = [name for name, arms in rows.items() if _lost(arms)]
    gained = [n for n, arms in rows.items() if not _passed(arms["plain"]) and _passed(arms["ours"])]
    result: dict[str, Any] = {
        "tests": len(rows),
        "unfinished": len(rows) - len(both),
        "skipped": sum(arms["plain"]["outcome"] == "skipped" for arms in rows.values()),
        "passed_plain": sum(_passed(arms["plain"]) for arms in both),
        "passed_ours": sum(_passed(arms["ours"]) for arms in both),
        "lost": lost,
        "gained": gained,
        "keys": sum(arms["plain"]["keys"] for arms in rows.values()),
        "tests_of_5_keys": sum(arms["plain"]["keys"] >= _RICH for arms in rows.values()),
        "seconds_plain": round(sum(arms["plain"]["seconds"] for arms in both), 1),
        "seconds_ours": round(sum(arms["ours"]["seconds"] for arms in both), 1),
        "calls": sum(arms["plain"]["calls"] for arms in both),
        "unlike": [name for name, arms in rows.items() if _unlike(arms)],
    }
    return result | ({"error": error} if error else {})


def _lost(arms: Mapping[str, Any]) -> bool:
    """Whether plain Triton alone passes, also where both did it again."""
    plain, ours = arms["plain"], arms["ours"]
    if ours is None or not _passed(plain) or _passed(ours):
        return False
    return _passed(plain.get("again", plain)) and not _passed(ours.get("again", ours))


def _unlike(arms: Mapping[str, Any]) -> bool:
    """Whether calls or exceptions differ, in a test whose own do not differ from run to run."""
    plain, ours = arms["plain"], arms["ours"]
    if ours is None or _signature(plain) == _signature(ours):
        return False
    return _signature(plain) == _signature(plain.get("again", plain)) != _signature(ours.get("again", ours))


def _signature(line: Mapping[str, Any]) -> tuple[str, Any]:
    return str(line["exception"]).partition(":")[0], line["calls_sha256"]


def join(parts: Sequence[dict[str, Any]], result: ResultFile) -> dict[str, dict[str, Any]]:
    """Put packages that were run apart into one result; the later run of a package counts. Returns summaries."""
    result.data |= {"environment": parts[-1]["environment"], "null": parts[-1]["null"]}
    for part in parts:
        for name, rows in part["raw"].items():
            result.put(name, rows)
    named = {n: {row["test"]: row for row in rows} for n, rows in result.data["raw"].items()}
    errors = {n: s["error"] for part in parts for n, s in part["summary"]["packages"].items() if "error" in s}
    return {n: summarize(named.get(n, {}), errors.get(n)) for n in packages() if n in named or n in errors}


def _parse() -> argparse.Namespace:
    command_line = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    steps = command_line.add_subparsers(dest="step", required=True)
    fetching = steps.add_parser("fetch")
    fetching.add_argument("--to", type=Path, required=True, help="the folder that gets the archive")
    running = steps.add_parser("run")
    running.add_argument("--from", dest="source", type=Path, required=True, help="the folder of `fetch`")
    running.add_argument("--out", type=Path, required=True, help="the result file (JSON)")
    running.add_argument("--null", action="store_true", help="no GPU: compile for a null device")
    running.add_argument(
        "--seconds", type=float, default=15.0, help="of tests in plain Triton, for each part"
    )
    running.add_argument("--limit", type=float, default=480.0, help="seconds of the whole run")
    running.add_argument("--seed", type=int, default=0)
    running.add_argument("--logs", type=Path, help="a folder for the output of the tests")
    for step in (fetching, running):
        step.add_argument("--only", nargs="*", default=[], help="names of packages")
    joining = steps.add_parser("join")
    joining.add_argument("parts", nargs="+", type=Path)
    joining.add_argument("--out", type=Path, required=True)
    return command_line.parse_args()


def _total(summary: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {"lost": sum(len(s["lost"]) for s in summary.values()), "packages": summary}


def main() -> int:
    """Fetch, run or print; a run ends with 1 if a test is lost."""
    arguments = _parse()
    if arguments.step == "join":
        parts = read_parts(arguments.parts)
        result = ResultFile(arguments, "zoo")
        summary = join(parts, result)
        result.finish(_total(summary))
        return 0
    wanted = list(packages(arguments.only).values())
    if arguments.step == "fetch":
        archive = fetch(arguments.to, wanted)
        say(f"{archive}: {archive.stat().st_size / 1e6:.1f} MB")
        return 0
    with tempfile.TemporaryDirectory(prefix="zoo-") as name:
        unpack(arguments.source, Path(name))
        zoo = Zoo(arguments, Path(name), ResultFile(arguments, "zoo", arguments.seed))
        zoo.run(wanted)
    summary = {p.name: summarize(zoo.lines.get(p.name, {}), zoo.errors.get(p.name)) for p in wanted}
    zoo.result.finish(_total(summary))
    return 1 if any(s["lost"] for s in summary.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
