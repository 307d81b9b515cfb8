"""Forecast bytes against those that this Triton allocates, compiled here for the targets, a case for each rule."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from benchmarks.devices.compile_facts import (
    allocated,
    compared,
    device_of,
    isotonic,
    left_out_scores,
    lowered,
    summary_of,
)
from benchmarks.kernels.compile_facts import CASES
from forecast_autotune.features.candidate_list import CandidateList
from forecast_autotune.features.devices import device_spec
from forecast_autotune.features.inert_parameters import program_numbers
from forecast_autotune.features.trace import KernelTracer
from forecast_autotune.features.ttir.extraction import extract_facts
from forecast_autotune.policy import REFUSED
from forecast_autotune.records import Candidate, Config, Device
from forecast_integrations.triton.null_device import target_of
from forecast_integrations.triton.problem.describe import call_arguments

RELEASE = tuple(map(int, triton.__version__.split(".")[:2]))
TILE, WIDE = {"BM": 128, "BN": 128, "BK": 64}, {"BM": 256, "BN": 128, "BK": 32}
WIDER = {**TILE, "BN": 256}
HEAD = {"BM": 128, "BN": 128}


def layouts(text: str, device: Device, options: dict[str, Any]) -> str:
    """TTGIR, without where its lines come from."""
    return re.sub(r"loc\(.*|#loc.*", "", str(lowered(text, device, {"num_warps": 4, **options})[0]))


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")


@pytest.mark.parametrize(
    ("kernel", "target", "meta", "launches"),
    [
        # 1: loads of less than 4 bytes are buffered nowhere.
        ("matmul_fp16_1000", "cuda:80", TILE, [(4, 2), (4, 5)]),
        ("matmul_fp16_1000", "cuda:120", TILE, [(4, 2), (4, 5)]),
        ("matmul_fp16_1000", "cuda:90", TILE, [(4, 2), (4, 5)]),
        # Warp groups have a buffer per stage; fewer rows or warps have none of them.
        ("matmul_fp16", "cuda:90", {"BM": 64, "BN": 64, "BK": 32}, [(4, 3), (2, 4), (4, 1)]),
        ("matmul_fp16", "cuda:90", {"BM": 32, "BN": 64, "BK": 32}, [(4, 3)]),
        # Operands that are cast are copied for 64 rows, and cast in registers for fewer.
        ("matmul_weight_int8", "cuda:90", {"BM": 64, "BN": 64, "BK": 64}, [(4, 3)]),
        ("matmul_weight_int8", "cuda:90", {"BM": 16, "BN": 64, "BK": 64}, [(4, 3)]),
        ("attention_64", "cuda:90", {"BM": 64, "BN": 32}, [(4, 2)]),
        ("attention_64", "cuda:90", {"BM": 32, "BN": 64}, [(4, 3)]),
        ("matmul_masked_1000", "hip:gfx942", TILE, [(4, 2), (4, 5)]),
        # 2: attention without warp groups keeps Q and the scores in registers.
        ("attention_64", "cuda:80", HEAD, [(4, 1), (4, 3), (8, 4)]),
        ("attention_64", "cuda:120", HEAD, [(4, 2)]),
        ("attention_128_causal", "cuda:80", {"BM": 64, "BN": 64}, [(4, 2), (4, 3)]),
        # 3: products that no tensor core takes, and 16 warps.
        ("matmul_fp32_ieee", "cuda:90", TILE, [(4, 2), (8, 3)]),
        ("matmul_fp32_ieee", "cuda:100", TILE, [(4, 2)]),
        ("matmul_fp16", "cuda:100", TILE, [(16, 3), (4, 3), (8, 4)]),
        # 4: 8 bits along N are turned through one buffer; int32 tiles leave whole.
        ("matmul_fp8e5", "cuda:90", TILE, [(4, 2), (4, 5)]),
        ("matmul_fp8e5_k", "cuda:90", TILE, [(4, 3)]),
        ("matmul_int8", "cuda:90", TILE, [(8, 2), (4, 4)]),
        # Copies of computed right operands, and products with scales.
        ("chunked_state", "cuda:90", {"BK": 32, "BV": 64, "BT": 64}, [(2, 2), (2, 3)]),
        ("chunked_state", "cuda:100", {"BK": 128, "BV": 64, "BT": 64}, [(2, 3), (4, 3)]),
        ("chunk_scan", "cuda:100", TILE, [(4, 2), (8, 3)]),
        ("chunk_scan", "hip:gfx942", TILE, [(4, 2), (8, 5)]),
        # 11: a tile of fp16 that is stored as fp32 changes its layout.
        ("widen_rows", "cuda:90", {"BLOCK": 4096}, [(2, 2), (8, 2)]),
        ("widen_rows", "hip:gfx942", {"BLOCK": 4096}, [(1, 2), (4, 2)]),
        ("dot_scaled_mxfp8", "cuda:90", WIDER, [(4, 2), (8, 3)]),
        ("dot_scaled_mxfp8", "cuda:100", WIDER, [(4, 1), (8, 3)]),
        *([("dot_scaled_mxfp8", "hip:gfx1250", WIDER, [(4, 1), (8, 3)])] if RELEASE >= (3, 8) else []),
        *(
            [("chunked_state", "hip:gfx1250", {"BK": 64, "BV": 64, "BT": 64}, [(4, 3)])]
            if RELEASE >= (3, 8)
            else []
        ),
        # 5: two dots at four stages.
        ("attention_64", "hip:gfx942", HEAD, [(8, 3), (8, 4), (8, 5)]),
        # 7: a tile that is stored through a descriptor lies beside a loop's buffers.
        ("matmul_persistent_descriptors", "cuda:90", TILE, [(4, 3)]),
        ("matmul_persistent_descriptors", "cuda:100", TILE, [(4, 3)]),
        # 8: masked elements that become something else than 0.
        ("matmul_other", "cuda:80", TILE, [(4, 3)]),
        ("matmul_other", "cuda:90", TILE, [(4, 3)]),
        ("matmul_other", "cuda:100", TILE, [(4, 3)]),
        # 9: AMD's copies ahead, and targets that are no CDNA2.
        *([("matmul_fp16", "hip:gfx950", TILE, [(4, 2), (4, 3), (8, 4)])] if RELEASE >= (3, 8) else []),
        *([("matmul_int8", "hip:gfx950", TILE, [(4, 3)])] if RELEASE >= (3, 8) else []),
        *([("matmul_fp16_k", "hip:gfx1250", TILE, [(4, 3)])] if RELEASE >= (3, 8) else []),
        *([("matmul_fp16", "hip:gfx1250", {**TILE, "BN": 256}, [(8, 2)])] if RELEASE >= (3, 8) else []),
        ("matmul_fp16", "hip:gfx1100", TILE, [(4, 3)]),
        # Right operands that are loaded in their product's layout stay in registers where all warps lie along columns.
        ("matmul_persistent_turned", "hip:gfx1100", WIDER, [(4, 1), (4, 4), (8, 2)]),
        *([("matmul_persistent_turned", "hip:gfx950", WIDER, [(4, 4), (8, 2)])] if RELEASE >= (3, 8) else []),
        *([("matmul_persistent_turned", "hip:gfx1250", TILE, [(4, 2), (4, 4)])] if RELEASE >= (3, 8) else []),
        # Loads of operands into which indices enter wait in registers; the operands pass beside the buffers.
        ("matmul_packed", "hip:gfx942", TILE, [(4, 3), (8, 2)]),
        ("matmul_weight_int8", "hip:gfx942", TILE, [(4, 3)]),
        # Columns of a flattened loop have no known alignment on CDNA.
        ("matmul_persistent_descriptors", "hip:gfx942", TILE, [(4, 3), (8, 4)]),
        # 10: atomics, and descriptors that are rewritten.
        *([("matmul_split_k", "hip:gfx942", WIDE, [(4, 3), (8, 3)])] if RELEASE >= (3, 8) else []),
        ("matmul_descriptors_read", "hip:gfx942", TILE, [(4, 3)]),
        # 11: outside of loops.
        ("gather_rows", "hip:gfx942", {"BLOCK": 16384}, [(4, 2)]),
        ("histogram_rows", "cuda:90", {"BLOCK": 1024}, [(4, 2)]),
        ("cumsum_tile_0", "cuda:80", {"ROWS": 32, "BLOCK": 256}, [(2, 2), (8, 2)]),
        ("reduce_tile_0", "hip:gfx942", {"ROWS": 32, "BLOCK": 256}, [(8, 2)]),
        ("plus_turned_32", "hip:gfx942", {"ROWS": 128, "BLOCK": 64}, [(1, 2), (4, 2)]),
        ("plus_turned_32", "cuda:90", {"ROWS": 128, "BLOCK": 128}, [(1, 2), (4, 2)]),
        ("transpose_16", "cuda:120", {"ROWS": 64, "BLOCK": 64}, [(1, 2), (8, 2)]),
    ],
)
def test_forecast_bytes_are_what_the_compiler_allocates(
    kernel: str, target: str, meta: dict[str, int], launches: list[tuple[int, int]]
) -> None:
    rows = compared(kernel, CASES[kernel], device_of(target), [(meta, *launch) for launch in launches])
    for row in rows:
        assert abs(row["forecast"] - row["shared"]) <= max(128, 0.03 * row["shared"]), row
        assert row["fails"] or row["p_fail"] < REFUSED, row


@pytest.mark.parametrize(
    ("kernel", "target"),
    [
        *itertools.product(
            ("matmul_persistent_flat", "matmul_split_k", "attention_gradient"),
            ("cuda:80", "cuda:90", "cuda:100", "cuda:120", "hip:gfx942", "hip:gfx1100"),
        ),
        ("matmul_specialised", "cuda:100"),
        ("matmul_persistent_descriptors", "hip:gfx942"),
    ],
)
def test_what_fits_is_not_refused(kernel: str, target: str) -> None:
    """Kernels whose bytes the rules explain in part or not at all."""
    case = CASES[kernel]
    deep = [(dict(zip(case.tuned, case.values[-1], strict=True)), 8, stages) for stages in (2, 4)]
    assert summary_of(compared(kernel, case, device_of(target), deep))["fit_yet_refused"] == 0


def test_tensor_memory_beyond_its_columns_is_refused() -> None:
    """6: two accumulators of 256 columns each for twice 128 rows take 1,024."""
    case = CASES["matmul_gated"]
    (row,) = compared("gated", case, device_of("cuda:100"), [({"BM": 256, "BN": 256, "BK": 32}, 8, 2)])
    assert row["shared"] <= 232448
    assert row["fails"]
    assert row["p_fail"] >= REFUSED


@pytest.mark.parametrize(
    "target", ["cuda:80", "cuda:90", "hip:gfx942", "hip:gfx950", "cuda:100", "hip:gfx1100"]
)
@pytest.mark.parametrize("kernel", ["matmul_fp16_1000", "softmax_rows"])
def test_what_shares_a_number_is_one_program_on_every_target(kernel: str, target: str) -> None:
    """1, 13: stages of loads that nothing copies ahead, and of kernels without a pipeline, on AMD as well."""
    case, device = CASES[kernel], device_of(target)
    meta = {**dict(zip(case.tuned, case.values[1], strict=True)), **case.fixed}
    text = KernelTracer.of(case.fn, target_of(device)).text(case.arguments, meta)
    arguments = call_arguments(case.fn, dict(zip(case.fn.arg_names, case.arguments, strict=False)))
    known = extract_facts(text, arguments, (1024, 1, 1))
    listed = CandidateList.of([Candidate(Config.of({}, num_warps=4, num_stages=s)) for s in (2, 3, 4)])
    numbers = program_numbers(listed, lambda row: known, device_spec(device)).tolist()
    taken = [allocated(text, device, {"num_warps": 4, "num_stages": s}) for s in (2, 3, 4)]
    assert all(
        a == b
        for a, n in zip(taken, numbers, strict=True)
        for b, m in zip(taken, numbers, strict=True)
        if n == m
    )
    assert len(set(numbers)) == (
        1 if kernel == "softmax_rows" or target in ("cuda:80", "cuda:90", "hip:gfx942") else 3
    )


@pytest.mark.parametrize(
    ("kernel", "target", "programs"),
    [("matmul_fp16", "hip:gfx942", 4), ("matmul_fp16", "hip:gfx1100", 2), ("softmax_rows", "hip:gfx950", 1)],
)
def test_options_of_amds_compiler_make_programs_where_there_are_products(
    kernel: str, target: str, programs: int
) -> None:
    """13: they change no buffer of the loop, and nothing where a target has one shape of products or there is none."""
    case, device = CASES[kernel], device_of(target)
    meta = {**dict(zip(case.tuned, case.values[1], strict=True)), **case.fixed}
    text = KernelTracer.of(case.fn, target_of(device)).text(case.arguments, meta)
    options: list[dict[str, Any]] = [
        {},
        {"kpack": 2},
        {"matrix_instr_nonkdim": 16},
        {"schedule_hint": "attention"},
    ]
    assert len({allocated(text, device, {"num_warps": 4, "num_stages": 3, **o}) for o in options}) == 1
    listed = CandidateList.of([Candidate(Config.of(o, num_warps=4, num_stages=3)) for o in options])
    known = extract_facts(text, (), (1024, 1, 1))
    numbers = program_numbers(listed, lambda row: known, device_spec(device)).tolist()
    assert len(set(numbers)) == programs
    compiled = [layouts(text, device, o) for o in options]
    assert all(compiled[row] == compiled[numbers.index(n)] for row, n in enumerate(numbers))


def test_a_map_of_stated_probabilities_is_fitted_to_other_kernels() -> None:
    points, labels = np.array([0.1, 0.1, 0.5, 0.6, 0.9]), np.array([0.0, 0.0, 1.0, 0.0, 1.0])
    assert isotonic(points, labels, np.array([0.0, 0.1, 0.55, 0.99])).tolist() == [0.0, 0.0, 0.5, 1.0]
    ties = np.array([0.1, 0.2, 0.2])  # one point with two labels has their mean
    assert isotonic(ties, np.array([0.0, 0.0, 1.0]), ties).tolist() == [0.0, 0.5, 0.5]
    rows = [{"kernel": k, "p_fail": p, "fails": p > 0.5} for k in "ab" for p in (0.1, 0.6)]
    assert left_out_scores(rows) == {"stated": 0.085, "mapped": 0.0}
