"""Some own tests of one package under pytest, in a process of its own, served by this project.

    FORECAST_AUTOTUNE=1 python -m benchmarks.lib.zoo.suite JSON

JSON is an object: `package` (a name of `packages.toml`), `top` (the folder that the archive is unpacked in), `null` (no
GPU: the null device), `seconds`, `seed`, `part` and `parts` (the sample is drawn, `part` of `parts`, and no test starts
once it has taken `seconds`), and `cores` (those that it may use).
"""

from __future__ import annotations

import contextlib
import functools
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

_LIMIT_FILES = 40
"""Test files that are imported for one part of a sample: a package may have hundreds."""
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
    """The plugin: draws the sample, and ends it when its time is up."""

    def __init__(self, given: dict[str, Any], package: Package) -> None:
        self.given, self.used = given, 0.0
        self.scripts = {p for glob in package.scripts for p in _folder(given, package).glob(glob)}
        self.scripts -= {p for glob in package.tests for p in _folder(given, package).glob(glob)}

    def pytest_pycollect_makemodule(self, module_path: Path, parent: Any) -> Any:
        """A program is one test: importing it would already run it."""
        return Program.from_parent(parent, path=module_path) if module_path in self.scripts else None

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Put the sample in its order: a test of each file in turn."""
        items[:] = _in_turns(items, self.given["seed"])
        if self.given["null"]:
            for module in {item.module for item in items if hasattr(item, "module")}:
                for name in [n for n in vars(module) if n.startswith(_COMPARISONS)]:
                    setattr(module, name, lambda *_, **__: None)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
        """Time a test."""
        _seed_all(self.given["seed"])
        start = time.perf_counter()
        yield
        self.used += time.perf_counter() - start
        if self.used >= self.given["seconds"]:
            item.session.shouldstop = "the time of the sample is up"


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
    files = [str(path) for path in package.test_files(Path(given["top"]).resolve())]
    random.Random(given["seed"]).shuffle(files)
    if len(files) < given["parts"]:
        return files
    return files[given["part"] :: given["parts"]][:_LIMIT_FILES]


def main(given: dict[str, Any]) -> int:
    """Run pytest; returns its exit status."""
    os.sched_setaffinity(0, given["cores"])
    package = packages([given["package"]])[given["package"]]
    from forecast_autotune import activate

    activate.install()  # where the package is not installed, nothing did it when Python started
    import triton.runtime.autotuner  # noqa: F401

    from benchmarks.lib.zoo.stand_ins import cuda_on_cpu, import_without

    import_without(package.bare, package.stand_ins)
    if given["null"]:
        _shorten_lists()
    with cuda_on_cpu() if given["null"] else contextlib.nullcontext():
        for place, value in package.null.items() if given["null"] else ():
            owner, _, name = place.rpartition(".")
            setattr(pkgutil.resolve_name(owner), name, value)
        folder = str(_folder(given, package))
        options = ["-q", "-p", "no:cacheprovider", "-W", "ignore", "--tb=no"]
        options += ["-c", os.devnull, "--rootdir", folder, "--continue-on-collection-errors"]
        return int(pytest.main([*options, *_files(given, package)], plugins=[Suite(given, package)]))


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
