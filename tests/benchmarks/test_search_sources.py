"""Searching a record of sources with their configs: equal budgets, and nothing leaks."""

from __future__ import annotations

import math
import random
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.lib import result_files
from benchmarks.lib.search.pool_replay import ReplayedSearch
from benchmarks.lib.search.source_pool import BASE, sample_candidates
from benchmarks.lib.search.source_replay import (
    ARMS,
    JUDGED,
    KernelRecord,
    NestedJudge,
    RecordTraceReader,
    replay_sources,
)
from benchmarks.lib.surrogates_without import surrogates_by_family
from benchmarks.search import source_decisions
from benchmarks.search.equal_budget import summary
from benchmarks.search.source_decisions import decisions, has_origin, with_origin
from benchmarks.search.sources_and_configs import replay_all
from forecast_autotune.records import Candidate, Config, Device, Kernel, Measurement, Outcome, Problem, digest
from forecast_autotune.records.table import Table, write_tables
from forecast_autotune.surrogates.learned import shipped_model
from forecast_autotune.surrogates.protocol import Array, Forecasts, Query
from forecast_autotune.variants.judgement import SourceJudgement, source_digest
from forecast_harness.search.forecasters.variant_tracing import most_promising
from forecast_harness.search.history.events import NodeJob
from forecast_harness.search.records import Node, SearchSettings

TRIALS, BUDGET = 4, 24
CONFIGS = [
    Config((("BLOCK", block),), num_warps=warps, num_stages=2)
    for block in (16, 32, 64, 128)
    for warps in (2, 4, 8)
]
WRONG = "wrong-source"


def truth(variant: str, config: Config) -> float:
    """log2(milliseconds): sources and configs have effects that add up, and a little of their own."""
    block = math.log2(float(dict(config.kwargs)["BLOCK"] or 0))
    own = random.Random(f"{variant} {config}").gauss(0.0, 0.03)
    level = 0.0 if variant == BASE else random.Random(variant).gauss(0.05, 0.15)
    return level + 0.3 * abs(block - 6) + 0.2 * abs(math.log2(config.num_warps) - 2) + own


def made(label: str = "rows/1", others: int = 14) -> Table:
    """A kernel with sources that were timed under every config; one source is wrong, one config fails."""
    kernel = Kernel("rows", source="rows", source_sha256=digest(label))
    problem = Problem.of(kernel, [], Device("table"))
    names = [BASE, *(f"{label}-{i}" for i in range(others)), WRONG]
    told = {
        name: {
            "name": name,
            "origin": BASE if name == BASE else ("llm", "mechanical")[i % 2],
            "note": "",
            "text": f"def rows(x):\n    return x + {i}\n",
            "outcome": "incorrect" if name == WRONG else "ok",
        }
        for i, name in enumerate(names)
    }
    rows = []
    for name in names[:-1]:
        for config in CONFIGS:
            fails = config == CONFIGS[-1]
            outcome = Outcome.OUT_OF_RESOURCES if fails else Outcome.OK
            time = None if fails else 2 ** truth(name, config)
            rows.append(Measurement(problem.id, Candidate(config, name), outcome, time, repeats=9))
    extra = {"label": label, "family": "rows", "hand": "ours", "sources": told}
    return Table(replace(problem, extra=extra), rows)


class Knowing:
    """A surrogate that knows the effects up to noise, and keeps what it was asked."""

    name, version = "knowing", "1"

    def __init__(self, noise: float = 0.05) -> None:
        self.queries: list[Query] = []
        self._noise = noise

    def forecast(self, query: Query) -> Forecasts:
        """See `Surrogate`."""
        self.queries.append(query)
        chance = np.random.default_rng(0)
        mean = np.array([truth(c.variant, c.config) for c in query.candidates])
        mean = mean + self._noise * chance.standard_normal(len(mean))
        flat: Array = np.ones(len(mean))
        fails = np.array([float(c.config == CONFIGS[-1]) for c in query.candidates])
        return Forecasts(query.candidates, mean, 0.1 * flat, fails)


@pytest.fixture(scope="module")
def recorded() -> KernelRecord:
    return KernelRecord(made(), Knowing())


def run(recorded: KernelRecord, arm: str, seed: int = 0, budget: int = BUDGET) -> ReplayedSearch:
    return replay_sources(recorded, arm, budget=budget, seed=seed, trials=TRIALS, settings=SearchSettings())


