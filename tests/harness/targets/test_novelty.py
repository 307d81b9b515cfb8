"""What counts as the same program, and what must not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from forecast_autotune.variants.records import Origin, Provenance
from forecast_harness.records import Node
from forecast_harness.targets.novelty import (
    NoveltyFilter,
    canonical_tokens,
    node_identity,
    shingles,
    signature,
)

KERNEL = '''
import triton
import triton.language as tl


@triton.jit
def helper(x, y):
    return x * y + 1.0


@triton.jit
def kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """Adds one."""
    pid = tl.program_id(0)
    offs_m = pid * BLOCK + tl.arange(0, BLOCK)
    mask = offs_m < n  # the tail
    # load
    x = tl.load(x_ptr + offs_m, mask=mask, other=0.0)
    y = tl.load(y_ptr + offs_m, mask=mask, other=0.0)
    tl.store(y_ptr + offs_m, helper(x, y), mask=mask)


CONFIGS = [{"kwargs": {"BLOCK": 128}, "num_warps": 4}]
'''
RENAMED = '''
import triton.language as tl
import triton

# this comment moved to the top, and nothing else happened
@triton.jit
def kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """Another docstring."""
    which = tl.program_id(0)
    where = which * BLOCK + tl.arange(0, BLOCK)
    inside = where < n
    first = tl.load(x_ptr + where, other=0.0, mask=inside)
    second = tl.load(y_ptr + where, mask=inside, other=0.0)  # load
    tl.store(y_ptr + where, helper(first, second), mask=inside)

@triton.jit
def helper(left: float, right: float) -> float:
    return left * right + 1.0


CONFIGS = [{"kwargs": {"BLOCK": 128}, "num_warps": 4}]
'''
NEW = {
    "a tile size": ('"BLOCK": 128', '"BLOCK": 256'),
    "the number of warps": ('"num_warps": 4', '"num_warps": 8'),
    "a literal in the kernel": ("other=0.0)\n    y", "other=1.0)\n    y"),
    "swapped operands": ("helper(x, y)", "helper(y, x)"),
    "another operator": ("x * y + 1.0", "x * y - 1.0"),
    "another function": ("tl.load(x_ptr + offs_m, mask", "tl.math.load(x_ptr + offs_m, mask"),
    "a new option": ("other=0.0)\n    y", 'other=0.0, eviction_policy="evict_first")\n    y'),
    "another pointer": ("tl.load(x_ptr +", "tl.load(y_ptr +"),
    "a constexpr less": ("BLOCK: tl.constexpr", "BLOCK"),
    "another decorator": ("@triton.jit\ndef helper", "@triton.jit(noinline=True)\ndef helper"),
}
CUDA = """
#include <cuda_fp16.h>
#define TILE 32
// adds
__global__ void add(const float* __restrict__ x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;  /* one each */
    float sum = 0.0f;
    if (i < n) { sum = __expf(x[i]) + TILE; y[i] = sum; }
}
"""


def node(source: str, language: str = "triton") -> Node:
    return Node(node_identity("t", language, source), source, language, (), Provenance(Origin.LLM))


def similarity(a: Sequence[str], b: Sequence[str]) -> float:
    """Jaccard similarity of two token sequences' counted 5-grams: shared over all, 0 to 1."""
    one, two = Counter(shingles(a)), Counter(shingles(b))
    return (one & two).total() / (one | two).total()


def changed(old: str, new: str, text: str = KERNEL) -> str:
    assert old in text
    return text.replace(old, new, 1)


def test_comments_docstrings_and_layout_make_no_new_id() -> None:
    other = changed("    # load\n", "\n\n").replace("  # the tail", "").replace('"""Adds one."""', '"""!"""')
    assert node_identity("t", "triton", KERNEL) == node_identity("t", "triton", other)
    assert node_identity("t", "triton", KERNEL) == node_identity("t", "triton", KERNEL.replace("128", "0x80"))


def test_the_target_and_the_language_are_part_of_an_id() -> None:
    ids = {node_identity(t, language, KERNEL) for t in ("t", "u") for language in ("triton", "torch", "cuda")}
    assert len(ids) == 6


def test_local_names_make_a_new_id_but_nothing_new() -> None:
    """Both halves of the rule: an id is exact, novelty is not fooled by a paraphrase."""
    assert node_identity("t", "triton", KERNEL) != node_identity("t", "triton", RENAMED)
    novelty = NoveltyFilter()
    assert novelty.add(node(KERNEL)) is None
    assert novelty.add(node(KERNEL)) == (node(KERNEL).id, "the same program")
    assert novelty.add(node(RENAMED)) == (node(KERNEL).id, "the same up to names and order of definitions")


