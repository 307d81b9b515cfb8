"""The leave-one-GPU-out evaluation, on a small space where the answers are known."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from benchmarks.corpus.convert_benchmark_hub import round_to_five_digits, thin_tables
from benchmarks.forecasting import unseen_gpus
from forecast_autotune.records import Candidate, Config, Device, Kernel, Measurement, Outcome, Problem
from forecast_autotune.records.table import Table, read_lines, write_tables
from forecast_autotune.surrogates.default import DefaultSurrogate


def space(device: str, best: int, kernel: str = "conv") -> Table:
    """A bowl around 2^best in BLOCK, one column of configs failing."""
    problem = Problem.of(Kernel(kernel, "cuda"), (), Device(device))
    rows = []
    for block, tile in itertools.product(range(8), range(4)):
        candidate = Candidate(Config.of({"BLOCK": 2**block, "TILE": tile + 1}))
        if tile == 3 and block > 5:
            rows.append(Measurement(problem.id, candidate, Outcome.COMPILE_ERROR))
        else:
            cost = 2.0 ** (0.3 * abs(block - best) + 0.2 * abs(tile - 1))
            rows.append(Measurement(problem.id, candidate, Outcome.OK, cost))
    return Table(problem, rows)


@pytest.fixture
def tables() -> list[Table]:
    return [space("GPU A", 4), space("GPU B", 4), space("GPU C", 5), space("GPU D", 2, "lonely")]


def test_a_kernel_known_on_one_device_only_is_no_target(tables: list[Table]) -> None:
    found = unseen_gpus.targets(tables)
    assert [t.label for t in found] == ["conv GPU A", "conv GPU B", "conv GPU C"]
    assert [t.problem.device.name for t in found[0].others] == ["GPU B", "GPU C"]
    assert np.isinf(found[0].slowdown).sum() == 2


def test_the_order_of_measuring_gives_the_figures(tables: list[Table]) -> None:
    target = unseen_gpus.targets(tables)[0]
    order = list(np.argsort(-target.slowdown, kind="stable"))
    run = unseen_gpus.run_from_order("worst first", target, 0, order)
    assert run.regret[1] == unseen_gpus.NOTHING_RAN
    assert run.regret[40] == pytest.approx(0.0)
    assert run.to_within == len(order)


def test_other_devices_shorten_the_search(tables: list[Table]) -> None:
    target = unseen_gpus.targets(tables)[0]
    plain = unseen_gpus.mean_prior_run(target, 0)
    informed = unseen_gpus.run_tuner("x", target, 0, DefaultSurrogate(), unseen_gpus.related_tables(target))
    assert plain.to_within <= 2
    assert informed.to_within <= 3 < unseen_gpus.random_order_run(target, 0).to_within
    assert informed.decided_after is not None
    assert informed.decided_regret == pytest.approx(0.0)
    assert all(0.0 <= risk <= 1.0 for _, risk, _ in informed.steps)


def test_without_relatives_the_search_still_ends_at_the_best(tables: list[Table]) -> None:
    target = unseen_gpus.targets(tables)[0]
    run = unseen_gpus.run_tuner("x", target, 0, DefaultSurrogate())
    assert run.to_within <= len(target.names)
    assert run.regret[40] == pytest.approx(0.0)


def run_of(device: str, steps: list[tuple[int, float, float]], *, family: str = "f") -> unseen_gpus.ArmRun:
    shown = dict.fromkeys(unseen_gpus.NOTED_POINTS, steps[-1][2])
    made = unseen_gpus.ArmRun("x", "k", device, 0, shown, 7, family, 9, steps=steps)
    return unseen_gpus.with_decision(made)


def test_the_decision_is_the_first_step_at_an_accepted_risk_or_the_cap() -> None:
    early = run_of("A", [(3, 0.05, 0.2), (9, 0.01, 0.0)])
    assert (early.decided_after, early.stated_risk, early.decided_regret) == (3, 0.05, 0.2)
    capped = run_of("A", [(3, 0.5, 0.2), (9, 0.4, 0.1), (15, 0.01, 0.0)])
    assert (capped.decided_after, capped.stated_risk, capped.decided_regret) == (9, 0.4, 0.1)


def test_the_summary_counts_the_confidently_wrong() -> None:
    runs = [
        run_of("A", [(3, 0.5, 0.0), (9, 0.0, 0.0)]),
        run_of("B", [(3, 0.5, 0.2), (9, 0.0, 0.2)]),
        run_of("C", [(3, 0.5, 0.2)]),
    ]
    found = unseen_gpus.summary(runs)
    assert found["confidently_wrong_share"] == pytest.approx(1 / 3)
    assert found["wrong_among_confident"] == pytest.approx(1 / 2)
    assert found["brier"] == pytest.approx((3 * 0.25 + 0.0 + 1.0) / 5)
    assert found["decision"]["beyond_tolerance_share"] == pytest.approx(2 / 3)
    assert found["to_within_median"] == 7


def test_risks_are_corrected_by_other_families_alone() -> None:
    """A family whose own runs are always right gets the correction of one that is always wrong."""
    right = [run_of(f"A{i}", [(3, 0.3, 0.0), (6, 0.3, 0.0)], family="right") for i in range(9)]
    wrong = [run_of(f"B{i}", [(3, 0.3, 0.5), (6, 0.3, 0.5)], family="wrong") for i in range(9)]
    stated = {r.family: r.steps[0][1] for r in unseen_gpus.recalibrated_runs(right + wrong)}
    assert stated["right"] > 0.5
    assert stated["wrong"] == pytest.approx(0.25)  # one family that was never wrong promises no less


def test_the_script_writes_its_report(
    tables: list[Table], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tables(tmp_path / "t.jsonl", tables)
    out = tmp_path / "out.json"
    arms = ["random", "mean of others", unseen_gpus.HELD_OUT]
    monkeypatch.setattr(
        "sys.argv",
        ["x", "--out", str(out), "--tables", str(tmp_path / "t.jsonl"), "--seeds", "1", "--arms", *arms],
    )
    assert unseen_gpus.main() == 0
    report = json.loads(out.read_text())
    # One family alone leaves nothing to calibrate with.
    assert list(report["summary"]) == [*arms[:2], f"{unseen_gpus.HELD_OUT}, not calibrated"]
    assert {r["device"] for r in report["runs"]} == {"GPU A", "GPU B", "GPU C"}


def test_thinning_keeps_each_oracle() -> None:
    rng = np.random.default_rng(0)
    names = [Candidate(Config.of({"X": i})) for i in range(4000)]
    given = []
    for device in ("A", "B"):
        problem = Problem.of(Kernel("gemm"), (), Device(device))
        times = rng.uniform(1, 9, len(names))
        rows = [Measurement(problem.id, c, Outcome.OK, t) for c, t in zip(names, times, strict=True)]
        given.append(Table(problem, rows))
    thinned = thin_tables(given)
    assert [len(t.measurements) for t in thinned] == [len(thinned[0].measurements)] * 2
    assert 3000 <= len(thinned[0].measurements) <= 3080
    for before, after in zip(given, thinned, strict=True):
        assert min(m.ms for m in after.measurements) == min(m.ms for m in before.measurements)


def test_five_significant_digits() -> None:
    assert [round_to_five_digits(x) for x in (0.00123456789, 0.5536000076, 147.6977825)] == [
        0.0012346,
        0.5536,
        147.7,
    ]


@pytest.mark.slow
def test_the_shipped_spaces_are_whole() -> None:
    kernels, counted = dict[str, str](), Counter[str]()
    for _, line in read_lines(unseen_gpus.TABLES):
        if line["type"] == "problem":
            kernels[line["id"]] = line["kernel"]["name"]
        else:
            counted[line["problem"]] += 1
    devices = Counter(kernels.values())
    assert devices == {"convolution_milo": 6, "dedispersion_milo": 6, "convolution": 4, "gemm": 4}
    # Rows per space as the source has them; GEMM is thinned, and one of its GPUs tried fewer configs.
    sizes = {(kernels[name], count) for name, count in counted.items()}
    whole = {("convolution_milo", 4362), ("dedispersion_milo", 11130), ("convolution", 6768)}
    assert sizes == whole | {("gemm", 3089), ("gemm", 3044)}
