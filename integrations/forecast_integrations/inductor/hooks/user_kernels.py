"""Kernels decorated with ours inside torch.compile: the plan decides which configs Inductor gets.

Inductor takes the `configs` of a user's tuner and drops the tuner: it calls neither `run` nor `bench` and
forgets `key`. When it takes a kernel into its graph, the operands' shapes are known, so the problem is the
one of an eager call: a stored decision leaves one config, else the plan's are compiled and timed
by Inductor on the real arguments, and those times go into the store.

Where an argument of the key is a dynamic size, Inductor would keep the first size's config for all: there the tuner
decides each value of the key at its first launch, as outside of a graph, and each keeps a launcher of its own.
"""

from __future__ import annotations

import copy
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from forecast_autotune.features.trace import trace_many
from forecast_autotune.features.ttir.extraction import assignment_of
from forecast_autotune.policy import WallTime
from forecast_autotune.printable import utc_now
from forecast_autotune.records import Candidate, Measurement, Outcome, Problem, digest
from forecast_autotune.store import Store
from forecast_autotune.surrogates.default import default_surrogate
from forecast_autotune.surrogates.protocol import Forecasts, Query, Surrogate
from forecast_integrations.inductor.choices.records import size_hints
from forecast_integrations.inductor.config_worker import kind_of
from forecast_integrations.inductor.harvest import PROTOCOL
from forecast_integrations.inductor.hooks.context import AnyFunction, HookContext, PatchSet, behind_wait
from forecast_integrations.inductor.hooks.descent import launcher_of
from forecast_integrations.inductor.operation_search import OperationSearch
from forecast_integrations.inductor.session import (
    SafeSurrogate,
    StoreSnapshot,
    TuningSession,
)
from forecast_integrations.triton.decorator import ForecastAutotuner
from forecast_integrations.triton.device_access import capturing_graph
from forecast_integrations.triton.prepare import prepare
from forecast_integrations.triton.problem import describe
from forecast_integrations.triton.problem.source import source_of
from forecast_integrations.triton.protocols import ConfigLauncher, LaunchConfig, Tuner, is_tensor

if TYPE_CHECKING:
    from torch._inductor.codecache import FxGraphHashDetails
    from torch._inductor.ir import UserDefinedTritonKernel
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch.fx import GraphModule

GraphGrid = Sequence[object]
"""A launch grid inside a graph: numbers and symbols."""

_TRACE_S = 1.0
"""Seconds for the IR of all configs of one kernel; without it the forecast is wider, not wrong."""
_MAX_PROBLEMS = 256
"""Problems remembered until Inductor has timed them."""


@dataclass(frozen=True)
class _ExpectedProblem:
    """A problem whose configs Inductor will time at the first run."""

    problem: Problem
    configs: Mapping[Candidate, LaunchConfig]
    store: Store

    def operands(self) -> list[tuple[str, tuple[int, ...]]]:
        """Dtype and shape of the tensors, in order."""
        return [(a.dtype, a.shape) for a in self.problem.arguments if a.kind == "tensor"]


