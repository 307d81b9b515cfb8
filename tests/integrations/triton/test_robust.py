"""One decision for a range of sizes: met at any of them, made on tensors of its own, kept for other processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from forecast_autotune import Robust
from forecast_autotune import autotune as decorate
from forecast_autotune.commands import main
from forecast_autotune.records import Evidence
from forecast_autotune.store import Store
from tests.integrations.null import fresh

pytestmark = pytest.mark.filterwarnings("error")

LISTED = [triton.Config({"BLOCK": 64}, num_warps=w) for w in (2, 4)]
IN_RANGE = Robust("M", (1, 512), at=[16, 512])


@triton.jit
def halve(x, out, M, N, stride_xm, BLOCK: tl.constexpr):
    """out = x / 2, a row per program."""
    m = tl.program_id(0)
    n = tl.arange(0, BLOCK)
    value = tl.load(x + m * stride_xm + n, mask=n < N)
    tl.store(out + m * stride_xm + n, value / 2, mask=n < N)


def tuned(store: Path | bool, **options: Any) -> Any:
    """The kernel as a new process sees it, over `IN_RANGE`."""
    chosen: dict[str, Any] = {"bucket": IN_RANGE, "mode": "exhaustive", **options}
    return decorate(LISTED, key=["M", "N"], store=store, **chosen)(fresh(halve))


def launch(tuner: Any, rows: int, columns: int = 48) -> torch.Tensor:
    """Call it for so many rows."""
    x = torch.ones(rows, columns)
    out = torch.zeros(rows, columns)
    tuner[lambda meta: (x.shape[0],)](x, out, rows, columns, x.stride(0))
    return x


def test_one_decision_serves_the_range_here_and_in_another_process(
    device: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first = tuned(tmp_path)
    launch(first, 300)
    made = first.decision
    assert (made.evidence, made.measured) == (Evidence.MEASURED, 2)
    assert len(first.configs_timings) == 2
    launch(first, 7)
    launch(first, 512)
    assert first.decision is made
    assert [k[0] for k in first.cache] == ["1..512"]
    launch(first, 600)
    assert first.decision is not made, "outside the range"

    found = {t.problem.key[0]: t for t in Store(tmp_path).tables()}
    assert {k for k, t in found.items() if t.measurements} == {"16", "512", "600"}
    x = next(a for a in found["16"].problem.arguments if a.name == "x")
    assert x.shape == (16, 48), "an ordinary problem of that size"

    second = tuned(tmp_path)
    before = device.launches
    launch(second, 33)
    assert device.launches == before + 1, "0 measurements"
    assert (second.decision.evidence, second.best_config) == (Evidence.STORED, first.cache.popitem()[1])
    capfd.readouterr()
    assert main(["explain", "halve", "--key", "1..512", "--store", str(tmp_path)]) == 0
    said = " ".join(capfd.readouterr().out.split())
    assert "one config for 10 sizes" in said
    assert "M=16 +0.0%" in said


def test_launch_options_of_the_call_make_another_range(device: Any, tmp_path: Path) -> None:
    x = torch.ones(300, 48)
    for options in ({"maxnreg": 32}, {}):
        tuner = tuned(tmp_path)
        tuner[lambda meta: (300,)](x, torch.zeros(300, 48), 300, 48, 48, **options)
        assert tuner.decision.evidence is Evidence.MEASURED
        assert tuner.decision.reason.startswith("one config for 10 sizes")


def test_a_size_measured_for_the_range_is_known_to_an_exact_key(device: Any, tmp_path: Path) -> None:
    launch(tuned(tmp_path), 300)
    exact = tuned(tmp_path, bucket="exact", mode="frozen")
    launch(exact, 512)
    assert exact.decision.evidence is Evidence.STORED
    assert exact.decision.known == 2


def test_no_launch_but_the_last_sees_the_users_tensors(device: Any) -> None:
    seen: list[tuple[int, int]] = []

    def note(named: dict[str, Any], reset_only: bool = False) -> None:
        if not reset_only:
            seen.append((named["x"].data_ptr(), named["x"].shape[0]))

    x = launch(tuned(False, pre_hook=note), 300)
    assert {rows for _, rows in seen} == {16, 512}
    assert x.data_ptr() not in {pointer for pointer, _ in seen}


def test_what_cannot_be_resized_is_tuned_at_its_own_size_and_says_why(device: Any, tmp_path: Path) -> None:
    tuner = tuned(tmp_path)
    x = torch.ones(300, 48)
    with pytest.warns(UserWarning, match=r"no decision for M in 1\.\.512 .*grid .* is fixed.*M = 300 alone"):
        tuner[(150,)](x, x, 300, 48, 48)
    assert tuner.decision.evidence is Evidence.MEASURED
    assert [t.problem.grid for t in Store(tmp_path).tables()] == [(150,)]


def test_the_user_may_say_how_a_call_is_resized(device: Any, tmp_path: Path) -> None:
    def rebuild(arguments: Any, rows: int) -> dict[str, Any]:
        made = torch.ones(rows, arguments["N"])
        return {"x": made, "grid": (2 * rows,)}

    bucket = Robust("M", (1, 512), at=[16, 512], rebuild=rebuild)
    tuner = tuned(tmp_path, bucket=bucket)
    x = torch.ones(300, 48)
    tuner[(600,)](x, x, 300, 48, 48)
    grids = {t.problem.key[0]: t.problem.grid for t in Store(tmp_path).tables() if t.measurements}
    assert grids == {"16": (32,), "512": (1024,)}


def test_a_miss_is_recorded_and_warmed_as_a_range(device: Any, tmp_path: Path) -> None:
    skipping = tuned(tmp_path, mode="skip")
    launch(skipping, 300)
    assert skipping.decision.evidence is Evidence.FORECAST
    (miss,) = Store(tmp_path).misses.all()
    assert miss.problem.key[0] == "1..512"
    launch(tuned(tmp_path), 4)
    assert Store(tmp_path).decision(miss.problem) is not None, "whichever size is met"
