"""The in-process backend: a batch behind a kept prefix gives the answer of a plain forward of each prompt."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

import torch

from forecast_autotune.llm.backend import Backend, BackendResponse, LLMError
from forecast_autotune.llm.bins import BINS, AnswerLabel
from forecast_integrations.models.transformers.backend import TransformersBackend
from forecast_integrations.models.transformers.prefill import Prefill
from tests.integrations.models import tiny_models
from tests.integrations.models.tiny_models import PREFIX, suffixes

Saved = Callable[..., str]
LONG_S = 300.0


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Makes a model's folder, once per module."""
    known: dict[str, str] = {}

    def make(family: str, **changes: Any) -> str:
        key = f"{family}{sorted(changes.items())}"
        if key not in known:
            known[key] = tiny_models.saved(tmp_path_factory.mktemp(family), family, **changes)
        return known[key]

    return make


def opened(folder: str, **given: Any) -> TransformersBackend:
    return TransformersBackend(folder, device="cpu", dtype=given.pop("dtype", "float32"), **given)


def ask(backend: Backend, texts: list[str], prefix: str = PREFIX) -> Any:
    return backend.forecast(prefix, texts, BINS.labels, timeout_s=LONG_S)


def same(a: Any, b: Any, within: float = 1e-4) -> None:
    np.testing.assert_allclose(a.probabilities, b.probabilities, atol=within)
    np.testing.assert_allclose(a.mass, b.mass, atol=within)
    assert b.probabilities.std(axis=0).max() > 0.02, "the candidates' answers are all alike: nothing is shown"


