"""A run's clock, sampled rewards, words scored, and data without Parquet."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forecast_autotune.errors import RecordError, SettingsError
from forecast_autotune.llm.bins import BINS
from forecast_train.llm import losses
from forecast_train.llm.calibration.answer_collection import ModelAnswers
from forecast_train.llm.calibration.bin_scores import (
    BinScoresOfProblem,
    model_bin_scores,
    paired_differences,
    statistics_table,
)
from forecast_train.llm.data.examples import read_examples, side_path, write_examples
from forecast_train.llm.export import add_calibration, export_model
from forecast_train.llm.run_folder import TrainingError, attention_without_cudnn
from forecast_train.llm.settings import LoraSettings, LossSettings, ScheduleSettings, SftRun
from forecast_train.llm.sft import train
from forecast_train.llm.training_clock import StopOnNonFinite, TrainingClock, rate_schedule
from tests.integrations.models.tiny_models import saved
from tests.train.llm.test_llm_training import example

KINDS = ("correctness", "correctness_brier", "correctness_crps")


class State:
    """What a trainer shows its callbacks."""

    def __init__(self) -> None:
        self.log_history: list[dict[str, Any]] = [{}]
        self.global_step, self.max_steps = 1, 9


class Control:
    should_training_stop = False


def test_rates_rise_fall_and_end_at_zero() -> None:
    found = [rate_schedule(x, 0.2) for x in (0.0, 0.1, 0.2, 0.6, 1.0, 1.3)]
    assert found == pytest.approx([0.0, 0.5, 1.0, 0.5, 0.0, 0.0])
    assert rate_schedule(0.0, 0.0) == 1.0


def test_a_clock_remembers_earlier_sittings_and_stops() -> None:
    clock, state, control = TrainingClock(100.0, 10.0, lambda line: None), State(), Control()
    state.log_history = [{"loss": 1.0, "elapsed_s": 40.0}, {"elapsed_s": 60.0}]
    clock.on_train_begin(None, state, control)
    assert 60.0 <= clock.elapsed() < 90.0
    assert clock.share() == pytest.approx(0.6, abs=0.3)
    clock.on_step_end(None, state, control)
    assert not control.should_training_stop
    state.log_history.append({"elapsed_s": 100.0})
    clock.on_train_begin(None, state, control)
    clock.on_step_end(None, state, control)
    assert control.should_training_stop


def test_a_loss_that_is_no_number_ends_the_run() -> None:
    clock, state = TrainingClock(0.0, 10.0, lambda line: None), State()
    clock.on_log(None, state, Control(), {"loss": 1.0})
    assert "elapsed_s" in state.log_history[-1]
    with pytest.raises(TrainingError, match=r"lower steps\.rate"):
        clock.on_log(None, state, Control(), {"loss": math.nan})
    with pytest.raises(TrainingError, match="grad_norm"):
        clock.on_log(None, state, Control(), {"loss": 1.0, "grad_norm": math.inf})
    with pytest.raises(TrainingError, match=r"after 1 steps.*: lower rate"):
        StopOnNonFinite("lower rate").on_log(None, state, Control(), {"loss": math.nan})


def test_training_keeps_off_a_kernel_that_gives_nan() -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with attention_without_cudnn():
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.mem_efficient_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("base")
    data = folder / "data"
    data.mkdir()
    write_examples(data / "train.jsonl.gz", [example(i) for i in range(2)])
    write_examples(data / "validation.jsonl.gz", [example(9), example(10)])
    return {"model": saved(folder / "model", "llama"), "data": str(data)}


def run_of(base: dict[str, str], out: Path, steps: ScheduleSettings, **more: Any) -> SftRun:
    return SftRun(
        **base, out=str(out), lora=LoraSettings(rank=4, alpha=8), dtype="float32", steps=steps, **more
    )


def test_time_ends_a_run_before_its_steps_and_a_second_sitting_has_none_left(
    base: dict[str, str], tmp_path: Path
) -> None:
    said: list[str] = []
    steps = ScheduleSettings(
        most=10_000, examples=1, rate=0.01, warmup=0.0, save=1, validate=9_999, tokens=1500, seconds=2.0
    )
    run = run_of(base, tmp_path / "out", steps)
    done = train(run, say=said.append)
    assert 0 < done["steps"] < 10_000
    assert any(line.startswith("step 1 of 10000") and "GiB" in line for line in said)
    rates = [row["learning_rate"] for row in done["log"] if "learning_rate" in row]
    assert rates[-1] < rates[0] <= 0.01
    again = train(run, resume=True)
    assert again["steps"] <= done["steps"] + 2


def test_a_run_that_diverges_ends_at_once(base: dict[str, str], tmp_path: Path) -> None:
    """`transformers` would log a loss of 0 and go on."""
    steps = ScheduleSettings(most=30, examples=1, rate=1e30, warmup=0.0, save=100, validate=100, tokens=1500)
    with pytest.raises(TrainingError, match=r"after [1-4] steps"):
        train(run_of(base, tmp_path / "out", steps))


def test_training_goes_on_from_an_adapter_and_samples_rewards(base: dict[str, str], tmp_path: Path) -> None:
    import safetensors.torch

    steps = ScheduleSettings(
        most=2, examples=1, rate=0.01, warmup=0.0, save=100, validate=100, tokens=1500, checked=1
    )
    first = train(run_of(base, tmp_path / "first", steps))
    assert first["tokens"]["validation"] < first["tokens"]["train"]
    loss = LossSettings(reward="correctness_crps", replies=4, draws=4)
    start = str(tmp_path / "first" / "trained")
    still = dataclasses.replace(steps, rate=1e-12)
    train(run_of(base, tmp_path / "still", still, adapter=start, loss=loss))
    train(run_of(base, tmp_path / "moved", steps, adapter=start, loss=loss))
    weights = [
        safetensors.torch.load_file(tmp_path / name / "trained" / "adapter_model.safetensors")
        for name in ("first", "still", "moved")
    ]
    key = next(k for k in weights[0] if "lora_B" in k)
    assert weights[0][key].abs().max() > 0
    torch.testing.assert_close(weights[0][key], weights[1][key], atol=1e-6, rtol=0)
    assert not torch.allclose(weights[0][key], weights[2][key], atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_rewards_have_the_exact_ones_gradient_on_average(kind: Any) -> None:
    """With one letter per reply the stated distribution is the named letter: rewards can be enumerated."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([[0.3, -0.5, 0.1, 0.8]], requires_grad=True)
    truth = torch.tensor([1])
    p = logits.softmax(-1)
    one = torch.eye(4)
    values = {
        "correctness": one[1],
        "correctness_brier": one[1] + 1.0 - 0.5 * (one - one[1]).square().sum(1),
        "correctness_crps": one[1] + 1.0 - (one.cumsum(1) - one[1].cumsum(0))[:, :-1].square().mean(1),
    }[kind]
    exact = (p[0] * values).sum()
    (wanted,) = torch.autograd.grad(exact, logits, retain_graph=True)
    found = losses.sampled_reward(logits, truth, kind, replies=40_000, draws=1, generator=generator)
    (seen,) = torch.autograd.grad(found, logits)
    assert found.item() == pytest.approx(exact.item(), abs=0.02)
    torch.testing.assert_close(seen, wanted, atol=0.02, rtol=0)


