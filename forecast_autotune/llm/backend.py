"""The protocol of backends: probabilities of given labels after a shared prefix and each suffix.

A writer of texts is a function from a prompt to several texts, and tells its caller what it cost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Lock, Semaphore, Thread
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from forecast_autotune.errors import ForecastAutotuneError
from forecast_autotune.llm.bins import AnswerLabel

Array = npt.NDArray[np.float64]


class LLMError(ForecastAutotuneError):
    """A language model could not be asked, or did not answer in time; the message names the remedy."""


@dataclass(frozen=True)
class Usage:
    """Cost of one or more forecasts."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Tokens of the prompt whose computation was kept from an earlier request."""
    output_tokens: int = 0
    seconds: float = 0.0
    """Wall seconds of waiting for the model."""
    money: float = 0.0
    """In the currency of the prices that were configured; 0 without prices."""

    def __add__(self, other: Usage) -> Usage:
        return Usage(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass(frozen=True)
class BackendResponse:
    """Probabilities [n, labels], one row per suffix, in their order."""

    probabilities: Array
    """Rows sum to 1; a row of zeros where the model said nothing usable: abstention, not a forecast."""
    mass: Array
    """[n]: probability that the model gave to all labels together, among everything it could have said; 1
    where the backend does not tell. A small mass means that the model did not understand the question."""
    usage: Usage = Usage()
    trouble: tuple[str, ...] = field(default=())
    """Distinct reasons for missing rows."""

    @property
    def answered(self) -> npt.NDArray[np.bool_]:
        """Which rows hold a forecast, [n]."""
        return np.asarray(self.probabilities.sum(axis=1) > 0.5)


@contextlib.contextmanager
def exclusive(lock: Lock, timeout_s: float, busy: str) -> Iterator[None]:
    """Hold the lock of a model that threads share. Raises `LLMError(busy)` if they keep it for so long."""
    if not lock.acquire(timeout=max(timeout_s, 0.0)):
        raise LLMError(busy)
    try:
        yield
    finally:
        lock.release()


@runtime_checkable
class Backend(Protocol):
    """A language model that can be asked; `llm.providers.provider` builds one from FORECAST_AUTOTUNE_LLM."""

    name: str
    """Kind, model and adapter, as they are recorded with a forecast."""

    def forecast(
        self, prefix: str, suffixes: Sequence[str], labels: Sequence[AnswerLabel], *, timeout_s: float
    ) -> BackendResponse:
        """Probability of each label as the next word after `prefix + suffix`, for every suffix.

        A suffix ends where the label's letter, with a space before it, would follow. Raises `LLMError` when
        nothing was answered within `timeout_s`; rows that alone went wrong are zeros.
        """
        ...

    def identity(self) -> str:
        """The key of stored answers: the name, and a digest of weights that lie on this machine."""
        return self.name

    def ready(self) -> bool:
        """Whether the model is loaded. Cheap."""
        return True

    def prepare(self) -> None:
        """Load the model, by default nothing; blocks. May run in a thread beside the first compilations."""
        return

    def close(self) -> None:
        """Give memory, threads and connections back, by default none."""
        return


T = TypeVar("T")


def run_parallel(jobs: Sequence[Callable[[], T]], width: int) -> list[T | LLMError]:
    """Run jobs in up to `width` threads; an `LLMError` of a job takes its result's place.

    The threads are daemons: a process need not wait for a server that never answers before it ends.
    """
    answers: list[Future[T | LLMError]] = [Future() for _ in jobs]
    places = Semaphore(max(1, width))

    def run(job: Callable[[], T], answer: Future[T | LLMError]) -> None:
        with places:
            try:
                answer.set_result(job())
            except BaseException as error:
                answer.set_result(error) if isinstance(error, LLMError) else answer.set_exception(error)

    for pair in zip(jobs, answers, strict=True):
        if width <= 1 or len(jobs) == 1:
            run(*pair)
        else:
            Thread(target=run, args=pair, name="forecast-autotune-llm", daemon=True).start()
    return [answer.result() for answer in answers]


TextGenerator = Callable[[str, int], list[str]]
"""(prompt, n) -> up to n texts; raises `LLMError` when there is none."""
UsageCallback = Callable[[Usage], None]
"""Gets the cost of one call of a writer, in the caller's thread, whether or not there was a text."""


def ignore_usage(usage: Usage) -> None:
    """Nobody asked; the ledger knows all the same."""


def require_texts(texts: list[str], trouble: list[str]) -> list[str]:
    """The texts. Raises `LLMError` telling the trouble where there are none."""
    if not texts and trouble:
        raise LLMError(f"no text was written: {'; '.join(dict.fromkeys(trouble))}")
    return texts
