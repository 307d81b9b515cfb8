"""The config that launches a candidate, whichever source it is of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forecast_autotune.records import Candidate, Measurement
from forecast_integrations.triton.problem.call import KernelCall
from forecast_integrations.triton.protocols import LaunchConfig
from forecast_integrations.triton.variants.loading import VariantConfig


def launch_config(
    call: KernelCall, candidate: Candidate, rows: Callable[[], Sequence[Measurement]]
) -> LaunchConfig:
    """The candidate's config; a variant's comes with the base's fastest of `rows()`, for calls it does not cover."""
    config = call.configs[candidate]
    if isinstance(config, VariantConfig):
        config = VariantConfig.of(config, config.function)
        config.fallback = _fastest_of_base(call, rows())
    return config


def _fastest_of_base(call: KernelCall, rows: Sequence[Measurement]) -> LaunchConfig | None:
    """The base's fastest config as far as measured; None where none was."""
    known = [m for m in rows if m.ok and m.candidate.is_base_variant and m.candidate in call.configs]
    return call.configs[min(known, key=lambda m: m.ms).candidate] if known else None
