"""The parts of verification: tolerances, canaries, draws, counters, hints, verdicts."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from forecast_autotune.errors import RecordError
from forecast_autotune.records import Outcome
from forecast_harness.targets.packs import load_pack
from forecast_harness.targets.packs.schema import LAYOUTS, VALUE_REGIMES
from forecast_harness.verify.blocks import GUARD_BYTES, build_arena, changed_bytes, strides_of
from forecast_harness.verify.inputs import (
    DERIVED_REGIMES,
    decode_arguments,
    draw,
    encode_arguments,
    perturb_values,
)
from forecast_harness.verify.problem import DrawSpec, NativeProblem
from forecast_harness.verify.run import static_hints
from forecast_harness.verify.tolerance import (
    _ELEMENTS_BESIDE_BASE,
    ExpectedOutput,
    compare_with_base,
    expected_outputs,
    mismatch,
    raw_bytes,
    same_bits,
)
from forecast_harness.verify.verdict import Judgement, Reason, ReasonCode, SolutionVerdict


def generator(seed: int = 0) -> Any:
    return torch.Generator().manual_seed(seed)


def product(a: Any, b: Any) -> Any:
    return a @ b


def limits_of(function: Any, dtype: Any = torch.float32, terms: int = 1, **inputs: Any) -> ExpectedOutput:
    return expected_outputs(
        function, inputs, [dtype], compute=torch.float32, terms=terms, safety=8.0, generator=generator()
    )[0]


# --- tolerance ---


@pytest.mark.parametrize("k", [16, 128, 1024, 4096])
@pytest.mark.parametrize("regime", ["normal", "uniform", "offset", "tiny"])
def test_single_precision_passes_and_half_does_not(k: int, regime: str) -> None:
    """At every length and magnitude: the limit grows with the sum's own rounding, not beyond."""
    a, b = (draw(s, torch.float32, regime, generator(n)) for n, s in enumerate(((8, k), (k, 8))))
    one = limits_of(product, terms=k, a=a, b=b)
    assert mismatch(a @ b, one)[0] == ""
    in_order = torch.zeros(8, 8)
    for n in range(k):  # the least precise honest order
        in_order = in_order + torch.outer(a[:, n], b[n])
    assert mismatch(in_order, one)[0] == ""
    if regime != "tiny":  # half has no such numbers at all
        assert mismatch((a.half() @ b.half()).float(), one)[0]
    if regime in ("uniform", "offset"):
        return  # in long sums of like signs, errors of factors average out below those of honest sums
    ten_bits = [((t.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32) for t in (a, b)]
    assert mismatch(ten_bits[0] @ ten_bits[1], one)[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_rounding_passes_and_cutting_does_not(dtype: Any) -> None:
    x = draw((32, 64), torch.float32, "normal", generator())
    one = limits_of(lambda x: x * 3, dtype, x=x)
    assert mismatch((x.double() * 3).to(dtype), one)[0] == ""
    bits = {torch.float16: 13, torch.bfloat16: 16, torch.float8_e4m3fn: 20}[dtype]
    cut = ((x * 3).view(torch.int32) >> bits << bits).view(torch.float32)
    assert "wrong" in mismatch(cut.to(dtype), one)[0]


def test_small_results_have_small_limits() -> None:
    """Zeros pass a fixed atol of 1e-3 here (cheat C31)."""
    x = draw((4, 4096), torch.float32, "normal", generator())
    one = limits_of(lambda x: torch.softmax(x, -1), terms=4096, x=x)
    assert mismatch(torch.softmax(x, -1), one)[0] == ""
    assert "wrong" in mismatch(torch.zeros(4, 4096), one)[0]


def test_cancellation_is_allowed_its_error() -> None:
    """A mean of squares minus a square of the mean is honest in double only; two passes always are."""
    x = draw((16, 256), torch.float32, "offset", generator()) + 100
    one = limits_of(lambda x: x.var(-1, correction=0), terms=256, x=x)
    assert mismatch((x - x.mean(-1, keepdim=True)).square().mean(-1), one)[0] == ""


def test_a_floor_is_for_what_the_inputs_cannot_show() -> None:
    """1 - p near p = 1: exact in float64, zero after honest rounding of p."""
    x = torch.full((1, 4), 20.0)
    x[0, 1:] = 0.0
    inputs = {"x": x}
    rules: dict[str, Any] = {"compute": torch.float32, "terms": 4, "safety": 8.0}

    def rest(x: Any) -> Any:
        return 1 - torch.softmax(x, -1)[:, :1]

    strict, lenient = (
        expected_outputs(rest, inputs, [torch.float32], floor=floor, generator=generator(), **rules)[0]
        for floor in (0.0, 1.0)
    )
    assert "wrong" in mismatch(rest(x), strict)[0]
    assert mismatch(rest(x), lenient)[0] == ""
    assert mismatch(rest(x) + 1e-5, lenient)[0]


def test_a_bias_within_every_limit_is_found() -> None:
    x = draw((64, 64), torch.float32, "normal", generator())
    one = limits_of(lambda x: x * 3, x=x)
    assert one.limit is not None
    problem, worst = mismatch((one.want + 0.9 * one.limit).float(), one)
    assert "biased" in problem
    assert worst < 1


@pytest.mark.parametrize(
    ("got", "want", "right"),
    [
        (math.nan, math.nan, True),
        (math.nan, 1.0, False),
        (1.0, math.nan, False),
        (math.inf, math.inf, True),
        (-math.inf, math.inf, False),
        (math.inf, 1e39, True),
        (3.4028234e38, 1e39, True),
        (1e30, 1e39, False),
        (math.inf, 1.0, False),
        (0.0, 1e-40, True),
    ],
)
def test_numbers_that_are_none(got: float, want: float, right: bool) -> None:
    want64 = torch.tensor([want], dtype=torch.float64)
    limit = torch.full((1,), torch.finfo(torch.float32).smallest_normal, dtype=torch.float64)
    problem, _ = mismatch(torch.tensor([got]), ExpectedOutput(want64, torch.float32, limit))
    assert (problem == "") is right


def test_integers_have_to_be_equal() -> None:
    one = ExpectedOutput(torch.tensor([1, 2]), torch.int64, None)
    assert mismatch(torch.tensor([1, 2]), one) == ("", 0.0)
    assert "1 of 2" in mismatch(torch.tensor([1, 3]), one)[0]


def test_a_reference_with_other_outputs_is_named() -> None:
    with pytest.raises(ValueError, match="returns 2 outputs, the definition lists 1"):
        limits_of(lambda x: (x, x), x=torch.ones(2))
    with pytest.raises(ValueError, match="must return tensors"):
        limits_of(lambda x: 3, x=torch.ones(2))


# --- the arena ---


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(3, 5), (7,), (2, 3, 4), (), (0, 4), (1, 1)])
def test_a_slot_holds_its_tensor(layout: str, shape: tuple[int, ...]) -> None:
    x = draw(shape, torch.float32, "normal", generator())
    arena = build_arena({"x": x}, {}, {"x": layout}, random.Random(1))
    view = arena.slots[0].view(arena.block)
    assert torch.equal(view, x)
    assert view.stride() == strides_of(shape, layout)
    if layout == "offset" and x.numel():
        assert view.data_ptr() % 64 == (arena.block.data_ptr() + 4) % 64