def test_a_sampled_reward_of_a_sure_model_is_its_exact_one() -> None:
    logits = torch.tensor([[50.0, 0.0, 0.0], [0.0, 0.0, 50.0]])
    truth = torch.tensor([0, 0])
    for kind in KINDS:
        sampled = losses.sampled_reward(logits, truth, kind, replies=4, draws=3)  # type: ignore[arg-type]
        exact = losses.expected_reward(logits, truth, kind)  # type: ignore[arg-type]
        assert float(sampled) == pytest.approx(float(exact), abs=1e-5)
    with pytest.raises(ValueError, match="two replies"):
        losses.sampled_reward(logits, truth, "correctness", replies=1, draws=3)
    with pytest.raises(ValueError, match="a reward is"):
        losses.sampled_reward(logits, truth, "speed", replies=2, draws=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"loss": LossSettings(reward="correctness", replies=1)}, "loss.replies must be 0"),
        ({"loss": LossSettings(replies=4)}, "loss.replies needs loss.reward"),
        ({"loss": LossSettings(draws=0)}, "loss.draws"),
        ({"steps": ScheduleSettings(seconds=-1.0)}, "limits"),
        ({"lora": LoraSettings(rank=0), "adapter": "x"}, "an adapter needs"),
    ],
)
def test_new_settings_have_rules(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        SftRun(model="m", data="d", out="o", **changes)


def test_lines_hold_what_parquet_does(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    some = [example(0), example(5)]
    assert write_examples(tmp_path / "a.jsonl.gz", some) == write_examples(tmp_path / "a.parquet", some)
    plain, packed = read_examples(tmp_path / "a.jsonl.gz"), read_examples(tmp_path / "a.parquet")
    assert [e.id for e in plain] == [e.id for e in packed] == [e.id for e in some]
    for one, other in zip(plain, some, strict=True):
        np.testing.assert_array_equal(one.log2_ratios(), other.log2_ratios())
        assert one.origin == other.origin
    before = (tmp_path / "a.jsonl.gz").read_bytes()
    write_examples(tmp_path / "a.jsonl.gz", some)
    assert (tmp_path / "a.jsonl.gz").read_bytes() == before
    assert side_path(tmp_path, "a").name == "a.jsonl.gz"
    assert side_path(tmp_path, "b").name == "b.parquet"
    (tmp_path / "a.jsonl.gz").write_bytes(before[:-20])
    with pytest.raises(RecordError, match="no data set"):
        read_examples(tmp_path / "a.jsonl.gz")


def test_half_an_export_is_half_the_size_and_too_large_a_one_is_refused(tmp_path: Path) -> None:
    import safetensors.torch

    (tmp_path / "run" / "trained").mkdir(parents=True)
    trained = tmp_path / "run" / "trained"
    weights = {"lora_A": torch.randn(64, 100), "steps": torch.tensor([3])}
    safetensors.torch.save_file(weights, trained / "adapter_model.safetensors")
    (trained / "adapter_config.json").write_text("{}")
    (trained / "tokenizer.json").write_text("{}")
    told = {"steps": 2, "settings": {"model": "base"}, "versions": {"torch": "2"}, "log": []}
    (tmp_path / "run" / "run.json").write_text(json.dumps(told))
    with pytest.raises(TrainingError, match=r"0\.0 MB are allowed"):
        export_model(tmp_path / "run", tmp_path / "out", half=True, most_bytes=12_000)
    assert not (tmp_path / "out").exists()
    found = export_model(tmp_path / "run", tmp_path / "out", half=True, most_bytes=13_000)
    assert found["files"]["adapter_model.safetensors"] < 13_200
    assert "tokenizer.json" not in found["files"]
    again = safetensors.torch.load_file(tmp_path / "out" / "adapter_model.safetensors")
    torch.testing.assert_close(again["lora_A"].float(), weights["lora_A"], atol=0.02, rtol=0.01)
    assert again["steps"].item() == 3
    with pytest.raises(RecordError):
        add_calibration(tmp_path / "out", tmp_path / "run" / "run.json")


def heard(problem: str, kernel: str, stated: Any, ratios: list[float]) -> ModelAnswers:
    n = len(ratios)
    some = np.zeros(n)
    return ModelAnswers(
        problem, problem, kernel, kernel, "h200", "triton", "k", None, some, some, np.array(ratios),
        np.arange(n), np.asarray(stated, float), np.ones(n), np.array(ratios), "r", 0.0, "m", "p", 1, 1, 0.0,
    )  # fmt: skip


def sure(ratios: list[float], shift: int = 0) -> Any:
    """All probability on the bin of each ratio, or on one beside it; NaN is a failure."""
    p = np.zeros((len(ratios), len(BINS) + 1))
    for i, ratio in enumerate(ratios):
        place = (
            BINS.failure_index
            if math.isnan(ratio)
            else int(np.clip(BINS.index(ratio) + shift, 0, BINS.failure_index - 1))
        )
        p[i, place] = 1.0
    return p


RATIOS = [-0.6, -0.3, 0.4, 0.9, 1.6, math.nan]


def words_of(shift: int) -> list[BinScoresOfProblem]:
    made = [model_bin_scores(heard(f"p{i}", f"k{i}", sure(RATIOS, shift), RATIOS)) for i in range(4)]
    return [w for w in made if w is not None]


def test_a_model_that_is_right_and_sure_has_perfect_scores() -> None:
    found = statistics_table(words_of(0), draws=50)
    for name in ("accuracy", "off_by_one", "spearman", "spearman_families", "recovery"):
        assert found[name] == [1.0, 1.0, 1.0]
    for name in ("ece", "brier", "crps", "regret", "aurc"):
        assert found[name] == [0.0, 0.0, 0.0]
    assert found["candidates"] == 24


def test_a_model_that_is_one_bin_off_and_sure_is_miscalibrated_and_ranks_well() -> None:
    found, right = words_of(1), words_of(0)
    scores = statistics_table(found, draws=50)
    assert scores["accuracy"][0] == pytest.approx(1 / 6, abs=1e-4)  # the failure
    assert scores["off_by_one"][0] == 1.0
    assert scores["ece"][0] == pytest.approx(5 / 6, abs=1e-4)
    assert scores["crps"][0] == pytest.approx(5 / 6 / len(BINS), abs=1e-4)
    assert scores["spearman"][0] == 1.0
    worse = paired_differences(found, right, draws=50)
    assert worse["ece"][0] == pytest.approx(5 / 6, abs=1e-4)
    assert worse["spearman"][0] == 0.0
    with pytest.raises(ValueError, match="nothing to compare"):
        paired_differences(found, [dataclasses.replace(w, problem="x" + w.problem) for w in right])
    with pytest.raises(ValueError, match="nothing to score"):
        statistics_table([])


def test_the_reference_itself_and_silence_are_not_scored() -> None:
    with_reference = [*RATIOS, 0.0]
    stated = sure(with_reference)
    found = model_bin_scores(heard("p", "k", stated, with_reference))
    assert found is not None
    assert found.candidates == len(RATIOS)
    assert model_bin_scores(heard("p", "k", np.zeros_like(stated), with_reference)) is None
    back = BinScoresOfProblem.from_json(json.loads(json.dumps(found.to_json())))
    assert back == found
