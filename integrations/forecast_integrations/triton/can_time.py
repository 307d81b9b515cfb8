"""Whether a tuner's candidates can be timed here, and by whom."""

from __future__ import annotations

from forecast_autotune.settings import Mode, Settings
from forecast_integrations.device import has_device
from forecast_integrations.triton.protocols import Tuner


def has_own_benchmark(tuner: Tuner) -> bool:
    """Whether the user (or a subclass) brought a benchmark function of their own."""
    from triton.runtime.autotuner import Autotuner

    return (
        getattr(tuner, "_do_bench", None) is not None
        or "do_bench" in vars(tuner)
        or any(
            getattr(type(tuner), name, None) is not getattr(Autotuner, name, None)
            for name in ("do_bench", "_bench")
        )
    )


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


def can_time(tuner: Tuner) -> bool:
    """Whether there is a device, or a benchmark function that may do without."""
    return has_own_benchmark(tuner) or (has_device() and not is_interpreted())


def untimed_settings(settings: Settings, tuner: Tuner) -> Settings:
    """Where nothing can be timed (the interpreter, a stub driver) the best forecast is used.

    In the background that is also where a benchmark function of the user's would hold a launch up.
    """
    if settings.mode is Mode.BACKGROUND:
        timed = can_time(tuner) and not has_own_benchmark(tuner)
        return settings if timed else settings.with_(mode=Mode.SKIP)
    if can_time(tuner):
        return settings
    if settings.mode in (Mode.TUNE, Mode.EXHAUSTIVE, Mode.LISTEN):
        return settings.with_(mode=Mode.SKIP)
    return settings