def test_layouts_are_what_they_say() -> None:
    assert strides_of((3, 5), "contiguous") == (5, 1)
    assert strides_of((3, 5), "transposed") == (1, 3)
    assert strides_of((3, 5), "padded") == (8, 1)


@pytest.mark.parametrize("seed", range(6))
def test_every_stray_byte_is_noticed(seed: int) -> None:
    rng = random.Random(seed)
    inputs = {
        "a": draw((4, 6), torch.float16, "normal", generator()),
        "b": draw((3,), torch.int64, "", generator()),
    }
    y = torch.zeros(4, 5)
    arena = build_arena(inputs, {"y": y}, {"a": "padded", "y": "padded"}, rng, shift=seed)
    size = arena.block.numel()
    owners: dict[int, str] = {}
    for slot in arena.slots:
        marked = torch.zeros(size, dtype=torch.uint8)
        whole = {2: "int16", 4: "int32", 8: "int64"}[getattr(torch, slot.dtype).itemsize]
        replace(slot, dtype=whole).view(marked).fill_(-1)  # all bits of all of its elements
        for place in marked.nonzero()[:, 0].tolist():
            owners[place] = slot.name
    for place in rng.sample(range(size), 60) + [s.offset for s in arena.slots]:
        after = bytearray(arena.data())
        after[place] ^= 1
        result, stray = changed_bytes(arena, bytes(after))
        owner = owners.get(place)
        if owner == "y":
            assert (result, stray) == ([], 0)
        elif owner is None:
            assert (result, stray) == ([], 1)
        else:
            assert (result, stray) == ([owner], 0)