def plain_forward(
    folder: str, texts: list[str], prefix: str = PREFIX, adapter: str = "", dtype: str = "float32"
) -> BackendResponse:
    """The answer by transformers alone: each prompt by itself, without a cache."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    if adapter:
        import peft

        model = peft.PeftModel.from_pretrained(model, adapter)
    tokens = transformers.AutoTokenizer.from_pretrained(folder)
    ends = [tokens(f" {label.token}")["input_ids"][0] for label in BINS.labels]
    start = tokens(prefix)["input_ids"]
    shares = []
    for text in texts:
        ids = torch.tensor([start + tokens(text)["input_ids"]])
        with torch.no_grad():
            shares.append(model(input_ids=ids).logits[0, -1].double().softmax(0)[ends].numpy())
    mass = np.sum(shares, axis=1)
    return BackendResponse(np.array(shares) / mass[:, None], mass)


def keeps_prefix(backend: TransformersBackend) -> bool:
    assert backend._open is not None
    return backend._open.prefill.keeps_prefix


WINDOW = {"sliding_window": 8}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {}),
        ("mistral", {}),
        ("mistral", WINDOW),
        ("gemma3_text", WINDOW),
        ("gemma2", {"head_dim": 16, **WINDOW}),
        ("granite", {"logits_scaling": 2.0}),
    ],
)
def test_answers_are_those_of_a_plain_forward(saved: Saved, family: str, changes: dict[str, Any]) -> None:
    folder, texts = saved(family, **changes), suffixes(40)
    backend = opened(folder)
    same(ask(backend, texts), plain_forward(folder, texts))
    assert keeps_prefix(backend)
    same(ask(backend, texts), plain_forward(folder, texts))


def test_a_model_without_attention_is_read_in_full(saved: Saved) -> None:
    sizes = {"vocab_size": len(tiny_models.tokenizer()), "hidden_size": 32, "num_hidden_layers": 2}
    folder = saved("mamba", **sizes, state_size=4)
    backend = opened(folder)
    same(ask(backend, suffixes(5)), plain_forward(folder, suffixes(5)))
    assert not keeps_prefix(backend)
    assert ask(backend, suffixes(5)).usage.cached_tokens == 0, "nothing was kept"


@pytest.mark.parametrize("count", [1, 2, 150])
def test_any_number_of_candidates_gives_the_answers_of_each(saved: Saved, count: int) -> None:
    folder, texts = saved("llama"), suffixes(count)
    answer, expected = ask(opened(folder), texts), plain_forward(folder, texts)
    np.testing.assert_allclose(answer.probabilities, expected.probabilities, atol=1e-4)
    np.testing.assert_allclose(answer.mass, expected.mass, atol=1e-4)
    assert answer.probabilities.shape == (count, len(BINS.labels))
    np.testing.assert_allclose(answer.probabilities.sum(axis=1), 1.0)


def test_passes_of_any_size_give_one_answer(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, texts, sizes = saved("qwen2"), suffixes(24), []
    read = Prefill.read

    def counted(self: Any, past: Any, rows: Any, labels: Any) -> Any:
        sizes.append(len(rows))
        return read(self, past, rows, labels)

    monkeypatch.setattr(Prefill, "read", counted)
    whole, small = opened(folder), opened(folder, memory_bytes=1)
    whole.prepare()
    small.prepare()
    sizes.clear()
    answer = ask(whole, texts)
    assert len(sizes) < 15
    sizes.clear()
    same(ask(small, texts), answer)
    assert sizes == [1] * len(texts), "a limit that nothing fits into leaves one row per pass"


def test_what_is_kept_of_prefixes_changes_no_answer(saved: Saved) -> None:
    folder, texts = saved("llama"), suffixes(9)
    backend = opened(folder)
    other = PREFIX.replace("Answer with a letter", "Measured: BLOCK=64: A\nAnswer with a letter")
    first = ask(backend, texts)
    again = ask(backend, texts)
    longer = ask(backend, texts, other)
    shorter = ask(backend, texts, PREFIX[:60])
    assert first.usage.cached_tokens == 0
    prefix_tokens = again.usage.cached_tokens
    assert first.usage.prompt_tokens == again.usage.prompt_tokens > prefix_tokens > 100
    assert 0 < longer.usage.cached_tokens < prefix_tokens, "what the prompts begin with alike"
    assert 0 < shorter.usage.cached_tokens < longer.usage.cached_tokens
    for prefix, answer in ((PREFIX, again), (other, longer), (PREFIX[:60], shorter)):
        same(answer, ask(opened(folder), texts, prefix), 1e-5)
    same(ask(backend, texts), first, 1e-6)  # what was kept has not been written to


def test_prefixes_are_kept_within_a_limit(saved: Saved) -> None:
    roomy, none = opened(saved("llama")), opened(saved("llama"), cache_bytes=0)
    prompts = [f"{i} {PREFIX}" for i in range(3)]
    for prompt in prompts:
        same(ask(roomy, suffixes(5), prompt), ask(none, suffixes(5), prompt), 1e-6)
    each = roomy._prefixes.nbytes / 3
    tight = opened(saved("llama"), cache_bytes=int(2.5 * each))
    for prompt in (prompts[0], prompts[1], prompts[0], prompts[2]):
        ask(tight, suffixes(5), prompt)
    assert len(roomy._prefixes) == 3
    assert len(none._prefixes) == 0
    assert len(tight._prefixes) == 2
    assert tight._prefixes.nbytes <= 2.5 * each
    cached = [ask(tight, suffixes(5), prompt).usage.cached_tokens for prompt in (prompts[0], prompts[1])]
    assert cached[0] > 100 > cached[1], "the one asked for longest ago made room"


def test_the_mass_is_the_labels_share_of_everything(saved: Saved) -> None:
    answer = ask(opened(saved("llama")), suffixes(3))
    np.testing.assert_allclose(answer.mass, plain_forward(saved("llama"), suffixes(3)).mass, atol=1e-5)
    assert 0.001 < answer.mass.max() < 0.9


def test_an_adapter_changes_answers_as_it_does_unmerged(saved: Saved, tmp_path: Path) -> None:
    folder = saved("qwen2")
    adapter = tiny_models.adapter(tmp_path / "adapter", folder)
    backend = opened(folder, adapter=adapter)
    answer, plain = ask(backend, suffixes(4)), ask(opened(folder), suffixes(4))
    assert np.abs(answer.probabilities - plain.probabilities).max() > 0.05
    assert backend.name == f"transformers:{folder}+{adapter}"
    same(answer, plain_forward(folder, suffixes(4), adapter=adapter))


def test_a_kept_prefix_that_is_read_wrongly_is_not_used(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Prefill.read

    def careless(self: Any, past: Any, rows: Any, labels: Any) -> Any:
        """Forgets the last token of the prefix, as one who counts from 1."""
        return read(self, past.cropped(len(past) - 1) if self.keeps_prefix else past, rows, labels)

    monkeypatch.setattr(Prefill, "read", careless)
    for dtype in ("float32", "bfloat16"):
        backend = opened(saved("llama"), dtype=dtype)
        backend.prepare()
        assert not keeps_prefix(backend)


def test_bfloat16_ranks_as_float32_does(saved: Saved) -> None:
    texts = suffixes(60)
    exact, rough = (ask(opened(saved("llama"), dtype=d), texts) for d in ("float32", "bfloat16"))
    expected = [BINS.moments(answer.probabilities)[0] for answer in (exact, rough)]
    assert np.corrcoef(*expected)[0, 1] > 0.99


def test_labels_that_are_not_single_tokens_are_refused(saved: Saved) -> None:
    backend = opened(saved("llama"))
    with pytest.raises(LLMError, match=r"'Zebra' must be one token after 'Bin:'.*makes \[\d+, \d+"):
        backend.forecast(
            PREFIX, suffixes(2), (AnswerLabel("A", "fast"), AnswerLabel("Zebra", "slow")), timeout_s=LONG_S
        )
    with pytest.raises(LLMError, match="labels must be told apart"):
        backend.forecast(
            PREFIX, suffixes(2), (AnswerLabel("A", "fast"), AnswerLabel("A", "slow")), timeout_s=LONG_S
        )
    with pytest.raises(LLMError, match="at least"):
        backend.forecast(PREFIX, [""], BINS.labels, timeout_s=LONG_S)
    two = backend.forecast(PREFIX, suffixes(2), BINS.labels[:2], timeout_s=LONG_S)
    assert two.probabilities.shape == (2, 2)
    assert ask(backend, []).probabilities.shape == (0, len(BINS.labels))


def test_what_does_not_fit_the_model_is_not_answered(saved: Saved) -> None:
    backend = opened(saved("llama", max_position_embeddings=400))
    long = "BLOCK=64 " * 200 + "\nBin:"
    answer = ask(backend, [suffixes(1)[0], long])
    assert answer.answered.tolist() == [True, False]
    assert answer.mass[1] == 0.0
    assert "longer than the model's 400 positions" in answer.trouble[0]
    with pytest.raises(LLMError, match="must fit the model's 400 positions"):
        ask(backend, suffixes(2), PREFIX * 3)


def test_threads_share_a_model(saved: Saved) -> None:
    backend, texts = opened(saved("llama")), suffixes(12)
    alone = ask(opened(saved("llama")), texts)
    answers: list[Any] = [None] * 6
    prompts = [PREFIX, PREFIX[:150]] * 3

    def run(i: int) -> None:
        answers[i] = ask(backend, texts, prompts[i])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in (0, 2, 4):
        same(answers[i], alone, 1e-5)
        same(answers[i + 1], answers[1], 1e-6)


def test_time_limits_hold_between_passes(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = opened(saved("llama"), memory_bytes=1)
    backend.prepare()
    with pytest.raises(LLMError, match="no candidate was read: the time was over"):
        backend.forecast(PREFIX, suffixes(20), BINS.labels, timeout_s=-1.0)
    backend._lock.acquire()
    with pytest.raises(LLMError, match=r"busy for 0\.05 s"):
        backend.forecast(PREFIX, suffixes(20), BINS.labels, timeout_s=0.05)
    backend._lock.release()
    clock, read = [0.0], Prefill.read

    def slow(self: Any, *given: Any) -> Any:
        clock[0] += 1.0  # seconds per pass
        return read(self, *given)

    monkeypatch.setattr(Prefill, "read", slow)
    monkeypatch.setattr("forecast_integrations.models.transformers.backend.time.monotonic", lambda: clock[0])
    answer = backend.forecast(PREFIX, suffixes(20), BINS.labels, timeout_s=4.5)
    assert answer.answered.sum() == 5, "the pass that began in time is finished"
    assert answer.trouble == ("the time was over before the model had read all candidates",)


def test_it_is_a_backend_that_loads_when_needed(saved: Saved) -> None:
    backend = opened(saved("llama"))
    assert isinstance(backend, Backend)
    assert not backend.ready()
    first = ask(backend, suffixes(3))
    assert backend.ready()
    backend.close()
    assert not backend.ready()
    same(ask(backend, suffixes(3)), first, 1e-6)
    backend.close()
    backend.close()


WEIGHTS = os.environ.get("FORECAST_AUTOTUNE_TEST_WEIGHTS")


@pytest.mark.slow
@pytest.mark.skipif(not WEIGHTS, reason="FORECAST_AUTOTUNE_TEST_WEIGHTS names no folder with a real model")
def test_a_real_model_ranks_as_it_does_in_full() -> None:
    assert WEIGHTS
    texts = suffixes(12)
    quick, full = ask(opened(WEIGHTS), texts, PREFIX), plain_forward(WEIGHTS, texts)
    same(quick, full, 1e-3)
    ranks = [np.argsort(BINS.moments(a.probabilities)[0], kind="stable").tolist() for a in (quick, full)]
    assert ranks[0] == ranks[1]
