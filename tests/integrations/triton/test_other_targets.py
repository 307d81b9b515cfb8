"""Devices of other vendors and generations, of which Triton compiles for some anywhere: the whole path without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from forecast_autotune import autotune
from forecast_autotune.features.devices import datasheet_device
from forecast_autotune.features.trace import trace
from forecast_autotune.features.ttir.extraction import extract_facts
from forecast_autotune.records import Argument
from forecast_autotune.store import Store
from forecast_integrations.device import current_device
from forecast_integrations.triton.null_device import null_device, target_of
from tests.integrations.null import by_launch_options, double, fresh, launch

MODELS = ("mi300x", "b200")


@pytest.fixture(autouse=True)
def _clean(clean_environment: None) -> None:
    """No variable of the developer's decides a test, and kernels of a test are compiled in it."""


def options(model: str) -> list[Any]:
    """Configs of `double` with an option of the model's own backend."""
    own = [{"waves_per_eu": 0}, {"waves_per_eu": 2}] if model == "mi300x" else [{}, {}]
    limits = [None, None] if model == "mi300x" else [None, 64]
    return [
        triton.Config({"BLOCK": 128, **more}, num_warps=warps, num_stages=2, maxnreg=limit)
        for more, limit in zip(own, limits, strict=True)
        for warps in (2, 4)
    ]


@pytest.mark.parametrize("model", MODELS)
def test_a_kernel_is_forecast_compiled_and_tuned_for_a_device_that_is_not_here(
    model: str, tmp_path: Path
) -> None:
    device = datasheet_device(model)
    tuner = autotune(configs=options(model), key=["n"], store=tmp_path / "store")(fresh(double))
    with null_device(by_launch_options, device=device):
        kernel = launch(tuner)
        assert current_device() == device
    assert tuner.decision.measured >= 1
    kind = "hsaco" if device.backend == "hip" else "cubin"
    assert kind in kernel.asm
    (table,) = Store(tmp_path / "store").tables()
    assert table.problem.device == device
    assert {m.outcome for m in table.measurements} == {"ok"}
    assert any((tmp_path / "binaries").rglob(f"*.{kind}"))


def test_devices_never_share_a_decision_a_measurement_or_a_binary(tmp_path: Path) -> None:
    seen: dict[str, str] = {}
    kernel = fresh(double)
    for model in ("rtx 5090", "mi300x", "rtx 5090"):
        tuner = autotune(configs=options(model), key=["n"], store=tmp_path / "store")(kernel)
        with null_device(by_launch_options, device=datasheet_device(model)):
            launched = launch(tuner)
            again = model in seen
            assert (tuner.decision.evidence == "stored") is again
            assert launched.metadata.target.arch == (120 if model == "rtx 5090" else "gfx942")
        seen[model] = launched.hash
    tables = list(Store(tmp_path / "store").tables())
    assert len({t.problem.id for t in tables}) == len({t.problem.device.slug for t in tables}) == 2
    assert len(set(seen.values())) == 2


def test_an_interval_on_a_device_that_nobody_measured_is_wider(tmp_path: Path) -> None:
    from forecast_autotune.features.trace import trace_many
    from forecast_autotune.surrogates.factory import default_surrogate
    from forecast_autotune.surrogates.protocol import Query
    from forecast_integrations.triton.problem import describe

    x = torch.empty(4096)
    listed = [triton.Config({"BLOCK": b}, num_warps=w) for b in (128, 256, 512) for w in (1, 2, 4, 8)]
    by_candidate = describe.configs_by_candidate(listed)
    named = {"x": x, "out": x, "n": 4096}
    widths: dict[str, float] = {}
    for model in ("h200", "mi300x", "b200"):
        with null_device(device=datasheet_device(model)):
            grid = lambda meta: (triton.cdiv(4096, meta["BLOCK"]),)  # noqa: E731
            problem = describe.describe(double, describe.kernel_record(double), named, ("4096",), grid)
            values = [dict(c.kwargs) for c in listed]
            texts = {k: t for k, t in trace_many(double, (x, x, 4096), {}, values) if isinstance(t, str)}
        grids = describe.launch_grids(by_candidate, grid, named, double)
        found = default_surrogate().forecast(Query(problem, list(by_candidate), grids, ttir=texts))
        widths[model] = float(found.sd.mean()) * float(found.interval_factors[-1])
        assert found.group == ("unknown device" if model != "h200" else "informed, few")
    assert widths["mi300x"] > 1.2 * widths["h200"]
    assert widths["b200"] > 1.2 * widths["h200"]


@triton.jit
def product(a, b, c, k, BLOCK: tl.constexpr, DEPTH: tl.constexpr):
    rows, columns = tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for start in range(0, k, DEPTH):
        deep = start + tl.arange(0, DEPTH)
        left = tl.load(a + rows[:, None] * k + deep[None, :])
        total = tl.dot(left, tl.load(b + deep[:, None] * BLOCK + columns[None, :]), total)
    tl.store(c + rows[:, None] * BLOCK + columns[None, :], total)


@pytest.mark.parametrize("model", [*MODELS, "rtx 5090", "mi355x", "rx 7900 xtx"])
def test_what_a_program_does_reads_the_same_for_every_target(model: str) -> None:
    half = torch.empty(64 * 256, dtype=torch.float16)
    args = (half, half, torch.empty(64 * 64), 256)
    target = target_of(datasheet_device(model))
    text = trace(product, args, {}, {"BLOCK": 64, "DEPTH": 32}, target=target)
    arguments = [Argument("k", "scalar", value=256)]
    named = [Argument(n, "tensor", "fp16", (64 * 256,)) for n in ("a", "b")]
    named.append(Argument("c", "tensor", "fp32", (64 * 64,)))
    facts = extract_facts(text, [*named, *arguments], (1,))
    assert facts.dot_flops == 2.0 * 64 * 64 * 256
    assert facts.iterations == 8
    assert facts.load_bytes == 2 * 2.0 * 64 * 256


def test_a_config_is_compiled_as_its_assembler_is_told_and_served_so(tmp_path: Path) -> None:
    kept, dropped = "", "--def-load-cache=cg"
    given: list[dict[str, Any]] = [{"BLOCK": 128}, {"BLOCK": 128, "ptx_options": dropped}]
    listed = [triton.Config(kwargs, num_warps=2, num_stages=2) for kwargs in given]
    binaries = set()
    with null_device(by_launch_options, device=datasheet_device("h200")):
        for _ in range(2):  # the second finds it in the store
            tuner = autotune(configs=listed, key=["n"], store=tmp_path / "store", mode="exhaustive")(
                fresh(double)
            )
            launch(tuner)
            assert tuner.best_config in listed
        for config in listed:
            launched = launch(autotune(configs=[config], key=["n"], store=False)(fresh(double)))
            binaries.add(launched.asm["cubin"])
    (table,) = Store(tmp_path / "store").tables()
    told = {dict(m.candidate.config.kwargs).get("ptx_options", kept) for m in table.measurements}
    assert told == {kept, dropped}
    assert len(binaries) == 2, "the assembler heard it"
    assert len(table.problem.ttir) == 1, "both share a trace"


@pytest.mark.parametrize("model", ["a100", "mi300x"])
def test_a_config_for_clusters_fails_alone_where_there_are_none(model: str) -> None:
    listed = [triton.Config({"BLOCK": 128}, num_warps=2, num_ctas=n) for n in (2, 1)]
    with null_device(by_launch_options, device=datasheet_device(model)):
        tuner = autotune(configs=listed, key=["n"], store=False, mode="exhaustive")(fresh(double))
        launch(tuner)
    assert tuner.best_config is listed[1]
