"""Variants of a kernel, judged by Triton's interpreter: everything but that its times mean something."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from forecast_autotune.llm.advice.record import Advice
from forecast_autotune.records import Config, Outcome
from forecast_autotune.variants.signature import INTERPRETER
from forecast_harness.records import ConfirmationJob, Node, NodeJob, NodeResult, TargetKind, VerificationJob
from forecast_harness.search.events import NodeForecastRequest
from forecast_harness.search.forecasters import UNINFORMED_SD, UNTESTED_DIFFERENCE_SD, TritonForecaster
from forecast_harness.targets.kernels.base_kernel import BaseKernel, KernelSurvey
from forecast_harness.targets.kernels.sizes import CallSizes
from forecast_harness.targets.novelty import node_identity
from forecast_harness.targets.search_target import configs_for, open_target
from forecast_harness.trials import confirmation as confirmation_limit
from forecast_harness.trials import kernel_cell as call_values
from forecast_harness.trials.configs.variant_tracing import Timing, VariantTracer, is_compatible
from forecast_harness.trials.kernel_calls import CallKinds
from forecast_harness.trials.kernel_cell import fill_tensor, relative_error
from forecast_harness.trials.kernels import KernelJudge
from forecast_harness.trials.protocol import ConfirmationEnded
from forecast_harness.trials.race import RaceRules
from forecast_harness.verify.plan import VerificationPlan
from tests.harness.authors.proposal_examples import node as target_node
from tests.harness.commands.test_cli_variants import INPUTS, KERNEL
from tests.harness.variant_kernels import CONFIGS, SOFTMAX, rows, search_target, softmax_call, subject

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox needs Linux")

SUBJECT = subject(SOFTMAX, softmax_call(9, 70), softmax_call(4, 33), grid=rows)
TARGET = search_target(SUBJECT)
NAIVE = SOFTMAX.replace("value - high", "value - high + 0.0")
TUNABLE = SOFTMAX.replace(
    "@triton.jit",
    'CONFIGS = [{"kwargs": {"BLOCK": b}} for b in (16, 32, 64, 128, 256, 512)]\n\n\n@triton.jit',
    1,
)


SEED = target_node(TARGET, SOFTMAX)


def node(source: str) -> Node:
    return target_node(TARGET, source, parents=[SEED], note="x")


def job(source: str, trials: int = 3) -> NodeJob:
    return NodeJob(f"job-{node_identity('', 'triton', source)}", node(source), SEED, {}, TARGET, 0, trials)


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelJudge]:
    rules = RaceRules(first=99, least=2, most=2)
    folder = tmp_path_factory.mktemp("kernel")
    with contextlib.closing(
        KernelJudge(TARGET, VerificationPlan(cases=2, timed=2), folder, rules=rules, thorough=rules)
    ) as opened:
        yield opened


@pytest.mark.parametrize(
    ("source", "outcome", "stage", "said"),
    [
        (SOFTMAX.replace("* scale", "* scale * 1.01"), Outcome.INCORRECT, "verify", "wrong_values"),
        (
            SOFTMAX.replace("import triton\n", "import os\nimport triton\n", 1),
            Outcome.RUNTIME_ERROR,
            "compile",
            "import",
        ),
        (SOFTMAX.replace("stride, n", "n, stride"), Outcome.RUNTIME_ERROR, "compile", "runtime parameters"),
        ("def kernel(", Outcome.RUNTIME_ERROR, "compile", "not Python"),
    ],
)
def test_a_variants_fault_is_its_outcome(
    judge: KernelJudge, source: str, outcome: Outcome, stage: str, said: str
) -> None:
    result = judge.judge(job(source))
    assert (result.outcome, result.stage) == (outcome, stage)
    assert said in result.feedback


def test_a_base_whose_first_config_does_not_fit_is_timed_in_another(tmp_path: Path) -> None:
    source = SOFTMAX.replace("    row =", "    tl.static_assert(BLOCK < 128)\n    row =", 1)
    asked = replace(subject(source, softmax_call(9, 70), grid=rows), configs=CONFIGS[::-1])
    target, rules = search_target(asked), RaceRules(first=99, least=2, most=2)
    seed = replace(SEED, source=source)
    plan = VerificationPlan(cases=2, timed=2)
    with contextlib.closing(KernelJudge(target, plan, tmp_path, rules=rules, thorough=rules)) as opened:
        result = opened.judge(NodeJob("job", seed, seed, {}, target, 0, 2))
    assert (result.outcome, Config.from_json(result.config)) == (Outcome.OK, CONFIGS[0])


@pytest.mark.slow
def test_a_variant_is_verified_in_one_config(judge: KernelJudge) -> None:
    right = judge.verify(VerificationJob("verify-1", node(NAIVE), CONFIGS[0].to_json(), TARGET))
    assert (right.outcome, right.wrong) == (Outcome.OK, "")
    assert "checks_passed" not in right.facts


@pytest.mark.slow
@pytest.mark.parametrize("prepared", [False, True])
def test_finalists_are_confirmed_with_their_configs(judge: KernelJudge, prepared: bool) -> None:
    config = {"kwargs": {"BLOCK": 512}}
    chosen = Config.from_json({**CONFIGS[0].to_json(), **config}).to_json()
    if prepared:
        judge.prepare_confirmation()
    result = judge.confirm(ConfirmationJob((node(TUNABLE),), {node(TUNABLE).id: chosen}, SEED, TARGET))
    assert list(result) == [SEED.id, node(TUNABLE).id]
    assert (result[SEED.id].log2_ratio, set(result[SEED.id].seconds)) == (0, {"0"})
    assert result[node(TUNABLE).id].config == chosen
    assert {j.stage for j in result.values()} == {"confirm"}
    assert {j.against for j in result.values()} == {SEED.id}
    answer = result[node(TUNABLE).id].facts["spent"]
    assert {"open", "verify", "races", "verifying", "racing"} <= set(answer), "where the seconds went"
    assert all({"prepare", "held", "contest"} <= set(steps) for steps in answer["racing"])


@pytest.mark.slow
def test_contests_that_were_made_ready_are_not_run_for_a_wrong_finalist(judge: KernelJudge) -> None:
    wrong = node(SOFTMAX.replace("* scale", "* scale * 1.01"))
    judge.prepare_confirmation()
    config = CONFIGS[0].to_json()
    result = judge.confirm(ConfirmationJob((wrong,), {wrong.id: config}, SEED, TARGET))
    assert (result[wrong.id].outcome, result[wrong.id].stage) == (Outcome.INCORRECT, "confirm")
    assert "racing" not in result[wrong.id].facts.get("spent", {})
    assert result[SEED.id].log2_ratio == 0.0, "timed beside itself"


@pytest.mark.slow
def test_a_confirmation_is_ended_far_beyond_its_time(
    judge: KernelJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confirmation_limit, "_LEAST_S", 0.1)
    monkeypatch.setattr(confirmation_limit, "_GRACE_S", 0.0)
    slow = ConfirmationJob((node(NAIVE),), {}, SEED, TARGET, seconds=0.1)
    with pytest.raises(ConfirmationEnded, match="there was no time"):
        judge.confirm(slow)
    again = judge.verify(VerificationJob("verify-2", node(NAIVE), CONFIGS[0].to_json(), TARGET))
    assert again.outcome is Outcome.OK, "the judge is as good as before"


# --- forecasts from IR ---


@pytest.fixture(scope="module")
def tracer() -> Iterator[VariantTracer]:
    with contextlib.closing(VariantTracer(TARGET)) as result:
        yield result


def test_ir_is_traced_without_a_device_and_forecast(tracer: VariantTracer) -> None:
    configs = configs_for(TARGET, TUNABLE)
    result = tracer.forecast(TUNABLE, configs)
    assert result.configs == tuple(configs)
    assert (result.sd > 0).all()
    assert len(set(result.mean.tolist())) == len(configs)  # IR tells them apart
    assert tracer.forecast("import triton\n", configs) is None


def test_advice_on_the_base_moves_forecasts_of_the_base_alone(tracer: VariantTracer) -> None:
    text = "def cost(config, args, device, launch):\n    return config.BLOCK\n"
    advice = Advice("kernel", "5" * 64, text, "somebody")
    advised = VariantTracer(replace(TARGET, payload={**TARGET.payload, "advice": advice.to_json()}))
    configs = configs_for(TARGET, TUNABLE)
    try:
        for source, moved in ((SOFTMAX, True), (TUNABLE, False)):
            plain, result = tracer.forecast(source, configs), advised.forecast(source, configs)
            assert (plain.mean.tolist() != result.mean.tolist()) is moved
    finally:
        advised.close()


def sizes(configs: Sequence[Config]) -> list[object]:
    return [dict(c.kwargs)["BLOCK"] for c in configs]


def test_the_rivals_config_is_timed_first_where_a_source_can_run_it(tracer: VariantTracer) -> None:
    configs = configs_for(TARGET, TUNABLE)
    result = tracer.forecast(TUNABLE, configs)
    worst = result.configs[result.order[-1]]
    chosen = tracer.best_configs(TUNABLE, configs, 4, worst)
    assert chosen[:3] == [worst, *(result.configs[i] for i in result.order[:2])]
    assert len(set(chosen)) == 4
    assert tracer.best_configs(TUNABLE, configs, 1, worst) == [worst]
    assert tracer.best_configs(TUNABLE, configs, 9, worst) == [worst, *(c for c in configs if c != worst)]
    for other in (replace(worst, num_warps=32), Config.of({"BLOCK": 2})):
        assert tracer.best_configs(TUNABLE, configs, 4, other) == tracer.best_configs(TUNABLE, configs, 4)
    assert is_compatible(Config.of({"BLOCK": 16}), Config.of({"BLOCK": 16, "SPLIT": 2}))


def test_a_forecast_of_variants_needs_no_results() -> None:
    heavy = SOFTMAX.replace(
        "    scale =", "    for k in range(0, 64):\n        part += tl.exp(value - high - k)\n    scale ="
    )
    broken = SOFTMAX.replace("tl.max(value, axis=0)", "tl.no_such_thing(value)")
    nodes = (node(NAIVE), node(heavy), node(broken))
    seed = (SEED, NodeResult(Outcome.OK, SEED.id, 0.0), 0.0)
    with contextlib.closing(TritonForecaster(TARGET)) as forecaster:
        result = forecaster.forecast(NodeForecastRequest(1, SEED, nodes, (seed,), TARGET)).beliefs
    same, slow, bad = (result[n.id] for n in nodes)
    assert not same.abstains
    assert same.sd == UNTESTED_DIFFERENCE_SD
    assert abs(same.mean) < 0.3
    assert slow.mean > same.mean + 0.2
    assert bad.abstains
    assert bad.sd >= UNINFORMED_SD


def test_a_kernel_in_a_file_of_the_users_is_a_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without a device it can be opened for one; here it is judged by the interpreter."""
    file = tmp_path / "own_kernels.py"
    file.write_text(KERNEL + INPUTS)
    target, (seed,) = open_target(f"{file}:double", device="cuda")
    assert (target.kind, target.entry, target.language) == (TargetKind.KERNEL, "double", "triton")
    assert "def double" in target.statement
    assert [dict(c.kwargs) for c in configs_for(target, seed.source)] == [{"BLOCK": 64}, {"BLOCK": 128}]
    quick = RaceRules(first=99, least=2, most=2)
    with contextlib.closing(
        KernelJudge(target, VerificationPlan(cases=2), tmp_path / "scratch", rules=quick)
    ) as judge:
        better = replace(
            seed, id="better", source=seed.source.replace("value * FACTOR", "value * (FACTOR + 0)")
        )
        result = judge.judge(NodeJob("j", better, seed, {}, target, 0, 1))
        wrong = replace(seed, id="wrong", source=seed.source.replace("value * FACTOR", "value + FACTOR"))
        learnt: list[tuple[str, Mapping[Config, Timing]]] = []
        monkeypatch.setattr(VariantTracer, "learn", lambda self, *told: learnt.append(told))
        refused = judge.judge(NodeJob("k", wrong, seed, {}, target, 0, 1))
        assert learnt == [], "a wrong source is not timed"
        own = configs_for(target, better.source)
        beside = own[1].to_json()
        first = judge.judge(NodeJob("l", better, seed, beside, target, 0, 1))
        both = judge.judge(NodeJob("m", better, seed, beside, target, 0, 2))
    assert (result.outcome, result.stage, result.measurements, result.against) == (
        Outcome.OK,
        "time",
        1,
        seed.id,
    )
    assert [(c["passed"], c["device"]) for c in result.facts["checks_passed"]] == [(True, INTERPRETER)]
    assert refused.outcome is Outcome.INCORRECT
    assert Config.from_json(first.config) == own[1], "the rival's config"
    assert [(source, set(t)) for source, t in learnt] == [
        (seed.source, {own[1]}),
        (better.source, {own[1]}),
        (seed.source, {own[1]}),
        (better.source, set(own)),
    ]
    winner = learnt[-1][1][Config.from_json(both.config)]
    assert winner == pytest.approx(list(both.seconds.values()))
    assert all(0 < float(seconds[0]) < 1 for _, timings in learnt for seconds in timings.values())


