"""Small models on recorded sources: questions, targets, folds, training, and runs that go on where they ended."""

from __future__ import annotations

import math
import queue
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.lib.training.source_questions import (
    SourceExample,
    answer_bins,
    epoch_pairs,
    family_folds,
    length_batches,
    question_text,
    taught_pair,
)
from benchmarks.lib.variants.source_answers import SourceAnswer
from benchmarks.lib.variants.source_comparisons import EIGHT_BINS
from forecast_autotune.llm.bins import BINS

SOURCE = "def f(x):\n    y = {}\n    return y\n"


def example(number: int, ratio: float | None, wrong: bool = False, family: str = "a") -> SourceExample:
    said = SourceAnswer(0.5, 0.1, 0.02)
    text = SOURCE.format(f"x * {number}")
    name = f"k{family}/{number}"
    return SourceExample(f"k{family}", family, name, text, "", SOURCE.format("x"), "x=1", ratio, wrong, said)


EXAMPLES = [example(i, 0.4 * i - 1.0, family="abcde"[i % 5]) for i in range(10)]


def test_a_question_shows_both_sources_without_their_layout() -> None:
    asked = question_text(SOURCE.format("x  # one"), SOURCE.format("( x*2 )"), "x=1")
    assert "\n-    y = x\n" in asked
    assert "\n+    y = x * 2\n" in asked
    assert "\n def f(x):\n" in asked
    assert "# one" not in asked
    assert asked.endswith("\nAnswer:")
    assert BINS.from_table(asked) == BINS
    same = question_text(SOURCE.format("x"), SOURCE.format("x"), "x=1")
    assert "\n     y = x\n" in same, "a source that changes nothing is shown, too"


def test_targets_mix_what_was_measured_with_what_was_said() -> None:
    measured = taught_pair(example(1, -1.2), None, 0.0)
    assert measured.label == BINS.index(-1.2)
    assert measured.target[measured.label] > 0.9
    both = taught_pair(example(1, -1.2), None, 0.5)
    assert both.target == pytest.approx(0.5 * measured.target + 0.5 * answer_bins(0.5, 0.1, 0.02))
    assert both.target.sum() == pytest.approx(1.0)
    assert both.label == measured.label
    against = taught_pair(example(1, -1.2), example(2, 0.3), 0.0)
    assert against.label == BINS.index(-1.5)
    assert taught_pair(example(1, None, wrong=True), None, 0.0).label == BINS.failure_index
    for new, old in ((example(1, None), None), (example(1, 0.0), example(2, None, wrong=True))):
        with pytest.raises(ValueError, match="no measured ratio"):
            taught_pair(new, old, 0.0)


def test_an_epoch_asks_about_every_source_once() -> None:
    some = [*EXAMPLES, example(99, None, wrong=True)]
    pairs = epoch_pairs(some, 0.5, 0.3, np.random.default_rng(0))
    assert [p.example for p in pairs] == some
    against_base = sum("y = x\n" in p.text for p in pairs)
    assert 0 < against_base < len(some), "some are asked about against another source of the kernel"
    whole = epoch_pairs(some, 0.5, 1.0, np.random.default_rng(0))
    assert all("-    y = x\n" in p.text for p in whole)


def test_folds_share_families_out() -> None:
    folds = family_folds(EXAMPLES, 3)
    assert sorted(f for fold in folds for f in fold) == list("abcde")
    sizes = [sum(e.family in fold for e in EXAMPLES) for fold in folds]
    assert max(sizes) - min(sizes) <= 2
    with pytest.raises(ValueError, match="5 families"):
        family_folds(EXAMPLES, 6)


