"""What the torch.compile benchmarks make of their rows, and how they keep and resume them."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from benchmarks.inductor import tuning_time as tuning
from benchmarks.inductor import whole_models as models
from benchmarks.lib.inductor.compiled_models import model_of
from benchmarks.lib.inductor.first_call import PARTS, FirstCall
from benchmarks.lib.processes.compile_processes import RowFile
from forecast_autotune.records import Candidate, Config

VENDOR = Candidate(Config.of({}, num_warps=1, num_stages=1), "aten::mm")
SMALL, LARGE = (Candidate(Config.of({"BLOCK_M": n}), "triton::mm") for n in (32, 128))


def pick(candidate: Candidate) -> dict[str, Any]:
    return {"variant": candidate.variant, "config": candidate.config.to_json(), "ms": 1.0}


def tuned(arm: str, seconds: float, best: Candidate, triton: Candidate, **more: Any) -> dict[str, Any]:
    row = {"row": "tune", "arm": arm, "repeat": 0, "problem": "p", "tuning_s": seconds, "compiled": 9}
    return {**row, "best": pick(best), "triton": pick(triton), **more}


def test_arms_are_compared_by_the_times_taken_in_turns(tmp_path: Path) -> None:
    rows = RowFile(tmp_path / "rows.jsonl")
    rows.add(tuned("default", 10.0, VENDOR, SMALL))
    rows.add(tuned("default", 30.0, VENDOR, SMALL, repeat=1))
    rows.add(tuned("wide", 20.0, LARGE, LARGE))
    rows.add(tuned("exhaustive", 900.0, LARGE, LARGE))
    ms = {str(VENDOR): 2.0, str(SMALL): 4.0, str(LARGE): 1.0}
    rows.add({"row": "retime", "problem": "p", "ms": ms, "noise": 0.01, "missing": []})
    found = tuning.summary(rows)
    assert found["wide"]["tuning_over_default"] == pytest.approx(1.0)
    assert found["exhaustive"]["tuning_over_default"] == pytest.approx(45.0)
    assert found["wide"]["time_over_oracle"] == pytest.approx(1.0)
    assert found["default"]["time_over_oracle"] == pytest.approx(2.0)
    assert found["wide"]["template_time_over_default"] == pytest.approx(0.25)
    assert (found["problems"], found["oracles"], found["errors"]) == (1, 1, 0)
    assert "ours" not in found


ARM = """
import json, sys
arm, log = sys.argv[1:]
def say(**row):
    print(json.dumps(row), flush=True)
def note(event):
    with open(log, "a") as stream:
        stream.write(event + "\\n")
note("ready")
say(row="ready")
for line in sys.stdin:
    if line.strip() == "compile":
        note(arm)
        say(row="compile", model="vit", arm=arm, repeat=0, seconds=1.0, tuning_s=1.0)
    else:
        say(row="turn", ms=2.0)
