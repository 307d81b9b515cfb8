"""Claim: Triton's own tests of its autotuner pass under `forecast-autotune run` as they pass without.

    python -m benchmarks.tuning.triton_test_suite --out benchmarks/results/triton_tests.json
    python -m benchmarks.tuning.triton_test_suite --out FILE --tests FOLDER --tritons FOLDER [--null]

Runs Triton's `test_autotuner.py`, and from 3.8 on `test_autotune_listener.py`, twice, each time in a process of its own
with empty caches: under plain pytest, and under `forecast-autotune run -m pytest`. Prints a table of both, and ends
with 1 if a test passes without us alone. The files are fetched from Triton's repository, of the release installed; they
are not kept. Where there is no network, `--tests` is a file, or a folder that has them, or has a folder of them for
each release (`3.6/test_autotuner.py`). `--tritons` holds other releases, each put into a folder of its own by
`pip install --no-deps --target FOLDER/3.6.0 triton==3.6.0`: all of them are run instead of the one installed.
`--null` runs on a null device: nothing is computed there and no result compared, while what is called, cached and
printed is as on a device.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.result_files import ResultFile, parse_arguments, parser, say

_SOURCE = "https://raw.githubusercontent.com/triton-lang/triton/v{version}/python/test/unit/runtime/{name}"
_FILES = ("test_autotuner.py", "test_autotune_listener.py")
"""The second has been there since 3.8."""
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
    import triton._internal_testing  # asks for the device, and for what it can do
    triton._internal_testing.is_cuda = lambda: True  # from 3.9 on it asks torch, not the driver
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

@pytest.fixture
def fresh_triton_cache(tmp_path):
    from triton import knobs
    with knobs.cache.scope(), knobs.runtime.scope():
        knobs.cache.dir = str(tmp_path)
        yield str(tmp_path)
"""
"""Fixtures of Triton's tests; its own file has the same ones, and many more."""

RUNNERS = {
    "triton": [sys.executable, "-m", "pytest"],
    "forecast": [sys.executable, "-m", "forecast_autotune", "run", "-m", "pytest"],
}
"""Command lines by the name of who tunes."""
_TIMEOUT_S = 400


def outcomes_of(report: Path) -> dict[str, str]:
    """Outcome by test, of a JUnit report: `passed`, `skipped: WHY`, or `failed: WHY`."""
    result: dict[str, str] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        outcome = "passed"
        for kind, word in (("skipped", "skipped"), ("failure", "failed"), ("error", "failed")):
            if (node := case.find(kind)) is not None:
                first = (node.get("message") or "").strip().splitlines()
                outcome = f"{word}: {first[0][:160] if first else ''}"
        result[str(case.get("name"))] = outcome
    return result


