"""Recording a pool of candidates and searching it again: equal budgets, no leaks, an oracle that bounds."""

from __future__ import annotations

import math
import random
import statistics
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from benchmarks.lib.result_files import ResultFile
from benchmarks.lib.search.candidate_pool import (
    PoolProblem,
    PoolTable,
    PoolWriter,
    RecordingPlan,
    RecordingSettings,
    nodes_due,
    read_pool,
    record_pool_nodes,
    whole_lines,
)
from benchmarks.lib.search.pool_replay import (
    ARMS,
    DEFAULT_SETTINGS,
    PoolProposer,
    ReplayedSearch,
    replay_search,
)
from benchmarks.search.equal_budget import (
    measurements_saved,
    replay_all,
    sign_flip_p_value,
    speedup_at_budget,
    summary,
)
from forecast_autotune.errors import RecordError
from forecast_autotune.records import Outcome
from forecast_autotune.variants.records import Origin, Provenance
from forecast_harness.search.forecasters.lineage import LineageForecaster
from forecast_harness.search.history.events import ConfirmationJob, NodeJob, ProposalRequest
from forecast_harness.search.interfaces import LaneFailure, NodeJudge
from forecast_harness.search.novelty import node_identity
from forecast_harness.search.proposers import open_proposer
from forecast_harness.search.records import Node, NodeResult, SearchTarget, TargetKind
from forecast_harness.search.targets import open_target

ABOUT = {"device": "table", "slug": "table", "harness": "1"}
REWRITES = [f"rewrite_{c}" for c in "abcdefghijklmnopqrstuvwxyz"]
FAILING = "rewrite_h"
NAMES = ("rows", "columns")


def made(name: str, children: int = 60) -> PoolProblem:
    """A pool in which rewrites have effects that add up, a tile size has an optimum, one rewrite fails."""
    target = SearchTarget(TargetKind.PACK, name, f"id-{name}", "torch", "run", "Sums.")
    chance = random.Random(name)
    gain = {r: chance.gauss(0.02, 0.12) for r in REWRITES}

    def node(rewrites: Sequence[str], block: int, parents: tuple[str, ...], note: str) -> Node:
        steps = "".join(f"    x = {r}(x, BLOCK)\n" for r in rewrites)
        text = f"BLOCK = {block}\n\n\ndef run(x):\n{steps}    return x.sum(1)\n"
        told = Provenance(Origin.REWRITE, author=note, note=note)
        arm = "" if not parents else "mechanical/constants" if note == "tile" else "mechanical/single"
        return Node(node_identity(target.id, "torch", text), text, "torch", parents, told, arm)

    seed = node([], 64, (), "seed")
    problem = PoolProblem(target, (seed,), {seed.id: seed}, {seed.id: ok(0.0)}, {seed.id: 0})
    ran: list[tuple[Node, list[str], int]] = [(seed, [], 64)]
    while len(problem.nodes) <= children:
        parent, rewrites, block = chance.choice(ran[:6])
        note = chance.choice([*REWRITES, "tile"])
        rewrites = rewrites if note == "tile" else [*rewrites, note]
        block = chance.choice([16, 32, 128, 256]) if note == "tile" else block
        child = node(rewrites, block, (parent.id,), note)
        if child.id in problem.nodes:
            continue
        score = sum(gain[r] for r in rewrites) + 0.1 * abs(math.log2(block / 128)) - 0.1
        problem.nodes[child.id], problem.rounds[child.id] = child, 1
        problem.judged[child.id] = NodeResult(Outcome.INCORRECT) if note == FAILING else ok(score)
        if note != FAILING:
            ran.append((child, rewrites, block))
    return problem


def ok(score: float) -> NodeResult:
    return NodeResult(Outcome.OK, "seed", score, sd=0.01)


def table(path: Path, problems: Sequence[PoolProblem]) -> PoolTable:
    writer = PoolWriter(path, ABOUT)
    for problem in problems:
        there = writer.target(problem.target, problem.seeds)
        for id_, node in problem.nodes.items():
            writer.node(there, node, problem.judged[id_], problem.rounds[id_])
    writer.close()
    return read_pool(path)


def test_a_table_reads_as_it_was_written(tmp_path: Path) -> None:
    problem = made("rows", 10)
    found = table(tmp_path / "pool.jsonl.gz", [problem]).problems["rows"]
    assert found == problem
    assert found.scores[problem.seeds[0].id] == 0.0


