"""What builders of tests have in common: nothing that they build takes long."""

from __future__ import annotations

from concurrent.futures import Future

from forecast_harness.clocks.compilation.requests import BuildResult


class QuickBuilds:
    """The part of a `SourceBuilder` that ends what takes long."""

    def give_up(self, after_s: float = 0.0) -> None:
        """Nothing takes long."""

    def seconds_of(self, building: Future[BuildResult]) -> float:
        return 0.0

    def end(self, building: Future[BuildResult]) -> bool:
        return building.cancel()
