"""What a Helion config compiles to, without compiling or launching: its generated Triton kernel, grid and TTIR."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from forecast_autotune.features.trace import trace
from forecast_autotune.features.traced_texts import cached_facts
from forecast_autotune.features.ttir.facts import TtirFacts
from forecast_autotune.features.ttir.parser import FeatureError
from forecast_autotune.records import Argument, Config
from forecast_autotune.store.exchange.helion import flat_parameters
from forecast_integrations.triton.problem.describe import call_arguments


@dataclass(frozen=True)
class GeneratedLaunch:
    """The launch that Helion's generated host code would make under one config."""

    grid: tuple[int, ...]
    num_warps: int
    num_stages: int
    arguments: tuple[Argument, ...]
    """Of the generated Triton kernel, whose parameters depend on the config."""
    ttir: str
    facts: TtirFacts | None
    """Of the text at these arguments and this grid; None for one that cannot be read."""


def generated_launch(
    kernel: Any,
    args: Sequence[Any],
    config: Any,
    around_host_code: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> GeneratedLaunch:
    """Run the host code of a bound Helion kernel under a config up to its launch, which is recorded instead.

    The host code allocates what it returns, as a real call does, unless `around_host_code` sees to it. Raises
    `FeatureError` where there is no code for the config, it launches more than one kernel, or that kernel has no TTIR.
    """
    seen: list[tuple[Any, tuple[int, ...], tuple[Any, ...], int, int, Mapping[str, Any]]] = []

    def record(
        function: Any, grid: tuple[int, ...], *given: Any, num_warps: int, num_stages: int, **options: Any
    ) -> None:
        seen.append((function, tuple(grid), given, num_warps, num_stages, options))

    try:
        host_code = kernel.compile_config(config, allow_print=False)
        with around_host_code():
            host_code(*args, _launcher=record)
    except Exception as error:  # Helion refuses configs in many ways, while it generates code and in the code
        raise FeatureError(f"no code: {type(error).__name__}: {error}; under {config}"[:300]) from error
    if len(seen) != 1:
        raise FeatureError(f"{len(seen)} launches under {config}: one can be traced")
    function, grid, given, warps, stages, options = seen[0]
    constants = {name: value for name, value in options.items() if name in function.arg_names}
    text = trace(function, given, constants, {})
    named = {**dict(zip(function.arg_names, given, strict=False)), **constants}
    arguments = tuple(call_arguments(function, named))
    return GeneratedLaunch(grid, warps, stages, arguments, text, cached_facts(text, arguments, grid))


def to_config(config: Any, warps: int = 4, stages: int = 1) -> Config:
    """Our record of a Helion config: its lists spread over numbered parameters, as imports of its logs have it.

    `warps` and `stages` stand for what the config leaves open.
    """
    given = dict(config.config)
    launch = {"num_warps": given.pop("num_warps", None), "num_stages": given.pop("num_stages", None)}
    return Config.of(
        dict(flat_parameters(given)),
        num_warps=int(launch["num_warps"] or warps),
        num_stages=int(launch["num_stages"] or stages),
    )
