"""Kernels to be advised on, from a file, an installed package or recorded tables; each with its known calls."""

from __future__ import annotations

import contextlib
import importlib
import io
import pkgutil
import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from forecast_autotune import frameworks
from forecast_autotune.commands.output import CommandError, UsageError
from forecast_autotune.llm.advice.asking import DEVICES
from forecast_autotune.llm.advice.question import MAX_PROBLEMS, AdviceSample
from forecast_autotune.records import Argument, Candidate, Config, Device, Kernel, Problem
from forecast_autotune.records.table import Table
from forecast_autotune.store import Store
from forecast_autotune.tuning.advice_samples import stored_samples, tables_of_source
from forecast_autotune.variants.entry import known
from forecast_harness.targets.kernels.grids import fit_grid
from forecast_harness.targets.kernels.user_kernel import UserKernel


@dataclass
class LibraryKernels:
    """The kernels of a package, and its modules and kernels that could not be read."""

    kernels: list[UserKernel] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """Modules and kernels, each with the reason."""


def library_kernels(package: str, sources: Collection[str] = ()) -> LibraryKernels:
    """The kernels of a package and of all modules below it, which are imported.

    Those with a list of configs, and those whose source hash is among `sources`; each source once. A module that
    cannot be imported is skipped. Raises `UsageError` where the package itself cannot.
    """
    if not all(part.isidentifier() for part in package.split(".")):
        raise UsageError(f"--library takes a package's name, and {package} is none: as in `import NAME`")
    library = LibraryKernels()
    best: dict[str, UserKernel] = {}
    for module in _modules(package, library.skipped):
        for name, fn in _kernels_of(module, package):
            try:
                path = Path(getattr(module, "__file__", None) or "")
                target = UserKernel.of_function(path, module, name, fn, partial=True)
            except Exception as error:  # a wrapper of the library's own may be like a kernel and yet none
                library.skipped.append(f"{module.__name__}.{name}: {type(error).__name__}: {error}")
                continue
            source = target.kernel.source_sha256
            earlier = best.get(source, target)
            if (target.configs or source in sources) and _rank(target) >= _rank(earlier):
                best[source] = target
    library.kernels = list(best.values())
    return library


def _rank(target: UserKernel) -> tuple[bool, bool]:
    """The rank of a kernel's record: a tuner before its kernel, the module that defines it before others."""
    return bool(target.configs), target.kernel.extra.get("module") == target.module.__name__


def _modules(package: str, skipped: list[str]) -> Iterator[ModuleType]:
    try:
        root = _import_quietly(package)
    except Exception as error:
        raise UsageError(
            f"--library {package} cannot be imported ({type(error).__name__}: {error}): install it, or correct the name"
        ) from error
    yield root
    queue = [(list(getattr(root, "__path__", [])), f"{package}.")]
    while queue:
        folders, prefix = queue.pop(0)
        for info in pkgutil.iter_modules(folders, prefix):
            if info.name.rpartition(".")[2] == "__main__":
                continue
            try:
                module = _import_quietly(info.name)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                skipped.append(f"{info.name}: {type(error).__name__}: {error}")
                continue
            yield module
            if info.ispkg:
                queue.append((list(module.__path__), f"{info.name}."))


def _import_quietly(name: str) -> ModuleType:
    with contextlib.redirect_stdout(io.StringIO()):  # stdout is the command's own
        return importlib.import_module(name)


def _kernels_of(module: ModuleType, package: str) -> Iterator[tuple[str, Any]]:
    """Kernels that the package itself defines, under the names that the module has for them."""
    triton = frameworks.triton()
    for name, value in sorted(vars(module).items()):
        if not hasattr(value, "arg_names"):
            continue
        home = getattr(getattr(triton.innermost(value), "fn", None), "__module__", None) or ""
        if home == package or home.startswith(f"{package}."):
            yield name, value


# --- sources with their calls ---


@dataclass(frozen=True)
class AdvisedKernel:
    """A kernel to be advised on: its record, its whole source, and calls of it."""

    kernel: Kernel
    source: str
    samples: tuple[AdviceSample, ...]

    @classmethod
    def of(cls, target: UserKernel, store: Store) -> AdvisedKernel:
        """A kernel with its recorded calls, else with those that its file describes.

        Raises `CommandError` where nothing says how it is called.
        """
        tables = tables_of_source(store, target.kernel.name, target.kernel.source_sha256)
        samples = stored_samples(tables) or tuple(_described_samples(target, store))
        if not samples:
            raise CommandError(
                f"advice needs sizes that {target.name} is called with: {target.path.name} has neither "
                f"inputs(random) nor CASES with configs, and the store at {store.root} no problem of this source. Run "
                "the program that uses it once under `forecast-autotune run`, or define one of the two"
            )
        return cls(target.kernel, target.text, samples)

    @classmethod
    def of_tables(cls, tables: Iterable[Table]) -> Iterator[AdvisedKernel]:
        """Every kernel source that was measured, as far as its text was recorded."""
        by_source: dict[str, list[Table]] = {}
        for table in tables:
            by_source.setdefault(table.problem.kernel.source_sha256, []).append(table)
        for source, its in by_source.items():
            record, samples = its[0].problem.kernel, stored_samples(its)
            if source and record.source and samples:
                yield cls(record, record.source, samples)


def _described_samples(target: UserKernel, store: Store) -> Iterator[AdviceSample]:
    draw = getattr(target.module, "inputs", None)
    if callable(draw):
        yield from _sample_of_inputs(target, dict(draw(random.Random(0))))
        return
    try:
        subjects = target.subjects(store)
    except CommandError:
        return
    calls = {tuple(arguments): s for s in subjects if s.configs for arguments in s.calls}
    for arguments, subject in list(calls.items())[:MAX_PROBLEMS]:
        formula = fit_grid(subject.launches)
        constants = {a.name: a.value for a in arguments if a.kind == "constexpr"}
        grids = {}
        for config in subject.configs if formula is not None else ():
            try:
                assert formula is not None
                grids[Candidate(config)] = formula(arguments, {**constants, **dict(config.kwargs)})
            except (KeyError, TypeError):
                continue
        yield _sample(target.kernel, arguments, subject.configs, grids)


def _sample_of_inputs(target: UserKernel, values: dict[str, Any]) -> Iterator[AdviceSample]:
    """A call that the file's own function draws, as it hands it to whoever verifies variants."""
    grid = values.pop("grid", None)
    arguments = frameworks.triton().arguments_of(target.fn, values)
    grids = {}
    for config in target.configs:
        if (extent := known(grid, values, config.parameters())) is not None:
            grids[Candidate(config)] = extent
    if target.configs:
        yield _sample(target.kernel, arguments, target.configs, grids)


def _sample(
    kernel: Kernel,
    arguments: Sequence[Argument],
    configs: Sequence[Config],
    grids: dict[Candidate, tuple[int, ...]],
) -> AdviceSample:
    return AdviceSample(Problem.of(kernel, arguments, _device()), [Candidate(c) for c in configs], grids)


def _device() -> Device:
    """This machine's accelerator; where there is none, the one that most recorded problems are of."""
    triton = frameworks.triton()
    return triton.current_device() if triton.has_device() else DEVICES[0]