LARGE, SMALL = (
    subject(SOFTMAX, softmax_call(*first), softmax_call(*second), grid=rows)
    for first, second in (((9, 70), (4, 33)), ((4, 33), (9, 70)))
)


def survey_of(one: BaseKernel, *, frozen: bool) -> KernelSurvey:
    sizes = CallSizes.of(one.calls)
    sizes = sizes.frozen() if frozen else sizes
    return KernelSurvey(("y",), (), Config.of({"BLOCK": 64}), True, signature=sizes.signature({"y"}))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_call_is_surveyed_unless_another_ones_drawn_sizes_cover_it(frozen: bool) -> None:
    requests: list[BaseKernel] = []

    def survey(one: BaseKernel) -> KernelSurvey:
        requests.append(one)
        return survey_of(one, frozen=frozen)

    kinds = CallKinds.surveyed([LARGE, SMALL], survey)
    assert requests == ([LARGE, SMALL] if frozen else [LARGE])
    assert [one for one, _ in kinds.verified] == requests
    assert kinds.covering == tuple(
        survey_of(one, frozen=frozen) for one in requests for _ in range(2 // len(requests))
    )


def test_long_tensors_are_filled_to_the_end_and_no_two_rows_are_alike() -> None:
    flat = torch.full((3, 1 << 22), math.nan)
    fill_tensor(flat.reshape(-1), 2, torch.Generator().manual_seed(0))
    assert bool(flat.isfinite().all())
    assert abs(float(flat.mean())) < 0.01
    assert float(flat.std()) == pytest.approx(1.0, abs=0.01)
    assert not any(torch.equal(flat[a], flat[b]) for a, b in ((0, 1), (0, 2), (1, 2)))


def test_errors_are_told_beyond_what_is_compared_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_values, "_COMPARED_ELEMENTS", 8)
    right = torch.linspace(-4.0, 4.0, 31)
    assert relative_error(right.clone(), right) == 0.0
    late = right.clone()
    late[-1] += 1.0
    assert relative_error(late, right) == pytest.approx(0.25)
    late[20] = math.inf
    assert relative_error(late, right) == math.inf
    both = right.clone()
    both[20] = math.inf
    assert relative_error(both.double(), both) == 0.0
    assert relative_error(right[:0], right[:0]) == 0.0
