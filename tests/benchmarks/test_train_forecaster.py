"""The one command from recorded tables to a shipped adapter: a tiny model, on the CPU, without trl."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.llm.trained_forecaster import main, variants_report
from forecast_autotune.features.ttir.extraction import assignment_of
from forecast_autotune.llm.bins import BINS
from forecast_autotune.llm.calibration import FILE, read
from forecast_autotune.records.table import Table, write_tables
from forecast_autotune.tuning.replays.replay import load, shipped_tables
from forecast_train.evaluation.splits import kernel_of
from forecast_train.llm.data.build import ExampleSettings, build_examples
from tests.integrations.models.tiny_models import config

ROOT = Path(__file__).parents[2]
BLOCKED = ("trl", "datasets", "vllm")
"""What the machine with the accelerator does not have."""
RUN = f"""
import sys
for name in {BLOCKED}:
    sys.modules[name] = None
from benchmarks.llm.trained_forecaster import main, variants_report
sys.exit(main(sys.argv[1:]))
"""
TOML = """
model = "base"
data = "data"
out = "out"
dtype = "float32"
[lora]
rank = {rank}
alpha = 8
[steps]
epochs = 1.0
rate = 0.01
warmup = 0.0
examples = 2
tokens = 3000
save = 2
validate = 100
checked = 2
"""


def thinned(table: Table) -> Table:
    """A handful of candidates, with the IR that they need."""
    rows = table.measurements[:: max(1, len(table.measurements) // 8)]
    wanted = {assignment_of(m.candidate) for m in rows}
    ttir = {key: text for key, text in table.problem.ttir.items() if key in wanted}
    return Table(replace(table.problem, ttir=ttir), rows)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A model that has never learned anything, a few tables, and a configuration."""
    folder = tmp_path_factory.mktemp("given")
    kernels: dict[str, Table] = {}
    for table in load(shipped_tables()):
        kernels.setdefault(kernel_of(table.problem), thinned(table))
    tables = list(kernels.values())
    write_tables(folder / "tables.jsonl.gz", tables)
    (folder / "tiny.toml").write_text(TOML.format(rank=4))
    (folder / "huge.toml").write_text(TOML.format(rank=20000))
    return {
        "model": saved(folder / "base", tables),
        "tables": str(folder / "tables.jsonl.gz"),
        "config": str(folder / "tiny.toml"),
        "huge": str(folder / "huge.toml"),
    }


