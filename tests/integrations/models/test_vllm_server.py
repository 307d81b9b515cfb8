"""A real vLLM server, end to end through our client, against transformers asked the slow way.

Needs FORECAST_AUTOTUNE_TEST_WEIGHTS, the folder of a causal language model (SmolLM2-135M-Instruct in CI), and
FORECAST_AUTOTUNE_TEST_VLLM, the python of an environment with vLLM; `vllm_server.py` says how to make one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from forecast_autotune.llm.backend import LLMError
from forecast_autotune.llm.bins import BINS, AnswerLabel
from forecast_autotune.settings import Settings
from forecast_integrations.models.factory import backend, text_generator
from tests.integrations.models.vllm_server import (
    PREFIX,
    Naive,
    Server,
    in_process,
    random_adapter,
    serving,
    suffixes,
)

PAIR_LABELS = (AnswerLabel("A", "the first"), AnswerLabel("B", "the second"))
WEIGHTS = os.environ.get("FORECAST_AUTOTUNE_TEST_WEIGHTS", "")
VLLM = os.environ.get("FORECAST_AUTOTUNE_TEST_VLLM", "")
CLOSE = 1e-2

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not WEIGHTS, reason="FORECAST_AUTOTUNE_TEST_WEIGHTS names no folder of weights"),
    pytest.mark.skipif(not VLLM, reason="FORECAST_AUTOTUNE_TEST_VLLM names no python with vLLM"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(VLLM, Path(WEIGHTS), tmp_path_factory.mktemp("vllm") / "log") as it:
        yield it


@pytest.fixture(scope="module")
def naive() -> Naive:
    return Naive(Path(WEIGHTS))


def test_probabilities_are_those_of_transformers(server: Server, naive: Naive, tmp_path: Path) -> None:
    asked = suffixes(8)
    expected, mass = naive.plain(PREFIX, asked)
    spec = f"{server.url}?model={server.model}&batch=3"
    it = backend(spec, settings=Settings(cache_dir=tmp_path))
    hits = server.metric("prefix_cache_hits_total")
    # The first request of a server compiles for many seconds.
    answer = it.forecast(PREFIX, asked, BINS.labels, timeout_s=180)
    assert answer.answered.all(), answer.trouble
    assert np.abs(answer.probabilities - expected).max() < CLOSE
    assert np.abs(answer.mass - mass).max() < CLOSE
    assert answer.usage.prompt_tokens > 8 * 400
    # The prefix was computed once: nearly all of what the others share came from the cache.
    reused = server.metric("prefix_cache_hits_total") - hits
    assert reused > 0.5 * answer.usage.prompt_tokens
    assert answer.usage.cached_tokens > 0
    # And the same answer comes from the disk without the server.
    again = it.forecast(PREFIX, asked, BINS.labels, timeout_s=180)
    assert again.usage.requests == 0
    assert np.array_equal(again.probabilities, answer.probabilities)


def test_text_instead_of_tokens(server: Server, naive: Naive) -> None:
    """A server without /tokenize is sent text; labels are found among the 20 likeliest tokens."""
    from forecast_integrations.models.http.completions import CompletionsBackend

    prefix, asked = (
        "Letters of the alphabet, one after the other: A B C D E F G H I",
        [" J K L M N O P A B C D E"],
    )
    expected, mass = naive.plain(prefix, asked)
    it = CompletionsBackend(server.url, server.model)
    it._texts = True
    answer = it.forecast(prefix, asked, BINS.labels, timeout_s=180)
    assert answer.mass[0] == pytest.approx(mass[0], abs=0.05)
    assert answer.probabilities[0].argmax() == expected[0].argmax()
    assert np.abs(answer.probabilities - expected).max() < 0.1


def test_chat_is_constrained_to_the_form(server: Server) -> None:
    """A model this small has no opinion worth reading, but it cannot leave the schema."""
    spec = f"{server.url}?model={server.model}&kind=chat&batch=1&max_tokens=100&attempts=1"
    said = "an answer"
    try:
        backend(spec, cached=False).forecast(PREFIX, suffixes(1), PAIR_LABELS, timeout_s=300)
    except LLMError as error:
        said = str(error)
    assert re.search("an answer|a letter given twice|do not sum to 1", said)


def test_it_writes(server: Server) -> None:
    spec = f"{server.url}?model={server.model}&kind={{}}&max_tokens=12"
    for kind in ("completions", "chat"):
        texts = text_generator(spec.format(kind))("Write a haiku about tiles.", 2)
        assert len(texts) == 2
        assert all(text.strip() for text in texts)


def test_in_process_with_an_adapter(naive: Naive, tmp_path: Path) -> None:
    random_adapter(Path(WEIGHTS), tmp_path)
    asked = suffixes(4)
    expected, mass = Naive(Path(WEIGHTS), tmp_path).plain(PREFIX, asked)
    assert np.abs(expected - naive.plain(PREFIX, asked)[0]).max() > 0.05, "the adapter changes the answer"
    told = in_process(VLLM, Path(WEIGHTS), tmp_path, asked)
    for answer in told["answers"]:
        assert answer["trouble"] == []
        assert np.abs(np.array(answer["probabilities"]) - expected).max() < CLOSE
        assert np.abs(np.array(answer["mass"]) - mass).max() < CLOSE
        # The prefix is computed once, and is shared even among the candidates of the first call.
        assert answer["usage"]["cached_tokens"] > 0.5 * answer["usage"]["prompt_tokens"]
    assert "within" in told["late"]
    assert (told["ready_before"], told["ready"], told["ready_after"]) == (False, True, False)


def test_an_architecture_without_system_one_says_so(server: Server) -> None:
    it = backend(f"{server.url}?model={server.model}&kind=systemone", cached=False)
    with pytest.raises(LLMError, match="use kind=completions"):
        it.forecast(PREFIX, suffixes(1), BINS.labels, timeout_s=60)


def test_system_one(tmp_path: Path) -> None:
    """vLLM offers it for some architectures only; Qwen3 with random weights is one and takes no download."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(WEIGHTS)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        initializer_range=0.5,
    )
    Qwen3ForCausalLM(config).to(torch.float32).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    asked = suffixes(5)
    expected, mass = Naive(tmp_path / "model").decided(PREFIX, asked)
    assert np.abs(expected - 1 / 16).max() > 0.1, "random weights with an opinion"
    with serving(VLLM, tmp_path / "model", tmp_path / "log") as server:
        it = backend(f"{server.url}?model={server.model}&kind=systemone", cached=False)
        answer = it.forecast(PREFIX, asked, BINS.labels, timeout_s=180)
    assert answer.answered.all(), answer.trouble
    assert np.abs(answer.probabilities - expected).max() < CLOSE
    assert np.abs(answer.mass - mass).max() < CLOSE