# --- the record ---


def test_scores_are_against_the_base_under_its_best_config(recorded: KernelRecord) -> None:
    best = min(truth(BASE, c) for c in CONFIGS[:-1])
    assert recorded.yardstick == pytest.approx(best)
    for id_, score in recorded.pool.scores.items():
        own = min(truth(recorded.variants[id_], c) for c in CONFIGS[:-1])
        assert score == pytest.approx(own - best)
    assert recorded.pool.scores[recorded.pool.seeds[0].id] == 0.0


def test_sources_that_were_not_recorded_to_their_end_are_not_dealt() -> None:
    table = made()
    told = dict(table.problem.extra["sources"])
    told["rows/1-3"] = {k: v for k, v in told["rows/1-3"].items() if k != "outcome"}
    told["rows/1-4"] = {**told["rows/1-4"], "outcome": "crash"}
    cut = Table(replace(table.problem, extra={**table.problem.extra, "sources": told}), table.measurements)
    found = KernelRecord(cut, Knowing())
    assert set(told) - set(found.variants.values()) == {"rows/1-3", "rows/1-4"}
    assert WRONG in found.variants.values()


def test_a_record_without_the_base_is_refused() -> None:
    table = made()
    others = [m for m in table.measurements if m.candidate.variant != BASE]
    with pytest.raises(ValueError, match="no time to compare with"):
        KernelRecord(Table(table.problem, others), Knowing())


def test_a_sample_of_configs_is_the_same_for_all_sources_that_have_them() -> None:
    one, two = ([Candidate(c, name) for c in CONFIGS] for name in ("one", "two"))
    chosen = [{c.config for c in sample_candidates("rows/1", own, 5)} for own in (one, two[::-1])]
    assert chosen[0] == chosen[1]
    assert len(chosen[0]) == 5
    assert {c.config for c in sample_candidates("rows/1", one, 3)} < chosen[0]


# --- the replay ---


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_is_charged_for_each_config_and_read_at_one_budget(
    recorded: KernelRecord, arm: str
) -> None:
    found = run(recorded, arm)
    assert len(found.best) == BUDGET or "expected to gain" in found.ended
    assert list(found.best) == sorted(found.best, reverse=True)
    assert found.best[-1] >= min(recorded.pool.scores.values()) - 1e-9
    assert found == run(recorded, arm), "a run is a function of its seed"


def test_a_source_costs_what_was_tried_of_it_failures_included(recorded: KernelRecord) -> None:
    judge = NestedJudge(recorded, "unfiltered", TRIALS, BUDGET, 0)
    seed = recorded.pool.seeds[0]
    wrong = next(recorded.pool.nodes[i] for i, v in recorded.variants.items() if v == WRONG)
    assert judge.judge(job(recorded, seed)).measurements == len(judge.timed[seed.id]) == TRIALS
    refused = judge.judge(job(recorded, wrong))
    assert (refused.outcome, refused.measurements, judge.timed[wrong.id]) == (Outcome.INCORRECT, 1, [])
    every = NestedJudge(recorded, "unfiltered", len(CONFIGS), BUDGET, 0)
    assert every.judge(job(recorded, seed)).measurements == len(CONFIGS), "one of them fails, and is paid for"


def job(recorded: KernelRecord, node: Node, config: dict[str, Any] | None = None) -> NodeJob:
    return NodeJob("j", node, recorded.pool.seeds[0], config or {}, recorded.pool.target, 1, TRIALS)


def test_all_arms_begin_with_the_config_that_suits_the_rival(recorded: KernelRecord) -> None:
    node = list(recorded.pool.nodes.values())[1]
    for arm in ARMS[:-1]:
        judge = NestedJudge(recorded, arm, TRIALS, BUDGET, 0)
        seed = judge.judge(job(recorded, recorded.pool.seeds[0]))
        judge.judge(job(recorded, node, dict(seed.config)))
        assert judge.timed[node.id][0].config.to_json() == seed.config
        assert len(set(judge.timed[node.id])) == TRIALS


