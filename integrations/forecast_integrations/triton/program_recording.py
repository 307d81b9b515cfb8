"""`run --recording FOLDER`: what a program launches, how long its steps take, and calls of its functions of torch code.

The folder's plan says what is recorded and which functions run a verified source. Nothing that fails here ends the
program: it is recorded as far as possible.
"""

from __future__ import annotations

import ast
import atexit
import functools
import importlib
import inspect
import json
import math
import os
import resource
import statistics
import sys
import time
import types
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forecast_autotune.records import Argument, Device
from forecast_autotune.records.program import (
    CHECK_FILE,
    PLAN_FILE,
    RANK_FOLDER,
    RECORDING_FILE,
    FunctionCall,
    ProgramRecording,
    RecordingPlan,
    TorchFunction,
    TurnBlock,
)
from forecast_autotune.store.files import write_atomically

_MOST_FORMS = 3
_MOST_LAUNCHES = 100_000
_MOST_CHECKS = 64
_COMPARED_CALLS = 20
"""Calls of a replaced function that are compared from the first on; of later ones, one in so many."""
_OBSERVE = "__forecast_autotune_observe__"


def record_first_rank() -> None:
    """Record this process, too, where it is the first rank of a program whose launcher is recorded."""
    if os.environ.get("RANK") == "0":
        ProgramRecorder(Path(os.environ.pop(RANK_FOLDER))).start()


