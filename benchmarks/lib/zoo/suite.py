"""The process of one arm: some tests of one package under pytest, a JSON line for each.

    python -m benchmarks.lib.zoo.suite JSON                              # triton.autotune itself
    FORECAST_AUTOTUNE=1 python -m benchmarks.lib.zoo.suite JSON          # served by this project

JSON is an object: `package` (a name of `packages.toml`), `top` (the folder that the archive is unpacked in), `out` (a
file of JSON lines), `null` (no GPU: the null device), and `tests` (ids, run in this order) or `seconds`, `seed` and
`part` (the sample is drawn, `part` of `parts`, and no test starts once it has taken `seconds`). `done` are ids that an
earlier process of this arm has run; `cores` are those it may use; `first` are ids that precede the others of a
sample. With `counts`, tuners take their first config untimed: keys are counted in a part of the time. A line has the
test's id, outcome, exception, seconds, the keys that its tuners decided, and the calls of its kernels.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import pkgutil
import random
import runpy
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib.zoo.packages import Package, packages

DIED = "died"
"""The outcome of a test that its process did not live through."""
_LIMIT_FILES = 40
"""Test files that are imported for one part of a sample: a package may have hundreds."""
_FATAL = ("CUDA error", "illegal memory access", "device-side assert", "unspecified launch failure")
"""After these, the process has no working device; see `benchmarks.zoo.own_tests`."""
_NULL_CONFIGS = 2
_COMPARISONS = (
    "assert_close",
    "assert_allclose",
    "gems_assert",
    "assert_verbose",
    "assert_diff",
    "compare_tensors",
)
"""Beginnings of the names of functions that compare results; nothing was computed on the null device."""


class Suite:
    """The plugin: draws the sample, times tests, writes lines."""

    def __init__(self, given: dict[str, Any], package: Package) -> None:
        self.given, self.package = given, package
        self.scripts = {p for glob in package.scripts for p in _folder(given, package).glob(glob)}
        self.scripts -= {p for glob in package.tests for p in _folder(given, package).glob(glob)}
        self.used = 0.0
        self.line: dict[str, Any] = {}
        self.keys = Keys()
        self.calls = Calls()
        self._out = Path(given["out"])

    def pytest_pycollect_makemodule(self, module_path: Path, parent: Any) -> Any:
        """A program is one test: importing it would already run it."""
        return Program.from_parent(parent, path=module_path) if module_path in self.scripts else None

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Keep the sample, in its order: a test of each file in turn."""
        if (wanted := self.given.get("tests")) is not None:
            by_id = {item.nodeid: item for item in items}
            items[:] = [by_id[name] for name in wanted if name in by_id]
        else:
            first = {name: place for place, name in enumerate(self.given.get("first", ()))}
            items[:] = _in_turns(items, self.given["seed"])
            items.sort(key=lambda item: first.get(item.nodeid, len(first)))
        items[:] = [item for item in items if item.nodeid not in self.given.get("done", ())]
        if self.given["null"]:
            for module in {item.module for item in items if hasattr(item, "module")}:
                for name in [n for n in vars(module) if n.startswith(_COMPARISONS)]:
                    setattr(module, name, lambda *_, **__: None)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
        """Time a test, and write its line."""
        self.keys.count, self.calls.made = 0, []
        self.line = {"id": item.nodeid, "outcome": DIED, "exception": None, "seconds": 0.0}
        self._write()  # the last word on this test where the process dies of it
        self.line["outcome"] = "passed"
        _seed_all(self.given.get("seed", 0))  # the arms import other files, some of which draw numbers
        start = time.perf_counter()
        yield
        self.line["seconds"] = round(time.perf_counter() - start, 3)
        self.used += self.line["seconds"]
        self._write()
        if self.used >= self.given.get("seconds", float("inf")):
            item.session.shouldstop = "the time of the sample is up"

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Iterator[None]:
        """Take the outcome of a part of a test: its own failure before that of its clean-up."""
        report = (yield).get_result()  # type: ignore[misc]
        if self.line["outcome"] != "passed":
            return
        if call.excinfo is not None and not report.passed:
            error = call.excinfo.value
            self.line["outcome"] = "skipped" if report.skipped else "failed"
            self.line["exception"] = f"{type(error).__name__}: {error}".strip()[:300]

    def _write(self) -> None:
        made = self.calls.made
        line: dict[str, Any] = {**self.line, "keys": self.keys.count, "calls": len(made)}
        line["calls_sha256"] = hashlib.sha256("\n".join(made).encode()).hexdigest()
        if os.environ.get("ZOO_CALLS"):
            line["made"] = made
        with self._out.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(line) + "\n")
        if not self.given["null"] and any(text in str(line["exception"]) for text in _FATAL):
            os._exit(3)


class Program(pytest.Module):
    """A file that is run as `python FILE`, without its benchmarks."""

    def collect(self) -> Iterator[Any]:
        """One test."""
        yield Run.from_parent(self, name="main")


class Run(pytest.Item):
    """The run of a program."""

    def runtest(self) -> None:
        """Run it. Raises what it raises."""
        import triton.testing

        triton.testing.Mark.run = lambda *_, **__: None
        sys.argv = [str(self.path)]
        with contextlib.suppress(SystemExit):
            runpy.run_path(str(self.path), run_name="__main__")


