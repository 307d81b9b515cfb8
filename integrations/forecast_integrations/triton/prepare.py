"""`prepare`: decide a kernel's keys ahead of a capture or of serving, without a launch that a program could see."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from forecast_autotune.errors import CaptureError
from forecast_autotune.records import Decision, Evidence
from forecast_autotune.settings import Mode
from forecast_integrations.triton.background.arguments import copied_arguments
from forecast_integrations.triton.device_access import LOCK, capturing_graph
from forecast_integrations.triton.engine import TuningEngine
from forecast_integrations.triton.patch import tuning_parts
from forecast_integrations.triton.problem.describe import key_texts
from forecast_integrations.triton.problem.key import KeyMaker
from forecast_integrations.triton.problem.rebuilt_call import rebound_function
from forecast_integrations.triton.protocols import Key, Tuner, is_tensor

_STATUS = {Evidence.MEASURED: "decided", Evidence.STORED: "stored", Evidence.FORECAST: "forecast"}


@dataclass(frozen=True)
class PreparedKey:
    """The outcome for one call's key."""

    key: tuple[str, ...]
    status: str
    """`decided`: measured now. `stored`: the store knew. `forecast`: nothing could be timed. `known`: decided in this
    process before. `single`: there is one config. `pending`: decided in the background. `failed`: see `trouble`."""
    decision: Decision | None = None
    """The decision, if one was made."""
    trouble: str = ""


@dataclass(frozen=True)
class Preparation:
    """The outcomes for all calls that were given to `prepare`."""

    kernel: str
    keys: tuple[PreparedKey, ...]
    """In the order of the calls."""

    @property
    def failed(self) -> tuple[PreparedKey, ...]:
        """The keys that only a launch can decide."""
        return tuple(key for key in self.keys if key.status == "failed")

    def count(self, status: str) -> int:
        """Return the number of keys with this status."""
        return sum(key.status == status for key in self.keys)

    def __str__(self) -> str:
        counts = Counter(key.status for key in self.keys)
        text = ", ".join(f"{number} {status}" for status, number in sorted(counts.items()))
        return f"{self.kernel}: {text or 'no calls'}"


def prepare(kernel: object, calls: Iterable[Mapping[str, Any]]) -> Preparation:
    """Decide the keys of example calls of a tuned kernel, as launches would, but launch nothing that a program sees.

    Candidates are timed on copies of the calls' tensors: no tensor that is given is written. The modes and settings in
    force are obeyed, except that `background` mode waits.

    Args:
        kernel: a kernel under `@forecast_autotune`, or under `triton.autotune` once `patch_triton()` was called.
        calls: for each call, its arguments by name, the launch grid under `grid`, other launch options by their names.

    Returns:
        The result of each call. A call that cannot be decided is a failure in it, with the reason.

    Raises:
        TypeError: `kernel` is not tuned by this library.
        CaptureError: it is called inside a CUDA-graph capture.
    """
    tuner, heuristics = _tuner_of(kernel)
    parts = tuning_parts(tuner)
    if parts is None:
        raise TypeError(
            f"{tuner.base_fn.__name__} is tuned by Triton itself: decorate it with forecast_autotune, or call "
            "patch_triton() first"
        )
    if capturing_graph():
        raise CaptureError("prepare() was called inside a CUDA-graph capture, where nothing can be timed")
    outcomes = tuple(_decide_call(tuner, parts, heuristics, call) for call in calls)
    return Preparation(str(tuner.base_fn.__name__), outcomes)


def _tuner_of(kernel: object) -> tuple[Tuner, list[Mapping[str, Any]]]:
    """Return the tuner in or under `kernel`, and the heuristics above it, outermost first."""
    from triton.runtime.autotuner import Autotuner

    layer: Any = kernel
    layers: list[Mapping[str, Any]] = []
    while layer is not None and not isinstance(layer, Autotuner):
        if isinstance(values := getattr(layer, "values", None), dict):
            layers.append(values)
        layer = getattr(layer, "fn", None)
    if layer is None:
        raise TypeError(f"{kernel!r:.100} is no tuned kernel: give what @forecast_autotune made")
    tuner: Tuner = layer
    return tuner, layers


def _decide_call(
    tuner: Tuner,
    parts: tuple[TuningEngine, KeyMaker],
    heuristics: list[Mapping[str, Any]],
    call: Mapping[str, Any],
) -> PreparedKey:
    engine, make_key = parts
    key: Key = ()
    try:
        args, kwargs = _split(tuner, call)
        for layer in heuristics:
            for name, compute in layer.items():
                kwargs[name] = compute({**dict(zip(tuner.arg_names, args, strict=False)), **kwargs})
        make_key.learn_addresses(engine.text, tuner.fn, args, kwargs)
        key = make_key(tuner.keys, args, kwargs)
        texts = tuple(key_texts(key))
        if len(tuner.configs) < 2 and not engine.has_variants:
            return PreparedKey(texts, "single")
        with LOCK:
            if key in tuner.cache:
                return PreparedKey(texts, "known")
            if key in engine.pending:
                return PreparedKey(texts, "pending")
            before, mode = engine.last, engine.options.mode
            if engine.options.settings().mode is Mode.BACKGROUND:
                engine.options.mode = Mode.TUNE
            try:
                engine.resolve(tuner, key, *_copy_of_call(args, kwargs))
            finally:
                engine.options.mode = mode
            if key not in tuner.cache:
                return PreparedKey(texts, "pending")
            if engine.last is before or engine.last is None:
                return PreparedKey(texts, "single")
            return PreparedKey(texts, _STATUS[engine.last.evidence], engine.last)
    except Exception as error:
        return PreparedKey(tuple(key_texts(key)), "failed", trouble=f"{type(error).__name__}: {error}"[:500])


def _copy_of_call(
    args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return the call on copies of its tensors, also in its grid function. Raises `UncopyableArgumentsError`."""
    new_args, new_kwargs = copied_arguments(args, kwargs)
    copies = {id(old): new for old, new in zip(args, new_args, strict=True)}
    copies |= {id(kwargs[name]): new for name, new in new_kwargs.items()}
    grid = kwargs.get("grid")
    if isinstance(grid, FunctionType):
        new_kwargs["grid"] = rebound_function(
            grid, lambda value, name: copies.get(id(value), value) if is_tensor(value) else value
        )
    return new_args, new_kwargs


def _split(tuner: Tuner, call: Mapping[str, Any]) -> tuple[tuple[object, ...], dict[str, object]]:
    """The call as Triton makes it: as many arguments as possible by position. Raises `TypeError`."""
    arguments = dict(call)
    if "grid" not in arguments:
        raise TypeError("a call needs its launch grid, under the name grid")
    positional = []
    for name in tuner.arg_names:
        if name not in arguments:
            break
        positional.append(arguments.pop(name))
    arguments.setdefault("warmup", False)
    return tuple(positional), arguments