def test_outputs_begin_as_nan_and_canaries_guard_both_ends() -> None:
    arena = build_arena({"x": torch.ones(3)}, {"y": torch.full((2,), math.nan)}, {}, random.Random(0))
    x, y = arena.slots
    assert y.view(arena.block).isnan().all()
    assert x.offset >= GUARD_BYTES
    assert arena.block.numel() >= y.offset + 8 + GUARD_BYTES


# --- draws ---


@pytest.mark.parametrize("regime", [*VALUE_REGIMES, *DERIVED_REGIMES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_regime_gives_what_it_promises(regime: str, dtype: Any) -> None:
    x = draw((64, 64), dtype, regime, generator())
    assert (tuple(x.shape), x.dtype) == ((64, 64), dtype)
    assert x.isnan().any() == (regime == "nan")
    assert x.isinf().any() == (regime == "inf")
    least = torch.finfo(dtype).smallest_normal
    if regime == "denormal":
        assert ((x != 0) & (x.abs().double() < least)).any()
    if regime == "offset":
        assert 4 < float(x.double().mean()) < 6
    if regime == "spiked":
        assert float(x.double().abs().max()) > 30


def test_hidden_draws_have_each_axis_small_and_large_beside_each_other(tmp_path: Path) -> None:
    """A grid by another axis' size, a second step of a loop and rows of one element show at such sizes alone."""
    problem, draws = NativeProblem(load_pack("softmax"), tmp_path), generator()
    cases = [problem.case(None, DrawSpec("spiked", "contiguous", draws)).sizes or {} for _ in range(16)]
    for four in (cases[n : n + 4] for n in range(0, 16, 4)):
        assert {(one["M"] >= 17, one["N"] >= 66) for one in four} == {(a, b) for a in (0, 1) for b in (0, 1)}
    assert {1, 130} < {one["N"] for one in cases}


def test_intermediate_results_that_cancel_grow_with_the_inputs(tmp_path: Path) -> None:
    """A gradient by log-sum-exp is right, though its logits are thousands and its sum has lost what is below 1e-4."""
    problem, draws = NativeProblem(load_pack("cross_entropy"), tmp_path), generator()
    for _ in range(60):
        case = problem.case({"B": 8, "V": 2}, DrawSpec("large", "contiguous", draws))
        logits, target = case.tensors["logits"].float(), case.tensors["target"]
        total = logits.logsumexp(-1)
        grad = (logits - total[:, None]).exp()
        grad[torch.arange(8), target] -= 1
        loss = total - logits[torch.arange(8), target]
        assert case.check([loss, (grad / 8).bfloat16()])[0] is None


def test_a_twin_differs_in_a_few_places() -> None:
    x = draw((64, 64), torch.float32, "normal", generator())
    share = float((perturb_values(x, generator(3)) != x).double().mean())
    assert 0.03 < share < 0.1
    assert perturb_values(torch.ones(1), generator()).tolist() == [1.0]


# --- skeletons ---


def test_nested_arguments_survive() -> None:
    held: dict[str, Any] = {}
    value = (torch.ones(2), {"a": [torch.zeros(1), 3], "b": None}, 2.5, "s", True)
    back = decode_arguments(encode_arguments(value, held), held)
    assert back[0] is held["t0"]
    assert back[1]["a"][1:] == [3]
    assert (back[1]["b"], back[2:]) == (None, (2.5, "s", True))
    with pytest.raises(RecordError, match="object"):
        encode_arguments(object(), {})


# --- hints and verdicts ---


def test_hints_name_the_line() -> None:
    hints = static_hints("import gc\nx = 1\nexec('1')\ntry:\n    pass\nexcept Exception:\n    pass\n")
    assert [h.partition(":")[0] for h in hints] == ["line 1", "line 3", "line 4"]
    assert static_hints("# import gc; exec()\n'''torch.cuda.Stream'''\n") == ()
    assert "cannot be parsed" in static_hints("def (")[0]


@pytest.mark.parametrize(
    ("codes", "judgement", "outcome"),
    [
        ([], Judgement.ACCEPTED, Outcome.OK),
        ([ReasonCode.WRONG_VALUES], Judgement.REJECTED, Outcome.INCORRECT),
        ([ReasonCode.FAILS], Judgement.REJECTED, Outcome.RUNTIME_ERROR),
        ([ReasonCode.TIMEOUT], Judgement.REJECTED, Outcome.TIMEOUT),
        ([ReasonCode.CLOCK, ReasonCode.WRONG_VALUES], Judgement.SUSPICIOUS, Outcome.INFRASTRUCTURE),
        ([ReasonCode.HARNESS, ReasonCode.WRONG_VALUES], Judgement.INFRASTRUCTURE, Outcome.INFRASTRUCTURE),
    ],
)
def test_only_a_candidates_own_fault_is_a_label(
    codes: list[ReasonCode], judgement: Judgement, outcome: Outcome
) -> None:
    verdict = SolutionVerdict("p", "s", tuple(Reason(c, "why") for c in codes))
    assert (verdict.judgement, verdict.outcome) == (judgement, outcome)
    assert verdict.to_json()["outcome"] == str(outcome)


def test_a_result_of_inputs_that_cancel_when_moved_keeps_its_limit() -> None:
    """exp(x - max) is off by eps/2 (max - x), whatever a move of both against each other shows."""
    generator = torch.Generator().manual_seed(0)
    x = torch.tensor([[36.9, -36.7]]).repeat(2000, 1)
    (one,) = expected_outputs(
        lambda x: torch.softmax(x, -1),
        {"x": x},
        [torch.float32],
        compute=torch.float32,
        terms=2,
        safety=8.0,
        generator=generator,
    )
    honest = one.want[:, 1] * (36.9 + 36.7) * 2.0**-24
    assert (one.limit[:, 1] < honest).double().mean() < 0.01


# --- bits, and variants beside their base ---


def test_bits_are_compared_and_not_values() -> None:
    one = torch.tensor([[1.0, float("nan")], [0.0, 4.0]])
    assert same_bits(one, one.clone())
    assert same_bits(one, one.t().contiguous().t()), "strides do not matter"
    minus = one.clone()
    minus[1, 0] = -0.0
    assert torch.equal(minus[1], one[1])
    assert not same_bits(minus, one)


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(4, dtype=torch.int32),
        torch.zeros(2, 2),
        torch.zeros(3),
        torch.tensor([0.0, 0.0, 0.0, 1e-45]),
    ],
)
def test_another_dtype_shape_or_byte_is_another_tensor(other: torch.Tensor) -> None:
    assert not same_bits(torch.zeros(4), other)


