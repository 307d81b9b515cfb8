"""The base of all backends behind HTTP: batches of candidates side by side, one deadline, honest rows."""

from __future__ import annotations

import math
import threading
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from forecast_autotune.llm.backend import (
    Backend,
    BackendResponse,
    LLMError,
    Usage,
    UsageCallback,
    require_texts,
    run_parallel,
)
from forecast_autotune.llm.bins import AnswerLabel
from forecast_autotune.llm.replies import InvalidResponse
from forecast_integrations.models.http.client import MALFORMED_ERRORS, ServerClient
from forecast_integrations.models.http.limits import Deadline

T = TypeVar("T")
Array = npt.NDArray[np.float64]

BYTES_PER_TOKEN_ESTIMATE = 3
"""For estimates before anything was sent: source code has some three bytes per token."""


_MIN_TOTAL = 1e-12
"""Least sum of probabilities: a smaller one has too few digits left to tell the labels apart."""


@dataclass(frozen=True)
class LabelRows:
    """Answers to some of the candidates."""

    probabilities: Array
    """[n, labels]; a row of zeros where there is none."""
    mass: Array
    """[n]"""
    trouble: tuple[str, ...] = ()


class ForecastCall:
    """One call of `forecast`: its deadline, and what its requests cost. Safe to share between threads."""

    def __init__(self, client: ServerClient, deadline: Deadline) -> None:
        self.deadline = deadline
        self.usage = Usage()
        self._client = client
        self._mutex = threading.Lock()

    def post(
        self,
        url: str,
        body: Mapping[str, object],
        read: Callable[[Any], T],
        *,
        prompt: int = 0,
        output: int = 0,
    ) -> T:
        """Ask for JSON; `prompt` (bytes) and `output` (tokens) say what it may cost. Raises `LLMError`."""
        expected = Usage(1, prompt // BYTES_PER_TOKEN_ESTIMATE, 0, output)
        result, usage = self._client.ask(url, body, read, deadline=self.deadline, expected=expected)
        with self._mutex:
            self.usage += usage
        return result


class HTTPBackend(Backend):
    """A model behind a server.

    Args:
        url: where the API starts, with its version: `http://127.0.0.1:8000/v1`.
        model: its name on the server; a LoRA adapter's name where the server has adapters.
        batch: most candidates per request.
        client: by default one of its own.
    """

    kind = ""

    def __init__(self, url: str, model: str, *, batch: int, client: ServerClient | None = None) -> None:
        self.model = model
        self.batch = batch
        self.client = client or ServerClient(url)
        self.name = f"{self.kind}:{model}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.client.base}, {self.model!r})"

    def forecast(
        self, prefix: str, suffixes: Sequence[str], labels: Sequence[AnswerLabel], *, timeout_s: float
    ) -> BackendResponse:
        """See `Backend`. Batches run side by side."""
        begin = time.monotonic()
        n, k = len(suffixes), len(labels)
        probabilities, mass = np.zeros((n, k)), np.zeros(n)
        if not n:
            return BackendResponse(probabilities, mass)
        call = ForecastCall(self.client, Deadline(timeout_s))
        firsts = range(0, n, self.batch)
        parts = [list(suffixes[first : first + self.batch]) for first in firsts]
        ask = self.batch_function(call, prefix, suffixes, labels)
        results = run_parallel([partial(ask, part) for part in parts], self.client.concurrency)
        trouble: list[str] = []
        for first, part, rows in zip(firsts, parts, results, strict=True):
            if isinstance(rows, LLMError):
                trouble.append(str(rows))
                continue
            trouble += rows.trouble
            probabilities[first : first + len(part)] = rows.probabilities
            mass[first : first + len(part)] = rows.mass
        usage = replace(call.usage, seconds=time.monotonic() - begin)
        answer = BackendResponse(probabilities, mass, usage, tuple(dict.fromkeys(trouble)))
        if not answer.answered.any():
            raise LLMError("; ".join(answer.trouble[:3]))
        return answer

    @abstractmethod
    def batch_function(
        self, call: ForecastCall, prefix: str, suffixes: Sequence[str], labels: Sequence[AnswerLabel]
    ) -> Callable[[Sequence[str]], LabelRows]:
        """Do what has to be done once per forecast; returns what asks for one batch. Raises `LLMError`."""


def normalize_row(
    weights: Sequence[object], *, least: float = 0.0, most: float = 1.01
) -> tuple[list[float], float]:
    """Probabilities that sum to 1, and what they summed to.

    Raises `InvalidResponse` unless they are probabilities whose sum lies in (0, most], and not below `least`.
    """
    numbers = [w for w in weights if isinstance(w, int | float) and not isinstance(w, bool)]
    if len(numbers) < len(weights) or not all(0.0 <= w <= most for w in numbers):  # NaN is not
        raise InvalidResponse("numbers that are no probabilities")
    total = math.fsum(numbers)
    if not max(least, _MIN_TOTAL) <= total <= most:
        raise InvalidResponse(f"probabilities of the labels that do not sum to 1 but to {total:.2g}")
    return [w / total for w in numbers], total


def rows(
    given: Sequence[Sequence[Any]], read: Callable[[Any], Sequence[object]], labels: int, **limits: float
) -> LabelRows:
    """Rows in the order asked for, out of what was given for each candidate.

    `read` makes one weight per label of it. A candidate with no or several answers, or with one that
    cannot be read, gets a row of zeros. Raises `InvalidResponse` if all do.
    """
    probabilities, mass = np.zeros((len(given), labels)), np.zeros(len(given))
    trouble: Counter[str] = Counter()
    for index, answers in enumerate(given):
        try:
            if len(answers) != 1:
                raise InvalidResponse("no answer" if not answers else "several answers to one candidate")
            probabilities[index], mass[index] = normalize_row(read(answers[0]), **limits)
        except InvalidResponse as error:
            trouble[str(error)] += 1
        except MALFORMED_ERRORS as error:
            trouble[f"an answer of another shape ({type(error).__name__})"] += 1
    reasons = tuple(f"{reason} ({count} of {len(given)})" for reason, count in trouble.items())
    if not mass.any():
        raise InvalidResponse("; ".join(reasons))
    return LabelRows(probabilities, mass, reasons)


def generate_texts(
    jobs: list[Callable[[], str]], call: ForecastCall, on_usage: UsageCallback, width: int
) -> list[str]:
    """The texts that jobs give, side by side; `on_usage` gets the cost of all. Raises `LLMError` if there is none."""
    begin = time.monotonic()
    results = run_parallel(jobs, width)
    on_usage(replace(call.usage, seconds=time.monotonic() - begin))
    return require_texts(
        [t for t in results if isinstance(t, str)], [str(e) for e in results if isinstance(e, LLMError)]
    )
