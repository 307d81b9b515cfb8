"""Label probabilities from `/v1/completions` of a vLLM server, or of another that returns log-probabilities.

vLLM's log-probabilities are of the whole vocabulary even where only some tokens are allowed, so a restricted
choice would come back with other tokens among its probabilities. Hence nothing is restricted: the labels'
own tokens are asked for (`logprob_token_ids`, vLLM >= 0.26) and made to sum to 1 here, and their sum before is the
answer's mass.

Prompts are sent as token numbers, prefix and suffixes tokenized apart: "\\n\\n" before the end of a text and
"\\n\\n" before a letter are different tokens in some vocabularies, and a prefix must end alike for all
candidates to be computed once. Where the server does not tokenize, text is sent, and labels are looked for
among the most likely tokens.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from forecast_autotune.llm.backend import (
    BackendResponse,
    LLMError,
    TextGenerator,
    UsageCallback,
    exclusive,
    ignore_usage,
    run_parallel,
)
from forecast_autotune.llm.bins import BINS, AnswerLabel
from forecast_autotune.llm.probe import Probe, ProbeMismatch
from forecast_autotune.llm.replies import InvalidResponse
from forecast_autotune.records import digest
from forecast_integrations.models.http.backend import (
    ForecastCall,
    HTTPBackend,
    LabelRows,
    generate_texts,
    rows,
)
from forecast_integrations.models.http.client import RequestRejected, ServerClient
from forecast_integrations.models.http.limits import Deadline

TOP_LOGPROBS = (20, 5)
"""Likely tokens to ask for: vLLM's most by default, then OpenAI's."""
MAX_TOKENS = 4096
"""Default limit of a text."""
_TOKEN_CACHE_SIZE = 4096
"""Most texts whose tokens are remembered."""
_SPACES = " \u2581\u0120"
"""A leading space as text, in sentencepiece's and in GPT-2's writing."""

TokenLogprobs = dict[str, float | None]
"""Log-probability by token, as text or as `token_id:123`; None: not a number."""


class CompletionsBackend(HTTPBackend):
    """A model whose server tells log-probabilities; see the module."""

    kind = "completions"

    def __init__(
        self,
        url: str,
        model: str,
        *,
        batch: int = 64,
        client: ServerClient | None = None,
        probe: Probe | None = None,
    ) -> None:
        """As the base; `probe` is answered before the first forecast."""
        super().__init__(url, model, batch=batch, client=client)
        self._mutex, self._probing = threading.Lock(), threading.Lock()
        self._probe, self._mismatch = probe, ""
        self._identity = self.name if probe is None else f"{self.name} {digest(probe.to_json())}"
        self._tokens: dict[tuple[str, bool], tuple[int, ...]] = {}
        self._top = TOP_LOGPROBS[0]
        self._texts = False
        """The server does not tokenize."""

    def identity(self) -> str:
        """See `Backend`."""
        return self._identity

    def forecast(
        self, prefix: str, suffixes: Sequence[str], labels: Sequence[AnswerLabel], *, timeout_s: float
    ) -> BackendResponse:
        """See `Backend`. Raises `ProbeMismatch` where the server's model is not the one that was trained."""
        with exclusive(self._probing, timeout_s, f"{self.name} was busy with its probe: allow more time"):
            if self._mismatch:
                raise ProbeMismatch(self._mismatch)
            if self._probe is not None:
                try:
                    self._probe.check(
                        self.name,
                        partial(super().forecast, labels=BINS.labels, timeout_s=timeout_s),
                        dtype="",
                    )
                except ProbeMismatch as error:
                    self._mismatch = str(error)
                    raise
                self._probe = None
        return super().forecast(prefix, suffixes, labels, timeout_s=timeout_s)

    def batch_function(
        self, call: ForecastCall, prefix: str, suffixes: Sequence[str], labels: Sequence[AnswerLabel]
    ) -> Callable[[Sequence[str]], LabelRows]:
        """Tokenize what was not met before; a batch is one request with many prompts."""
        ids: list[int] | None = None
        if not self._texts:
            try:
                ids = self._label_tokens(call, prefix, suffixes, labels)
            except _NoTokenizer:
                self._texts = True
        return partial(self._batch, call, prefix, labels, ids)

    # --- tokens ---

    def _label_tokens(
        self, call: ForecastCall, prefix: str, suffixes: Sequence[str], labels: Sequence[AnswerLabel]
    ) -> list[int]:
        """Learn the tokens of all texts; returns the labels' own."""
        self._token_ids(call, prefix, opening=True)
        # What a label follows: the question's last word, the same for all candidates of a prompt.
        words = list(dict.fromkeys(suffix.split()[-1] for suffix in suffixes if suffix.strip())) or [""]
        after = {word: [word, *(f"{word} {label.token}" for label in labels)] for word in words}
        all_texts = [*suffixes, *itertools.chain.from_iterable(after.values())]
        jobs = [partial(self._token_ids, call, text, opening=False) for text in dict.fromkeys(all_texts)]
        for result in run_parallel(jobs, self.client.concurrency):
            if isinstance(result, LLMError):
                raise result
        candidates = set()
        for texts in after.values():
            before, *ends = (self._token_ids(call, text, opening=False) for text in texts)
            is_single = all(len(end) == len(before) + 1 and end[:-1] == before for end in ends)
            candidates.add(tuple(end[-1] for end in ends) if is_single else ())
        (ids, *alternatives) = candidates
        if alternatives or len(set(ids)) < len(labels):
            raise LLMError(
                f"the labels {[label.token for label in labels]} must be one token each after {words[0]!r}, "
                f"and for {self.model} on {self.client.base} they are not: use another model, or kind=chat"
            )
        return list(ids)

    def _token_ids(self, call: ForecastCall, text: str, *, opening: bool) -> tuple[int, ...]:
        """Token numbers of a text; with `opening`, of a prompt's beginning."""
        key = (text, opening)
        if (cached_ids := self._tokens.get(key)) is not None:
            return cached_ids
        body = {"model": self.model, "prompt": text, "add_special_tokens": opening}

        def read(data: Any) -> tuple[int, ...]:
            tokens = data["tokens"]
            whole = [t for t in tokens if isinstance(t, int) and not isinstance(t, bool) and t >= 0]
            if not tokens or len(whole) < len(tokens):
                raise InvalidResponse("tokens that are no numbers")
            return tuple(whole)

        try:
            tokens = call.post(f"{self.client.root}/tokenize", body, read, prompt=0)
        except RequestRejected as error:
            # One that has tokenized before does so again: text might be read as other tokens.
            if error.status in (400, 404, 405, 422, 501) and not self._tokens:
                raise _NoTokenizer(str(error)) from None
            raise
        with self._mutex:
            if len(self._tokens) >= _TOKEN_CACHE_SIZE:
                self._tokens.clear()
            self._tokens[key] = tokens
        return tokens

    # --- answers ---

    def _batch(
        self,
        call: ForecastCall,
        prefix: str,
        labels: Sequence[AnswerLabel],
        ids: list[int] | None,
        suffixes: Sequence[str],
    ) -> LabelRows:
        body: dict[str, object] = {"model": self.model, "max_tokens": 1, "temperature": 0}
        prompts: list[str] | list[tuple[int, ...]]
        if ids is None:
            prompts = [prefix + suffix for suffix in suffixes]
        else:
            begin = self._token_ids(call, prefix, opening=True)
            prompts = [begin + self._token_ids(call, suffix, opening=False) for suffix in suffixes]
            body |= {"logprob_token_ids": ids, "return_tokens_as_token_ids": True}
        # Some servers take one prompt per request: with batch=1 they can be asked, too.
        body["prompt"] = prompts if len(prompts) > 1 else prompts[0]
        size = sum(len(prefix) + len(suffix) for suffix in suffixes)

        def read(data: Any) -> LabelRows:
            return self._read(data, labels, ids, len(suffixes))

        url = f"{self.client.base}/completions"
        while True:
            top = self._top
            try:
                return call.post(url, body | {"logprobs": top}, read, prompt=size, output=len(suffixes))
            except RequestRejected as error:
                fewer = [n for n in TOP_LOGPROBS if n < top]
                if "logprobs" not in error.fields or not fewer:
                    raise
                self._top = fewer[0]

    def _read(self, data: Any, labels: Sequence[AnswerLabel], ids: list[int] | None, n: int) -> LabelRows:
        choices = [choice for choice in data["choices"] if isinstance(choice, dict)]
        places: dict[int, list[object]] = {}
        for choice in choices:
            index = choice.get("index")
            if isinstance(index, int) and not isinstance(index, bool):
                places.setdefault(index, []).append(choice)
        if choices and all(choice.get("logprobs") is None for choice in choices):
            raise LLMError(
                f"{self.client.base} returns no log-probabilities for {self.model} (transformers serve "
                "ignores them): use kind=chat"
            )
        read = partial(_label_weights, labels=labels, ids=ids)
        answers = rows([places.get(index, []) for index in range(n)], read, len(labels))
        answers.mass[:] = np.minimum(answers.mass, 1.0)  # the sum of rounded numbers
        return answers


