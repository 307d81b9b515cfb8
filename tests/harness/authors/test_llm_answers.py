"""From a model's answer to a source: blocks, edits that must fit exactly once, rules that can be read off."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from forecast_autotune.errors import RecordError
from forecast_harness.authors.llm_answers import apply_edits, extract_note, extract_source
from forecast_harness.records import SearchTarget, TargetKind
from tests.harness.authors.proposal_examples import (
    NATIVE_SOFTMAX,
    code_block,
    node,
    pack_target,
    plain_target,
    search_replace_blocks,
)

TARGET, SEED = pack_target("softmax")


PARENT = """
import torch


def run(x):
    y = x + 1
    for i in range(2):
        y = y * 2
    z = x + 1
    return y + z
"""


def applied(*pairs: tuple[str, str]) -> str:
    target = plain_target()
    return apply_edits(search_replace_blocks(*pairs), target, node(target, PARENT))


def test_edits_are_applied_in_turn() -> None:
    """The second one searches for what the first one wrote."""
    found = applied(("    y = x + 1", "    y = x + 2"), ("    y = x + 2", "    y = x + 3"))
    assert "y = x + 3" in found
    assert "y = x + 1" not in found


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("    y = x + 1", "    y = x - 1", "    y = x - 1\n    for"),
        ("    y = x + 1   ", "    y = x - 1", "    y = x - 1\n    for"),
        ("y = y * 2", "y = y * 3\ny = y.neg()", "        y = y * 3\n        y = y.neg()\n    z"),
        ("            y = y * 2", "            y = y * 3", "        y = y * 3\n    z"),
        ("    z = x + 1\n    return y + z", "    return y + x + 1", "y * 2\n    return y + x + 1\n"),
        ("    for i in range(2):\n        y = y * 2", "", "    y = x + 1\n    z = x + 1\n"),
        ("```python\n    y = x + 1\n```", "```python\n    y = x - 1\n```", "    y = x - 1\n    for"),
    ],
)
def test_an_edit_fits_though_blanks_differ(old: str, new: str, expected: str) -> None:
    assert expected in applied((old, new))


@pytest.mark.parametrize(
    ("old", "said"),
    [
        ("= x + 1", "are not in the source"),
        ("    y = x + 7", "edit 1 searches for are not in the source: 'y = x . 7'"),
        ("", "searches for nothing"),
    ],
)
def test_an_edit_that_does_not_fit_is_refused(old: str, said: str) -> None:
    with pytest.raises(RecordError, match=said):
        applied((old, "    y = 0"))


def test_an_ambiguous_edit_is_refused() -> None:
    target = plain_target()
    twice = node(target, PARENT.replace("z = x + 1", "y = x + 1"))
    with pytest.raises(RecordError, match="occur 2 times: copy more of them"):
        apply_edits(search_replace_blocks(("    y = x + 1", "    y = 0")), target, twice)


# --- reading ---


def test_the_last_block_that_defines_the_entry_counts() -> None:
    drafts = (
        code_block(NATIVE_SOFTMAX.format(1))
        + code_block("def helper(x):\n    return x\n")
        + code_block(NATIVE_SOFTMAX.format(-1))
    )
    assert extract_source(
        f"<think>{code_block(NATIVE_SOFTMAX.format(7))}</think>{drafts}", TARGET, SEED
    ) == NATIVE_SOFTMAX.format(-1)
    assert extract_source(NATIVE_SOFTMAX.format(-1), TARGET, SEED) == NATIVE_SOFTMAX.format(-1), (
        "code and nothing else"
    )
    assert extract_source(
        code_block(NATIVE_SOFTMAX.format(-1)).replace("\n", "\r\n"), TARGET, SEED
    ) == NATIVE_SOFTMAX.format(-1)


def test_a_block_may_begin_behind_the_sentence() -> None:
    code = NATIVE_SOFTMAX.format(-1)
    assert extract_source(f"One native operation. ```python\n{code}```\n", TARGET, SEED) == code
    inline = f"It calls ```run```\n\n```python\n{code}```\n"
    assert extract_source(inline, TARGET, SEED) == code, "what ends a line is not always an opening"
    with pytest.raises(RecordError, match="is not closed"):
        extract_source(f"One native operation. ```python\n{code}", TARGET, SEED)


def test_a_whole_source_is_taken_where_edits_were_asked_for() -> None:
    answer = code_block(NATIVE_SOFTMAX.format(-1))
    assert apply_edits(answer, TARGET, SEED) == NATIVE_SOFTMAX.format(-1)
    line = SEED.source.strip().splitlines()[-1]
    both = answer + search_replace_blocks((line, "    return torch.softmax(x, 1)"))
    assert apply_edits(both, TARGET, SEED).endswith("softmax(x, 1)\n"), "edits count before it"
    with pytest.raises(RecordError, match="no block of the form"):
        apply_edits(code_block("def helper(x):\n    return x\n"), TARGET, SEED)


def test_notes_are_one_printable_line() -> None:
    assert (
        extract_note(f"<think>hm</think>First\x00 this,\nthen that.\n{code_block('', '')}")
        == "First this, then that."
    )
    assert len(extract_note("word " * 200)) <= 300


def test_arguments_may_be_optional_or_gathered() -> None:
    for head in ("run(x, chunk=64)", "run(x, *, chunk=64)", "run(**inputs)"):
        assert head in extract_source(
            code_block(NATIVE_SOFTMAX.format(-1).replace("run(x)", head)), TARGET, SEED
        )


KERNEL = """
import triton
import triton.language as tl


@triton.jit
def scale(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)
"""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("x, y, n", "x, y, count"), "must have its runtime parameters"),
        (("import triton\n", "import triton\nimport os\n"), "os"),
        (("def scale", "def other"), "no code block that defines scale"),
    ],
)
def test_kernels_keep_their_contract(change: Sequence[str], said: str) -> None:
    target = SearchTarget(TargetKind.KERNEL, "scale", "k" * 24, "triton", "scale", "", {})
    parent = node(target, KERNEL)
    assert extract_source(code_block(KERNEL.replace("* 2", "+ 0")), target, parent)
    with pytest.raises(RecordError, match=said):
        extract_source(code_block(KERNEL.replace(*change)), target, parent)
