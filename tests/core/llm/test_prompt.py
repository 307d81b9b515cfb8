"""Prompts: what they hold, what they share, and what keeps them short."""

from __future__ import annotations

import math

from forecast_autotune.llm.bins import BINS
from forecast_autotune.llm.prompt import (
    MAX_DIFF_CHARS,
    MAX_SOURCE_CHARS,
    Neighbour,
    ProblemDescription,
    ReferenceTime,
    forecast_prompt,
    shown,
    sizes_text,
    truncate_middle,
    variant_text,
)
from forecast_autotune.records import Argument, Candidate, Config, Device, Kernel, Problem

PROBLEM = Problem.of(
    Kernel("scale", source="def scale(x, n, B: tl.constexpr):\n    pass\n"),
    [
        Argument("x", "tensor", "float16", (64, 128), (128, 1), True),
        Argument("n", "scalar", "i32", value=8192),
        Argument("y", "none"),
    ],
    Device("NVIDIA H200", arch="90", multiprocessors=132),
    toolchain={"triton": "3.6.0"},
)
CONFIG = Candidate(Config.of({"B": 128}))
REFERENCE = ReferenceTime(-3.0, shown(CONFIG), measured=True)


def test_prefix_is_shared_and_suffixes_end_where_the_letter_follows() -> None:
    prompt = forecast_prompt(
        ProblemDescription(PROBLEM), [shown(CONFIG), shown(CONFIG, {"ms": 0.25})], REFERENCE
    )
    assert prompt.prefix.endswith("\n")
    assert [s.rsplit("\n", 1)[1] for s in prompt.suffixes] == ["Bin:", "Bin:"]
    assert "ms=0.25" in prompt.suffixes[1]
    assert prompt.labels == BINS.labels


def test_prefix_says_sizes_device_and_reference() -> None:
    prefix = forecast_prompt(ProblemDescription(PROBLEM, work="3 GFLOP"), ["x"], REFERENCE).prefix
    for text in (
        "float16 [64x128], strides [128, 1]",
        "n: i32 = 8192",
        "y: None",
        "132 multiprocessors",
        "triton 3.6.0",
        "0.125 ms (measured)",
        "3 GFLOP",
        "def scale",
    ):
        assert text in prefix


def test_neighbours_are_shown_with_their_bin() -> None:
    near = [Neighbour("B=64", math.log2(1.25)), Neighbour("B=8192", None), Neighbour("B=32", 0.0, "n=64")]
    prefix = forecast_prompt(ProblemDescription(PROBLEM), ["x"], REFERENCE, near).prefix
    assert "B=64: I (1.25)" in prefix
    assert "B=8192: P (fails)" in prefix
    assert "B=32 at n=64, against the fastest there: F (1.00)" in prefix


def test_long_sources_lose_their_middle_only() -> None:
    source = "head\n" + "x = 1\n" * 5000 + "tail"
    short = truncate_middle(source, MAX_SOURCE_CHARS)
    assert len(short) <= MAX_SOURCE_CHARS
    assert short.startswith("head")
    assert short.endswith("tail")
    assert "characters left out" in short
    assert truncate_middle("short", MAX_SOURCE_CHARS) == "short"


def test_a_small_change_is_a_diff_and_a_new_kernel_is_shown_whole() -> None:
    base = "".join(f"line {i}\n" for i in range(60))
    small = variant_text(base, base.replace("line 7\n", "line seven\n"), "B=1")
    assert "-line 7\n+line seven" in small
    assert "line 40" not in small
    other = variant_text(base, "something else\n", "B=1")
    assert other.startswith("Other kernel:")
    assert len(variant_text(base, "y\n" * 9000, "B=1")) < MAX_DIFF_CHARS + 100


def test_sizes_name_the_scalars_or_the_key() -> None:
    assert sizes_text(PROBLEM) == "n=8192"
    assert sizes_text(Problem.of(PROBLEM.kernel, [], PROBLEM.device, key=("64", "128"))) == "64,128"