def run_suite(tests: Sequence[Path], runner: str, null: bool, site: Path | None = None) -> dict[str, str]:
    """Outcomes by test under one runner, with the Triton of `site`; without, with the one installed.

    Raises `RuntimeError` where pytest could not report.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path in tests:
            (folder / path.name).write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
        (folder / "conftest.py").write_text(_CONFTEST, encoding="utf-8")
        caches = {
            "TRITON_CACHE_DIR": str(folder / "binaries"),
            "FORECAST_AUTOTUNE_CACHE_DIR": str(folder / "measurements"),
            "NULL_DEVICE": "1" if null else "",
        }
        kept = {k: v for k, v in os.environ.items() if not k.startswith("FORECAST_AUTOTUNE")}
        if site is not None:
            caches["PYTHONPATH"] = os.pathsep.join(filter(None, (str(site), kept.get("PYTHONPATH"))))
        report = folder / "report.xml"
        options = ["-q", "-p", "no:cacheprovider", f"--rootdir={folder}", f"--junitxml={report}"]
        done = subprocess.run(
            [*RUNNERS[runner], *options, *(path.name for path in tests)],
            cwd=folder,
            env={**kept, **caches},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        if done.returncode not in (0, 1) or not report.exists():  # neither all passed nor some failed
            text = (done.stdout + done.stderr)[-2000:]
            raise RuntimeError(f"pytest ended with {done.returncode} under {runner}:\n{text}")
        return outcomes_of(report)


def table(outcomes: dict[str, dict[str, str]]) -> list[str]:
    """Lines of a table: a test, and its outcome under each runner."""
    names = list(dict.fromkeys(name for result in outcomes.values() for name in result))
    width = max(map(len, names), default=4)
    lines = [f"{'test':{width}}  " + "  ".join(f"{runner:8}" for runner in outcomes)]
    for name in names:
        words = [result.get(name, "missing").split(":")[0] for result in outcomes.values()]
        lines.append(f"{name:{width}}  " + "  ".join(f"{word:8}" for word in words))
    return lines


def release_of(version: str) -> str:
    """`3.6.0` of `3.6.0+cu130`. Raises `OSError` where it is none: nobody knows its tests."""
    release = re.match(r"\d+\.\d+\.\d+", version)
    if release is None:
        raise OSError(f"Triton {version!r} is no release: give its tests by --tests FILE")
    return release[0]


def find_tests(given: Path | None, version: str, scratch: Path) -> list[Path]:
    """The test files of a release: those `given`, or fetched. Raises `OSError` where they cannot be had."""
    if given is None:
        return _fetch_tests(release_of(version), scratch)
    if given.is_file():
        return [given]
    own = given / release_of(version).rpartition(".")[0]
    folder = own if own.is_dir() else given
    if not (results := [folder / name for name in _FILES if (folder / name).is_file()]):
        raise OSError(f"none of {', '.join(_FILES)} is in {folder}")
    return results


def _fetch_tests(release: str, folder: Path) -> list[Path]:
    results = []
    for name in _FILES:
        try:
            with urllib.request.urlopen(_SOURCE.format(version=release, name=name), timeout=30) as answer:
                (folder / name).write_bytes(answer.read())
        except urllib.error.HTTPError as error:
            if error.code != 404 or not results:  # an older release lacks the second
                raise
        else:
            results.append(folder / name)
    return results


def installed_tritons(folder: Path | None) -> dict[str, Path | None]:
    """By version, the folder to import Triton from; None where that is the one installed."""
    if folder is None:
        import triton

        return {triton.__version__: None}
    result = {
        path.name[len("triton-") : -len(".dist-info")]: path.parent
        for path in folder.glob("*/triton-*.dist-info")
    }
    if not result:
        raise OSError(f"no folder in {folder} holds a Triton")
    return dict(sorted(result.items()))


def compare_runners(outcomes: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """Counts of one release, and the tests that pass without us alone."""
    plain, ours = outcomes["triton"], outcomes["forecast"]
    return {
        "tests": len(plain),
        "skipped": sum(outcome.startswith("skipped") for outcome in plain.values()),
        "passed_plain": sum(outcome == "passed" for outcome in plain.values()),
        "passed_ours": sum(outcome == "passed" for outcome in ours.values()),
        "lost": [
            name for name, outcome in plain.items() if outcome == "passed" and ours.get(name) != "passed"
        ],
    }


def parse() -> argparse.Namespace:
    """The command line."""
    command_line = parser(__doc__)
    command_line.add_argument(
        "--tests", type=Path, help="Triton's test file, or a folder of them (default: fetched)"
    )
    command_line.add_argument(
        "--tritons", type=Path, help="a folder of releases (default: the one installed)"
    )
    return parse_arguments(command_line)


def main() -> int:
    """Run, print, record."""
    arguments = parse()
    result = ResultFile(arguments, "triton-test-suite")
    releases: dict[str, Any] = {}
    for version, site in installed_tritons(arguments.tritons).items():
        outcomes: dict[str, dict[str, str]] = {}
        with tempfile.TemporaryDirectory() as name:
            tests = find_tests(arguments.tests, version, Path(name))
            for runner in RUNNERS:
                outcomes[runner] = run_suite(tests, runner, arguments.null, site)
                say(f"Triton {version}, {runner}: {list(outcomes[runner].values()).count('passed')} passed")
        result.add(version, outcomes)
        releases[version] = compare_runners(outcomes)
        print("\n".join(table(outcomes)), flush=True)
        for test in releases[version]["lost"]:
            print(f"{test}: {outcomes['forecast'].get(test, 'missing')}", flush=True)
    result.finish(
        {
            "releases": releases,
            "tests": sum(r["tests"] for r in releases.values()),
            "passed_plain": sum(r["passed_plain"] for r in releases.values()),
            "lost": sum(len(r["lost"]) for r in releases.values()),
        }
    )
    return 1 if any(r["lost"] for r in releases.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