def test_tensors_without_elements_or_dimensions() -> None:
    assert same_bits(torch.empty(0, 3), torch.empty(0, 3))
    assert not same_bits(torch.empty(0, 3), torch.empty(0, 4))
    assert same_bits(torch.tensor(True), torch.tensor(True))
    assert raw_bytes(torch.tensor(1, dtype=torch.int32)).tolist() == [1, 0, 0, 0]


def test_bytes_of_a_contiguous_tensor_are_its_own() -> None:
    tensor = torch.zeros(2, 2)
    raw_bytes(tensor)[:] = 255
    assert bool(tensor.isnan().all())
    raw_bytes(tensor.t())[:] = 0
    assert bool(tensor.isnan().all()), "of any other, a copy's"


PLACES = torch.arange(192, dtype=torch.float64).reshape(3, 64)
EXACT = PLACES.sin() * torch.tensor([[1.0], [10.0], [100.0]])


@pytest.mark.parametrize(
    ("dtype", "error", "factor", "rounded", "worst", "said"),
    [
        (torch.float16, 1.2e-3, 1.0, False, 0.46429, ""),
        (torch.float16, 4e-3, 1.0, False, 0.99212, "error 0.123, allowed 0.0689: biased"),
        (torch.float16, 4e-3, 1.0, True, 0.89943, ""),
        (torch.float16, 4e-3, None, False, 0.57097, "error 0.122, allowed 0.0904: biased"),
        (torch.float16, 4e-3, 1.054, False, 0.57097, "error 0.122, allowed 0.0904: biased"),
        (torch.float16, 4e-3, 1.052, False, 0.16892, ""),
        (torch.float32, 2e-5, 1.0, False, 1.82979, "81 of 192 elements are wrong; the first at (0, 1)"),
        (torch.float32, 2e-5, None, False, 2.69075, "115 of 192 elements are wrong; the first at (0, 1)"),
    ],
)
@pytest.mark.parametrize("most", [1 << 16, 128, 48], ids=["whole", "some rows", "parts of rows"])
def test_limits_beside_a_base(
    monkeypatch: pytest.MonkeyPatch,
    most: int,
    dtype: torch.dtype,
    error: float,
    factor: float | None,
    rounded: bool,
    worst: float,
    said: str,
) -> None:
    """As they were worked out once: a wider run that is exact, rounded in the kernel, too far away, or none."""
    monkeypatch.setitem(_ELEMENTS_BESIDE_BASE, "cpu", most)
    base = (EXACT * (1 + (1e-3 if dtype is torch.float16 else 1e-6) * (3 * PLACES).cos())).to(dtype)
    got = (base.double() * (1 + error * (7 * PLACES).sin())).to(dtype)
    wide = None if factor is None else factor * EXACT.to(dtype if rounded else torch.float64)
    problem, largest = compare_with_base(got, base, wide)
    assert largest == pytest.approx(worst, rel=1e-3)
    assert said in problem
    assert bool(said) == bool(problem)


