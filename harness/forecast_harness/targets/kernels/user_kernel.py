"""The kernel that a command names: its text, and the calls that variants must survive.

The calls come from the first of these that exists: a function `inputs(random)` in its
file; calls that a program captured; `CASE` or `CASES` in the file, objects with `kernel`, `make(device, small)` (a dict
of `args`, `kwargs`, `grid`), a `space` of configs, and `reset_to_zero`; problems in the store, recorded when the kernel
was tuned.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from forecast_autotune import frameworks
from forecast_autotune.commands.output import CommandError, UsageError, missing_package_text
from forecast_autotune.errors import RecordError, SettingsError
from forecast_autotune.records import Argument, Config, Kernel, Problem, digest
from forecast_autotune.store import Store
from forecast_autotune.store.files import write_atomically
from forecast_autotune.variants.entry import heuristic_layers, known
from forecast_autotune.variants.signature import call_form, canonical_text, memory_span
from forecast_harness.targets.cuda.declaration import CUDA_PLACE
from forecast_harness.targets.kernels.grids import GridSample, grid_samples
from forecast_harness.targets.kernels.inductor_output import is_inductor_output, kernel_names, standalone_file

if TYPE_CHECKING:
    from forecast_autotune.records.captured_call import CapturedCall
    from forecast_harness.targets.kernels.base_kernel import BaseKernel


KERNEL_PLACE = re.compile(
    r"^(?P<where>.+\.py|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):(?P<name>[A-Za-z_]\w*)(?:@(?P<source>[0-9a-f]{6,64}))?$",
    re.DOTALL,
)
"""A file or an importable module, the name of a kernel in it, and where captured ones share that name, the beginning
of the digest of its source."""


def import_place(where: str) -> tuple[ModuleType, Path]:
    """Import what stands before the colon of a `KERNEL_PLACE`; the module and its file.

    Raises `SettingsError` for what is no Python file and no module, and whatever the code raises.
    """
    if where.endswith(".py"):
        return import_file(Path(where)), Path(where)
    try:
        module = importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{where}.".startswith(f"{error.name}."):
            raise  # a module that this one needs
        raise SettingsError(
            f"no module {where!r} can be imported (there is no {error.name!r}): give package.module:FN of an "
            "installed package, or KERNEL.py:FN"
        ) from error
    file = Path(getattr(module, "__file__", None) or "")
    if file.suffix != ".py":
        raise SettingsError(f"{where} has no Python source: its file is {str(file) or 'not told'}")
    return module, file


def import_file(path: Path) -> ModuleType:
    """Import a user's file: as a module of its package, or with its folder on `sys.path`.

    Raises `SettingsError` for what is no Python file, and whatever the file raises.
    """
    path = path.absolute()
    if path.suffix != ".py" or not path.is_file():
        raise SettingsError(f"{path} is no Python file: give KERNEL.py:FN")
    root, name = path.parent, path.stem
    while (root / "__init__.py").is_file():
        name, root = f"{root.name}.{name}", root.parent
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    if "." in name:
        # Its siblings may import it by this name, too.
        with _without_other_package(name.partition(".")[0], root):
            return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before
        raise
    return module


@contextlib.contextmanager
def _without_other_package(package: str, root: Path) -> Iterator[None]:
    """Set a loaded package of this name aside that does not lie in `root`: an installed one may be called `kernels`.

    It has its name back afterwards; the modules imported meanwhile then know each other alone.
    """
    module = sys.modules.get(package)
    if module is None or any(Path(p).parent == root for p in getattr(module, "__path__", ())):
        yield
        return

    def package_modules() -> dict[str, ModuleType]:
        return {n: m for n, m in sys.modules.items() if n == package or n.startswith(f"{package}.")}

    modules = package_modules()
    for name in modules:
        del sys.modules[name]
    try:
        yield
    finally:
        for name in package_modules():
            del sys.modules[name]
        sys.modules.update(modules)


def find_kernel(module: ModuleType, name: str) -> Any:
    """The kernel or tuner of this name. Raises `SettingsError` listing those that there are."""
    kernel = getattr(module, name, None)
    if kernel is not None and hasattr(kernel, "arg_names"):
        return kernel
    names = [n for n, value in vars(module).items() if hasattr(value, "arg_names")]
    raise SettingsError(f"{module.__name__} has no kernel {name!r}; it has {', '.join(names) or 'none'}")


_MOST_CAPTURED = 4
"""Captured calls of a kernel that are verified at most."""
_MANY_ELEMENTS = 1 << 25
"""Elements of a call's tensors from which on it is verified after smaller ones, which may cover it."""
_DESCRIPTOR = "descriptor"
"""The key of `Argument.extra` that records of calls have for a descriptor."""
_MAX_CONFIGS = 48
"""Configs of a case that its grid function is asked about."""


