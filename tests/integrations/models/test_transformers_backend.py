"""The in-process backend: every way of reading gives the answer of reading each prompt in full."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

import torch

from forecast_autotune.llm.backend import Backend, LLMError
from forecast_autotune.llm.bins import BINS, AnswerLabel
from forecast_integrations.models.transformers import strategies
from forecast_integrations.models.transformers.backend import TransformersBackend
from forecast_integrations.models.transformers.tree_prefill import TreePrefill
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


@pytest.fixture(scope="module")
def in_full(saved: Saved) -> Callable[[int], Any]:
    """The answer for so many candidates, each prompt read in full: the slowest way, so only once."""

    @cache
    def answer(count: int) -> Any:
        return ask(opened(saved("llama"), way="naive"), suffixes(count))

    return answer


WINDOW = {"sliding_window": 8}


@pytest.mark.parametrize(
    ("family", "changes", "way"),
    [
        ("llama", {}, "tree"),
        ("llama", {"attention_bias": True, "mlp_bias": True}, "tree"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}, "tree"),
        ("qwen2", {"tie_word_embeddings": True}, "tree"),
        ("qwen3", {}, "tree"),
        ("mistral", {}, "tree"),
        ("mistral", WINDOW, "batched"),
        ("gemma3_text", WINDOW, "batched"),
        ("gemma2", {"head_dim": 16, **WINDOW}, "batched"),
        ("granite", {"logits_scaling": 2.0}, "packed"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "packed"),
    ],
)
def test_the_way_that_is_chosen_reads_as_the_model_does(
    saved: Saved, family: str, changes: dict[str, Any], way: str
) -> None:
    folder, texts = saved(family, **changes), suffixes(40)
    backend = opened(folder)
    same(ask(backend, texts), ask(opened(folder, way="naive"), texts))
    found = backend.diagnostics()
    assert (found["way"], found["device"], found["dtype"]) == (way, "cpu", "float32")
    assert list(found["refused"]) == list(strategies.STRATEGIES)[: list(strategies.STRATEGIES).index(way)]
    json.dumps(found)


def test_a_model_without_attention_is_read_in_full(saved: Saved) -> None:
    sizes = {"vocab_size": len(tiny_models.tokenizer()), "hidden_size": 32, "num_hidden_layers": 2}
    backend = opened(saved("mamba", **sizes, state_size=4))
    answer = ask(backend, suffixes(5))
    assert backend.diagnostics()["way"] == "naive"
    assert answer.answered.all()
    assert answer.usage.cached_tokens == 0
    assert ask(backend, suffixes(5)).usage.cached_tokens == 0, "nothing was kept"


@pytest.mark.parametrize("way", ["tree", "packed", "batched"])
@pytest.mark.parametrize("count", [1, 2, 150])
def test_every_way_gives_the_answer_of_reading_in_full(
    saved: Saved, in_full: Callable[[int], Any], way: str, count: int
) -> None:
    folder, texts = saved("llama"), suffixes(count)
    answer, wanted = ask(opened(folder, way=way), texts), in_full(count)
    np.testing.assert_allclose(answer.probabilities, wanted.probabilities, atol=1e-4)
    np.testing.assert_allclose(answer.mass, wanted.mass, atol=1e-4)
    assert answer.probabilities.shape == (count, len(BINS.labels))
    np.testing.assert_allclose(answer.probabilities.sum(axis=1), 1.0)


@pytest.mark.parametrize("way", ["tree", "packed", "batched", "naive"])
def test_passes_of_any_size_give_one_answer(saved: Saved, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, texts = saved("qwen2"), suffixes(24)
    kind, sizes = strategies.STRATEGIES[way], []
    read = kind.read  # type: ignore[attr-defined]

    def counted(self: Any, past: Any, rows: Any, labels: Any) -> Any:
        sizes.append(len(rows))
        return read(self, past, rows, labels)

    monkeypatch.setattr(kind, "read", counted)
    whole = opened(folder, way=way)
    whole.prepare()
    sizes.clear()
    answer = ask(whole, texts)
    few = list(sizes)
    small = opened(folder, way=way, memory_bytes=1)
    small.prepare()
    sizes.clear()
    same(ask(small, texts), answer)
    assert len(few) < 15
    assert sizes == [1] * len(texts), "a limit that nothing fits into leaves one row per pass"


@pytest.mark.parametrize("way", ["tree", "packed", "batched"])
def test_what_is_kept_of_prefixes_changes_no_answer(saved: Saved, way: str) -> None:
    folder, texts = saved("llama"), suffixes(9)
    backend = opened(folder, way=way)
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
        same(answer, ask(opened(folder, way=way), texts, prefix), 1e-5)
    same(ask(backend, texts), first, 1e-6)  # what was kept has not been written to


def test_prefixes_are_kept_within_a_limit(saved: Saved) -> None:
    roomy, none = opened(saved("llama")), opened(saved("llama"), cache_bytes=0)
    prompts = [f"{i} {PREFIX}" for i in range(3)]
    for prompt in prompts:
        same(ask(roomy, suffixes(5), prompt), ask(none, suffixes(5), prompt), 1e-6)
    each = roomy.diagnostics()["prefix_bytes"] / 3
    tight = opened(saved("llama"), cache_bytes=int(2.5 * each))
    for prompt in (prompts[0], prompts[1], prompts[0], prompts[2]):
        ask(tight, suffixes(5), prompt)
    assert roomy.diagnostics()["prefixes"] == 3
    assert none.diagnostics()["prefixes"] == 0
    assert tight.diagnostics()["prefixes"] == 2
    assert tight.diagnostics()["prefix_bytes"] <= 2.5 * each
    cached = [ask(tight, suffixes(5), prompt).usage.cached_tokens for prompt in (prompts[0], prompts[1])]
    assert cached[0] > 100 > cached[1], "the one asked for longest ago made room"


def test_the_mass_is_the_labels_share_of_everything(saved: Saved) -> None:
    import transformers

    folder = saved("llama")
    answer = ask(opened(folder), suffixes(3))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = transformers.AutoTokenizer.from_pretrained(folder)
    ends = [tokens(f" {label.token}")["input_ids"][0] for label in BINS.labels]
    for text, shares, mass in zip(suffixes(3), answer.probabilities, answer.mass, strict=True):
        ids = tokens(PREFIX)["input_ids"] + tokens(text)["input_ids"]
        with torch.no_grad():
            all_of_it = model(torch.tensor([ids])).logits[0, -1].double().softmax(0)[ends].numpy()
        assert mass == pytest.approx(all_of_it.sum(), abs=1e-5)
        np.testing.assert_allclose(shares, all_of_it / all_of_it.sum(), atol=1e-5)
    assert 0.001 < answer.mass.max() < 0.9


def test_an_adapter_changes_answers_as_it_does_unmerged(saved: Saved, tmp_path: Path) -> None:
    import peft
    import transformers

    folder = saved("qwen2")
    adapter = tiny_models.adapter(tmp_path / "adapter", folder)
    backend = opened(folder, adapter=adapter)
    answer, plain = ask(backend, suffixes(4)), ask(opened(folder), suffixes(4))
    assert np.abs(answer.probabilities - plain.probabilities).max() > 0.05
    assert backend.name == f"transformers:{folder}+{adapter}"
    assert backend.diagnostics()["way"] == "tree", "merged, the model is as quick as without"
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    unmerged = peft.PeftModel.from_pretrained(base, adapter)
    tokens = transformers.AutoTokenizer.from_pretrained(folder)
    ends = [tokens(f" {label.token}")["input_ids"][0] for label in BINS.labels]
    for text, shares in zip(suffixes(4), answer.probabilities, strict=True):
        ids = tokens(PREFIX)["input_ids"] + tokens(text)["input_ids"]
        with torch.no_grad():
            logits = unmerged(input_ids=torch.tensor([ids])).logits[0, -1, ends]
        np.testing.assert_allclose(shares, logits.softmax(0).numpy(), atol=1e-4)


def test_a_way_that_reads_wrongly_is_refused(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    class Careless(TreePrefill):
        """Forgets the last token of the prefix, as one who counts from 1."""

        def read(self, past: Any, rows: Any, labels: Any) -> Any:
            return super().read(past.cropped(len(past) - 1), rows, labels)

    monkeypatch.setitem(strategies.STRATEGIES, "tree", Careless)
    for dtype in ("float32", "bfloat16"):
        backend = opened(saved("llama"), dtype=dtype)
        backend.prepare()
        assert backend.diagnostics()["way"] == "packed"
        assert "logits differ" in backend.diagnostics()["refused"]["tree"]
    with pytest.raises(LLMError, match="cannot be read in the way 'tree'"):
        opened(saved("llama"), way="tree").prepare()


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
    backend = opened(saved("llama"), way="tree", memory_bytes=1)
    backend.prepare()
    with pytest.raises(LLMError, match="no candidate was read: the time was over"):
        backend.forecast(PREFIX, suffixes(20), BINS.labels, timeout_s=-1.0)
    backend._lock.acquire()
    with pytest.raises(LLMError, match=r"busy for 0\.05 s"):
        backend.forecast(PREFIX, suffixes(20), BINS.labels, timeout_s=0.05)
    backend._lock.release()
    clock, read = [0.0], TreePrefill.read

    def slow(self: Any, *given: Any) -> Any:
        clock[0] += 1.0  # seconds per pass
        return read(self, *given)

    monkeypatch.setattr(TreePrefill, "read", slow)
    monkeypatch.setattr("forecast_integrations.models.transformers.backend.time.monotonic", lambda: clock[0])
    answer = backend.forecast(PREFIX, suffixes(20), BINS.labels, timeout_s=4.5)
    assert answer.answered.sum() == 5, "the pass that began in time is finished"
    assert answer.trouble == ("the time was over before the model had read all candidates",)


def test_it_is_a_backend_that_loads_when_needed(saved: Saved) -> None:
    backend = opened(saved("llama"))
    assert isinstance(backend, Backend)
    assert not backend.ready()
    assert backend.diagnostics() == {"name": backend.name, "ready": False}
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
    quick, full = (ask(opened(WEIGHTS, way=way), texts, PREFIX) for way in (None, "naive"))
    same(quick, full, 1e-3)
    ranks = [np.argsort(BINS.moments(a.probabilities)[0], kind="stable").tolist() for a in (quick, full)]
    assert ranks[0] == ranks[1]