class _NoTokenizer(LLMError):
    """The server has no /tokenize."""


def _label_weights(
    choice: Any, *, labels: Sequence[AnswerLabel], ids: list[int] | None
) -> list[float | None]:
    """Probability per label, not made to sum to 1; 0 for one that was not among the likely tokens."""
    top = choice["logprobs"]["top_logprobs"][0]
    by_text: dict[str, list[object]] = {}
    for token, value in top.items():
        by_text.setdefault(token.lstrip(_SPACES), []).append(value)
    weights: list[float | None] = []
    for place, label in enumerate(labels):
        by_number = f"token_id:{ids[place]}" if ids is not None else ""
        values = [top[by_number]] if by_number in top else by_text.get(label.token, [])
        weights.append(_probability(values))
    return weights


def _probability(log_probabilities: Sequence[object]) -> float | None:
    """Probability of any of some tokens; None where a server's number is none, or above 1."""
    total = 0.0
    for value in log_probabilities:
        if not isinstance(value, int | float) or isinstance(value, bool) or not value <= 0.01:
            return None
        total += math.exp(max(value, -9999.0))
    return total


# --- texts ---


def completions_generator(
    client: ServerClient,
    model: str,
    timeout_s: float,
    *,
    temperature: float = 1.0,
    max_tokens: int = MAX_TOKENS,
    on_usage: UsageCallback = ignore_usage,
) -> TextGenerator:
    """A writer over `/v1/completions`: a text is what follows the prompt."""
    body = {"model": model, "max_tokens": max_tokens, "temperature": temperature}

    def read(data: Any) -> str:
        text = data["choices"][0]["text"]
        if not isinstance(text, str) or not text.strip():
            raise InvalidResponse("an empty text")
        return text

    def write(prompt: str, n: int) -> list[str]:
        call = ForecastCall(client, Deadline(timeout_s))
        url = f"{client.base}/completions"
        job = partial(call.post, url, {**body, "prompt": prompt}, read, prompt=len(prompt), output=max_tokens)
        return generate_texts([job] * n, call, on_usage, client.concurrency)

    return write
