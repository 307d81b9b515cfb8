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
    _ELEMENT_FACTOR,
    _INTERMEDIATE_ROUNDINGS,
    _MOST_DEVIATION,
    _RMS_FACTOR,
    _ROUNDING_FACTOR,
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
    for _ in range(200):
        case = problem.case({"B": 8, "V": 2}, DrawSpec("large", "contiguous", draws))
        logits, target = case.tensors["logits"].float(), case.tensors["target"]
        total = logits.logsumexp(-1)
        grad = (logits - total[:, None]).exp()
        grad[torch.arange(8), target] -= 1
        loss = total - logits[torch.arange(8), target]
        assert case.check([loss, (grad / 8).bfloat16()])[0] is None


def test_other_seeds_give_other_numbers() -> None:
    one, same, other = (draw((8,), torch.float32, "normal", generator(n)) for n in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


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


SHAPES = ((), (1,), (7,), (0, 4), (5, 6, 7), (1000, 3), (70, 1000), (65536,), (2, 70000))


def is_same_calculation(plain: torch.Tensor, wide: torch.Tensor | None) -> bool:
    """Whether a wider run is the same calculation, rounded less."""
    if wide is None or wide.shape != plain.shape or not plain.is_floating_point():
        return False
    a, b = plain.double(), wide.double()
    finite = a.isfinite() & b.isfinite()
    if not finite.any():
        return False
    return bool(
        _rms(a[finite] - b[finite]) <= _MOST_DEVIATION * _rms(b[finite]) + torch.finfo(plain.dtype).tiny
    )


def expected_output(plain: torch.Tensor, wide: torch.Tensor | None) -> ExpectedOutput:
    """What an output must be, given the base's own and, if there is one, that of its wider run.

    All of the output's shape; `wide` is believed, see `is_same_calculation`.
    """
    dtype = plain.dtype
    if not dtype.is_floating_point:
        return ExpectedOutput(plain, dtype, None)
    base = plain.double()
    # Where the base overflows, a variant has to, too.
    want = base if wide is None else torch.where(base.isfinite() & wide.isfinite(), wide.double(), base)
    info = torch.finfo(dtype)
    scale = want.abs() + _row_rms(want)
    rounding = info.eps * want.abs()
    own = torch.full_like(want, 0.5 * info.eps)
    if wide is not None:
        # Rounded to the output's dtype, a result errs by a 24th of `rounding` squared, or more: the rest is
        # what intermediate results add.
        squares = ((base - want) ** 2 - rounding**2 / 24) / scale.clamp_min(info.tiny) ** 2
        squares = squares.nan_to_num(0, 0, 0)
        # A row of few terms, the first of a causal attention, may err far more than the others.
        own = torch.maximum(_row_means(squares), squares.mean()).clamp_min(0).sqrt()
    unit = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps / 2
    least = torch.full_like(want, info.smallest_normal)
    # A whole step: the wider run may be rounded as well, where the kernel says to which dtype.
    limit = (
        _ROUNDING_FACTOR * rounding + scale * (_ELEMENT_FACTOR * own + _INTERMEDIATE_ROUNDINGS * unit) + least
    )
    # What the base itself gives is right, however far the wider run is from it.
    limit = torch.maximum(limit, 1.001 * (base - want).abs().nan_to_num(0, 0, 0))
    if wide is not None and torch.equal(want.to(dtype).double().nan_to_num(), want.nan_to_num()):
        # Rounded in the kernel: results that differ do so by a step, and there is no mean to speak of.
        return ExpectedOutput(want, dtype, limit)
    typical = 0.35 * rounding + scale * (_RMS_FACTOR * own + 0.25 * _INTERMEDIATE_ROUNDINGS * unit) + least
    return ExpectedOutput(want, dtype, limit, typical)


def _row_rms(want: torch.Tensor) -> torch.Tensor:
    """The root mean square of every row, or of a vector as a whole."""
    return _row_means(want.nan_to_num(0, 0, 0).square()).sqrt()


def _row_means(values: torch.Tensor) -> torch.Tensor:
    if values.dim() == 0 or values.numel() == 0:
        return values
    return values.mean(-1, keepdim=True).expand_as(values)


def _rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt()) if values.numel() else 0.0


def whole(got: torch.Tensor, base: torch.Tensor, wide: torch.Tensor | None) -> tuple[str, float]:
    return mismatch(got, expected_output(base, wide if is_same_calculation(base, wide) else None))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_parts_say_what_the_whole_says(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    exact = torch.randn(shape, generator=generator, dtype=torch.float64)
    for special in (None, math.nan, math.inf, 7e4):
        wide = exact.clone()
        if special is not None and wide.numel():
            wide.reshape(-1)[wide.numel() // 2] = special
        base = wide.to(dtype)
        for error in (0.0, 1e-7, 3e-3):
            noise = torch.randn(shape, generator=generator, dtype=torch.float64)
            got = (base.double() * (1 + error * noise)).to(dtype)
            # Exact, rounded in the kernel, none, and another calculation.
            for other in (wide.float(), base.float(), None, 3 * wide.float()):
                problem, worst = compare_with_base(got, base, other)
                expected, most = whole(got, base, other)
                assert problem == expected
                assert worst == pytest.approx(most, rel=1e-9, nan_ok=True)


def test_what_is_wrong_is_found_at_its_place() -> None:
    base = torch.randn(40, 5000, generator=torch.Generator().manual_seed(1)).half()
    got = base.clone()
    got[31, 4321] += 1.0
    problem, worst = compare_with_base(got, base, base.float())
    assert problem.startswith("1 of 200000 elements are wrong; the first at (31, 4321) is ")
    assert worst > 1.0


def test_whole_numbers_have_to_be_equal() -> None:
    base = torch.arange(200_000).reshape(2, -1)
    assert compare_with_base(base.clone(), base, None) == ("", 0.0)
    got = base.clone()
    got[1, 99_999] = -3
    assert compare_with_base(got, base, None)[0].endswith("the first at (1, 99999) is -3, expected 199999")
