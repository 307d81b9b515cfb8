"""`run --recording FOLDER`: a program's launches, the times of its steps, and calls of its functions of torch code.

The folder's plan lists the functions to record and those that run a verified source. No failure here ends the
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
_FIRST_COMPARISONS = 20
"""First calls of a replaced function, which are all compared; of later calls one in so many is."""
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
        self._replacement_calls: dict[str, int] = {}
        self._functions = {*self.plan.functions, *self.plan.replaced, self.plan.step, self.plan.check} - {""}
        self._finder = FunctionFinder(self) if self.plan.discover else None
        self.turns = StepBlocks(self.plan)
        self._profiler: Any = None
        self._begin = 0.0

    def start(self) -> None:
        """Begin right before the program, when `sys.path` is the program's own."""
        if "RANK" not in os.environ:  # a rank's children inherit its number
            os.environ[RANK_FOLDER] = str(self.folder)
        atexit.register(self._write, os.getpid())
        for module in {name.partition(":")[0] for name in self._functions} - {"__main__"}:
            self._observe_module(module)
        if self.plan.compare and self.plan.serve:
            self._compare_variants()
        if self.plan.block and self.plan.serve:
            self._serve_in_turns()
        self._profiler = _device_profiler() if self.plan.profile else None
        self._begin = time.perf_counter()
        if self._finder is not None:
            sys.setprofile(self._finder.look)

    def code_of_main(self, data: bytes, path: str) -> types.CodeType | None:
        """Return the program's code with the plan's functions decorated; None where it has none of them."""
        names = {n.partition(":")[2] for n in self._functions if n.startswith("__main__:")}
        if not names:
            return None
        tree = ast.parse(data, path)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name in names:
                place = {
                    n: getattr(node, n) for n in ("lineno", "col_offset", "end_lineno", "end_col_offset")
                }
                node.decorator_list.insert(0, ast.Name(_OBSERVE, ast.Load(), **place))
        return compile(tree, path, "exec", dont_inherit=True)

    @property
    def names_for_main(self) -> dict[str, Any]:
        """Names that the program's module needs for its decorated functions."""
        return {_OBSERVE: lambda fn: self._wrapper(f"__main__:{fn.__name__}", fn)}

    def add_launch(self, name: str, start: float, seconds: float) -> None:
        """Note one launch."""
        self._launches.append((self._names.setdefault(name, len(self._names)), start, seconds))

    def _observe_module(self, name: str) -> None:
        with suppress(Exception):  # the program will raise the same error
            module = importlib.import_module(name)
            for qualified_name in self._functions:
                place, _, function = qualified_name.partition(":")
                if place == name and callable(fn := getattr(module, function, None)):
                    setattr(module, function, self._wrapper(qualified_name, fn))

    def _wrapper(self, name: str, fn: Any) -> Any:
        call = fn
        if name in self.plan.functions or name in self.plan.replaced:
            call = self._timing_wrapper(name, fn)
        if name == self.plan.check:
            call = self._result_wrapper(call)
        return functools.wraps(fn)(self._step_wrapper(name, call) if name == self.plan.step else call)

    def _timing_wrapper(self, name: str, fn: Any) -> Callable[..., Any]:
        replacement = self.plan.replaced.get(name)
        call = fn if replacement is None else self._replacement_wrapper(name, fn, replacement)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = call(*args, **kwargs)
            seconds = time.perf_counter() - begin
            self.add_launch(name, begin, seconds)
            self.turns.count(name, seconds)
            return result

        return wrapper

    def _step_wrapper(self, name: str, fn: Any) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            _synchronize()
            begin = time.perf_counter()
            result = fn(*args, **kwargs)
            _synchronize()
            seconds = time.perf_counter() - begin
            self._steps.append((begin, seconds))
            self.turns.count(name, seconds)
            return result

        return wrapper

    def _result_wrapper(self, fn: Any) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = fn(*args, **kwargs)
            if len(self._checks) < (_MOST_CHECKS if self.plan.compare else 1):  # one proves the call
                with suppress(Exception):
                    self._checks.append(_cpu_copy(result))
            return result

        return wrapper

    def _replacement_wrapper(self, name: str, fn: Any, source: str) -> Callable[..., Any]:
        module = types.ModuleType("forecast_autotune_replacement")
        exec(compile(source, f"<source of {name}>", "exec"), vars(module))
        signature = inspect.signature(fn)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError:
                return fn(*args, **kwargs)
            bound.apply_defaults()
            if not self.turns.on or not module.covers(**bound.arguments):
                return fn(*args, **kwargs)
            must_compare = self._must_compare(name)
            result = module.run(**{n: v for n, v in bound.arguments.items() if _is_tensor(v)})
            if self.plan.compare and must_compare:
                self._note_difference(name, relative_difference(fn, bound.arguments, result))
            return result

        return wrapper

    def _must_compare(self, name: str) -> bool:
        """Count a replaced call; returns whether to compare it: one of the first, or one of many later."""
        count = self._replacement_calls[name] = self._replacement_calls.get(name, 0) + 1
        return count <= _FIRST_COMPARISONS or count % _FIRST_COMPARISONS == 0

    def _note_difference(self, name: str, difference: float) -> None:
        self._differences[name] = max(difference, self._differences.get(name, 0.0))

    def _compare_variants(self) -> None:
        with suppress(Exception):  # without Triton nothing is launched
            from forecast_integrations.triton import engine
            from forecast_integrations.triton.variants import loading

            compare = self.compared(loading.launch_variant)
            vars(engine)["launch_variant"] = vars(loading)["launch_variant"] = compare

    def _serve_in_turns(self) -> None:
        """Launch the base, as if there were no variants, while the base has its turn."""
        with suppress(Exception):  # without Triton nothing is launched
            from forecast_integrations.triton import engine, untuned
            from forecast_integrations.triton.problem.source import innermost
            from forecast_integrations.triton.variants.loading import (
                CompiledVariant,
                VariantConfig,
                launch_base,
            )

            launch, run, turns = engine._launch, untuned.ServedKernel.run, self.turns
            launch_compiled, bases = CompiledVariant._launch, dict[int, tuple[CompiledVariant, Any]]()

            def launch_in_turns(
                tuner: Any, config: Any, args: Any, kwargs: dict[str, Any], form: Any = None
            ) -> Any:
                if not turns.on and config.__class__ is VariantConfig:
                    config = config.fallback or tuner.configs[0]
                result = launch(tuner, config, args, kwargs, form)
                if not kwargs.get("warmup"):
                    turns.count(innermost(tuner.fn).__name__)
                return result

            def run_in_turns(kernel: Any, args: Any, kwargs: dict[str, Any]) -> Any:
                if turns.on:
                    return run(kernel, args, kwargs)
                result = kernel.jit.run(*args, **kwargs)
                turns.count(kernel.jit.__name__)
                return result

            def launch_compiled_in_turns(variant: CompiledVariant, grid: Any, *args: Any) -> Any:
                if turns.on:
                    result = launch_compiled(variant, grid, *args)
                else:
                    if id(variant) not in bases:
                        config, kwargs = variant.call(grid, args)
                        base = launch_base(variant.tuner, config, (), {**kwargs, "warmup": True})
                        bases[id(variant)] = variant, base
                    result = bases[id(variant)][1][grid](*args)  # as the wrapper would
                turns.count(innermost(variant.tuner.fn).__name__)
                return result

            vars(engine)["_launch"] = launch_in_turns
            setattr(CompiledVariant, "_launch", launch_compiled_in_turns)  # noqa: B010
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
            if not self._must_compare(name) or _records_graph():
                return launch(tuner, config, args, kwargs)
            # `data` hides the writes from autograd's version counts: in the end its saved tensors are unchanged.
            tensors = [v.data for v in (*args, *kwargs.values()) if hasattr(v, "untyped_storage")]
            try:
                before, copies = ([t.clone() for t in tensors] for _ in range(2))
            except RuntimeError:  # the device has no memory for it
                return launch(tuner, config, args, kwargs)
            result = launch(tuner, config, args, dict(kwargs))
            for copy, tensor in zip(copies, tensors, strict=True):
                copy.copy_(tensor)
            for tensor, copy in zip(tensors, before, strict=True):
                tensor.copy_(copy)
            launch_base(tuner, config, args, kwargs)
            self._note_difference(name, max(map(_distance, copies, tensors), default=0.0))
            return result

        return compare

    # --- the end ---

    def _write(self, owner: int) -> None:
        if os.getpid() != owner or (self.folder / RECORDING_FILE).exists():
            return  # a forked child, or the launcher of a rank that has been recorded
        sys.setprofile(None)
        seconds = time.perf_counter() - self._begin
        device, peak = None, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        blocks: list[TurnBlock] = []
        with suppress(Exception):
            launches = _device_launches(self._profiler)
            for name, start, duration in launches:
                self.add_launch(name, start, duration)
            blocks = self.turns.blocks(launches)
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
            functions=() if self._finder is None else tuple(self._finder.functions()),
            differences=self._differences,
            replaced_calls=self._replacement_calls,
            peak_bytes=int(peak),
            blocks=tuple(blocks),
            unturned=tuple(self.turns.unturned),
        )
        write_atomically(self.folder / RECORDING_FILE, json.dumps(recording.to_json()).encode())


