"""`enable_torch_compile` and `disable_torch_compile`: torch.compile's max-autotune, served by us."""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from forecast_autotune.errors import SettingsError
from forecast_autotune.policy import Policy
from forecast_autotune.printable import utc_now
from forecast_autotune.settings import Budget, Mode, Settings
from forecast_autotune.store import Store
from forecast_autotune.surrogates.protocol import Surrogate
from forecast_integrations.inductor.hooks import (
    assembler,
    benchmarks,
    descent,
    precompilation,
    selection,
)
from forecast_integrations.inductor.hooks.context import HookContext
from forecast_integrations.inductor.session import FORECAST_LIMIT_S, MAX_ROUNDS, TuningSession, open_store
from forecast_integrations.inductor.summary import TorchCompileSummary

if TYPE_CHECKING:
    import torch
    from torch.fx import GraphModule


@dataclass
class _Service:
    """The service of this process: the hooks in place, and the sums over all sessions for its end."""

    context: HookContext | None = None
    """None while torch.compile is not served."""
    last: TuningSession | None = None
    """The latest session, also after its end."""
    summaries: list[TorchCompileSummary] = field(default_factory=list)
    """One per session; its caches need not live as long."""
    mutex: threading.RLock = field(default_factory=threading.RLock)

    def open(self) -> HookContext:
        """The context of the hooks, a new one where there is none."""
        if self.context is None:
            self.context = HookContext()
        return self.context

    def close(self) -> None:
        """Take all hooks out again."""
        if self.context is not None:
            self.context.close()
        self.context = None


_SERVICE = _Service()
_ARGUMENTS = {
    "inductor_space": "search_space",
    "inductor_kernels": "generated_kernels",
}
"""Arguments of `enable_torch_compile` by the settings that they replace."""


def current() -> TuningSession | None:
    """The session that serves torch.compile; None while none does."""
    context = _SERVICE.context
    return None if context is None else context.session


class TorchCompileHandle:
    """The result of `enable_torch_compile`: as a context manager it ends with what was in force before."""

    def __init__(self, session: TuningSession, before: TuningSession | None) -> None:
        self.session = session
        """The session that it began, with its `tally` and the failures of `warn_once`."""
        self._before = before

    @property
    def descending(self) -> int:
        """The number of generated kernels with configs that later launches will time."""
        return 0 if _SERVICE.context is None else len(_SERVICE.context.descending)

    def __enter__(self) -> TorchCompileHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _SERVICE.mutex:
            if self._before is None:
                disable_torch_compile()
            elif _SERVICE.context is not None:  # else disabled in the meantime: nothing is hooked
                _SERVICE.context.session = self._before


