"""The in-process backend: a batch behind a kept prefix gives the answer of a plain forward of each prompt."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

import huggingface_hub.constants
import torch
import transformers

from forecast_autotune.llm.backend import Backend, LLMError
from forecast_autotune.llm.bins import BINS, AnswerLabel
from forecast_integrations.models.transformers import loading
from forecast_integrations.models.transformers.backend import TransformersBackend
from forecast_integrations.models.transformers.prefill import Prefill
from tests.integrations.models import tiny_models
from tests.integrations.models.tiny_models import PREFIX, plain_forward, suffixes

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


def opened(folder: str | Path, **given: Any) -> TransformersBackend:
    return TransformersBackend(str(folder), **{"device": "cpu", "dtype": "float32"} | given)


def ask(backend: Backend, texts: list[str], prefix: str = PREFIX) -> Any:
    return backend.forecast(prefix, texts, BINS.labels, timeout_s=LONG_S)


def same(a: Any, b: Any, within: float = 1e-4) -> None:
    np.testing.assert_allclose(a.probabilities, b.probabilities, atol=within)
    np.testing.assert_allclose(a.mass, b.mass, atol=within)
    assert b.probabilities.std(axis=0).max() > 0.02, "the candidates' answers are all alike: nothing is shown"


def keeps_prefix(backend: TransformersBackend) -> bool:
    return backend._reader.prefill.keeps_prefix


WINDOW = {"sliding_window": 8}


@pytest.mark.sampled(5)
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


# --- what can go wrong: broken files, no memory, the host's own settings ---


ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def folder(saved: Saved) -> str:
    return saved("llama")


@pytest.fixture
def copied(folder: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def refused(match: str, backend: TransformersBackend) -> None:
    with pytest.raises(LLMError, match=match):
        backend.prepare()
    assert not backend.ready()


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's library read its switches when it was imported; a connection fails whatever they are."""
    import socket

    def none(*given: Any) -> Any:
        raise OSError("this test has no network")

    monkeypatch.setattr(socket.socket, "connect", none)
    monkeypatch.setattr(socket, "getaddrinfo", none)


def test_what_is_not_there_is_named(folder: str, tmp_path: Path) -> None:
    refused(r"no tokenizer at /nowhere/at/all: give an existing folder", opened("/nowhere/at/all"))
    refused(r"no tokenizer at \./nowhere", opened("./nowhere"))
    refused(r"(?s)cannot be loaded .*: check that the folder holds config", opened(tmp_path))
    refused("no adapter at /nowhere", opened(folder, adapter="/nowhere"))
    refused("the device 'cuda:99' cannot be used", opened(folder, device="cuda:99"))
    refused("must be one of bfloat16, float16, float32, got 'int4'", opened(folder, dtype="int4"))


def test_a_name_that_the_hub_cannot_be_asked_for_is_refused(folder: str) -> None:
    refused("check the name, the network and HF_HUB_OFFLINE", opened("nobody/no-such-model"))
    refused(r"(?s)the adapter nobody/none .*check the name", opened(folder, adapter="nobody/none"))
    refused("cannot be loaded .*Repo id", opened("not a name"))