def test_forecast_configs_are_those_that_the_products_judge_would_time(recorded: KernelRecord) -> None:
    node = list(recorded.pool.nodes.values())[1]
    judge = NestedJudge(recorded, "filtered", TRIALS, BUDGET, 0)
    judge.judge(job(recorded, recorded.pool.seeds[0]))
    judge.judge(job(recorded, node))
    said = recorded.before[recorded.variants[node.id]]
    expected = most_promising(said, list(said.configs), TRIALS)
    assert [c.config for c in judge.timed[node.id]] == expected


def test_a_forecast_sees_nothing_but_what_its_run_has_timed() -> None:
    table, surrogate = made(), Knowing()
    found = KernelRecord(table, surrogate)
    run(found, "filtered")
    assert [list(q.measured) for q in surrogate.queries] == [[]], "once, before anything was measured"
    surrogate.queries.clear()
    judge = NestedJudge(found, "updated", TRIALS, BUDGET, 0)
    nodes = [found.pool.seeds[0], *list(found.pool.nodes.values())[1:4]]
    for place, node in enumerate(nodes):
        timed = [c for earlier in judge.timed.values() for c in earlier]
        judge.judge(job(found, node))
        assert [m.candidate for m in surrogate.queries[-1].measured] == timed
        assert len(timed) == place * TRIALS


def test_a_base_that_is_tuned_costs_one_evaluation_and_all_arms_know_its_best() -> None:
    surrogate = Knowing()
    found = KernelRecord(made(), surrogate)
    seed, other = list(found.pool.nodes.values())[:2]
    for arm in ARMS[:-1]:
        surrogate.queries.clear()
        judge = NestedJudge(found, arm, TRIALS, BUDGET, 0, tuned=True)
        judged = judge.judge(job(found, seed))
        assert judge.timed[seed.id] == [found.best(BASE)]
        judge.judge(job(found, other, dict(judged.config)))
        assert judge.timed[other.id][0].config == judge.timed[seed.id][0].config
        told = {m.candidate for q in surrogate.queries for m in q.measured}
        assert told == (set(found.by_variant[BASE]) if arm == "updated" else set())
    assert (
        replay_sources(
            found, "updated", budget=9, seed=0, trials=3, settings=SearchSettings(), tuned=True
        ).best[0]
        == 0.0
    )


def test_judged_runs_begin_with_what_was_judged_fast(recorded: KernelRecord) -> None:
    scores = recorded.pool.scores
    ranked = sorted(scores, key=lambda id_: scores[id_])
    judged = {
        source_digest(node.source): SourceJudgement(scores.get(id_, 0.0), 0.05, 0.01)
        for id_, node in recorded.pool.nodes.items()
        if node.parents
    }
    settings, arm = SearchSettings(k=1), f"{JUDGED}someone"
    told = replay_sources(
        recorded, arm, budget=9, seed=0, trials=TRIALS, settings=settings, judgements=judged
    )
    assert told.best[-1] <= scores[ranked[2]]
    with pytest.raises(ValueError, match="an arm is one of"):
        replay_sources(recorded, arm, budget=9, seed=0, trials=TRIALS, settings=settings)


def test_unfiltered_runs_ask_no_surrogate() -> None:
    surrogate = Knowing()
    found = KernelRecord(made(), surrogate)
    run(found, "unfiltered")
    run(found, "oracle")
    assert surrogate.queries == []


@pytest.mark.slow
def test_a_good_surrogate_helps_an_oracle_bounds_it_and_a_bad_one_does_not_help() -> None:
    settings = range(4)
    good = [KernelRecord(made(f"rows/{i}"), Knowing()) for i in range(3)]
    runs = [run(one, arm, seed) for one in good for seed in settings for arm in ARMS]
    pools = {one.pool.target.name: one.pool for one in good}
    found = summary(pools, runs, [12, BUDGET])
    assert found["filtered"]["12"]["ratio"] > 1.05
    assert found["oracle"]["12"]["ratio"] >= found["filtered"]["12"]["ratio"]
    assert found["configs only"]["12"]["ratio"] > 1.0
    assert found["measured"]["unfiltered"] == BUDGET
    bad = KernelRecord(made("rows/0"), Knowing(noise=3.0))
    worse = [run(bad, arm, seed) for seed in range(8) for arm in ("unfiltered", "filtered")]
    lost = summary({bad.pool.target.name: bad.pool}, worse, [12])["filtered"]["12"]["ratio"]
    assert lost < found["filtered"]["12"]["by_problem"][bad.pool.target.name]


