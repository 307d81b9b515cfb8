"""CUDA sources in what language models write."""

from __future__ import annotations

from pathlib import Path

import pytest

from forecast_autotune.errors import RecordError
from forecast_harness.authors.llm_answers import apply_edits, extract_source
from forecast_harness.authors.llm_prompts import prompt
from forecast_harness.records import Node, SearchTarget
from tests.harness.authors.proposal_examples import request
from tests.harness.cuda_kernels.declared_kernel import SOURCE, cuda_node, cuda_target, declared

BETTER = SOURCE.replace("[128, 256]", "[512, 1024]")


@pytest.fixture
def target(tmp_path: Path) -> SearchTarget:
    return cuda_target(declared(tmp_path))


@pytest.fixture
def parent(target: SearchTarget) -> Node:
    return cuda_node(target, SOURCE)


@pytest.mark.parametrize("fence", ["cpp", "cuda", "c++", ""])
def test_the_block_with_the_kernel_is_the_source(target: SearchTarget, parent: Node, fence: str) -> None:
    answer = f"More threads.\n```cpp\nint other;\n```\nand\n```{fence}\n{BETTER}```\n"
    assert extract_source(answer, target, parent) == BETTER


def test_edits_apply_to_cuda_too(target: SearchTarget, parent: Node) -> None:
    answer = "<<<<<<< SEARCH\nTHREADS = [128, 256]\n=======\nTHREADS = [512, 1024]\n>>>>>>> REPLACE\n"
    assert apply_edits(answer, target, parent) == BETTER


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (SOURCE, "is the one that was given"),
        (BETTER.partition("*/\n")[2], "needs one launch comment"),
        ('#include "/etc/passwd"\n' + BETTER, "is refused"),
        (BETTER.replace("[512, 1024]", "512"), "must be a list of different integers"),
    ],
)
def test_a_model_is_told_which_rule_its_source_breaks(
    target: SearchTarget, parent: Node, source: str, said: str
) -> None:
    with pytest.raises(RecordError, match=said):
        extract_source(f"```cpp\n{source}```\n", target, parent)


def test_a_model_is_asked_for_cuda(target: SearchTarget, parent: Node) -> None:
    pytest.importorskip("jinja2")
    text = prompt(request(target, parent), "rewrite")
    assert "```cpp\n/* launch" in text
    assert "void twice(const float* x, float* y, int n)" in text
    assert "warp shuffles" in text