@dataclass(frozen=True)
class UserKernel:
    """A kernel of the user's, imported."""

    path: Path
    name: str
    module: ModuleType = field(repr=False)
    fn: Any = field(repr=False)
    """The object that the name stands for: a kernel, or a tuner over one."""
    kernel: Kernel
    text: str = field(repr=False)
    """Its self-contained module."""
    configs: tuple[Config, ...]
    zeroed: tuple[str, ...] = ()

    @classmethod
    def of(cls, text: str, store: Store | None = None) -> UserKernel:
        """Import `KERNEL.py:FN` or `package.module:FN`.

        A kernel that cannot be imported by that name, as one made inside a function, is taken from the latest record of
        a call that the `store` (default: the user's) holds of it. `@` and the beginning of its source's digest tell
        those of one name apart; nothing is imported for one that is recorded.

        Raises `UsageError` for anything else, for a file that is no Python and for a name that several captured kernels
        share, `CommandError` for a file that fails or that has another source of this name, and `RecordError` for a
        kernel of torch.compile's whose call cannot be told. A package that the file needs and that is not installed is
        an `ImportError`.
        """
        match = KERNEL_PLACE.match(text)
        if CUDA_PLACE.match(text):
            raise UsageError(
                f"{text} is a CUDA kernel, and this is for Triton kernels: `forecast-autotune search {text}` looks for "
                "a faster source of it, `verify` and `bench` judge sources"
            )
        if not match:
            raise UsageError(
                f"{text} is no KERNEL.py:FN or package.module:FN: name a Python file or a module, and a kernel in it"
            )
        where, name, source = match["where"], match["name"], match["source"] or ""
        store = store or Store.default()
        if source and (kernel := cls._of_record(where, name, source, store)) is not None:
            return kernel
        check_syntax(text)
        own = _own_file(where, name)
        try:
            module, path = import_place(own)
            fn = find_kernel(module, name)
            sha = frameworks.triton().kernel_record(fn).source_sha256 if source else ""
            if not sha.startswith(source):
                raise SettingsError(
                    f"{where} has another {name} by now, of the source {sha[:12]}: capture it again"
                )
        except (Exception, SystemExit) as error:
            if (kernel := cls._of_record(where, name, source, store)) is not None:
                return kernel
            if isinstance(error, SettingsError) or (
                isinstance(error, ImportError) and missing_package_text(error)
            ):
                raise
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            raise CommandError(
                f"{where} cannot be imported: {reason}. If it is a script, put what it runs below "
                'if __name__ == "__main__":, so that an import only defines its kernels'
            ) from error
        return cls.of_function(path, module, name, fn)

    @classmethod
    def _of_record(cls, where: str, name: str, source: str, store: Store) -> UserKernel | None:
        """The kernel as captured calls of it tell; None where there are none."""
        module = Path(where).stem if where.endswith(".py") else where
        records = [] if store.captures is None else store.captures.every(lambda n: n == name)
        calls = [
            c
            for c, _ in records
            if c.source
            and (source or c.kernel.extra.get("module") in (module, "__main__"))
            and c.kernel.source_sha256.startswith(source)
        ]
        if not calls:
            return None
        sources = {c.kernel.source_sha256: c.kernel.extra.get("qualname", name) for c in calls}
        if len(sources) > 1:
            names = ", ".join(f"{where}:{name}@{sha[:12]} ({path})" for sha, path in sorted(sources.items()))
            raise UsageError(f"{len(sources)} captured kernels are called {where}:{name}; name one: {names}")
        call = max(calls, key=lambda c: c.at)
        bare = ModuleType(module)
        return cls(
            Path(where),
            name,
            bare,
            bare,
            call.kernel,
            call.source,
            call.configs or (call.config,),
            call.zeroed,
        )

    @classmethod
    def of_function(
        cls, path: Path, module: ModuleType, name: str, fn: Any, *, partial: bool = False
    ) -> UserKernel:
        """A kernel, or a tuner over one, of a module that is imported already.

        Raises `RecordError` for one that no self-contained module can be made of; with `partial`, the text of its
        own function takes the place of that module.
        """
        triton = frameworks.triton()
        inner = fn
        while hasattr(inner, "configs") and hasattr(inner, "fn"):
            inner = inner.fn
        tuner = fn
        while not hasattr(tuner, "configs") and hasattr(tuner, "fn"):  # heuristics may be above it
            tuner = tuner.fn
        configs = tuple(dict.fromkeys(triton.config_of(c) for c in getattr(tuner, "configs", [])))
        zeroed = tuple(n for n in getattr(tuner, "reset_to_zero", ()) or () if isinstance(n, str))
        record = triton.kernel_record(inner)
        try:
            text = triton.standalone_source(inner)
        except RecordError:
            if not partial:
                raise
            text = record.source
        return cls(path, name, module, fn, record, text, configs, zeroed)

    def subjects(self, store: Store) -> list[BaseKernel]:
        """The base kernels that variants are verified against, one per kind of call that is to be covered.

        Raises `CommandError` where it is not known how the kernel is called, with what would help.
        """
        from forecast_harness.targets.kernels.base_kernel import BaseKernel

        heuristic = bool(heuristic_layers(self.fn))
        kernel = BaseKernel(
            self.kernel.name,
            self.text,
            self.configs,
            zeroed=self.zeroed,
            file=str(self.path.absolute()) if heuristic else "",
            name=self.name,
        )
        if callable(getattr(self.module, "inputs", None)):
            return [replace(kernel, file=str(self.path.absolute()), inputs=True)]
        problems = list(self._problems(kernel, store))
        subjects = self._captures(kernel, store, problems) or list(self._cases(kernel)) or problems
        # Nothing can be written into empty tensors, and so nothing verified.
        writable = [s for s in subjects if any(memory_span(a) for a in s.calls[0] if a.kind == "tensor")]
        subjects = writable or subjects
        if not subjects:
            raise CommandError(
                f"how is {self.name} called? {self.path} defines neither inputs(random) nor CASES, and the "
                f"store at {store.root} holds no captured call and no problem of this source. Run the program that "
                "uses it once under `forecast-autotune run --capture`, or define a function inputs(random) that "
                'returns the arguments of one call by name, and under "grid" its launch grid'
            )
        for a in (a for s in subjects for call in s.calls[:1] for a in call if not s.captured):
            if a.kind == "tensor" and a.extra.get(_DESCRIPTOR):
                raise CommandError(
                    f"{self.name} takes {a.name}, a tensor descriptor that its caller makes: a variant of such a "
                    "kernel is checked at captured calls alone. Run the program under `forecast-autotune run "
                    "--capture`, or have the kernel make it, by tl.make_tensor_descriptor, and take the tensor"
                )
        return subjects

    def _captures(self, base: BaseKernel, store: Store, problems: Sequence[BaseKernel]) -> list[BaseKernel]:
        """Captured calls of this very source: the largest of each form first, but for those that take minutes.

        All of them explain each other.
        """
        files, sha = store.captures, self.kernel.source_sha256
        records = [] if files is None else list(files.every(lambda name: name == self.kernel.name))
        pairs = [(call, path) for call, path in records if call.kernel.source_sha256 == sha]
        sizes = {c.id: sum(memory_span(a) for a in c.arguments if a.kind == "tensor") for c, _ in pairs}
        pairs.sort(key=lambda pair: (sizes[pair[0].id] > _MANY_ELEMENTS, -sizes[pair[0].id]))
        forms = [canonical_text(call_form(call.arguments)) for call, _ in pairs]
        order = sorted(range(len(pairs)), key=lambda n: (forms[:n].count(forms[n]), n))[:_MOST_CAPTURED]
        own_calls = [call for call, _ in pairs]
        launches = tuple(x for call in own_calls for x in _captured_launches(call))
        launches += tuple(x for s in problems[:1] for x in s.launches)
        stored_calls = [s.calls[0] for s in problems]
        results = []
        for n in order:
            call, path = pairs[n]
            calls = (call.arguments, *(c.arguments for c in own_calls if c is not call), *stored_calls)
            configs = call.configs or base.configs or (call.config,)
            if any(a.extra.get(_DESCRIPTOR) for a in call.arguments if a.kind == "tensor"):
                configs = (call.config,)  # a hook of each config sets the blocks of descriptors
            constant = _has_constant_heuristics(
                c for c, f in zip(own_calls, forms, strict=True) if f == forms[n]
            )
            if not (constant or base.file):
                calls = calls[:1]  # nobody can tell what heuristics make of other sizes
            results.append(
                replace(
                    base,
                    configs=configs,
                    calls=calls,
                    launches=launches,
                    zeroed=base.zeroed or call.zeroed,
                    captured=str(path.absolute()),
                    file="" if constant else base.file,  # importing it takes seconds in each judge
                )
            )
        return results

    def _problems(self, base: BaseKernel, store: Store) -> Iterator[BaseKernel]:
        """Recorded problems of this very source; each is a call to be covered, and explains the others."""
        sha = self.kernel.source_sha256
        tables = [t for t in store.tables(self.kernel.name) if t.problem.kernel.source_sha256 == sha]
        calls = [t.problem.arguments for t in tables]
        launches = tuple(x for t in tables for x in grid_samples(t))
        own = [m.candidate.config for t in tables for m in t.measurements if m.candidate.is_base_variant]
        configs = base.configs or tuple(dict.fromkeys(own))
        for i, call in enumerate(calls):
            rest = tuple(c for j, c in enumerate(calls) if j != i)
            yield replace(base, configs=configs, calls=(call, *rest), launches=launches)

    def _cases(self, base: BaseKernel) -> Iterator[BaseKernel]:
        """Cases of this kernel in its file: their real shapes to be covered, small ones to explain them."""
        cases = [
            *getattr(self.module, "CASES", ()),
            *([self.module.CASE] if hasattr(self.module, "CASE") else ()),
        ]
        triton = frameworks.triton()
        own_fn = triton.innermost(self.fn)
        own = [c for c in cases if triton.innermost(getattr(c, "kernel", None)) is own_fn]
        calls: list[tuple[Argument, ...]] = []
        launches: list[GridSample] = []
        zeroed = tuple(dict.fromkeys(n for c in own for n in getattr(c, "reset_to_zero", ())))
        configs = base.configs or tuple(dict.fromkeys(c for case in own for c in _case_configs(case)))
        step = max(1, len(configs) // _MAX_CONFIGS)
        for case in own:
            for small in (False, True):
                data = case.make("meta", small=small)
                values = {**dict(zip(self.fn.arg_names, data["args"], strict=False)), **data["kwargs"]}
                # A tensor without memory has no address; torch's allocators align to 64 bytes and more.
                arguments = tuple(
                    replace(a, aligned=True) if a.kind == "tensor" else a
                    for a in triton.arguments_of(self.fn, values)
                )
                calls.append(arguments)
                launches += _grid_samples(arguments, data["grid"], values, configs[::step])
        for i in range(0, len(calls), 2):
            rest = tuple(c for j, c in enumerate(calls) if j != i)
            yield replace(
                base, configs=configs, zeroed=zeroed, calls=(calls[i], *rest), launches=tuple(launches)
            )


def check_syntax(place: str) -> None:
    """Raises `UsageError` for the file of a KERNEL.py:FN that is no Python, before anything is done for it."""
    path = Path(place.rpartition(":")[0])
    if path.suffix != ".py" or not path.is_file():
        return
    try:
        # It is imported next: limits on what others wrote protect nobody here.
        ast.parse(path.read_bytes(), path.name)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        why = str(error) or "it nests too deeply"
        raise UsageError(f"a kernel's file must be Python, and {path} is none: {why}") from error


def _own_file(where: str, name: str) -> str:
    """The place, or a file of this kernel alone where it is one of many in an output of torch.compile's.

    Raises `RecordError` where that cannot be made of it, and `SettingsError` for a kernel that it has not.
    """
    path = Path(where)
    if path.suffix != ".py" or not path.is_file():
        return where
    text = path.read_text(encoding="utf-8", errors="replace")
    if not is_inductor_output(text):
        return where
    if (file := standalone_file(text, name)) is None:
        raise SettingsError(
            f"{where} has no kernel {name!r}; it has {', '.join(kernel_names(text)) or 'none'}"
        )
    root = Store.default().root
    assert root is not None, "the default store is a directory's"
    own = root / "inductor_kernels" / f"inductor_{digest(file)[:16]}.py"
    write_atomically(own, file.encode())
    return str(own)


def is_covered(subject: BaseKernel, signatures: Sequence[str]) -> bool:
    """Whether checks with these signatures say something about the call to be covered."""
    from forecast_autotune.records import Device
    from forecast_autotune.variants import covers

    if not subject.calls:
        return bool(signatures)
    problem = Problem("", Kernel(subject.kernel), subject.calls[0], Device(""))
    return any(covers(signature, problem) for signature in signatures)


def _has_constant_heuristics(calls: Iterable[CapturedCall]) -> bool:
    """Whether what heuristics compute was the same in all these calls, whatever their sizes and configs."""
    texts = [{n: repr(v) for n, v in launch.computed.items()} for call in calls for launch in call.launches]
    return bool(texts) and all(t == texts[0] for t in texts)


def _captured_launches(call: CapturedCall) -> Iterable[GridSample]:
    from forecast_harness.targets.kernels.grids import sizes_of

    constants = {a.name: a.value for a in call.arguments if a.kind == "constexpr"}
    for launch in call.launches:
        yield GridSample(sizes_of(call.arguments), {**constants, **launch.meta}, launch.grid)


def _grid_samples(
    arguments: Sequence[Argument], grid: Any, values: Mapping[str, Any], configs: Sequence[Config]
) -> Iterator[GridSample]:
    from forecast_harness.targets.kernels.grids import sizes_of

    constants = {a.name: a.value for a in arguments if a.kind == "constexpr"}
    for config in configs:
        extent = known(grid, values, config.parameters())
        if extent is not None:
            yield GridSample(sizes_of(arguments), {**constants, **dict(config.kwargs)}, extent)


def _case_configs(case: Any) -> list[Config]:
    """The configs of a case that has them: `configs`, or a `space` of meta-parameters, warps and stages."""
    import itertools

    space = getattr(case, "space", None)
    if not isinstance(space, Mapping):
        return []
    names = [*space["kwargs"]]
    values = [*space["kwargs"].values(), space["num_warps"], space["num_stages"]]
    where = space.get("where", lambda point: True)
    configs = []
    for *meta, warps, stages in itertools.product(*values):
        kwargs = dict(zip(names, meta, strict=True))
        if where({**kwargs, "num_warps": warps, "num_stages": stages}):
            configs.append(Config.of(kwargs, num_warps=warps, num_stages=stages))
    return configs
