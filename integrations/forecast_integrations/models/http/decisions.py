"""Label probabilities from `/v1/systemone`: typed questions about a shared state, no generated text.

vLLM >= 0.32 (for the architectures it lists; others answer 501) and `transformers serve` >= 5.20 have it.
The server writes the prompt around state, question and options, in the model's chat format, so an adapter
that was trained on plain prompts should be asked through completions instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from forecast_autotune.llm.backend import LLMError
from forecast_autotune.llm.bins import AnswerLabel
from forecast_integrations.models.http.backend import ForecastCall, HTTPBackend, LabelRows, rows
from forecast_integrations.models.http.client import RequestRejected, ServerClient

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""A server's names of its options, in order."""
MAX_QUESTIONS = 64
"""Most questions that servers take at once."""


class SystemOneBackend(HTTPBackend):
    """A model behind a System One endpoint; see the module."""

    kind = "systemone"

    def __init__(
        self, url: str, model: str, *, batch: int = MAX_QUESTIONS, client: ServerClient | None = None
    ) -> None:
        super().__init__(url, model, batch=min(batch, MAX_QUESTIONS), client=client)

    def batch_function(
        self, call: ForecastCall, prefix: str, suffixes: Sequence[str], labels: Sequence[AnswerLabel]
    ) -> Callable[[Sequence[str]], LabelRows]:
        """A batch is one request with a question per candidate."""
        if "".join(label.token for label in labels) != LETTERS[: len(labels)]:
            raise LLMError(
                f"System One servers call their options {LETTERS[:3]}... in order, the labels are "
                f"{[label.token for label in labels]}: use kind=completions or kind=chat"
            )
        return partial(self._batch, call, prefix, labels)

    def _batch(
        self, call: ForecastCall, prefix: str, labels: Sequence[AnswerLabel], suffixes: Sequence[str]
    ) -> LabelRows:
        options = {label.meaning: None for label in labels}
        questions = {
            str(number): {"type": "choice", "instructions": suffix, "criteria": options}
            for number, suffix in enumerate(suffixes)
        }
        body = {"model": self.model, "state": prefix, "questions": questions}
        size = sum(len(prefix) + len(suffix) for suffix in suffixes)

        def read(data: Any) -> LabelRows:
            return _parse_rows(data, list(options), len(suffixes))

        try:
            return call.post(f"{self.client.base}/systemone", body, read, prompt=size)
        except RequestRejected as error:
            if error.status not in (404, 501):
                raise
            raise LLMError(
                f"{error}; /v1/systemone needs vLLM >= 0.32 with an architecture it supports there, or "
                "`transformers serve` >= 5.20: else use kind=completions or kind=chat"
            ) from None


def _parse_rows(data: Any, options: Sequence[str], n: int) -> LabelRows:
    answers, diagnostics = data["answers"], data.get("diagnostics") or {}
    given = [[answers[name]] if (name := str(number)) in answers else [] for number in range(n)]

    def weights(answer: Mapping[str, Mapping[str, object]]) -> list[object]:
        return [answer["probabilities"][option] for option in options]

    answer_rows = rows(given, weights, len(options), least=0.9)
    for number in range(n):
        # The server's probabilities sum to 1 whatever it thought of other tokens; vLLM tells that apart.
        mass = (diagnostics.get(str(number)) or {}).get("label_mass")
        if not isinstance(mass, int | float) or isinstance(mass, bool):
            mass = 1.0
        if answer_rows.mass[number]:
            answer_rows.mass[number] = min(max(float(mass), 0.0), 1.0)
    return answer_rows
