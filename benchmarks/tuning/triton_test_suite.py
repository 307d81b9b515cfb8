"""Claim: Triton's own tests of its autotuner pass under `forecast-autotune run` as they pass without.

    python -m benchmarks.tuning.triton_test_suite --out benchmarks/results/triton_tests.json

Runs the installed Triton's `test_autotuner.py` twice, each time in a process of its own with empty caches: under
plain pytest, and under `forecast-autotune run -m pytest`. Prints a table of both, and ends with 1 if a test passes
without us alone. The file is fetched from Triton's repository, of the release installed (`--tests FILE` where
there is no network); it is not kept. `--null` runs it on a null device: nothing is computed there and no
result compared, while what is called, cached and printed is as on a device.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from benchmarks.lib.result_files import ResultFile, parse_arguments, parser, say

_SOURCE = "https://raw.githubusercontent.com/triton-lang/triton/v{version}/python/test/unit/runtime/test_autotuner.py"
_CONFTEST = """
import os
import pytest

if os.environ.get("NULL_DEVICE"):
    import torch
    import triton
    import triton.testing
    from forecast_integrations.triton.null_device import null_device

    active = null_device()
    active.__enter__()  # for as long as the process lives: what is skipped is decided at collection
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    # What else a test asks for is looked at although nothing was computed.
    torch.testing.assert_close = triton.testing.assert_close = lambda *values, **options: None

@pytest.fixture
def device():
    return "cpu" if os.environ.get("NULL_DEVICE") else "cuda"

@pytest.fixture
def fresh_knobs():
    from triton._internal_testing import _fresh_knobs_impl
    fresh, reset = _fresh_knobs_impl()
    try:
        yield fresh()
    finally:
        reset()
"""
"""What Triton's tests ask for; its own file has the same fixtures, and many more."""

RUNNERS = {
    "triton": [sys.executable, "-m", "pytest"],
    "forecast": [sys.executable, "-m", "forecast_autotune", "run", "-m", "pytest"],
}
"""Command lines by the name of who tunes."""
_TIMEOUT_S = 400


def outcomes_of(report: Path) -> dict[str, str]:
    """Outcome by test, of a JUnit report: `passed`, `skipped: WHY`, or `failed: WHY`."""
    found: dict[str, str] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        outcome = "passed"
        for kind, word in (("skipped", "skipped"), ("failure", "failed"), ("error", "failed")):
            if (node := case.find(kind)) is not None:
                first = (node.get("message") or "").strip().splitlines()
                outcome = f"{word}: {first[0][:160] if first else ''}"
        found[str(case.get("name"))] = outcome
    return found


def run_suite(tests: Path, runner: str, null: bool) -> dict[str, str]:
    """Outcomes by test under one runner. Raises `RuntimeError` where pytest could not report."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "test_autotuner.py").write_text(tests.read_text(encoding="utf-8"), encoding="utf-8")
        (folder / "conftest.py").write_text(_CONFTEST, encoding="utf-8")
        caches = {
            "TRITON_CACHE_DIR": str(folder / "binaries"),
            "FORECAST_AUTOTUNE_CACHE_DIR": str(folder / "measurements"),
            "NULL_DEVICE": "1" if null else "",
        }
        kept = {k: v for k, v in os.environ.items() if not k.startswith("FORECAST_AUTOTUNE")}
        report = folder / "report.xml"
        options = ["-q", "-p", "no:cacheprovider", f"--rootdir={folder}", f"--junitxml={report}"]
        done = subprocess.run(
            [*RUNNERS[runner], *options, "test_autotuner.py"],
            cwd=folder,
            env={**kept, **caches},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        if done.returncode not in (0, 1) or not report.exists():  # neither all passed nor some failed
            said = (done.stdout + done.stderr)[-2000:]
            raise RuntimeError(f"pytest ended with {done.returncode} under {runner}:\n{said}")
        return outcomes_of(report)


def table(outcomes: dict[str, dict[str, str]]) -> list[str]:
    """Lines of a table: a test, and its outcome under each runner."""
    names = list(dict.fromkeys(name for found in outcomes.values() for name in found))
    width = max(map(len, names), default=4)
    lines = [f"{'test':{width}}  " + "  ".join(f"{runner:8}" for runner in outcomes)]
    for name in names:
        words = [found.get(name, "missing").split(":")[0] for found in outcomes.values()]
        lines.append(f"{name:{width}}  " + "  ".join(f"{word:8}" for word in words))
    return lines


def fetch_tests(version: str, folder: Path) -> Path:
    """Triton's tests of that release. Raises `OSError` where they cannot be had."""
    release = re.match(r"\d+\.\d+\.\d+", version)
    if release is None:
        raise OSError(f"Triton {version!r} is no release: give its tests by --tests FILE")
    path = folder / "test_autotuner.py"
    with urllib.request.urlopen(_SOURCE.format(version=release[0]), timeout=30) as answer:
        path.write_bytes(answer.read())
    return path


def parse() -> argparse.Namespace:
    """The command line."""
    made = parser(__doc__)
    made.add_argument(
        "--tests", type=Path, help="the installed Triton's test_autotuner.py (default: fetched)"
    )
    return parse_arguments(made)


def main() -> int:
    """Run, print, record."""
    arguments = parse()
    import triton

    result = ResultFile(arguments, "triton-test-suite")
    with tempfile.TemporaryDirectory() as name:
        tests = arguments.tests or fetch_tests(triton.__version__, Path(name))
        outcomes: dict[str, dict[str, str]] = {}
        for runner in RUNNERS:
            outcomes[runner] = run_suite(tests, runner, arguments.null)
            say(f"{runner}: {sum(o == 'passed' for o in outcomes[runner].values())} passed")
            result.add(runner, outcomes[runner])
    print("\n".join(table(outcomes)), flush=True)
    plain, ours = outcomes["triton"], outcomes["forecast"]
    lost = [name for name, outcome in plain.items() if outcome == "passed" and ours.get(name) != "passed"]
    for test in lost:
        print(f"{test}: {ours.get(test, 'missing')}", flush=True)
    result.finish(
        {
            "triton": triton.__version__,
            "tests": len(plain),
            "passed_plain": sum(o == "passed" for o in plain.values()),
            "passed_ours": sum(o == "passed" for o in ours.values()),
            "lost": lost,
        }
    )
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
