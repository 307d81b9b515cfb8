"""What a search leaves behind: files, figures, variants."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib.search.synthetic_landscape import CONTEXT, settings
from forecast_autotune.records import Outcome
from forecast_autotune.store import Store
from forecast_autotune.variants import Check, Origin, Provenance
from forecast_harness.records import Node, NodeResult, Proposed, SearchTarget, TargetKind
from forecast_harness.search.events import Chosen, Confirmed, Finished, Started, Stopped
from forecast_harness.search.output import store_variants, summary, write_output
from forecast_harness.search.state import SearchState, replay_events
from tests.harness.search.threaded_search import run_search


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SearchState]:
    folder = tmp_path_factory.mktemp("left")
    return folder, run_search(folder, settings(30, audit=0.4))


def test_the_best_source_can_be_imported_and_says_where_it_is_from(left: tuple[Path, SearchState]) -> None:
    folder, state = left
    spec = importlib.util.spec_from_file_location("best", folder / "best.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = (folder / "best.py").read_text()
    assert text.endswith(state.nodes[state.best].source)
    assert module.run(0) == int(state.nodes[state.best].source.split("+ ")[1])
    assert f"# id: {state.best}\n" in text
    assert f"# speed: {2**-state.best_score:.3f} times the first seed, confirmed in a fresh process" in text
    assert "# toolchain: table 1\n" in text


def test_every_measured_source_is_a_file(left: tuple[Path, SearchState]) -> None:
    folder, state = left
    assert {p.stem: p.read_text() for p in (folder / "nodes").iterdir()} == {
        n: state.nodes[n].source for n in state.judged
    }


def test_the_summary_adds_up(left: tuple[Path, SearchState]) -> None:
    folder, state = left
    data = json.loads((folder / "summary.json").read_text())
    assert data == summary(state)
    assert data["confirmed"]
    assert data["percent_saved"] == pytest.approx(100 * (1 - 1 / data["speedup"]))
    assert data["per_percent"]["measurements"] == pytest.approx(30 / data["percent_saved"])
    assert data["measured"] == 30
    assert set(data["arms"]) == {"table/near", "table/far"}


def test_the_best_file_follows_the_search(tmp_path: Path) -> None:
    seen: list[tuple[str, bool]] = []

    def watch(state: SearchState) -> None:
        seen.append((state.best, f"# id: {state.best}\n" in (tmp_path / "best.py").read_text()))

    run_search(tmp_path, settings(20), watch=watch)
    assert all(current for _, current in seen)
    assert len({best for best, _ in seen}) > 2


# --- a kernel's variants ---

KERNEL = """import triton
import triton.language as tl

CONFIGS = [{"kwargs": {"BLOCK": 64}}, {"kwargs": {"BLOCK": 128}, "num_warps": 8}]


@triton.jit
def run(x, n, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), NUMBER)
"""


def kernel_search(confirmed: Mapping[str, float | None]) -> SearchState:
    """Five variants beside a base kernel, the later the faster; `confirmed` by number."""
    target = SearchTarget(
        TargetKind.KERNEL, "run", "kernel-1", "triton", "run", "", {"source_sha256": "0" * 64}
    )
    made = Provenance(Origin.REWRITE, note="other tiles")
    sources = [KERNEL.replace("NUMBER", str(n)) for n in range(6)]
    nodes = [
        Node(f"n{i}", s, "triton", ("n0",) if i else (), made, batch=i > 0) for i, s in enumerate(sources)
    ]
    check = Check("h200", "signature", True, "12 launches").to_json()
    best = {"kwargs": {"BLOCK": 128}, "num_warps": 8}

    def judged(ratio: float | None) -> NodeResult:
        if ratio is None:
            return NodeResult(Outcome.INCORRECT)
        return NodeResult(Outcome.OK, "n0", ratio, config=best, facts={"checks_passed": [check]})

    context = replace(CONTEXT, target=target.id, seeds=("n0",), settings=settings(20), arms=("a/b",))
    ids = tuple(f"n{i}" for i in range(1, 6))
    events: list[Any] = [
        Started(context, target, (nodes[0],), ""),
        Finished("job-0", "n0", 0, judged(0.0)),
        Proposed("r", tuple(nodes[1:]), batch=1, arm="a/b", parent="n0"),
        Chosen(1, ids, ("unforecast",) * 5, (1.0,) * 5),
        *(Finished(f"job-{i}", f"n{i}", 1, judged(0.15 - 0.1 * i)) for i in range(1, 6)),
    ]
    if confirmed:
        events.append(Confirmed({n: judged(r) for n, r in confirmed.items()}))
    return replay_events([*events, Stopped("done")])


def test_confirmed_variants_go_into_the_store_with_their_checks(tmp_path: Path) -> None:
    store = Store(tmp_path)
    state = kernel_search({"n0": 0.0, "n5": None, "n4": -0.2, "n3": 0.01})
    (kept,) = store_variants(state, store)
    (held,) = store.variants("0" * 64)
    assert held.source == kept.source == state.nodes["n4"].source
    assert [c.signature for c in held.checks] == ["signature"]
    assert [(dict(c.kwargs)["BLOCK"], c.num_warps) for c in held.configs] == [(128, 8), (64, 4)]
    assert held.provenance.note == "other tiles"


def test_the_fastest_go_into_the_store_where_none_could_be_confirmed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    kept = store_variants(kernel_search({}), store)
    assert [v.source for v in kept] == [KERNEL.replace("NUMBER", str(n)) for n in (5, 4, 3)]
    assert len(store.variants()) == 3
    assert store_variants(kernel_search({"n5": None, "n4": None, "n3": None}), store) == []


def test_what_is_not_verified_in_full_goes_into_no_store(tmp_path: Path) -> None:
    state = kernel_search({})
    state.judged["n5"] = replace(state.judged["n5"], facts={"verified_in_full": False})
    kept = store_variants(state, Store(tmp_path))
    assert [v.source for v in kept] == [KERNEL.replace("NUMBER", str(n)) for n in (4, 3, 2)]


def test_a_kernels_finished_search_fills_the_default_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORECAST_AUTOTUNE_CACHE_DIR", str(tmp_path / "store"))
    write_output(kernel_search({"n4": -0.2}), tmp_path / "search")
    assert [v.source for v in Store.default().variants()] == [KERNEL.replace("NUMBER", "4")]
    assert "measured on" not in (tmp_path / "search" / "best.py").read_text()


@pytest.mark.parametrize(
    ("ratio", "sd", "facts", "evidence"),
    [
        (-0.12, 0.24, {"standing": "undecided"}, "undecided"),
        (-0.12, 0.01, {"standing": "undecided"}, "undecided"),
        (-0.12, 0.24, {"standing": "faster"}, "confirmed"),
        (-0.12, 0.07, {}, "undecided"),
        (-0.12, 0.05, {}, "confirmed"),
        (0.12, 0.01, {}, "undecided"),
        (None, 0.0, {}, "refuted"),
    ],
)
def test_only_what_was_shown_to_be_faster_is_confirmed(
    ratio: float | None, sd: float, facts: dict[str, str], evidence: str
) -> None:
    outcome = Outcome.OK if ratio is not None else Outcome.INCORRECT
    assert NodeResult(outcome, log2_ratio=ratio, sd=sd, facts=facts).evidence == evidence