class ExpectedProblems:
    """Problems by the name of their kernel, between lowering and the first run."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._problems: list[_ExpectedProblem] = []
        self._reduced_tuners: dict[tuple[int, tuple[int, ...]], Tuner] = {}

    def with_configs(self, tuner: Tuner, rows: tuple[int, ...]) -> Tuner:
        """The tuner with these configs alone: a copy, as the user's is used outside of the graph, too.

        The same one each time: Inductor keeps every kernel it has met for good.
        """
        with self._mutex:
            reduced = self._reduced_tuners.get((id(tuner), rows))
            if reduced is None:
                reduced = self._reduced_tuners[id(tuner), rows] = copy.copy(tuner)
                reduced.configs = [tuner.configs[i] for i in rows]
            return reduced

    def add(self, entry: _ExpectedProblem) -> None:
        """Remember a problem; the oldest are forgotten."""
        with self._mutex:
            self._problems = [*(e for e in self._problems if e.problem.id != entry.problem.id), entry][
                -_MAX_PROBLEMS:
            ]

    def find(self, kernel: str, tensors: Sequence[tuple[str, tuple[int, ...]]]) -> _ExpectedProblem | None:
        """The problem that was timed with these tensors; None when no or several kernels could be meant."""
        with self._mutex:
            matches = [
                e for e in self._problems if e.problem.kernel.name == kernel and e.operands() == list(tensors)
            ]
        return matches[0] if len(matches) == 1 else None


class _SurrogateWithIr:
    """A surrogate that is told the launch grids and the IR, which whoever asks it here does not know."""

    def __init__(
        self, inner: Surrogate, grids: Mapping[Candidate, tuple[int, ...]], ttir: Mapping[str, str]
    ) -> None:
        self.name, self.version = inner.name, inner.version
        self._inner, self._grids, self._ttir = inner, grids, ttir

    def forecast(self, query: Query) -> Forecasts:
        return self._inner.forecast(replace(query, grids=self._grids, ttir=self._ttir))


def install(context: HookContext) -> PatchSet:
    """Hook the node that Inductor makes of a user's kernel, and the run-time benchmark of its configs."""
    from torch._inductor import codecache, ir
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    memory = ExpectedProblems()
    patches = PatchSet()
    patches.replace(ir.UserDefinedTritonKernel, "__init__", lambda f: _hook_lowering(f, context, memory))
    patches.replace(CachingAutotuner, "benchmark_all_configs", lambda f: _hook_benchmark(f, context, memory))
    patches.replace(codecache.FxGraphHashDetails, "__init__", lambda f: _hash_details(f, context))
    patches.replace(AsyncCompile, "wait", lambda f: _hook_kernels(f, context))
    return patches


def _hook_kernels(original: AnyFunction, context: HookContext) -> AnyFunction:
    def serve(session: TuningSession, values: Sequence[Any]) -> None:
        for kernel in values:
            if (tuner := tuner_by_key(kernel)) is not None:
                kernel.run = LaunchesByKey(context, kernel, tuner)

    return behind_wait(original, context, serve, "decide a user's kernel for each key")


def tuner_by_key(kernel: Any) -> ForecastAutotuner | None:
    """The tuner of a user's kernel that was compiled with all of its configs, two or more; else None.

    Raises `LookupError` where tuners with different keys could be meant.
    """
    if not hasattr(kernel, "heuristic_type") or kind_of(kernel) != "USER_AUTOTUNE":
        return None
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
    from torch._inductor.runtime.triton_heuristics import config_to_dict

    configs = [grid["config"] for grid in kernel.inductor_meta.get("precomputed_grids", ())]
    text = _source_without_name(kernel.fn)
    tuners = [k for k in kernel_side_table.id_to_kernel.values() if isinstance(k, ForecastAutotuner)]
    owners = [k for k in tuners if len(k.configs) == len(configs) and _source_without_name(k) == text]
    owners = [k for k in owners if all(config_to_dict(c) in configs for c in k.configs)]
    if len({tuple(owner.keys) for owner in owners}) > 1:
        raise LookupError(f"one key of kernel {kernel.fn.__name__}, got {[owner.keys for owner in owners]}")
    return owners[-1] if owners and len(configs) > 1 else None


def _source_without_name(fn: object) -> str:
    """A kernel's source behind its name, which Inductor changes where names have to be unique."""
    return source_of(fn).partition("(")[2].strip()


