"""A call whose key is a range: its sizes as calls and problems, made from this one, and one decision for all."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from forecast_autotune.policy import Policy
from forecast_autotune.ranges.robust import Robust
from forecast_autotune.ranges.tuning import RangePlan, RangePoint, RangeStore, range_store, tune_range
from forecast_autotune.records import Argument, Candidate, Decision, Kernel, Problem, digest
from forecast_autotune.settings import Settings
from forecast_autotune.surrogates.protocol import Surrogate
from forecast_autotune.tuning.loop import GuardedStore, TuningTask
from forecast_autotune.tuning.measurer import Measurer
from forecast_autotune.tuning.results import TuningStore
from forecast_integrations.device import current_device, fits_memory, toolchain
from forecast_integrations.triton.background.arguments import copied_arguments, stand_in_call
from forecast_integrations.triton.problem import describe
from forecast_integrations.triton.problem.call import KernelCall
from forecast_integrations.triton.problem.describe import (
    LazyGrids,
    call_options,
    candidate_grids,
    key_texts,
    options_identity,
    with_options,
)
from forecast_integrations.triton.problem.rebuilt_call import (
    RebuildError,
    ResizedArguments,
    fill_integers,
    rebuilt_value,
    resize_arguments,
    resize_grid,
)
from forecast_integrations.triton.protocols import Key, is_tensor

MakeMeasurer = Callable[[KernelCall, Problem, str, bool], Measurer]
"""(call, problem, kind of its arguments, whether it compiles candidates or finds them compiled) -> what times them."""


@dataclass(frozen=True)
class SizedCall:
    """The call at one size of the range, without storage: tensors are on torch's `meta` device."""

    value: int
    resized: ResizedArguments | None
    """None where the user's `rebuild` gave the arguments."""
    call: KernelCall
    problem: Problem


