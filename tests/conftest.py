"""Hooks for the whole suite: GPU tests need a GPU, `-m fast` imports no torch, skips need a reason.

A skip may hide that a test never runs anywhere. With `--strict-skips`, or `STRICT_SKIPS=1` in the environment,
a session fails if a test was skipped for anything but what `ALLOWED_SKIPS` lists: what no machine of the CI
can install. `.ci/run` asks for it.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# The first text that Hypothesis draws in a fresh clone takes a second, while it builds its table of
# characters, and more on a busy machine: no reason to fail.
_ANY_MACHINE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("whole", _ANY_MACHINE)
settings.register_profile("fast", _ANY_MACHINE, max_examples=20)
settings.load_profile("whole")

# Before any test loads torch, LightGBM or scikit-learn: on arrays as small as the tests' a second thread only
# gets in the way, of this process and, where the machine is busy, of others. Children inherit it.
for _name in ("OMP_NUM_THREADS", "LOKY_MAX_CPU_COUNT"):
    os.environ.setdefault(_name, "1")
# Else each process that asks Inductor with a fresh cache compiles probes of the processor, for nine seconds of a core.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# Set in many containers: each of some thousand processes would compile every module of ours anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # So it is behind `nohup ... &`, and children would inherit it: tests of Ctrl-C need it to work.
    signal.signal(signal.SIGINT, signal.default_int_handler)

ALLOWED_SKIPS = (
    # Hardware, and weights that are too large to fetch.
    r"needs a CUDA device",
    r"there is a device here",
    r"this machine (?:has one|knows its device)",  # a device
    r"FORECAST_AUTOTUNE_TEST_(?:WEIGHTS names no folder|VLLM names no python)",
    # What root and other users may do, and what a container's kernel allows.
    r"root may write everywhere",
    r"only root ",
    r"not root, or an interpreter that other users may not read",
    r"this machine allows no more than \w+",
    r"\w+ does not contain this, as its table says",
    r"level \w+ does not contain writes",
    # A package beside ours whose pins (numpy 1.26, among others) no environment of the CI can meet, and one that no
    # index has.
    r"needs the package flag_gems",
    # Run by itself once the extra is installed (.ci/run).
    r"needs the extra docs",
    # Another version than the one under test; the jobs of the CI cover the oldest and the newest.
    r".*\b(?:from|before) 3\.\d",  # a Triton's
    r"rendering without a device is put together for torch 2\.13",
)
"""Beginnings of the reasons, as regular expressions, for which a test may be skipped on a machine of the CI."""

_SKIP_REPORTS: list[tuple[str, str]] = []
"""(test or module, reason) of this session."""


_FAST_PATHS = (
    "core/",
    "harness/authors/test_external",
    "harness/targets/test_novelty",
    "test_architecture",
)
_LOADS_TORCH = re.compile(
    r"""^ *(?:\w+ = )?(?:import|from|pytest\.importorskip\(") ?(?:torch|triton|forecast_integrations\.triton)\b""",
    re.MULTILINE,
)
NOT_FAST = {
    # Seconds each, or `doctor`, which loads torch where it is installed.
    "core/commands/test_cli_numbers.py",
    "core/commands/test_cli_file_arguments.py",
    "core/commands/test_cli_full_disk.py",
    "core/commands/test_cli_hostile_text.py",
    "core/commands/test_cli_interruption.py",
    "core/commands/test_cli_missing_packages.py",
    "core/commands/test_cli_run.py",
    "core/commands/test_cli_streams.py",
    "core/records/test_table.py",
    "core/store/test_import_limits.py",
    "core/store/test_installed_advice.py",
    "core/store/test_store_damage.py",
    "core/store/test_store_torture.py",
    "core/store/test_tuner_files.py",
    "core/surrogates/test_calibration.py",
    "core/tuning/replays/test_odd_tables.py",
    "core/tuning/test_odd_environments.py",
    "core/tuning/test_compilations.py",
    "core/tuning/test_faults.py",
    "core/tuning/test_sources.py",
    "core/tuning/test_unmeasured_devices.py",
    "core/variants/test_variant_store.py",
    # An extra: jinja2, matplotlib, triton.
    "core/commands/test_cli_stores.py",
    "core/llm/test_ensemble.py",
    "core/llm/test_llm_surrogate.py",
    "core/llm/test_prompt.py",
    "core/llm/test_serving.py",
    "core/llm/test_trust.py",
    "core/report/test_report.py",
    "core/report/test_store_page_chromium.py",
    "core/store/test_remote_store.py",
    "core/telemetry/test_open_telemetry.py",
    "core/tuning/replays/test_replay.py",
}


LONGEST = (
    "docs/test_examples.py",
    "docs/test_blocks.py",
    "benchmarks/test_kernels.py",
    "harness/authors/test_triton_rewrites.py",
    "harness/trials/variants/test_variants.py",
    "harness/trials/test_kernels.py",
    "harness/commands/test_cli_variants.py",
    "harness/commands/test_cli_search.py",
    "harness/search/test_report_chromium.py",
    "harness/trials/test_packs.py",
    "harness/commands/test_bench.py",
    "train/commands/test_cli_training.py",
    "harness/sandbox/test_sandbox_faults.py",
    "train/surrogate/test_surrogate_calibrate.py",
    "integrations/triton/test_null_faults.py",
    "integrations/triton/test_rank_processes.py",
    "harness/sandbox/test_sandbox_large.py",
    "core/store/test_remote_store.py",
    "integrations/triton/test_warm.py",
    "integrations/tilelang/test_kernel.py",
    "harness/sandbox/test_sandbox_parts.py",
)
"""Modules of ten seconds and more. They are begun first, so that no process of `-n` is alone with one at the end."""


@cache
def is_fast(module: Path) -> bool:
    """Whether all of a module belongs to the fast suite: one that needs no torch, and is not left out above."""
    folder = Path(__file__).parent
    name = module.relative_to(folder).as_posix() if module.is_relative_to(folder) else ""
    if not name.startswith(_FAST_PATHS) or name in NOT_FAST:
        return False
    return not _LOADS_TORCH.search(module.read_text(encoding="utf-8"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--strict-skips`."""
    parser.addoption(
        "--strict-skips",
        action="store_true",
        default=os.environ.get("STRICT_SKIPS", "") not in ("", "0"),
        help="fail if a test is skipped for a reason that ALLOWED_SKIPS in tests/conftest.py does not list",
    )


def pytest_configure(config: pytest.Config) -> None:
    """With `-m fast`, draw fewer examples. With xdist, keep the order below: its own counts tests, not seconds."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False
    if config.option.markexpr == "fast":
        settings.load_profile("fast")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m fast`, import fast modules alone, and the conftest of no other folder: they load torch."""
    if config.option.markexpr != "fast":
        return None
    if collection_path.is_dir():
        return None if any(map(is_fast, collection_path.rglob("test_*.py"))) else True
    return None if not collection_path.name.startswith("test_") or is_fast(collection_path) else True


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note why a test was skipped; with xdist, called for the workers' reports, too."""
    if report.skipped and not hasattr(report, "wasxfail"):
        _SKIP_REPORTS.append((report.nodeid, skip_reason(report)))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """The same for a module."""
    if report.skipped:
        _SKIP_REPORTS.append((report.nodeid, skip_reason(report)))


def skip_reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why something was skipped."""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return str(text).removeprefix("Skipped: ")


def unexplained_skips() -> dict[str, list[str]]:
    """Tests by a reason for which they may not be skipped."""
    found: dict[str, list[str]] = {}
    for name, reason in _SKIP_REPORTS:
        if not any(re.match(allowed, reason) for allowed in ALLOWED_SKIPS):
            found.setdefault(reason, []).append(name)
    return found


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail for skips that have no allowed reason."""
    if exitstatus == pytest.ExitCode.OK and session.config.option.strict_skips and unexplained_skips():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say which skips fail the session, and what would help."""
    if not config.option.strict_skips or not (found := unexplained_skips()):
        return
    terminalreporter.section("skips without an allowed reason", red=True)
    for reason, names in found.items():
        terminalreporter.line(f"{len(names)} x {reason}: {names[0]}")
    terminalreporter.line("Install what they need, or list the reason in ALLOWED_SKIPS in tests/conftest.py.")


def sort_by_cost(items: list[pytest.Item]) -> None:
    """Put the longest modules first, and then those of many tests; a module's tests stay together, in order."""
    tests = Counter(item.path for item in items)
    ranks = {Path(__file__).parent / name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (ranks.get(item.path, len(ranks)), -tests[item.path], str(item.path)))


def mark_beyond_samples(items: list[pytest.Item]) -> None:
    """Mark as `slow` what a test marked `sampled(n)` has beyond `n` cases, evenly spread over its list."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled"):
            cases.setdefault(item.nodeid.split("[")[0], []).append(item)
    for found in cases.values():
        marker = found[0].get_closest_marker("sampled")
        assert marker is not None
        kept = {(2 * n + 1) * len(found) // (2 * marker.args[0]) for n in range(marker.args[0])}
        for index, item in enumerate(found):
            if index not in kept:
                item.add_marker("slow")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by cost; mark suites; skip tests marked `gpu` without CUDA, and load torch only for them."""
    mark_beyond_samples(items)
    sort_by_cost(items)
    for item in items:
        if is_fast(item.path) and not item.get_closest_marker("slow"):
            item.add_marker("fast")
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Leave what was collected, a million objects, out of every later garbage collection: a fifth of the seconds."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """`forecast-autotune run` sets variables for the program it runs; no later test may see them."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _triton_as_it_was() -> Iterator[None]:
    """Calls are captured, and kernels served, from one place on; no later test may launch through it."""
    jit = sys.modules.get("triton.runtime.jit")
    before = jit.JITFunction.run if jit else None
    yield
    if jit and jit.JITFunction.run is not before:
        jit.JITFunction.run = before


@pytest.fixture(autouse=True)
def _free_locks() -> Iterator[None]:
    """A lock of `logging` that this thread keeps holds up other threads, of all later tests of the process."""
    yield
    assert not logging._lock._is_owned()  # type: ignore[attr-defined]
