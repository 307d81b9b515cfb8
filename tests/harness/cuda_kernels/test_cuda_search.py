"""A CUDA kernel through a whole search: compiled by nvcc, launched by a driver without a device."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from benchmarks.lib.machine_code.opened import FAKE_FLUSH_BYTES
from forecast_autotune.errors import SettingsError
from forecast_autotune.records import Outcome
from forecast_harness.authors import open_author
from forecast_harness.clocks.runner import client
from forecast_harness.records import (
    ConfirmationJob,
    Node,
    NodeJob,
    NodeResult,
    SearchBudget,
    SearchContext,
    SearchSettings,
    SearchTarget,
    VerificationJob,
)
from forecast_harness.search.forecasters import open_forecaster
from forecast_harness.search.run import search
from forecast_harness.search.state import SearchState
from forecast_harness.trials import devices
from forecast_harness.trials import machine_lanes as opening
from forecast_harness.trials.cuda import CudaJudge
from forecast_harness.trials.machine_lanes import MachineCodeLanes, open_machine_code_lanes
from forecast_harness.verify.plan import VerificationPlan
from tests.harness.cuda_kernels.declared_kernel import SOURCE, cuda_node, cuda_target, declared, needs_nvcc
from tests.harness.trials.machine_code.judged_sums import NotingHost, ReadyHost
from tests.harness.trials.machine_code.translated_builds import StartedBuilder

pytestmark = needs_nvcc
PLAN = VerificationPlan(cases=1)


class ConfirmingHost(NotingHost):
    """Stands for the sandbox with the device: whatever it is asked to confirm is twice as fast as the seed."""

    def confirm(self, confirm: ConfirmationJob) -> Mapping[str, NodeResult]:
        seed = confirm.seed_node.id
        ratios = {n.id: 0.0 if n.id == seed else -1.0 for n in (confirm.seed_node, *confirm.nodes)}
        return {
            n: NodeResult(Outcome.OK, seed, log2_ratio=r, sd=0.01, stage="confirm") for n, r in ratios.items()
        }


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> SearchTarget:
    return cuda_target(declared(tmp_path_factory.mktemp("kernel")))


@pytest.fixture(scope="module")
def seed(target: SearchTarget) -> Node:
    return cuda_node(target, SOURCE)


@pytest.fixture(scope="module")
def lanes(
    target: SearchTarget, seed: Node, fake_driver: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MachineCodeLanes]:
    """Machine code of the fake driver in place of nvcc's, once that has been checked."""

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(client, "LIBRARY", str(fake_driver))
        patched.setattr(client, "FLUSH_BYTES", FAKE_FLUSH_BYTES)
        patched.setattr(client, "runner_problem", lambda runner: "")
        patched.setattr(devices, "CompileWorkers", StartedBuilder)
        patched.setattr(opening, "_HostOpening", lambda *_: ReadyHost(ConfirmingHost({})))
        folder = tmp_path_factory.mktemp("lanes") / "new"
        made = open_machine_code_lanes(target, seed, [PLAN], folder=folder, workers=1, insist=True)
        with contextlib.closing(made):
            yield made


def judged(lanes: MachineCodeLanes, target: SearchTarget, seed: Node, source: str) -> NodeResult:
    asked = cuda_node(target, source)
    return lanes.submit(NodeJob(f"job-{asked.id}", asked, seed, {}, target, 0, 3)).result(120)


def searched(
    lanes: MachineCodeLanes, target: SearchTarget, seed: Node, folder: Path, proposer: str, surrogate: str
) -> SearchState:
    settings = SearchSettings(
        SearchBudget(4), proposers=(proposer,), surrogate=surrogate, parents=1, samples=2, k=2, trials=2
    )
    forecaster = open_forecaster(surrogate, target)
    with contextlib.closing(open_author(proposer, target)) as opened:
        return search(
            target,
            [seed],
            settings=settings,
            context=SearchContext(target.id, (), "fake", {}, "", "h"),
            proposers={opened.name: opened},
            forecaster=forecaster,
            lanes=lanes,
            folder=folder,
        )