class RangeTuning:
    """One decision for the range that a call's key lies in.

    Raises `RebuildError` where the call cannot be made at another size.
    """

    def __init__(self, robust: Robust, call: KernelCall, kernel: Kernel, key: Key) -> None:
        self._robust, self._call, self._kernel, self._key = robust, call, kernel, key
        self._named: dict[str, Any] = call.arguments()
        self._arguments = describe.call_arguments(call.tuner.fn, self._named)
        if any("." in a.name for a in self._arguments):
            raise RebuildError("members of tuples cannot be made at another size")
        if call.functions:
            raise RebuildError("other sources of the kernel take part, which are checked size by size")
        stand_in_call(call, next(iter(call.configs.values())))  # which needs arguments that can be copied
        self.problem = self._range_problem()
        self.calls = [self._sized(value) for value in robust.points()]
        self._measured = [i for i, v in enumerate(robust.points()) if v in robust.measured]
        _require_memory([self.calls[i] for i in self._measured])

    @property
    def traced(self) -> SizedCall:
        """The largest measured size: its IR speaks for all of them."""
        return self.calls[self._measured[-1]]

    def _common(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those of the candidates that the user's own pruning leaves at every measured size.

        All of them where that would be none: then each is tried everywhere.
        """
        tuner = self._call.tuner
        if getattr(tuner, "early_config_prune", None) is None and getattr(tuner, "perf_model", None) is None:
            return list(candidates)
        before, left = tuner.nargs, list(candidates)
        try:
            for i in self._measured:
                call = self.calls[i].call
                tuner.nargs = dict(zip(tuner.arg_names, call.args, strict=False))
                kept = describe.configs_by_candidate(list(tuner.prune_configs(call.kwargs)))
                left = [c for c in left if c in kept]
        finally:
            tuner.nargs = before
        return left or list(candidates)

    def view(self, store: GuardedStore) -> RangeStore:
        """Return the store's rows of the range's sizes as rows of `problem`."""
        return range_store(store, self.problem.id, self._plan())

    def _plan(self) -> RangePlan:
        robust = self._robust
        points = [
            RangePoint(
                sized.problem,
                f"{robust.argument}={sized.value}",
                LazyGrids(partial(candidate_grids, sized.call, sized.call.grid, sized.call.arguments())),
            )
            for sized in self.calls
        ]
        return RangePlan(points, self._measured, robust.weights(), robust.shares(), robust.worst)

    def tune(
        self,
        task: TuningTask,
        make: MakeMeasurer,
        *,
        store: TuningStore,
        surrogate: Surrogate,
        settings: Settings,
        policy: Policy | None,
    ) -> Decision:
        """Decide; `task` is that of `traced`. Every rank of a job decides by itself. Raises what `tune` raises."""
        left = self._common(list(task.candidates))
        if len(left) < len(task.candidates):
            task = replace(task, candidates=left, fingerprint="")

        def measurers() -> list[Measurer]:
            measurers_by_size: list[Measurer] = []
            kinds: set[str] = set()
            for i in self._measured:
                sized = self.calls[i]
                kind = describe.call_kind(sized.problem, self._call.tuner.fn)
                measurers_by_size.append(
                    make(self._with_storage(sized), sized.problem, kind, kind not in kinds)
                )
                kinds.add(kind)
            return measurers_by_size

        call = self._call
        # What may be recorded as a miss is the met call, with its own grids.
        met = LazyGrids(partial(candidate_grids, call, call.grid, self._named))
        plan = self._plan()
        try:
            return tune_range(
                replace(task, problem=self.problem, grids=met),
                plan,
                measurers,
                store=store,
                surrogate=surrogate,
                settings=settings,
                policy=policy,
            )
        finally:  # each holds the tensors of a size
            for grids in (met, *(point.grids for point in plan.points)):
                if isinstance(grids, LazyGrids):
                    grids.close()

    def _range_problem(self) -> Problem:
        """The problem that the decision is filed under: the same whichever size of the range was met."""
        values = [
            [a.name, a.dtype, a.aligned] if a.kind == "tensor" else [a.name, a.kind, a.value]
            for a in self._arguments
            if a.kind != "scalar" and a.name != self._robust.argument
        ]
        options = call_options(self._call.tuner.fn.arg_names, self._named)
        shown = [
            self._robust.identity(),
            digest(key_texts(self._key)),
            values,
            *options_identity(options),
        ]
        problem = Problem.of(
            self._kernel,
            self._arguments,
            current_device(),
            key=key_texts(self._key),
            toolchain=toolchain(),
            identity=shown,
        )
        return with_options(problem, options)

    def _sized(self, value: int) -> SizedCall:
        robust, call = self._robust, self._call
        resized = None
        if robust.rebuild is not None:
            named: dict[str, Any] = {**self._named, robust.argument: value}
            given = dict(robust.rebuild(dict(named), value))
            grid: Any = given.pop("grid", call.grid)
            named |= given
        else:
            resized = resize_arguments(self._arguments, robust.argument, value)
            records = resized.by_name()
            named = {
                n: self._value(v, records[n], resized, "meta") if n in records else v
                for n, v in self._named.items()
            }
            config = next(iter(call.configs.values()))
            grid = resize_grid(call.grid, robust.argument, resized, self._named, named, config.all_kwargs())
        at = self._called(named, grid)
        key = [str(value) if part == robust.label else part for part in key_texts(self._key)]
        listed = list(call.configs.values())
        problem = describe.describe(call.tuner.fn, self._kernel, named, key, grid, configs=listed)
        if resized is not None:  # tensors without storage have no address
            problem = describe.resized_problem(problem, resized.arguments, key, problem.grid)
        return SizedCall(value, resized, at, problem)

    def _with_storage(self, sized: SizedCall) -> KernelCall:
        """The call with tensors of its own: nothing of the user's is ever launched on."""
        resized = sized.resized
        if resized is None:
            assert self._robust.rebuild is not None
            named: dict[str, Any] = {**self._named, self._robust.argument: sized.value}
            given = dict(self._robust.rebuild(dict(named), sized.value))
            named |= {n: v for n, v in given.items() if n != "grid"}
            own = {n: v for n, v in named.items() if is_tensor(v) and self._named.get(n) is v}
            return self._called({**named, **copied_arguments((), own)[1]}, given.get("grid", sized.call.grid))
        records = resized.by_name()
        named = {
            n: self._value(v, records[n], resized, None) if n in records else v
            for n, v in self._named.items()
        }
        called = self._called(named, sized.call.grid)
        made = [n for n, a in records.items() if a not in self._arguments or n in resized.elements]
        fill_integers(called.tuner, called.args, called.kwargs, resized.arguments, made)
        return called

    def _value(self, given: Any, wanted: Argument, resized: ResizedArguments, device: str | None) -> Any:
        """One argument at another size, with storage where no `device` is named."""
        if not is_tensor(given):
            return given if wanted in self._arguments else wanted.value
        like: Any = given
        if device is not None:
            import torch

            return torch.empty_strided(wanted.shape, wanted.stride, dtype=like.dtype, device=device)
        if wanted.shape == tuple(like.shape) and wanted.name not in resized.elements:
            return copied_arguments((given,), {})[0][0]
        return rebuilt_value(wanted, resized.elements.get(wanted.name, 0), like.device)

    def _called(self, named: Mapping[str, Any], grid: Any) -> KernelCall:
        """The met call with other arguments, those that were positional staying so."""
        call, names = self._call, self._call.tuner.arg_names
        args = tuple(named[n] for n in names[: len(call.args)])
        kwargs = {n: named.get(n, v) for n, v in call.kwargs.items()}
        return replace(call, args=args, kwargs={**kwargs, "grid": grid})


def _require_memory(calls: Sequence[SizedCall]) -> None:
    """Raise `RebuildError` where the tensors of these calls do not fit beside what the program holds."""
    total = 0
    for sized in calls:
        for name, value in sized.call.arguments().items():
            if is_tensor(value):
                least = sized.resized.elements.get(name, 0) if sized.resized is not None else 0
                total += max(math.prod(value.shape), least) * value.element_size()
    if not fits_memory(total):
        raise RebuildError(f"tensors of {len(calls)} sizes take {total} bytes, which are not free")


def range_of(
    bucket: object, call: KernelCall, kernel: Kernel, key: Key, own_benchmark: bool
) -> RangeTuning | None:
    """Return the tuning of a key in a `Robust` range; None for other keys, with a warning where it cannot be."""
    if not isinstance(bucket, Robust):
        return None
    value = call.arguments().get(bucket.argument)
    if bucket.argument not in call.tuner.keys or not bucket.contains(bucket.argument, value):
        return None
    try:
        if own_benchmark:
            raise RebuildError(
                "a benchmark function of its own times the kernel, with this call's arguments alone"
            )
        return RangeTuning(bucket, call, kernel, key)
    except Exception as error:
        why = str(error) if isinstance(error, RebuildError) else repr(error)
        warnings.warn(
            f"kernel {kernel.name}: no decision for {bucket.argument} in {bucket.label} ({why[:400]}): "
            f"it is tuned at {bucket.argument} = {value} alone",
            stacklevel=2,
        )
        return None
