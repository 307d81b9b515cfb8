"""The compilations of a program: recorded for `warm`, and counted once the program is ready.

Triton calls its listener for every compilation, and for every binary that it takes from its cache. Binaries that our
tuners compile to measure are not the program's; those of the chosen configs are.
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
"""Whether the compilation under way is of a tuner's candidate."""
_OWN = ("/triton/", "/forecast_integrations/", "/forecast_autotune/")
"""Parts of the paths of frames that are not the program's."""


class UnexpectedCompilationError(ForecastAutotuneError):
    """A program compiled a kernel after it had said that it was ready."""


class CompilationRecorder:
    """Hears of this process's compilations, and of a fork's."""

    def __init__(self) -> None:
        self._previous: Callable[..., object] | None = None
        self._installed = self._ready = False
        self._compilations: dict[str, list[Compilation]] = defaultdict(list)
        """Binaries that this process has compiled or loaded, by kernel."""
        self._records: dict[Path | None, dict[str, Compilation]] = {}
        """Records at this process's first look, by store and Triton's key."""
        self.late: list[Compilation] = []
        """Compilations since the program was ready."""

    def start(self) -> None:
        """Listen, and call the present listener, too."""
        from triton import knobs

        if not self._installed:
            self._previous, self._installed = knobs.compilation.listener, True
            knobs.compilation.listener = self._hear

    def stop(self) -> None:
        """Stop listening, unless another listener has wrapped ours."""
        from triton import knobs

        if self._installed and knobs.compilation.listener == self._hear:
            knobs.compilation.listener, self._installed, self._ready = self._previous, False, False

    def mark_ready(self, *, only_if_recording: bool = False) -> int:
        """From now on a compilation is unexpected; returns the number of binaries so far."""
        if not only_if_recording:
            self.start()
        self._ready = True
        return sum(map(len, self._compilations.values()))

    def note_choice(self, compile_choice: Callable[[], Any], store: Store) -> None:
        """Record in the tuner's store the binary that it has chosen, which was compiled as a trial."""
        if self._installed:
            kernel = compile_choice()
            self._note({"src": kernel.src, "metadata": kernel.metadata._asdict(), "cache_hit": True}, store)

    def _hear(self, **compilation: Any) -> None:
        late = None
        if not _TRIAL.get():
            # The launch goes on: a store may be out of reach, and a program may turn warnings into errors.
            with suppress(Exception):
                late = self._note(compilation, Store.default())
        if self._previous is not None:
            self._previous(**compilation)
        if late is not None:
            self._complain(late)

    def _note(self, compilation: Mapping[str, Any], store: Store) -> Compilation | None:
        """Record a compilation; returns it where it came late."""
        is_cached = bool(compilation["cache_hit"])
        if is_cached and (record := self._record_of(compilation, store)) is not None:
            self._compilations[record.name].append(record)  # to describe it would take longer than to load it
            return None
        seconds = 0.0 if is_cached else compilation["times"].total * 1e-6
        record = describe_compilation(compilation["src"], compilation["metadata"], seconds)
        if record is None:
            return None
        earlier = self._compilations[record.name]
        if self._ready and not is_cached:
            record = dataclasses.replace(record, cause=record.differences(earlier) or "its first launch")
            self.late.append(record)
        earlier.append(record)
        store.compilations.add(record)
        return record if record.cause else None

    def _record_of(self, compilation: Mapping[str, Any], store: Store) -> Compilation | None:
        if store.root not in self._records:
            self._records[store.root] = {r.key: r for r in store.compilations.all() if r.key}
        return self._records[store.root].get(binary_key(compilation["metadata"].get("hash", "")))

    def _complain(self, record: Compilation) -> None:
        reaction = Settings.from_environment().on_compile
        text = (
            f"{record.name} was compiled for {record.seconds:.2f} s after the program was ready ({record.cause}; "
            f"{record.caller}): it is recorded, and `forecast-autotune warm` compiles it ahead"
        )
        if reaction == "error":
            raise UnexpectedCompilationError(text)
        if reaction == "warn" and not any(r.name == record.name for r in self.late[:-1]):
            warnings.warn(text, stacklevel=2)


RECORDER = CompilationRecorder()