def test_a_table_that_was_cut_short_loses_its_last_line_alone(tmp_path: Path) -> None:
    path, problem = tmp_path / "pool.jsonl.gz", made("rows", 3)
    writer = PoolWriter(path, ABOUT)
    there = writer.target(problem.target, problem.seeds)
    first, second, third = list(problem.nodes.values())[:3]
    writer.node(there, first, problem.judged[first.id], 0)
    writer.node(there, second, problem.judged[second.id], 1)
    path.write_bytes(path.read_bytes()[:-20])
    again = PoolWriter(path, ABOUT)
    assert list(again.table.problems["rows"].nodes) == [first.id]
    again.node(again.target(problem.target, problem.seeds), third, problem.judged[third.id], 1)
    assert list(read_pool(path).problems["rows"].nodes) == [first.id, third.id]


def test_a_table_of_another_device_is_not_added_to(tmp_path: Path) -> None:
    PoolWriter(tmp_path / "pool.jsonl.gz", ABOUT)
    with pytest.raises(RecordError, match="measured otherwise"):
        PoolWriter(tmp_path / "pool.jsonl.gz", {**ABOUT, "slug": "another"})


def test_rounds_are_children_of_what_ran_and_depend_on_nothing_later() -> None:
    target, seeds = open_target("softmax", device="cpu")
    problem, plan = PoolProblem(target, seeds), RecordingPlan(nodes=20, first=8, parents=2, children=5)
    proposers = {"mechanical": open_proposer("mechanical", target)}
    chance = random.Random(0)
    rounds = []
    for number in range(6):
        nodes = nodes_due(problem, proposers, plan, number)
        rounds.append([n.id for n in nodes])
        for node in nodes:
            problem.nodes[node.id], problem.rounds[node.id] = node, number
            problem.judged[node.id] = ok(chance.gauss(0.0, 0.1))
    assert [len(r) for r in rounds[:2]] == [1, 8]
    assert rounds[2]
    assert len(problem.nodes) == len(set(problem.nodes)) == sum(map(len, rounds)) <= plan.nodes
    second = {problem.nodes[n].parents[0] for n in rounds[2]}
    best = min(rounds[1], key=lambda n: problem.scores[n])
    assert best in second
    assert len(second) <= plan.parents
    assert second <= set(rounds[1])
    # Asked again when more is known, each round is what it was: that is how a recording goes on.
    assert [[n.id for n in nodes_due(problem, proposers, plan, number)] for number in range(6)] == rounds


class Short(NodeJudge):
    """A judge whose lane fails for good once it has judged so many."""

    def __init__(self, judged: list[str], most: int) -> None:
        self._judged, self._most = judged, most

    def judge(self, job: NodeJob) -> NodeResult:
        if len(self._judged) >= self._most:
            raise LaneFailure("cut short")
        self._judged.append(job.node.id)
        return NodeResult(Outcome.OK, job.against.id, 0.0 if job.node.id == job.against.id else -0.1, sd=0.01)

    def confirm(self, confirm: ConfirmationJob) -> Mapping[str, NodeResult]:
        raise LaneFailure("nothing is confirmed here")

    def close(self) -> None:
        pass


def test_a_recording_goes_on_and_judges_nothing_twice(tmp_path: Path) -> None:
    path, judged = tmp_path / "pool.jsonl.gz", list[str]()
    how = RecordingSettings("cpu", RecordingPlan(nodes=7, first=4, children=2), 1, 60.0, tmp_path)
    done = record_pool_nodes(["softmax"], PoolWriter(path, ABOUT), how, lambda *_: Short(judged, 3))
    assert done["unfinished"] == ["softmax"]
    assert "cut short" in done["errors"][0]
    # One node was tried until it was held to blame; with the second, the lane was.
    assert [str(j.outcome) for j in read_pool(path).problems["softmax"].judged.values()] == [
        *["ok"] * 3,
        "infrastructure",
    ]
    done = record_pool_nodes(["softmax"], PoolWriter(path, ABOUT), how, lambda *_: Short(judged, 100))
    found = read_pool(path).problems["softmax"]
    assert done["unfinished"] == []
    assert len(judged) == len(set(judged)) == 6
    assert set(judged) == {n for n, j in found.judged.items() if j.outcome is Outcome.OK}
    assert sum(line["type"] == "node" for line in whole_lines(path)) == len(found.nodes) == 7


def test_what_blames_the_harness_is_not_dealt() -> None:
    problem = made("rows", 20)
    first = problem.seeds[0].id
    victim = next(n for n in problem.nodes.values() if n.parents == (first,))
    problem.judged[victim.id] = NodeResult(Outcome.INFRASTRUCTURE)
    dealt = PoolProposer("mechanical", problem).propose(request(problem, (first,), (first,)))
    assert victim.id not in {n.id for n in dealt.nodes}


def test_every_arm_has_the_same_budget_and_starts_from_the_seed() -> None:
    problem = made("rows", 150)
    for arm in ("unfiltered", "filtered", "random"):
        run = replay_search(problem, arm, budget=17, seed=1, forecaster=LineageForecaster())
        assert len(run.best) == 17
        assert run.best[0] == 0.0
        assert list(run.best) == sorted(run.best, reverse=True)