class LaunchesByKey:
    """The launches of a user's kernel in a compiled graph: each value of the key has a launcher of its own."""

    def __init__(self, context: HookContext, kernel: Any, tuner: ForecastAutotuner) -> None:
        self._context, self._kernel, self._tuner = context, kernel, tuner
        constants = {kernel.fn.arg_names[i] for i in kernel.fn.constexprs}
        self._names = [
            n
            for n, kind in kernel.triton_meta["signature"].items()
            if kind != "constexpr" and n not in constants
        ]
        self._places = [i for i, name in enumerate(self._names) if name in tuner.keys]
        self._launchers: dict[tuple[object, ...], Any] = {}

    def __call__(self, *args: Any, **options: Any) -> object:
        """Launch with the config of this call's key; `options` are Inductor's."""
        kernel = self._kernel
        key = tuple([args[i] for i in self._places if not is_tensor(args[i])])
        launcher = self._launchers.get(key)
        if launcher is None and not capturing_graph():
            launcher = self._launchers[key] = self._launcher(args)
        if launcher and kernel.launchers[:1] != [launcher]:
            kernel.launchers, kernel._cached_launcher = [launcher], None
        return type(kernel).run(kernel, *args, **options)

    def _launcher(self, args: Sequence[Any]) -> Any:
        """A launcher for the config that the tuner decides on; False where Inductor's own has to do."""
        session = self._context.session
        if session is None:
            return False
        try:
            arguments = self._arguments(args)
            outcome = prepare(self._tuner, [{**arguments, "grid": self._grid(args)}]).keys[0]
            key = self._tuner._make_key(self._tuner.keys, (), arguments)
            chosen = self._tuner.cache.get(key)
            matches = [c for c in self._tuner.configs if chosen and _config_key(c) == _config_key(chosen)]
            if not matches:
                raise LookupError(outcome.trouble or f"a config of the kernel's own list, got {chosen}")
            return launcher_of(self._kernel, copy.copy(matches[0]))
        except Exception as error:
            mode = self._tuner._engine.options.settings().mode
            rest = session.after_failure("decide a user's kernel for a key", error, self._tuner.configs, mode)
            return launcher_of(self._kernel, copy.copy(rest[0])) if len(rest) == 1 else False

    def _arguments(self, args: Sequence[Any]) -> dict[str, object]:
        extra = self._kernel.inductor_meta.get("extra_launcher_args", ())
        if len(args) != len(self._names) + len(extra):
            raise LookupError(f"{len(self._names)} arguments and {len(extra)} of the grid, got {len(args)}")
        values = {
            **self._kernel.triton_meta.get("constants", {}),
            **dict(zip(self._names, args, strict=False)),
        }
        return {name: values[name] for name in self._tuner.arg_names if name in values}

    def _grid(self, args: Sequence[Any]) -> Callable[[Mapping[str, object]], tuple[int, ...]]:
        """The launch grid of this call, as a function of a config's parameters."""
        from torch._inductor.runtime.triton_heuristics import GridExpr

        meta = self._kernel.inductor_meta
        scope = dict(zip([*self._names, *meta.get("extra_launcher_args", ())], args, strict=True))
        own = self._tuner.configs[0].kwargs

        def grid(parameters: Mapping[str, object]) -> tuple[int, ...]:
            config = next(
                entry["config"]
                for entry in meta["precomputed_grids"]
                if all(parameters.get(name) == entry["config"].get(name) for name in own)
            )
            return tuple(map(int, GridExpr.from_meta(meta, config).eval_slow(dict(scope))))

        return grid


def _hash_details(original: AnyFunction, context: HookContext) -> AnyFunction:
    """The key of a compiled graph names configs and sources of its kernels; ours are chosen by rules, too."""

    def __init__(self: FxGraphHashDetails, gm: GraphModule, *args: object, **kwargs: object) -> None:
        original(self, gm, *args, **kwargs)
        session = context.session
        if session is None or not session.prunes or context.key_parts()[0] is None:
            return
        try:
            digests = rule_digests(gm)
        except Exception as error:
            session.warn_once("name the rules of a user's kernel in a cache key", error)
            digests = [os.urandom(16).hex()]
        if digests:
            self.forecast_autotune_kernels = digests

    return __init__


def rule_digests(gm: GraphModule) -> list[str]:
    """Digests of the surrogates, settings and policies of our tuners in a graph; none for a graph without."""
    from torch._higher_order_ops.triton_kernel_wrap import (
        kernel_side_table,
        triton_kernel_wrapper_functional,
        triton_kernel_wrapper_mutation,
    )

    wrappers = (triton_kernel_wrapper_functional, triton_kernel_wrapper_mutation)
    digests = set()
    for node in (n for part in gm.modules() if hasattr(part, "graph") for n in part.graph.nodes):
        if node.op != "call_function" or node.target not in wrappers:
            continue
        kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
        owner = _owning_tuner(kernel, list(kernel_side_table.id_to_kernel.values()))
        if owner is not None:
            options = owner._engine.options
            s = options.settings()
            surrogate = options.surrogate or default_surrogate(s.model)
            label = f"{surrogate.name}/{surrogate.version}"
            rules = (str(s.mode), s.tolerance, s.risk, repr(s.budget), s.seed, repr(options.policy))
            digests.add(digest(label, rules))
    return sorted(digests)