def enable_torch_compile(
    *,
    surrogate: Surrogate | None = None,
    store: Store | Path | str | None = None,
    search_space: str | None = None,
    generated_kernels: str | None = None,
    mode: Mode | str | None = None,
    tolerance: float | None = None,
    risk: float | None = None,
    budget: Budget | None = None,
    policy: Policy | None = None,
    rounds: int = MAX_ROUNDS,
    frozen_at: str | None = None,
    forecast_timeout_s: float = FORECAST_LIMIT_S,
) -> TorchCompileHandle:
    """Serve `torch.compile(mode="max-autotune")` in this process: compile fewer choices, keep every timing.

    The library's own choice (ATen, cuBLAS, MKL) and at least one more are always measured; a stored decision is used
    without a measurement; after any failure in here Inductor goes on with all of its own choices.
    Calling it again replaces what is in force and hooks nothing twice. Choices are timed as
    assembled by what assembles the final kernels (see `assembler`), which Inductor alone does not see to.

    Args:
        surrogate: forecasts the choices' times; by default the one for Inductor's templates. No language model is
            asked here, so that ranks agree.
        store: a `Store` or a directory; by default the user's own (FORECAST_AUTOTUNE_CACHE_DIR).
        search_space: `default`, or `exhaustive` to choose GEMM configs from Inductor's EXHAUSTIVE space, of
            which only the planned ones are compiled (FORECAST_AUTOTUNE_INDUCTOR_SPACE).
        generated_kernels: `later` (the default) or `first`: whether configs of pointwise and reduction kernels
            are timed at launches after a kernel's first, or all at the first, which waits for them
            (FORECAST_AUTOTUNE_INDUCTOR_KERNELS).
        mode: as FORECAST_AUTOTUNE_MODE. `listen` changes nothing and keeps the timings; `frozen` takes the
            best forecast where the store knows nothing, because a compilation must not fail for it.
        tolerance: accepted regret, a share.
        risk: accepted probability of a larger regret.
        budget: limits per operation; only `measurements` applies here.
        policy: what to measure next; by default `RiskBounded` with fewer measurements than elsewhere.
        rounds: plans per operation at most; 1 is Inductor's own single round of benchmarks.
        frozen_at: UTC time (ISO 8601, seconds); rows that other processes stored later are not used. Give all
            ranks of a job the same. Now, by default.
        forecast_timeout_s: seconds after which a surrogate counts as hung and is not asked again.

    Returns a context manager; leaving it ends the service, as `disable_torch_compile` does. Raises
    `SettingsError` for values that break a setting's rule and ImportError without torch.
    """
    try:
        settings = Settings.from_environment().with_(
            mode=mode,
            tolerance=tolerance,
            risk=risk,
            max_measurements=budget.measurements if budget is not None else None,
            inductor_space=search_space,
            inductor_kernels=generated_kernels,
        )
    except SettingsError as error:
        setting, sign, rule = str(error).partition("=")
        raise SettingsError(f"{_ARGUMENTS.get(setting, setting)}{sign}{rule}") from None
    if not forecast_timeout_s > 0:
        raise SettingsError(
            f"forecast_timeout_s must be a positive number of seconds, got {forecast_timeout_s}"
        )
    session = TuningSession.of(
        settings,
        surrogate,
        open_store(store, settings),
        frozen_at or utc_now(),
        policy=policy,
        rounds=rounds,
        limit_s=forecast_timeout_s,
    )
    with _SERVICE.mutex:
        before, context = current(), _SERVICE.open()
        context.install("benchmarks", benchmarks.install)
        context.install("selection", selection.install)
        context.install("precompilation", precompilation.install)
        if importlib.util.find_spec("triton") is not None:
            from forecast_integrations.inductor.hooks import user_kernels  # it needs Triton

            context.install("user kernels", user_kernels.install)
            context.install("descent", descent.install)
        if settings.mode is not Mode.LISTEN:
            context.install("assembler", assembler.install)
        context.session = _SERVICE.last = session
        if not _SERVICE.summaries:
            atexit.register(_report, os.getpid())
        _SERVICE.summaries.append(session.tally)
    return TorchCompileHandle(session, before)


def autoload_torch_compile() -> None:
    """FORECAST_AUTOTUNE=1: serve torch.compile by the environment alone, unless the program has done so."""
    if _SERVICE.context is None:
        with _SERVICE.mutex:
            _SERVICE.open().install("assembler", assembler.install_later)
        enable_torch_compile()


def disable_torch_compile() -> None:
    """Give Inductor its own tuning back: every attribute and list that was touched is as it was."""
    with _SERVICE.mutex:
        _SERVICE.close()


def missing_hooks() -> list[str]:
    """Names that this release of torch does not have, of those we would hook; empty while disabled."""
    return [] if _SERVICE.context is None else _SERVICE.context.missing


def _report(owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child took our exit handlers along
    try:
        total, last = TorchCompileSummary.total(_SERVICE.summaries), _SERVICE.last
        if (total.operations or total.timings or total.graphs) and last is not None and last.prints_lines():
            print(total.line(), file=sys.stderr, flush=True)
    except (BrokenPipeError, ValueError):
        return  # the program closed the stream


def forecast_autotune(
    gm: GraphModule,
    example_inputs: Sequence[torch.Tensor],
    *,
    options: Mapping[str, object] | None = None,
    mode: str | None = None,
    **_: object,
) -> Callable[..., Any]:
    """Compile a graph with Inductor's max-autotune; `options` and `mode` are those of `torch.compile`, which checks
    them: a RuntimeError for an unknown one, or one of a wrong type.

    The service stays on in this process, as after `enable_torch_compile()`: a backward graph is compiled
    long after this function has returned.
    """
    import torch
    from torch._inductor.compile_fx import compile_fx

    if current() is None:
        enable_torch_compile()
    checked = torch._TorchCompileInductorWrapper(mode, options, None).config
    return compile_fx(gm, example_inputs, config_patches={"max_autotune": True, **checked})