def test_a_run_repeats_itself() -> None:
    problem = made("rows", 30)
    assert replay_search(problem, "random", budget=9, seed=3) == replay_search(
        problem, "random", budget=9, seed=3
    )


@pytest.mark.slow
def test_perfect_forecasts_are_never_worse_than_a_draw_and_good_ones_lie_between() -> None:
    finals: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for name in NAMES:
        problem = made(name, 150)
        for seed in range(2):
            for arm in ARMS:
                run = replay_search(problem, arm, budget=24, seed=seed, forecaster=LineageForecaster())
                finals[arm].append(run.at(24))
    assert all(o <= r + 1e-9 for o, r in zip(finals["oracle"], finals["random"], strict=True))
    assert statistics.mean(finals["oracle"]) < statistics.mean(finals["unfiltered"])
    assert statistics.mean(finals["oracle"]) <= statistics.mean(finals["filtered"])


def test_forecasts_know_only_what_their_own_run_has_measured() -> None:
    problem = made("rows")
    asked = []

    class Watched(LineageForecaster):
        def forecast(self, question):  # type: ignore[no-untyped-def]
            asked.append(question)
            return super().forecast(question)

    run = replay_search(problem, "filtered", budget=17, seed=0, forecaster=Watched())
    assert len(asked) > 2
    for question in asked:
        told = {n.id for n, _, _ in question.judged}
        assert len(told) <= len(run.best)
        assert not told & {n.id for n in question.nodes}


def test_children_are_dealt_below_their_own_parent_and_until_there_are_none() -> None:
    problem = made("rows", 40)
    first = problem.seeds[0]
    dealer = PoolProposer("mechanical", problem)
    answer = dealer.propose(request(problem, (first.id,), (first.id,)))
    children = {n.id for n in problem.nodes.values() if n.parents == (first.id,)}
    assert {n.id for n in answer.nodes} == children
    assert answer.exhausted
    styles = [n.arm == "mechanical/single" for n in answer.nodes]
    assert styles == sorted(styles, reverse=True)


def request(problem: PoolProblem, parents: tuple[str, ...], known: tuple[str, ...]) -> ProposalRequest:
    nodes = tuple(problem.nodes[p] for p in parents)
    return ProposalRequest("r", 1, "mechanical/single", problem.target, nodes, {}, 0.0, 100, 0, known=known)


def run(problem: str, seed: int, arm: str, *best: float) -> ReplayedSearch:
    return ReplayedSearch(problem, seed, arm, best, (), "")


@pytest.mark.slow
def test_figures_are_those_of_the_runs() -> None:
    runs = [run(p, s, "unfiltered", 0.0, 0.0, 0.0, -0.5) for p in "abcdef" for s in range(2)]
    runs += [run(p, s, "filtered", 0.0, -0.5, -1.0, -1.0) for p in "abcdef" for s in range(2)]
    runs += [run(p, s, arm, 0.0) for p in "abcdef" for s in range(2) for arm in ("random", "oracle")]
    found = speedup_at_budget(runs, "filtered", 4)
    assert found["ratio"] == pytest.approx(2**0.5, abs=1e-4)
    assert found["better_equal_worse"] == [12, 0, 0]
    assert found["clustered_p"] == pytest.approx(2 / 2**6, abs=1e-5)
    assert found["wilcoxon_p"] < 0.01
    assert measurements_saved(runs, "filtered", 4) == {"unfiltered_needs": 4, "needs": 2, "times": 2.0}
    assert measurements_saved(runs, "random", 4)["times"] is None
    assert speedup_at_budget(runs, "random", 2)["ratio"] == 1.0
    problems = {p: made(p, 3) for p in "abcdef"}
    assert summary(problems, runs, [2, 4])["holds"]


def test_signs_that_cancel_prove_nothing() -> None:
    assert sign_flip_p_value([0.3, -0.3]) == 1.0
    assert sign_flip_p_value([0.0, 0.0]) == 1.0
    assert sign_flip_p_value([0.1] * 20) < 0.001


@pytest.mark.slow
def test_a_replay_reports_every_run(tmp_path: Path) -> None:
    found = table(tmp_path / "pool.jsonl.gz", [made(name, 25) for name in NAMES])
    report = ResultFile(Namespace(out=tmp_path / "result.json"), "a test")
    done = replay_all(found, report, seeds=2, budgets=[5, 10], surrogate="lineage", settings=DEFAULT_SETTINGS)
    assert len(report.data["raw"]["runs"]) == len(NAMES) * 2 * len(ARMS)
    assert done["problems"] == 2
    assert done["runs_per_arm"] == 4
    assert set(done["filtered"]) == {"5", "10", "fewer"}
    assert done["best_of_pool_found"]["oracle"]["10"] >= done["best_of_pool_found"]["random"]["10"]
