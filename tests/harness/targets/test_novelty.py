"""What counts as the same program, and what must not."""

from __future__ import annotations

import pytest

from forecast_harness.targets.novelty import node_identity

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
LOAD_X, LOAD_Y = (f"    {v} = tl.load({v}_ptr + offs_m, mask=mask, other=0.0)\n" for v in "xy")
NEW = {
    "a tile size": ('"BLOCK": 128', '"BLOCK": 256'),
    "the number of warps": ('"num_warps": 4', '"num_warps": 8'),
    "a literal in the kernel": ("other=0.0)\n    y", "other=1.0)\n    y"),
    "swapped operands": ("helper(x, y)", "helper(y, x)"),
    "statements in another order": (LOAD_X + LOAD_Y, LOAD_Y + LOAD_X),
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


def identity(source: str, language: str = "triton") -> str:
    return node_identity("t", language, source)


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


@pytest.mark.parametrize("what", NEW)
def test_one_change_that_a_compiler_sees_is_new(what: str) -> None:
    assert identity(changed(*NEW[what])) != identity(KERNEL)


def test_cuda_text_without_comments_is_the_same() -> None:
    bare = changed("// adds\n", "", CUDA).replace("/* one each */", "").replace("    ", " ")
    assert node_identity("t", "cuda", bare) == node_identity("t", "cuda", CUDA)


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
    assert identity(changed(old, new, CUDA), "cuda") != identity(CUDA, "cuda")


def test_strings_that_look_like_comments_are_none() -> None:
    source = 'void f() { char* s = "// not a comment /* nor this */"; }'
    assert node_identity("t", "cuda", source) != node_identity("t", "cuda", 'void f() { char* s = "' + '"; }')


@pytest.mark.parametrize("language", ["torch", "triton", "cuda", "tilelang"])
@pytest.mark.parametrize("source", ["def f(:\n  oops", "", "\x00", "f(" * 3000, "'unterminated"])
def test_text_that_is_no_program_has_an_id_all_the_same(source: str, language: str) -> None:
    known = identity(source, language)
    assert identity(source + "\n ", language) == known != identity(source + " more", language)