class Keys:
    """The keys that tuners decide by timing: of Triton's own, where it is not replaced."""

    def __init__(self) -> None:
        self.count = 0
        self._last: Any = None

    def watch_triton(self, counts: bool) -> None:
        """Count the calls that time configs; Triton makes new `nargs` for each. With `counts`, none are timed."""
        from triton.runtime.autotuner import Autotuner

        bench = Autotuner._bench

        @functools.wraps(bench)
        def counted(tuner: Any, *args: Any, **options: Any) -> Any:
            if tuner.nargs is not self._last:
                self._last = tuner.nargs
                self.count += 1
            return [1.0, 1.0, 1.0] if counts else bench(tuner, *args, **options)

        Autotuner._bench = counted

    def watch_ours(self) -> None:
        """Count our decisions."""
        from forecast_integrations.triton.publication import LISTENERS

        def add(kernel: str, decision: Any) -> None:
            self.count += 1

        LISTENERS.append(add)


class Calls:
    """The calls of kernels as the package makes them: `kernel[grid](...)`, with what they end."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def watch(self) -> None:
        """Record every call from now on."""
        from triton.runtime.jit import KernelInterface

        getitem = KernelInterface.__getitem__

        @functools.wraps(getitem)
        def watched(kernel: Any, grid: Any) -> Any:
            launch = getitem(kernel, grid)

            def call(*args: Any, **named: Any) -> Any:
                text = [
                    _text(grid),
                    *map(_text, args),
                    *(f"{k}={_text(v)}" for k, v in sorted(named.items())),
                ]
                self.made.append(f"{_name(kernel)}[{', '.join(text)}]")
                try:
                    return launch(*args, **named)
                except BaseException as error:
                    self.made[-1] += f" {type(error).__name__}"
                    raise

            return call

        KernelInterface.__getitem__ = watched


def _seed_all(seed: int) -> None:
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def _shorten_lists() -> None:
    """Leave every tuner a few of its configs: compiling them takes the time of a run without a GPU."""
    from triton.runtime.autotuner import Autotuner

    init = Autotuner.__init__

    @functools.wraps(init)
    def shortened(tuner: Any, *args: Any, **options: Any) -> None:
        init(tuner, *args, **options)
        tuner.configs = tuner.configs[:_NULL_CONFIGS]

    Autotuner.__init__ = shortened  # type: ignore[method-assign]


def _name(kernel: Any) -> str:
    while not hasattr(kernel, "__name__") and hasattr(kernel, "fn"):
        kernel = kernel.fn
    return str(getattr(kernel, "__name__", type(kernel).__name__))


def _text(value: Any) -> str:
    """An argument without its contents."""
    if hasattr(value, "stride") and hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}{list(value.stride())}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_text, value))})"
    return repr(value) if isinstance(value, (int, float, str, type(None))) else type(value).__name__


def _in_turns(items: list[Any], seed: int) -> list[Any]:
    """A seeded order in which the functions of all files take turns."""
    random.Random(seed).shuffle(items)
    turns: dict[str, int] = {}
    place: dict[int, tuple[int, int]] = {}
    for i, item in enumerate(items):
        function = item.nodeid.partition("[")[0]
        place[id(item)] = (turns.setdefault(function, 0), i)
        turns[function] += 1
    return sorted(items, key=lambda item: place[id(item)])


def _folder(given: dict[str, Any], package: Package) -> Path:
    return (Path(given["top"]) / package.name).resolve()


def _files(given: dict[str, Any], package: Package) -> list[str]:
    folder = _folder(given, package)
    if (tests := given.get("tests")) is not None:
        return sorted({str(folder / test.partition("::")[0]) for test in tests})
    files = [str(path) for path in package.test_files(Path(given["top"]).resolve())]
    random.Random(given["seed"]).shuffle(files)
    if len(files) < given["parts"]:
        return files
    return files[given["part"] :: given["parts"]][:_LIMIT_FILES]


def main(given: dict[str, Any]) -> int:
    """Run pytest; returns its exit status."""
    if cores := given.get("cores"):
        os.sched_setaffinity(0, cores)
    package = packages([given["package"]])[given["package"]]
    ours = os.environ.get("FORECAST_AUTOTUNE") == "1"
    if ours:
        from forecast_autotune import activate

        activate.install()  # where the package is not installed, nothing did it when Python started
    import triton.runtime.autotuner  # noqa: F401

    from benchmarks.lib.zoo.stand_ins import cuda_on_cpu, import_without

    import_without(package.bare, package.stand_ins)
    if given["null"]:
        _shorten_lists()
    suite = Suite(given, package)
    with cuda_on_cpu() if given["null"] else contextlib.nullcontext():
        suite.keys.watch_ours() if ours else suite.keys.watch_triton(bool(given.get("counts")))
        suite.calls.watch()
        for place, value in package.null.items() if given["null"] else ():
            owner, _, name = place.rpartition(".")
            setattr(pkgutil.resolve_name(owner), name, value)
        folder = str(_folder(given, package))
        options = ["-q", "-p", "no:cacheprovider", "-W", "ignore", "--tb=no"]
        options += ["-c", os.devnull, "--rootdir", folder, "--continue-on-collection-errors"]
        return int(pytest.main([*options, *_files(given, package)], plugins=[suite]))


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