@pytest.mark.slow
def test_a_search_takes_the_faster_of_two_proposals(
    lanes: MachineCodeLanes, target: SearchTarget, seed: Node, tmp_path: Path
) -> None:
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "faster.cu").write_text(f"// faster\n{seed.source}#define FASTER 1  // 20000 ns\n")
    (folder / "wrong.cu").write_text(f"// wrong\n{seed.source.replace('2 * x[', '3 * x[')}")
    state = searched(lanes, target, seed, tmp_path, f"recorded:{folder}", "auto")
    best = state.nodes[state.best]
    assert best.provenance.note == "faster"
    assert state.best_score < -0.8
    wrong = next(n for n in state.nodes.values() if n.provenance.note == "wrong")
    assert state.judged[wrong.id].outcome is Outcome.INCORRECT
    text = (tmp_path / "best.cu").read_text()
    assert text.startswith("// The fastest source found for twice")
    assert "/* launch" in text
    assert (tmp_path / "nodes" / f"{best.id}.cu").read_text() == best.source
    assert json.loads((tmp_path / "summary.json").read_text())["confirmed"]


@pytest.mark.slow
def test_constants_are_varied_without_any_model(
    lanes: MachineCodeLanes, target: SearchTarget, seed: Node, tmp_path: Path
) -> None:
    state = searched(lanes, target, seed, tmp_path, "mechanical", "none")
    assert {n.provenance.author for n in state.nodes.values()} > {"launch-bounds"}
    assert len(state.judged) == 4


def test_a_node_is_timed_in_its_own_configs(
    lanes: MachineCodeLanes, target: SearchTarget, seed: Node
) -> None:
    found = judged(lanes, target, seed, f"{SOURCE}// 30000 ns\n#define K 1\n")
    assert (found.outcome, found.measurements, found.facts["path"]) == (Outcome.OK, 2, "machine code")
    assert [c["config"] for c in found.facts["configs"]] == [{}, {"THREADS": 256}]
    assert found.log2_ratio == pytest.approx(-0.72, abs=0.15)
    assert not found.may_lead


@pytest.mark.parametrize(
    ("source", "outcome", "said"),
    [
        (SOURCE.replace("2 * x[", "5 * x["), Outcome.INCORRECT, "wrong_values"),
        (SOURCE.replace("float* y", "float* z"), Outcome.COMPILE_ERROR, '"y" is undefined'),
        (SOURCE.partition("*/\n")[2], Outcome.COMPILE_ERROR, "needs one launch comment"),
    ],
)
def test_a_source_that_breaks_a_rule_is_refused_before_it_is_timed(
    lanes: MachineCodeLanes, target: SearchTarget, seed: Node, source: str, outcome: Outcome, said: str
) -> None:
    found = judged(lanes, target, seed, source)
    assert (found.outcome, found.log2_ratio, found.facts["path"]) == (outcome, None, "machine code")
    assert said in found.feedback


@pytest.mark.slow
def test_the_sandboxs_judge_compiles_without_a_device(
    target: SearchTarget, seed: Node, tmp_path: Path
) -> None:
    broken = cuda_node(target, SOURCE.replace("float* y", "float* z"))
    with contextlib.closing(CudaJudge(target, PLAN, tmp_path)) as judge:
        found = judge.judge(NodeJob("job", broken, seed, {}, target, 0, 2))
        assert (found.outcome, found.stage) == (Outcome.RUNTIME_ERROR, "compile")
        assert '"y" is undefined' in found.feedback
        verified = judge.verify(VerificationJob("verify", seed, {"THREADS": 256}, target))
        # The source compiles and is imported; that there is no driver to launch it with is all that is wrong.
        assert "libcuda" in verified.wrong


def test_a_device_that_nothing_can_be_compiled_for_is_told(target: SearchTarget, tmp_path: Path) -> None:
    unknown = SearchTarget(
        target.kind,
        target.name,
        target.id,
        "cuda",
        "twice",
        "",
        {**target.payload, "device": {"name": "some"}},
    )
    with pytest.raises(SettingsError, match="compute capability of some is not known"):
        CudaJudge(unknown, PLAN, tmp_path)