def _hook_lowering(original: AnyFunction, context: HookContext, memory: ExpectedProblems) -> AnyFunction:
    def __init__(
        self: UserDefinedTritonKernel,
        *,
        kernel_idx: int,
        grid: Sequence[GraphGrid],
        kernel_args: Mapping[str, object],
        **more: object,
    ) -> None:
        session = context.session
        if session is not None:
            try:
                kernel_idx, grid = _plan_kernel(session, kernel_idx, grid, kernel_args, memory)
            except Exception as error:
                session.warn_once("choose among the configs of a user's kernel", error)
        original(self, kernel_idx=kernel_idx, grid=grid, kernel_args=kernel_args, **more)

    return __init__


def _plan_kernel(
    session: TuningSession,
    kernel_idx: int,
    grid: Sequence[GraphGrid],
    kernel_args: Mapping[str, object],
    memory: ExpectedProblems,
) -> tuple[int, Sequence[GraphGrid]]:
    """The kernel and the grids that Inductor should go on with."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    tuner = kernel_side_table.get_kernel(kernel_idx)
    owner = _owning_tuner(tuner, list(kernel_side_table.id_to_kernel.values()))
    if owner is None or len(tuner.configs) < 2 or len(grid) != len(tuner.configs):
        return kernel_idx, grid
    try:
        rows = plan(session, owner, tuner.configs, kernel_args, grid, memory)
    except Exception as error:
        mode = owner._engine.options.settings().mode
        every = range(len(tuner.configs))
        rows = session.after_failure("choose among the configs of a user's kernel", error, every, mode)
    if len(rows) == len(tuner.configs):
        return kernel_idx, grid
    reduced = memory.with_configs(tuner, tuple(rows))
    return kernel_side_table.add_kernel(reduced), [grid[i] for i in rows]


def _owning_tuner(tuner: object, kernels: Sequence[object]) -> ForecastAutotuner | None:
    """The tuner of ours that a kernel in a graph comes from; None for a kernel of others.

    Dynamo runs `prune_configs_by` itself and puts a plain tuner with what is left in place of ours.
    """
    if isinstance(tuner, ForecastAutotuner):
        return tuner
    fn = getattr(tuner, "fn", None)
    tuners = [k for k in kernels if isinstance(k, ForecastAutotuner) and k.fn is fn]
    return tuners[-1] if tuners and hasattr(tuner, "configs") else None


def plan(
    session: TuningSession,
    tuner: ForecastAutotuner,
    listed: Sequence[LaunchConfig],
    kernel_args: Mapping[str, object],
    grids: Sequence[GraphGrid],
    memory: ExpectedProblems,
) -> list[int]:
    """Numbers of the `listed` configs that Inductor should compile, in their order; at least one.

    `listed` are the tuner's configs, as far as its own pruning left them; `kernel_args` are Inductor's nodes
    and numbers by argument name, `grids` the launch grid of each config. Settings, surrogate, policy and
    store are the tuner's own.
    """
    # In the order of an eager call: the key holds the dtypes of its arguments one after another.
    arguments = {name: _placeholder(kernel_args[name]) for name in tuner.arg_names if name in kernel_args}
    key = tuner._make_key(tuner.keys, (), arguments)
    kernel = describe.kernel_record(tuner.fn)
    problem = describe.describe(tuner.fn, kernel, arguments, key, None, configs=listed)
    configs = describe.configs_by_candidate(listed)
    options = tuner._engine.options
    settings = options.settings()
    store = options.open_store(settings)
    memory.add(_ExpectedProblem(problem, configs, store))
    if not session.prunes or any(getattr(kernel_args.get(n), "free_symbols", None) for n in tuner.keys):
        return list(range(len(listed)))  # `LaunchesByKey` decides at the launches
    launch_grids = {
        candidate: size_hints(grids[i])
        for i, config in enumerate(listed)
        for candidate, other in configs.items()
        if other is config
    }
    until, limit_s = session.snapshot.until, session.safe_surrogate.limit_s
    inner = options.surrogate or default_surrogate(settings.model)
    surrogate = _SurrogateWithIr(inner, launch_grids, _trace_candidates(tuner, arguments, list(configs)))
    kernel_session = TuningSession(
        settings,
        StoreSnapshot(store, until),
        SafeSurrogate(surrogate, limit_s, session.warn_once),
        session.warn_once,
        options.policy or WallTime(),  # as in eager mode, whose decisions are used here
    )
    candidates = set(OperationSearch(problem, list(configs), (), kernel_session).first())
    identities = {id(configs[c]) for c in candidates}
    return [i for i, config in enumerate(listed) if id(config) in identities]


def _placeholder(value: Any) -> object:
    """A stand-in for an operand, as its problem needs it: a tensor without storage, or a number."""
    import torch

    if hasattr(value, "get_size") and hasattr(value, "get_dtype"):
        value.realize()  # a stride is not certain before
        size, stride = size_hints(value.get_size()), size_hints(value.get_stride())
        return torch.empty_strided(size, stride, dtype=value.get_dtype(), device="meta")
    if getattr(value, "is_number", False) or hasattr(value, "free_symbols"):
        return size_hints([value])[0]
    return value


def _trace_candidates(
    tuner: Tuner, arguments: Mapping[str, object], candidates: Sequence[Candidate]
) -> dict[str, str]:
    """TTIR by assignment, as much as there is time for."""
    until = time.monotonic() + _TRACE_S
    assignments = {assignment_of(c): dict(c.config.kwargs) for c in candidates}
    texts: dict[str, str] = {}
    for name, text in trace_many(tuner.fn, (), arguments, list(assignments.values())):
        if isinstance(text, str):
            texts[name] = text
        if time.monotonic() > until:
            break
    return texts


def _hook_benchmark(original: AnyFunction, context: HookContext, memory: ExpectedProblems) -> AnyFunction:
    def benchmark_all_configs(
        self: CachingAutotuner, *args: object, **kwargs: object
    ) -> dict[ConfigLauncher, float]:
        timings: dict[ConfigLauncher, float] = original(self, *args, **kwargs)
        session = context.session
        if session is not None:
            try:
                kind = getattr(self.heuristic_type, "name", str(self.heuristic_type))
                if kind == "USER_AUTOTUNE":
                    save_user_timings(session, memory, self.fn.__name__, args, timings)
            except Exception as error:
                session.warn_once("keep the timings of a user's kernel", error)
        return timings

    return benchmark_all_configs


def save_user_timings(
    session: TuningSession,
    memory: ExpectedProblems,
    kernel: str,
    args: Sequence[object],
    timings: Mapping[ConfigLauncher, float],
) -> None:
    """File the times (milliseconds, by launcher) that Inductor took of a user's kernel."""
    tensors = [value for value in args if is_tensor(value)]
    operands = [(str(t.dtype).removeprefix("torch."), tuple(int(n) for n in t.shape)) for t in tensors]
    entry = memory.find(kernel, operands)
    if entry is None:
        return
    by_config = {_config_key(config): candidate for candidate, config in entry.configs.items()}
    count = 0
    for launcher, ms in timings.items():
        candidate = by_config.get(_config_key(launcher.config))
        if candidate is None:
            continue
        ok = math.isfinite(ms) and ms > 0
        outcome = Outcome.OK if ok else Outcome.OUT_OF_RESOURCES
        entry.store.add(
            entry.problem,
            Measurement(
                entry.problem.id,
                candidate,
                outcome,
                float(ms) if ok else None,
                protocol=PROTOCOL,
                at=utc_now(),
            ),
        )
        count += 1
    entry.store.sync()
    session.tally.count(timings=count)


def _config_key(config: LaunchConfig) -> tuple[object, ...]:
    """A key that tells configs apart that went through Inductor's generated code."""
    return (tuple(sorted(config.kwargs.items())), config.num_warps, config.num_stages)
