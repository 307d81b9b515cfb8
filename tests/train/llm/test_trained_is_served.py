"""Trained is served: the forecaster sees the model, the tokens and the answers that the trainer saw, or refuses."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import peft
import pytest
import safetensors.torch
import torch
import transformers

from forecast_autotune.errors import RecordError
from forecast_autotune.llm.backend import LLMError
from forecast_autotune.llm.bins import BINS
from forecast_autotune.llm.calibration import FILE as CALIBRATION
from forecast_autotune.llm.calibration import LLMCalibration, find_calibration, probe_digest
from forecast_autotune.llm.calibration import write as write_calibration
from forecast_autotune.llm.probe import FILE, Probe, ProbeMismatch, find_probe
from forecast_autotune.llm.tokenizer import ForecastTokenizer
from forecast_autotune.surrogates.factory import calibration_paths
from forecast_integrations.models.transformers import loading
from forecast_integrations.models.transformers.backend import TransformersBackend
from forecast_train.llm.data.examples import write_examples
from forecast_train.llm.runs import LoraSettings, TrainingError
from forecast_train.llm.settings import ScheduleSettings, SftRun
from forecast_train.llm.sft import serve, train
from tests.integrations.models.tiny_models import PREFIX, plain_forward, saved, suffixes
from tests.train.llm.test_llm_training import example

FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "gemma3_text": {"sliding_window": 8},
    "mistral": {"sliding_window": 8},
    "gpt_oss": {"sliding_window": 8, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mamba": {"state_size": 8},
    "llama4_text": {
        "attention_chunk_size": 64,
        "head_dim": 8,
        "intermediate_size_mlp": 64,
        "num_local_experts": 2,
    },
}
PACKED = {"gpt2", "llama", "qwen2", "qwen3"}
NO_ADAPTER = {"mamba": "linear layer", "llama4_text": "must read a prompt"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data")
    write_examples(folder / "train.parquet", [example(i) for i in range(3)])
    write_examples(folder / "validation.parquet", [example(9)])
    return str(folder)


def run_of(model: str, data: str, out: Path, **changes: Any) -> SftRun:
    steps = ScheduleSettings(most=3, examples=1, rate=0.01, warmup=0.0, save=2, validate=100, tokens=3000)
    given = {"lora": LoraSettings(rank=4, alpha=8), "steps": steps, "dtype": "float32"}
    return SftRun(model, data, str(out), **{**given, **changes})


def difference(probe: Probe, backend: TransformersBackend) -> float:
    """The largest of log-probabilities of a probe's prompts, as trained and as served."""
    worst = 0.0
    for q in probe.questions:
        said = backend.forecast(q.prefix, q.suffixes, BINS.labels, timeout_s=60).probabilities
        worst = max(worst, float(np.abs(np.log(said) - np.asarray(q.log_p)).max()))
    return worst