class StepBlocks:
    """Blocks of steps with and without the sources under proof, in turns, with a border between two blocks.

    The first block ends at the first border; it has the program's start, and does not count. It runs the sources, so
    that wrappers of tuners which keep the result of a launch keep an object that can take turns.
    """

    def __init__(self, plan: RecordingPlan) -> None:
        self._plan = plan
        self.on = True
        """Whether launches run the sources now."""
        self._calls = 0
        self._borders: list[tuple[Any, bool, int]] = []
        """Time of the border, whether the block before it ran the sources, and that block's peak of memory."""
        self._starts: list[Any] = []
        """The time at which a block begins to count, from the second block on."""
        self._launch_blocks: dict[str, list[int]] = defaultdict(list)
        """The block of every launch of a kernel; 0 for launches that do not count."""
        self._seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
        """Seconds of launches, by name and block."""
        self.unturned: list[str] = []

    def count(self, name: str, seconds: float | None = None) -> None:
        """Count a call that has ended, a function's with its seconds; the block may end with it."""
        if not self._plan.block:
            return
        block = len(self._borders) if len(self._starts) == len(self._borders) else 0
        if seconds is None:
            self._launch_blocks[name].append(block)
        else:
            self._seconds[name, block].append(seconds)
        if name == self._plan.marker and not _records_graph():
            self._calls += 1
            if self._borders and self._calls % self._plan.block == self._plan.settling:
                self._starts.append(_stamp())
            if self._calls % self._plan.block == 0:
                peak = _peak_since() if self._plan.profile else 0
                self._borders.append((_stamp(), self.on, peak))
                # Two blocks of a kind follow each other, so that drift favours neither.
                self.on = self._plan.served_first != bool(len(self._borders) // 2 % 2)

    def blocks(self, launches: Sequence[tuple[str, float, float]]) -> list[TurnBlock]:
        """Return the blocks; `launches` are name, start and seconds of the device's launches that were timed."""
        by_name = defaultdict(list)
        for name, _, seconds in launches:
            by_name[name].append(seconds)
        self.unturned = [n for n, times in by_name.items() if len(times) != len(self._launch_blocks[n])]
        for name, numbers in self._launch_blocks.items():
            for number, seconds in zip(numbers, by_name[name], strict=False):
                self._seconds[name, number].append(seconds)
        medians: dict[int, dict[str, float]] = defaultdict(dict)
        for (name, number), times in self._seconds.items():
            medians[number][name] = statistics.median(times)
        _synchronize()
        blocks = []
        for number, (begin, (end, is_served, peak)) in enumerate(
            zip(self._starts, self._borders[1:], strict=False), 1
        ):
            steps = self._seconds.get((self._plan.step, number))
            seconds = sum(steps) if steps else _elapsed(begin, end)
            blocks.append(TurnBlock(is_served, seconds, peak, medians[number]))
        return blocks


def _cuda() -> Any:
    """`torch.cuda` once the program uses it, else None."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None


def _records_graph() -> bool:
    """Whether launches are recorded into a CUDA graph now, and run later without us."""
    return (cuda := _cuda()) is not None and cuda.is_current_stream_capturing()


def _synchronize() -> None:
    if (cuda := _cuda()) is not None and not _records_graph():
        cuda.synchronize()


def _stamp() -> Any:
    """Return an event for the device's time at this point; the host's time without a device."""
    if (cuda := _cuda()) is None:
        return time.perf_counter()
    event = cuda.Event(enable_timing=True)
    event.record()
    return event


def _elapsed(begin: Any, end: Any) -> float:
    return float(end - begin if isinstance(begin, float) else begin.elapsed_time(end) * 1e-3)


def _peak_since() -> int:
    """Return the peak of memory since the last call: torch's on the device, or the process's where Linux tells."""
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


def _cpu_copy(value: Any) -> Any:
    """Return nested lists and mappings with copies of their tensors on the CPU; numbers unchanged."""
    if hasattr(value, "detach"):
        return value.detach().cpu().clone()
    if isinstance(value, Mapping):
        return {str(k): _cpu_copy(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_cpu_copy(v) for v in value]
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
    launches = [(e.name(), e.start_ns() * 1e-9, e.duration_ns() * 1e-9) for e in events]
    return sorted((e for e in launches if not e[0].startswith(("Memcpy", "Memset"))), key=lambda e: e[1])


def relative_difference(fn: Any, arguments: Mapping[str, Any], value: Any) -> float:
    """Return the distance of results from the original's, as a multiple of the limit; 1e9 for other shapes.

    The limit is four times the original's own distance from itself in float64, and some rounding of its results.
    """
    import torch

    with torch.no_grad():
        own = _as_list(fn(**arguments))
        wide = {n: v.double() if _is_tensor(v) and v.is_floating_point() else v for n, v in arguments.items()}
        try:
            exact = _as_list(fn(**wide))
        except Exception:  # a function with a dtype of its own
            exact = [t.double() if t.is_floating_point() else t for t in own]
    results, worst = _as_list(value), 0.0
    if len(own) != len(results):
        return 1e9
    for original, result, truth in zip(own, results, exact, strict=True):
        if original.shape != result.shape or original.dtype != result.dtype:
            return 1e9
        if not original.is_floating_point():
            worst = max(worst, 0.0 if bool(torch.equal(original, result)) else 1e9)
            continue
        finite = original.isfinite()
        if not bool(torch.equal(finite, result.isfinite())):
            return 1e9
        distance = (result.double() - truth.double())[finite].abs()
        allowed = 4 * (original.double() - truth.double())[finite].abs().max() if distance.numel() else 0.0
        scale = truth.double()[finite].abs()
        limit = allowed + 8 * torch.finfo(original.dtype).eps * (scale + scale.mean())
        if distance.numel():
            worst = max(worst, min(1e9, float((distance / limit.clamp_min(1e-300)).max())))
    return worst


def _distance(new: Any, own: Any) -> float:
    """Return the distance of a kernel's result from the original's, as a multiple of a limit for rounding errors."""
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


def _as_list(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple | list) else [result]


# --- functions of torch code ---


@dataclass
class _FunctionRecord:
    """The calls of one function so far."""

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
        self._functions: dict[types.CodeType, _FunctionRecord | None] = {}
        self._open: list[tuple[Any, _FunctionRecord, float, Any, float]] = []
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
            candidate = self._functions.get(code, self)
            if candidate is self:
                candidate = self._functions[code] = self._candidate(frame)
            if isinstance(candidate, _FunctionRecord):
                new_form = self._new_form(candidate, frame)
                self._open.append((frame, candidate, time.perf_counter(), new_form, 0.0))
        elif event == "return" and self._open and self._open[-1][0] is frame:
            now = time.perf_counter()
            _, candidate, begin, new_form, inside = self._open.pop()
            if new_form is not None:
                self._close(candidate, new_form, value)
            candidate.calls += 1
            candidate.seconds += now - begin - inside
            self._recorder.add_launch(candidate.name, begin, now - begin - inside)
            if self._open:
                *head, inside_s = self._open[-1]
                self._open[-1] = (*head, inside_s + time.perf_counter() - begin)

    def functions(self) -> list[TorchFunction]:
        """The functions that were called, the one that took longest first."""
        functions = [c for c in self._functions.values() if c is not None and (c.forms or c.problem)]
        return [
            TorchFunction(c.name, c.file, c.calls, c.seconds, tuple(c.forms.values()), c.problem)
            for c in sorted(functions, key=lambda c: -c.seconds)
        ]

    def _candidate(self, frame: types.FrameType) -> _FunctionRecord | None:
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
        return _FunctionRecord(f"{names.get('__name__', '')}:{code.co_name}", file, code)

    def _new_form(self, candidate: _FunctionRecord, frame: types.FrameType) -> Any:
        """Return a new form of arguments, with the arguments and their tensors' versions; None for a known form."""
        if candidate.problem:
            return None
        code, values = frame.f_code, frame.f_locals
        arguments = {n: values[n] for n in _parameters(code)}
        form = tuple(map(_form_of, arguments.values()))
        if form in candidate.forms or len(candidate.forms) >= _MOST_FORMS:
            return None
        try:
            records = tuple(_argument(n, v) for n, v in arguments.items())
        except ValueError as error:
            candidate.problem = str(error)
            return None
        if code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR):
            candidate.problem = "it takes any number of arguments, or yields"
            return None
        tensors = {n: v for n, v in arguments.items() if _is_tensor(v)}
        return form, records, {n: (t, t._version) for n, t in tensors.items()}

    def _close(self, candidate: _FunctionRecord, new_form: Any, result: Any) -> None:
        form, arguments, versions = new_form
        if names := [n for n, (tensor, before) in versions.items() if tensor._version != before]:
            candidate.problem = f"it writes to its argument {', '.join(names)}"
            return
        try:
            results = tuple(_argument(f"y{n}", v) for n, v in enumerate(_as_list(result)))
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
    """Return an argument as a record. Raises `ValueError` for a value that another process cannot have."""
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
