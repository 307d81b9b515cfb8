"""The compilations of a program: recorded for `warm`, and counted once the program is ready.

Triton tells its listener of every compilation, and of every binary that it takes from its cache. What our tuners
compile to measure is not the program's; what they choose is.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import json
import os
import sys
import types
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from forecast_autotune.errors import ForecastAutotuneError, RecordError
from forecast_autotune.records.compilation import DIVISIBLE, NEITHER, ONE, Compilation
from forecast_autotune.settings import Settings
from forecast_autotune.store import Store
from forecast_autotune.variants.constants import CONSTANT, decode_constant, encode_constant
from forecast_integrations.triton.problem.source import (
    import_trouble,
    imported,
    innermost,
    is_jit,
    source_hash,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

_TRIAL: ContextVar[bool] = ContextVar("forecast_trial", default=False)
"""Whether what compiles now is a candidate of a tuner."""
_OWN = ("/triton/", "/forecast_integrations/", "/forecast_autotune/")
"""Parts of paths whose frames are none of the program's."""


class UnexpectedCompilationError(ForecastAutotuneError):
    """A program compiled a kernel after it had said that it was ready."""


class CompilationRecorder:
    """Hears of this process's compilations, and of a fork's."""

    def __init__(self) -> None:
        self._previous: Callable[..., object] | None = None
        self._installed = self._ready = False
        self._known: dict[str, list[Compilation]] = defaultdict(list)
        """By kernel, what this process has compiled or loaded."""
        self._stored: dict[Path | None, dict[str, Compilation]] = {}
        """By store and Triton's key, what had been recorded when this process first asked."""
        self.late: list[Compilation] = []
        """Compilations since the program was ready."""

    def start(self) -> None:
        """Listen, besides whoever listens already."""
        from triton import knobs

        if not self._installed:
            self._previous, self._installed = knobs.compilation.listener, True
            knobs.compilation.listener = self._hear

    def stop(self) -> None:
        """Listen no longer, unless somebody has wrapped our listener meanwhile."""
        from triton import knobs

        if self._installed and knobs.compilation.listener == self._hear:
            knobs.compilation.listener, self._installed, self._ready = self._previous, False, False

    def mark_ready(self, *, only_if_recording: bool = False) -> int:
        """From now on a compilation is unexpected; returns the number of binaries so far."""
        if not only_if_recording:
            self.start()
        self._ready = True
        return sum(map(len, self._known.values()))

    def note_choice(self, compiled: Callable[[], Any], store: Store) -> None:
        """Record in the tuner's store the binary that it has chosen, which was compiled as a trial."""
        if self._installed:
            kernel = compiled()
            self._note({"src": kernel.src, "metadata": kernel.metadata._asdict(), "cache_hit": True}, store)

    def _hear(self, **compilation: Any) -> None:
        late = None
        if not _TRIAL.get():
            # Launched all the same: a store may be out of reach, and a program may make errors of warnings.
            with suppress(Exception):
                late = self._note(compilation, Store.default())
        if self._previous is not None:
            self._previous(**compilation)
        if late is not None:
            self._complain(late)

    def _note(self, compilation: Mapping[str, Any], store: Store) -> Compilation | None:
        """Record a compilation; returns it where it came late."""
        cached = bool(compilation["cache_hit"])
        if cached and (one := self._recorded(compilation, store)) is not None:
            self._known[one.name].append(one)  # to describe it would take longer than to load it
            return None
        seconds = 0.0 if cached else compilation["times"].total * 1e-6
        one = describe_compilation(compilation["src"], compilation["metadata"], seconds)
        if one is None:
            return None
        known = self._known[one.name]
        if self._ready and not cached:
            one = dataclasses.replace(one, cause=one.differences(known) or "its first launch")
            self.late.append(one)
        known.append(one)
        store.compilations.add(one)
        return one if one.cause else None

    def _recorded(self, compilation: Mapping[str, Any], store: Store) -> Compilation | None:
        if store.root not in self._stored:
            self._stored[store.root] = {one.key: one for one in store.compilations.all() if one.key}
        return self._stored[store.root].get(binary_key(compilation["metadata"].get("hash", "")))

    def _complain(self, one: Compilation) -> None:
        reaction = Settings.from_environment().on_compile
        text = (
            f"{one.name} was compiled for {one.seconds:.2f} s after the program was ready ({one.cause}; {one.caller}): "
            "it is recorded, and `forecast-autotune warm` compiles it ahead"
        )
        if reaction == "error":
            raise UnexpectedCompilationError(text)
        if reaction == "warn" and not any(late.name == one.name for late in self.late[:-1]):
            warnings.warn(text, stacklevel=2)


RECORDER = CompilationRecorder()