def test_batches_hold_every_question_and_no_more_tokens_than_said() -> None:
    lengths = [int(n) for n in np.random.default_rng(1).integers(3, 60, 50)]
    for generator in (None, np.random.default_rng(0)):
        batches = list(length_batches(lengths, 120, generator))
        assert sorted(i for batch in batches for i in batch) == list(range(50))
        assert all(max(lengths[i] for i in batch) * len(batch) <= 120 for batch in batches)
    assert list(length_batches([500], 120, None)) == [[0]], "one that is too long goes alone"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("peft")
    from benchmarks.lib import random_models

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 4000}
    whole = {**random_models.ARCHITECTURES["smollm2-135m"], **sizes, "num_attention_heads": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(random_models.ARCHITECTURES, "tiny", {**whole, "num_key_value_heads": 1})
        return Path(random_models.random_model("tiny", tmp_path_factory.mktemp("models") / "tiny"))


def test_product_bins_lie_within_the_tables() -> None:
    pytest.importorskip("torch")
    from benchmarks.lib.training.source_training import bin_groups

    groups = bin_groups()
    assert groups.shape == (len(BINS) + 1, len(EIGHT_BINS) + 1)
    assert (groups.sum(axis=1) == 1).all()
    assert groups[-1, -1] == 1
    ratios = np.random.default_rng(0).normal(0.0, 1.0, 500)
    assert (groups.argmax(axis=1)[BINS.index(ratios)] == EIGHT_BINS.index(ratios)).all()


@pytest.mark.slow
def test_training_learns_and_padding_is_not_read(folder: Path) -> None:
    from benchmarks.lib.training import source_training
    from benchmarks.lib.training.source_training import SourceModel, SourceTrainingSettings

    model = SourceModel(folder, "cpu", 4)
    settings = SourceTrainingSettings(60.0, 1e-2, 4, tokens=4096, longest=1024, base_share=1.0)
    # Of random weights the head is too short to be sure of anything.
    model.base.get_output_embeddings().weight.data.mul_(30.0)
    few = [example(1, -2.0), example(22, 0.0, family="b")]
    model.reset(0)
    before = source_training.forecast_sources(model, few, settings)
    alone = np.concatenate([source_training.forecast_sources(model, [one], settings) for one in few])
    assert before == pytest.approx(alone, abs=0.02)
    done = source_training.train_sources(model, few, settings)
    assert done["loss_last"] < 0.7 * done["loss_first"]
    assert not done["cut"]
    assert done["epochs"] == pytest.approx(60.0)
    learned = source_training.forecast_sources(model, few, settings)
    labels = [taught_pair(one, None, 0.0).label for one in few]
    assert (learned[[0, 1], labels] > 2 * before[[0, 1], labels]).all()
    kept = model.state()
    model.reset(0)
    assert source_training.forecast_sources(model, few, settings) == pytest.approx(before, abs=1e-6)
    model.load(kept)
    assert source_training.forecast_sources(model, few, settings) == pytest.approx(learned, abs=1e-6)
    rewarded = replace(settings, reward="correctness_crps", epochs=10.0)
    shown = source_training.train_sources(model, few, rewarded)
    assert shown["loss_last"] <= shown["loss_first"] < 0, "a reward is negated"
    with pytest.raises(source_training.TimeOver):
        source_training.train_sources(model, few, settings, -math.inf)
    model.reset(0)
    cut = source_training.train_sources(model, few, replace(settings, epochs=1e9), time.monotonic() + 2.0)
    assert cut["cut"]
    assert 0 < cut["epochs"] < 1e9
    after = source_training.forecast_sources(model, few, settings)
    assert after != pytest.approx(before, abs=1e-3), "it forecasts with what it has learned"
    with pytest.raises(ValueError, match="no source"):
        source_training.train_sources(model, [example(1, None)], settings)


def test_states_tell_what_a_rewrite_changes(folder: Path) -> None:
    from benchmarks.lib.training.source_training import SourceModel, SourceTrainingSettings, pooled_states

    model = SourceModel(folder, "cpu", 4)
    same = replace(EXAMPLES[0], text=EXAMPLES[0].base)
    states = pooled_states(model, [EXAMPLES[1], same], SourceTrainingSettings(longest=64))
    assert states.shape == (2, 32)
    assert states[0].any()
    assert not states[1].any()


def test_a_run_forecasts_what_it_has_not_seen(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.llm import distilled_sources as script

    given = {
        "model": folder,
        "out": tmp_path,
        "folds": 2,
        "longest": 96,
        "epochs": 1,
        "rank": 2,
        "device": "cpu",
    }
    given |= {"rate": 0.1, "reward-epochs": 3}
    o = script.options([part for name, value in given.items() for part in (f"--{name}", str(value))])
    monkeypatch.setattr(script, "chosen_examples", lambda _: EXAMPLES)
    monkeypatch.setattr(script, "_held", [])
    o.work.mkdir()
    devices: queue.SimpleQueue[str] = queue.SimpleQueue()
    devices.put("cpu")
    script._begin_worker(o, devices)
    plan = script.planned_runs(2)
    assert len({run.name for run in plan}) == len(plan) == 1 + 2 * 2 + 3 * 3 * 2 + 1
    first = {
        run: script._execute_run(run, math.inf) for run in (*plan[:3], script.SourceRun("whole", script.ALL))
    }
    untrained, *folds, whole = first.values()
    assert untrained["names"] == [e.name for e in EXAMPLES]
    assert "training" not in untrained
    assert np.sum(untrained["p"], axis=1) == pytest.approx(1.0, abs=1e-3)
    assert sorted(n for line in folds for n in line["names"]) == sorted(e.name for e in EXAMPLES)
    seen = {e.name: e.family for e in EXAMPLES}
    for line in folds:
        assert not {seen[name] for name in line["names"]} & set(line["trained_on"])
    assert "p" not in whole
    assert (tmp_path / script.ADAPTER / "adapter_model.safetensors").is_file()
    later = script._execute_run(script.SourceRun("correctness_crps", 0, 1), math.inf)
    assert later["names"] == folds[0]["names"]
    assert later["p"] != folds[0]["p"]
    script.collect_states(o)
    with np.load(tmp_path / script.STATES) as states:
        assert states["untrained"].shape == (10, 32)
        assert states["distilled"].shape == (2, 10, 32)
        assert states["distilled_folds"].tolist() == [0, 1]
    (o.work / "distilled-0-0.npy").unlink()
    script.collect_states(o)
    with np.load(tmp_path / script.STATES) as states:
        assert states["distilled"].shape == (1, 10, 32)
        assert states["distilled_folds"].tolist() == [1]


def test_options_are_checked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.llm import distilled_sources as script

    for bad in (
        ["--model", "/nowhere", "--out", "x"],
        ["--model", str(folder), "--out", "x", "--seconds", "0"],
        ["--model", str(folder), "--out", "x", "--seconds", "20", "--reserve", "20"],
    ):
        with pytest.raises(SystemExit):
            script.options(bad)
    said = capsys.readouterr().err
    assert "no folder with a config.json" in said
    assert "it is a part of --seconds 20" in said


@pytest.mark.slow
def test_kernels_of_a_dry_run_are_of_many_families() -> None:
    from benchmarks.llm import distilled_sources as script

    few = script.chosen_examples(Namespace(table=script.TABLE, answers=script.ANSWERS, kernels=5))
    assert len({e.kernel for e in few}) == len({e.family for e in few}) == 5
    assert all(e.answer is not None for e in few)
