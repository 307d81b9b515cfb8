"""A target in words, as every kind of author reads it."""

from __future__ import annotations

import pytest

from forecast_autotune.records import Argument, Config, Device
from forecast_harness.targets.statement import CONFIGS_RULES, WORKED_EXAMPLES, kernel_statement

X = Argument("x", "tensor", "bfloat16", (4096, 8192), (8192, 1))


@pytest.mark.parametrize(
    ("device", "said", "unsaid"),
    [
        (Device("NVIDIA H200", "cuda", "90"), "67,108,864 bytes of tensors, 14 us to move them once", ""),
        (Device("cpu", "cpu"), "x: bfloat16[4096, 8192]", WORKED_EXAMPLES),
        (None, "x: bfloat16[4096, 8192]", "bytes of tensors"),
    ],
)
def test_a_kernel_is_told_with_its_bytes_their_time_the_dialect_and_examples(
    device: Device | None, said: str, unsaid: str
) -> None:
    text = kernel_statement("fn", "SOURCE", [[X]], [Config.of({"BLOCK": 64})], device)
    assert said in text
    assert not unsaid or unsaid not in text
    assert all(rule in text for rule in CONFIGS_RULES)
    assert text.rstrip().endswith("```")