def test_a_reader_forecasts_a_source_by_its_most_promising_config(recorded: KernelRecord) -> None:
    node = list(recorded.pool.nodes.values())[1]
    said = recorded.before[recorded.variants[node.id]]
    assert RecordTraceReader(recorded).best_forecast(node) == (
        said.mean[said.order[0]],
        said.p_fail[said.order[0]],
    )
    wrong = next(recorded.pool.nodes[i] for i, v in recorded.variants.items() if v == WRONG)
    assert RecordTraceReader(recorded).best_forecast(wrong) is None


def test_a_surrogate_that_has_seen_the_family_is_refused(tmp_path: Path) -> None:
    model = shipped_model()
    assert model is not None
    replace(model, about={"without": "gemm"}).save(tmp_path / "gemm.npz")
    assert surrogates_by_family(["gemm"], tmp_path)["gemm"].name == "learned"
    replace(model, about={"without": "gemm"}).save(tmp_path / "norm.npz")
    with pytest.raises(ValueError, match=r"norm\.npz was fitted without gemm"):
        surrogates_by_family(["norm"], tmp_path)


def test_the_report_holds_every_run_and_what_was_recorded(tmp_path: Path) -> None:
    model = shipped_model()
    assert model is not None
    replace(model, about={"without": "rows"}).save(tmp_path / "rows.npz")
    write_tables(tmp_path / "t.jsonl.gz", [made(f"rows/{i}") for i in range(2)])
    chosen = {"only": "", "arms": "unfiltered,filtered", "budgets": "8,16", "samples": 16, "k": 4}
    counts = {"seeds": 2, "trials": TRIALS, "least": 4}
    rest = {"claim": "filtered", "tuned": False, "null": False, "judgements": None}
    paths = {"replay": tmp_path / "t.jsonl.gz", "models": tmp_path, "out": tmp_path / "o.json"}
    a = Namespace(**chosen, **counts, **paths, **rest)
    report = result_files.ResultFile(a, "search_sources")
    found = replay_all(a, report)
    assert (found["problems"], found["runs_per_arm"], found["trials"]) == (2, 4, TRIALS)
    rows = report.data["raw"]
    assert [len(r["best"]) for r in rows["runs"]] == [16] * 8
    assert rows["table"][0]["outcomes"] == {"ok": 15 * 11, "out_of_resources": 15}
    assert rows["table"][0]["wrong_or_lost"] == 1
    fine = CONFIGS[:-1]
    best = {i: min(truth(f"rows/0-{i}", c) for c in fine) for i in range(14)}
    base = min(truth(BASE, c) for c in fine)
    for origin, parity in (("llm", 1), ("mechanical", 0)):
        wanted = 2 ** (base - min(ms for i, ms in best.items() if i % 2 == parity))
        assert rows["table"][0]["speedups"][origin] == pytest.approx(wanted, abs=1e-4)


def test_decisions_are_held_against_the_base_under_its_best_config() -> None:
    table = made()
    assert {m.candidate.variant for m in with_origin(table, "").measurements} == {BASE}
    assert WRONG not in {m.candidate.variant for m in with_origin(table, "llm").measurements}
    assert not has_origin(table, "nobody's")
    row = decisions(table, "llm", Knowing(0.0), seeds=2)
    fine = CONFIGS[:-1]
    best = min(truth(f"rows/1-{i}", c) for i in range(1, 14, 2) for c in fine)
    wanted = 2 ** max(0.0, min(truth(BASE, c) for c in fine) - best)
    assert row["possible"] == pytest.approx(wanted, abs=1e-4)
    assert row["over_best"] == [row["possible"]] * 2  # who knows the truth finds the best
    assert max(row["measured"]) < row["candidates"]
    later = decisions(table, "llm", Knowing(0.0), seeds=2, later=True)
    assert later["over_best"] == row["over_best"]
    assert max(later["measured"]) < max(row["measured"]), "what was measured of the base is known by then"
    rows = [{**one, "origin": "llm"} for one in (row, later)]
    for name, said in source_decisions.summary(rows, ["llm"]).items():
        assert name in ("llm", "llm, later")
        assert (said["kernels"], said["gain"], said["beyond_tolerance"]) == (1, int(wanted >= 1.03), 0.0)
