"""The list of problems, and the baselines that forecasts are compared with."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from benchmarks.inductor import fit_template_surrogate as baselines
from benchmarks.inductor import tuning_time as tuning
from benchmarks.lib.inductor.compiled_models import model_of
from benchmarks.lib.inductor.inductor_problems import (
    all_problems,
)
from benchmarks.lib.processes.compile_processes import RowFile
from forecast_autotune.records import (
    Argument,
    Candidate,
    Config,
    Device,
    Kernel,
    Measurement,
    Outcome,
)
from forecast_autotune.records import Problem as Record
from forecast_autotune.records.table import Table
from forecast_autotune.surrogates.protocol import Query
from forecast_integrations.inductor.choices.surrogate import default

H200 = Device("NVIDIA H200", arch="90", multiprocessors=132, shared_memory_bytes=232448)
VENDOR = Candidate(Config.of({}, num_warps=1, num_stages=1), "aten::mm")

# --- problems ---


def test_problems_can_be_made_small_and_run() -> None:
    every = all_problems()
    assert len({p.name for p in every}) == len(every) >= 20
    for problem in {p.label: p for p in every}.values():
        small = problem.tiny()
        module, inputs = small.make("cpu")
        with torch.no_grad():
            out = module(*inputs)
        assert out.shape == (small.sizes["m"], small.sizes["n"])
        assert torch.isfinite(out).all()
        assert (module.bias is not None) == (problem.op == "linear_bias")


# --- baselines ---


def table(m: int = 1024, n: int = 2048, k: int = 512) -> Table:
    """A product whose templates run as the formula says, but for one that fails; the vendor's is slower."""
    shapes = [("in0", (m, k), (k, 1)), ("in1", (k, n), (1, k)), ("out", (m, n), (n, 1))]
    arguments = [Argument(name, "tensor", "float16", shape, stride) for name, shape, stride in shapes]
    problem = Record.of(Kernel("mm", "inductor"), arguments, H200)
    names = [
        Candidate(
            Config.of({"BLOCK_M": a, "BLOCK_N": b, "BLOCK_K": c, "GROUP_M": 8}, num_warps=w, num_stages=3),
            "triton::mm",
        )
        for a, b, c, w in itertools.product((32, 64, 128), (32, 64, 128), (32, 64), (4, 8))
    ]
    # As slow as their place in the forecast's order says, doubts about running at all included.
    found = default().forecast(Query(problem, names))
    times = np.sort(found.mean)[np.argsort(found.order())]
    rows = [Measurement(problem.id, c, Outcome.OK, float(2.0**t)) for c, t in zip(names, times, strict=True)]
    rows[0] = Measurement(problem.id, names[0], Outcome.COMPILE_ERROR)
    best = min(m.ms for m in rows if m.ok)
    return Table(problem, [Measurement(problem.id, VENDOR, Outcome.OK, 1.5 * best), *rows])


def test_a_right_forecast_has_no_regret_and_everything_compiled_neither() -> None:
    given = table()
    orders: dict[str, baselines.Order] = {
        "first": lambda table, templates, count: list(templates[:count]),
        "forecast": baselines.forecast(default()),
        "rounds": baselines.sequential_forecast(default()),
    }
    found = baselines.compare([given], orders, (1, 3, 36))
    for side in ("with vendor", "templates"):
        assert found[side]["forecast"]["1"] == 0.0
        assert found[side]["rounds"]["3"] == pytest.approx(0.0, abs=0.02)
        assert all(figures["36"] == pytest.approx(0.0) for figures in found[side].values())
        assert found[side]["random"]["1"] > found[side]["random"]["3"] > 0.0
    # The first one fails: all that is left is the vendor's, or nothing.
    assert found["with vendor"]["first"]["1"] == pytest.approx(0.5)
    assert found["templates"]["first"]["1"] == pytest.approx(10.0)


# --- rows, and how they are kept and resumed ---


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
