"""`@forecast_autotune`: the drop-in for `triton.autotune`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

from triton.runtime.autotuner import Autotuner, Config

from forecast_autotune.errors import SettingsError
from forecast_autotune.policy import Policy
from forecast_autotune.records import LAUNCH_OPTIONS, Decision
from forecast_autotune.settings import Budget, Mode
from forecast_autotune.space import Space
from forecast_autotune.store import Store
from forecast_autotune.surrogates.protocol import Surrogate
from forecast_integrations.triton import upstream
from forecast_integrations.triton.compile.first_launch import COMPILER_HASH
from forecast_integrations.triton.engine import DecoratorOptions, TuningEngine, launch
from forecast_integrations.triton.problem.key import Bucket, KeyMaker
from forecast_integrations.triton.protocols import Hook, KernelFunction, LaunchConfig, Times
from forecast_integrations.triton.variants.sources import VariantsArgument, VariantSources

_TRITON_RUN = upstream.triton_run()


def _expand(user_configs: Sequence[LaunchConfig], space: Space) -> list[LaunchConfig]:
    """Return the user's list first, then the space."""
    configs = list(user_configs)
    for assignment in space.assignments():
        launch = {name: assignment[name] for name in LAUNCH_OPTIONS}
        meta = {name: value for name, value in assignment.items() if name not in launch}
        configs.append(Config(meta, pre_hook=space.pre_hook, **launch))
    if not configs:
        raise SettingsError("the Space's constraints leave no candidate: relax `where` or add values")
    return configs


class _ThreadArguments(threading.local):
    """The `nargs` of each thread; a deep copy has none."""

    nargs: dict[str, object] | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> _ThreadArguments:
        return _ThreadArguments()


class ForecastAutotuner(Autotuner):
    """A `triton.runtime.autotuner.Autotuner` that decides by forecasts and few measurements.

    Every attribute others rely on is kept. `nargs` is one per thread: Triton's is shared and breaks
    when two threads launch one kernel.
    """

    def __init__(
        self,
        fn: KernelFunction,
        arg_names: Sequence[str],
        configs: Sequence[LaunchConfig] | None,
        *args: object,
        options: DecoratorOptions | None = None,
        space: Space | None = None,
        **kwargs: object,
    ) -> None:
        options = options or DecoratorOptions()
        self._local = _ThreadArguments()
        super().__init__(fn, arg_names, configs, *args, **kwargs)
        COMPILER_HASH.start_early()
        self._engine = TuningEngine(options)
        self._make_key = KeyMaker(self.arg_names, options.bucket or options.settings().bucket)
        if space is not None:
            self._expansion = tuple(configs or ()), space
            del self.configs

    @property
    def nargs(self) -> dict[str, object] | None:
        """Positional arguments by name while this thread is inside a decision; else None."""
        return self._local.nargs

    @nargs.setter
    def nargs(self, value: dict[str, object] | None) -> None:
        self._local.nargs = value

    @cached_property  # from the second reading on a plain attribute, as each launch reads it
    def configs(self) -> Sequence[LaunchConfig]:
        """The candidates as a list; a `Space` is expanded when this is first read."""
        return _expand(*self._expansion)

    @property
    def decision(self) -> Decision | None:
        """The latest decision of this tuner, for any key; None before the first.

        A call whose key is decided already makes none, and neither does a tuner with a single config. While
        another thread decides, it is still the one before.
        """
        return self._engine.last

    def parts(self) -> tuple[TuningEngine, KeyMaker]:
        """Return the engine that decides its keys, and the maker of keys."""
        return self._engine, self._make_key

    def run(self, *args: object, **kwargs: object) -> object:
        """Launch with the config of this call's key, deciding it first on a miss."""
        run = Autotuner.run
        if run is not _TRITON_RUN:
            # Somebody's function serves every tuner. Where it goes on to Triton's, that is served by `launch`.
            upstream.install()
            return run(self, *args, **kwargs)
        return launch(self, self._engine, self._make_key, args, kwargs)


def _launch(tuner: ForecastAutotuner, *args: object, **kwargs: object) -> object:
    return launch(tuner, *tuner.parts(), args, kwargs)


upstream.serve(ForecastAutotuner, _launch)