@contextmanager
def trial() -> Iterator[None]:
    """What compiles within is a candidate, and none of the program's binaries yet."""
    token = _TRIAL.set(True)
    try:
        yield
    finally:
        _TRIAL.reset(token)


def ready() -> int:
    """Say that the program is warm: a compilation from now on is recorded with its cause, and reported.

    FORECAST_AUTOTUNE_ON_COMPILE says how: `warn` (once a kernel), `error` (the launch raises
    `UnexpectedCompilationError`), or `ignore`. Returns the number of binaries that were compiled or loaded until now,
    as far as they were recorded.
    """
    return RECORDER.mark_ready()


# --- descriptions ---


def describe_compilation(src: Any, metadata: Mapping[str, Any], seconds: float) -> Compilation | None:
    """The record of what Triton compiled for our caller's caller; None for what no kernel was made of."""
    import triton
    from triton.compiler.compiler import make_backend

    fn = getattr(src, "fn", None)
    if fn is None or not hasattr(src, "signature"):
        return None
    target = metadata["target"]
    function = getattr(fn, "fn", fn)
    module, name = str(function.__module__), str(function.__qualname__)
    trouble = import_trouble(module, name)
    if module.startswith("torch._inductor."):
        trouble = "torch.compile wrote it: carry the cache of torch along"
    file = "" if trouble or module in sys.modules else str(function.__code__.co_filename)
    constants: list[Any] = []
    for path, value in sorted(src.constants.items()):
        try:
            constants.append([list(path), _encoded(value)])
        except RecordError as error:
            trouble = trouble or f"constant {fn.arg_names[path[0]]}: {error}"
    attributes = [[list(path), [list(pair) for pair in pairs]] for path, pairs in sorted(src.attrs.items())]
    defaults = make_backend(target).parse_options({})
    options = {f.name: metadata[f.name] for f in dataclasses.fields(defaults) if f.name in metadata}
    # Triton's own libraries lie elsewhere in another environment.
    libraries = getattr(defaults, "extern_libs", None)
    if json.dumps(options.get("extern_libs")) == json.dumps(libraries):
        options.pop("extern_libs", None)
    specialization = {
        "signature": {name: encode_constant(kind) for name, kind in src.signature.items()},
        "constants": constants,
        "attributes": attributes,
        "options": options,
    }
    states, types = _integer_states(fn, src)
    caller, sizes = _launch()
    return Compilation(
        module,
        name,
        kernel_hash(fn),
        triton.__version__,
        {"backend": target.backend, "arch": target.arch, "warp_size": target.warp_size},
        specialization,
        states=states,
        types=types,
        sizes={name: sizes[name] for name in states if name in sizes},
        seconds=round(seconds, 4),
        caller=caller,
        trouble=trouble,
        file=file,
        helpers=_helpers(function) if file else {},
        environment=compilation_environment(target),
        key=binary_key(metadata["hash"]) if "hash" in metadata else "",
    )


# --- Triton's key ---

ASSEMBLER_VARIABLES = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH")
"""Where Triton looks for an assembler first; torch's compile workers set the first for themselves."""
BACKEND = "backend"


def key_module() -> Any:
    """Where Triton looks up `triton_key`, the hash of its own files: the first call in a process reads them all."""
    for name in ("triton.runtime.cache", "triton.compiler.compiler"):  # from 3.5 on, and 3.4
        module = importlib.import_module(name)
        if hasattr(module, "triton_key"):
            return module
    raise ImportError("this Triton has no `triton_key`: versions 3.4 to 3.9 do")


def binary_key(name: str) -> str:
    """A binary's name in Triton's cache, to be compared with names that the same compiler gave."""
    return f"{hashlib.sha256(key_module().triton_key().encode()).hexdigest()[:16]}:{name}"


def compilation_environment(target: Any) -> dict[str, str]:
    """The parts of Triton's key that are this process': the backend's with its assembler, and variables."""
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.compiler.compiler import make_backend

    backend = " ".join(str(make_backend(target).hash()).split())
    return {**get_cache_invalidating_env_vars(), BACKEND: backend}


def forget_assembler() -> None:
    """Have Triton ask its assembler for its release again, which it does once in a process."""
    with suppress(ImportError):
        from triton.backends.nvidia import compiler

        if (clear := getattr(getattr(compiler, "get_ptxas_version", None), "cache_clear", None)) is not None:
            clear()


def torch_assemblers() -> list[str]:
    """The assembler of torch's wheel, which is not imported: up to torch 2.11, and later."""
    with suppress(ImportError, ValueError):
        spec = importlib.util.find_spec("torch")
        folder = Path((spec and spec.origin) or "").parent
        paths = [folder / "bin" / "ptxas", folder / "_inductor" / "bin" / "ptxas"]
        return [str(path) for path in paths if path.is_file()]
    return []


