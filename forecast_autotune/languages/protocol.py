"""What a kernel of another language offers so that it can be tuned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from forecast_autotune.errors import ForecastAutotuneError
from forecast_autotune.records import Config, Outcome, Problem


class LanguageKernel(Protocol):
    """One kernel with the arguments of one call, in any language.

    `forecast_autotune.testing.LanguageContract` tests all that is said here.
    """

    @property
    def problem(self) -> Problem:
        """What is tuned. The kernel's hash must cover its source and all that it calls."""
        ...

    @property
    def protocol(self) -> str:
        """The name of how `time` takes times, kept with each. Another way of timing needs another name."""
        ...

    @property
    def quiet(self) -> bool:
        """Whether times are true while others compile: so on a GPU, not where kernels run on the compiler's cores."""
        ...

    def compile(self, config: Config) -> Any:
        """What `check` and `time` take. Called from several threads at once; must end by itself.

        Raises `RefusedConfigError` with an outcome; any other exception is a compile error.
        """
        ...

    def check(self, compiled: Any) -> str:
        """Launch once, wait for the end and compare with what is right: empty, or what is wrong.

        Raises `RefusedConfigError` with an outcome; any other exception is a runtime error.
        """
        ...

    def time(self, compiled: Any) -> Sequence[float]:
        """Milliseconds of three or more launches, one after another. Raises as `check` does."""
        ...


class RefusedConfigError(ForecastAutotuneError):
    """A config that cannot be used, with the outcome that is recorded."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome
