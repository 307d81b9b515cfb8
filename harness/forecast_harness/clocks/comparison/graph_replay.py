"""What replays of a recorded launch read and write, and what is believed of their times.

A graph is recorded while its inputs hold nothing, and replayed behind the flush of the L2; see
`forecast_autotune.timing` for why short launches are recorded, and behind pauses.
"""

from __future__ import annotations

from typing import Any

from forecast_autotune.timing.pauses import mean_without_strays

_FIRST_REPLAY_FACTOR = 1.25
"""Times the others that a first replay may take by chance."""
_UNTOUCHED_SHARE = 0.01
"""Share of the outputs' bytes that a replay may leave alone though a plain launch writes them."""


class ReplayBuffers:
    """What a launch reads and where it writes, as far as a replay has to know. This one: nothing."""

    def clear(self) -> None:
        """Take the contents away, so that nothing can be computed from them while a graph is recorded."""

    def restore(self, result: Any) -> None:
        """Bring the contents back, and spoil what was returned: a replay has to write it."""

    def output_copies(self, result: Any) -> list[Any]:
        """Copies of all outputs' bytes, those in `result` included."""
        return []


def typical_seconds(seconds: list[float]) -> float:
    """The mean of some replays' times but for strays; the first where it is clearly longer.

    Replays have equal inputs: what remembers them may be faster from the second on, and nothing is gained by
    that.
    """
    mean = mean_without_strays(seconds)
    return seconds[0] if seconds[0] > _FIRST_REPLAY_FACTOR * mean else mean


def left_untouched(before: list[Any], spoiled: list[Any], after: list[Any]) -> bool:
    """Whether a replay left alone what a plain launch had written: not all of its work was recorded.

    The arguments are `ReplayBuffers.output_copies` after the plain launch, before the replay and after it. Equality
    is not asked for: sums by atomic additions differ from launch to launch.
    """
    if [t.shape for t in before] != [t.shape for t in after]:
        return True
    total = sum(int(t.numel()) for t in before)
    left = sum(
        int(((a == s) & (b != s)).sum().item()) for b, s, a in zip(before, spoiled, after, strict=True)
    )
    return left > _UNTOUCHED_SHARE * total