def test_what_a_base_gives_is_right_however_far_its_wider_run_is_from_it() -> None:
    base = EXACT.reshape(-1).half()
    base[100] += 10
    assert compare_with_base(base, base, EXACT.reshape(-1)) == ("", pytest.approx(1 / 1.001))


@pytest.mark.parametrize("special", [math.nan, math.inf, 7e4])
def test_a_special_number_has_to_be_where_its_base_has_one(
    monkeypatch: pytest.MonkeyPatch, special: float
) -> None:
    monkeypatch.setitem(_ELEMENTS_BESIDE_BASE, "cpu", 48)
    wide = EXACT.clone()
    wide[1, 55] = special
    base, odd = EXACT.half(), wide.half()
    assert compare_with_base(odd, odd, wide) == ("", pytest.approx(0.23762, rel=1e-3))
    for own, expected, exact in ((odd, base, EXACT), (base, odd, wide)):
        problem, _ = compare_with_base(own, expected, exact)
        assert problem.startswith("1 of 192 elements are wrong; the first at (1, 55)")


@pytest.mark.parametrize("shape", [(), (1,), (4, 0), (2, 3, 4)])
def test_outputs_of_any_shape_are_compared(shape: tuple[int, ...]) -> None:
    base = torch.ones(shape)
    assert compare_with_base(base.clone(), base, base.double())[0] == ""
    assert bool(compare_with_base(base + 1, base, base.double())[0]) == bool(base.numel())


def test_whole_numbers_have_to_be_equal() -> None:
    base = torch.arange(200_000).reshape(2, -1)
    assert compare_with_base(base.clone(), base, None) == ("", 0.0)
    got = base.clone()
    got[1, 99_999] = -3
    assert compare_with_base(got, base, None)[0].endswith("the first at (1, 99999) is -3, expected 199999")