class ProgramRecorder:
    """Follows a plan in this process; writes its recording when the process ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.plan = RecordingPlan.from_json(json.loads((folder / PLAN_FILE).read_text(encoding="utf-8")))
        self._names: dict[str, int] = {}
        self._launches: deque[tuple[int, float, float]] = deque(maxlen=_MOST_LAUNCHES)
        self._steps: deque[tuple[float, float]] = deque(maxlen=_MOST_LAUNCHES)
        self._checks: list[Any] = []
        self._differences: dict[str, float] = {}
        self._replaced: dict[str, int] = {}
        self._watched = {*self.plan.functions, *self.plan.replaced, self.plan.step, self.plan.check} - {""}
        self._finder = FunctionFinder(self) if self.plan.discover else None
        self.turns = StepBlocks(self.plan)
        self._profiler: Any = None
        self._began = 0.0

    def start(self) -> None:
        """Begin, right before the program does: `sys.path` is the program's own."""
        if "RANK" not in os.environ:  # all children of a rank have its number
            os.environ[RANK_FOLDER] = str(self.folder)
        atexit.register(self._write, os.getpid())
        for module in {name.partition(":")[0] for name in self._watched} - {"__main__"}:
            self._observe_module(module)
        if self.plan.compare and self.plan.serve:
            self._compare_variants()
        if self.plan.block and self.plan.serve:
            self._serve_in_turns()
        self._profiler = _device_profiler() if self.plan.profile else None
        self._began = time.perf_counter()
        if self._finder is not None:
            sys.setprofile(self._finder.look)

    def code_of_main(self, data: bytes, path: str) -> types.CodeType | None:
        """The program's code with its watched functions decorated; None where none of them is in it."""
        watched = {n.partition(":")[2] for n in self._watched if n.startswith("__main__:")}
        if not watched:
            return None
        tree = ast.parse(data, path)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name in watched:
                place = {
                    n: getattr(node, n) for n in ("lineno", "col_offset", "end_lineno", "end_col_offset")
                }
                node.decorator_list.insert(0, ast.Name(_OBSERVE, ast.Load(), **place))
        return compile(tree, path, "exec", dont_inherit=True)

    @property
    def names_for_main(self) -> dict[str, Any]:
        """Names that the program's module needs for its decorated functions."""
        return {_OBSERVE: lambda fn: self._observed(f"__main__:{fn.__name__}", fn)}

    def add_launch(self, name: str, start: float, seconds: float) -> None:
        """Note one launch."""
        self._launches.append((self._names.setdefault(name, len(self._names)), start, seconds))

    def _observe_module(self, name: str) -> None:
        with suppress(Exception):  # the program meets the same error by itself
            module = importlib.import_module(name)
            for watched in self._watched:
                place, _, function = watched.partition(":")
                if place == name and callable(fn := getattr(module, function, None)):
                    setattr(module, function, self._observed(watched, fn))

    def _observed(self, name: str, fn: Any) -> Any:
        call = fn
        if name in self.plan.functions or name in self.plan.replaced:
            call = self._timed(name, fn)
        if name == self.plan.check:
            call = self._kept(call)
        return functools.wraps(fn)(self._stepped(name, call) if name == self.plan.step else call)

    def _timed(self, name: str, fn: Any) -> Callable[..., Any]:
        replacement = self.plan.replaced.get(name)
        chosen = fn if replacement is None else self._replacing(name, fn, replacement)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = chosen(*args, **kwargs)
            seconds = time.perf_counter() - began
            self.add_launch(name, began, seconds)
            self.turns.count(name, seconds)
            return result

        return timed

    def _stepped(self, name: str, fn: Any) -> Callable[..., Any]:
        def stepped(*args: Any, **kwargs: Any) -> Any:
            _synchronize()
            began = time.perf_counter()
            result = fn(*args, **kwargs)
            _synchronize()
            seconds = time.perf_counter() - began
            self._steps.append((began, seconds))
            self.turns.count(name, seconds)
            return result

        return stepped

    def _kept(self, fn: Any) -> Callable[..., Any]:
        def kept(*args: Any, **kwargs: Any) -> Any:
            result = fn(*args, **kwargs)
            if len(self._checks) < (_MOST_CHECKS if self.plan.compare else 1):  # one tells that it is called
                with suppress(Exception):
                    self._checks.append(_copied(result))
            return result

        return kept

    def _replacing(self, name: str, fn: Any, source: str) -> Callable[..., Any]:
        module = types.ModuleType("forecast_autotune_replacement")
        exec(compile(source, f"<source of {name}>", "exec"), vars(module))
        signature = inspect.signature(fn)

        def replacing(*args: Any, **kwargs: Any) -> Any:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError:
                return fn(*args, **kwargs)
            bound.apply_defaults()
            if not self.turns.on or not module.covers(**bound.arguments):
                return fn(*args, **kwargs)
            compared = self._counts_compared(name)
            result = module.run(**{n: v for n, v in bound.arguments.items() if _is_tensor(v)})
            if self.plan.compare and compared:
                self._note_difference(name, relative_difference(fn, bound.arguments, result))
            return result

        return replacing

    def _counts_compared(self, name: str) -> bool:
        """Count a replaced call; whether it is one to compare: of the first ones, or one of many later."""
        count = self._replaced[name] = self._replaced.get(name, 0) + 1
        return count <= _COMPARED_CALLS or count % _COMPARED_CALLS == 0

    def _note_difference(self, name: str, difference: float) -> None:
        self._differences[name] = max(difference, self._differences.get(name, 0.0))

    def _compare_variants(self) -> None:
        with suppress(Exception):  # without Triton nothing is launched
            from forecast_integrations.triton import engine
            from forecast_integrations.triton.variants import loading

            compared = self.compared(loading.launch_variant)
            vars(engine)["launch_variant"] = vars(loading)["launch_variant"] = compared

    def _serve_in_turns(self) -> None:
        """Launch the base, as if there were no variants, while it is its turn."""
        with suppress(Exception):  # without Triton nothing is launched
            from forecast_integrations.triton import engine, untuned
            from forecast_integrations.triton.problem.source import innermost
            from forecast_integrations.triton.variants.loading import (
                CompiledVariant,
                VariantConfig,
                launch_base,
            )

            launch, run, turns = engine._launch, untuned.ServedKernel.run, self.turns
            again, bases = CompiledVariant._launch, dict[int, tuple[CompiledVariant, Any]]()

            def launch_in_turns(
                tuner: Any, config: Any, args: Any, kwargs: dict[str, Any], form: Any = None
            ) -> Any:
                if not turns.on and config.__class__ is VariantConfig:
                    config = config.fallback or tuner.configs[0]
                result = launch(tuner, config, args, kwargs, form)
                if not kwargs.get("warmup"):
                    turns.count(innermost(tuner.fn).__name__)
                return result

            def run_in_turns(served: Any, args: Any, kwargs: dict[str, Any]) -> Any:
                if turns.on:
                    return run(served, args, kwargs)
                result = served.jit.run(*args, **kwargs)
                turns.count(served.jit.__name__)
                return result

            def launch_kept_in_turns(kept: CompiledVariant, grid: Any, *args: Any) -> Any:
                if turns.on:
                    result = again(kept, grid, *args)
                else:
                    if id(kept) not in bases:
                        config, kwargs = kept.call(grid, args)
                        base = launch_base(kept.tuner, config, (), {**kwargs, "warmup": True})
                        bases[id(kept)] = kept, base
                    result = bases[id(kept)][1][grid](*args)  # as the wrapper would
                turns.count(innermost(kept.tuner.fn).__name__)
                return result

            vars(engine)["_launch"] = launch_in_turns
            setattr(CompiledVariant, "_launch", launch_kept_in_turns)  # noqa: B010
            setattr(untuned.ServedKernel, "run", run_in_turns)  # noqa: B010

    def compared(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        """Launch variants of kernels, and at some calls the base behind them; the program gets the base's results."""
        from forecast_integrations.triton.problem.source import innermost
        from forecast_integrations.triton.variants.loading import launch_base

        def compare(
            tuner: Any, config: Any, args: tuple[Any, ...], kwargs: dict[str, Any], form: Any = None
        ) -> Any:
            if not config.function.covers(args, kwargs):
                return launch(tuner, config, args, kwargs)
            name = innermost(tuner.fn).__name__
            if not self._counts_compared(name) or _records_graph():
                return launch(tuner, config, args, kwargs)
            # Without autograd's count of what is written to: what it has saved is the same again in the end.
            tensors = [v.data for v in (*args, *kwargs.values()) if hasattr(v, "untyped_storage")]
            try:
                before, theirs = ([t.clone() for t in tensors] for _ in range(2))
            except RuntimeError:  # the device has no memory for it
                return launch(tuner, config, args, kwargs)
            result = launch(tuner, config, args, dict(kwargs))
            for kept, tensor in zip(theirs, tensors, strict=True):
                kept.copy_(tensor)
            for tensor, kept in zip(tensors, before, strict=True):
                tensor.copy_(kept)
            launch_base(tuner, config, args, kwargs)
            self._note_difference(name, max(map(_distance, theirs, tensors), default=0.0))
            return result

        return compare

    # --- the end ---

    def _write(self, owner: int) -> None:
        if os.getpid() != owner or (self.folder / RECORDING_FILE).exists():
            return  # a forked child, or the launcher of a rank that has been recorded
        sys.setprofile(None)
        seconds = time.perf_counter() - self._began
        device, peak = None, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        blocks: list[TurnBlock] = []
        with suppress(Exception):
            listed = _device_launches(self._profiler)
            for name, start, duration in listed:
                self.add_launch(name, start, duration)
            blocks = self.turns.blocks(listed)
        torch = sys.modules.get("torch")
        if (cuda := _cuda()) is not None:
            with suppress(Exception):
                peak = cuda.max_memory_allocated()
        with suppress(Exception):
            from forecast_integrations.device import current_device

            device = current_device()
        if torch is not None and self._checks:
            with suppress(Exception):
                torch.save(self._checks, self.folder / CHECK_FILE)
        recording = ProgramRecording(
            device=device if isinstance(device, Device) else None,
            seconds=seconds,
            names=tuple(self._names),
            launches=tuple(self._launches),
            steps=tuple(self._steps),
            functions=() if self._finder is None else tuple(self._finder.listed()),
            differences=self._differences,
            replaced_calls=self._replaced,
            peak_bytes=int(peak),
            blocks=tuple(blocks),
            unturned=tuple(self.turns.unturned),
        )
        write_atomically(self.folder / RECORDING_FILE, json.dumps(recording.to_json()).encode())


class StepBlocks:
    """Blocks of steps with the sources that are to be proved, and blocks without, in turns: one border between two.

    The first block ends at the first border; it has the program's start, and does not count. It is served, so that
    wrappers of tuners that keep what a launch returned keep what can take turns.
    """

    def __init__(self, plan: RecordingPlan) -> None:
        self._plan = plan
        self.on = True
        """Whether sources are served now."""
        self._calls = 0
        self._borders: list[tuple[Any, bool, int]] = []
        """Time, whether the block before it was served, its most memory."""
        self._settled: list[Any] = []
        """The time at which a block begins to count, from the second block on."""
        self._launched: dict[str, list[int]] = defaultdict(list)
        """The block of every launch of a kernel; 0 for those that do not count."""
        self._timed: dict[tuple[str, int], list[float]] = defaultdict(list)
        """Seconds of launches, by name and block."""
        self.unturned: list[str] = []

    def count(self, name: str, seconds: float | None = None) -> None:
        """Note a call that has ended; a function's with its seconds. It may be the last one of its block."""
        if not self._plan.block:
            return
        block = len(self._borders) if len(self._settled) == len(self._borders) else 0
        if seconds is None:
            self._launched[name].append(block)
        else:
            self._timed[name, block].append(seconds)
        if name == self._plan.marker and not _records_graph():
            self._calls += 1
            if self._borders and self._calls % self._plan.block == self._plan.settling:
                self._settled.append(_stamp())
            if self._calls % self._plan.block == 0:
                peak = _peak_since() if self._plan.profile else 0
                self._borders.append((_stamp(), self.on, peak))
                # Two blocks of a kind follow each other, so that what drifts favours neither.
                self.on = self._plan.served_first != bool(len(self._borders) // 2 % 2)

    def blocks(self, launches: Sequence[tuple[str, float, float]]) -> list[TurnBlock]:
        """The blocks, given name, start and seconds of the device's launches in order, as far as they were timed."""
        timed = defaultdict(list)
        for name, _, seconds in launches:
            timed[name].append(seconds)
        self.unturned = [n for n, listed in timed.items() if len(listed) != len(self._launched[n])]
        for name, blocks in self._launched.items():
            for number, seconds in zip(blocks, timed[name], strict=False):
                self._timed[name, number].append(seconds)
        medians: dict[int, dict[str, float]] = defaultdict(dict)
        for (name, number), listed in self._timed.items():
            medians[number][name] = statistics.median(listed)
        _synchronize()
        found = []
        for number, (begin, (end, served, peak)) in enumerate(
            zip(self._settled, self._borders[1:], strict=False), 1
        ):
            steps = self._timed.get((self._plan.step, number))
            seconds = sum(steps) if steps else _elapsed(begin, end)
            found.append(TurnBlock(served, seconds, peak, medians[number]))
        return found


def _cuda() -> Any:
    """`torch.cuda` once the program uses it, else None."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None


def _records_graph() -> bool:
    """Whether what is launched now runs later, in a CUDA graph, and then without us."""
    return (cuda := _cuda()) is not None and cuda.is_current_stream_capturing()


def _synchronize() -> None:
    if (cuda := _cuda()) is not None and not _records_graph():
        cuda.synchronize()


def _stamp() -> Any:
    """The time at which the device gets here; the host's without one."""
    if (cuda := _cuda()) is None:
        return time.perf_counter()
    event = cuda.Event(enable_timing=True)
    event.record()
    return event


def _elapsed(begin: Any, end: Any) -> float:
    return float(end - begin if isinstance(begin, float) else begin.elapsed_time(end) * 1e-3)


def _peak_since() -> int:
    """The most memory since the last call: the device's, as torch allocated it, or the process's where Linux tells."""
    if (cuda := _cuda()) is not None:
        peak = int(cuda.max_memory_allocated())
        cuda.reset_peak_memory_stats()
        return peak
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # begins the peak anew
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def _copied(value: Any) -> Any:
    """Tensors of a nest of lists and mappings as copies on the CPU, numbers as they are."""
    if hasattr(value, "detach"):
        return value.detach().cpu().clone()
    if isinstance(value, Mapping):
        return {str(k): _copied(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(v) for v in value]
    return value if isinstance(value, bool | int | float) else None


def _device_profiler() -> Any:
    """A running profiler of launches alone; None where there is no CUDA device."""
    with suppress(Exception):
        import torch
        from torch.profiler import ProfilerActivity, profile

        if torch.cuda.is_available():
            profiler = profile(activities=[ProfilerActivity.CUDA])
            profiler.start()
            return profiler
    return None


def _device_launches(profiler: Any) -> list[tuple[str, float, float]]:
    """Name, start and seconds of every kernel that ran, in order."""
    if profiler is None:
        return []
    from torch.autograd import DeviceType

    profiler.stop()
    events = [e for e in profiler.profiler.kineto_results.events() if e.device_type() == DeviceType.CUDA]
    listed = [(e.name(), e.start_ns() * 1e-9, e.duration_ns() * 1e-9) for e in events]
    return sorted((e for e in listed if not e[0].startswith(("Memcpy", "Memset"))), key=lambda e: e[1])


def relative_difference(fn: Any, arguments: Mapping[str, Any], result: Any) -> float:
    """How far results lie from the original's, as a multiple of what is accepted; infinite for other shapes.

    Accepted is four times the original's own distance from itself in float64, and some rounding of its results.
    """
    import torch

    with torch.no_grad():
        own = _listed(fn(**arguments))
        wide = {n: v.double() if _is_tensor(v) and v.is_floating_point() else v for n, v in arguments.items()}
        try:
            exact = _listed(fn(**wide))
        except Exception:  # a function with a dtype of its own
            exact = [t.double() if t.is_floating_point() else t for t in own]
    theirs, worst = _listed(result), 0.0
    if len(own) != len(theirs):
        return 1e9
    for mine, new, truth in zip(own, theirs, exact, strict=True):
        if mine.shape != new.shape or mine.dtype != new.dtype:
            return 1e9
        if not mine.is_floating_point():
            worst = max(worst, 0.0 if bool(torch.equal(mine, new)) else 1e9)
            continue
        finite = mine.isfinite()
        if not bool(torch.equal(finite, new.isfinite())):
            return 1e9
        distance = (new.double() - truth.double())[finite].abs()
        allowed = 4 * (mine.double() - truth.double())[finite].abs().max() if distance.numel() else 0.0
        scale = truth.double()[finite].abs()
        limit = allowed + 8 * torch.finfo(mine.dtype).eps * (scale + scale.mean())
        if distance.numel():
            worst = max(worst, min(1e9, float((distance / limit.clamp_min(1e-300)).max())))
    return worst


def _distance(new: Any, own: Any) -> float:
    """How far a kernel's result lies from the original's, as a multiple of what is accepted: both are rounded."""
    import torch

    if not own.is_floating_point():
        return 0.0 if torch.equal(new, own) else 1e9
    limit = 2e-2 if own.element_size() <= 2 else 1e-3
    a, b = new.double(), own.double()
    finite = b.isfinite()
    if not torch.equal(finite, a.isfinite()):
        return 1e9
    a, b = a[finite], b[finite]
    return min(1e9, float((a - b).norm() / b.norm().clamp_min(1e-300)) / limit) if b.numel() else 0.0


def _listed(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple | list) else [result]


# --- functions of torch code ---


@dataclass
class _CalledFunction:
    """A function that has been called."""

    name: str
    file: str
    code: types.CodeType
    calls: int = 0
    seconds: float = 0.0
    forms: dict[Any, FunctionCall] = field(default_factory=dict)
    problem: str = ""


class FunctionFinder:
    """Finds the functions at the top level of the program's own files that take tensors and return tensors."""

    def __init__(self, recorder: ProgramRecorder) -> None:
        self._recorder = recorder
        self._root = recorder.plan.root.rstrip("/") + "/"
        self._known: dict[types.CodeType, _CalledFunction | None] = {}
        self._open: list[tuple[Any, _CalledFunction, float, Any, float]] = []
        """Frame, candidate, start, the arguments of a new form, and seconds inside of other candidates."""

    def look(self, frame: types.FrameType, event: str, value: Any) -> None:
        """A profile function of `sys.setprofile`. Never raises: the program goes on, unobserved."""
        try:
            self._look(frame, event, value)
        except Exception:
            sys.setprofile(None)

    def _look(self, frame: types.FrameType, event: str, value: Any) -> None:
        if event == "call":
            code = frame.f_code
            candidate = self._known.get(code, self)
            if candidate is self:
                candidate = self._known[code] = self._candidate(frame)
            if isinstance(candidate, _CalledFunction):
                noted = self._noted(candidate, frame)
                self._open.append((frame, candidate, time.perf_counter(), noted, 0.0))
        elif event == "return" and self._open and self._open[-1][0] is frame:
            now = time.perf_counter()
            _, candidate, began, noted, inside = self._open.pop()
            if noted is not None:
                self._close(candidate, noted, value)
            candidate.calls += 1
            candidate.seconds += now - began - inside
            self._recorder.add_launch(candidate.name, began, now - began - inside)
            if self._open:
                *others, above = self._open[-1]
                self._open[-1] = (*others, above + time.perf_counter() - began)

    def listed(self) -> list[TorchFunction]:
        """The functions that were called, the one that took longest first."""
        met = [c for c in self._known.values() if c is not None and (c.forms or c.problem)]
        return [
            TorchFunction(c.name, c.file, c.calls, c.seconds, tuple(c.forms.values()), c.problem)
            for c in sorted(met, key=lambda c: -c.seconds)
        ]

    def _candidate(self, frame: types.FrameType) -> _CalledFunction | None:
        code, names = frame.f_code, frame.f_globals
        if code.co_filename.startswith("<") or code.co_name.startswith("<"):
            return None
        file = str(Path(code.co_filename).absolute())
        if not file.startswith(self._root) or "/site-packages/" in file:
            return None
        if not any(_is_tensor(frame.f_locals.get(n)) for n in _parameters(code)):
            return None
        fn = names.get(code.co_name)
        # While a module is executed its functions appear one by one.
        if getattr(fn, "__code__", None) is not code or hasattr(fn, "__wrapped__"):
            return None
        return _CalledFunction(f"{names.get('__name__', '')}:{code.co_name}", file, code)

    def _noted(self, candidate: _CalledFunction, frame: types.FrameType) -> Any:
        """The arguments of a form that has not been met, with the versions of its tensors; None for others."""
        if candidate.problem:
            return None
        code, values = frame.f_code, frame.f_locals
        named = {n: values[n] for n in _parameters(code)}
        form = tuple(map(_form_of, named.values()))
        if form in candidate.forms or len(candidate.forms) >= _MOST_FORMS:
            return None
        try:
            arguments = tuple(_argument(n, v) for n, v in named.items())
        except ValueError as error:
            candidate.problem = str(error)
            return None
        if code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR):
            candidate.problem = "it takes any number of arguments, or yields"
            return None
        tensors = {n: v for n, v in named.items() if _is_tensor(v)}
        return form, arguments, {n: (t, t._version) for n, t in tensors.items()}

    def _close(self, candidate: _CalledFunction, noted: Any, result: Any) -> None:
        form, arguments, versions = noted
        if changed := [n for n, (tensor, before) in versions.items() if tensor._version != before]:
            candidate.problem = f"it writes to its argument {', '.join(changed)}"
            return
        try:
            results = tuple(_argument(f"y{n}", v) for n, v in enumerate(_listed(result)))
        except ValueError as error:
            candidate.problem = f"result: {error}"
            return
        if not all(r.kind == "tensor" for r in results):
            candidate.problem = "it returns something else than tensors"
            return
        candidate.forms[form] = FunctionCall(arguments, results)


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "untyped_storage") and hasattr(value, "_version")


def _parameters(code: types.CodeType) -> tuple[str, ...]:
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _form_of(value: Any) -> Any:
    return (tuple(value.shape), value.dtype) if _is_tensor(value) else repr(value)[:100]


def _argument(name: str, value: Any) -> Argument:
    """An argument as a record. Raises `ValueError` for what cannot be handed to another process."""
    if value is None or isinstance(value, bool | int | float | str):
        if value in (math.inf, -math.inf) or value != value:
            raise ValueError(f"{name} is {value}, which no record holds")
        return Argument(name, "scalar", type(value).__name__, value=value)
    if not _is_tensor(value):
        raise ValueError(f"{name} is a {type(value).__name__}, neither a tensor nor a number")
    if type(value).__name__ != "Tensor" and type(value).__name__ != "Parameter":
        raise ValueError(f"{name} is a {type(value).__name__}, no plain tensor")
    import torch

    if value.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} needs gradients, and a source would give none")
    if not value.is_contiguous():
        raise ValueError(f"{name} is not contiguous")
    bounds = {}
    if value.numel() and not value.dtype.is_complex:
        finite = value[value.isfinite()] if value.is_floating_point() else value
        if finite.numel():
            bounds = {"least": float(finite.min()), "most": float(finite.max())}
    return Argument(
        name,
        "tensor",
        str(value.dtype).removeprefix("torch."),
        tuple(value.shape),
        tuple(value.stride()),
        extra=bounds,
    )
