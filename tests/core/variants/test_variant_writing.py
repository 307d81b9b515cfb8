"""What becomes of a language model's answers: variants with their origin, or refusals with a reason."""

from __future__ import annotations

import hashlib

import pytest

from forecast_autotune.errors import RecordError
from forecast_autotune.records import Config, Device
from forecast_autotune.variants import Origin
from forecast_harness.authors.llm_writing import WritingBrief, build_prompt, read_answer, write_variants
from tests.core.variants.varied import BASE, NOTE, SHA, SUM, arguments

CALLS = [arguments(4096, dtype="float16")]
BRIEF = WritingBrief(
    "double", SHA, BASE, Device("NVIDIA H200", "cuda", "90", 132), CALLS, [Config.of({"BLOCK": 128})]
)
FENCED = f"Adds instead of multiplying, as additions are cheaper.\n\n```python\n{SUM}```\nGood luck!"
WITH_CONFIGS = SUM.replace("@triton", 'CONFIGS = [{"kwargs": {"BLOCK": 64}, "num_warps": 2}]\n\n\n@triton')


def refusal(answer: str) -> str:
    with pytest.raises(RecordError) as error:
        read_answer(answer, BRIEF, NOTE)
    return str(error.value)


def test_an_answer_becomes_a_variant_with_its_origin() -> None:
    requests: list[tuple[str, int]] = []

    def writer(text: str, n: int) -> list[str]:
        requests.append((text, n))
        return [FENCED]

    written = write_variants(writer, BRIEF, 4, author="model-7")
    (variant,) = written.variants
    assert requests == [(build_prompt(BRIEF), 4)]
    assert (variant.kernel, variant.base_sha256, variant.source) == ("double", SHA, SUM)
    assert variant.name.startswith("llm-adds-instead-of-multiplying-")
    result = variant.provenance
    assert (result.origin, result.author, result.parent) == (Origin.LLM, "model-7", "")
    assert result.prompt_sha256 == hashlib.sha256(build_prompt(BRIEF).encode()).hexdigest()
    assert result.note == "Adds instead of multiplying, as additions are cheaper."
    assert result.at.startswith("20")
    assert variant.checks == ()


def test_configs_of_an_answer_are_its_own() -> None:
    (variant,) = write_variants(lambda text, n: [f"```\n{WITH_CONFIGS}```"], BRIEF, 1).variants
    assert variant.configs == (Config.of({"BLOCK": 64}, num_warps=2),)


def test_nonsense_is_refused_one_by_one() -> None:
    answers = [
        "I am sorry, I cannot help with that.",
        FENCED,
        "```python\ndef double(x, out, n, BLOCK):\n    pass\n```",
        f"```python\n{BASE}```",
        FENCED.replace("Good luck!", "You are welcome."),
        f"```python\n{SUM}```\nor\n```python\n{WITH_CONFIGS}```",
        f"```python\nimport os\n{SUM}```",
        "```python\nimport triton\n@triton.jit\ndef double(x, out, n, BLOCK\n```",
        f"```python\n{SUM.replace('x, out, n', 'out, x, n')}```",
        "",
        "\x00```\ud800```",
    ]
    written = write_variants(lambda text, n: answers, BRIEF, len(answers))
    assert len(written.variants) == 1
    assert len(written.refused) == len(answers) - 1
    message = "\n".join(written.refused)
    for number, reason in [
        (1, "no code blocks that define double"),
        (3, "must be a @triton.jit function"),
        (4, "the same code as the base"),
        (5, "the same code as the base or an earlier answer"),
        (6, "2 code blocks"),
        (7, "not os"),
        (8, "is not Python"),
        (9, "in this order"),
        (10, "no code blocks"),
        (11, "no code blocks"),
    ]:
        assert any(line.startswith(f"answer {number}:") and reason in line for line in written.refused), (
            message
        )


def test_code_without_a_fence_is_enough() -> None:
    assert read_answer(SUM, BRIEF, NOTE).source == SUM
    assert "no code blocks" in refusal(f"Here it is: {SUM} and ``` then nothing")


def test_what_the_writer_raises_reaches_the_caller() -> None:
    def writer(text: str, n: int) -> list[str]:
        raise ConnectionError("no model there")

    with pytest.raises(ConnectionError, match="no model there"):
        write_variants(writer, BRIEF, 1)


def test_the_prompt_says_what_a_writer_needs() -> None:
    text = build_prompt(BRIEF)
    for part in (
        BASE.strip(),
        "NVIDIA H200",
        "132 multiprocessors",
        "float16[4096]",
        "BLOCK=128",
        "(x, out, n)",
    ):
        assert part in text
    assert build_prompt(BRIEF) == text
    assert "not recorded" in build_prompt(WritingBrief("double", SHA, BASE))


def test_a_note_is_one_printable_line() -> None:
    noisy = FENCED.replace("Adds instead", "Adds\x1b[31m\n\ninstead")
    (variant,) = write_variants(lambda text, n: [noisy], BRIEF, 1).variants
    assert variant.provenance.note.startswith("Adds [31m instead of")
