"""Several requests to a language model at once, in threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from forecast_autotune.llm.backend import LLMError

T = TypeVar("T")


def run_parallel(jobs: Sequence[Callable[[], T]], width: int) -> list[T | LLMError]:
    """Run jobs in up to `width` threads; what a job raises as `LLMError` takes its result's place."""

    def safe(job: Callable[[], T]) -> T | LLMError:
        try:
            return job()
        except LLMError as error:
            return error

    if len(jobs) <= 1 or width <= 1:
        return [safe(job) for job in jobs]
    with ThreadPoolExecutor(min(width, len(jobs)), "forecast-autotune-llm") as pool:
        return list(pool.map(safe, jobs))
