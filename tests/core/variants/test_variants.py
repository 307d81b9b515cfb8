"""For which calls a check admits a variant, and which calls are drawn to check it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forecast_autotune.errors import RecordError
from forecast_autotune.records import Argument, Candidate, Config, Kernel, Problem
from forecast_autotune.variants import admission, admitted, covers, signature_of
from forecast_autotune.variants.signature import (
    INTERPRETER,
    memory_span,
    stride_structure,
    strides_from_structure,
)
from forecast_harness.targets.kernels.grids import GridSample, fit_grid, sizes_of
from forecast_harness.targets.kernels.sizes import CallSizes
from tests.core.variants.varied import CPU, H200, SUM, arguments, check, problem, variant

# --- what a check holds for ---


def test_a_call_may_hand_its_arguments_over_in_another_order() -> None:
    turned = dataclasses.replace(problem(), arguments=tuple(reversed(problem().arguments)))
    assert covers(signature_of(problem()), turned)


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"arguments":1}', '{"arguments":[],"sizes":7}'])
def test_a_signature_that_cannot_be_read_covers_nothing(text: str) -> None:
    assert not covers(text, problem())
    assert not covers(text, Problem("x", Kernel("double"), (), H200))


def drawn_signature(*calls: Sequence[Argument]) -> str:
    return CallSizes.of(calls).signature(["out"])


def test_a_check_at_drawn_sizes_holds_for_other_sizes_of_the_form() -> None:
    signature = drawn_signature(arguments(4096))
    assert all(covers(signature, problem(n)) for n in (2, 16, 17, 4096, 5000))
    assert not covers(signature, problem(1)), "Triton specialises on 1"
    assert not covers(signature, problem(0))
    assert not covers(signature, problem(2**31 + 8)), "offsets of 32 bits were never put to the test"
    assert not covers(signature, problem(4096, dtype="float16"))
    matrix = drawn_signature(arguments(512, rows=64))
    assert covers(matrix, problem(100, rows=7))
    assert not covers(matrix, problem(100))


def test_sizes_that_were_equal_have_to_be() -> None:
    def call(rows: int, inner: int, columns: int) -> list[Argument]:
        a = Argument("a", "tensor", "float16", (rows, inner), (inner, 1), True)
        b = Argument("b", "tensor", "float16", (inner, columns), (columns, 1), True)
        numbers = {"M": rows, "N": columns, "K": inner, "stride_am": inner, "total": rows * inner, "flag": 3}
        scalars = [Argument(name, "scalar", "i32", value=v) for name, v in numbers.items()]
        return [a, b, *scalars, Argument("scale", "scalar", "fp32", value=inner**-0.5)]

    def asked(*sizes: int) -> Problem:
        return Problem("", Kernel("mm"), tuple(call(*sizes)), H200)

    square, text = drawn_signature(call(64, 64, 64)), drawn_signature(call(64, 64, 64), call(32, 48, 80))
    assert covers(square, asked(128, 128, 128))
    assert not covers(square, asked(128, 64, 256)), "a variant may mix up what was always equal"
    assert covers(text, asked(128, 64, 256))

    def changed(name: str, **values: Any) -> Problem:
        results = [dataclasses.replace(a, **values) if a.name == name else a for a in call(128, 64, 256)]
        return Problem("", Kernel("mm"), tuple(results), H200)

    wrong = {"M": 127, "total": 8191, "stride_am": 65, "flag": 4, "scale": 0.5}
    assert not any(covers(text, changed(name, value=value)) for name, value in wrong.items())
    assert not covers(text, changed("a", stride=(72, 1)))
    assert not covers(text, changed("b", shape=(64, 255)))


def test_admission_asks_for_source_device_and_call() -> None:
    signature = drawn_signature(arguments())
    good = variant(SUM, check(signature))
    assert admitted(good, problem(100))
    assert admission(good, problem(100)) == good.checks[0]
    assert not admitted(variant(SUM), problem(100)), "nothing was checked"
    assert not admitted(good, problem(100, sha="6" * 64)), "another base source"
    assert not admitted(good, problem(100, dtype="bfloat16"))
    assert not admitted(good, problem(100, device=CPU))
    assert not admitted(variant(SUM, check(signature, device="another")), problem(100))


def test_the_interpreters_check_serves_interpreted_calls_alone() -> None:
    signature = drawn_signature(arguments())
    interpreted = variant(SUM, check(signature, device=INTERPRETER))
    assert admitted(interpreted, problem(100, device=CPU))
    assert not admitted(interpreted, problem(100))


def test_a_failure_outweighs_what_passed() -> None:
    signature = drawn_signature(arguments())
    early, late = "2026-01-01T00:00:00", "2026-01-02T00:00:00"
    failed = check(signature, passed=False, at=late)
    assert not admitted(variant(SUM, check(signature, at=early), failed), problem(100))
    assert not admitted(variant(SUM, failed, check(signature, at=late)), problem(100)), "in the same second"
    again = check(signature, at="2026-01-03T00:00:00")
    assert admitted(variant(SUM, failed, again), problem(100)), "mended, and verified anew"
    wrong = check(signature, passed=False, device=INTERPRETER)
    assert not admitted(variant(SUM, check(signature, at=late), wrong), problem(100))
    other = check(drawn_signature(arguments(dtype="float16")), passed=False, at=late)
    assert admitted(variant(SUM, check(signature, at=early), other), problem(100)), "wrong for halves only"


# --- drawing sizes ---


@st.composite
def calls(draw: st.DrawFn) -> list[Argument]:
    """Tensors of a few shared sizes, some padded or turned, and scalars that follow them, or do not."""
    sizes = draw(st.lists(st.sampled_from([1, 3, 16, 24, 64, 96, 1000]), min_size=1, max_size=3))
    results: list[Argument] = []
    for name in "abc"[: draw(st.integers(1, 3))]:
        shape = tuple(draw(st.sampled_from(sizes)) for _ in range(draw(st.integers(1, 3))))
        order = draw(st.permutations(range(len(shape))))
        stride, within = [0] * len(shape), 1
        for i in order:
            stride[i] = 0 if draw(st.integers(0, 9)) == 0 else within
            within *= shape[i] if stride[i] else 1
            within += draw(st.sampled_from([0, 0, 8]))
        results.append(Argument(name, "tensor", "float16", shape, tuple(stride), draw(st.booleans())))
    for place, value in enumerate((*sizes, results[0].stride[0], 7)):
        results.append(Argument(f"n{place}", "scalar", "i32", value=value))
    results.append(Argument("eps", "scalar", "fp32", value=draw(st.sampled_from([0.0, 1e-5, 0.125]))))
    results.append(Argument("MODE", "constexpr", value="fast"))
    return results


@settings(max_examples=150)
@given(call=calls(), seed=st.integers(0, 2**20))
def test_what_is_drawn_is_covered(call: list[Argument], seed: int) -> None:
    try:
        sizes = CallSizes.of([call])
    except RecordError:
        assert any(stride_structure(a) is None for a in call if a.kind == "tensor")
        return
    signature = sizes.signature()
    assert covers(signature, Problem("", Kernel("k"), tuple(call), H200)) or any(
        s.recorded < 1 for s in sizes.sizes
    )
    try:
        drawn = sizes.draw(random.Random(seed), most=1 << 20)
    except RecordError:
        return  # a padded or fixed tensor that is too large
    assert covers(signature, Problem("", Kernel("k"), drawn, H200))
    assert [a.name for a in drawn] == [a.name for a in call]
    for a, b in zip(call, drawn, strict=True):
        if a.kind == "tensor":
            assert stride_structure(a) == stride_structure(b)
            assert strides_from_structure(b.shape, stride_structure(b) or []) == b.stride
            assert memory_span(b) <= 1 << 20


def test_every_size_is_large_once_and_small_once_whatever_is_drawn() -> None:
    for alone in (False, True):
        sizes = CallSizes.of([arguments(512, rows=64)])
        if alone:
            sizes = sizes.with_classes({s: s.recorded for s in sizes.varied if s.recorded == 64})
        for seed in range(20):
            drawn = [
                sizes.draw(random.Random(seed), most=1 << 20, reach=1000, turn=turn)[0].shape[1]
                for turn in range(sizes.draw_kinds)
            ]
            assert min(drawn) <= 32
            assert max(drawn) >= 400


def test_sizes_that_a_kernel_needs_as_multiples() -> None:
    sizes = CallSizes.of([arguments(512, rows=64)])
    tight = sizes.with_classes({s: "128" if s.recorded == 512 else s.recorded for s in sizes.varied})
    drawn = [tight.draw(random.Random(i), most=1 << 16)[0].shape for i in range(30)]
    assert {rows for rows, _ in drawn} == {64}
    assert all(columns % 128 == 0 for _, columns in drawn)
    assert covers(tight.signature(), problem(1280, rows=64))
    assert not covers(tight.signature(), problem(1281, rows=64))
    assert not covers(tight.signature(), problem(1280, rows=65))
    assert not sizes.frozen().varied


def test_a_size_that_is_a_multiple_in_every_case_hangs_together() -> None:
    def call(n: int) -> list[Argument]:
        wide = Argument("wide", "tensor", "float16", (8, 2 * n), (2 * n, 1), True)
        return [wide, Argument("out", "tensor", "float16", (8, n), (n, 1), True)]

    def asked(wide: int, n: int) -> Problem:
        first, second = call(n)
        first = dataclasses.replace(first, shape=(8, wide), stride=(wide, 1))
        return Problem("", Kernel("k"), (first, second), H200)

    three = drawn_signature(call(64), call(80), call(500))
    assert covers(three, asked(20, 10))
    assert not covers(three, asked(30, 10))
    assert covers(drawn_signature(call(64)), asked(30, 10)), "one case is no evidence"
    assert not covers(CallSizes.of([call(64)], evidence=1).signature(), asked(30, 10))


def test_a_size_that_is_a_scalar_times_another_hangs_together() -> None:
    """Heads, and keys that a group of them shares; the group happens to equal the batch, too."""

    def call(batch: int, keys: int, group: int) -> list[Argument]:
        heads = Argument("q", "tensor", "float16", (batch, keys * group), (keys * group, 1), True)
        shared = Argument("k", "tensor", "float16", (batch, keys), (keys, 1), True)
        return [heads, shared, Argument("group", "scalar", "i32", value=group)]

    sizes = CallSizes.of([call(4, 8, 4), call(1, 32, 1)], evidence=1)
    for seed in range(20):
        q, k, group = sizes.draw(random.Random(seed), most=1 << 16)
        assert group.value == 4
        assert q.shape == (k.shape[0], 4 * k.shape[1])
    signature = sizes.signature()
    assert covers(signature, Problem("", Kernel("k"), tuple(call(9, 5, 4)), H200))
    assert not covers(signature, Problem("", Kernel("k"), tuple(call(9, 5, 3)), H200))


def test_a_scalar_can_be_told_from_a_size_that_it_equals() -> None:
    call = [*arguments(512, rows=4), Argument("group", "scalar", "i32", value=4)]
    tied = CallSizes.of([call])
    loose = tied.untied("group")
    assert {
        a.value for i in range(20) for a in loose.draw(random.Random(i), most=4096) if a.name == "group"
    } == {4}
    request = Problem("", Kernel("k"), (*arguments(512, rows=9), call[-1]), H200)
    assert covers(loose.signature(), request)
    assert not covers(tied.signature(), request)


def test_calls_of_a_users_own_say_what_they_have_in_common() -> None:
    def call(n: int, eps: float) -> list[Argument]:
        return [*arguments(n, rows=8), Argument("eps", "scalar", "fp32", value=eps)]

    def asked(n: int, eps: float, rows: int = 8) -> Problem:
        return Problem(
            "", Kernel("k"), (*arguments(n, rows=rows), Argument("eps", "scalar", "fp32", value=eps)), H200
        )

    mixed = CallSizes.observed([call(16, 1e-5), call(33, 1e-5), call(70, 1e-5)]).signature()
    assert covers(mixed, asked(1000, 1e-5))
    assert not covers(mixed, asked(1000, 1e-6)), "eps never changed"
    assert not covers(mixed, asked(1000, 1e-5, rows=9)), "the rows never changed"
    whole = CallSizes.observed([call(16, 1e-5), call(32, 1e-4)]).signature()
    assert covers(whole, asked(160, 0.5))
    assert not covers(whole, asked(161, 0.5))
    with pytest.raises(RecordError, match="must agree in"):
        CallSizes.observed([arguments(16), arguments(16, dtype="float16")])


# --- launch grids from what was recorded ---


def recorded(shapes: Sequence[tuple[int, int]], grid: Any) -> list[GridSample]:
    results = []
    for rows, columns in shapes:
        sizes = sizes_of(arguments(columns, rows=rows))
        for block in (32, 64, 128):
            for split in (1, 4):
                meta = {"BLOCK": block, "SPLIT": split}
                results.append(GridSample(sizes, meta, grid(rows, columns, block, split)))
    return results


@pytest.mark.parametrize(
    "grid",
    [
        lambda m, n, b, s: (-(-n // b),),
        lambda m, n, b, s: (-(-m // b) * -(-n // b), s),
        lambda m, n, b, s: (m, -(-n // b), s),
        lambda m, n, b, s: (-(-m * n // b),),
        lambda m, n, b, s: (-(-n // (b * s)), 1),
        lambda m, n, b, s: (m * s,),
    ],
)
def test_a_grid_function_is_told_from_its_results(grid: Any) -> None:
    formula = fit_grid(recorded([(96, 1000), (40, 777)], grid))
    assert formula is not None
    for m, n, b, s in [(7, 5000, 64, 4), (300, 19, 32, 1), (1, 1, 128, 8)]:
        assert formula(arguments(n, rows=m), {"BLOCK": b, "SPLIT": s}) == grid(m, n, b, s)


def test_a_grid_may_turn_with_a_word() -> None:
    def grid(meta: dict[str, Any]) -> tuple[int, int]:
        tiles = -(-900 // meta["BLOCK"])
        return (7, tiles) if meta["ROWS_FIRST"] else (tiles, 7)

    sizes = sizes_of(arguments(900, rows=7))
    metas = [{"BLOCK": b, "ROWS_FIRST": first} for b in (32, 64, 256) for first in (True, False)]
    formula = fit_grid([GridSample(sizes, meta, grid(meta)) for meta in metas])
    assert formula is not None
    assert formula(arguments(100, rows=3), {"BLOCK": 64, "ROWS_FIRST": True}) == (3, 2)
    assert formula(arguments(100, rows=3), {"BLOCK": 64, "ROWS_FIRST": False}) == (2, 3)


def test_only_another_source_has_ir_of_its_own() -> None:
    from forecast_autotune.features.candidate_list import CandidateList
    from forecast_autotune.features.ttir.extraction import assignment_of

    config = Config.of({"B": 2, "A": 1})
    assert assignment_of(Candidate(config)) == "A=1,B=2"
    assert assignment_of(Candidate(config, "base hook 2")) == "A=1,B=2"
    assert assignment_of(Candidate(config, "llm-1")) == "llm-1|A=1,B=2"
    more = Config.of({"B": 2, "A": 1}, num_warps=8)
    listed = CandidateList(
        [Candidate(c, v) for v in ("base", "base hook 2", "llm-1") for c in (config, more)]
    )
    names, codes = listed.assignments
    assert names == ("A=1,B=2", "llm-1|A=1,B=2")
    assert codes.tolist() == [0, 0, 0, 0, 1, 1]