@pytest.fixture(scope="module")
def llama(data: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A model, and the run of an adapter for it."""
    folder = tmp_path_factory.mktemp("llama")
    model = saved(folder / "model", "llama")
    train(run_of(model, data, folder / "out"))
    return model, folder / "out"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_served_as_it_was_trained(data: str, tmp_path: Path, family: str) -> None:
    """In float32 always; in bfloat16 too, or it is refused by the difference."""
    model = saved(tmp_path / "model", family, **FAMILIES[family])
    rank = 4
    if family in NO_ADAPTER:
        with pytest.raises(TrainingError, match=rf"{NO_ADAPTER[family]}.*lora\.rank = 0"):
            train(run_of(model, data, tmp_path / "out"))
        shutil.rmtree(tmp_path / "out")
        rank = 0
    done = train(run_of(model, data, tmp_path / "out", lora=LoraSettings(rank=rank, alpha=8)))
    assert done["packed"] == (family in PACKED)
    trained = str(tmp_path / "out" / "trained")
    given = (model, trained) if rank else (trained, None)
    probe = find_probe(trained)
    assert sum(len(q.suffixes) for q in probe.questions) == 6
    backend = TransformersBackend(*given, device="cpu", dtype="float32")
    assert difference(probe, backend) <= 1e-4
    with contextlib.suppress(ProbeMismatch):
        assert difference(probe, TransformersBackend(*given, device="cpu", dtype="bfloat16")) <= 2e-2


def test_without_a_dtype_a_model_is_served_in_the_one_that_answers_right(
    llama: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = llama
    monkeypatch.setattr(loading, "_dtype", lambda given, device: getattr(torch, given or "bfloat16"))
    with pytest.raises(
        ProbeMismatch, match=r"differ by up to 0\.0.*at most 0\.02 in bfloat16.*dtype=float32"
    ):
        TransformersBackend(model, str(out / "trained"), device="cpu", dtype="bfloat16").prepare()
    backend = TransformersBackend(model, str(out / "trained"), device="cpu")
    assert difference(find_probe(out / "trained"), backend) <= 1e-4
    assert find_probe(out / "trained").dtype == "float32"


def test_answers_are_compared_once_for_the_same_contents_where_the_model_was_trained(
    llama: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the trainer: not at the first load, nor of a copy; but where a byte differs and size and time do not."""
    monkeypatch.setenv("FORECAST_AUTOTUNE_CACHE_DIR", str(tmp_path / "cache"))
    trained = shutil.copytree(llama[1] / "trained", tmp_path / "trained")
    compared, check = [], Probe.check
    monkeypatch.setattr(Probe, "check", lambda *a, **k: compared.append(1) or check(*a, **k))
    serve(llama[0], trained, find_probe(trained))
    copied = shutil.copytree(trained, tmp_path / "copy")
    for folder in (trained, copied):
        write_calibration(folder / CALIBRATION, LLMCalibration("m", "p"))  # nothing that answers rest on
        TransformersBackend(llama[0], str(folder), device="cpu").prepare()
    assert len(compared) == 1
    path = copied / "adapter_model.safetensors"
    before, weights = path.stat(), bytearray(path.read_bytes())
    weights[-2] ^= 0x10
    path.write_bytes(weights)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with contextlib.suppress(ProbeMismatch):
        TransformersBackend(llama[0], str(copied), device="cpu").prepare()
    assert len(compared) > 1


def test_a_model_of_the_hubs_cache_is_checked_as_a_folder_is(
    llama: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its identity, too, is that of the weights."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    kept = tmp_path / "models--us--adapter"
    folder = shutil.copytree(llama[1] / "trained", kept / "snapshots" / "0123")
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("0123")
    backend = TransformersBackend(llama[0], "us/adapter", device="cpu")
    assert difference(find_probe("us/adapter"), backend) <= 1e-4
    weights = safetensors.torch.load_file(folder / "adapter_model.safetensors")
    safetensors.torch.save_file({k: v * 0 for k, v in weights.items()}, folder / "adapter_model.safetensors")
    backend.close()
    with pytest.raises(ProbeMismatch):
        backend.prepare()
    calibrations = calibration_paths(f"transformers:{llama[0]}?adapter=us/adapter", backend.name, None)
    assert calibrations[0] == folder / CALIBRATION
    before = backend.identity()
    (folder / FILE).write_text((folder / FILE).read_text() + "\n")
    assert backend.identity() != before


def test_the_probe_of_a_model_says_nothing_of_an_adapter_on_it(
    llama: tuple[str, Path], tmp_path: Path
) -> None:
    model = shutil.copytree(llama[0], tmp_path / "model")
    shutil.copy(llama[1] / "trained" / FILE, model)
    adapter = shutil.copytree(llama[1] / "trained", tmp_path / "adapter", ignore=lambda *_: [FILE])
    TransformersBackend(str(model), str(adapter), device="cpu").prepare()
    with pytest.raises(ProbeMismatch):
        TransformersBackend(str(model), device="cpu").prepare()


@pytest.mark.parametrize("fault", ["weights", "tokenizer", "base", "damaged", "of another kind"])
def test_whatever_does_not_answer_as_trained_is_refused(
    llama: tuple[str, Path], tmp_path: Path, fault: str
) -> None:
    model = str(shutil.copytree(llama[0], tmp_path / "model"))
    trained = shutil.copytree(llama[1] / "trained", tmp_path / "trained")
    said = "differ by up to"
    if fault == "weights":
        weights = safetensors.torch.load_file(trained / "adapter_model.safetensors")
        safetensors.torch.save_file(
            {k: v * 0 for k, v in weights.items()}, trained / "adapter_model.safetensors"
        )
    elif fault == "tokenizer":
        path, said = Path(model) / "tokenizer.json", "read with the tokenizer"
        path.write_text(path.read_text().replace('"add_prefix_space": false', '"add_prefix_space": true'))
        path.write_text(path.read_text().replace('"add_prefix_space":false', '"add_prefix_space":true'))
    elif fault == "base":
        model = saved(tmp_path / "other", "llama", rms_norm_eps=0.1)
    else:
        path, said = trained / FILE, "no probe that can be read.*train again"
        path.write_text("{" if fault == "damaged" else '{"type": "llm_calibration", "schema": 1}')
    with pytest.raises(LLMError, match=said):
        TransformersBackend(model, str(trained), device="cpu", dtype="float32").prepare()


@pytest.mark.parametrize("saved_so", ["truncation", "padding"])
def test_a_tokenizer_that_was_saved_while_it_cut_or_padded_reads_whole_texts(
    tmp_path: Path, saved_so: str
) -> None:
    model = saved(tmp_path / "model", "llama")
    whole = ForecastTokenizer(transformers.AutoTokenizer.from_pretrained(model))
    path = tmp_path / "model" / "tokenizer.json"
    known = json.loads(path.read_text())
    known["truncation" if saved_so == "truncation" else "padding"] = {
        "truncation": {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0},
        "padding": {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                    "pad_type_id": 0, "pad_token": "<end>"},
    }[saved_so]  # fmt: skip
    path.write_text(json.dumps(known))
    read = ForecastTokenizer(transformers.AutoTokenizer.from_pretrained(model))
    np.testing.assert_array_equal(read.prefix(PREFIX), whole.prefix(PREFIX))
    assert read.labels(["x\nBin:"], BINS.labels) == whole.labels(["x\nBin:"], BINS.labels)


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_an_adapter_of_tied_embeddings_is_served_as_it_is_unmerged(tmp_path: Path, target: str) -> None:
    model = saved(tmp_path / "model", "qwen2", tie_word_embeddings=True)
    base = transformers.AutoModelForCausalLM.from_pretrained(model)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        wrapped = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", target]))
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    wrapped.save_pretrained(tmp_path / "adapter")
    backend = TransformersBackend(model, str(tmp_path / "adapter"), device="cpu", dtype="float32")
    said = backend.forecast(PREFIX, suffixes(5), BINS.labels, timeout_s=60)
    right = plain_forward(model, suffixes(5), adapter=str(tmp_path / "adapter"))
    np.testing.assert_allclose(said.probabilities, right.probabilities, atol=1e-4)


def test_answers_in_bfloat16_have_no_ties(tmp_path: Path) -> None:
    model = saved(tmp_path / "model", "llama", initializer_range=0.02)
    backend = TransformersBackend(model, device="cpu", dtype="bfloat16")
    said = backend.forecast(PREFIX, suffixes(8), BINS.labels, timeout_s=60).probabilities
    assert all(len(set(row)) == len(BINS.labels) for row in said.tolist())


def test_a_model_with_too_few_positions_is_refused_before_it_is_trained(data: str, tmp_path: Path) -> None:
    model = saved(tmp_path / "model", "llama", max_position_embeddings=64)
    with pytest.raises(TrainingError, match=r"needs [0-9]+ positions and the model has 64"):
        train(run_of(model, data, tmp_path / "out"))
    assert not (tmp_path / "out" / "trained").exists()


def test_an_adapter_alone_is_no_model_to_train(llama: tuple[str, Path], data: str, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"holds an adapter alone.*lora\.rank = 0"):
        train(run_of(str(llama[1] / "trained"), data, tmp_path / "out"))


def test_a_run_is_not_resumed_on_other_data_or_another_model(data: str, tmp_path: Path) -> None:
    own, model = shutil.copytree(data, tmp_path / "data"), saved(tmp_path / "model", "llama")
    run = run_of(model, str(own), tmp_path / "out")
    train(run)
    write_examples(own / "train.parquet", [example(i) for i in range(4)])
    with pytest.raises(TrainingError, match=r"another run \(sha256 differ\)"):
        train(run, resume=True)


def test_a_finished_run_has_nothing_to_resume_and_tells_its_whole_loss(
    llama: tuple[str, Path], data: str
) -> None:
    model, out = llama
    run = run_of(model, data, out)
    before = (out / "trained" / "adapter_model.safetensors").read_bytes()
    done = train(run, resume=True)
    assert (out / "trained" / "adapter_model.safetensors").read_bytes() == before
    assert done["train_loss"] == pytest.approx(np.mean([row["loss"] for row in done["log"] if "loss" in row]))
    shutil.rmtree(out / "trained")  # from the last checkpoint but the end
    assert train(run, resume=True)["train_loss"] == pytest.approx(done["train_loss"])


def test_answers_and_calibrations_rest_on_the_weights(
    llama: tuple[str, Path], data: str, tmp_path: Path
) -> None:
    """A retraining into the same folder: answers that were kept are another model's, and so is the calibration."""
    model, trained = llama[0], shutil.copytree(llama[1] / "trained", tmp_path / "trained")
    backend, places = (
        TransformersBackend(model, str(trained)),
        [trained / CALIBRATION, tmp_path / "cache.json"],
    )
    before = backend.identity()
    probe = probe_digest(places)
    write_calibration(trained / CALIBRATION, LLMCalibration(backend.name, "p", about={"probe": probe}))
    assert find_calibration(backend.name, "p", places).about["probe"] == probe
    train(run_of(model, data, tmp_path / "again", seed=1))
    shutil.copytree(tmp_path / "again" / "trained", trained, dirs_exist_ok=True)
    assert backend.identity() != before
    with pytest.raises(RecordError, match=r"fitted to other weights.*calibrate-llm"):
        find_calibration(backend.name, "p", places)
    (trained / FILE).unlink()
    unknown = backend.identity()
    (trained / "adapter_model.safetensors").write_bytes(b"other weights")
    assert backend.identity() != unknown, "without a probe, the weights are read"