"""


def test_a_models_processes_get_ready_together_and_compile_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"

    def command(script: str, arguments: object, role: str, given: dict[str, Any]) -> list[str]:
        return [sys.executable, "-c", ARM, given["arm"], str(log)]

    monkeypatch.setattr(models, "child_command", command)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "whole_models.py", raising=False)
    arms = ["untuned", "plain", "ours", "ours_again"]
    out = str(tmp_path / "found.json")
    given = ["--null", "--out", out, "--models", "vit", "--arms", *arms, "--repeats", "1", "--rounds", "10"]
    monkeypatch.setattr(sys, "argv", ["whole_models", *given])
    assert models.main() == 0
    assert log.read_text().split() == ["ready"] * 4 + ["ours", "plain", "untuned", "ours_again"]
    found = json.loads(Path(out).read_text(encoding="utf-8"))["summary"]["vit"]
    assert (found["latency_over_plain"], found["seconds"]["ours_again"]) == (1.0, 1.0)


def test_models_are_summed_up_by_medians(tmp_path: Path) -> None:
    rows = RowFile(tmp_path / "rows.jsonl")
    for repeat, slow in enumerate((30.0, 90.0, 60.0)):
        base = {"row": "compile", "model": "convnet", "repeat": repeat}
        rows.add({**base, "arm": "plain", "tuning_s": slow, "seconds": 100.0})
        rows.add({**base, "arm": "shared", "tuning_s": slow / 2, "seconds": 75.0})
        rows.add({**base, "arm": "ours", "tuning_s": slow / 4, "seconds": 50.0})
    rows.add({"row": "latency", "model": "convnet", "ms": {"plain": 2.0, "ours": 2.02}, "noise": 0.003})
    rows.add({"row": "compile", "model": "flex", "arm": "ours", "tuning_s": 1.0, "seconds": 2.0})
    found = models.summary(rows)
    assert set(found) == {"convnet"}
    assert found["convnet"]["tuning_plain_over_ours"] == pytest.approx(4.0)
    assert found["convnet"]["tuning_shared_over_ours"] == pytest.approx(2.0)
    assert found["convnet"]["tuning_share_of_plain"] == pytest.approx(0.6)
    assert found["convnet"]["latency_over_plain"] == pytest.approx(1.01)


def test_parts_that_were_measured_apart_make_one_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A part's first repeat is another one than the other part's; the timeline names the slowest operation."""
    here = {"device": "cpu", "torch": "2", "triton": "3", "python": "3"}
    slow = {"at_s": 5.0, "precompile_s": 4.0, "timing_s": 0.5, "rounds": 2, "measured": 4, "candidates": 20}
    for number, name in enumerate(("vit", "vit", "bert")):
        rows = RowFile(tmp_path / f"{number}.rows.jsonl")
        base = {"row": "compile", "model": name, "repeat": 0, "tuning_s": 1.0}
        for arm, seconds in (("untuned", 10.0), ("plain", 30.0 + number), ("ours", 14.0)):
            rows.add({**base, "arm": arm, "seconds": seconds, "timeline": [{**slow, "label": "mm(8x8)"}]})
        rows.add({"row": "latency", "model": name, "repeat": 0, "ms": {"plain": 2, "ours": 1}, "noise": 0.0})
        part = {"environment": here, "null": True}
        (tmp_path / f"{number}.json").write_text(json.dumps(part), encoding="utf-8")
    parts = [str(tmp_path / f"{number}.json") for number in range(3)]
    command = ["whole_models", "--report", *parts, "--out", str(tmp_path / "all.json")]
    monkeypatch.setattr(sys, "argv", command)
    assert models.main() == 0
    found = json.loads((tmp_path / "all.json").read_text(encoding="utf-8"))
    assert (found["environment"], found["null"]) == (here, True)
    vit, bert = found["summary"]["vit"], found["summary"]["bert"]
    assert (vit["repeats"], bert["repeats"]) == (2, 1)
    assert vit["beyond_plain_over_ours"] == pytest.approx(20.5 / 4.0)
    assert bert["first_call_over_untuned"] == pytest.approx(1.4)
    assert found["summary"]["all"]["latency_over_plain"] == pytest.approx(0.5)
    assert "5.00     4.00     0.50      2    4/20   mm(8x8)" in capsys.readouterr().out
    (tmp_path / "2.json").write_text(json.dumps({**part, "environment": {**here, "torch": "1"}}))
    with pytest.raises(SystemExit, match="one environment"):
        models.main()


def test_a_part_of_the_call_is_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Inductor's clock counts inside of each other is taken apart; decisions say where they stand."""
    now = time.perf_counter()
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    call = FirstCall(began=now - 20.0, before={})
    spent = {"_compile.compile_inner": [12.0], "compile_fx_inner": [9.0], "async_compile.wait": [2.0]}
    spent |= {"mm_template_precompiling": [3.0], "mm_template_autotuning": [1.0]}
    spent |= {"CachingAutotuner.coordinate_descent_tuning": [6.0], "small": [0.01]}
    monkeypatch.setattr("torch._dynamo.utils.compilation_time_metrics", spent)
    row = call.row()
    shown = {part: round(row[part]) for part in PARTS}
    assert shown == {
        "trace_s": 3,
        "codegen_s": 3,
        "precompile_s": 3,
        "timing_s": 1,
        "forecast_s": 0,
        "kernels_s": 2,
        "generated_s": 6,
        "rest_s": 2,
    }
    assert round(row["seconds"]) == sum(shown.values())
    assert row["clock"] == {name: sum(times) for name, times in spent.items() if name != "small"}


OUR_OWN = ("transformer", "convnet", "flex")
SOME = ("qwen2_decode", "mixtral_prefill", "t5", "whisper_encoder", "convnext", "bert_training")


@pytest.mark.parametrize("name", [*OUR_OWN, *SOME, "llama_dynamic"])
def test_the_models_run(name: str) -> None:
    if name not in OUR_OWN:
        pytest.importorskip("transformers")
    model = model_of(name, "cpu")
    out = model.call(model.module)
    assert torch.isfinite(out).all()
    if name in OUR_OWN:
        assert out.shape == ((2, 1000) if name == "convnet" else model.inputs[0].shape)
    assert model.training == any(p.grad is not None for p in model.module.parameters())
    if model.other_inputs is not None:
        assert model.call(model.module, other=True).shape != out.shape