def autotune(
    configs: Sequence[Config] | Space,
    key: Sequence[str],
    prune_configs_by: dict[str, object] | None = None,
    reset_to_zero: Sequence[str] | None = None,
    restore_value: Sequence[str] | None = None,
    pre_hook: Hook | None = None,
    post_hook: Hook | None = None,
    warmup: int | None = None,
    rep: int | None = None,
    use_cuda_graph: bool = False,
    do_bench: Callable[..., Times] | None = None,
    cache_results: bool = False,
    *,
    tolerance: float | None = None,
    risk: float | None = None,
    budget: Budget | None = None,
    surrogate: Surrogate | None = None,
    store: Store | Path | str | bool | None = None,
    policy: Policy | None = None,
    space: Space | None = None,
    variants: VariantsArgument = None,
    bucket: Bucket | None = None,
    mode: Mode | str | None = None,
    l2: str | None = None,
    prefer: str | None = None,
) -> Callable[[KernelFunction], ForecastAutotuner]:
    """Decorate a Triton kernel: `triton.autotune`'s parameters in its order, and ours by keyword.

    Args:
        configs: a list of `triton.Config`, or a `Space`.
        key: names of arguments whose change asks for a new decision.
        prune_configs_by: as in Triton: `early_config_prune`, `perf_model`, `top_k`.
        reset_to_zero: names of tensors zeroed before each timed launch.
        restore_value: names of tensors restored after each timed launch.
        pre_hook: replaces the built-in reset/restore before a timed launch.
        post_hook: replaces the built-in restore after a timed launch.
        warmup: deprecated by Triton; selects its own benchmark function.
        rep: deprecated by Triton; selects its own benchmark function.
        use_cuda_graph: deprecated by Triton; selects its own benchmark function.
        do_bench: your benchmark function `(kernel_call, quantiles) -> times in ms`; used as it is.
        cache_results: accepted; our store keeps every measurement in any case.
        tolerance: accepted regret, 0.02 is 2 % (FORECAST_AUTOTUNE_TOLERANCE).
        risk: accepted probability of a larger regret (FORECAST_AUTOTUNE_RISK).
        budget: the most measurements, wall seconds or device seconds per decision.
        surrogate: what forecasts; default: the one that ships with this release.
        store: a `Store`, a directory, or False for memory only.
        policy: what plans the measurements; default: `policy.WallTime()`.
        space: a `Space` to search besides `configs`.
        variants: other sources of the kernel. Kernels with the same arguments, by name or in a list: you
            vouch for those. Verified records: `Variant`s in a list, "store" (this kernel's in the store that
            measurements go to), a `Store` or its directory, or a function problem -> Variants. Records serve
            only calls that a check covers, all others the base kernel does (FORECAST_AUTOTUNE_VARIANTS).
        bucket: how key values are grouped: "exact", "pow2", or a function (name, value) -> value.
        mode: tune, background, skip, frozen, exhaustive or deterministic (FORECAST_AUTOTUNE_MODE).
        l2: what a timed launch finds in the L2: "cold", "warm" (its own data), or "both": the cold choice, and a
            sentence in `explain` where another config is faster warm (FORECAST_AUTOTUNE_L2).
        prefer: "speed", or "bits": where a choice was made before, the fastest config whose outputs equal those of
            that choice bit for bit (FORECAST_AUTOTUNE_PREFER).

    Returns:
        A decorator that turns a JIT function (or heuristics over one) into a `ForecastAutotuner`.

    Raises:
        SettingsError: a value outside its rule.
        ValueError: names in `key`, `reset_to_zero` or `restore_value` that are no arguments (3.9+).
    """
    options = DecoratorOptions(
        tolerance=tolerance,
        risk=risk,
        budget=budget,
        surrogate=surrogate,
        store=store,
        policy=policy,
        mode=mode,
        bucket=bucket,
        variants=variants,
        l2=l2,
        prefer=prefer,
    )
    options.settings()  # a wrong value fails here, where it was written, not at the first launch
    VariantSources.of(variants)
    wide, own_configs = (configs, []) if isinstance(configs, Space) else (space, configs)
    if wide is not None and not isinstance(wide, Space):
        raise SettingsError(f"space= takes a Space, as Space({{'BLOCK': [64, 128]}}), not {wide!r:.80}")

    def decorator(fn: KernelFunction) -> ForecastAutotuner:
        return ForecastAutotuner(
            fn,
            fn.arg_names,
            own_configs,
            key,
            reset_to_zero,
            restore_value,
            pre_hook=pre_hook,
            post_hook=post_hook,
            prune_configs_by=prune_configs_by,
            warmup=warmup,
            rep=rep,
            use_cuda_graph=use_cuda_graph,
            do_bench=do_bench,
            cache_results=cache_results,
            options=options,
            space=wide,
        )

    return decorator


forecast_autotune = autotune
