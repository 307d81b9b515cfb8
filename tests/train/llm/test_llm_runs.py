"""Runs: settings from a file, folders that are one run's own, export."""

from __future__ import annotations

from pathlib import Path

import pytest

from forecast_autotune.errors import RecordError, SettingsError
from forecast_train.llm.export import export_model
from forecast_train.llm.grpo import GrpoRun
from forecast_train.llm.runs import (
    TrainingError,
    claim_run_folder,
    write_json,
)
from forecast_train.llm.settings import SftRun

TOML = 'model = "base"\ndata = "set"\nout = "made"\n'


def test_a_file_says_everything(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(TOML + "seed = 3\n[lora]\nrank = 4\n[loss]\nrps = 1\n[steps]\nrate = 1e-3\n")
    run = SftRun.load(path)
    assert (run.seed, run.lora.rank, run.loss.rps, run.steps.rate) == (3, 4, 1, 1e-3)
    # Folders count from the file; a model that is no folder there is a name on a hub.
    assert (run.data, run.out, run.model) == (str(tmp_path / "set"), str(tmp_path / "made"), "base")
    (tmp_path / "base").mkdir()
    assert SftRun.load(path).model == str(tmp_path / "base")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model = 1", "model must be of type str, got 1"),
        (TOML + "speed = 1", "speed is not known; known are model"),
        (TOML + "[lora]\nranks = 1", "lora.ranks is not known"),
        (TOML + "[lora]\nrank = 1.5", "lora.rank must be of type int"),
        (TOML + "[lora]\nrank = true", "lora.rank must be of type int"),
        (TOML + "[lora]\nrank = -1", "lora.rank must be at least 0, got -1"),
        (TOML + "lora = 3", r"\[lora\] must be a table"),
        (TOML + "[loss]\nsigma = 0.0", "loss.sigma must be positive"),
        (TOML + "[steps]\nchecked = -1", "limits cannot be negative"),
        (TOML + "[steps]\ntokens = 10", "at least 256"),
        (TOML + 'dtype = "int8"', "bfloat16 or float32"),
        ("", "a run needs model, data, out: add model, data, out"),
        ('model = "m"', "a run needs model, data, out: add data, out"),
        ("model = ", "no TOML file"),
    ],
)
def test_a_wrong_file_is_told_its_rule(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=said) as error:
        SftRun.load(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    "extra", ['reward = "speed"', "steps = 0", "kl = -1.0", "[rollouts]\ngenerations = 1", "rate = 0.0"]
)
def test_grpo_settings_have_rules(tmp_path: Path, extra: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(TOML + extra)
    with pytest.raises(SettingsError):
        GrpoRun.load(path)


def test_two_runs_never_share_a_folder(tmp_path: Path) -> None:
    name = claim_run_folder(tmp_path / "a", {"seed": 1, "out": "a"}, resume=False)
    assert claim_run_folder(tmp_path / "a", {"seed": 1, "out": "elsewhere"}, resume=False) == name
    with pytest.raises(TrainingError, match="another run"):
        claim_run_folder(tmp_path / "a", {"seed": 2, "out": "a"}, resume=True)
    (tmp_path / "a" / "checkpoint-1").mkdir()
    with pytest.raises(TrainingError, match="resume it"):
        claim_run_folder(tmp_path / "a", {"seed": 1, "out": "a"}, resume=False)
    assert claim_run_folder(tmp_path / "a", {"seed": 1, "out": "a"}, resume=True) == name
    (tmp_path / "a" / "settings.json").write_text("half a fi")
    with pytest.raises(TrainingError, match="another run"):
        claim_run_folder(tmp_path / "a", {"seed": 1, "out": "a"}, resume=True)


def finished(folder: Path, files: dict[str, bytes]) -> Path:
    (folder / "trained").mkdir(parents=True)
    for name, content in files.items():
        (folder / "trained" / name).write_bytes(content)
    data = {"steps": 2, "settings": {"model": "base"}, "versions": {"torch": "2"}, "log": [{"loss": 2.0}]}
    write_json(folder / "run.json", data)
    return folder


def test_an_export_holds_weights_and_a_card_and_nothing_that_runs(tmp_path: Path) -> None:
    files = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"w" * 100, "training_args.bin": b"x"}
    kept = ["README.md", "adapter_config.json", "adapter_model.safetensors", "forecast_probe.json"]
    result = export_model(finished(tmp_path / "run", {**files, kept[-1]: b"{}"}), tmp_path / "out")
    assert sorted(result["files"]) == kept
    assert result["calibrated"] is False
    text = (tmp_path / "out" / "README.md").read_text()
    assert "transformers:base?adapter=FOLDER" in text
    assert "train calibrate-llm" in text
    with pytest.raises(TrainingError, match="not empty"):
        export_model(tmp_path / "run", tmp_path / "out")


def test_an_export_refuses_what_could_execute_and_what_is_not_finished(tmp_path: Path) -> None:
    files = {"adapter_model.bin": b"x"}
    with pytest.raises(TrainingError, match="safetensors"):
        export_model(finished(tmp_path / "run", files), tmp_path / "out")
    with pytest.raises(TrainingError, match="no finished run"):
        export_model(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    whole = finished(tmp_path / "good", {"model.safetensors": b"w"})
    bad = tmp_path / "calibration.json"
    bad.write_text("{}")
    with pytest.raises(RecordError):
        export_model(whole, tmp_path / "out", calibration=bad)
    assert not (tmp_path / "out").exists()


CONFIGS = Path(__file__).parents[3] / "train" / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda p: p.stem)
def test_the_configs_that_ship_can_be_read(path: Path) -> None:
    kind = GrpoRun if path.stem.startswith("grpo") else SftRun
    assert kind.load(path).model  # type: ignore[attr-defined]
