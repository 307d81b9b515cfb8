"""Training for real, on tiny random models: losses fall, runs resume, what is trained is what is served."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forecast_autotune.llm.bins import BINS
from forecast_autotune.llm.probe import find_probe
from forecast_autotune.llm.tokenizer import ForecastTokenizer
from forecast_integrations.models.transformers.backend import TransformersBackend
from forecast_train.llm.data.examples import Example, ExampleCandidate, ExampleOrigin, write_examples
from forecast_train.llm.grpo import GrpoRun, RolloutSettings
from forecast_train.llm.runs import LoraSettings, TrainingError
from forecast_train.llm.settings import ScheduleSettings, SftRun
from forecast_train.llm.sft import (
    collate,
    pack_example,
    train,
    tree_mask,
)
from tests.integrations.models.tiny_models import PREFIX, saved
from tests.integrations.models.tiny_models import tokenizer as tiny_tokenizer

BLOCKS = (16, 32, 64, 128, 256, 512)


def example(number: int) -> Example:
    """Small blocks are slow, middling ones fast, the largest fails: something that can be learnt."""
    asked = []
    for i, block in enumerate(BLOCKS):
        ratio = math.nan if block == 512 else abs(i - 3) * 0.8 - 0.1
        outcome = "out_of_resources" if math.isnan(ratio) else "ok"
        suffix = f"BLOCK={block} num_warps={1 << (number % 3)}\nBin:"
        asked.append(ExampleCandidate(suffix, "base", f"{block}", outcome, ratio, 0.02, math.nan))
    origin = ExampleOrigin(f"p{number}", "add", "elementwise", "me", "h200", "s", "2026-01-01")
    return Example(origin, "forecast-2", f"{PREFIX}# {number}\n", -3.0, True, 0, tuple(asked))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("base")
    data = folder / "data"
    data.mkdir()
    write_examples(data / "train.parquet", [example(i) for i in range(4)])
    write_examples(data / "validation.parquet", [example(9)])
    return {"model": saved(folder / "model", "llama"), "data": str(data)}


def run_of(base: dict[str, str], out: Path, **changes: Any) -> SftRun:
    steps = ScheduleSettings(most=10, examples=2, rate=0.01, warmup=0.0, save=5, validate=5, tokens=1500)
    given = {"lora": LoraSettings(rank=4, alpha=8), "steps": steps, "dtype": "float32"}
    return SftRun(**base, out=str(out), **{**given, **changes})


def forecast_of(e: Example, model: str, adapter: str | None = None) -> Any:
    """A model's answer about an example, served as users have it served."""
    backend = TransformersBackend(model, adapter, device="cpu", dtype="float32")
    texts = [a.suffix for a in e.candidates]
    response = backend.forecast(e.prefix, texts, BINS.labels, timeout_s=60)
    backend.close()
    return response


def losses(done: dict[str, Any]) -> list[float]:
    return [row["loss"] for row in done["log"] if "loss" in row]


def test_no_candidate_sees_another_and_all_continue_from_the_prefix() -> None:
    tokens = ForecastTokenizer(tiny_tokenizer())
    (packed,) = pack_example(example(0), tokens, most=4096, sigma=0.1)
    seen = tree_mask(collate([packed])["segment"], torch.float32)[0, 0].numpy() == 0.0
    prefix = len(tokens.prefix(example(0).prefix))
    for k, last in enumerate(packed.last):
        mine = packed.segment == k + 1
        assert packed.positions[mine].tolist() == list(range(prefix, prefix + int(mine.sum())))
        assert seen[last].tolist() == ((packed.segment == 0) | mine).tolist()
    assert not seen[0, 1:].any()
    assert packed.target[-1, BINS.failure_index] == 1.0