def test_what_the_hubs_cache_holds_needs_no_network(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    for name, source in (("model", folder), ("lora", tiny_models.adapter(tmp_path / "adapter", folder))):
        place = tmp_path / "hub" / f"models--me--{name}"
        shutil.copytree(source, place / "snapshots" / commit)
        (place / "refs").mkdir()
        (place / "refs" / "main").write_text(commit)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    backend = opened("me/model", adapter="me/lora")
    backend.prepare()
    assert (backend.name, backend.ready()) == ("transformers:me/model+me/lora", True)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", b"\x08\x00\x00\x00\x00\x00\x00\x00not json"),
        ("model.safetensors", None),
        ("config.json", b"{"),
        ("config.json", b'{"model_type": "no such thing"}'),
        ("tokenizer.json", b"{}"),
    ],
)
def test_broken_files_are_an_error_of_ours(copied: Path, name: str, content: bytes | None) -> None:
    whole = (copied / name).read_bytes()
    (copied / name).write_bytes(whole[: len(whole) // 2] if content is None else content)
    backend = opened(copied)
    refused("cannot be loaded", backend)
    (copied / name).write_bytes(whole)
    # A broken model is not tried again and again in the midst of tuning, but after `close`.
    refused("cannot be loaded", backend)
    backend.close()
    backend.prepare()
    assert backend.ready()


def test_weights_that_would_be_random_are_refused(copied: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(copied / "model.safetensors")
    kept = {k: v for k, v in weights.items() if "layers.1.mlp" not in k}
    save_file(kept, copied / "model.safetensors", metadata={"format": "pt"})
    refused(r"lacks 3 weights \(model\.layers\.1\.mlp.*would be random", opened(copied))


def test_an_adapter_that_does_not_fit_is_refused(folder: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = Path(tiny_models.adapter(tmp_path / "adapter", folder))
    weights = load_file(path / "adapter_model.safetensors")
    renamed = {k.replace("layers.1", "layers.7"): v for k, v in weights.items()}
    save_file(renamed, path / "adapter_model.safetensors")
    refused("does not fit the model", opened(folder, adapter=str(path)))
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(config | {"peft_type": "IA3"}))
    refused("only LoRA adapters can be merged, .* of kind IA3", opened(folder, adapter=str(path)))


def test_a_candidate_beyond_all_memory_is_left_out(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Prefill.read
    asked: list[int] = []

    def small(self: Any, past: Any, rows: Any, labels: Any) -> Any:
        asked.append(len(rows))
        if sum(map(len, rows)) > 100:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return read(self, past, rows, labels)

    backend = opened(folder)
    backend.prepare()
    monkeypatch.setattr(Prefill, "read", small)
    texts = [*suffixes(10), "BLOCK=64 " * 100 + "\nBin:"]
    answer = backend.forecast(PREFIX, texts, BINS.labels, timeout_s=60)
    assert answer.answered.tolist() == [True] * 10 + [False]
    assert answer.trouble == ("there was not enough memory on cpu to read a candidate",)
    assert max(asked) > min(asked) > 0


def test_the_hosts_settings_stay_as_they_are(folder: str, capfd: pytest.CaptureFixture[str]) -> None:
    from huggingface_hub import utils as hub
    from transformers.utils import logging

    def settings() -> tuple[object, ...]:
        return (
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_default_dtype(),
            logging.get_verbosity(),
            logging.is_progress_bar_enabled(),
            hub.are_progress_bars_disabled(),
            dict(os.environ),
        )

    before, state = settings(), torch.get_rng_state()
    backend = opened(folder)
    answer = backend.forecast(PREFIX, suffixes(6), BINS.labels, timeout_s=60)
    assert settings() == before
    assert torch.equal(torch.get_rng_state(), state)
    # torch's own chatter about threads aside, nothing is printed: a tuner's output is its user's.
    assert "Loading" not in capfd.readouterr().err
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.enable_grad():
        inside = backend.forecast(PREFIX, suffixes(6), BINS.labels, timeout_s=60)
        assert torch.is_autocast_enabled("cpu")
    np.testing.assert_allclose(inside.probabilities, answer.probabilities, atol=1e-6)
    logging.disable_progress_bar()
    try:
        with loading.silenced():
            pass
        assert not logging.is_progress_bar_enabled()
        assert hub.are_progress_bars_disabled()
    finally:
        logging.enable_progress_bar()


def test_a_failure_of_torch_is_an_error_of_ours(folder: str) -> None:
    backend = opened(folder)
    backend.prepare()
    layers = backend._reader.model.model.layers
    layers[0].mlp.down_proj = layers[0].self_attn.o_proj
    with pytest.raises(LLMError, match=r"the model failed on cpu .*shape"):
        backend.forecast(PREFIX, suffixes(3), BINS.labels, timeout_s=60)


def test_logits_that_are_no_numbers_are_no_answer(copied: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(copied)
    backend = opened(copied)
    backend.prepare()
    with torch.no_grad():
        backend._reader.model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(LLMError, match="logits were not finite"):
        backend.forecast(PREFIX, suffixes(3), BINS.labels, timeout_s=60)
    model.model.norm.weight.data.fill_(float("nan"))
    model.save_pretrained(copied)
    broken = opened(copied)
    with pytest.raises(LLMError, match="logits were not finite"):
        broken.forecast(PREFIX, suffixes(3), BINS.labels, timeout_s=60)
    assert not broken._reader.prefill.keeps_prefix, "nothing agrees with no numbers"


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="children are forked where there is `fork`")
def test_children_forked_while_a_model_loads_do_not_hang(folder: str) -> None:
    """Importing, loading and reading in a thread of a fresh process, forks in its main thread meanwhile."""
    program = """
import json, sys, threading
import torch
from forecast_integrations.models.transformers.backend import TransformersBackend
from forecast_autotune.llm.bins import BINS
from tests.integrations.parallel_children import run_in_children
from tests.integrations.models.tiny_models import PREFIX, suffixes

backend, asked = TransformersBackend(sys.argv[1], device="cpu"), []

def work():
    backend.prepare()
    for i in range(2):
        asked.append(backend.forecast(PREFIX, suffixes(20 + i), BINS.labels, timeout_s=600).answered.all())

def task():
    # What a compiling child does, as far as locks go: memory, files, loaded modules, a process.
    import logging, subprocess, tempfile
    with tempfile.TemporaryFile() as file:
        file.write(bytes(1 << 20))
    logging.getLogger("child").debug("here")
    return subprocess.run(["echo", "42"], capture_output=True).stdout.decode()

import logging, subprocess, tempfile
thread = threading.Thread(target=work)
thread.start()
forked = answered = 0
while thread.is_alive():
    forked += 4
    answered += sum(answer == "42\\n" for answer in run_in_children([task] * 4, 60.0))
thread.join()
print(json.dumps({"forked": forked, "answered": answered, "asked": len(asked)}))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, folder],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["forked"] == found["answered"] > 20
    assert found["asked"] == 2
    assert "fork" not in done.stderr.lower(), "the children's terminal is the user's"
