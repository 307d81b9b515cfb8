"""Forecasts of Inductor's choices: templates by their closed form, vendor kernels by their roofline."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from forecast_autotune.features.devices import device_spec
from forecast_autotune.features.feature_vectors import feature_matrix
from forecast_autotune.records import (
    Argument,
    Candidate,
    Config,
    Device,
    Kernel,
    Measurement,
    Outcome,
    Problem,
)
from forecast_autotune.settings import Settings
from forecast_autotune.store import Store
from forecast_autotune.surrogates.covariance import Hyperparameters
from forecast_autotune.surrogates.forest import Forest
from forecast_autotune.surrogates.learned import LearnedModel
from forecast_autotune.surrogates.protocol import Forecasts, Query, Relative, Surrogate
from forecast_autotune.testing import SurrogateContract
from forecast_integrations.inductor.choices.geometry import (
    ConvolutionGeometry,
    MatmulGeometry,
    operation_geometry,
)
from forecast_integrations.inductor.choices.surrogate import (
    LearnedTemplateSurrogate,
    TemplateSurrogate,
    default,
    template_advice,
)
from forecast_integrations.inductor.operation_search import OperationSearch
from forecast_integrations.inductor.session import TuningSession

H200 = Device("NVIDIA H200", arch="90", multiprocessors=132, shared_memory_bytes=232448)
ATEN = Candidate(Config.of({}, num_warps=1, num_stages=1), "aten::mm")


def tensor(name: str, dtype: str, *shape: int, turned: bool = False) -> Argument:
    stride = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        stride[i] = stride[i + 1] * shape[i + 1]
    if turned:
        stride[-2:] = [1, shape[-2]]
    return Argument(name, "tensor", dtype, shape, tuple(stride), True)


def matmul(m: int, n: int, k: int, device: Device = H200, dtype: str = "bfloat16") -> Problem:
    operands = [
        tensor("in0", dtype, m, k),
        tensor("in1", dtype, k, n, turned=True),
        tensor("out", dtype, m, n),
    ]
    return Problem.of(Kernel("mm", "inductor"), operands, device)


def tile(m: int, n: int, k: int, warps: int = 8, stages: int = 3, **more: Any) -> Candidate:
    kwargs = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": 8, **more}
    return Candidate(Config.of(kwargs, num_warps=warps, num_stages=stages), "triton::mm")


def exhaustive() -> list[Candidate]:
    """Inductor's EXHAUSTIVE space of products, with the vendor's kernel in front."""
    sizes = itertools.product((16, 32, 64, 128, 256), repeat=3)
    return [ATEN, *(tile(*mnk, w, s) for mnk in sizes for s in (1, 2, 3, 4, 5) for w in (2, 4, 8))]


def asked(problem: Problem, candidates: Sequence[Candidate], **known: Any) -> Forecasts:
    return default().forecast(Query(problem, candidates, **known))


def advised(problem: Problem, candidates: Sequence[Candidate], **known: Any) -> Forecasts:
    """The same with the advice that is installed on the templates."""
    advice = template_advice(problem)
    assert advice is not None
    return asked(problem, candidates, advice=advice, **known)


def ran(problem: Problem, candidate: Candidate, ms: float) -> Measurement:
    return Measurement(problem.id, candidate, Outcome.OK, ms)


class TestContract(SurrogateContract):
    def make(self) -> Surrogate:
        return default()


def test_the_exhaustive_space_is_forecast_at_once_and_the_vendor_kernel_stays_in() -> None:
    candidates = exhaustive()
    found = asked(matmul(4096, 4096, 4096), candidates)
    assert len(found) == 1876
    assert np.isfinite(found.mean).all()
    assert (found.sd > 0).all()
    assert "closed form" in found.reason
    assert found.optimistic()[0] <= found.optimistic()[1:].min()
    best = [found.candidates[i] for i in found.order()[:20] if found.candidates[i] != ATEN]
    assert all(dict(c.config.kwargs)["BLOCK_M"] >= 64 for c in best)
    assert not any(c.config.num_stages == 1 for c in best[:5])


def test_a_skinny_product_wants_small_tiles_of_its_rows() -> None:
    found = asked(matmul(16, 4096, 4096), exhaustive()[1:])
    rows = [dict(found.candidates[i].config.kwargs)["BLOCK_M"] for i in found.order()]
    assert rows[:10].count(16) >= 8
    assert max(rows[:20]) <= 32
    assert max(rows) >= 128


def test_more_shared_memory_than_there_is_fails() -> None:
    found = asked(matmul(4096, 4096, 4096), [tile(256, 256, 128, 8, 5), tile(128, 128, 64)])
    assert found.p_fail[0] > 0.9
    assert found.p_fail[1] < 0.1


def test_a_measured_vendor_kernel_says_nothing_about_templates() -> None:
    problem, candidates = matmul(2048, 2048, 2048), [ATEN, tile(128, 128, 64), tile(64, 64, 32)]
    before = asked(problem, candidates)
    after = asked(problem, candidates, measured=[ran(problem, ATEN, 7.0)])
    np.testing.assert_array_equal(after.mean[1:], before.mean[1:])
    assert after.mean[0] == np.log2(7.0)
    assert after.sd[0] < 0.05


def test_measured_templates_teach_about_templates_alone() -> None:
    problem, candidates = matmul(2048, 2048, 2048), [ATEN, tile(128, 128, 64), tile(128, 128, 32)]
    before = asked(problem, candidates)
    after = asked(
        problem, candidates, measured=[ran(problem, candidates[1], 2.0 ** float(before.mean[1]) * 2)]
    )
    assert after.mean[2] - before.mean[2] > 0.5
    assert after.sd[2] < 0.5 * before.sd[2]
    assert after.mean[0] == before.mean[0]
    assert after.sd[0] == pytest.approx(0.5)


def test_before_anything_ran_all_share_one_level() -> None:
    found = asked(matmul(2048, 2048, 2048), [ATEN, tile(128, 128, 64), tile(64, 64, 32)])
    drawn = found.samples(np.arange(3), 2000, 1)
    assert np.corrcoef(drawn.T).min() > 0.4
    share = found.p_within(0.02)
    assert 0.02 < share[0] < 0.98


def test_the_same_vendor_kernel_elsewhere_places_it_here() -> None:
    here, there = matmul(2048, 2048, 2048), matmul(4096, 4096, 4096)
    candidates = [ATEN, tile(128, 128, 64)]
    plain = asked(here, candidates)
    slow = Relative(there, [ran(there, ATEN, 1.0)])
    told = asked(here, candidates, relatives=[slow])
    assert told.mean[0] > plain.mean[0] + 1.0
    assert told.mean[1] == plain.mean[1]


def test_a_failed_vendor_kernel_is_not_chosen() -> None:
    problem = matmul(256, 256, 256)
    failed = Measurement(problem.id, ATEN, Outcome.RUNTIME_ERROR)
    found = asked(problem, [ATEN, tile(64, 64, 32)], measured=[failed])
    assert found.p_fail[0] == 1.0
    assert found.order()[0] == 1


@pytest.mark.parametrize("backend", ["cpp::gemm", "subgraph::split"])
def test_choices_without_a_closed_form_are_told_apart_by_measuring(backend: str) -> None:
    cpu = Device("some cpu", backend="cpu")
    problem = matmul(64, 64, 64, cpu, "float32")
    names = [replace(ATEN), *(Candidate(Config.of({"s": s}), backend) for s in (1, 2, 4, 8))]
    before = asked(problem, names)
    assert (before.sd > 0.5).all()
    after = asked(problem, names, measured=[ran(problem, c, 1.0 + i) for i, c in enumerate(names[:3])])
    assert after.order()[0] == 0


def test_a_learned_residual_corrects_templates_alone() -> None:
    problem, candidates = matmul(2048, 2048, 2048), [ATEN, tile(128, 128, 64), tile(64, 64, 32)]
    table = TemplateSurrogate().prior(Query(problem, candidates[1:]))
    assert table.facts is not None
    assert table.costs is not None
    _, names = feature_matrix(table.facts, table.costs, [c.config for c in candidates[1:]], device_spec(H200))
    leaf = {"feature": [-1], "threshold": [0.0], "left": [0], "right": [0], "value": [0.5], "roots": [0]}
    forest = Forest(**{name: np.array(values) for name, values in leaf.items()})
    learned = LearnedTemplateSurrogate(LearnedModel(tuple(names), forest, forest, None, Hyperparameters()))
    plain, found = (
        s.forecast(Query(problem, candidates)) for s in (TemplateSurrogate(Hyperparameters()), learned)
    )
    np.testing.assert_allclose(found.mean - plain.mean, [0.0, 0.5, 0.5])


def test_convolution_and_attention_have_closed_forms_too() -> None:
    image = tensor("in0", "float16", 16, 64, 56, 56)
    image = replace(image, stride=(64 * 56 * 56, 1, 56 * 64, 64))
    conv = [image, tensor("in1", "float16", 128, 64, 3, 3), tensor("out", "float16", 16, 128, 28, 28)]
    blocks = {"STRIDE_H": 2, "STRIDE_W": 2, "PADDING_H": 1, "PADDING_W": 1, "GROUPS": 1}
    tiles = [replace(tile(m, 64, 32, **blocks), variant="triton::convolution2d") for m in (64, 128, 256)]
    found = asked(Problem.of(Kernel("convolution", "inductor"), conv, H200), tiles)
    assert "closed form" in found.reason
    assert "installed" in advised(Problem.of(Kernel("convolution", "inductor"), conv, H200), tiles).advice
    heads = [tensor(f"in{i}", "bfloat16", 2, 16, 2048, 64) for i in range(3)]
    kwargs = [{"BLOCK_M": m, "BLOCK_N": n} for m in (64, 128) for n in (32, 64)]
    flex = [Candidate(Config.of(k, num_warps=8), "triton::flex_attention") for k in kwargs]
    found = asked(Problem.of(Kernel("flex_attention", "inductor"), heads, H200), flex)
    assert "closed form" in found.reason
    assert "installed" in advised(Problem.of(Kernel("flex_attention", "inductor"), heads, H200), flex).advice


def test_installed_advice_moves_templates_and_leaves_the_vendors_kernel() -> None:
    problem = Problem.of(
        Kernel("bmm", "inductor"), [tensor(f"in{i}", "float16", 256, 512, 512) for i in range(2)], H200
    )
    candidates = [ATEN, *(tile(m, n, 32, w) for m in (32, 128) for n in (32, 64) for w in (4, 8))]
    plain, found = asked(problem, candidates), advised(problem, candidates)
    assert "advice at weight" in found.advice
    moved = (found.mean - plain.mean)[1:]
    assert np.ptp(moved) > 0.01


@pytest.mark.parametrize("setting", ["off", "stored"])
def test_torch_compile_follows_installed_advice_unless_told_not_to(setting: str) -> None:
    problem, candidates = (
        matmul(512, 512, 512),
        [ATEN, tile(128, 128, 64), tile(64, 64, 32), tile(32, 32, 32)],
    )
    session = TuningSession.of(Settings(advice=setting), None, Store(None), "")
    search = OperationSearch(problem, candidates, [ATEN], session)
    search.first()
    search.add_measurements([ran(problem, c, 1.0 + i) for i, c in enumerate(candidates)])
    decision = search.decide()
    assert decision is not None
    assert ("installed" in decision.advice) == (setting == "stored")


def test_operands_are_read_in_inductors_order() -> None:
    bias, a, b = (
        tensor("in0", "float16", 32),
        tensor("in1", "float16", 64, 48),
        tensor("in2", "float16", 48, 32),
    )
    added = operation_geometry(Problem.of(Kernel("addmm"), [bias, a, b], H200))
    assert isinstance(added, MatmulGeometry)
    assert (added.m, added.n, added.k, added.bias_bits) == (64, 32, 48, 16)
    left, right = tensor("in0", "int8", 8, 64, 32), tensor("in1", "int8", 8, 32, 16)
    batched = operation_geometry(Problem.of(Kernel("bmm"), [left, right], H200))
    assert isinstance(batched, MatmulGeometry)
    assert (batched.batch, batched.m, batched.n, batched.k, batched.out_bits) == (8, 64, 16, 32, 32)
    pair = [tensor(f"in{i}", "float16", 64, 64) for i in range(4)]
    both = operation_geometry(Problem.of(Kernel("mm_plus_mm"), pair, H200))
    assert isinstance(both, MatmulGeometry)
    assert both.terms == 2
    grouped = [tensor("in0", "bfloat16", 512, 64), tensor("in1", "bfloat16", 8, 64, 32)]
    dealt = operation_geometry(Problem.of(Kernel("grouped_mm"), grouped, H200))
    assert isinstance(dealt, MatmulGeometry)
    assert (dealt.batch, dealt.m) == (8, 64)


def test_convolutions_without_a_result_take_it_from_the_candidate() -> None:
    operands = [tensor("in0", "float16", 2, 16, 32, 32), tensor("in1", "float16", 8, 16, 3, 3)]
    conv = operation_geometry(Problem.of(Kernel("convolution"), operands, H200))
    assert isinstance(conv, ConvolutionGeometry)
    assert conv.result({"STRIDE_H": 2, "STRIDE_W": 2, "PADDING_H": 0, "PADDING_W": 0}) == (15, 15)
    assert conv.result({}) == (32, 32)