@pytest.fixture(scope="module")
def whole(base: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[SftRun, dict[str, Any]]:
    """A run of an adapter that nobody interrupted, and what it says of itself."""
    run = run_of(base, tmp_path_factory.mktemp("whole") / "out")
    return run, train(run)


@pytest.mark.parametrize("rank", [4, 0])
def test_losses_fall_and_the_result_forecasts(
    base: dict[str, str], whole: tuple[SftRun, dict[str, Any]], tmp_path: Path, rank: int
) -> None:
    run, done = whole
    if not rank:
        run = run_of(base, tmp_path / "out", lora=LoraSettings(rank=0, alpha=8))
        done = train(run)
    out = Path(run.out)
    result = losses(done)
    assert len(result) == done["steps"] == 10
    assert np.mean(result[-3:]) < 0.8 * np.mean(result[:2])
    checked = [row["eval_loss"] for row in done["log"] if "eval_loss" in row]
    assert len(checked) == 2
    assert checked[1] < result[0]
    e = example(9)
    trained = str(out / "trained")
    after = forecast_of(e, base["model"], trained) if rank else forecast_of(e, trained)
    before = forecast_of(e, base["model"])
    p, q = after.probabilities, before.probabilities
    rows = np.arange(len(e.candidates))
    assert before.mass.max() < 0.1
    assert after.mass.min() > 0.25, "a search hears no model with less than 0.2 on the labels"
    assert np.log(p[rows, e.labels()]).mean() > np.log(q[rows, e.labels()]).mean()
    assert json.loads((out / "run.json").read_text())["settings"]["model"] == base["model"]


def test_an_interrupted_run_ends_where_an_uninterrupted_one_does(
    whole: tuple[SftRun, dict[str, Any]],
) -> None:
    import safetensors.numpy

    run, done = whole
    out = Path(run.out)
    weights = out / "trained" / "adapter_model.safetensors"
    a = safetensors.numpy.load_file(weights)
    # The first half alone, with the schedule of the whole: as a kill after the first checkpoint leaves it.
    for path in (out / "checkpoint-10", out / "trained"):
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    with pytest.raises(TrainingError, match="resume it"):
        train(run)
    again = train(run, resume=True)
    assert again["resumed_from"].endswith("checkpoint-5")
    assert losses(again)[-5:] == losses(done)[-5:]
    b = safetensors.numpy.load_file(weights)
    assert a.keys() == b.keys()
    for key in a:
        np.testing.assert_array_equal(a[key], b[key])


def test_a_run_that_diverges_ends_at_once(base: dict[str, str], tmp_path: Path) -> None:
    """`transformers` would log a loss of 0 and go on."""
    steps = ScheduleSettings(most=30, examples=1, rate=1e30, warmup=0.0, save=100, validate=100, tokens=1500)
    with pytest.raises(TrainingError, match=r"after [1-4] steps.*lower steps\.rate"):
        train(run_of(base, tmp_path / "out", steps=steps))
    assert torch.backends.cuda.cudnn_sdp_enabled(), "only the training kept off cuDNN's attention"


def test_a_folder_of_another_run_and_empty_data_are_refused(base: dict[str, str], tmp_path: Path) -> None:
    run = run_of(base, tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "settings.json").write_text('{"run": "another"}')
    with pytest.raises(TrainingError, match="another run"):
        train(run)
    empty = tmp_path / "empty"
    empty.mkdir()
    for side in ("train", "validation"):
        write_examples(empty / f"{side}.parquet", [])
    with pytest.raises(TrainingError, match="empty"):
        train(dataclasses.replace(run, data=str(empty), out=str(tmp_path / "other")))


CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %} A:{% endif %}"


@pytest.fixture
def chatting(base: dict[str, str], tmp_path: Path) -> GrpoRun:
    """A run of a small model that speaks: two steps of two prompts."""
    pytest.importorskip("trl")
    import transformers

    folder = tmp_path / "chatting"
    saved(folder, "llama")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return GrpoRun(
        str(folder), base["data"], str(tmp_path / "out"), steps=2, save=1, lora=LoraSettings(rank=4, alpha=8),
        rollouts=RolloutSettings(generations=2, prompts=1, tokens=8),
    )  # fmt: skip


def test_grpo_takes_steps_and_keeps_its_rewards(chatting: GrpoRun, tmp_path: Path) -> None:
    from forecast_train.llm.grpo import train as reinforce

    done = reinforce(chatting)
    assert done["steps"] == 2
    served = TransformersBackend(chatting.model, str(tmp_path / "out" / "trained"), device="cpu")
    (first, *_) = find_probe(tmp_path / "out" / "trained").questions
    said = served.forecast(first.prefix, first.suffixes, BINS.labels, timeout_s=60).probabilities
    np.testing.assert_allclose(np.log(said), first.log_p, atol=1e-4)
    shown = [row for row in done["log"] if "reward" in row]
    assert len(shown) == 2
    # A random model says nothing that can be read, and earns nothing for it.
    assert all(row["reward"] == 0.0 and row["rewards/parsed/mean"] == 0.0 for row in shown)
    weights = (tmp_path / "out" / "trained" / "adapter_model.safetensors").read_bytes()
    assert reinforce(chatting, resume=True)["log"] == done["log"], "there is nothing to do"
    assert (tmp_path / "out" / "trained" / "adapter_model.safetensors").read_bytes() == weights


def test_grpo_resumes_a_later_pass_in_its_own_order(
    chatting: GrpoRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """24 prompts, 8 a step: the third step ends the first pass, and the fifth is taken up in the second."""
    from forecast_train.llm import grpo

    asked: list[str] = []

    def rewards(completions: Any, prompts: Any, **_: Any) -> list[float]:
        asked.extend(p[0]["content"] for p in prompts)
        return [0.0] * len(completions)

    monkeypatch.setattr(grpo, "reward_function", lambda reward: rewards)
    run = dataclasses.replace(chatting, steps=6, rollouts=RolloutSettings(generations=2, prompts=8, tokens=4))
    grpo.train(run)
    whole, out = asked[:], Path(run.out)
    assert sorted(whole[:48]) == sorted(whole[48:])
    assert whole[:48] != whole[48:]
    for folder in (out / "checkpoint-6", out / "trained"):
        shutil.rmtree(folder)
    asked.clear()
    assert grpo.train(run, resume=True)["resumed_from"].endswith("checkpoint-5")
    assert asked == whole[80:]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("rows", r"needs 25 prompts and .* has 24"),
        ("template", "chat template, and .* has none"),
        ("positions", r"needs [0-9]+ positions and the model has 2048.*rollouts\.tokens"),
    ],
)
def test_grpo_refuses_what_it_cannot_train(chatting: GrpoRun, fault: str, said: str) -> None:
    from forecast_train.llm.grpo import train as reinforce

    rollouts = {"rows": {"prompts": 25}, "positions": {"tokens": 2040}}.get(fault, {})
    if fault == "template":
        (Path(chatting.model) / "chat_template.jinja").unlink()
    with pytest.raises(TrainingError, match=said):
        reinforce(dataclasses.replace(chatting, rollouts=dataclasses.replace(chatting.rollouts, **rollouts)))
    assert not (Path(chatting.out) / "trained").exists()