def saved(folder: Path, tables: list[Table]) -> str:
    """A random llama whose tokenizer knows these kernels' sources, so that prompts are short."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=2000, show_progress=False, initial_alphabet=alphabet, special_tokens=["<end>"]
    )
    texts = [
        e.prefix + "".join(a.suffix for a in e.candidates)
        for e in build_examples(tables, ExampleSettings(moments=1, known=(0,)))
    ]
    made.train_from_iterator(
        [*texts, *("".join(f" {label.token}" for label in BINS.labels) for _ in range(50))], trainer
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<end>", pad_token="<end>"
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            config("llama", vocab_size=len(tokenizer), max_position_embeddings=8192)
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def arguments(given: dict[str, str], out: Path, config: str = "config") -> list[str]:
    found = ["--model", given["model"], "--name", "tiny", "--tables", given["tables"], "--out", str(out)]
    found += ["--config", given[config], "--seconds", "100", "--moments", "2", "--shares", "0.3", "0.3"]
    return [*found, "--steps", "4", "--draws", "20", "--jobs", "1"]


def run(given: dict[str, str], out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", RUN, *arguments(given, out), *more]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=280, env=env, cwd=ROOT)


@pytest.fixture(scope="module")
def done(given: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("run")
    found = run(given, out)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    return out, found.stdout


def results(out: Path) -> Any:
    return json.loads((out / "results.json").read_text(), parse_constant=lambda text: pytest.fail(text))


@pytest.mark.slow
def test_every_figure_of_the_paper_is_there_for_all_four(done: tuple[Path, str]) -> None:
    found = results(done[0])["stages"]["evaluation"]
    assert set(found["decisions"]) == {"zero-shot", "trained", "learned", "ensemble"}
    assert set(found["words"]) == {*found["decisions"], "zero-shot, as stated", "trained, as stated"}
    for row in found["words"].values():
        for name in ("accuracy", "off_by_one", "ece", "brier", "crps", "recovery", "aurc"):
            value, low, high = row[name]
            assert 0.0 <= low <= value <= high <= 1.0 or (0.0 <= value <= 1.0 and low <= high), name
        assert row["off_by_one"][0] >= row["accuracy"][0]
        assert row["families"] >= 3
        assert row["regret"][0] >= 0.0
        assert list(row["error_at_coverage"]) == ["25%", "50%", "75%", "100%"]
    for row in found["decisions"].values():
        assert row["regret_at_10_percent"][0] >= row["regret_at_15_percent"][0] >= 0.0
    assert set(found["trained_minus_zero_shot"]) >= {"ece", "crps", "spearman"}


@pytest.mark.slow
def test_sides_share_no_family_and_questions_are_about_the_test_side(done: tuple[Path, str]) -> None:
    sides = results(done[0])["split"]["families"]
    assert not set(sides["test"]) & {*sides["train"], *sides["validation"]}
    asked = [json.loads(line) for line in (done[0] / "heard" / "trained.jsonl").read_text().splitlines()]
    assert {h["family"] for h in asked} == {*sides["test"], *sides["validation"]}
    judged = [json.loads(line) for line in (done[0] / "judged.jsonl").read_text().splitlines() if line]
    assert {row["family"] for line in judged for row in line["rows"]} == set(sides["test"])


@pytest.mark.slow
def test_what_is_exported_is_small_calibrated_and_was_judged(done: tuple[Path, str]) -> None:
    import safetensors.torch
    import torch

    folder = done[0] / "adapter"
    assert sorted(p.name for p in folder.iterdir()) == sorted(
        ["README.md", FILE, "adapter_config.json", "adapter_model.safetensors"]
    )
    weights = safetensors.torch.load_file(folder / "adapter_model.safetensors")
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    assert any(w.abs().max() > 0 for name, w in weights.items() if "lora_B" in name)
    assert read(folder / FILE).model.endswith(f"+{folder}")
    assert "Beside the weights" in (folder / "README.md").read_text()


@pytest.mark.slow
def test_progress_is_told_line_by_line_with_speed_and_memory(done: tuple[Path, str]) -> None:
    for said in ("s/step", "tokens/s", "GiB", "step 1 of 4", "families", "judged", "held-out families"):
        assert said in done[1], said
    training = results(done[0])["stages"]["training"]
    assert training["steps"] == 4
    assert training["tokens_per_s"] > 0
    assert training["peak_bytes"] > 1e8


@pytest.mark.slow
def test_the_same_command_goes_on_and_compares_rewards(
    given: dict[str, str], done: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = results(done[0])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")  # on a machine without any, two processes all the same
    again = run(given, done[0], "--grpo", "2", "--grpo-seeds", "1")
    assert again.returncode == 0, again.stdout[-3000:] + again.stderr[-3000:]
    for stage in ("data", "training", "export", "learned", "evaluation"):
        assert f"{stage}: taken up" in again.stdout
    assert "4 runs, 2 at a time" in again.stdout
    after = results(done[0])["stages"]
    assert after["evaluation"] == before["stages"]["evaluation"]
    arms = after["rewards"]["arms"]
    assert len(arms) == 4
    for arm in arms.values():
        assert 0.0 <= arm["ece"]["mean"] <= 1.0
        assert len(arm["minus_correctness_by_seed"]) == 1
    assert arms["correctness"]["minus_correctness_by_seed"][0]["crps"] == [0.0, 0.0, 0.0]
    # Rewards are of different kinds, so what they train differs.
    assert len({arm["crps"]["mean"] for arm in arms.values()}) > 1


@pytest.mark.slow
def test_what_cannot_work_is_told_before_anything_is_computed(
    given: dict[str, str], done: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments({**given, "model": str(tmp_path / "none")}, tmp_path / "out"))
    assert ended.value.code == 2
    assert "no folder with a config.json" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="more than 15 MB: lower it"):
        main(arguments(given, tmp_path / "out", config="huge"))
    with pytest.raises(ValueError, match="other settings"):
        main([*arguments(given, done[0]), "--seed", "7"])


def test_variants_of_families_that_were_learnt_from_are_told_apart(tmp_path: Path) -> None:
    cases, lines = [], []
    for kernel, family in (("rows_rope", "rope"), ("matmul", "gemm")):
        names = [f"{kernel}/{i:02d}_x" for i in range(10)]
        forecasts = {
            name: {
                "p_faster": 0.9 - 0.09 * i,
                "log2_ratio": -0.2 + 0.1 * i,
                "sd": 0.1,
                "p_fail": 0.0,
                "said": True,
            }
            for i, name in enumerate(names)
        }
        case = f"{kernel}/8x8"
        row = {"case": case, "family": family, "forecasts": {"trained": forecasts}}
        cases.append(row | {"sha256": dict.fromkeys(names, "s"), "expect": dict.fromkeys(names, "similar")})
        # The order of the held-out kernel is forecast rightly, that of the other one wrongly.
        way = 1.0 if kernel == "rows_rope" else -1.0
        lines += [
            {
                "case": case,
                "variant": name,
                "outcome": "ok",
                "log2_ratio": way * (-0.2 + 0.1 * i),
                "sha256": "s",
            }
            for i, name in enumerate(names)
        ]
    (tmp_path / "said.json").write_text(json.dumps({"raw": {"cases": cases}}))
    (tmp_path / "measured.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    families = {"train": ["gemm"], "validation": ["sort"], "test": ["rope"]}
    found = variants_report(tmp_path / "said.json", tmp_path / "measured.jsonl", families)
    assert (found["all"]["variants"], found["held_out"]["variants"]) == (20, 10)
    assert found["held_out"]["trained"]["spearman_within_kernel"] == 1.0
    assert found["held_out"]["trained"]["recovers_within_kernel"] == 1.0
    assert found["all"]["trained"]["spearman_within_kernel"] == 0.0
    known = variants_report(
        tmp_path / "said.json", tmp_path / "measured.jsonl", {**families, "train": ["gemm", "rope"]}
    )
    assert known["held_out"] is None
