"""Is a runner fit to judge? Its own kernel computes what it should, and its clock tells the time."""

from __future__ import annotations

from forecast_harness.clocks.runner.client import RunnerClient
from forecast_harness.clocks.runner.process import RunnerLost

_SHORT_CYCLES, _LONG_CYCLES = 2_000_000, 16_000_000
"""Of two pauses: some 1 and 8 ms."""
_RATIO_ERROR = 0.25
"""Most relative error of the ratio of two pauses: clocks change their pace meanwhile."""
_SLOWEST_HZ, _FASTEST_HZ = 2e8, 5e9
"""Of a device's clock."""
_HOST_SLACK = 1.05
"""Times the host's seconds around a pause that the device may say it took."""


def runner_problem(runner: RunnerClient) -> str:
    """Why this runner is not to be trusted with labels; '' if it is."""
    if said := runner.check_health():
        return f"the runner's own kernel: {said}"
    try:
        return clock_problem(runner.timed_pauses((_SHORT_CYCLES, _SHORT_CYCLES, _LONG_CYCLES))[1:])
    except RunnerLost as lost:
        return str(lost)


def clock_problem(pauses: list[tuple[float, float]]) -> str:
    """What is wrong with the device's seconds of a short and a long pause, given the host's; '' for nothing."""
    (short, _), (long, host) = pauses
    wanted = _LONG_CYCLES / _SHORT_CYCLES
    if short <= 0 or abs(long / short - wanted) > _RATIO_ERROR * wanted:
        return (
            f"the device's clock: pauses of {_SHORT_CYCLES:,} and {_LONG_CYCLES:,} cycles took {short:.3g} s and "
            f"{long:.3g} s; the second should take {wanted:g} times the first"
        )
    if not _SLOWEST_HZ <= _LONG_CYCLES / long <= _FASTEST_HZ:
        return f"the device's clock: {_LONG_CYCLES:,} cycles took {long:.3g} s, which no device's clock does"
    if long > _HOST_SLACK * host:
        return f"the device's clock: a pause took {long:.3g} s of the {host:.3g} s that passed around it"
    return ""
