"""Closed-form facts against the TTIR of the templates, fact by fact."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")


from forecast_autotune.features.trace import trace
from forecast_autotune.features.ttir.coalescing import coalesced_access_counts
from forecast_autotune.features.ttir.extraction import TtirFacts, extract_facts
from forecast_integrations.inductor.choices.geometry import (
    AttentionGeometry,
)
from forecast_integrations.inductor.choices.templates import attention_facts, closed_form
from tests.integrations.inductor import templates

SMS = 132
UNCHECKED = {"ops", "unknown_trips", "inactive_bytes", *coalesced_access_counts(0.0)}
UNCHECKED |= {f.name for f in dataclasses.fields(TtirFacts) if f.name.startswith("epilogue_")}
"""The text's length says nothing of the candidate; a closed form assumes no trips, whole lines and tiles, and
loops that keep more than the tile that leaves them."""


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")


def tensor(*shape: int, dtype: Any = torch.float16) -> Any:
    return torch.empty(shape, dtype=dtype, device="meta")


def assert_equal(
    got: TtirFacts, want: TtirFacts, *, loosely: tuple[str, ...] = (), within: float = 0.01
) -> None:
    """Every fact within one percent; those named, in the same power of two."""
    for field in dataclasses.fields(TtirFacts):
        if field.name in UNCHECKED:
            continue
        mine, theirs = getattr(got, field.name), getattr(want, field.name)
        if field.name == "dot_shapes":
            assert [shape[:3] for shape in mine] == [shape[:3] for shape in theirs]
            assert [s[3] for s in mine] == pytest.approx([s[3] for s in theirs])
        elif field.name in loosely:
            assert min(16.0, mine) == pytest.approx(min(16.0, theirs), rel=0.5), field.name
        else:
            assert mine == pytest.approx(theirs, rel=within, abs=1e-9), field.name


@pytest.mark.parametrize(
    ("block", "width"), list(itertools.product([(128, 64), (64, 32), (16, 64)], [64, 128]))
)
def test_flex_attention(block: tuple[int, int], width: int) -> None:
    m, n = block
    sizes = {"HQ": 16, "Q_LEN": 2048, "KV_LEN": 2048, "QK_HEAD_DIM": width, "V_HEAD_DIM": width}
    how = {"GQA_SHARED_HEADS": 1, "SM_SCALE": 0.125, "MASKED": True, "BLOCK_M": m, "BLOCK_N": n}
    how |= {"SPARSE_Q_BLOCK_SIZE": 128, "SPARSE_KV_BLOCK_SIZE": 128}
    q, index = tensor(2, 16, 2048, width), tensor(16, 16, dtype=torch.int32)
    text = trace(templates.flex_attention, (q, q, q, index, index, q), {}, sizes | how)
    geometry = AttentionGeometry(2, 16, 16, 2048, 2048, width, width, 16)
    found = closed_form(geometry, "triton::flex_attention", how, SMS)
    assert found.grid == (2048 // m, 2, 16)
    assert found.facts.iterations == 2048 / n
    # How many blocks the mask leaves is data, which TTIR does not hold: compared at its own guess.
    want = extract_facts(text, (), found.grid)
    assert want.unknown_trips == 1
    assert_equal(attention_facts(geometry, m, n, want.iterations), want, loosely=("mean_contiguous",))


def test_decoding_puts_the_heads_of_one_key_head_into_one_tile() -> None:
    geometry = AttentionGeometry(8, 32, 8, 1, 4096, 128, 128, 16)
    found = closed_form(geometry, "triton::flex_decoding", {"BLOCK_N": 64, "SPLIT_KV": 4}, SMS)
    assert found.grid == (8, 8, 4)
    assert found.facts.iterations == 4096 / 4 / 64
    assert found.facts.dot_shapes[0][:3] == (16, 64, 128)