@contextmanager
def trial() -> Iterator[None]:
    """Mark compilations within as a candidate's, which are none of the program's binaries yet."""
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
    """Return the record of a compilation for our caller's caller; None where the source is not a kernel's."""
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
            constants.append([list(path), _encode(value)])
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
"""Variables where Triton looks for an assembler first; torch's compile workers set the first for themselves."""
BACKEND = "backend"


def key_module() -> Any:
    """Return the module of `triton_key`, the hash of Triton's files: its first call in a process reads them all."""
    for name in ("triton.runtime.cache", "triton.compiler.compiler"):  # from 3.5 on, and 3.4
        module = importlib.import_module(name)
        if hasattr(module, "triton_key"):
            return module
    raise ImportError("this Triton has no `triton_key`: versions 3.4 to 3.9 do")


def binary_key(name: str) -> str:
    """Return a binary's name in Triton's cache, with a digest of the compiler that gave it."""
    return f"{hashlib.sha256(key_module().triton_key().encode()).hexdigest()[:16]}:{name}"


def compilation_environment(target: Any) -> dict[str, str]:
    """Return the parts of Triton's key that depend on this process: the backend with its assembler, and variables."""
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.compiler.compiler import make_backend

    backend = " ".join(str(make_backend(target).hash()).split())
    return {**get_cache_invalidating_env_vars(), BACKEND: backend}


def forget_assembler() -> None:
    """Let Triton read its assembler's release again, which it does once in a process."""
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
    values = {name: innermost(function.__globals__.get(name)) for name in function.__code__.co_names}
    helpers = {name: value.fn for name, value in values.items() if is_jit(value) and hasattr(value, "fn")}
    return {
        n: [f.__module__, f.__qualname__] for n, f in helpers.items() if f.__module__ != function.__module__
    }


_GENERATED: dict[str, Any] = {}
"""Modules that were loaded from a library's file, by its path."""


def kernel_of(record: Compilation) -> Any:
    """The kernel of a record: imported, or of the file that a library wrote in the recorded process.

    Raises `RecordError` for a file that another user may have written, and what loading a module raises.
    """
    if not record.file:
        return innermost(imported(record.module, record.kernel))
    if record.file not in _GENERATED:
        status = Path(record.file).stat()
        if status.st_uid not in (0, os.getuid()) or status.st_mode & 0o022:
            raise RecordError(f"others than this user can write {record.file}: run the program again")
        module = types.ModuleType(record.module)
        SourceFileLoader(record.module, record.file).exec_module(module)
        for name, (owner, helper) in record.helpers.items():
            # A library's decorator may hold the function under a name of its own.
            holder = innermost(imported(owner, helper))
            values = [holder, *vars(holder).values()]
            setattr(module, name, next(v for v in values if is_jit(v) and v.fn.__qualname__ == helper))
        _GENERATED[record.file] = module
    return innermost(getattr(_GENERATED[record.file], record.kernel))


_HASHES: WeakKeyDictionary[Any, tuple[str, str]] = WeakKeyDictionary()
"""Text and source hash by kernel. Triton refuses to launch a kernel whose globals have changed."""


def kernel_hash(fn: Any) -> str:
    """The hash of a kernel's source, computed once."""
    if (entry := _HASHES.get(fn)) is None or entry[0] != fn.src:
        entry = _HASHES[fn] = fn.src, source_hash(fn)
    return entry[1]


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


def _encode(value: Any) -> Any:
    """Return a constant as JSON; functions by name, as a function made from a text has another binary.

    Raises `RecordError` for a value that another process cannot have.
    """
    if type(value).__name__ == "constexpr":
        return {"constexpr": _encode(value.value)}
    if type(value) is tuple:
        return {"tuple": [_encode(v) for v in value]}
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
        # Locals are read of Triton's frame alone: a program's would keep its tensors alive.
        bound = frame.f_locals.get("bound_args") if path.endswith("/triton/runtime/jit.py") else None
        if bound and not launches:
            launches, caller = True, ""  # frames before it may be another listener's
            sizes = {name: value for name, value in bound.items() if type(value) is int}
        elif not caller and not any(part in path for part in _OWN):
            caller = f"{path}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return caller, sizes