@pytest.mark.parametrize("what", NEW)
def test_one_change_that_a_compiler_sees_is_new(what: str) -> None:
    novelty = NoveltyFilter()
    assert novelty.add(node(KERNEL)) is None
    assert novelty.add(node(changed(*NEW[what]))) is None


def test_statements_in_another_order_are_new() -> None:
    x, y = (f"    {v} = tl.load({v}_ptr + offs_m, mask=mask, other=0.0)\n" for v in "xy")
    assert signature("triton", changed(x + y, y + x)) != signature("triton", KERNEL)


@pytest.mark.parametrize("lines", [10, 100, 400])
def test_no_threshold_below_one_tells_a_changed_constant_from_a_paraphrase(lines: int) -> None:
    """The reason for the rule: the longer the source, the closer to 1 a real experiment comes."""
    body = "".join(f"    a = a * {i} + tl.load(p + {i})\n" for i in range(lines))
    source = f"def kernel(p, a):\n{body}    return a\n"
    one, two = (canonical_tokens("triton", s) for s in (source, source.replace("* 3 +", "* 999 +")))
    assert 1.0 - 20 / len(one) < similarity(one, two) < 1.0
    assert similarity(one, canonical_tokens("triton", source.replace("a", "b").replace("lob", "loa"))) == 1.0
    assert signature("triton", source) != signature("triton", source.replace("* 3 +", "* 999 +"))


def test_names_that_callers_use_are_not_renamed() -> None:
    """A parameter that is passed by keyword, or named in a config, is part of the interface."""
    by_keyword = "def f(a, b):\n    return a - b\n\ndef g(x):\n    return f(a=x, b=1)\n"
    swapped = by_keyword.replace("a - b", "b - a")
    assert signature("torch", by_keyword) != signature("torch", swapped)
    config = 'def f(x, A, B):\n    return A - B\nCONFIGS = [{"A": 1, "B": 2}]\n'
    assert signature("triton", config) != signature("triton", config.replace("A - B", "B - A"))
    outer = "def f(x):\n    def g():\n        return x\n    return g\n"
    assert signature("torch", outer) == signature("torch", outer.replace("x", "value"))
    assert signature("torch", outer) != signature("torch", outer.replace("return x", "return y"))


def test_cuda_text_without_comments_and_with_other_variables_is_the_same() -> None:
    bare = changed("// adds\n", "", CUDA).replace("/* one each */", "").replace("    ", " ")
    assert node_identity("t", "cuda", bare) == node_identity("t", "cuda", CUDA)
    renamed = CUDA.replace("sum", "total").replace("int i ", "int at ").replace("[i]", "[at]")
    renamed = renamed.replace("(i <", "(at <")
    assert node_identity("t", "cuda", renamed) != node_identity("t", "cuda", CUDA)
    novelty = NoveltyFilter()
    assert novelty.add(node(CUDA, "cuda")) is None
    assert novelty.add(node(renamed, "cuda")) is not None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("TILE 32", "TILE 64"),
        ("__expf", "expf"),
        ("0.0f", "0.1f"),
        ("blockIdx.x", "blockIdx.y"),
        ("x[i]", "y[i]"),
        ("const float*", "float*"),
        ("#define TILE 32\n", "#define TILE\n32\n"),
    ],
)
def test_cuda_text_that_differs_for_the_compiler_is_new(old: str, new: str) -> None:
    novelty = NoveltyFilter()
    assert novelty.add(node(CUDA, "cuda")) is None
    assert novelty.add(node(changed(old, new, CUDA), "cuda")) is None


def test_strings_that_look_like_comments_are_none() -> None:
    source = 'void f() { char* s = "// not a comment /* nor this */"; }'
    assert node_identity("t", "cuda", source) != node_identity("t", "cuda", 'void f() { char* s = "' + '"; }')


@pytest.mark.parametrize("language", ["torch", "triton", "cuda", "tilelang"])
@pytest.mark.parametrize("source", ["def f(:\n  oops", "", "\x00", "f(" * 3000, "'unterminated"])
def test_text_that_is_no_program_has_an_id_all_the_same(source: str, language: str) -> None:
    novelty = NoveltyFilter()
    assert novelty.add(node(source, language)) is None
    assert novelty.add(node(source + "\n ", language)) is not None
    assert novelty.add(node(source + " more", language)) is None
