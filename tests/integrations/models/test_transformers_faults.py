"""What can go wrong around a model in this process: broken files, no memory, the host's own settings."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

import torch
import transformers

from forecast_autotune.llm.backend import LLMError
from forecast_autotune.llm.bins import BINS
from forecast_integrations.models.transformers import loading
from forecast_integrations.models.transformers.backend import TransformersBackend
from forecast_integrations.models.transformers.prefill import Prefill
from tests.integrations.models import tiny_models
from tests.integrations.models.tiny_models import PREFIX, suffixes

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_models.saved(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture
def copied(folder: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def opened(folder: str | Path, **given: Any) -> TransformersBackend:
    return TransformersBackend(str(folder), **{"device": "cpu", "dtype": "float32"} | given)


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


@pytest.mark.slow
def test_what_the_hubs_cache_holds_needs_no_network(folder: str, tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    adapter = tiny_models.adapter(tmp_path / "adapter", folder)
    for name, source in (("model", folder), ("lora", adapter)):
        place = tmp_path / "hub" / f"models--me--{name}"
        shutil.copytree(source, place / "snapshots" / commit)
        (place / "refs").mkdir()
        (place / "refs" / "main").write_text(commit)
    program = """
import socket, sys
def none(*given):
    raise OSError("no network: " + repr(given))
socket.socket.connect = socket.getaddrinfo = none
from forecast_integrations.models.transformers.backend import TransformersBackend
backend = TransformersBackend("me/model", "me/lora", device="cpu")
backend.prepare()
print(backend.name, backend.ready())
"""
    env = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**env, "HF_HUB_CACHE": str(tmp_path / "hub"), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["transformers:me/model+me/lora", "True"]
    assert "Retry" not in done.stderr
    assert "Loading" not in done.stderr


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


def test_warming_stays_within_memory(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU does in `prepare`; the CPU can, too."""
    backend = opened(folder)
    backend.prepare()
    assert backend._open is not None
    way, rows = backend._open.prefill, []
    read = way.read

    def counted(past: Any, suffixes: Any, labels: Any) -> Any:
        rows.append((len(past), len(suffixes), {len(ids) for ids in suffixes}))
        return read(past, suffixes, labels)

    monkeypatch.setattr(way, "read", counted)
    with torch.inference_mode():
        for limit in (1 << 30, 1, 0):
            way.warm_up(limit, prefix=70, rows=9, length=6)
    assert rows == [(70, 9, {6}), (70, 1, {6}), (70, 1, {6})]

    def none(past: Any, suffixes: Any, labels: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(way, "read", none)
    way.warm_up(1 << 30, prefix=70, rows=9, length=6)  # a cold start is no failure


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
    assert backend._open is not None
    layers = backend._open.model.model.layers
    layers[0].mlp.down_proj = layers[0].self_attn.o_proj
    with pytest.raises(LLMError, match=r"the model failed on cpu .*shape"):
        backend.forecast(PREFIX, suffixes(3), BINS.labels, timeout_s=60)


def test_logits_that_are_no_numbers_are_no_answer(copied: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(copied)
    backend = opened(copied)
    backend.prepare()
    assert backend._open is not None
    with torch.no_grad():
        backend._open.model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(LLMError, match="logits were not finite"):
        backend.forecast(PREFIX, suffixes(3), BINS.labels, timeout_s=60)
    model.model.norm.weight.data.fill_(float("nan"))
    model.save_pretrained(copied)
    broken = opened(copied)
    with pytest.raises(LLMError, match="logits were not finite"):
        broken.forecast(PREFIX, suffixes(3), BINS.labels, timeout_s=60)
    assert broken._open is not None
    assert not broken._open.prefill.keeps_prefix, "nothing agrees with no numbers"


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


def test_importing_the_backend_loads_no_model_library() -> None:
    program = (
        "import sys, forecast_integrations.models.transformers.backend as t; t.TransformersBackend('a');"
        "print(sorted({'torch', 'transformers', 'peft', 'tokenizers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
