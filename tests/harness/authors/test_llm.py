"""Proposals of a model behind a real HTTP server: prompts by style, answers of every kind, what they cost."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from forecast_autotune.errors import RecordError, SettingsError
from forecast_autotune.records import Outcome
from forecast_autotune.settings import Settings
from forecast_autotune.variants.records import Origin
from forecast_harness.authors import llm, open_author
from forecast_harness.authors.llm import LLMAuthor, extract_note, extract_source, open_llm_author, prompt
from forecast_harness.records import Node, NodeResult, ProposalRequest, SearchTarget
from tests.harness.authors.chat_model import StubModel
from tests.harness.authors.proposal_examples import NATIVE_SOFTMAX, code_block, node, pack_target, request
from tests.harness.cuda_kernels.declared_kernel import SOURCE, cuda_node, cuda_target, declared
from tests.harness.variant_kernels import DOUBLE, search_target, subject, vector_call
from tests.integrations.models.faulty_server import FaultyServer

TARGET, SEED = pack_target("softmax")


def ask(
    model: StubModel, folder: Path, *asked: ProposalRequest, target: SearchTarget = TARGET, **settings: Any
) -> list[Any]:
    """What a proposer answers to requests in turn, one text at a time."""
    with FaultyServer(model) as server:
        proposer = opened(server, folder, target, **settings)
        return [proposer.propose(one) for one in asked]


def opened(server: FaultyServer, folder: Path, target: SearchTarget = TARGET, **settings: Any) -> LLMAuthor:
    spec = f"{server.url}?model=m&kind=chat&attempts=1&concurrency=1&price_prompt=10&price_output=100"
    return open_llm_author(spec, target, settings=Settings(cache_dir=folder, **settings))


def test_answers_become_nodes_with_author_note_and_cost(tmp_path: Path) -> None:
    model = StubModel(
        code_block(NATIVE_SOFTMAX.format(-1)),
        code_block(NATIVE_SOFTMAX.format(1), "The same\n by another axis."),
    )
    (answer,) = ask(model, tmp_path, request(TARGET, SEED, style="rewrite", n=2))
    assert [n.source for n in answer.nodes] == [NATIVE_SOFTMAX.format(-1), NATIVE_SOFTMAX.format(1)]
    assert [n.provenance.note for n in answer.nodes] == ["One native operation.", "The same by another axis."]
    assert all(n.parents == (SEED.id,) and n.arm == "it/rewrite" for n in answer.nodes)
    made = answer.nodes[0].provenance
    assert (made.origin, made.author.split()[0]) == (Origin.LLM, "m")
    assert len(made.prompt_sha256) == 64
    assert answer.spent.tokens == 2 * 120
    assert answer.spent.money == pytest.approx(2 * (100 * 10 + 20 * 100) / 1e6)
    assert (answer.problem, answer.exhausted) == ("", False)


@pytest.mark.parametrize(
    ("first", "complaint"),
    [
        ("I would rather not.", "it holds no code block that defines run"),
        (
            code_block("import torch\n\ndef softmax(x):\n    return x\n"),
            "it holds no code block that defines run",
        ),
        (code_block("def run(x:\n    return x\n"), "the source is not Python"),
        (
            code_block(NATIVE_SOFTMAX.replace("run(x)", "run(x, out)")),
            "run is called with the arguments x by name; it has x, out",
        ),
        (code_block(SEED.source), "the source is the one that was given"),
        ("```python\ndef run(x):\n    return x.exp(", "is not closed"),
    ],
)
def test_a_broken_rule_is_told_once(first: str, complaint: str, tmp_path: Path) -> None:
    model = StubModel(first, code_block(NATIVE_SOFTMAX.format(-1)))
    (answer,) = ask(model, tmp_path, request(TARGET, SEED, style="rewrite", n=1))
    assert [n.source for n in answer.nodes] == [NATIVE_SOFTMAX.format(-1)]
    assert answer.spent.tokens == 2 * 120
    told = model.prompts[1]
    assert told.startswith(model.prompts[0].rstrip()), "the whole first turn stands before it"
    assert first.strip() in told
    assert complaint in told


def test_a_model_that_never_learns_is_given_up(tmp_path: Path) -> None:
    model = StubModel("No.")
    (answer,) = ask(model, tmp_path, request(TARGET, SEED, style="rewrite", n=3))
    assert answer.nodes == ()
    assert len(model.prompts) == 6, "three texts and one second turn each"
    assert "no code block that defines run" in answer.problem
    assert answer.spent.tokens == 6 * 120


@pytest.mark.parametrize("bad", [None, ""])
def test_errors_and_empty_texts_are_problems(bad: str | None, tmp_path: Path) -> None:
    model = StubModel(bad)
    (answer,) = ask(model, tmp_path, request(TARGET, SEED, style="rewrite", n=2))
    assert (answer.nodes, answer.exhausted) == ((), False)
    assert ("HTTP 500" if bad is None else "an empty answer") in answer.problem
    assert not list(tmp_path.rglob("*.json")), "errors are not kept"


def test_an_error_is_asked_again_and_an_answer_is_not(tmp_path: Path) -> None:
    asked = request(TARGET, SEED, style="rewrite", n=1)
    model = StubModel(None, code_block(NATIVE_SOFTMAX.format(-1)), None)
    with FaultyServer(model) as server:
        answers = [opened(server, tmp_path).propose(asked) for _ in range(3)]
    assert [len(a.nodes) for a in answers] == [0, 1, 1]
    assert answers[2].nodes == answers[1].nodes, "also in another process: it is read from the disk"
    assert answers[2].spent.tokens == answers[1].spent.tokens == 120, "what it cost is told again"
    assert len(model.prompts) == 2


def test_what_is_missing_of_an_answer_is_asked_for_later(tmp_path: Path) -> None:
    asked = request(TARGET, SEED, style="rewrite", n=2)
    model = StubModel(code_block(NATIVE_SOFTMAX.format(-1)), None, code_block(NATIVE_SOFTMAX.format(1)))
    first, second = ask(model, tmp_path, asked, asked)
    assert [len(first.nodes), len(second.nodes)] == [1, 2]
    assert len(model.prompts) == 3
    assert second.spent.tokens == 2 * 120


def test_known_sources_are_left_out(tmp_path: Path) -> None:
    known = node(TARGET, NATIVE_SOFTMAX.format(-1))
    asked = request(TARGET, SEED, style="rewrite", n=1, known=[known])
    (answer,) = ask(StubModel(code_block(NATIVE_SOFTMAX.format(-1))), tmp_path, asked)
    assert (answer.nodes, "nothing new" in answer.problem) == ((), True)


def test_a_budget_holds(tmp_path: Path) -> None:
    asked = request(TARGET, SEED, style="rewrite", n=1)
    model = StubModel(code_block(NATIVE_SOFTMAX.format(-1)))
    (answer,) = ask(model, tmp_path, asked, llm_max_tokens=1)
    assert "FORECAST_AUTOTUNE_LLM_MAX_TOKENS" in answer.problem
    assert not model.prompts


def test_requests_may_come_side_by_side(tmp_path: Path) -> None:
    model = StubModel(*(code_block(NATIVE_SOFTMAX.format(i)) for i in range(2, 10)))
    found: list[Any] = []
    with FaultyServer(model) as server:
        proposer = opened(server, tmp_path)
        threads = [
            threading.Thread(
                target=lambda s=s: found.append(
                    proposer.propose(request(TARGET, SEED, style="rewrite", n=2, seed=s))
                )
            )
            for s in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [a.spent.tokens for a in found] == [240] * 4, "each hears of its own cost only"
    assert len({n.id for a in found for n in a.nodes}) == 8


def test_specifications_are_checked() -> None:
    for spec in ("llm:nonsense", "llm:http://127.0.0.1:1/v1", "llm:vllm:m"):
        with pytest.raises(SettingsError):
            open_author(spec, TARGET)


# --- styles ---


def judged(outcome: Outcome, feedback: str = "", **more: Any) -> NodeResult:
    return NodeResult(outcome, feedback=feedback, **more)


def failing(text: str, note: str = "tried tiles") -> Any:
    return node(TARGET, f"def run(x):\n    return {text}\n", parents=[SEED], note=note)


def test_every_prompt_states_the_problem_and_the_parent() -> None:
    broken = failing("y")
    told = {
        SEED.id: judged(Outcome.OK, log2_ratio=0.0),
        broken.id: judged(Outcome.INCORRECT, "element 3 is wrong"),
    }
    asked = request(TARGET, SEED, failures=[broken], judged=told, score=-1.0)
    for style in llm.STYLES:
        text = llm.prompt(asked, style)
        assert TARGET.statement.strip() in text
        assert SEED.source.strip() in text
        assert "2 times as fast as the first one" in text
        assert text == llm.prompt(asked, style), "the same for equal requests"
        assert ("element 3 is wrong" in text) == (style == "repair")


@pytest.mark.parametrize(
    ("outcome", "wanted"),
    [
        (Outcome.COMPILE_ERROR, "Repair it so that it compiles"),
        (Outcome.RUNTIME_ERROR, "Repair it so that it compiles"),
        (Outcome.INCORRECT, "Find out why its results are wrong"),
        (Outcome.OK, "It is right, and not faster"),
    ],
)
def test_repairs_go_stage_by_stage(outcome: Outcome, wanted: str) -> None:
    broken = failing("y")
    told = {broken.id: judged(outcome, "said so", log2_ratio=0.5 if outcome is Outcome.OK else None)}
    text = llm.prompt(request(TARGET, SEED, failures=[broken], judged=told), "repair")
    every = (
        "Repair it so that it compiles",
        "Find out why its results are wrong",
        "It is right, and not faster",
    )
    assert [w in text for w in every] == [w == wanted for w in every]
    assert "said so" in text


def test_a_style_that_cannot_be_asked_is_a_rewrite(tmp_path: Path) -> None:
    model = StubModel(code_block(NATIVE_SOFTMAX.format(-1)))
    ask(model, tmp_path, *(request(TARGET, SEED, style=s, n=1) for s in ("repair", "nonsense", "rewrite")))
    assert len(set(model.prompts)) == 1


def test_a_repaired_source_names_both_parents(tmp_path: Path) -> None:
    broken = failing("y")
    told = {broken.id: judged(Outcome.INCORRECT)}
    model = StubModel(code_block(NATIVE_SOFTMAX.format(1)))
    asked = request(TARGET, SEED, style="repair", n=1, failures=[broken], judged=told)
    (repaired,) = ask(model, tmp_path, asked)
    assert repaired.nodes[0].parents == (SEED.id, broken.id)


# --- CUDA sources ---


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


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (SOURCE, "is the one that was given"),
        (BETTER.partition("*/\n")[2], "needs one launch comment"),
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


# --- from an answer to a source ---


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


def test_notes_are_one_printable_line() -> None:
    assert (
        extract_note(f"<think>hm</think>First\x00 this,\nthen that.\n{code_block('', '')}")
        == "First this, then that."
    )
    assert len(extract_note("word " * 200)) <= 300


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("x, out, n", "x, out, count"), "must have its runtime parameters"),
        (("import triton\n", "import triton\nimport os\n"), "os"),
        (("BLOCK: tl.constexpr", "BLOCK: tl.constexpr, MORE: tl.constexpr"), "MORE of kernel has no value"),
        (("def kernel", "def other"), "no code block that defines kernel"),
    ],
)
def test_kernels_keep_their_contract(change: Sequence[str], said: str) -> None:
    target = search_target(subject(DOUBLE, vector_call()))
    parent = node(target, DOUBLE)
    assert extract_source(code_block(DOUBLE.replace("2 *", "3 *")), target, parent)
    with pytest.raises(RecordError, match=said):
        extract_source(code_block(DOUBLE.replace(*change)), target, parent)