def _helpers(function: Any) -> dict[str, list[str]]:
    """JIT functions of other modules that a kernel calls by a global name."""
    named = {name: innermost(function.__globals__.get(name)) for name in function.__code__.co_names}
    others = {name: value.fn for name, value in named.items() if is_jit(value) and hasattr(value, "fn")}
    return {
        n: [f.__module__, f.__qualname__] for n, f in others.items() if f.__module__ != function.__module__
    }


_GENERATED: dict[str, Any] = {}
"""Modules that were loaded from a library's file, by its path."""


def kernel_of(one: Compilation) -> Any:
    """The kernel of a record: imported, or of the file that a library wrote in the recorded process.

    Raises `RecordError` for a file that another user may have written, and what loading a module raises.
    """
    if not one.file:
        return innermost(imported(one.module, one.kernel))
    if one.file not in _GENERATED:
        seen = Path(one.file).stat()
        if seen.st_uid not in (0, os.getuid()) or seen.st_mode & 0o022:
            raise RecordError(f"others than this user can write {one.file}: run the program again")
        module = types.ModuleType(one.module)
        SourceFileLoader(one.module, one.file).exec_module(module)
        for name, (owner, helper) in one.helpers.items():
            # A library's decorator may hold the function under a name of its own.
            holder = innermost(imported(owner, helper))
            held = [holder, *vars(holder).values()]
            setattr(module, name, next(v for v in held if is_jit(v) and v.fn.__qualname__ == helper))
        _GENERATED[one.file] = module
    return innermost(getattr(_GENERATED[one.file], one.kernel))


_HASHES: WeakKeyDictionary[Any, tuple[str, str]] = WeakKeyDictionary()
"""By kernel: its text, and the hash of all that it reads. Triton launches none of whose globals have changed."""


def kernel_hash(fn: Any) -> str:
    """The hash of a kernel's source, computed once."""
    if (known := _HASHES.get(fn)) is None or known[0] != fn.src:
        known = _HASHES[fn] = fn.src, source_hash(fn)
    return known[1]


def _integer_states(fn: Any, src: Any) -> tuple[dict[str, str], dict[str, str]]:
    states, types = {}, {}
    for number, parameter in enumerate(fn.params):
        kind = src.signature.get(parameter.name)
        if parameter.is_constexpr or getattr(parameter, "do_not_specialize", False):
            continue
        if kind == "constexpr" and src.constants.get((number,)) == 1:
            states[parameter.name], types[parameter.name] = ONE, ""
        elif isinstance(kind, str) and (kind.startswith("*") or kind.lstrip("iu").isdigit()):
            pairs = [list(pair) for pair in src.attrs.get((number,), ())]
            states[parameter.name] = DIVISIBLE if ["tt.divisibility", 16] in pairs else NEITHER
            types[parameter.name] = kind
    return states, types


def _encoded(value: Any) -> Any:
    """A constant as JSON, functions by their names: from its text alone one would make another binary.

    Raises `RecordError` for what another process cannot have.
    """
    if type(value).__name__ == "constexpr":
        return {"constexpr": _encoded(value.value)}
    if type(value) is tuple:
        return {"tuple": [_encoded(v) for v in value]}
    if (function := getattr(innermost(value), "fn", None)) is not None:
        if trouble := import_trouble(function.__module__, function.__qualname__):
            raise RecordError(trouble)
        return {"function": [function.__module__, function.__qualname__]}
    return encode_constant(value)


def decoded(value: Any) -> Any:
    """The constant of a record. Raises `RecordError`, and what an import raises."""
    if not isinstance(value, dict) or CONSTANT in value:
        return decode_constant(value)
    ((kind, content),) = value.items()
    if kind == "tuple":
        return tuple(map(decoded, content))
    if kind == "function":
        return innermost(imported(*content))
    import triton.language as tl

    return tl.constexpr(decoded(content))


def _launch() -> tuple[str, dict[str, int]]:
    """File and line of the launch under way, and its integer arguments, as Triton's own frame has them."""
    frame, caller, sizes, launches = sys._getframe(1), "", dict[str, int](), False
    while frame is not None and not (launches and caller):
        path = frame.f_code.co_filename
        # The locals of a program's frame would keep its tensors alive.
        bound = frame.f_locals.get("bound_args") if path.endswith("/triton/runtime/jit.py") else None
        if bound and not launches:
            launches, caller = True, ""  # others may listen as well, and were met before
            sizes = {name: value for name, value in bound.items() if type(value) is int}
        elif not caller and not any(part in path for part in _OWN):
            caller = f"{path}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return caller, sizes
